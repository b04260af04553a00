"""Outcomes of a variant: every trial ends as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from autoattn.core.variant import Variant


class Outcome(str, Enum):
    """How a trial ended; everything but OK is fed back to the search as bad."""

    OK = "ok"
    INFEASIBLE = "infeasible"  # arithmetic, or the compiler's own report, proves that it cannot launch
    COMPILE_ERROR = "compile error"
    LAUNCH_ERROR = "launch error"
    WRONG_RESULT = "wrong result"
    TIMEOUT = "timeout"
    CRASH = "crash"  # the worker process died
    TOO_SLOW = "too slow"  # arithmetic leaves it slower than a variant that was tried: it was not compiled
    INTERPRETER_CRASH = "interpreter crash"  # an interpreter raised: nobody knows whether the numbers are right
    # What follows says nothing of a variant: it is never journalled, and the next run tries the variant anew.
    READ_ONLY = "read-only"  # a folder that must be written cannot be
    DISK_FULL = "disk full"
    MISSING_PROGRAM = "missing program"  # ptxas, nvdisasm
    OUT_OF_MEMORY = "out of memory"  # the host's, not the GPU's
    HOST_ERROR = "host error"  # the system refused something else

    @property
    def of_environment(self) -> bool:
        """Whether the machine failed rather than the variant."""
        return self in _OF_ENVIRONMENT

    @property
    def ends_run(self) -> bool:
        """Whether no other variant would fare better; where memory was short, a smaller one may."""
        return self.of_environment and self is not Outcome.OUT_OF_MEMORY


_OF_ENVIRONMENT = frozenset(
    {
        Outcome.READ_ONLY,
        Outcome.DISK_FULL,
        Outcome.MISSING_PROGRAM,
        Outcome.OUT_OF_MEMORY,
        Outcome.HOST_ERROR,
    }
)


class Evidence(str, Enum):
    """What a cache entry rests on."""

    MEASURED = "measured"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticReport:
    """What the machine code says of a kernel, read without a GPU."""

    digest: str  # of the source
    arch: int  # compute capability times ten: 80, 90
    registers: int  # per thread
    spilled_bytes: int  # stack frame per thread
    shared_bytes: int  # per block, static and dynamic
    num_warps: int
    code_bytes: int
    # Opcode -> instructions of one warp in one pass of the loop over keys that masks nothing (or of the only loop).
    loop: dict[str, int] = field(default_factory=dict)
    # The same for the loop that masks, when the kernel has two; else empty.
    masked_loop: dict[str, int] = field(default_factory=dict)
    # Digest of the machine code and of what a launch does with it: texts that share it are one kernel. "" if unknown.
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model of the GPU expects, and which unit it expects to bind."""

    time_us: float
    bound: str  # tensor, exp, issue, shared, l2, dram, launch or code; latency when none of them takes half of the time
    parts_us: dict[str, float]  # microseconds that each unit would need alone
    occupancy: int  # blocks that fit on one SM
    waves: float  # grid / (SMs x occupancy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the gate says of a kernel's numbers."""

    ok: bool
    checks: int  # problems compared with the reference
    max_error: float  # largest absolute error against the reference, in the check that came closest to failing
    rms_error: float  # root mean square error, the worst check's
    allowed: float  # what max_error was allowed to be, in that check
    reason: str = ""  # why not, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A kernel's time: cold L2, warm GPU, interleaved with its rivals."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    tflops: float  # kept pairs only
    clock_mhz: int | None = None  # SM clock, median over the rounds
    throttled: bool = False  # the driver reported a thermal or power slowdown during some round


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What one call costs when calls follow one another without a pause: the whole card's, by NVML's counter."""

    joules: float  # of one call
    watts: float  # meanwhile, on average

    def __post_init__(self) -> None:
        if not (0.0 < self.joules < math.inf and 0.0 < self.watts < math.inf):
            raise ValueError("joules and watts must be above 0 and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One variant's way through the pipeline."""

    variant: Variant
    outcome: Outcome
    digest: str = ""  # of the rendered source, once there is one
    detail: str = ""  # the reason, in words, when the outcome is not OK
    report: StaticReport | None = None
    prediction: Prediction | None = None
    verdict: Verdict | None = None
    measurement: Measurement | None = None

    @property
    def time_us(self) -> float | None:
        """Measured time if there is one, else the predicted one, in microseconds; None when it failed."""
        if self.outcome is not Outcome.OK:
            return None
        if self.measurement is not None:
            return self.measurement.median_us
        return self.prediction.time_us if self.prediction is not None else None
