"""What the host side of the backward kernels launches, ordinary and bound."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_device
import gradient_kernels
import hopper_gradients
import pytest
import torch
from fake_device import CUDA, Launches

from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.variant import Source
from autoattn.kernels import backward, manifest
from autoattn.kernels.backward import EDGE
from autoattn.kernels.bound_launch import Bound
from autoattn.kernels.compiler import Kernel, load_module
from autoattn.kernels.tma_descriptor import Descriptor
from autoattn.tensors.operands import View
from autoattn.validation import gradient_check


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.set_context(monkeypatch)
    fake_device.set_streams(monkeypatch, lambda index: 7)


def kernel_of(problem: Problem, **changes: Any) -> Kernel:
    return launched(gradient_kernels.source(problem, **changes))


def launched(source: Source) -> Kernel:
    """Kernels of a source whose launches are kept."""
    module = load_module(source)
    whole = Kernel(source=source, module=module, compiled=None, device=CUDA, sm_count=132)
    return replace(
        whole, parts=tuple(replace(whole, name=name, compiled=Launches()) for name in manifest.of(module).parts)
    )


def address(given: Any) -> Any:
    return given.data_ptr() if isinstance(given, torch.Tensor | Descriptor) else given


FLOAT32: dict[str, Any] = {"dtype": DType.FLOAT32, "precision": Precision.TF32}


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize(
    ("facts", "copies"),
    [
        ({}, "none"),
        ({"layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 70}, "none"),
        (FLOAT32, "turned"),
    ],
)
@pytest.mark.usefixtures("card")
def test_a_bound_launch_is_the_ordinary_one_elsewhere(facts: dict[str, Any], copies: str, loads: str) -> None:
    problem = gradient_kernels.problem(mask="window:5,3", **facts)
    kernel = kernel_of(problem, keys_loads=loads, queries_loads=loads, copies=copies)
    first, second = (
        gradient_check.make_case(problem, torch.device("cpu"), torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    first_room = gradient_check.room_of(first)
    scratch = backward.empty_scratch(kernel, problem, first.operands.query, first.operands.key)
    launches = backward.bind(kernel, problem, first.operands, first.saved, first_room, scratch)
    second_room = gradient_check.room_of(second)
    backward.launch(kernel, problem, second.operands, second.saved, second_room)
    own = backward.empty_scratch(kernel, problem, second.operands.query, second.operands.key)
    addresses = backward.addresses_of(second.operands, second.saved, second_room, own)
    assert len(addresses) == len(backward.POINTERS)
    for launch in launches:
        launch(addresses)
    assert own.sums is None
    assert sorted(own.copies) == ([] if copies == "none" else sorted(backward.COPIES))
    others = {tensor.data_ptr() for tensor in own.rows}
    for part in kernel.parts:
        ((grid, given),) = part.compiled.ordinary
        ((facts, again),) = part.compiled.prepared
        grid_again = facts[:3]
        assert grid == grid_again
        for name, one_argument, other in zip(part.parameters, given, again, strict=True):
            if name.startswith(("row_lse", "delta")):  # each launch has its own
                assert address(other) in others
            elif name.endswith("_copy_ptr"):
                assert address(other) == own.copies[name.removesuffix("_copy_ptr")].data_ptr() != address(one_argument)
            else:
                assert address(one_argument) == address(other), name
            if isinstance(one_argument, Descriptor):
                assert replace(one_argument, address=0) == replace(other, address=0)


@pytest.mark.usefixtures("card")
def test_what_is_launched_again_and_again_leaves_every_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sinks, and of a bias that queries share, which are summed behind the launches; each launch has new room."""
    monkeypatch.setattr(backward, "may_bind", lambda _problem, query: True)
    problem = gradient_kernels.problem(
        modifiers=Modifiers(sinks=True, bias=Bias.LEARNED, alibi=True, learned_slopes=True)
    )
    kernel = kernel_of(problem)
    case = gradient_check.make_case(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    shared = replace(case.operands, narrow_bias=case.operands.bias[:, :, :1])
    assert shared.narrow_bias is not None
    expanded = replace(shared, bias=shared.narrow_bias.expand_as(case.operands.bias))
    room = backward.empty_gradients(problem, expanded)
    launch = backward.ready(kernel, problem, expanded, case.saved)
    ordered: list[str] = []
    monkeypatch.setattr(backward, "sink_gradient", lambda sinks, rows: ordered.append("sinks") or sinks)
    monkeypatch.setattr(backward, "add_bias_sums", lambda gradient, sums: ordered.append("bias"))
    launch(room)
    launch(room)
    assert sorted(ordered) == ["bias", "bias", "sinks", "sinks"]
    for part in kernel.parts:
        named = [dict(zip(part.parameters, given, strict=True)) for _, given in part.compiled.prepared]
        for arguments in named:
            if "bias_sums_ptr" in arguments:
                assert address(arguments["bias_grad_ptr"]) == room.bias.data_ptr()
                assert address(arguments["bias_sums_ptr"]) not in (0, room.bias.data_ptr())
            if "slope_grad_ptr" in arguments:
                assert address(arguments["slope_grad_ptr"]) == room.slopes.data_ptr()


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize(
    ("facts", "sizes", "copies"),
    [
        ({"mask": "window:5,3"}, {"batch": 3, "seq_q": 77, "seq_kv": 130}, "none"),
        ({"layout": Layout.BSHD, "mask": "causal"}, {"seq_q": 200, "seq_kv": 200}, "none"),
        (
            {"layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 70, "mask": "causal"},
            {"batch": 4, "tokens_q": 301, "tokens_kv": 299},
            "none",
        ),
        (FLOAT32, {"batch": 1, "seq_q": 300, "seq_kv": 90}, "turned"),
    ],
)
@pytest.mark.usefixtures("card")
def test_resized_launches_are_those_that_are_bound_at_other_sizes(
    facts: dict[str, Any], sizes: dict[str, Any], copies: str, loads: str
) -> None:
    first = gradient_kernels.problem(**facts)
    kernel = kernel_of(first, keys_loads=loads, queries_loads=loads, copies=copies)

    def bound(problem: Problem) -> tuple[tuple[Bound, ...], dict[str, View]]:
        case = gradient_check.make_case(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
        room = gradient_check.room_of(case)
        scratch = backward.empty_scratch(kernel, problem, case.operands.query, case.operands.key)
        operands, saved = case.operands, case.saved
        tensors = operands.query, operands.key, operands.value, saved.output, saved.output_grad
        views = [View.of(tensor) for tensor in (*tensors, room.query, room.key, room.value)]
        launches = backward.bind(kernel, problem, operands, saved, room, scratch)
        return launches, dict(zip(backward.VIEWS, views, strict=True))

    other = replace(first, **sizes)
    expected, views = bound(other)
    shapes = backward.scratch_shapes(kernel, other, views["query"], views["key"])
    resized = backward.resize(bound(first)[0], kernel, other, views, shapes)
    assert [launch.given for launch in resized] == [launch.given for launch in expected]
    for ours, theirs in zip(resized, expected, strict=True):
        assert ours.form.pointers == theirs.form.pointers
        for (*places, maps), (*other_places, other_maps) in zip(ours.maps, theirs.maps, strict=True):
            assert places == other_places
            assert maps.axes == other_maps.axes


@pytest.mark.parametrize("bound_too", [False, True])
@pytest.mark.usefixtures("card")
def test_the_gate_launches_as_calls_do(bound_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gradient_kernels.problem(mask="causal")
    kernel = kernel_of(problem)
    case = gradient_check.make_case(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    monkeypatch.setattr(backward, "may_bind", lambda _problem, query: bound_too)
    assert not gradient_check.judge(kernel, [case]).ok, "nothing was computed"
    for part in kernel.parts:
        assert (len(part.compiled.ordinary), len(part.compiled.prepared)) == ((1, 1) if bound_too else (2, 0))


@pytest.mark.parametrize("bound_too", [False, True])
@pytest.mark.usefixtures("card")
def test_what_is_timed_costs_the_host_a_bound_launch_where_it_may(
    bound_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = gradient_kernels.problem(mask="causal")
    kernel = kernel_of(problem)
    case = gradient_check.make_case(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    monkeypatch.setattr(backward, "may_bind", lambda _problem, query: bound_too)
    room = gradient_check.room_of(case)
    call = gradient_check.call_of(kernel, case, room)
    for _ in range(3):
        call()
    for part in kernel.parts:
        assert (len(part.compiled.ordinary), len(part.compiled.prepared)) == ((0, 3) if bound_too else (3, 0))
        launches = part.compiled.prepared if bound_too else part.compiled.ordinary
        for _, given in launches:
            at = dict(zip(part.parameters, given, strict=True))
            for name, gradient in room.named():
                if f"{name}_grad_ptr" in at:
                    assert address(at[f"{name}_grad_ptr"]) == gradient.data_ptr()


@pytest.mark.parametrize(
    "modifiers",
    [Modifiers(dropout=True), Modifiers(score_mod="score + 1")],
    ids=lambda modifiers: modifiers.names[0],
)
def test_launches_that_read_other_tensors_or_numbers_are_never_bound(modifiers: Modifiers) -> None:
    query: Any = SimpleNamespace(is_cuda=True)
    usual = Modifiers(softcap=True, alibi=True, sinks=True, bias=Bias.LEARNED)
    assert backward.may_bind(gradient_kernels.problem(modifiers=usual), query)
    assert not backward.may_bind(gradient_kernels.problem(modifiers=modifiers), query)
    assert not backward.may_bind(gradient_kernels.problem(), SimpleNamespace(is_cuda=False))  # type: ignore[arg-type]


def test_rows_have_room_for_every_tile_of_queries() -> None:
    problem = gradient_kernels.problem()
    query = torch.empty(2, 4, 129, 16)
    rows = backward.empty_scratch(kernel_of(problem), problem, query, query).rows
    assert (rows.shape, rows.dtype) == ((2, 2, 4, 256), torch.float32)
    sloped = gradient_kernels.problem(modifiers=Modifiers(alibi=True, learned_slopes=True))
    assert backward.empty_scratch(kernel_of(sloped), sloped, query, query).rows.shape == (3, 2, 4, 256)


@pytest.mark.usefixtures("card")
def test_descriptors_of_packed_tensors_end_boxes_where_a_sequence_ends() -> None:
    problem = hopper_gradients.problem(
        layout=Layout.PACKED, batch=3, heads_q=4, heads_kv=2, seq_q=40, seq_kv=50, tokens_q=90, tokens_kv=110
    )
    kernel = launched(hopper_gradients.source(hopper_gradients.problem(layout=Layout.PACKED), order="ascending"))
    case = gradient_check.make_case(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    backward.launch(kernel, problem, case.operands, case.saved, gradient_check.room_of(case))
    part = next(part for part in kernel.parts if part.name == "backward_keys")
    ((_, given),) = part.compiled.ordinary
    arguments = dict(zip(part.parameters, given, strict=True))
    blocks = 90 // int(kernel.module.BLOCK_M.value) + 3 + 1
    assert arguments["stride_r"] == blocks * int(kernel.module.BLOCK_M.value)
    assert arguments["row_lse_step"].shape == (4 * arguments["stride_r"],)
    step = 4 * problem.head_dim
    query = arguments["query_step"]
    assert query.shape == (0x7FFF0000, 0x7FFF0000, 4, EDGE, problem.head_dim)
    assert query.strides == (2**34 - step, step, problem.head_dim, step, 1)
    assert int(kernel.module.EDGE.value) == EDGE
    # Bytes from the first element to row 7 of the 40 before token 70.
    place = sum(at * by for at, by in zip((EDGE, 70, 1, EDGE - 40 + 7), query.strides, strict=False)) * 2
    assert place % 2**64 == ((70 - 40 + 7) * step + problem.head_dim) * 2
    assert all(by * 2 % 16 == 0 and by * 2 < 2**40 for by in query.strides[:-1]), "what the driver encodes"


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("walked", [0, 1], ids=["all heads that share keys", "one of them"])
def test_resized_launches_of_packed_sequences_are_those_that_are_bound_at_other_sizes(walked: int) -> None:
    first = hopper_gradients.problem(
        layout=Layout.PACKED, batch=3, heads_q=4, heads_kv=2, seq_q=40, seq_kv=50, tokens_q=90, tokens_kv=110
    )
    many = hopper_gradients.problem(layout=Layout.PACKED)
    kernel = launched(hopper_gradients.source(many, order="any", WALKED_HEADS=walked))

    def bound(problem: Problem) -> tuple[tuple[Bound, ...], dict[str, View]]:
        case = gradient_check.make_case(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
        room, saved, operands = gradient_check.room_of(case), case.saved, case.operands
        scratch = backward.empty_scratch(kernel, problem, operands.query, operands.key)
        tensors = operands.query, operands.key, operands.value, saved.output, saved.output_grad
        views = [View.of(tensor) for tensor in (*tensors, room.query, room.key, room.value)]
        launches = backward.bind(kernel, problem, operands, saved, room, scratch)
        return launches, dict(zip(backward.VIEWS, views, strict=True))

    other = replace(first, batch=5, seq_q=80, seq_kv=70, tokens_q=301, tokens_kv=299)
    expected, views = bound(other)
    shapes = backward.scratch_shapes(kernel, other, views["query"], views["key"])
    assert shapes.key_sums == walked * other.heads_q * other.tokens_kv * 2 * other.head_dim, (
        "of each part, keys' and values'"
    )
    for ours, theirs in zip(backward.resize(bound(first)[0], kernel, other, views, shapes), expected, strict=True):
        assert ours.given == theirs.given
        assert [maps.axes for *_, maps in ours.maps] == [maps.axes for *_, maps in theirs.maps]


@pytest.mark.parametrize(("sms", "programs"), [(132, 132), (9, 9), (5000, 2048)])
def test_programs_that_walk_many_tiles_are_as_many_as_sms_and_no_more_than_tiles(sms: int, programs: int) -> None:
    problem = hopper_gradients.problem(batch=4, heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096)
    grids = {}
    for schedule in ("one_tile", "dynamic"):
        source = hopper_gradients.source(problem, schedule=schedule, order="any")
        kernel = Kernel(source=source, module=load_module(source), compiled=None, device=CUDA, sm_count=sms)
        grids[schedule] = backward.grids_of(kernel, problem, 4096, 4096)
    assert grids["one_tile"].pop("backward_keys") == (4 * 16 * 32,)
    assert grids["dynamic"].pop("backward_keys") == (programs,)
    assert grids["dynamic"] == grids["one_tile"]
