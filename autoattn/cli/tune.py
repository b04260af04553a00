"""`autoattn tune`: search kernels for problems on a device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoattn.cli import options
from autoattn.cli.exit_codes import INTERRUPTED
from autoattn.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from autoattn.core.device import Device
    from autoattn.core.problem import Problem
    from autoattn.search.search_options import Options, Summary
    from autoattn.shapes.shapes_file import NamedProblem

EXAMPLES = (
    "Examples:\n\n[bold]autoattn tune --device a30 --shapes shapes.yaml[/]\n\n"
    "[bold]autoattn tune --device auto --shapes shapes.yaml --group prefill --effort quick --cache cache[/]\n\n"
    "[bold]autoattn tune --device auto --model config.json --lengths 2048,8192 --group prefill[/]\n\n"
    "[bold]autoattn tune --device h200 --dtype bf16 --heads 32 --seq-q 4096 --head-dim 128 --mask causal[/]\n\n"
    "[bold]autoattn tune --device auto --ranks 2 --model config.json --lengths 65536 --group training[/]"
)


def command(
    device: options.Device,
    shapes: options.Shapes = None,
    group: options.Groups = None,
    model: options.Model = None,
    lengths: options.Lengths = None,
    effort: Annotated[
        Literal["instant", "quick", "standard", "max"],
        typer.Option("--effort", help="How long to search; instant tries the templates' seeds alone."),
    ] = "standard",
    objective: Annotated[
        Literal["time", "energy", "error"],
        typer.Option("--objective", help="What the winner is to be best at; time decides between equals."),
    ] = "time",
    trials: Annotated[
        int | None, typer.Option("--trials", help="Variants to try for each problem, in place of --effort's.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="Begin no new variant of a problem after this long."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the search; the same seed searches the same way.")] = 0,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Cache to read and write; your own if left out.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Compiler processes; one for each core if left out.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="GPUs that measure; all visible ones of the device if left out.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", metavar="N", help="Measure the methods of one attention over N GPUs (docs/context-parallel.md)."
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            help="Server of the trials, which other runs share (docs/hosts.md); journals in the cache if left out.",
        ),
    ] = None,
    dtype: options.DType = None,
    batch: options.Batch = None,
    heads: options.Heads = None,
    heads_kv: options.HeadsKV = None,
    seq_q: options.SeqQ = None,
    seq_kv: options.SeqKV = None,
    head_dim: options.HeadDim = None,
    head_dim_v: options.HeadDimV = None,
    mask: options.Mask = None,
    layout: options.Layout = None,
    tokens: options.Tokens = None,
    precision: options.Precision = None,
    numerics: options.Numerics = None,
    key_cache: options.KeyCache = None,
    key_lengths: options.KeyLengths = None,
    operation: options.Operation = None,
    deterministic: options.Deterministic = False,
    modifier: options.Modifiers = None,
) -> None:
    """Search the fastest kernel for each problem on a device, and keep the winners in the cache.

    When the device is in this machine, kernels are validated and measured. When it is not, they are compiled for it
    all the same, their machine code is read, and a model predicts their times: the first line says which.

    --objective energy asks for the fewest joules per call, error for the smallest root mean square error against
    float64; both need the card, and the winner of the problem takes the place of one found for another objective.

    --model makes the problems of a model's prefill, training and decoding from its config; --dtype and --batch then
    stand for all of them, and autoattn init --model writes them as a file to edit.

    --ranks N searches no kernels: it times the methods of one attention over N GPUs of this machine for each problem,
    which is of a whole sequence, and keeps the fastest with the link's speed.

    Ctrl-C stops at any time; the same command goes on from there. On another host with the same --storage it joins in.
    """
    limits = (
        ("--trials", 1, trials), ("--timeout", 1, timeout), ("--jobs", 1, jobs),
        ("--workers", 1, workers),
    )  # fmt: skip
    for name, least, given in limits:
        options.at_least(name, least, given)
    options.seed(seed)
    parts: dict[str, Any] = {
        "heads": heads, "heads_kv": heads_kv, "seq_q": seq_q, "seq_kv": seq_kv, "head_dim": head_dim,
        "head_dim_v": head_dim_v, "mask": mask, "layout": layout, "tokens": tokens, "precision": precision,
        "numerics": numerics, "key_cache": key_cache, "key_lengths": key_lengths, "operation": operation,
        "deterministic": deterministic, "modifiers": modifier or None,
    }  # fmt: skip
    if model is not None:
        if shapes is not None or any(value is not None and value is not False for value in parts.values()):
            source = "--shapes" if shapes is not None else "the options of one problem"
            raise UsageError(f"problems come from --model or from {source}, got both; give one")
        named, notes = _of_model(model, device, group, dtype=dtype, batch=batch, lengths=lengths)
    elif lengths is not None:
        raise UsageError("--lengths is a choice for --model, got no --model; add it, or leave --lengths out")
    else:
        named, notes = options.problems_of(shapes, group, options.problem_of(dtype=dtype, batch=batch, **parts)), ()
    from autoattn.codegen import resources

    if ranks is not None:
        from autoattn.cli import tune_ranks

        tune_ranks.check_alone({**{name: given for name, _, given in limits}, "--storage": storage})
        tune_ranks.tune(device, named, ranks, cache if cache is not None else resources.user_cache())
        return
    from autoattn.search.search_options import Effort, Objective, Options

    settings = Options(
        effort=Effort(effort),
        trials=trials,
        timeout_s=timeout,
        seed=seed,
        cache=cache if cache is not None else resources.user_cache(),
        jobs=jobs,
        objective=Objective(objective),
        workers=workers,
        storage=storage,
    )
    _tune(device, named, settings, notes)


def _of_model(
    model: str, device: str, group: list[str] | None, *, dtype: str | None, batch: int | None, lengths: str | None
) -> tuple[list[NamedProblem], tuple[str, ...]]:
    """The problems of a model's config that the device can be tuned for, and what somebody should know of them.

    Raises:
        ShapesError: there is no such config, or problems cannot say its attention.
    """
    from autoattn.cli import model as models
    from autoattn.hardware import nvidia

    document, notes = models.document(model, dtype=dtype, batch=batch, lengths=lengths)
    named = options.of_groups(models.problems(document, model), group, f"--model {model}")
    if nvidia.resolve(device)[1]:
        return named, notes
    forward = [shape for shape in named if shape.problem.op.value == "forward"]
    if len(forward) == len(named):
        return named, notes
    return forward, (*notes, f"{len(named) - len(forward)} problems of gradients are left out, which need the card")


def _tune(device: str, named: list[NamedProblem], settings: Options, notes: tuple[str, ...]) -> None:
    """Says what is about to happen, tunes, and says what came of it."""
    from autoattn.cli import memory, terminal
    from autoattn.hardware import nvidia

    card, measured = nvidia.resolve(device)
    console = terminal.console()
    console.print(opening(card, measured, nvidia.present()), soft_wrap=True)
    effort = settings.effort.value
    console.print(f"{count(len(named), 'problem')}, effort {effort}, cache {settings.cache}", soft_wrap=True)
    for note in notes:
        console.print(terminal.printable(f"Note: {note}."), soft_wrap=True)
    if (shortage := memory.warning([shape.problem for shape in named], card)) is not None:
        console.print(terminal.printable(shortage), soft_wrap=True)
    from autoattn.cli.progress import Display
    from autoattn.search import storage, tuner

    if settings.storage is not None:
        console.print(f"Sharing trials at {storage.shown(settings.storage)}", soft_wrap=True)
    with Display(console, measured=measured) as display:
        summary = tuner.tune(
            [shape.problem for shape in named], card, measured=measured, options=settings, listen=display
        )
    close(console, named, summary)
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)
    if summary.stopped is not None:
        raise summary.stopped
    if summary.failed:
        raise typer.Exit(1)


def opening(card: Device, measured: bool, present: Device | None) -> str:
    """The first line: whether anything will be measured."""
    if measured:
        return f"Measuring on {card.full_name}, the card in this machine"
    there = f"there is {present.full_name}" if present is not None else "no NVIDIA GPU was found"
    return f"Predicting for {card.full_name} (not in this machine: {there}): nothing here is measured"


def count(number: int, noun: str) -> str:
    """1 problem, 2 problems."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def close(console: Console, named: list[NamedProblem], summary: Summary) -> None:
    """Prints why nothing was tuned, if so, a table for each group, what the run came to, and where the winners are.

    Below the tables stands who was in the finals.
    """
    from autoattn.cli import show
    from autoattn.cli.progress import duration

    if not summary.entries and summary.failed:
        console.print(f"Nothing was tuned: {commonest_reason(summary)}", soft_wrap=True)
    for group in dict.fromkeys(group for shape in named for group in shape.groups):
        if summary.entries or summary.failed:
            _table(console, group, [shape.problem for shape in named if group in shape.groups], summary)
    show.print_attendance(console, summary.entries.values())
    tuned = len(summary.entries) - summary.kept
    parts = [f"{tuned:,} tuned", f"{summary.kept:,} already up to date", f"{len(summary.failed):,} failed"]
    left = len({shape.problem.key for shape in named} - summary.entries.keys() - summary.failed.keys())
    parts += [f"{left:,} not reached"] * bool(left)
    console.print(f"{count(len(named), 'problem')}: {', '.join(parts)}; {duration(summary.seconds)}", soft_wrap=True)
    console.print(
        f"{counted(summary.outcomes, 'trial')}, {count(summary.kernels, 'distinct kernel')} compiled", soft_wrap=True
    )
    if summary.rehearsals:
        console.print(f"{counted(summary.rehearsals, 'rehearsal')} in an interpreter", soft_wrap=True)
    for path in summary.written:
        console.print(f"Cache: {path}", soft_wrap=True)
    if summary.interrupted:
        console.print("Interrupted: what was finished is kept; run the same command again to go on.", soft_wrap=True)


def counted(outcomes: dict[str, int], noun: str) -> str:
    """44 trials (2 infeasible, 42 ok)."""
    parts = ", ".join(f"{number:,} {outcome}" for outcome, number in outcomes.items())
    return f"{count(sum(outcomes.values()), noun)}{f' ({parts})' if parts else ''}"


def commonest_reason(summary: Summary) -> str:
    """Why nothing was tuned, in words: what most variants failed of, or where none did, most problems."""
    if summary.reasons:
        reason, number = max(summary.reasons.items(), key=lambda item: item[1])
        return f"{reason} ({number:,} of {sum(summary.reasons.values()):,} variants that failed)"
    (reason, number), *_ = Counter(summary.failed.values()).most_common(1)
    return f"{reason} ({number:,} of {len(summary.failed):,} problems)"


def _table(console: Console, group: str, problems: list[Problem], summary: Summary) -> None:
    from autoattn.cli import show, terminal

    rows: list[tuple[object, ...]] = []
    for problem in problems:
        entry = summary.entries.get(problem.key)
        if entry is not None:
            rows.append(show.row(entry))
        else:
            reason = summary.failed.get(problem.key)
            rows.append((problem, "", "", "failed" if reason is not None else "not reached", "", reason or "", ""))
    kinds = sorted(
        {summary.entries[problem.key].evidence.value for problem in problems if problem.key in summary.entries}
    )
    terminal.print_table(console, ", ".join([group, *kinds]), show.COLUMNS, rows)
