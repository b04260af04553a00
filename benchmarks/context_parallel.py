"""Measures attention over the GPUs of one host, beside PyTorch's own ring and all-gather.

python benchmarks/context_parallel.py [--ranks 2] [--tokens 8192,32768] [--rows causal,pytorch,packed,window]
    [--simulate] [--out FILE]

The script starts a process for each rank, anew for each row, so that one that fails leaves the others. Efficiency is
that of ring-flash-attention's README: calls of one rank on its own tokens a second, over calls of all ranks a second
times their number, since N ranks have N * N times the work of one. A row has the slowest rank's time. The window's row
keeps the tokens of a rank and has the ideal of a call on them alone. What is replayed is the same call in a CUDA graph.
The simulation computes the same hops from the times of single calls and the link's speed. The column of the host has
the milliseconds in which Python and NCCL issue a call, of the rank where that takes the longest. FILE gets the tables
as Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from context_rows import DTYPE, HEAD_DIM, HEADS, HEADS_KV, OURS, Row, over_ranks, stepped, tensors
from context_simulation import Simulation
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoattn
from autoattn.distributed import partial_call
from autoattn.errors import GroupError
from autoattn.hardware import cuda_graph
from autoattn.search import rank_processes
from autoattn.search.rank_processes import CallTime, RankTimer

LIMIT_S = 60.0  # that ranks wait for one that failed alone
PYTORCH = "pytorch"  # the row of PyTorch's own ring, whose calls are causal


def one_rank(timer: RankTimer, row: Row) -> CallTime:
    """The plain call on the tokens of a rank."""
    query, key, value, pull = tensors(timer, row.tokens, learns=row.learns, packed=row.packed)
    words = row.words(timer.device)
    if row.packed:
        offsets = torch.tensor(row.offsets(1), dtype=torch.int32, device=timer.device)
        lengths = offsets, offsets, row.tokens, row.tokens
        attend: Callable[[], Tensor] = lambda: autoattn.packed_attention(query, key, value, *lengths, **words)  # noqa: E731
    else:
        attend = lambda: autoattn.attention(query, key, value, layout="bshd", **words)  # noqa: E731
    return timer.time_alone(stepped(attend, (query, key, value), pull, learns=row.learns))


def by_pytorch(timer: RankTimer, row: Row, *, rotation: str, backend: SDPBackend, heads_kv: int) -> CallTime:
    """PyTorch's ring over all ranks."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    size = timer.ranks.size
    mesh = init_device_mesh("cuda", (size,))
    shapes = [(1, heads, row.tokens * size, HEAD_DIM) for heads in (HEADS, heads_kv, heads_kv)]
    three = [torch.randn(shape, device=timer.device, dtype=DTYPE) for shape in shapes]
    context: AbstractContextManager[Any] = context_parallel(mesh, buffers=three, buffer_seq_dims=[2] * 3)
    with context, sdpa_kernel(backend):
        learners = [tensor.detach().requires_grad_(row.learns) for tensor in three]
        pull = torch.randn_like(learners[0])

        def attend() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                *learners, is_causal=True, enable_gqa=heads_kv != HEADS
            )

        return timer.time(stepped(attend, learners, pull, learns=row.learns))


# --- Tables -----------------------------------------------------------------------------------------------------------

Contestant = tuple[str, Callable[[], CallTime]]  # its name, and what measures it


def ours(timer: RankTimer, row: Row) -> Iterable[Contestant]:
    """Our methods."""
    for name, (method, apart) in OURS.items():
        yield name, partial(_by_method, timer, row, method, apart=apart)
    yield f"{row.own_method}, replayed", partial(replayed, timer, row)


def _by_method(timer: RankTimer, row: Row, method: str, *, apart: bool) -> CallTime:
    as_asked: Any = mock.patch.object(partial_call, "attend_into", return_value=False) if apart else nullcontext()
    with as_asked:
        return timer.time(over_ranks(timer, row, method))


def replayed(timer: RankTimer, row: Row) -> CallTime:
    """The method that suits the mask in a CUDA graph, which the host launches as one."""
    call = over_ranks(timer, row, OURS[row.own_method][0])
    captured = cuda_graph.run_and_capture(call, timer.device, runs=1)  # all ranks run it, which connects them
    return timer.time(captured.replay)


def pytorchs(timer: RankTimer, row: Row) -> Iterable[Contestant]:
    """PyTorch's ring and all-gather, with each of its backends."""
    backends = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for rotation, backend in itertools.product(("alltoall", "allgather"), backends):
        name = f"PyTorch {rotation}, {backend.name.partition('_')[0].lower()}"
        for heads_kv in (HEADS_KV, HEADS):  # keys of all heads, where it takes no fewer
            measure = partial(by_pytorch, timer, row, rotation=rotation, backend=backend, heads_kv=heads_kv)
            yield f"{name}, {heads_kv} key heads", measure


def attempted(measure: Callable[[], CallTime]) -> CallTime | str:
    """The time, or why there is none, which must be so on all ranks."""
    try:
        return measure()
    except Exception as error:  # whatever it is, the other rows go on
        return f"{type(error).__name__}: {error}".partition("\n")[0][:100].replace("|", "/")
    finally:
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def records(timer: RankTimer, name: str, given: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """What is measured of the rows of a name."""
    simulation = Simulation(timer=timer)
    for tokens, learns in itertools.product(map(int, given.tokens.split(",")), (False, True)):
        row = Row(name="causal" if name == PYTORCH else name, tokens=tokens, learns=learns)
        contestants = ours(timer, row) if name != PYTORCH else pytorchs(timer, row)
        times = {}
        if name != PYTORCH:
            contestants = itertools.chain([("one rank", partial(one_rank, timer, row))], contestants)
        for who, measure in contestants:
            times[who] = attempted(measure)
            yield record(row, who, times[who])
        alone, own = times.get("one rank"), times.get(row.own_method)
        if given.simulate and isinstance(alone, CallTime) and isinstance(own, CallTime):
            yield {"simulated": simulation.table_row(row, alone, own), "link": simulation.link_in_words()}


def record(row: Row, who: str, time: CallTime | str) -> dict[str, Any]:
    """A measurement as a line of JSON."""
    outcome = {"failed": time} if isinstance(time, str) else {"seconds": time.seconds, "host": time.issue_seconds}
    return {"row": row.name, "tokens": row.tokens, "passes": row.passes, "who": who, **outcome}


def tables(measurements: Sequence[dict[str, Any]], size: int) -> Iterable[str]:
    """Lines of Markdown."""
    yield "| row | tokens a rank | passes | who | ms | efficiency | host ms |"
    yield "|---|--:|---|---|--:|--:|--:|"
    alone = {_kind(each): each.get("seconds") for each in measurements if each.get("who") == "one rank"}
    for each in measurements:
        if "who" in each:
            yield table_row(each, alone.get(_kind(each)), size)
    simulated = [each for each in measurements if "simulated" in each]
    if simulated:
        yield from ("", f"Simulated efficiency by ranks; the link has {simulated[0]['link']}:", "")
        yield from Simulation.HEAD
        yield from (each["simulated"] for each in simulated)


def table_row(each: dict[str, Any], alone: float | None, size: int) -> str:
    """A line of the table."""
    row = Row(name=each["row"], tokens=each["tokens"], learns=each["passes"] == "both")
    begin = f"| {each['row']} | {each['tokens']} | {each['passes']} | {each['who']} |"
    if "failed" in each:
        return f"{begin} {each['failed']} | | |"
    share = ""
    if alone is not None and each["who"] != "one rank":
        share = f"{row.ideal(alone, size) / each['seconds']:.1%}"
    return f"{begin} {each['seconds'] * 1e3:.3f} | {share} | {each['host'] * 1e3:.2f} |"


def _kind(each: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(each.get(name) for name in ("row", "tokens", "passes"))


def write_records(timer: RankTimer, name: str, given: argparse.Namespace, path: Path) -> int:
    """What each process does; the first writes what it finds into a file, a line of JSON each, and counts these."""
    count = 0
    with path.open("a", encoding="utf-8") as file:
        for each in records(timer, name, given):
            if timer.ranks.rank == 0:
                print(each.get("simulated") or table_row(each, None, 1), flush=True)
                file.write(json.dumps(each) + "\n")
                file.flush()
                count += 1
    return count


def measured(size: int, given: argparse.Namespace, name: str) -> list[Any]:
    """What fresh ranks find of a row; what they had when one of them failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found"
        begin = time.monotonic()
        job = partial(write_records, name=name, given=given, path=path)
        try:
            rank_processes.run(job, size, "nccl", int, seconds=LIMIT_S)
        except GroupError as error:
            print(f"the row {name} ended early: {error}", flush=True)
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
    measurements = [each for name in given.rows.split(",") for each in measured(size, given, name)]
    title = f"{size} x {torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}, autoattn {autoattn.__version__}, "
    title += f"{HEADS}/{HEADS_KV} heads, D{HEAD_DIM}, bfloat16"
    text = "\n".join([f"# Attention over {size} ranks", "", title, "", *tables(measurements, size)])
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
