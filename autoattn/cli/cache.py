"""`autoattn cache`: list, compare, merge, pack, compile and prune caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoattn.cli import cache_compile, completion, options, verify
from autoattn.errors import StateError, UsageError

if TYPE_CHECKING:
    from autoattn.cache.file_format import CacheFile
    from autoattn.cache.inventory import Difference

EXAMPLES = (
    "Examples:\n\n[bold]autoattn cache list[/]\n\n[bold]autoattn cache merge bundle.zip cache[/]\n\n"
    "[bold]autoattn cache diff cache other[/]"
)
ALL = "all"

Source = Annotated[Path, typer.Argument(metavar="FROM", help="A cache folder, one of its files, or a bundle.")]


def list_(
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Only this cache; yours and the shipped if left out.")
    ] = None,
    json: options.Json = False,
) -> None:
    """List cache files: the card of each, how many entries are measured, predicted and stale, and what made them.

    Shadowed entries give way to one of the same problem in the other cache: a call never takes them.
    """
    from autoattn.cache import inventory
    from autoattn.cli import show, terminal

    combined = show.overlays(None, cache)
    shadowed = Counter(
        (place.folder, overlay.device, overlay.op, place.release) for overlay in combined for place in overlay.shadowed
    )
    held = [
        inventory.holding(folder, file, shadowed[folder, file.device, file.op, file.triton])
        for folder, file in inventory.read(cache)
    ]
    if json:
        terminal.print_json([{**asdict(holding), "path": str(holding.path)} for holding in held])
        return
    console = terminal.console()
    columns = ("=Device", ">Measured", ">Predicted", ">Stale", ">Shadowed", "=Changed", "Card", "Made with", "File")
    rows = [
        (holding.device, holding.measured, holding.predicted, holding.stale, holding.shadowed, holding.modified,
         holding.fingerprint, "; ".join(holding.versions), holding.path)
        for holding in held
    ]  # fmt: skip
    if rows:
        terminal.print_table(console, f"{len(rows)} cache file{'' if len(rows) == 1 else 's'}", columns, rows)
    else:
        console.print("There is no cache file; run autoattn tune, or name another --cache.")
    show.print_availability(console, (place.entry for overlay in combined for place in overlay.counting.values()))


def diff(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A cache folder, one of its files, or a bundle.")],
    second: Annotated[
        Path | None, typer.Argument(metavar="SECOND", help="Another; your cache over the shipped one if left out.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Say in what two caches differ: for each problem what each of them runs, the ratio of times, and every other fact.

    Exits with 1 when they differ. Times of two runs are compared as they stand: a few percent may be the day's.
    """
    from autoattn.cache import inventory
    from autoattn.cli import show, terminal
    from autoattn.tools import bundle

    files = (
        bundle.load(second)
        if second is not None
        else [file for overlay in show.overlays(None, None) for file in overlay.by_release]
    )
    differences = inventory.differences(bundle.load(first), files)
    if json:
        terminal.print_json([_document(difference) for difference in differences])
    elif not differences:
        terminal.console().print("They hold the same.")
    else:
        columns = ("=Problem", ">us first", ">us second", ">Ratio", "Differs in")
        for device in dict.fromkeys(difference.device for difference in differences):
            rows = [_row(difference) for difference in differences if difference.device == device]
            terminal.print_table(terminal.console(), f"{device}, {len(rows)} that differ", columns, rows)
    if differences:
        raise typer.Exit(1)


def merge(
    source: Source,
    into: Annotated[Path, typer.Argument(metavar="INTO", help="The cache folder to add to; made if it is missing.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Take FROM's entry also where its time is no better than INTO's.")
    ] = False,
) -> None:
    """Add the entries of another cache, of one of its files, or of a bundle, to a cache folder.

    Of two entries of one problem the better one stays: measured before predicted, one that calls use before one that
    none uses, then the faster. Of two measurements within 3% that with newer software stays. Each entry of INTO that
    stays, and each that is replaced, is printed with the reason.

    Measurements of two cards that share a name are never mixed: the merge is refused. Precompiled kernels are added
    where INTO has none of the same text.
    """
    from autoattn.cache import store
    from autoattn.cli import terminal
    from autoattn.tools import bundle, compiled

    if into.exists() and not into.is_dir():
        raise UsageError(f"INTO must be a cache folder, got the file {into}; name the folder that holds its device's")
    content = bundle.load_content(source)
    if not content.files and not content.compiled:
        raise StateError(f"{source} must hold cache files, found none; name another folder, a file or a bundle")
    console = terminal.console()
    for merged in store.combine(into, content.files, any_time=replace):
        counts = f"{len(merged.taken)} taken, {len(merged.same)} there already, {len(merged.refused)} not taken"
        console.print(terminal.printable(f"{merged.path}: {counts}"), soft_wrap=True)
        for verb, reasons in (("replaced", merged.replaced), ("not taken", merged.refused)):
            for problem, reason in reasons.items():
                console.print(terminal.printable(f"  {verb}: {problem}: {reason}"), soft_wrap=True)
    if content.compiled:
        taken = compiled.add(into, content.compiled)
        words = f"{taken} precompiled kernels taken, {len(content.compiled) - taken} there already"
        console.print(terminal.printable(f"{into}: {words}"), soft_wrap=True)


def export(
    problems: Annotated[
        list[str],
        typer.Argument(
            metavar="PROBLEM...",
            help="Names as autoattn show prints them, or keys of a file; or all.",
            autocompletion=completion.problem_keys,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The zip to write.")],
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="DIR", help="Only this cache; yours and the shipped if left out."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="Only this device; all if left out.",
            autocompletion=completion.devices,
        ),
    ] = None,
    with_code: Annotated[
        bool, typer.Option("--compiled", help="Pack the machine code too, which calls run without a compiler.")
    ] = False,
) -> None:
    """Pack entries with their kernels, the commands that repeat them, and the SHA-256 of each file.

    Of each problem the entry is packed that a call takes: an entry of your own cache stands in place of the shipped
    one. autoattn cache merge takes such a bundle after checking every digest. Stale entries have no kernel to pack: all
    leaves them out, and a name of one is refused.
    """
    from autoattn.cli import show, terminal
    from autoattn.report import files as writing
    from autoattn.tools import bundle, compiled

    combined = show.overlays(device, cache)
    files = _picked([file for overlay in combined for file in overlay.by_release], problems, cache)
    kernels = compiled.of_entries(files, cache) if with_code else []
    data = bundle.pack(files, bundle.samples_of([pair for overlay in combined for pair in overlay.files]), kernels)
    writing.write(out, data)
    packed = {(file.device, key) for file in files for key in file.entries}
    folders = Counter(
        place.folder
        for overlay in combined
        for key, place in overlay.counting.items()
        if (overlay.device, key) in packed
    )
    parts = ", ".join(f"{count} of {folder}" for folder, count in folders.items())
    console = terminal.console()
    console.print(
        terminal.printable(f"{out}: {len(packed)} entr{'y' if len(packed) == 1 else 'ies'}: {parts}"), soft_wrap=True
    )
    if with_code:
        console.print(f"{len(kernels)} precompiled kernels")
    console.print(f"SHA-256 {bundle.digest(data)}", soft_wrap=True)


def prune(
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Cache to prune; your own if left out.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Remove entries that are stale, and journals of searches whose problem has no entry.

    A journal that was written to in the last hour stays, since a tuner may be at it. What an older one knows of a
    search that was interrupted is lost.
    """
    from autoattn.cache import inventory
    from autoattn.cli import terminal

    cache = inventory.folders(cache)[0]
    unneeded = inventory.unneeded(cache)
    gone = unneeded if dry_run else inventory.prune(unneeded)
    verb = "would go" if dry_run else "removed"
    console = terminal.console()
    for path, entries in gone.stale.items():
        for entry in entries:
            console.print(terminal.printable(f"{verb}: {entry.problem} ({path})"), soft_wrap=True)
    for path in gone.journals:
        console.print(terminal.printable(f"{verb}: {path}"), soft_wrap=True)
    for path in gone.resting:
        console.print(terminal.printable(f"stays: {path}, written to in the last hour"), soft_wrap=True)
    left = unneeded.entries - gone.entries + len(unneeded.journals) - len(gone.journals)
    changed = f", {left} in use or changed meanwhile" if left else ""
    console.print(
        f"{verb}: {gone.entries} stale entr{'y' if gone.entries == 1 else 'ies'}, {len(gone.journals)} "
        f"journal{'' if len(gone.journals) == 1 else 's'}{changed}"
    )


COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "list": (list_, "Example: [bold]autoattn cache list --cache cache[/]"),
    "diff": (diff, "Example: [bold]autoattn cache diff cache bundle.zip --json[/]"),
    "merge": (merge, "Example: [bold]autoattn cache merge bundle.zip cache[/]"),
    "export": (export, "Example: [bold]autoattn cache export all --device h200 --out bundle.zip[/]"),
    "compile": (cache_compile.command, "Example: [bold]autoattn cache compile --device h200 --cache cache[/]"),
    "verify": (verify.command, "Example: [bold]autoattn cache verify --mark[/]"),
    "prune": (prune, "Example: [bold]autoattn cache prune --cache cache --dry-run[/]"),
}


def _picked(files: list[CacheFile], wanted: list[str], named: Path | None) -> list[CacheFile]:
    """The files with the entries that are wanted; of all, those that hold. `named` is what --cache says."""
    from autoattn.cache import store
    from autoattn.tools import bundle

    if wanted == [ALL]:
        return [
            bundle.only(file, [entry for entry in file.entries.values() if store.why_held_back(entry) is None])
            for file in files
        ]
    entries = [entry for file in files for entry in file.entries.values()]
    known = {name for entry in entries for name in (entry.problem.key, str(entry.problem))}
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"PROBLEM must be all, or a problem of {named or 'the cache'} as autoattn show prints it, got "
                f"{name!r:.200}; "
                "correct it, or name another --cache"
            )
    return [
        bundle.only(
            file, [entry for entry in file.entries.values() if {entry.problem.key, str(entry.problem)} & set(wanted)]
        )
        for file in files
    ]


def _row(difference: Difference) -> tuple[object, ...]:
    from autoattn.report import figures

    times = [
        figures.microseconds(entry.time_us) if entry is not None else "-"
        for entry in (difference.first, difference.second)
    ]
    ratio = figures.times(difference.ratio) if difference.ratio is not None else "-"
    return (
        difference.problem if difference.problem is not None else "(the file)",
        *times,
        ratio,
        "; ".join(difference.words),
    )


def _document(difference: Difference) -> dict[str, object]:
    return {
        "device": difference.device, "op": difference.op, "problem": difference.problem, "first": difference.first,
        "second": difference.second, "ratio": difference.ratio, "words": difference.words,
    }  # fmt: skip
