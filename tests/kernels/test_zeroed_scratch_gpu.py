"""Counters of tiles that programs share, on a card: streams and graphs at once, and none of them finds another's."""

from __future__ import annotations

from collections.abc import Callable

import kernels
import pytest
import streams
import torch
from torch import Tensor

from autoattn.hardware import nvidia
from autoattn.kernels import compiler, forward, zeroed_scratch
from autoattn.kernels.zeroed_scratch import POOLS
from autoattn.tensors.operands import Operands

pytestmark = pytest.mark.gpu

ARRIVALS = POOLS["arrivals_ptr"]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Tensor]:
    """A launch of 128 tiles, each of which up to four programs share; returns its output, which no launch wrote to."""
    if nvidia.present() is None:
        pytest.skip("needs a card that autoattn knows")
    monkeypatch.setattr(ARRIVALS, "buffers", {})
    problem = kernels.problem(batch=2, heads_q=2, heads_kv=2, seq_q=512, seq_kv=4096, head_dim=64, mask="causal")
    three = [
        torch.randn(problem.batch, problem.heads_q, length, problem.head_dim, dtype=torch.float16, device="cuda")
        for length in (problem.seq_q, problem.seq_kv, problem.seq_kv)
    ]
    operands = Operands(query=three[0], key=three[1], value=three[2], scale=problem.head_dim**-0.5)
    kernel = compiler.load(kernels.source(problem, SPLITS=4), torch.device("cuda"))

    def launched() -> Tensor:
        output = forward.empty_output(problem, operands.query).fill_(float("nan"))
        forward.launch(kernel, problem, operands, output, None)
        return output

    wanted = launched()
    assert torch.isfinite(wanted).all()
    assert torch.equal(launched(), wanted)
    torch.cuda.synchronize()
    return launched


def test_streams_run_at_once_and_each_has_its_own_counters(launch: Callable[[], Tensor]) -> None:
    wanted = launch()
    (outputs,) = streams.at_once([launch], 50)
    assert all(torch.equal(output, wanted) for output in outputs)
    assert len(ARRIVALS.buffers) == 1 + streams.STREAMS
    assert not any(buffer.tensor.any() for buffer in ARRIVALS.buffers.values()), "each launch leaves zeros"


def test_graphs_are_replayed_beside_one_another_and_beside_launches(launch: Callable[[], Tensor]) -> None:
    wanted = launch()

    def beside() -> None:
        assert torch.equal(launch(), wanted)

    for outputs in streams.replayed([launch] * 3, 20, beside=beside):
        assert all(torch.equal(output, wanted) for output in outputs)


def test_no_graph_sets_zeros_however_many_were_captured_before(
    launch: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, in_graphs = zeroed_scratch.new_zeros, []

    def new_zeros(size: int, index: int) -> Tensor:
        in_graphs.append(torch.cuda.is_current_stream_capturing())
        return plain(size, index)

    wanted = launch()
    slabs: dict[int, list[Tensor]] = {}
    monkeypatch.setattr(zeroed_scratch, "slabs", slabs)
    monkeypatch.setattr(ARRIVALS, "buffers", {})
    monkeypatch.setattr(zeroed_scratch, "new_zeros", new_zeros)
    graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
    while len(slabs.get(torch.cuda.current_device(), [])) < 4:
        assert len(graphs) < 200
        assert torch.equal(launch(), wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [launch() for _ in range(250)]
        graphs.append((graph, outputs[-1]))
    assert in_graphs
    assert not any(in_graphs)
    for graph, output in graphs[::10]:
        graph.replay()
        assert torch.equal(output, wanted)


def test_a_pool_that_a_thread_allocates_from_gets_everything_back(launch: Callable[[], Tensor]) -> None:
    """As torch.compile's CUDA graphs ask of what runs while they warm up."""
    wanted, pool = launch(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(torch.cuda.Stream()):
        output = launch()
    torch.cuda.synchronize()
    assert torch.equal(output, wanted)
    assert active(pool) > 0
    del output
    assert active(pool) == 0


def active(pool: torch.cuda.MemPool) -> int:
    """Blocks of a pool that somebody holds."""
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    return sum(block["state"] == "active_allocated" for block in blocks)
