"""The program: its commands, and what its exit codes mean.

Nothing heavy is imported before a command runs, so that help is there at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autoattn import __version__
from autoattn.cli import (
    ablate,
    bench,
    bench_model,
    bench_passes,
    bench_ranks,
    cache,
    devices,
    explain,
    init,
    render,
    report,
    show,
    tune,
    verify,
    warm,
)
from autoattn.cli.exit_codes import INTERRUPTED, PIPE_CLOSED
from autoattn.errors import AutoattnError

# Trouble with the place that was named, not with the program.
PLACE_ERRORS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.ENOENT,
    errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO,
}  # fmt: skip

# typer has carried its own copy of click since 0.26; this is the root of the parser's errors in either.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]


class Program(TyperGroup):
    """The commands, some of which have names of two words: `bench model` stands beside `bench SHAPES`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names, or the first two."""
        pair = " ".join(args[:2])
        return super().resolve_command(ctx, [pair, *args[2:]] if pair in self.commands else args)


app = typer.Typer(
    name="autoattn",
    cls=Program,
    help="Attention kernels that are generated, searched, validated and measured for your shapes and your GPU.",
    epilog="First steps: [bold]autoattn tune --device auto --shapes shapes.yaml[/], then [bold]autoattn show[/]."
    "\n\nExit codes: 0 done, 1 something failed or the cache is not as needed, 2 a mistake on the command line or in a "
    "shapes file, 130 interrupted.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def add(commands: typer.Typer, name: str, command: Callable[..., None], examples: str) -> None:
    """Adds a command, whose docstring is its help."""
    # Paragraphs on one line each: the terminal's width breaks them, not ours.
    paragraphs = [" ".join(text.split()) for text in (command.__doc__ or "").split("\n\n")]
    commands.command(name, help="\n\n".join(paragraphs), epilog=examples)(command)


COMMANDS = (
    init, tune, warm, show, explain, render, verify, report, bench, bench_model, bench_passes,
    bench_ranks, ablate, devices,
)  # fmt: skip
for module in COMMANDS:
    # The first underline stands for a space, another one for a dash.
    name = module.__name__.rpartition(".")[2].replace("_", " ", 1).replace("_", "-")
    add(app, name, module.command, module.EXAMPLES)

tools = typer.Typer(
    help="List, compare, merge, pack and prune caches.",
    epilog=cache.EXAMPLES,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, (command, examples) in cache.COMMANDS.items():
    add(tools, name, command, examples)
app.add_typer(tools, name="cache")


def print_version(wanted: bool) -> None:
    """Prints the version and stops, if it is wanted."""
    if wanted:
        print(f"autoattn {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and stop.")
    ] = False,
) -> None:
    """What stands before the command."""


def run(arguments: Sequence[str]) -> int:
    """Runs the program and returns its exit code; a mistake of the user becomes one sentence on stderr."""
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="autoattn", standalone_mode=False)
        sys.stdout.flush()
    except AutoattnError as error:
        return _say(str(error), error.exit_code)
    except CommandLineError as error:
        return _say(_of_command_line(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (autoattn show | head); keep Python from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in PLACE_ERRORS:
            raise
        return _say(_of_place(error), 1)
    if code == INTERRUPTED:  # from above, from tune, or typer's own answer to Ctrl-C
        return _say("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _say(sentence: str, code: int) -> int:
    line = " ".join(sentence.split())
    print("autoattn: " + "".join(sign if sign.isprintable() else "?" for sign in line), file=sys.stderr)
    return code


def _of_command_line(error: Exception) -> str:
    message = str(error.format_message()).replace("Value error, ", "")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "autoattn"
    return f"{message.rstrip('.')}; see {command} --help"


def _of_place(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}; free or name another place"
