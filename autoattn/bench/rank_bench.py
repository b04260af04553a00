"""Benchmark of one attention over ranks, at the sizes of a published table of rings: checked, then timed.

What fails with one number of ranks becomes the state of its rows, and the others go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from autoattn import distributed
from autoattn.errors import AutoattnError, GroupError
from autoattn.search import rank_processes
from autoattn.search.rank_processes import RankTimer

NAME = "ring_v2_collective"  # of the published rows (benchmarks/shapes/sparse_patterns.yaml)
BATCHES, LENGTHS, HEADS = (1, 2), (512, 1024), (8, 16)
HEAD_DIM = 64  # the table does not say it
ALLOWED = 1e-4  # of an output of float32, whose products are exact
COLUMNS = (
    "Implementation", "Ranks", "Batch", "Seq Len", "Heads", "Time (ms)", "Memory (MB)", "Throughput (tok/s)", "Status",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call, forward and without a mask, in float32."""

    ranks: int
    batch: int
    seq: int  # tokens of the whole sequence
    heads: int
    seconds: float | None = None  # of the slowest rank; None where there is none
    memory_bytes: int | None = None  # that the first rank had allocated at most; None on the CPU
    detail: str = ""  # why it failed

    def cells(self) -> tuple[str, ...]:
        """The row as the table has it."""
        sizes = (*(str(size) for size in (self.ranks, self.batch, self.seq, self.heads)),)
        if self.seconds is None:
            return NAME, *sizes, "N/A", "N/A", "N/A", f"✗ {self.detail}"
        memory = "N/A" if self.memory_bytes is None else f"{self.memory_bytes / 2**20:.2f}"
        rate = f"{self.batch * self.seq / self.seconds:.0f}"
        return NAME, *sizes, f"{self.seconds * 1e3:.3f}", memory, rate, "✓"


def rows(numbers: Sequence[int], backend: str) -> Iterator[Row]:
    """The rows of each number of ranks, each in new processes.

    Args:
        backend: nccl for cards, gloo for the CPU.
    """
    count = torch.cuda.device_count()
    for ranks in numbers:
        if backend == "nccl" and ranks > count:
            yield from failed(ranks, f"{ranks} GPUs are needed, there are {count}")
            continue
        try:
            yield from rank_processes.run(measured, ranks, backend, list[Row])
        except GroupError as error:
            yield from failed(ranks, str(error))


def failed(ranks: int, detail: str) -> Iterator[Row]:
    """The rows of a number of ranks that have no times."""
    return (Row(ranks=ranks, batch=b, seq=s, heads=h, detail=detail) for b, s, h in sizes())


def sizes() -> Iterable[tuple[int, int, int]]:
    """Batch, tokens and heads of each row, in the published order."""
    return itertools.product(BATCHES, LENGTHS, HEADS)


def measured(timer: RankTimer) -> list[Row]:
    """What the ranks of a group measure together."""
    return [_measured(timer, *each) for each in sizes()]


def _measured(timer: RankTimer, batch: int, seq: int, heads: int) -> Row:
    group, device = timer.ranks.group, timer.device
    row = partial(Row, ranks=timer.ranks.size, batch=batch, seq=seq, heads=heads)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, batch, heads, seq, HEAD_DIM, generator=generator)
    query, key, value = (distributed.shard(tensor, 2, group).to(device) for tensor in whole)

    def call() -> Tensor:
        output = distributed.context_attention(query, key, value, group=group, seq_len=seq)
        assert isinstance(output, Tensor)
        return output

    try:
        with torch.no_grad():
            error = _error(timer, whole, call())
            if error > ALLOWED:
                return row(detail=f"wrong by {error:.2g}")
            seconds = timer.time(call).seconds
            if device.type != "cuda":
                return row(seconds=seconds)
            torch.cuda.reset_peak_memory_stats(device)
            call()
            return row(seconds=seconds, memory_bytes=torch.cuda.max_memory_allocated(device))
    except (AutoattnError, torch.OutOfMemoryError) as error:  # on all ranks alike
        return row(detail=f"{type(error).__name__}: {error}".partition("\n")[0])


def _error(timer: RankTimer, whole: Tensor, output: Tensor) -> float:
    """The largest error of all ranks' outputs."""
    expected = torch.nn.functional.scaled_dot_product_attention(*whole.double())
    own = distributed.shard(expected, 2, timer.ranks.group).to(output.device)
    return timer.largest(float((output - own).abs().max()))


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    for row in rows:
        yield f"| {' | '.join(row.cells())} |"
