"""`autoattn init`: write a shapes file to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoattn.cli import model as models
from autoattn.cli import options
from autoattn.errors import UsageError

EXAMPLES = (
    "Examples:\n\n[bold]autoattn init[/]\n\n[bold]autoattn init llama.yaml --model config.json --lengths 2048,8192[/]"
)


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = Path("shapes.yaml"),
    model: options.Model = None,
    lengths: options.Lengths = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="Of --model, in place of its config's.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Sequences of --model's problems; 1 if left out.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Of a group that share --model's sequences.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a shapes file with comments that explain every key: some problems to change, or those of a model.

    The file is ready for autoattn tune --shapes FILE.
    """
    from autoattn.cli import terminal
    from autoattn.shapes import starter_file

    if model is None:
        for name, given in (("--lengths", lengths), ("--dtype", dtype), ("--batch", batch), ("--ranks", ranks)):
            if given is not None:
                raise UsageError(f"{name} is a choice for --model, got no --model; add it, or edit the file")
        text, notes = starter_file.write(starter_file.STARTER), tuple[str, ...]()
    else:
        document, notes = models.document(model, dtype=dtype, batch=batch, lengths=lengths, ranks=ranks)
        about = [f"Model {terminal.printable(model)}.", *(f"Note: {terminal.printable(note)}." for note in notes), ""]
        text = starter_file.write(document, [*about, *starter_file.HEAD])
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already; name another file, or add --force to replace it") from None
    console = terminal.console()
    for note in notes:
        console.print(terminal.printable(f"Note: {note}."), soft_wrap=True)
    console.print(terminal.printable(f"{file}: next, autoattn tune --device auto --shapes {file}"), soft_wrap=True)
