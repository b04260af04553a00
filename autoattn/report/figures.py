"""Figures as people read them, and the comparisons that tables are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from autoattn.codegen import search_space
from autoattn.core.cache_entry import KERNEL, OURS, CacheEntry, Rival
from autoattn.core.paired_stats import Interval
from autoattn.core.trial import Evidence
from autoattn.core.variant import Value, Variant
from autoattn.errors import AutoattnError


def microseconds(time_us: float) -> str:
    """A time in microseconds, three or more significant digits, without its unit."""
    if not math.isfinite(time_us):
        return "-"
    return f"{time_us:,.0f}" if time_us >= 1000 else f"{time_us:.1f}" if time_us >= 10 else f"{time_us:.2f}"


def tflops(rate: float) -> str:
    """A rate in TFLOP/s, without its unit."""
    if not math.isfinite(rate):
        return "-"
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def times(ratio: float) -> str:
    """A ratio of times."""
    return f"{ratio:.2f}x" if math.isfinite(ratio) else "-"


def within(lead: Interval) -> str:
    """A ratio of times with its confidence interval."""
    digits = 3 if max(lead.high - lead.ratio, lead.ratio - lead.low) < 0.01 else 2  # as many as it holds
    return f"{lead.ratio:.{digits}f}x ({lead.low:.{digits}f}-{lead.high:.{digits}f})"


def against(lead: float | Interval) -> str:
    """A ratio of times, with its interval where it has one."""
    return within(lead) if isinstance(lead, Interval) else times(lead)


def percent(share: float | None) -> str:
    """A share in percent."""
    if share is None or not math.isfinite(share):
        return "-"
    return f"{100 * share:.0f}%" if share >= 0.01 else f"{100 * share:.1f}%" if share >= 0.0005 else "<0.1%"


def energy(joules: float | None) -> str:
    """Joules as millijoules where they are few, with the unit."""
    if joules is None or not math.isfinite(joules):
        return "-"
    return f"{joules:.2f} J" if joules >= 1 else f"{joules * 1e3:.3g} mJ"


def error(value: float | None) -> str:
    """A numeric error, two significant digits."""
    return "-" if value is None or math.isnan(value) else f"{value:.1e}"


def counts(numbers: Mapping[str, int]) -> str:
    """How many of what, most first."""
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number:,} {name}" for name, number in ordered)


def settings(params: Mapping[str, Value]) -> str:
    """The parameters of a variant on one line."""
    return " ".join(f"{name}={value}" for name, value in sorted(params.items()))


def versions(entry: CacheEntry) -> str:
    """The versions that an entry was made with, on one line."""
    return ", ".join(f"{name} {version}" for name, version in sorted(entry.versions.items()))


def printable(text: object) -> str:
    """One line without control characters: what a file holds must not steer a terminal or break a table."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(text))


def others(entry: CacheEntry) -> list[Rival]:
    """The rivals that come from elsewhere, fastest first."""
    return sorted((r for r in entry.rivals if r.name not in OURS), key=lambda r: (r.measurement.median_us, r.name))


def lead(entry: CacheEntry, rival: Rival) -> float:
    """How many times as long as the winning kernel the rival takes; above 1 the kernel is faster."""
    return rival.lead.ratio if rival.lead is not None else rival.measurement.median_us / entry.time_us


def lead_over(entry: CacheEntry, rival: Rival) -> float | Interval:
    """The same with its confidence interval, where it has one."""
    return rival.lead if rival.lead is not None else lead(entry, rival)


def even(lead: float | Interval) -> bool:
    """Whether an interval holds 1, so that nobody is known to be faster."""
    return isinstance(lead, Interval) and lead.low <= 1.0 <= lead.high


def middle(lead: float | Interval) -> float:
    """The ratio itself."""
    return lead.ratio if isinstance(lead, Interval) else lead


def standing(lead: float | Interval) -> str:
    """Whether a kernel with such a lead is faster, in a word for the page's colours; "" when nobody is."""
    return "" if even(lead) else "good" if middle(lead) > 1.0 else "bad"


def best_rival(entry: CacheEntry) -> tuple[str, float, str] | None:
    """The fastest rival from elsewhere, the kernel's lead over it, and that in words with its interval.

    None where nothing was measured.
    """
    if entry.evidence is not Evidence.MEASURED or not others(entry):
        return None
    fastest = others(entry)[0]
    ratio = lead(entry, fastest)
    return fastest.name, ratio, against(fastest.lead or ratio)


def ties(entry: CacheEntry) -> str:
    """How many finalists are as good as the winner, in words; "" where there is none, or nobody knows."""
    count = len(entry.finals.tied) if entry.finals is not None else 0
    return f"{count} as good" if count else ""


def finals(entry: CacheEntry) -> str:
    """How the finals went, in words; "" where nobody knows."""
    known = entry.finals
    if known is None:
        return ""
    rounds = f"{known.rounds} rounds" + (f", {known.discarded} more discarded" if known.discarded else "")
    tied = ties(entry) or "nobody as good"
    return f"{rounds}; {tied} as the winner{'' if known.decided else ', not decided for want of rounds'}"


def worst(entry: CacheEntry) -> str:
    """The time of a kernel that keeps its first maximum where scores outgrow it, in words; "" where nobody knows."""
    known = entry.worst
    if known is None:
        return ""
    tiles = f"{known.redone:,} of {known.tiles:,} tiles" if known.tiles else "tiles that it does not count"
    return f"{times(known.slowdown)} its usual time, {microseconds(known.median_us)} us; {tiles} are computed twice"


def choice(entry: CacheEntry) -> str:
    """What a call runs on: the entry's own kernel by its template, else the rival that is faster."""
    return entry.template if entry.choice == KERNEL else entry.choice


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def tile(entry: CacheEntry) -> str:
    """The parameters of the winner that say most: its tile, its warps and stages; all of them where it has no tile."""
    return tile_of(entry.variant)


def tile_of(variant: Variant) -> str:
    """The same of a variant."""
    try:
        return search_space.load(variant.template).tile_of(variant)
    except AutoattnError:  # a template that is no more
        return str(variant)
