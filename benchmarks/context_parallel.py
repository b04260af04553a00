"""Measures attention over the GPUs of one host, beside PyTorch's own ring and all-gather.

python benchmarks/context_parallel.py [--ranks 2] [--tokens 8192,16384] [--rows causal,packed,window] [--simulate]
    [--write]
python benchmarks/context_parallel.py --short [--ranks 1]    the published sizes of a ring over one rank and more

Without torchrun, the script starts a process for each rank. Efficiency is that of ring-flash-attention's README: calls
of one rank on its own tokens a second, over calls of all ranks a second times their number, since N ranks have N * N
times the work of one. A row has the slowest rank's time. The window's row keeps the tokens of a rank and has the ideal
of a call on them alone. The simulation computes the same hops from the times of single calls and the link's speed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kept import keep, told
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoattn
from autoattn import distributed
from autoattn.distributed import partial_call, schedule
from autoattn.distributed.partial_call import Terms
from autoattn.distributed.rectangles import Reach, Rectangle
from autoattn.distributed.schedule import Hop, Method, Split
from autoattn.distributed.sharding import Sharding

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
DOCUMENTS = (0.05, 0.4, 0.02, 0.2, 0.08, 0.25)  # shares of a packed sequence
WINDOW = (4096, 0)
SIMULATED = (2, 4, 8, 16, 32, 64)
REPEATS = 7
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
        for _ in range(3):
            call()
        times = []
        for _ in range(REPEATS):
            dist.barrier(self.group)
            times.append(self._timed(call))
        longest = torch.tensor([statistics.median(times)], device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        return longest.item()

    def alone(self, call: Call) -> float:
        """Seconds of a call that no other rank takes part in."""
        for _ in range(3):
            call()
        return statistics.median(self._timed(call) for _ in range(REPEATS))

    def _timed(self, call: Call, count: int = 3) -> float:
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


def stepped(attend: Callable[[], Tensor], learners: Sequence[Tensor], pull: Tensor, *, learns: bool) -> Call:
    """A forward pass, or both passes."""

    def both() -> object:
        return torch.autograd.grad(attend(), learners, pull)

    def forward() -> object:
        with torch.no_grad():
            return attend()

    return both if learns else forward


def one_rank(bench: Bench, row: Row, *, learns: bool) -> float:
    """Seconds of the plain call on the tokens of a rank."""
    packed = row.name == "packed"
    query, key, value, pull = bench.tensors(row.tokens, learns=learns, packed=packed)
    words = {**row.words, **bench.sinks(row)}
    if packed:
        offsets = torch.tensor(row.offsets(1), dtype=torch.int32, device=bench.device)
        lengths = offsets, offsets, row.tokens, row.tokens
        attend: Callable[[], Tensor] = lambda: autoattn.packed_attention(query, key, value, *lengths, **words)  # noqa: E731
    else:
        attend = lambda: autoattn.attention(query, key, value, layout="bshd", **words)  # noqa: E731
    return bench.alone(stepped(attend, (query, key, value), pull, learns=learns))


def by_autoattn(bench: Bench, row: Row, *, method: str, learns: bool) -> float:
    """Seconds of the call over all ranks."""
    packed = row.name == "packed"
    offsets = row.offsets(bench.size)
    tokens = Split(offsets=tuple(offsets), ranks=bench.size, sharding=Sharding.ZIGZAG).lengths[bench.rank]
    query, key, value, pull = bench.tensors(tokens, learns=learns, packed=packed)
    words = {**row.words, **bench.sinks(row), **({"cu_seqlens": offsets} if packed else {"layout": "bshd"})}

    def attend() -> Tensor:
        return distributed.context_attention(query, key, value, group=bench.group, method=method, **words)

    return bench.slowest(stepped(attend, (query, key, value), pull, learns=learns))


def by_pytorch(bench: Bench, row: Row, *, rotation: str, backend: SDPBackend, heads_kv: int, learns: bool) -> float:
    """Seconds of PyTorch's ring over all ranks."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    shapes = [(1, heads, row.tokens * bench.size, HEAD_DIM) for heads in (HEADS, heads_kv, heads_kv)]
    three = [torch.randn(shape, device=bench.device, dtype=DTYPE) for shape in shapes]
    context: AbstractContextManager[Any] = context_parallel(bench.mesh, buffers=three, buffer_seq_dims=[2] * 3)
    with context, sdpa_kernel(backend):
        learners = [tensor.detach().requires_grad_(learns) for tensor in three]
        pull = torch.randn_like(learners[0])

        def attend() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                *learners, is_causal=True, enable_gqa=heads_kv != HEADS
            )

        return bench.slowest(stepped(attend, learners, pull, learns=learns))


# --- Simulation -------------------------------------------------------------------------------------------------------


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
            if merges:  # a float32 total is read and written, for outputs and for gradients of queries
                rows = sum(rectangle.queries[1] - rectangle.queries[0] for rectangle in each)
                seconds += rows * HEADS * HEAD_DIM * 10 * (2 if learns else 1) / memory_speed(bench)
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


# --- Tables -----------------------------------------------------------------------------------------------------------


def measured(bench: Bench, row: Row, *, learns: bool) -> Iterable[tuple[str, float | str]]:
    """(contestant, seconds or why there are none)."""
    yield "autoattn ring", by_autoattn(bench, row, method="ring", learns=learns)
    yield "autoattn all-gather", by_autoattn(bench, row, method="allgather", learns=learns)
    if row.name != "causal" or bench.size == 1:
        return
    for rotation in ("alltoall", "allgather"):
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            for heads_kv in (HEADS_KV, HEADS):  # keys of all heads, where it takes no others
                name = f"PyTorch {rotation}, {backend.name.partition('_')[0].lower()}, {heads_kv} key heads"
                given = {"rotation": rotation, "backend": backend, "heads_kv": heads_kv}
                try:
                    yield name, by_pytorch(bench, row, **given, learns=learns)
                    break
                except (RuntimeError, NotImplementedError, AssertionError) as error:
                    yield name, f"{type(error).__name__}: {error}".partition("\n")[0][:80]


def table(bench: Bench, rows: Iterable[Row], *, simulates: bool) -> Iterable[str]:
    """Lines of Markdown, as they are measured."""
    yield "| row | tokens a rank | passes | who | ms | efficiency |"
    yield "|---|---|---|---|---|---|"
    speed = link(bench)
    simulations = []
    for row in rows:
        for learns in (False, True):
            passes = "both" if learns else "forward"
            alone = one_rank(bench, row, learns=learns)
            ideal = alone if row.name == "window" else alone * bench.size
            yield f"| {row.name} | {row.tokens} | {passes} | one rank on its tokens | {alone * 1e3:.3f} | |"
            own = 0.0
            for who, seconds in measured(bench, row, learns=learns):
                told_time = seconds if isinstance(seconds, str) else f"{seconds * 1e3:.3f}"
                share = "" if isinstance(seconds, str) else f"{ideal / seconds:.1%}"
                own = seconds if not own and isinstance(seconds, float) else own
                yield f"| {row.name} | {row.tokens} | {passes} | {who} | {told_time} | {share} |"
                torch.cuda.empty_cache()
            if simulates:
                simulations.append((row, passes, learns, alone, own))
    if simulates:
        yield ""
        yield f"link {speed[0] / 1e9:.0f} GB/s each way, {speed[1] * 1e6:.0f} us; simulated efficiency by ranks:"
        yield ""
        yield from simulation(bench, simulations, speed)


SHORT_DIM = 64  # the published table does not say it


def short_table(bench: Bench) -> Iterable[str]:
    """Forward passes in float32 without a mask, by the sizes of a published ring (ring_v2_collective)."""
    yield "| implementation | ranks | batch | seq len | heads | time (ms) | memory (MB) | throughput (tok/s) |"
    yield "|---|---|---|---|---|---|---|---|"
    for batch, seq, heads in itertools.product((1, 2), (512, 1024), (8, 16)):
        shape = batch, heads, seq // bench.size, SHORT_DIM
        query, key, value = (torch.randn(shape, device=bench.device) for _ in range(3))

        def call() -> Tensor:
            return distributed.context_attention(query, key, value, group=bench.group)  # noqa: B023 - called here

        with torch.no_grad():
            seconds = bench.slowest(call)
            torch.cuda.reset_peak_memory_stats()
            call()
        memory = torch.cuda.max_memory_allocated() / 2**20
        sizes = f"{bench.size} | {batch} | {seq} | {heads}"
        yield f"| context_attention, ring | {sizes} | {seconds * 1e3:.3f} | {memory:.2f} | {batch * seq / seconds:.0f} |"


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


def run(rank: int, size: int, given: argparse.Namespace) -> None:
    """What each process does."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    mesh = init_device_mesh("cuda", (size,))
    bench = Bench(group=mesh.get_group(), mesh=mesh, rank=rank, size=size, device=device)
    rows = [Row(name=name, tokens=int(tokens)) for name in given.rows.split(",") for tokens in given.tokens.split(",")]
    lines = short_table(bench) if given.short else table(bench, rows, simulates=given.simulate)
    if rank == 0:
        card = torch.cuda.get_device_name(device)
        print(f"{size} x {card}, PyTorch {torch.__version__}, {HEADS}/{HEADS_KV} heads, D{HEAD_DIM}, bfloat16\n")
        text = "\n".join(told(lines))
        if given.write:
            keep("context_parallel", f"# Attention over {size} ranks\n\n{size} x {card}\n\n{text}")
    else:
        for _ in lines:
            pass
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks, or is one of torchrun's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="processes to start; all GPUs when 0")
    parser.add_argument("--tokens", default="8192,32768", help="of a rank")
    parser.add_argument("--rows", default="causal,packed,window", help="kinds of attention")
    parser.add_argument("--short", action="store_true", help="short sequences in float32 instead")
    parser.add_argument("--simulate", action="store_true", help="simulate other numbers of ranks")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results")
    given = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    size = given.ranks or torch.cuda.device_count()
    mp.spawn(run, args=(size, given), nprocs=size)


if __name__ == "__main__":
    main()
