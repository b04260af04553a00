"""`autoattn show`: what the cache holds."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autoattn.cli import completion, options
from autoattn.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from autoattn.cache.precedence import Overlay
    from autoattn.core.cache_entry import CacheEntry

EXAMPLES = (
    "Examples:\n\n[bold]autoattn show --device h200 --evidence measured[/]\n\n"
    "[bold]autoattn show --cache cache --json[/]\n\n"
    "[bold]autoattn show --device h200 --only D128 --only bf16 --operation forward --sort ratio --reverse[/]"
)
COLUMNS = ("=Problem", ">us", ">TFLOP/s", "Evidence", "Runs on", "Best rival, or bound", "Tile")


def command(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="Only this device, or auto; all if left out.",
            autocompletion=completion.devices,
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Only this cache; yours and the shipped if left out.")
    ] = None,
    evidence: Annotated[
        Literal["measured", "predicted"] | None, typer.Option("--evidence", help="Only entries that rest on this.")
    ] = None,
    only: options.Only = None,
    operation: Annotated[
        Literal["forward", "backward"] | None, typer.Option("--operation", help="Only entries of this operation.")
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            "--route", metavar="NAME", help="Only what calls run on this: kernel, a template, or sdpa, sdpa-cudnn, ..."
        ),
    ] = None,
    sort: Annotated[
        Literal["problem", "time", "tflops", "ratio"],
        typer.Option("--sort", help="By name; time: shortest first; tflops, ratio: highest first."),
    ] = "problem",
    reverse: Annotated[bool, typer.Option("--reverse", help="Sort the other way round.")] = False,
    json: options.Json = False,
    output_format: Annotated[
        Literal["table", "json", "csv", "parquet"],
        typer.Option("--format", help="json: as --json; csv, parquet: a row for each entry (docs/frames.md)."),
    ] = "table",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where csv or parquet goes; csv to stdout if left out.")
    ] = None,
) -> None:
    """Show what the cache holds: for each problem the winner, its time, and the rival that came closest.

    A ratio is the rival's time over the kernel's: above 1 the kernel is faster. Behind it stands its 95% interval,
    where it is known. "As good" are finalists that cannot be told from the winner. Measured and predicted times are
    never in one table. Below stands who took part in the finals and who did not: a call runs on none of these but
    PyTorch's backends. Of each problem the entry is shown that a call takes: an entry of your own cache stands in place
    of the shipped one.
    """
    from autoattn.cli import terminal
    from autoattn.cli.entry_filter import EntryFilter

    chosen = EntryFilter(
        evidence=evidence, operation=operation, route=route, only=tuple(only or ()), sort=sort, reverse=reverse
    )
    combined = overlays(device, cache)
    files = [pair for overlay in combined for pair in overlay.files]
    chosen.check_route(entry for _, file in files for entry in file.entries.values())
    shown = [(folder, file, entries) for folder, file in files if (entries := chosen.apply(file.entries.values()))]
    if output_format in ("csv", "parquet"):
        placed = ((folder, file.device, entry) for folder, file, entries in shown for entry in entries)
        write_rows(output_format, placed, out)
        return
    if json or output_format == "json":
        terminal.print_json(
            [
                {"cache": str(folder), "device": file.device, "fingerprint": file.fingerprint, "entries": entries}
                for folder, file, entries in shown
            ]
        )
        return
    console = terminal.console()
    for folder, file, entries in shown:
        for kind in ("measured", "predicted"):
            if rows := [row(entry) for entry in entries if entry.evidence.value == kind]:
                terminal.print_table(console, f"{file.device}, {kind} ({folder})", COLUMNS, rows)
        print_attendance(console, entries)
    if not shown:
        console.print("The cache holds no such entry; run autoattn tune, or name another --cache.")
    if device is not None:
        print_sisters(console, device, cache)
    print_left_out(console, combined)
    print_availability(console, (entry for _, _, entries in shown for entry in entries))


def write_rows(output_format: str, placed: Iterable[tuple[Path, str, CacheEntry]], out: Path | None) -> None:
    """Writes a row for each (cache folder, device, entry), as CSV or as Parquet, to `out`; CSV else to stdout.

    Raises:
        UsageError: Parquet has no file to go to.
        HostError: Parquet needs a package that is not installed.
    """
    from autoattn import frames
    from autoattn.report import files

    rows = frames.entry_rows(placed)
    if output_format == "parquet" and out is None:
        raise UsageError("--format parquet needs a file, got no --out; add --out entries.parquet")
    is_csv = output_format == "csv"
    data = files.csv_text(list(frames.ENTRIES), rows) if is_csv else frames.parquet(rows, frames.ENTRIES)
    if out is not None:
        files.write(out, data)
    else:
        sys.stdout.write(str(data))


def overlays(device: str | None, cache: Path | None) -> list[Overlay]:
    """What `cache` holds, else what the user's cache and the shipped one hold together, as a call combines them."""
    from autoattn.cache import inventory
    from autoattn.hardware import nvidia

    name = nvidia.resolve(device)[0].name if device is not None else None
    return inventory.overlays(cache, nvidia.fingerprint_of, name)


def print_sisters(console: Console, device: str, cache: Path | None) -> None:
    """Says how many problems sister cards of a device measured, which serve it where nothing nearer was measured."""
    from autoattn.cache import inventory, sister_cards
    from autoattn.cli import terminal
    from autoattn.core.problem import Op
    from autoattn.core.trial import Evidence
    from autoattn.hardware import nvidia

    card = nvidia.resolve(device)[0]
    measured: dict[str, set[str]] = {}
    for folder in inventory.folders(cache):
        for op in Op:
            for sister, file in sister_cards.files_of(folder, card, op):
                entries = file.entries.items()
                measured.setdefault(sister.full_name, set()).update(
                    key for key, entry in entries if entry.evidence is Evidence.MEASURED
                )
    for name, keys in measured.items():
        if keys:
            problems = f"{len(keys):,} problem{'s' if len(keys) > 1 else ''} measured on {name}, a sister card"
            console.print(terminal.printable(f"{problems}: what has no nearer measurement runs on it"), soft_wrap=True)


def print_left_out(console: Console, combined: list[Overlay]) -> None:
    """Says for each cache folder how many of its entries give way to others, and how many are another card's."""
    from autoattn.cli import terminal

    shadowed = Counter(place.folder for overlay in combined for place in overlay.shadowed)
    foreign = Counter((place.folder, place.fingerprint) for overlay in combined for place in overlay.foreign)
    lines = [
        f"{_counted(count)} of {folder} left out: another entry of the same problem goes before (docs/cache.md)"
        for folder, count in shadowed.items()
    ]
    lines += [
        f"{_counted(count)} of {folder} left out: measured on another card, {fingerprint}"
        for (folder, fingerprint), count in foreign.items()
    ]
    for line in lines:
        console.print(terminal.printable(line), soft_wrap=True)


def print_attendance(console: Console, entries: Iterable[CacheEntry]) -> None:
    """Says who took part in the finals of these entries, and who did not and why."""
    from autoattn.cli import terminal
    from autoattn.report import attendance

    for sentence in attendance.sentences(entries):
        console.print(terminal.printable(sentence), soft_wrap=True)


def print_availability(console: Console, entries: Iterable[CacheEntry]) -> None:
    """Says which of these entries' kernels the installed Triton cannot run, and which another release tuned."""
    from autoattn.cache import availability
    from autoattn.cli import terminal

    for sentence in availability.sentences(entries):
        console.print(terminal.printable(sentence), soft_wrap=True)


def _counted(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def row(entry: CacheEntry) -> tuple[object, ...]:
    """An entry's line of the table of COLUMNS."""
    from autoattn.report import figures

    return (
        entry.problem,
        figures.microseconds(entry.time_us),
        figures.tflops(entry.tflops),
        evidence(entry),
        figures.choice(entry),
        comparison(entry),
        figures.tile(entry),
    )


def evidence(entry: CacheEntry) -> str:
    """What an entry rests on; of a predicted one, also whether nobody checked its numbers."""
    return ", ".join((entry.evidence.value, *(["not rehearsed"] if entry.is_unrehearsed else [])))


def comparison(entry: CacheEntry) -> str:
    """The best rival of a measured entry, the bound of a predicted one; of a marked one, what was found."""
    from autoattn.report import figures

    if entry.mark is not None:
        return f"marked: {entry.mark.finding.value}"
    best = figures.best_rival(entry)
    if best is not None:
        return "; ".join(filter(None, (f"{best[2]} {best[0]}", figures.ties(entry))))
    return f"bound by {entry.prediction.bound}" if entry.measurement is None and entry.prediction is not None else "-"
