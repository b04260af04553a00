"""What the cache remembers of a problem: the winner and its evidence."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoattn.problem import Problem
from autoattn.trial import Evidence, Measurement, Prediction, StaticReport, Verdict
from autoattn.variant import Value, Variant

KERNEL = "kernel"  # the choice of an entry whose own kernel is the fastest; else the name of the rival that is


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another way to compute the same attention, timed in the same rounds."""

    name: str  # "sdpa" as the user calls it, "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "template default", ...
    measurement: Measurement
    max_error: float | None = None  # against the same reference as the winner's; None where it was not compared


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
class SearchRecord:
    """How the winner was found."""

    effort: str
    seed: int
    trials: int  # distinct variants that were tried
    outcomes: dict[str, int] = field(default_factory=dict)  # outcome -> trials
    spaces: dict[str, str] = field(default_factory=dict)  # template -> digest of its search space


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
    report: StaticReport | None = None
    rivals: tuple[Rival, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    search: SearchRecord
    versions: dict[str, str] = field(default_factory=dict)  # autoattn, torch, triton and, when measured, driver

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
