"""float8 in the Gluon template: what it compiles to, what it is launched with and what it refuses; no GPU is needed."""

from __future__ import annotations

from typing import Any

import fake_device
import gluon_kernels
import pytest
import torch
from gluon_kernels import H200, TEMPLATE, Spy, source, variant
from rarely import rarely

from autoattn.codegen import render, search_space
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.variant import Traits, Value
from autoattn.kernels import compiler, forward
from autoattn.kernels.compiler import Kernel, build, inspect, load_module
from autoattn.reference import inputs

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.exhaustive]


def problem(**changes: Any) -> Problem:
    return gluon_kernels.problem(**{"dtype": DType.FLOAT8, "head_dim": 128, **changes})


@pytest.mark.parametrize("softmax", rarely(["online", "vote"], lambda softmax: softmax == "vote"))
def test_weights_become_a_factor_where_they_are(softmax: str) -> None:
    """Two keys and the two that lie 8 further on are one word of a factor, so that the loop moves no bytes."""
    chosen: dict[str, Any] = {"softmax": softmax, "ping_pong": "named", "software_exp2": 0, "queries_in": "shared"}
    plain, small = (
        inspect(source(problem(dtype=dtype), **chosen), 90).loop for dtype in (DType.BFLOAT16, DType.FLOAT8)
    )
    assert small["F2FP"] == plain["F2FP"]
    assert small.get("SHFL", 0) == plain.get("SHFL", 0)
    assert not {"PRMT", "STS", "LDS"} & {name.partition(".")[0] for name in small}
    products = {name: count for name, count in small.items() if name.startswith("QGMMA")}
    assert sum(products.values()) == 8
    assert sum(count for name, count in products.items() if name.endswith(".RS")) == 4, "weights come from registers"


@pytest.mark.parametrize(
    ("mask", "dims"),
    rarely(
        [
            ("full", (128, 128)),
            ("causal", (128, 128)),
            ("causal", (64, 64)),
            ("full", (256, 256)),
            ("causal", (16, 48)),
        ],
        lambda case: case[1] == (16, 48),
    ),
)
def test_seeds_compile_with_what_is_launched_around_them(dims: tuple[int, int], mask: str) -> None:
    call = problem(head_dim=dims[0], head_dim_v=dims[1], mask=mask)
    seeds = search_space.load(TEMPLATE).seeds_for(call, H200)
    assert seeds
    rendered = render.render(call, seeds[0], Traits(alignment=16, lse=True))
    assert inspect(rendered, 90).loop
    before = build(rendered, 90, "forward_before").asm["ptx"]
    assert "ld.global.b32" in before, "four values at a time"
    assert "st.global.v4.b32" in before, "sixteen keys at a time"


def test_values_are_turned_into_room_of_their_own_before_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.set_context(monkeypatch)
    calls: list[Any] = []
    rendered = source(problem(head_dim=80, mask="causal"))
    module = load_module(rendered)
    facts: dict[str, Any] = {"source": rendered, "module": module, "device": torch.device("cpu"), "sm_count": 2}
    kernel = Kernel(compiled=Spy("main", calls), before=Kernel(compiled=Spy("before", calls), **facts), **facts)
    call = problem(
        head_dim=80, mask="causal", batch=2, heads_q=4, heads_kv=2, seq_q=200, seq_kv=301, layout=Layout.BSHD
    )
    operands = inputs.make(call, device=torch.device("cpu"), generator=torch.Generator().manual_seed(0))
    output = forward.empty_output(call, operands.query)
    for _ in range(2):
        forward.launch(kernel, call, operands, output, None)
    assert [(name, grid) for name, grid, _ in calls] == 2 * [("before", (2 * 2 * 3, 1, 1)), ("main", (2, 1, 1))]
    launches = [dict(zip(module.SIGNATURE, arguments, strict=True)) for _, _, arguments in calls]
    rooms = [arguments["value_columns_ptr"] for arguments in launches]
    assert rooms[0].shape == (2, 2, 80, 304), "keys in groups of 16"
    assert rooms[0].dtype is torch.float8_e4m3fn
    assert rooms[0] is rooms[1]
    assert rooms[1] is not rooms[2]
    described = launches[1]["value_columns"]
    assert (described.address, described.shape) == (rooms[0].data_ptr(), (2, 2, 80, 304))
    assert described.strides == (2 * 80 * 304, 80 * 304, 304, 1)
    assert launches[0]["value_ptr"] is operands.value
    assert launches[0]["query_scale_ptr"] is operands.query_scale


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "multiple of 16 bytes": ({"head_dim": 40}, {}),
    "room of their own": ({}, {"output_buffer": "shared", "query_stages": 1}),
    "float8 ends at 448": ({}, {"softmax": "first_max"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_in_words(words: str) -> None:
    facts, params = REFUSED[words]
    reason = search_space.load(TEMPLATE).why_infeasible(variant(problem(), **params), problem(**facts), H200)
    assert reason is not None
    assert words in reason


def test_maxima_that_may_lag_leave_room_for_it() -> None:
    assert torch.finfo(torch.float8_e4m3fn).max == 448.0
    for softmax in ("lazy", "vote"):
        module = load_module(source(problem(), softmax=softmax))
        assert 2.0 ** (module.BOOST.value + module.GROWTH.value) <= 448.0


def test_tensors_at_odd_addresses_are_refused_before_they_are_rendered() -> None:
    with pytest.raises(compiler.CompileError, match="multiples of 16 bytes, got tensors where only 8 divide"):
        source(problem(), Traits(alignment=8))
