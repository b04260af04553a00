"""A cache entry: the winner of a problem, and its evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from autoattn.core.paired_stats import Interval
from autoattn.core.problem import Problem
from autoattn.core.trial import Energy, Evidence, Measurement, Prediction, StaticReport, Verdict
from autoattn.core.variant import Value, Variant

NOT_REHEARSED = "not rehearsed"  # how `CacheEntry.checked` begins where nobody checked a predicted kernel's numbers
KERNEL = "kernel"  # the choice of an entry whose kernel is the fastest that a call can run; else the rival that is
OURS = ("template default", "previous winner")  # rivals that are kernels of this project: no news when they are close


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another way to compute the same attention, timed in the same rounds.

    A call can be dispatched to PyTorch's backends alone, and to no peer from another package.
    """

    name: str  # "sdpa" as the user calls it, "sdpa-flash", "sdpa-cudnn", ..., "template default", or a peer as "fa4"
    measurement: Measurement
    max_error: float | None = None  # against the same reference as the winner's; None where it was not compared
    rms_error: float | None = None  # root mean square error, likewise
    lead: Interval | None = None  # its time over the kernel's in the same rounds; None where these were too few
    energy: Energy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A runner-up, kept for whoever tunes next."""

    template: str
    params: dict[str, Value]
    source_digest: str
    time_us: float  # measured where the entry is measured, else predicted

    @property
    def variant(self) -> Variant:
        """Its point of its template's search space."""
        return Variant.of(self.template, self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A kernel that took part in the finals; the winner or a candidate of the same digest has its parameters."""

    source_digest: str
    median_us: float
    lead: Interval | None = None  # its time over the winner's; None for the winner, and where rounds were too few
    tied: bool = False  # it cannot be told from the fastest finalist, or is as good
    max_error: float  # largest absolute error against float64, at the problem's full size
    rms_error: float  # root mean square error, likewise
    energy: Energy | None = None
    registers: int | None = None  # per thread; None where the machine code was not read, as of those below
    spilled_bytes: int | None = None  # per thread
    shared_bytes: int | None = None  # per block
    num_warps: int | None = None

    def __post_init__(self) -> None:
        if not (0.0 < self.median_us < math.inf and self.max_error >= 0.0 and self.rms_error >= 0.0):
            raise ValueError("a finalist must have a time above 0 and finite, and errors of at least 0")
        sizes = (self.registers, self.spilled_bytes, self.shared_bytes)
        if not all(size is None or size >= 0 for size in sizes) or (self.num_warps is not None and self.num_warps < 1):
            raise ValueError("a finalist's resources must be at least 0, and its warps at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals:
    """How the winner was found among the finalists, and how sure that is."""

    rounds: int  # that counted
    discarded: int  # that did not, since the card was slowed down
    decided: bool  # more rounds would have changed nobody's place in the class of those that are as good
    finalists: tuple[Finalist, ...]  # the winner first, then by time

    @property
    def tied(self) -> tuple[Finalist, ...]:
        """Those that cannot be told from the fastest, without the winner."""
        return tuple(finalist for finalist in self.finalists[1:] if finalist.tied)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstCase:
    """A winner that keeps its first maximum, on inputs that have it compute as many tiles twice as can be."""

    median_us: float
    slowdown: float  # its time over that on normal inputs, the median over rounds that had both
    rounds: int
    max_error: float  # largest absolute error against float64, at the problem's full size
    tiles: int = 0  # of one call; 0 where a kernel does not tell which of them it computed twice
    redone: int = 0  # those that were computed twice

    def __post_init__(self) -> None:
        if not (0.0 < self.median_us < math.inf and 0.0 < self.slowdown < math.inf and self.max_error >= 0.0):
            raise ValueError("a worst case must have times above 0 and finite, and an error of at least 0")
        if not 0 <= self.redone <= self.tiles or self.rounds < 1:
            raise ValueError("a worst case must have a round, and at most as many tiles computed twice as tiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """How the winner was found."""

    effort: str
    seed: int
    trials: int  # distinct variants that were tried
    objective: str = "time"  # what the winner is best at: time, energy or error
    outcomes: dict[str, int] = field(default_factory=dict)  # outcome -> trials
    spaces: dict[str, str] = field(default_factory=dict)  # template -> digest of its search space


class Finding(str, Enum):
    """What a verification found of an entry, on the software and the card of that day."""

    SAME = "same"
    FASTER = "faster"
    SLOWER = "slower"
    OVERTAKEN = "no longer the fastest"
    STALE = "stale"  # it speaks of a kernel that there is no more
    BROKEN = "does not run"
    WRONG = "wrong"
    UNCHECKED = "not checked"  # Triton's interpreter could not run it, which says nothing of the kernel on the card


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A finding that stays with its entry until it is verified or tuned anew.

    Raises:
        ValueError: the finding is none to mark an entry for.
    """

    finding: Finding
    detail: str  # in words
    choice: str = ""  # of OVERTAKEN: the rival that was the fastest, where it was none of our kernels
    versions: dict[str, str] = field(default_factory=dict)  # with which it was found

    def __post_init__(self) -> None:
        if self.finding in (Finding.SAME, Finding.FASTER, Finding.STALE, Finding.UNCHECKED):
            raise ValueError(f"an entry that is {self.finding.value} needs no mark")

    @property
    def holds_back(self) -> bool:
        """Whether the entry may not be dispatched; else it may, and says so."""
        return self.finding in (Finding.BROKEN, Finding.WRONG)

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        return f"autoattn verify found with {versions or 'unknown versions'}: {self.finding.value}, {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """The winner of one problem on one device.

    A measured entry has a passing verdict and a measurement, a predicted entry has a prediction and neither of them.

    Raises:
        ValueError: the evidence and what is there do not agree.
    """

    problem: Problem
    evidence: Evidence
    choice: str = KERNEL
    template: str
    params: dict[str, Value]
    source_digest: str
    space_digest: str
    verdict: Verdict | None = None
    measurement: Measurement | None = None
    prediction: Prediction | None = None
    checked: str = ""  # what the numbers of a predicted kernel stand on, in words; empty in entries older than this
    report: StaticReport | None = None
    rivals: tuple[Rival, ...] = ()
    # Who was not in the finals, as "fa4" -> why; None where that was not recorded: then PyTorch's backends alone were.
    absent: dict[str, str] | None = None
    candidates: tuple[Candidate, ...] = ()
    finals: Finals | None = None  # None where nothing was measured, and in entries that are older than this field
    worst: WorstCase | None = None  # None where no maximum is kept, and in entries that are older than this field
    search: SearchRecord
    versions: dict[str, str] = field(default_factory=dict)  # autoattn, torch, triton and, when measured, driver
    mark: Mark | None = None  # what a verification holds against it

    def __post_init__(self) -> None:
        measured = self.verdict is not None and self.verdict.ok and self.measurement is not None
        unmeasured = self.verdict is None and self.measurement is None and self.prediction is not None
        if not (measured if self.evidence is Evidence.MEASURED else unmeasured):
            raise ValueError(
                f"a {self.evidence.value} entry must rest on "
                + (
                    "a passing verdict and a measurement"
                    if self.evidence is Evidence.MEASURED
                    else "a prediction alone"
                )
            )

    @property
    def variant(self) -> Variant:
        """The winning kernel's point of its template's search space."""
        return Variant.of(self.template, self.params)

    @property
    def is_unrehearsed(self) -> bool:
        """Whether it is known that nobody checked the numbers of a predicted kernel."""
        return self.checked.startswith(NOT_REHEARSED)

    @property
    def triton_release(self) -> str:
        """The release of Triton that it was tuned with, as "3.9"; empty where that is not known."""
        return ".".join(self.versions.get("triton", "").split(".")[:2])

    @property
    def time_us(self) -> float:
        """Measured time of the winning kernel, else the predicted one, in microseconds."""
        if self.measurement is not None:
            return self.measurement.median_us
        assert self.prediction is not None
        return self.prediction.time_us

    @property
    def tflops(self) -> float:
        """Kept-pair TFLOP/s of the winning kernel."""
        return self.problem.flops() / self.time_us / 1e6
