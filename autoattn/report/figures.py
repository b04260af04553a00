"""Figures as people read them, and the comparisons that tables are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from autoattn.entry import KERNEL, CacheEntry, Rival
from autoattn.trial import Evidence
from autoattn.variant import Value, Variant

if TYPE_CHECKING:
    from autoattn.report.evidence import Lead

OURS = ("template default", "previous winner")  # rivals that are kernels of this project: no news when they are close


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


def ratio(lead: Lead) -> str:
    """A ratio of times with its interval, where it has one."""
    if lead.low is None or lead.high is None:
        return times(lead.ratio)
    return f"{times(lead.ratio)} [{lead.low:.2f}, {lead.high:.2f}]"


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
    ordered = sorted(numbers.items(), key=lambda one: (-one[1], one[0]))
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
    return rival.measurement.median_us / entry.time_us


def best_rival(entry: CacheEntry) -> tuple[str, float] | None:
    """The fastest rival from elsewhere and the kernel's lead over it; None where nothing was measured."""
    if entry.evidence is not Evidence.MEASURED or not others(entry):
        return None
    fastest = others(entry)[0]
    return fastest.name, lead(entry, fastest)


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
    params = variant.as_dict()
    if not {"BLOCK_M", "BLOCK_N"} <= params.keys():
        return str(variant)
    more = "".join(
        f" {params[name]}{unit}" for name, unit in (("num_warps", "w"), ("num_stages", "s")) if name in params
    )
    return f"{params['BLOCK_M']}x{params['BLOCK_N']}{more}"
