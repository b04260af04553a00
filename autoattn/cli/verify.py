"""`autoattn verify`: are the cached kernels still right?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoattn.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from autoattn.cache.precedence import Overlay, Placed

EXAMPLES = "Examples:\n\n[bold]autoattn verify --device a30 --cache cache[/]\n\n[bold]autoattn cache verify --mark[/]"


def command(
    device: options.Device = "auto",
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Only this cache; yours and the shipped if left out.")
    ] = None,
    mark: Annotated[
        bool, typer.Option("--mark", help="Mark what failed in --cache, or in your own, and unmark what holds again.")
    ] = False,
) -> None:
    """Check cached entries again, as after an upgrade of torch, triton or the driver.

    On the GPU when it is in this machine: the numbers once more, and the time in rounds with the runners-up and
    PyTorch's backends. Else by digests and Triton's interpreter. Each entry is the same, faster or slower by a share
    with its interval, no longer the fastest, stale, wrong, not checked, or does not run. Exits with 1 unless all are
    the same or faster.

    Precompiled kernels are rendered and compiled again, and their machine code is compared.

    A call never runs on an entry that is marked as wrong or as one that does not run; of other marks autoattn explain
    tells, and autoattn tune searches marked problems again.
    """
    from autoattn.cache import store as caching
    from autoattn.cli import show, terminal
    from autoattn.codegen import resources
    from autoattn.core.problem import Op
    from autoattn.errors import StateError
    from autoattn.hardware import nvidia
    from autoattn.tools.verify import verify

    card, here = nvidia.resolve(device)
    combined = show.overlays(card.name, cache)
    places = _verifiable(combined)
    # No call here takes what another card measured, and times of two cards do not compare.
    foreign = [place for place in places if here and place.measured and place.fingerprint != card.fingerprint]
    entries = [place.entry for place in places if place not in foreign]
    if not entries:
        foreign_note = f" but {len(foreign)} that another card measured" if foreign else ""
        raise StateError(
            f"there must be cached kernels to verify, found none for {card.name}{foreign_note}; "
            "run autoattn tune, or name a --cache"
        )
    checked = verify(entries, card)
    rows = [(check.problem, check.finding.value, check.detail) for check in checked]
    console = terminal.console()
    failed = sum(not check.ok for check in checked)
    title = f"{card.name}, {len(rows)} kernels, {failed} failed"
    terminal.print_table(console, title, ("=Problem", "", "Detail"), rows)
    show.print_left_out(console, combined)
    if foreign:
        console.print(
            f"{len(foreign)} left out: measured on {foreign[0].fingerprint}, not on this card", soft_wrap=True
        )
    if mark:
        folder = cache if cache is not None else resources.user_cache()
        for op in Op:
            pairs = [(check.entry, check.mark) for check in checked if check.problem.op is op]
            changed = caching.mark(folder, card, op, pairs) if pairs else []
            marked = sum(entry.mark is not None for entry in changed)
            words = f"{marked} marked, {len(changed) - marked} unmarked in {caching.path_of(folder, card, op)}"
            if pairs:
                console.print(terminal.printable(words), soft_wrap=True)
    wrong_code = _print_code(console, card.arch, cache)
    if wrong_code or not all(check.ok for check in checked):
        raise typer.Exit(1)


def _print_code(console: Console, arch: int, cache: Path | None) -> int:
    """Verifies the precompiled kernels of the cache folders, prints what failed, and returns how many did."""
    from autoattn.cache import inventory
    from autoattn.cli import terminal
    from autoattn.tools import compiled
    from autoattn.tools.compiled import CodeFinding

    checks = [check for folder in inventory.folders(cache) for check in compiled.verify(folder, arch)]
    failed = [check for check in checks if not check.ok]
    if checks:
        counts = Counter(check.finding for check in checks)
        words = ", ".join(f"{counts[finding]} {finding.value}" for finding in CodeFinding if counts[finding])
        console.print(f"{len(checks)} precompiled kernels for sm_{arch}: {words}", soft_wrap=True)
    for check in failed:
        console.print(terminal.printable(f"  {check.finding.value}: {check.path}: {check.detail}"), soft_wrap=True)
    return len(failed)


def _verifiable(combined: list[Overlay]) -> list[Placed]:
    """The entries that calls take, and those that give way because of a mark, which a verification may lift."""
    return [
        place
        for overlay in combined
        for _, places in sorted(overlay.ranked.items())
        for number, place in enumerate(places)
        if number == 0 or (place.entry.mark is not None and place.entry.mark.holds_back)
    ]
