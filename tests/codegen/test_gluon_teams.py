"""Heads that share keys in the rows of one tile of the Gluon family: what the host passes, and what compiles."""

from __future__ import annotations

from typing import Any

import gluon_kernels
import kernels
import pytest
import torch
from gluon_kernels import H200, TEMPLATE

from autoattn.codegen import render, search_space
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.variant import Source, Value, Variant
from autoattn.kernels import forward
from autoattn.kernels.compiler import Kernel, build, inspect, load_module
from autoattn.kernels.tma_descriptor import Descriptor
from autoattn.reference import inputs

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


def problem(**changes: Any) -> Problem:
    sizes = {"batch": 2, "heads_q": 12, "heads_kv": 2, "seq_q": 100, "seq_kv": 200, "head_dim": 64, "mask": "causal"}
    return kernels.problem(**{**sizes, "dtype": DType.BFLOAT16, **changes})


def variant(problem: Problem, **changes: Value) -> Variant:
    return Variant.of(TEMPLATE, search_space.load(TEMPLATE).default(problem, H200).as_dict() | changes)


def source(problem: Problem, **changes: Value) -> Source:
    return render.render(problem, variant(problem, **changes), render.natural_traits(problem, lse=True))


@pytest.mark.parametrize("layout", [Layout.BHSD, Layout.BSHD])
@pytest.mark.parametrize(("together", "teams"), [(2, 3), (4, 2), (8, 1)])
def test_the_heads_of_a_tile_end_where_their_group_does(together: int, teams: int, layout: Layout) -> None:
    """The TMA unit must neither read nor write heads of the next group, of which there are six each."""
    call = problem(layout=layout)
    module = load_module(source(call, BLOCK_M=64, schedule="one_tile", output_buffer="shared", PACK_GQA=together))
    operands = inputs.make(call, device=torch.device("cpu"), generator=torch.Generator().manual_seed(0))
    output = forward.empty_output(call, operands.query)
    kernel = Kernel(source=None, module=module, compiled=None, device=torch.device("cpu"), sm_count=132)  # type: ignore[arg-type]
    passed = forward.launch_arguments(kernel, call, operands, output, None)
    for name, tensor in (("query", operands.query), ("output", output)):
        descriptor = passed[name]
        assert isinstance(descriptor, Descriptor)
        assert descriptor.shape == (2, 2, 6, 100, 64)
        assert descriptor.strides[1:3] == (6 * tensor.stride(1), tensor.stride(1))
        assert module.DESCRIPTORS[name][0] == [1, 1, together, 64 // together, 64]
    assert forward.launch_grid(kernel, call, operands.query) == (2 * 2 * teams * -(-100 * together // 64),)
    key = passed["key"]
    assert isinstance(key, Descriptor)
    assert key.shape == (2, 2, 200, 64)


@pytest.mark.exhaustive
def test_it_costs_the_loop_over_whole_blocks_nothing() -> None:
    call = gluon_kernels.problem(head_dim=128, mask="causal")
    alone, together = (gluon_kernels.source(call, softmax="vote", PACK_GQA=count) for count in (1, 4))
    loops = [inspect(rendered, 90).loop for rendered in (alone, together)]
    assert abs(sum(loops[1].values()) - sum(loops[0].values())) < 16
    ptx = build(together, 90).asm["ptx"]
    assert "cp.async.bulk.tensor.5d.shared" in ptx
    assert "cp.async.bulk.tensor.5d.global" in ptx


@pytest.mark.parametrize(
    ("kind", "together", "words"),
    [
        ({"heads_kv": 12}, 2, "belong to no head"),
        ({}, 16, "belong to no head"),
        ({"layout": Layout.PACKED, "tokens_q": 200, "tokens_kv": 400}, 2, "must end where its heads do"),
        ({"mask": "blocks:128x128,0.5", "seq_q": 2048, "seq_kv": 2048}, 2, "differ from head to head"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_words(kind: dict[str, Any], together: int, words: str) -> None:
    call = problem(**kind)
    points = search_space.load(TEMPLATE)
    reason = points.why_infeasible(variant(call, PACK_GQA=together), call, H200)
    assert reason is not None
    assert words in reason
