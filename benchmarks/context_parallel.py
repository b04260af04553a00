"""Measures attention over the GPUs of one host, beside PyTorch's own ring and all-gather.

python benchmarks/context_parallel.py [--ranks 2] [--tokens 8192,32768] [--rows causal,pytorch,packed,window]
    [--simulate] [--out FILE]

The script starts a process for each rank, anew for each row, so that one that fails leaves the others. Efficiency is
that of ring-flash-attention's README: calls of one rank on its own tokens a second, over calls of all ranks a second
times their number, since N ranks have N * N times the work of one. A row has the slowest rank's time. The window's row
keeps the tokens of a rank and has the ideal of a call on them alone. The simulation computes the same hops from the
times of single calls and the link's speed. FILE gets the tables as Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from context_simulation import link, simulation
from rank_timing import DTYPE, HEAD_DIM, HEADS, HEADS_KV, Bench, Call, Row
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoattn
from autoattn import distributed
from autoattn.distributed import partial_call
from autoattn.distributed.schedule import Split
from autoattn.distributed.sharding import Sharding

LIMIT = timedelta(seconds=60)  # that ranks wait for one that failed alone
PYTORCH = "pytorch"  # the row of PyTorch's own ring, whose calls are causal


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

Contestant = tuple[str, Callable[[], float]]  # its name, and what measures it in seconds
OURS = {  # name -> method, and whether its outputs are merged by a pass of their own
    "ring": ("ring", False),
    "ring, merged apart": ("ring", True),
    "all-gather": ("allgather", False),
    "Ulysses": ("ulysses", False),
}


def ours(bench: Bench, row: Row, *, learns: bool) -> Iterable[Contestant]:
    """Our methods."""
    for name, (method, apart) in OURS.items():
        yield name, lambda: _by_method(bench, row, method, apart=apart, learns=learns)  # noqa: B023 - called at once


def _by_method(bench: Bench, row: Row, method: str, *, apart: bool, learns: bool) -> float:
    as_asked: Any = mock.patch.object(partial_call, "attend_into", return_value=False) if apart else nullcontext()
    with as_asked:
        return by_autoattn(bench, row, method=method, learns=learns)


def pytorchs(bench: Bench, row: Row, *, learns: bool) -> Iterable[Contestant]:
    """PyTorch's ring and all-gather, with each of its backends."""
    backends = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for rotation, backend in itertools.product(("alltoall", "allgather"), backends):
        given = {"rotation": rotation, "backend": backend, "learns": learns}
        name = f"PyTorch {rotation}, {backend.name.partition('_')[0].lower()}"
        yield f"{name}, {HEADS_KV} key heads", lambda: by_pytorch(bench, row, heads_kv=HEADS_KV, **given)  # noqa: B023
        # Keys of all heads, where it takes no fewer.
        yield f"{name}, {HEADS} key heads", lambda: by_pytorch(bench, row, heads_kv=HEADS, **given)  # noqa: B023


def attempted(measure: Callable[[], float]) -> float | str:
    """Seconds, or why there are none, which must be so on all ranks."""
    try:
        return measure()
    except Exception as error:  # whatever it is, the other rows go on
        return f"{type(error).__name__}: {error}".partition("\n")[0][:100].replace("|", "/")
    finally:
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def records(bench: Bench, name: str, given: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """What is measured of the rows of a name."""
    simulations = []
    for tokens, learns in itertools.product(map(int, given.tokens.split(",")), (False, True)):
        row = Row(name="causal" if name == PYTORCH else name, tokens=tokens)
        facts = {"row": row.name, "tokens": tokens, "passes": "both" if learns else "forward"}
        times = {}
        if name != PYTORCH:
            times["one rank"] = attempted(lambda: one_rank(bench, row, learns=learns))  # noqa: B023 - called at once
            yield {**facts, "who": "one rank", "seconds": times["one rank"]}
        contestants = ours if name != PYTORCH else pytorchs
        for who, measure in contestants(bench, row, learns=learns):
            times[who] = attempted(measure)
            yield {**facts, "who": who, "seconds": times[who]}
        own = times.get("all-gather" if name == "window" else "ring")
        if isinstance(own, float) and isinstance(times["one rank"], float):
            simulations.append((row, facts["passes"], learns, times["one rank"], own))
    if given.simulate and simulations:
        speed = link(bench)
        source = "assumed" if bench.size == 1 else "measured"
        words = f"{speed[0] / 1e9:.0f} GB/s each way and {speed[1] * 1e6:.0f} us, {source}"
        lines = [
            "",
            f"Simulated efficiency by ranks; the link has {words}:",
            "",
            *simulation(bench, simulations, speed),
        ]
        yield {"lines": lines}


def tables(found: Sequence[dict[str, Any]], size: int) -> Iterable[str]:
    """Lines of Markdown."""
    yield "| row | tokens a rank | passes | who | ms | efficiency |"
    yield "|---|---|---|---|---|---|"
    alone = {_kind(each): each["seconds"] for each in found if each.get("who") == "one rank"}
    for each in found:
        if "lines" not in each:
            yield table_row(each, alone.get(_kind(each)), size)
    for each in found:
        yield from each.get("lines", ())


def table_row(each: dict[str, Any], alone: float | str | None, size: int) -> str:
    """A line of the table; the ideal is the time of one rank alone, times what ranks have more to do."""
    seconds, share = each["seconds"], ""
    if isinstance(seconds, float) and isinstance(alone, float) and each["who"] != "one rank":
        share = f"{alone * (1 if each['row'] == 'window' else size) / seconds:.1%}"
    told = seconds if isinstance(seconds, str) else f"{seconds * 1e3:.3f}"
    return f"| {each['row']} | {each['tokens']} | {each['passes']} | {each['who']} | {told} | {share} |"


def _kind(each: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(each.get(name) for name in ("row", "tokens", "passes"))


def run(rank: int, size: int, given: argparse.Namespace, name: str, path: str) -> None:
    """What each process does; the first writes what it found into a file, a line of JSON each."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device, timeout=LIMIT)
    mesh = init_device_mesh("cuda", (size,))
    bench = Bench(group=mesh.get_group(), mesh=mesh, rank=rank, size=size, device=device)
    with open(path, "a", encoding="utf-8") as file:
        for each in records(bench, name, given):
            if rank == 0:
                print(told(each), flush=True)
                file.write(json.dumps(each) + "\n")
                file.flush()
    dist.destroy_process_group()


def told(each: dict[str, Any]) -> str:
    """A record for who watches."""
    return "\n".join(each["lines"]) if "lines" in each else table_row(each, None, 1)


def measured(size: int, given: argparse.Namespace, name: str) -> list[Any]:
    """What fresh ranks find of a row; what they had when one of them failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found"
        begin = time.monotonic()
        try:
            mp.spawn(run, args=(size, given, name, str(path)), nprocs=size)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(f"the row {name} ended early: {error}"[-2000:], flush=True)
        print(f"the row {name} took {time.monotonic() - begin:.0f} s\n", flush=True)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Starts the ranks of each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="processes to start; all GPUs when 0")
    parser.add_argument("--tokens", default="8192,32768", help="of a rank")
    parser.add_argument("--rows", default="causal,pytorch,packed,window", help="kinds of attention")
    parser.add_argument("--simulate", action="store_true", help="simulate other numbers of ranks")
    parser.add_argument("--out", type=Path, help="file for the tables")
    given = parser.parse_args()
    size = given.ranks or torch.cuda.device_count()
    found = [each for name in given.rows.split(",") for each in measured(size, given, name)]
    title = f"{size} x {torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}, autoattn {autoattn.__version__}, "
    title += f"{HEADS}/{HEADS_KV} heads, D{HEAD_DIM}, bfloat16"
    text = "\n".join([f"# Attention over {size} ranks", "", title, "", *tables(found, size)])
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
