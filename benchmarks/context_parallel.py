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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from context_simulation import link, simulation
from kept import keep, told
from rank_timing import DTYPE, HEAD_DIM, HEADS, HEADS_KV, Bench, Call, Row
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoattn
from autoattn import distributed
from autoattn.distributed.schedule import Split
from autoattn.distributed.sharding import Sharding


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
        numbers = f"{seconds * 1e3:.3f} | {memory:.2f} | {batch * seq / seconds:.0f}"
        yield f"| context_attention, ring | {bench.size} | {batch} | {seq} | {heads} | {numbers} |"


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
