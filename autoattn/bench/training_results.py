"""Results of the training benchmark: rows of models, each with its numbers or the reason why it has none."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from enum import Enum

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)


class Whose(str, Enum):
    """Whose attention a model runs."""

    OURS = "autoattn"
    NAIVE = "naive"
    SDPA = "sdpa"
    FLEX = "flex"


class Numbers(str, Enum):
    """What a model computes in."""

    FLOAT32 = "fp32"
    BFLOAT16 = "bf16"  # by autocast: weights stay float32


class Mode(str, Enum):
    """Who runs a model."""

    EAGER = "eager"
    COMPILED = "compiled"  # by torch.compile, attention and all


class State(str, Enum):
    """What became of a row."""

    OK = "ok"
    MEMORY = "out of memory"
    LONG = "too long"
    FAILED = "failed"
    WRONG = "wrong"  # its loss is another than that of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to time, and for how long."""

    models: tuple[str, ...]
    contexts: tuple[int, ...] = CONTEXTS  # tokens
    attention: tuple[Whose, ...] = tuple(Whose)
    numbers: tuple[Numbers, ...] = tuple(Numbers)
    modes: tuple[Mode, ...] = tuple(Mode)
    batch: int = 4  # the published tables'
    warmup: int = 3  # steps before those that count; the first of them compiles
    steps: int = 10
    limit: float = 120.0  # seconds of a row's steps, without the first one, in which compilers work

    @property
    def planned(self) -> int:
        """Rows in all."""
        choices = (self.models, self.contexts, self.attention, self.numbers, self.modes)
        return math.prod(len(choice) for choice in choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One step, each by a pair of events of its own: none is another two's difference."""

    forward_ms: float  # from tokens to the loss
    backward_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model at one context, with one attention."""

    model: str
    context: int  # tokens
    batch: int
    layers: int
    numbers: Numbers
    mode: Mode
    whose: Whose
    state: State = State.OK
    detail: str = ""  # why not, in words
    ran: str = ""  # what computed attention
    times: tuple[Times, ...] = ()  # one a step
    alone: tuple[Times, ...] = ()  # the attention of one layer, alone
    peak_bytes: int | None = None  # allocated at once in the timed steps: weights, gradients and activations
    first_s: float | None = None  # the first step, compiling included
    loss: float | None = None

    @property
    def case(self) -> tuple[str, int, Numbers, Mode]:
        """What the rows of all attentions share."""
        return self.model, self.context, self.numbers, self.mode

    @property
    def timed(self) -> bool:
        """Whether it is right and has times."""
        return self.state is State.OK and bool(self.times)

    def mean(self, part: str) -> float:
        """Milliseconds of "forward_ms", "backward_ms" or "total_ms"; NaN where nothing was timed."""
        return statistics.fmean(getattr(step, part) for step in self.times) if self.times else math.nan

    def spread(self, part: str) -> float:
        """Standard deviation of the same; NaN below two steps."""
        return statistics.stdev(getattr(step, part) for step in self.times) if len(self.times) > 1 else math.nan

    def attention_ms(self, part: str) -> float:
        """Median of the attention of all layers, run alone."""
        return self.layers * statistics.median(getattr(step, part) for step in self.alone) if self.alone else math.nan

    @property
    def share(self) -> float:
        """Attention's part of a whole step; NaN where either is unknown."""
        return (self.attention_ms("forward_ms") + self.attention_ms("backward_ms")) / self.mean("total_ms")

    @property
    def bound(self) -> float:
        """Amdahl: how many times as fast a step would be if attention took no time; NaN where that is unknown."""
        return 1.0 / (1.0 - self.share) if self.share < 1.0 else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Of whole steps."""
        return self.batch * self.context / self.mean("total_ms") * 1e3


@dataclass(slots=True, kw_only=True)
class Run:
    """All rows, and what a reader must know to believe and to repeat them."""

    machine: dict[str, str]
    command: str
    options: Options
    rows: list[Row] = field(default_factory=list)

    def cases(self) -> list[list[Row]]:
        """Rows that differ in their attention alone, together."""
        cases: dict[tuple[str, int, Numbers, Mode], list[Row]] = {}
        for row in self.rows:
            cases.setdefault(row.case, []).append(row)
        return list(cases.values())


def over_ours(rows: list[Row], whose: Whose) -> float | None:
    """The time of another attention's step over ours: above 1 ours is faster; None where either has none.

    It is the median over rounds, in each of which both took a step; seldom slow steps do not move it.
    """
    times = {row.whose: row.times for row in rows if row.timed}
    if whose not in times or Whose.OURS not in times:
        return None
    both = zip(times[whose], times[Whose.OURS], strict=False)
    return statistics.median(theirs.total_ms / ours.total_ms for theirs, ours in both)
