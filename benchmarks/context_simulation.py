"""Computes the time of other numbers of ranks for benchmarks/context_parallel.py.

The hops are those of the schedule; their calls are timed on one rank, and the link between the ranks that there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from rank_timing import HEAD_DIM, HEADS, HEADS_KV, WINDOW, Bench, Row

from autoattn.core.rank_choice import Method
from autoattn.distributed import partial_call, schedule
from autoattn.distributed.partial_call import Terms
from autoattn.distributed.rectangles import Reach, Rectangle
from autoattn.distributed.schedule import Hop, Split
from autoattn.distributed.sharding import Sharding

SIMULATED = (2, 4, 8, 16, 32, 64)


def link(bench: Bench) -> tuple[float, float]:
    """Bytes a second that a rank sends and receives at once, and the seconds of a small exchange."""
    if bench.size == 1:
        return 300e9, 20e-6  # NVLink of an H100 or H200, beside computation

    def exchange(count: int) -> float:
        sent, received = (torch.zeros(count, dtype=torch.uint8, device=bench.device) for _ in range(2))
        after, before = (bench.rank + 1) % bench.size, (bench.rank - 1) % bench.size

        def call() -> None:
            operations = [
                dist.P2POp(dist.isend, sent, group=bench.group, group_peer=after),
                dist.P2POp(dist.irecv, received, group=bench.group, group_peer=before),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return bench.slowest(call)

    large = 2**26
    latency = exchange(1024)
    return large / max(exchange(large) - latency, 1e-9), latency


def call_time(bench: Bench, call: tuple[Rectangle, ...], *, packed: bool, learns: bool) -> float:
    """Seconds of one partial call, both passes or the forward one; measured once for each size."""
    last = call[-1]
    sizes = tuple(
        (each.queries[1] - each.queries[0], each.keys[1] - each.keys[0]) for each in (call if packed else [last])
    )
    key = sizes, last.window, packed, learns
    if key not in bench.call_times:
        queries, keys = (sum(size[axis] for size in sizes) for axis in (0, 1))
        query, _, _, pull = bench.tensors(queries, learns=False, packed=packed)
        _, *pair, _ = bench.tensors(keys, learns=False, packed=packed)
        terms = Terms(scale=None, softcap=0.0, deterministic=False, learns=learns)
        packing = partial_call.Packing.of(list(_moved(sizes)), bench.device) if packed else None
        given = (query, pair[0], pair[1]), last.window, terms, packing

        def run() -> None:
            made = partial_call.attend(*given, None)
            if learns:
                partial_call.differentiate(*given, made, (pull, None))

        bench.call_times[key] = bench.alone(run)
    return bench.call_times[key]


def _moved(sizes: Iterable[tuple[int, int]]) -> Iterable[Rectangle]:
    queries = keys = 0
    for size_q, size_kv in sizes:
        yield Rectangle(queries=(queries, queries + size_q), keys=(keys, keys + size_kv))
        queries, keys = queries + size_q, keys + size_kv


def simulated(bench: Bench, row: Row, ranks: int, speed: tuple[float, float], *, learns: bool) -> float:
    """Seconds of the slowest of so many ranks: a hop's keys come beside the computation of the hop before."""
    split = Split(offsets=tuple(row.offsets(ranks)), ranks=ranks, sharding=Sharding.ZIGZAG)
    reach = Reach(left=WINDOW[0], right=0) if row.name == "window" else Reach(right=0)
    method = Method.ALLGATHER if row.name == "window" else Method.RING
    times = []
    for rank in {0, ranks // 2, ranks - 1}:
        plan = schedule.plan(split, rank, reach, method)
        seconds = computing = 0.0
        for number, hop in enumerate(plan.hops):
            coming = _traffic(hop, rank, speed) * (2 if learns else 1)
            seconds += max(coming - computing, 0.0)
            computing = _computing(bench, hop, packed=row.name == "packed", learns=learns, merges=number > 0)
            seconds += computing
        returning = _traffic(plan.hops[-1], rank, speed) if learns and plan.hops else 0.0
        times.append(seconds + returning)
    return max(times)


def _computing(bench: Bench, hop: Hop, *, packed: bool, learns: bool, merges: bool) -> float:
    seconds = 0.0
    for call in hop.calls:
        calls: Iterable[tuple[Rectangle, ...]] = [call] if packed else [(each,) for each in call]
        for each in calls:
            seconds += call_time(bench, each, packed=packed, learns=learns)
            if merges:
                # The kernel reads a float32 total and writes it in place of its output. A sum of gradients is a pass.
                rows = sum(rectangle.queries[1] - rectangle.queries[0] for rectangle in each)
                seconds += rows * HEADS * HEAD_DIM * (16 if learns else 6) / memory_speed(bench)
    return seconds


def _traffic(hop: Hop, rank: int, speed: tuple[float, float]) -> float:
    tokens = sum(source.length for source in hop.sources if source.rank != rank)
    rate, latency = speed
    return tokens * HEADS_KV * HEAD_DIM * 2 * 2 / rate + latency if tokens else 0.0


def memory_speed(bench: Bench) -> float:
    """Bytes a second of a copy in the card's memory."""
    if "memory" not in bench.call_times:
        numbers = torch.zeros(2**27, device=bench.device)
        bench.call_times["memory"] = 2 * numbers.nbytes / bench.alone(lambda: numbers.add_(1.0))
    return bench.call_times["memory"]


def simulation(bench: Bench, measured_rows: Iterable[tuple[Any, ...]], speed: tuple[float, float]) -> Iterable[str]:
    """Efficiency of autoattn's ring, or of its all-gather for windows, by the number of ranks."""
    yield "| row | tokens a rank | passes | " + " | ".join(map(str, SIMULATED)) + " | error at this number |"
    yield "|---" * (len(SIMULATED) + 4) + "|"
    for row, passes, learns, alone, own in measured_rows:
        shares = []
        for ranks in SIMULATED:
            ideal = alone if row.name == "window" else alone * ranks
            shares.append(f"{ideal / simulated(bench, row, ranks, speed, learns=learns):.1%}")
        error = f"{simulated(bench, row, bench.size, speed, learns=learns) / own - 1:+.1%}"
        yield f"| {row.name} | {row.tokens} | {passes} | " + " | ".join([*shares, error]) + " |"
