"""Results of the pass benchmark: times of forward, backward and both, and their memory."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from enum import Enum

from autoattn.bench.training_results import Numbers, State, Whose
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem


class Table(str, Enum):
    """Which of the published tables."""

    ATTENTION = "attention"  # benchmark_attn: batch 8, no heads, every pair
    FLASH = "flash"  # FlashAttention-2 against PyTorch: one head of one sequence, causal


class Part(str, Enum):
    """What one sample holds."""

    FORWARD = "forward"  # as a step that will be differentiated runs it
    BACKWARD = "backward"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The calls of a table: every context with every width in every dtype."""

    batch: int
    contexts: tuple[int, ...]
    head_dims: tuple[int, ...]
    numbers: tuple[Numbers, ...]
    causal: bool


TABLES = {
    Table.ATTENTION: Sizes(
        batch=8, contexts=(256, 1024, 4096, 8192, 16384), head_dims=(16, 32, 64, 128), numbers=(Numbers.FLOAT32,),
        causal=False,
    ),
    Table.FLASH: Sizes(
        batch=1, contexts=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768), head_dims=(16, 32, 64),
        numbers=(Numbers.BFLOAT16, Numbers.FLOAT32), causal=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a table, of one head."""

    table: Table
    context: int  # tokens
    head_dim: int
    numbers: Numbers

    @property
    def problem(self) -> Problem:
        """The call's outputs; float32 products are IEEE, as PyTorch has them by default."""
        sizes = TABLES[self.table]
        return Problem(
            dtype=DType.BFLOAT16 if self.numbers is Numbers.BFLOAT16 else DType.FLOAT32, batch=sizes.batch, heads_q=1,
            heads_kv=1, seq_q=self.context, seq_kv=self.context, head_dim=self.head_dim,
            mask=Mask.parse("causal" if sizes.causal else "full"),
        )  # fmt: skip

    @property
    def lost(self) -> bool:
        """Whether the tables' author ran out of memory here, or has N/A beside such a row."""
        if self.table is Table.ATTENTION:
            return self.context == 16384
        return self.context == 32768 and self.numbers is Numbers.FLOAT32

    def __str__(self) -> str:
        return f"{self.table.value} {self.context:,} D{self.head_dim} {self.numbers.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to time, and for how long."""

    tables: tuple[Table, ...] = tuple(Table)
    attention: tuple[Whose, ...] = (Whose.OURS, Whose.NAIVE, Whose.SDPA)
    contexts: tuple[int, ...] = ()  # all of a table's when empty
    head_dims: tuple[int, ...] = ()  # the same
    numbers: tuple[Numbers, ...] = tuple(Numbers)
    seconds: float = 0.1  # of rounds, for each attention and part
    seed: int = 0  # of the inputs, and of the order within rounds

    def cases(self) -> list[Case]:
        """The calls, in the tables' order."""
        return [
            Case(table=table, context=context, head_dim=head_dim, numbers=numbers)
            for table in self.tables
            for context in TABLES[table].contexts
            if not self.contexts or context in self.contexts
            for head_dim in TABLES[table].head_dims
            if not self.head_dims or head_dim in self.head_dims
            for numbers in TABLES[table].numbers
            if numbers in self.numbers
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """One part of one row."""

    samples_us: tuple[float, ...]  # of one call each
    calls: int = 1  # in one sample
    graph: bool = False  # a sample was the replay of a CUDA graph, since the host would be slower than the card

    @property
    def ms(self) -> float:
        """Median, in milliseconds."""
        return statistics.median(self.samples_us) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attention on one call."""

    case: Case
    whose: Whose
    state: State = State.OK
    detail: str = ""  # why not, or why not all, in words
    ran: str = ""  # what computed it
    times: dict[Part, Time] = field(default_factory=dict)
    # Allocated, inputs and their gradients included: before the backward pass, and at most in both passes.
    before_bytes: int | None = None
    peak_bytes: int | None = None

    def ms(self, part: Part) -> float:
        """Median of a part in milliseconds; NaN where it has none."""
        return self.times[part].ms if part in self.times else math.nan


@dataclass(slots=True, kw_only=True)
class Run:
    """All cases, and what a reader must know to believe and to repeat them."""

    machine: dict[str, str]
    command: str
    options: Options
    cases: list[list[Row]] = field(default_factory=list)  # rows of one call each

    def of(self, table: Table) -> list[list[Row]]:
        """The cases of a table."""
        return [rows for rows in self.cases if rows[0].case.table is table]


def over_ours(rows: list[Row], whose: Whose, part: Part) -> float:
    """Another attention's time over ours: above 1 ours is faster; NaN where either has none."""
    times = {row.whose: row.ms(part) for row in rows}
    return times.get(whose, math.nan) / times.get(Whose.OURS, math.nan)
