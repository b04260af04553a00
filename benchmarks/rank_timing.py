"""The ranks of benchmarks/context_parallel.py: what they compute, and how calls are timed on them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
DOCUMENTS = (0.05, 0.4, 0.02, 0.2, 0.08, 0.25)  # shares of a packed sequence
WINDOW = (4096, 0)
REPEATS = 5
TIMED = 0.15  # seconds of calls between two events, so that the host's time before the first one counts for little
MOST_CALLS = 20
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of attention on so many tokens a rank."""

    name: str
    tokens: int  # of a rank

    def offsets(self, ranks: int) -> list[int]:
        """Where documents begin and the last ends, among the tokens of all ranks."""
        if self.name != "packed":
            return [0, self.tokens * ranks]
        lengths = [int(share * self.tokens) * ranks for share in DOCUMENTS[:-1]]
        return list(accumulate([0, *lengths, self.tokens * ranks - sum(lengths)]))

    @property
    def words(self) -> dict[str, Any]:
        """Arguments of the call."""
        return {"window": WINDOW} if self.name == "window" else {"causal": True}


@dataclass(slots=True)
class Bench:
    """This process among the ranks."""

    group: dist.ProcessGroup
    mesh: DeviceMesh
    rank: int
    size: int
    device: torch.device
    call_times: dict[Any, float] = field(default_factory=dict)  # of single calls, in seconds

    def slowest(self, call: Call) -> float:
        """Seconds of a call, the median of the slowest rank's."""
        count = self._count(self._of_all(self._first(call)))
        times = []
        for _ in range(REPEATS):
            dist.barrier(self.group)
            times.append(self._timed(call, count))
        return self._of_all(statistics.median(times))

    def alone(self, call: Call) -> float:
        """Seconds of a call that no other rank takes part in."""
        count = self._count(self._first(call))
        return statistics.median(self._timed(call, count) for _ in range(REPEATS))

    def _first(self, call: Call) -> float:
        """Seconds of the third call, before which kernels are compiled."""
        for _ in range(2):
            call()
        return self._timed(call, 1)

    def _count(self, seconds: float) -> int:
        """Calls between two events: the same on all ranks."""
        return max(1, min(MOST_CALLS, int(TIMED / seconds)))

    def _of_all(self, seconds: float) -> float:
        """The largest of all ranks."""
        longest = torch.tensor([seconds], device=self.device, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        return longest.item()

    def _timed(self, call: Call, count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    def tensors(self, tokens: int, *, learns: bool, packed: bool) -> list[Tensor]:
        """Query, key, value and the output's gradient, [batch, seq, heads, head_dim] or [tokens, heads, head_dim]."""
        torch.manual_seed(self.rank)
        shapes = [(tokens, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)]
        made = [torch.randn(shape if packed else (1, *shape), device=self.device, dtype=DTYPE) for shape in shapes]
        return [*(tensor.requires_grad_(learns) for tensor in made[:3]), made[3]]

    def sinks(self, row: Row) -> dict[str, Tensor]:
        """Of rows that have some."""
        return {"sinks": torch.zeros(HEADS, device=self.device)} if row.name == "window" else {}
