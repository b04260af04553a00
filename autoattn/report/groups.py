"""Problems that one geometric mean may speak of: those of one device, operation, dtype and kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autoattn.core.cache_entry import CacheEntry
from autoattn.core.mask import MaskKind
from autoattn.core.problem import DType, Layout, Numerics, Op, Problem
from autoattn.report import attendance, figures

DECODE_QUERIES = 16  # a sequence has at most as many queries where keys are read from a cache, token by token
SMALL_FLOPS = 10e9  # below it an H200 needs 10 us at its peak: the launch decides, and not the kernel
# What a problem is, by the first that applies, and what the word means.
KINDS = {
    "dense": "full or causal, at least 10 GFLOP",
    "small": "full or causal, below 10 GFLOP, where the launch decides",
    "decode": f"at most {DECODE_QUERIES} queries a sequence, or a key cache",
    "packed": "sequences of their own lengths",
    "masks": "windows, blocks, mask_mod",
    "modifiers": "biases, softcap, sinks, dropout and the like",
    "online": 'numerics="online"',
    "deterministic": "the same bits each time",
}
PLACES = {kind: place for place, kind in enumerate(KINDS)}
OPERATIONS = {op.value: place for place, op in enumerate((Op.FORWARD, Op.BACKWARD))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The measured kernels of one device, operation, dtype and kind against the best rival of each."""

    device: str
    op: str
    dtype: str
    kind: str
    problems: int
    mean: float | None  # geometric mean of the best rival's time over the kernel's; None where nobody was met
    ahead: int
    even: int
    behind: int
    strongest: str  # the rival that was the best most often, and how often; "" where nobody was met
    absent: str  # who missed some of the finals, and how many; "not recorded" in entries of older versions


def kind_of(problem: Problem) -> str:
    """A word of KINDS."""
    if problem.deterministic:
        return "deterministic"
    if problem.numerics is Numerics.ONLINE:
        return "online"
    if problem.modifiers.names:
        return "modifiers"
    if problem.mask.kind not in (MaskKind.FULL, MaskKind.CAUSAL) or problem.mask.mod:
        return "masks"
    if problem.layout is Layout.PACKED:
        return "packed"
    if problem.cache is not None or problem.seq_q <= DECODE_QUERIES:
        return "decode"
    return "small" if problem.flops() < SMALL_FLOPS else "dense"


def dtype_of(problem: Problem) -> str:
    """The dtype; of float32 with the precision of its products, which sets its speed."""
    return f"{problem.dtype.value} {problem.precision.value}" if problem.dtype is DType.FLOAT32 else problem.dtype.value


def order(problem: Problem) -> tuple[object, ...]:
    """Sorts a section: dense problems before others, 16 bits before 8 and 32, and the largest first."""
    return (PLACES[kind_of(problem)], dtype_of(problem), -problem.flops(), problem.order)


def of(device: str, entries: Iterable[CacheEntry]) -> list[Group]:
    """The groups of a device's measured entries, in the order of the report."""
    groups: dict[tuple[str, str, str], list[CacheEntry]] = {}
    for entry in entries:
        problem = entry.problem
        groups.setdefault((problem.op.value, kind_of(problem), dtype_of(problem)), []).append(entry)
    ordered = sorted(groups.items(), key=lambda item: (OPERATIONS[item[0][0]], PLACES[item[0][1]], item[0][2]))
    return [_group(device, *names, members) for names, members in ordered]


def _group(device: str, op: str, kind: str, dtype: str, entries: list[CacheEntry]) -> Group:
    best = [(entry, rivals[0]) for entry in entries if (rivals := figures.others(entry))]
    leads = [figures.lead_over(entry, rival) for entry, rival in best]
    standings = Counter(map(figures.standing, leads))
    names = Counter(rival.name for _, rival in best).most_common(1)
    return Group(
        device=device,
        op=op,
        dtype=dtype,
        kind=kind,
        problems=len(entries),
        mean=figures.geometric_mean(map(figures.middle, leads)) if leads else None,
        ahead=standings["good"],
        even=standings[""],
        behind=standings["bad"],
        strongest=", ".join(f"{name} ({count} of {len(best)})" for name, count in names),
        absent=_absent(entries),
    )


def _absent(entries: list[CacheEntry]) -> str:
    rows = [(row.name, row.absent.total()) for row in attendance.of(entries) if row.absent]
    words = [name if count == len(entries) else f"{name} in {count}" for name, count in rows]
    unrecorded = sum(entry.absent is None for entry in entries)
    old = f"not recorded in {unrecorded}" if unrecorded < len(entries) else "not recorded"
    return ", ".join([*words, *([old] if unrecorded else [])])
