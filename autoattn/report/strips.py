"""Draws each problem's rivals on one scale of ratios, in which 1.0 to 1.3 is wide: there most rivals stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoattn.core.cache_entry import CacheEntry
from autoattn.core.paired_stats import Interval
from autoattn.report import figures
from autoattn.report.plot import SHAPES, Key, Mark, Scale, Tick

LOW, HIGH = 0.88, 2.0  # of the scale; it reaches down to the lowest ratio, and what is above stands at its end
TICKS = (1.0, 1.3, HIGH, 1.1, 1.6, 0.9, 1.2, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1)  # what goes before where there is no room
GAP = 9.0  # percent between two ticks at least
BEYOND = "beyond"  # shape of a rival at the end of the scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """How a problem's rivals stand, on the scale that all problems of a section share."""

    marks: tuple[Mark, ...]
    kernel_at: float  # percent, where the kernel itself stands


@dataclass(frozen=True, slots=True, kw_only=True)
class Strips:
    """The strips of a section's problems."""

    ticks: tuple[Tick, ...]
    legend: tuple[Key, ...]
    of: dict[str, Strip]  # problem key -> strip


def strips(entries: Sequence[CacheEntry]) -> Strips | None:
    """Each rival's time over the kernel's; None where no entry has rivals."""
    leads = {
        entry.problem.key: {rival.name: figures.lead_over(entry, rival) for rival in figures.others(entry)}
        for entry in entries
    }
    ratios = [ratio for rivals in leads.values() for lead in rivals.values() for ratio in _ends(lead)]
    if not ratios:
        return None
    scale = Scale(low=min(LOW, *(ratio * 0.98 for ratio in ratios)), high=HIGH, log=True)
    names = sorted({name for rivals in leads.values() for name in rivals})
    styles = {name: (f"s{1 + place % 7}", SHAPES[place % len(SHAPES)]) for place, name in enumerate(names)}
    legend = [Key(style=style, shape=shape, words=name) for name, (style, shape) in styles.items()]
    if max(ratios) > HIGH:
        legend.append(Key(style="s6", shape=BEYOND, words=f"any of them, above {HIGH:g}x"))
    return Strips(
        ticks=_ticks(scale),
        legend=tuple(legend),
        of={
            key: Strip(
                marks=tuple(_rival(name, lead, scale, *styles[name]) for name, lead in rivals.items()),
                kernel_at=scale.at(1.0),
            )
            for key, rivals in leads.items()
        },
    )


def _ticks(scale: Scale) -> tuple[Tick, ...]:
    chosen: list[Tick] = []
    for ratio in TICKS:
        at = scale.at(ratio)
        if ratio >= scale.low and all(abs(at - tick.at) >= GAP for tick in chosen):
            chosen.append(Tick(at=at, label=f"{ratio:.1f}"))
    return tuple(sorted(chosen, key=lambda tick: tick.at))


def _ends(lead: float | Interval) -> tuple[float, ...]:
    return (lead.low, lead.ratio, lead.high) if isinstance(lead, Interval) else (lead,)


def _rival(name: str, lead: float | Interval, scale: Scale, style: str, shape: str) -> Mark:
    beyond = figures.middle(lead) > scale.high
    whisker = lead if isinstance(lead, Interval) and not beyond else None
    return Mark(
        x=scale.at(figures.middle(lead)),
        y=50.0,
        style=style,
        shape=BEYOND if beyond else shape,
        title=f"{name}: {figures.against(lead)}",
        low=scale.at(whisker.low) if whisker is not None else None,
        high=scale.at(whisker.high) if whisker is not None else None,
    )
