"""Results of a kernel benchmark: rows of contestants, each with its numbers or the reason why it has none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from autoattn.core.problem import Problem
from autoattn.core.variant import Variant

if TYPE_CHECKING:
    from autoattn.core.paired_stats import Pulse


LOOSE = 4.0  # a peer is wrong from this many times the error that the gate allows our kernels


class Inputs(str, Enum):
    """What the operands are like."""

    RANDOM = "random"  # normal
    TRAINED = "trained"  # the first keys draw every query, values have heavy tails


class Ours(str, Enum):
    """Which of our kernels run."""

    DISPATCH = "dispatch"  # what a call runs
    VARIANTS = "variants"  # beside it each kernel that the cache and the seeds of all search spaces name


class State(str, Enum):
    """What became of a contestant."""

    OK = "ok"
    ABSENT = "absent"  # not installed, or it does not do the problem
    FAILED = "failed"
    MEMORY = "out of memory"
    WRONG = "wrong"


class Timing(str, Enum):
    """How one sample is taken."""

    EVENTS = "events"  # one call between two CUDA events, L2 flushed, the host hidden behind a spin of the GPU
    GRAPH = "graph"  # one replay of a CUDA graph of several calls; only the first of them finds a cold L2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to bench."""

    seconds: float = 0.2  # of rounds, for each contestant of a row
    rounds: int | None = None  # in place of seconds
    inputs: Inputs = Inputs.RANDOM
    ours: Ours = Ours.DISPATCH
    beside: Mapping[str, Mapping[str, Variant]] = field(default_factory=dict)  # problem key -> name -> one more of ours
    seed: int = 0  # of the inputs and the order within rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One way to compute a row's problem, and what came of it."""

    name: str
    ours: bool = False
    state: State = State.OK
    detail: str = ""  # why not, in words
    times_us: tuple[float, ...] = ()  # of one call, one a round
    host_us: float | None = None  # median time that the call itself keeps the CPU; None under a CUDA graph
    calls: int = 1  # in one sample
    first_s: float | None = None  # from nothing to the first answer: imports, compilers, the kernel itself
    max_error: float | None = None  # largest absolute error at the compared rows
    allowed: float | None = None  # what the gate allows our kernels there
    route: str = ""  # of ours: template that ran, or the rival that a call takes
    level: str = ""  # of dispatch
    variant: Variant | None = None  # the kernel that ran; None where a rival did

    @property
    def timed(self) -> bool:
        """Whether it is right and has a time."""
        return self.state is State.OK and bool(self.times_us)

    @property
    def median_us(self) -> float:
        """NaN where nothing was timed."""
        return statistics.median(self.times_us) if self.times_us else math.nan

    def quantile_us(self, share: float) -> float:
        """The sample that `share` of all are not above; NaN where nothing was timed."""
        ordered = sorted(self.times_us)
        return ordered[round(share * (len(ordered) - 1))] if ordered else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem and all its contestants, ours first."""

    problem: Problem
    contestants: tuple[Contestant, ...] = ()
    timing: Timing = Timing.EVENTS
    pulses: tuple[Pulse, ...] = ()  # one a round
    note: str = ""

    @property
    def ours(self) -> Contestant | None:
        """Our fastest; None when none of ours is right."""
        return self._fastest(ours=True)

    @property
    def best_peer(self) -> Contestant | None:
        """The fastest peer whose answer is right."""
        return self._fastest(ours=False)

    @property
    def ratio(self) -> float | None:
        """Time of the best peer over ours: above 1 ours is faster."""
        ours, peer = self.ours, self.best_peer
        return peer.median_us / ours.median_us if ours is not None and peer is not None else None

    def tflops(self, contestant: Contestant) -> float:
        """Of the pairs that the mask keeps."""
        return self.problem.flops() / contestant.median_us / 1e6

    def _fastest(self, *, ours: bool) -> Contestant | None:
        timed = [contestant for contestant in self.contestants if contestant.ours is ours and contestant.timed]
        return min(timed, key=lambda contestant: contestant.median_us, default=None)


@dataclass(slots=True, kw_only=True)
class Run:
    """All rows, and what a reader must know to believe and to repeat them."""

    machine: dict[str, str]
    command: str
    options: Options
    peers: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)  # peer -> why it cannot be called here at all
    planned: int = 0
    rows: list[Row] = field(default_factory=list)
