"""Computes the time of other numbers of ranks for benchmarks/context_parallel.py.

The hops are those of the schedule. Their calls are timed on one rank, and the link between the ranks that there are.
The host's time is that of the measured call, the same for each hop: no simulated call is faster than its hops are
issued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from context_rows import HEAD_DIM, HEADS, HEADS_KV, WINDOW, Row, tensors

from autoattn.core.rank_choice import Link, Method
from autoattn.distributed import partial_call, schedule
from autoattn.distributed.communication import MOST_PIECES
from autoattn.distributed.partial_call import Terms
from autoattn.distributed.rectangles import Reach, Rectangle
from autoattn.distributed.schedule import Hop, Schedule, Transfer
from autoattn.search.rank_processes import CallTime, RankTimer
from autoattn.search.rank_tuning import Measurement

SIMULATED = (2, 4, 8, 16, 32, 64)
ASSUMED = Link(bytes_per_second=300e9, latency_us=20.0)  # of one rank: NVLink of an H100 or H200, beside computation
ROUNDED = 16  # tokens: chunks of documents differ by one token, and share a time
# Bytes an element beside the kernels of a hop's queries that were in an earlier hop: a kernel reads a float32 total and
# writes it in place of its output; a sum of gradients is a pass of its own.
FORWARD_BYTES, BACKWARD_BYTES = 6, 10


@dataclass(slots=True, kw_only=True)
class Simulation:
    """What was timed of single calls, the link and the memory."""

    HEAD: ClassVar[tuple[str, str]] = (
        f"| row | tokens a rank | passes | {' | '.join(map(str, SIMULATED))} | host ms a hop | error as measured |",
        f"|---|--:|---|{'--:|' * (len(SIMULATED) + 2)}",
    )
    timer: RankTimer
    call_times: dict[Any, float] = field(default_factory=dict)  # of single calls, in seconds
    link: Link | None = None
    memory: float = 0.0  # bytes a second of a copy

    def table_row(self, row: Row, alone: CallTime, own: CallTime) -> str:
        """The efficiency of autoattn's ring, or of its all-gather for windows, by the number of ranks.

        Args:
            alone: the plain call on the tokens of a rank.
            own: the call over the ranks that there are.
        """
        size = self.timer.ranks.size
        hop_host = own.issue_seconds / len(_schedule(row, size, 0).hops)
        shares = [f"{row.ideal(alone.seconds, n) / self.seconds(row, n, hop_host):.1%}" for n in SIMULATED]
        error = self.seconds(row, size, hop_host) / own.seconds - 1
        cells = row.name, str(row.tokens), row.passes, *shares, f"{hop_host * 1e3:.2f}", f"{error:+.1%}"
        return f"| {' | '.join(cells)} |"

    def seconds(self, row: Row, ranks: int, hop_host: float) -> float:
        """Seconds of the slowest of so many ranks, of which the first, the middle and the last one are computed.

        Args:
            hop_host: seconds of the host for each hop; it issues a hop while others are computed.
        """
        self._measure_card()
        times = []
        for rank in sorted({0, ranks // 2, ranks - 1}):
            hops = _schedule(row, ranks, rank).hops
            computed = self._pass(row, hops, rank, backward=False)
            if row.learns:
                computed += self._pass(row, hops, rank, backward=True)
            times.append(max(computed, hop_host * len(hops)))
        return max(times)

    def link_in_words(self) -> str:
        """Its speed, and whether it was measured."""
        self._measure_card()
        assert self.link is not None
        source = "assumed" if self.timer.ranks.size == 1 else "measured"
        return f"{self.link.bytes_per_second / 1e9:.0f} GB/s each way and {self.link.latency_us:.0f} us, {source}"

    def _pass(self, row: Row, hops: Sequence[Hop], rank: int, *, backward: bool) -> float:
        """Seconds of a pass: keys of a hop come, and gradients of an earlier one go, beside the hop before."""
        seconds = computing = 0.0
        returns = [self._traffic(hop.targets, rank) if backward else 0.0 for hop in hops]
        for number, hop in enumerate(hops):
            beside = self._traffic(hop.sources, rank) + (returns[number - 2] if number > 1 else 0.0)
            seconds += max(beside - computing, 0.0)
            computing = self._computing(row, hop, backward=backward, merges=number > 0)
            seconds += computing
        before_last = returns[-2] if len(hops) > 1 else 0.0
        return seconds + max(before_last - computing, 0.0) + returns[-1]

    def _computing(self, row: Row, hop: Hop, *, backward: bool, merges: bool) -> float:
        """Seconds of a hop's calls, and of putting its keys together."""
        copies = (len(hop.sources) > 1 or bool(hop.order)) + (len(hop.order) > MOST_PIECES)
        seconds = copies * 2 * _key_bytes(hop.length) / self.memory
        for call in hop.calls:
            for each in [call] if row.packed else [(rectangle,) for rectangle in call]:
                seconds += self._call_time(row, each, backward=backward)
                if merges:
                    rows = sum(rectangle.queries[1] - rectangle.queries[0] for rectangle in each)
                    seconds += rows * HEADS * HEAD_DIM * (BACKWARD_BYTES if backward else FORWARD_BYTES) / self.memory
        return seconds

    def _traffic(self, transfers: Iterable[Transfer], rank: int) -> float:
        """Seconds of keys and values, or of their gradients, on the link."""
        assert self.link is not None
        tokens = sum(transfer.length for transfer in transfers if transfer.rank != rank)
        return _key_bytes(tokens) / self.link.bytes_per_second + self.link.latency_us / 1e6 if tokens else 0.0

    def _call_time(self, row: Row, call: tuple[Rectangle, ...], *, backward: bool) -> float:
        """Seconds of one pass of a partial call, measured once for each size."""
        if backward:
            return self._timed(row, call, learns=True) - self._timed(row, call, learns=False)
        return self._timed(row, call, learns=False)

    def _timed(self, row: Row, call: tuple[Rectangle, ...], *, learns: bool) -> float:
        """Seconds of the forward pass of a partial call, or of both."""
        sizes = tuple(_size(each, packed=row.packed) for each in call)
        window = call[-1].window
        key = sizes, window, row.name, learns
        if key not in self.call_times:
            queries, keys = (sum(size[axis] for size in sizes) for axis in (0, 1))
            query, _, _, pull = tensors(self.timer, queries, learns=False, packed=row.packed)
            _, *pair, _ = tensors(self.timer, keys, learns=False, packed=row.packed)
            terms = Terms(scale=None, softcap=0.0, deterministic=False, learns=learns)
            device = self.timer.device
            packing = partial_call.Packing.of(list(_moved(sizes)), device) if row.packed else None
            sinks = row.words(device).get("sinks")
            given = (query, pair[0], pair[1]), window, terms, packing

            def run() -> None:
                answer = partial_call.attend(*given, sinks)
                if learns:
                    partial_call.differentiate(*given, answer, (pull, None))

            self.call_times[key] = self.timer.time_alone(run).seconds
        return self.call_times[key]

    def _measure_card(self) -> None:
        """The link and the memory, once."""
        if self.link is not None:
            return
        self.link = ASSUMED if self.timer.ranks.size == 1 else Measurement(timer=self.timer).link()
        numbers = torch.zeros(2**27, device=self.timer.device)
        self.memory = 2 * numbers.nbytes / self.timer.time_alone(lambda: numbers.add_(1.0)).seconds


def _schedule(row: Row, ranks: int, rank: int) -> Schedule:
    window = row.name == "window"
    reach = Reach(left=WINDOW[0], right=0) if window else Reach(right=0)
    return schedule.plan(row.split(ranks), rank, reach, Method.ALLGATHER if window else Method.RING)


def _key_bytes(tokens: int) -> int:
    """Of keys and values."""
    return tokens * HEADS_KV * HEAD_DIM * 2 * 2


def _size(rectangle: Rectangle, *, packed: bool) -> tuple[int, int]:
    """Queries and keys; those of documents rounded."""
    spans = rectangle.queries, rectangle.keys
    queries, keys = (end - begin for begin, end in spans)
    return (_rounded(queries), _rounded(keys)) if packed else (queries, keys)


def _rounded(tokens: int) -> int:
    return max(round(tokens / ROUNDED), 1) * ROUNDED


def _moved(sizes: Iterable[tuple[int, int]]) -> Iterable[Rectangle]:
    """Rectangles of these sizes, one behind the other."""
    queries = keys = 0
    for size_q, size_kv in sizes:
        yield Rectangle(queries=(queries, queries + size_q), keys=(keys, keys + size_kv))
        queries, keys = queries + size_q, keys + size_kv
