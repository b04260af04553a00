"""Answers that were prepared: found by all that decides them and by nothing less, and the same as the ordinary way's.

There is no card here. Kernels are rendered for an A30 or an H200, and launched at a compiled kernel that only notes
what it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_device
import pytest
import samples
import torch
import triton
from fake_device import CUDA, Launches
from noted_launches import card, nothing_prepared, packed, same, three  # noqa: F401 - fixtures
from threads import together
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.baselines import pytorch_sdpa
from autoattn.core.mask import Mask
from autoattn.errors import AutoattnError, TensorError
from autoattn.kernels import bound_launch
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.forward import POINTERS
from autoattn.kernels.tma_descriptor import Descriptor
from autoattn.runtime import call_cache, prepared_call, resized_call
from autoattn.runtime.parse import arguments
from autoattn.runtime.plan import cache_lookup, explanations, planner
from autoattn.runtime.plan.explanations import Level
from autoattn.runtime.plan.reasons import Reasons
from autoattn.tensors.operands import View

# --- the same launch --------------------------------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "words": {"mask": "causal"},
    "a mask": {"mask": Mask.window(3, 1)},
    "window": {"window": (7, 0), "return_lse": True},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.3},
    "score_mod": {"score_mod": "score + 0.5"},
    "bshd": {"layout": "bshd", "return_lse": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_prepared_call_launches_what_the_ordinary_one_does(name: str, card: Launches) -> None:
    first, second = three(), three()
    ordinary = autoattn.attention(*first, **CALLS[name])
    prepared = autoattn.attention(*second, **CALLS[name])
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)
    same(card.ordinary[0], card.prepared[0])
    ordinary, prepared = (answer if isinstance(answer, tuple) else (answer,) for answer in (ordinary, prepared))
    for left, right in zip(ordinary, prepared, strict=True):
        assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
    passed = [argument.address if isinstance(argument, Descriptor) else argument for argument in card.prepared[0][1]]
    assert {tensor.data_ptr() for tensor in (*second, *prepared)} <= {*passed}
    assert {tensor.data_ptr() for tensor in (*first, *ordinary)}.isdisjoint(passed)
    assert passed[:3] == [tensor.data_ptr() for tensor in second]


@pytest.mark.parametrize("name", ["plain", "lse", "causal", "bshd"])
@pytest.mark.usefixtures("no_portfolio")
def test_so_does_one_that_takes_descriptors(name: str, card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.set_device(monkeypatch, samples.H200)
    test_a_prepared_call_launches_what_the_ordinary_one_does(name, card)
    assert isinstance(card.prepared[0][1][0], Descriptor)


def test_a_prepared_packed_call_launches_what_the_ordinary_one_does(card: Launches) -> None:
    first, second = packed(), packed()
    ordinary = autoattn.packed_attention(*first, causal=True, return_lse=True)
    prepared = autoattn.packed_attention(*second, causal=True, return_lse=True)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)
    same(card.ordinary[0], card.prepared[0])
    assert [tensor.shape for tensor in ordinary] == [tensor.shape for tensor in prepared]
    launch = known_launch()
    others = (None,) * (len(POINTERS) - 10)  # of scores and caches
    tensors = dict(zip(POINTERS, (*second[:3], *prepared, None, None, None, *second[3:5], *others), strict=True))
    for place, number in launch.form.pointers:
        assert sum(card.prepared[0], ())[place] == tensors[POINTERS[number]].data_ptr()
    assert len(launch.form.pointers) == len(second[:5]) + len(prepared), (
        "all but the rooms and the tensors of other kernels"
    )


def test_every_door_goes_through_what_was_prepared(card: Launches) -> None:
    tensors = three()
    swapped = [tensor.transpose(1, 2) for tensor in tensors]
    doors: list[Callable[[], object]] = [
        lambda: autoattn.attention(*tensors, causal=True),
        lambda: functional.scaled_dot_product_attention(*tensors, is_causal=True, scale=0.2),
        lambda: functional.scaled_dot_product_attention(*tensors, enable_gqa=True, scale=0.3),
        lambda: functional.flash_attn_func(*swapped, causal=True),
        lambda: autoattn.Attention(mask="window:5,5")(*tensors),
        lambda: functional.flash_attn_varlen_func(*packed()),
    ]
    for number, door in enumerate(doors, start=1):
        for _ in range(2):
            door()
        assert (len(card.ordinary), len(card.prepared)) == (number, number)


def test_the_environments_numerics_make_another_answer_at_every_door(
    card: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = three()
    doors: list[Callable[[], object]] = [
        lambda: autoattn.attention(*tensors),
        lambda: functional.scaled_dot_product_attention(*tensors, is_causal=True),
        lambda: functional.flash_attn_varlen_func(*packed()),
    ]
    numerics: list[str] = []
    decide = cache_lookup.explain
    monkeypatch.setattr(
        cache_lookup,
        "explain",
        lambda problem, *facts: (numerics.append(problem.numerics.value), decide(problem, *facts))[1],
    )
    for environment in ("", "online", "", "online"):
        monkeypatch.setenv("AUTOATTN_NUMERICS", environment)
        for door in doors:
            door()
    assert numerics == ["any"] * 3 + ["online"] * 3
    assert (len(card.ordinary), len(card.prepared)) == (6, 6)
    monkeypatch.setenv("AUTOATTN_NUMERICS", "nonsense")
    for door in doors:
        with pytest.raises(TensorError, match="AUTOATTN_NUMERICS must be any or online"):
            door()


def test_a_launch_has_its_tensors_device_current_and_then_the_callers_again(
    card: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(card, "run", lambda *given: seen.append((card.context.current, given[3])))
    tensors = three()
    autoattn.attention(*tensors)
    for current in (0, 1):
        card.context.current = current
        autoattn.attention(*tensors)
        assert card.context.current == current
    assert seen == [(0, ("stream of", 0))] * 2


def test_launch_hooks_are_called_where_somebody_set_one(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(facts: object) -> None: ...

    tensors = three()
    for _ in range(2):
        autoattn.attention(*tensors)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", enter)
    autoattn.attention(*tensors)
    chain = triton.knobs.HookChain()
    chain.add(enter)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", chain)
    autoattn.attention(*tensors)
    facts = ("launch", card.ordinary[0][0], ("stream of", 0))
    assert [given[6:9] for given, _ in card.prepared] == [
        (None, None, None), (facts, enter, None), (facts, chain, None),
    ]  # fmt: skip


def test_a_kernel_with_descriptors_and_scratch_is_prepared(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        SIGNATURE={"query": "tensordesc", "output": "tensordesc", "value_ptr": "*fp16", "scratch_ptr": "*i32"},
        DESCRIPTORS={"query": ([1, 1, 64, 16], "layout"), "output": ([1, 1, 64, 16], "layout")},
        grid=lambda batch, heads, seq, sm_count: (11,),
        scratch=lambda batch, heads, seq: 5,
    )
    kernel = Kernel(source=None, module=module, compiled=card, device=CUDA, sm_count=1)  # type: ignore[arg-type]
    monkeypatch.setattr(planner.compiler, "load", lambda source, device: kernel)
    tensors = [three(), three()]
    for _ in range(2):
        for query, key, value in tensors:
            output = autoattn.attention(query, key, value)
    assert [grid for grid, _ in card.ordinary] == [(11, 1, 1)]
    assert [facts[0] for facts, _ in card.prepared] == [11] * 3
    passed = card.prepared[-1][1]
    assert passed[:2] == tuple(Descriptor.of(View.of(tensor), tensor.data_ptr()) for tensor in (query, output))
    assert passed[2] == value.data_ptr()
    assert passed[3] > 0
    assert card.prepared[0][1][0] is passed[0], "a descriptor is made once for an address"
    assert not any(isinstance(argument, Tensor) for argument in known_launch().given)


def test_a_kernel_whose_programs_share_tiles_is_prepared(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    requested_sizes: list[tuple[int, int, int]] = []

    def sized(batch: int, heads: int, rows: int) -> int:
        requested_sizes.append((batch, heads, rows))
        return 6

    module = SimpleNamespace(
        SIGNATURE={"query_ptr": "*fp16", "arrivals_ptr": "*i32", "partial_ptr": "*fp32"},
        PACK_GQA=True,
        grid=lambda batch, heads, rows, sm_count: (batch * heads * rows,),
        arrivals=sized,
        partials=sized,
    )
    kernel = Kernel(source=None, module=module, compiled=card, device=CUDA, sm_count=1)  # type: ignore[arg-type]
    monkeypatch.setattr(planner.compiler, "load", lambda source, device: kernel)
    query, key, value = three()
    group = query.shape[1] // key.shape[1]
    for _ in range(3):
        autoattn.attention(query, key, value)
    sizes = query.shape[0], key.shape[1], query.shape[2] * group
    assert set(requested_sizes) == {sizes}, "heads that share keys are the rows of one"
    assert [facts[0] for facts, _ in card.prepared] == [math.prod(sizes)] * 2
    for _, passed in card.prepared:
        assert all(address > 0 for address in passed)
        assert len(set(passed)) == 3


def known_launch() -> bound_launch.Bound:
    (known,) = call_cache.prepared_calls()
    assert isinstance(known, prepared_call.KernelCall)
    return known.launch


# --- what is not prepared ---------------------------------------------------------------------------------------------

ORDINARY: dict[str, Callable[[], dict[str, Any]]] = {
    "a block table": lambda: {"mask": autoattn.masks.document(torch.zeros(1, 48, dtype=torch.int32), block_size=16)},
    "a function": lambda: {"score_mod": lambda score, b, h, q, k: score + 1.0},
    "a drawn seed": lambda: {"dropout": 0.5},
    "a seed": lambda: {"dropout": 0.5, "seed": 3},
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_a_key_cannot_hold_takes_the_ordinary_way_each_time(name: str, card: Launches) -> None:
    tensors = three()
    for _ in range(3):
        autoattn.attention(*tensors, **ORDINARY[name]())
    assert (len(card.ordinary), len(card.prepared)) == (3, 0)


def test_float8_and_tensors_that_autocast_turns_are_made_anew_each_time(
    card: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_device.set_device(monkeypatch, samples.H200)
    eighths = [tensor.to(torch.float8_e4m3fn) for tensor in three()]
    for _ in range(2):
        autoattn.attention(*eighths)
    wide = three(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert autoattn.attention(*wide).dtype is torch.bfloat16
    assert (len(card.ordinary), len(card.prepared)) == (4, 0)


def test_a_call_without_tokens_is_not_prepared(card: Launches) -> None:
    for _ in range(2):
        assert autoattn.attention(*three(seq=0)).shape == (2, 4, 0, 16)
    assert (card.ordinary, card.prepared, call_cache.info().calls) == ([], [], 0)


def test_an_error_is_raised_each_time(card: Launches) -> None:
    tensors = three()
    right: dict[str, Any] = {"causal": True, "window": (3, 3), "softcap": 1.0}
    autoattn.attention(*tensors, **right)
    for wrong in ({"causal": 1}, {"window": (3.0, 3)}, {"softcap": True}, {"layout": "sbhd"}, {"precision": "tf32"}):
        for _ in range(2):
            with pytest.raises(AutoattnError):
                autoattn.attention(*tensors, **(right | wrong))
    assert call_cache.info().calls == 1


def test_what_a_graph_forbade_is_not_kept(card: Launches) -> None:
    tensors = three()
    card.context.capturing = True
    for _ in range(2):
        autoattn.attention(*tensors)
    assert (card.ordinary, call_cache.info().calls) == ([], 0)
    card.context.capturing = False
    autoattn.attention(*tensors)
    card.context.capturing = True
    autoattn.attention(*tensors)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)


def test_wrong_offsets_are_seen_though_the_call_was_prepared(card: Launches) -> None:
    given = packed()
    for _ in range(2):
        autoattn.packed_attention(*given)
    given[4][2] = 41
    with pytest.raises(TensorError, match="cu_seqlens_kv must end within the 40 tokens, got 41"):
        autoattn.packed_attention(*given)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)


def test_a_compiled_call_runs_what_was_prepared_for_it(card: Launches) -> None:
    """The operator answers as the function does, which knows its second call."""
    tensors = three()
    traced = torch.compile(lambda *given: autoattn.attention(*given), backend="eager", fullgraph=True)
    for _ in range(3):
        assert traced(*tensors).shape == tensors[0].shape
    assert (len(card.ordinary), len(card.prepared)) == (1, 2)


@pytest.mark.parametrize("learns", [False, True])
def test_a_compiled_training_step_runs_the_kernel_forward(card: Launches, learns: bool) -> None:
    tensors = [tensor.requires_grad_(learns) for tensor in three()]
    torch.compile(lambda *given: autoattn.attention(*given, softcap=2.0), backend="aot_eager", fullgraph=True)(*tensors)
    assert len(card.ordinary) == 1
    autoattn.attention(*tensors, softcap=2.0)  # where nobody traces, too
    assert len(card.ordinary) + len(card.prepared) == 2


# --- PyTorch's part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [{}, {"causal": True}, {"causal": "top-left"}, {"layout": "bshd"}, {"scale": 2.0}])
def test_pytorchs_answer_is_prepared_and_the_same(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(2, 4, 6, 16), *(torch.randn(2, 2, 6, 16) for _ in range(2))]
    if words.get("layout") == "bshd":
        tensors = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    ordinary = autoattn.attention(*tensors, **words)
    monkeypatch.setattr(arguments, "read", None)
    prepared = autoattn.attention(*tensors, **words)
    assert torch.equal(prepared, ordinary)
    assert prepared.stride() == ordinary.stride()


def test_a_prepared_answer_of_pytorchs_has_gradients() -> None:
    for _ in range(2):
        query, key, value = (tensor.requires_grad_() for tensor in three(dtype=torch.float32))
        autoattn.attention(query, key, value).sum().backward()
        assert all(tensor.grad is not None for tensor in (query, key, value))


@pytest.mark.parametrize("words", [{"window": (2, 2)}, {"scale": -1.0}, {"scale": 0.0}, {"return_lse": True}])
def test_what_pytorch_does_not_take_as_it_is_is_not_prepared(words: dict[str, Any]) -> None:
    autoattn.attention(*three(dtype=torch.float32), **words)
    assert call_cache.info().calls == 0


def test_a_backend_that_refuses_later_gives_way(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = explanations.Explanation(
        problem=None, route="sdpa-flash", level=Level.EXACT, reasons=Reasons("it was the fastest")
    )
    monkeypatch.setattr(cache_lookup, "explain", lambda problem, device, folder: chosen)
    monkeypatch.setattr(pytorch_sdpa, "sdpa", lambda problem, operands, backend="sdpa": torch.zeros(1))
    monkeypatch.setattr(pytorch_sdpa, "bind", lambda problem, scale, backend, learns: lambda *three: attend(backend))
    refused: list[type[Exception]] = []

    def attend(backend: str) -> str:
        if refused:
            raise refused.pop()("No available kernel")
        return f"prepared {backend}"

    tensors = three()
    autoattn.attention(*tensors)
    assert autoattn.attention(*tensors) == "prepared sdpa-flash"
    refused.append(RuntimeError)
    assert isinstance(autoattn.attention(*tensors), Tensor), "the ordinary way answered"
    refused.append(torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        autoattn.attention(*tensors)
    assert autoattn.attention(*tensors) == "prepared sdpa-flash", "the next call may find room"


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_oldest_gives_way_where_there_are_too_many(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "BOUND", 3)
    monkeypatch.setattr(resized_call, "prepare", lambda *given: None)
    calls = [three(seq=seq) for seq in (16, 17, 18, 19)]
    for tensors in calls:
        autoattn.attention(*tensors)
    assert call_cache.info().calls == 3
    for tensors in (calls[1], calls[3], calls[0]):
        autoattn.attention(*tensors)
    assert (len(card.ordinary), len(card.prepared)) == (5, 2)


def test_forgetting_forgets_what_was_prepared(card: Launches) -> None:
    for _ in range(2):
        autoattn.attention(*three())
        functional.forget()
    assert (len(card.ordinary), len(card.prepared)) == (2, 0)


def test_nothing_prepared_holds_a_tensor(card: Launches) -> None:
    autoattn.attention(*three(), return_lse=True)
    autoattn.packed_attention(*packed())
    for known in call_cache.prepared_calls():
        assert isinstance(known, prepared_call.KernelCall)
        assert not any(isinstance(given, Tensor) for given in known.launch.given)


def test_threads_may_call_at_once(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "BOUND", 4)
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            for place in range(60):
                tensors = three(seq=16 + (first + place) % 8)
                output = autoattn.attention(*tensors)
                if output.shape != tensors[0].shape:
                    wrong.append(output.shape)
                if place % 20 == 19:
                    functional.forget()
        except Exception as error:
            wrong.append(error)

    together(work)
    assert wrong == []
    assert len(card.ordinary) + len(card.prepared) == 240
