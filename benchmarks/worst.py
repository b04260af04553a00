"""Measures what cached winners that keep their first maximum cost at worst, on the GPU that is here.

python benchmarks/worst.py [--cache DIR] [--write]

A winner of `autoattn tune` has its worst case in its entry (docs/finals.md). This does the same for entries that are
older than that, without another search: it adds the worst case to the entries of a cache folder one by one, so that it
can be interrupted and run again. With --write, the table of all of them is kept under benchmarks/results/.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kept import tell

from autoattn.cache import store
from autoattn.codegen import resources, template_facts
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Op
from autoattn.core.trial import Evidence
from autoattn.hardware import nvidia
from autoattn.report import figures
from autoattn.search.trial_pipeline import Workshop
from autoattn.workers.worker_pool import Failure


def keeping(folder: Path, device: Device) -> list[CacheEntry]:
    """The measured entries of a device whose winners keep their first maximum and are what renders today."""
    return [
        entry
        for entry in store.lookup(folder, device, Op.FORWARD).values()
        if entry.evidence is Evidence.MEASURED
        and template_facts.keeps_first_max(entry.variant)
        and store.why_stale(entry) is None
    ]


def measure(folder: Path, device: Device) -> None:
    """Adds what is missing."""
    missing = [entry for entry in keeping(folder, device) if entry.worst is None]
    with Workshop(device, measured=True) as shop:
        for number, entry in enumerate(missing, start=1):
            worst = shop.alone(shop.outgrow(entry.problem, entry.variant, seed=0))
            if isinstance(worst, Failure):
                words = f"{worst.outcome.value}: {worst.detail}"
            else:
                entry = replace(entry, worst=worst)
                store.merge(folder, device, Op.FORWARD, [entry])
                words = figures.worst(entry)
            print(f"{number}/{len(missing)} {entry.problem}: {words}", flush=True)


def table(entries: list[CacheEntry]) -> str:
    """One line for each entry whose worst case is known, and the geometric mean of each template."""
    lines = ["| problem | template | at worst | tiles computed twice | max error |", "|---|---|--:|--:|--:|"]
    slowdowns: dict[str, list[float]] = {}
    for entry in sorted(entries, key=lambda entry: entry.problem.order):
        if (worst := entry.worst) is None:
            continue
        slowdowns.setdefault(entry.template, []).append(worst.slowdown)
        tiles = f"{worst.redone:,} of {worst.tiles:,}" if worst.tiles else "not counted"
        facts = entry.problem, entry.template, f"{worst.slowdown:.2f}x", tiles, figures.error(worst.max_error)
        lines.append(f"| {' | '.join(map(str, facts))} |")
    means = [
        f"{name}: {len(ratios)} problems, {figures.geometric_mean(ratios):.2f}x its usual time in the geometric mean, "
        f"{min(ratios):.2f}x to {max(ratios):.2f}x."
        for name, ratios in sorted(slowdowns.items())
    ]
    return "\n".join([*means, "", *lines])


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=resources.user_cache(), help="yours if left out")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    options = parser.parse_args()
    card = nvidia.present()
    if card is None:
        parser.error("this measures on an NVIDIA GPU, and torch finds none")
    measure(options.cache, card)
    title = f"What a kept maximum costs at worst, {card.full_name}"
    name = f"{card.name}_worst" if options.write else None
    tell(title, "python benchmarks/worst.py", table(keeping(options.cache, card)), name)


if __name__ == "__main__":
    main()
