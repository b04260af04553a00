"""Answers that were prepared: found by all that decides them and by nothing less, and the same as the ordinary way's.

There is no card here. Kernels are rendered for an A30 or an H200, and launched at a compiled kernel that only notes
what it gets.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import samples
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import together
from torch import Tensor

import autoattn
from autoattn import answer, arguments, bound, dispatch, functional, gpu, prepared, render, rivals, zeros
from autoattn.compile import Descriptor, Kernel, load_module
from autoattn.dispatch import Level
from autoattn.errors import AutoattnError, TensorError
from autoattn.mask import Mask
from autoattn.ops.forward import POINTERS
from autoattn.variant import Source

HALF = torch.float16
CUDA = torch.device("cuda", 0)


class Noted:
    """In place of Triton's CompiledKernel: notes its launches. The ordinary way launches by [], a prepared one by run.

    A launch is (what the launcher gets before the kernel's arguments, the kernel's arguments).
    """

    function, packed_metadata = "the function", "its metadata"

    def __init__(self) -> None:
        self.ordinary: list[tuple[Any, ...]] = []
        self.prepared: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given: self.ordinary.append((grid, given))

    def run(self, *given: Any) -> None:
        self.prepared.append((given[:9], given[9:]))

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *given: Any) -> Any:
        return ("launch", grid, stream)


class Current:
    """In place of torch.cuda.device, and of which device is current."""

    index = 0

    def __init__(self, device: torch.device | int) -> None:
        self.wanted = device if isinstance(device, int) else device.index

    def __enter__(self) -> None:
        self.before, Current.index = Current.index, self.wanted

    def __exit__(self, *error: object) -> None:
        Current.index = self.before


@pytest.fixture
def card(zeros_on_the_host: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Noted]:
    """As if the CPU's tensors were on an A30 for which nothing was tuned."""
    noted = Noted()

    def load(source: Source, device: torch.device) -> Kernel:
        return Kernel(source=source, module=load_module(source), compiled=noted, device=CUDA, sm_count=132)

    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: ("stream of", index)))
    monkeypatch.setattr("autoattn.resources.shipped_cache", lambda: tmp_path)
    monkeypatch.setattr(answer, "_why_not_on", lambda device: None)
    monkeypatch.setattr(answer.compile, "load", load)
    for module in (bound, zeros):
        monkeypatch.setattr(module, "driver", driver)
    monkeypatch.setattr(gpu, "present", lambda index: samples.A30)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: Current.index)
    monkeypatch.setattr(torch.cuda, "device", Current)
    Current.index = 0
    answer._loaded.cache_clear()
    functional.forget()
    yield noted
    answer._loaded.cache_clear()
    functional.forget()


@pytest.fixture(autouse=True)
def nothing_prepared() -> Iterator[None]:
    functional.forget()
    yield
    functional.forget()


def three(batch: int = 2, heads: int = 4, seq: int = 48, head_dim: int = 16, dtype: torch.dtype = HALF) -> list[Tensor]:
    return [torch.randn(batch, heads, seq, head_dim).to(dtype) for _ in range(3)]


def packed() -> list[Any]:
    tokens = [torch.randn(40, 4, 16).to(HALF) for _ in range(3)]
    offsets = torch.tensor([0, 10, 40], dtype=torch.int32)
    return [*tokens, offsets, offsets.clone(), 30, 30]


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


def same(ordinary: tuple[Any, ...], by_run: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    """The two launch alike; a prepared one passes addresses where the ordinary one passes tensors."""
    (grid, given), (facts, arguments_) = ordinary, by_run
    assert facts == (*grid, ("stream of", 0), Noted.function, Noted.packed_metadata, None, None, None)
    assert len(given) == len(arguments_)
    for one, other in zip(given, arguments_, strict=True):
        if isinstance(one, Descriptor):
            assert replace(one, address=0) == replace(other, address=0)
        else:
            assert isinstance(other, int | float)
            assert isinstance(one, Tensor) or one == other


@pytest.mark.parametrize("name", CALLS)
def test_a_prepared_call_launches_what_the_ordinary_one_does(name: str, card: Noted) -> None:
    first, second = three(), three()
    made = autoattn.attention(*first, **CALLS[name])
    found = autoattn.attention(*second, **CALLS[name])
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)
    same(card.ordinary[0], card.prepared[0])
    made, found = (one if isinstance(one, tuple) else (one,) for one in (made, found))
    for one, other in zip(made, found, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    passed = [one.address if isinstance(one, Descriptor) else one for one in card.prepared[0][1]]
    assert {one.data_ptr() for one in (*second, *found)} <= {*passed}
    assert {one.data_ptr() for one in (*first, *made)}.isdisjoint(passed)
    assert passed[:3] == [one.data_ptr() for one in second]


@pytest.mark.parametrize("name", ["plain", "lse", "causal", "bshd"])
def test_so_does_one_that_takes_descriptors(name: str, card: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "present", lambda index: samples.H200)
    test_a_prepared_call_launches_what_the_ordinary_one_does(name, card)
    assert isinstance(card.prepared[0][1][0], Descriptor)


def test_a_prepared_packed_call_launches_what_the_ordinary_one_does(card: Noted) -> None:
    first, second = packed(), packed()
    made = autoattn.packed_attention(*first, causal=True, return_lse=True)
    found = autoattn.packed_attention(*second, causal=True, return_lse=True)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)
    same(card.ordinary[0], card.prepared[0])
    assert [one.shape for one in made] == [one.shape for one in found]
    (known,) = prepared._known.values()
    tensors = dict(zip(POINTERS, (*second[:3], *found, None, None, None, *second[3:5]), strict=True))
    for place, number in known.launch.pointers:
        assert sum(card.prepared[0], ())[place] == tensors[POINTERS[number]].data_ptr()
    assert len(known.launch.pointers) == len(tensors) - 3, "all but the rooms of other kernels"


def test_every_door_goes_through_what_was_prepared(card: Noted) -> None:
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
    card: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = three()
    doors: list[Callable[[], object]] = [
        lambda: autoattn.attention(*tensors),
        lambda: functional.scaled_dot_product_attention(*tensors, is_causal=True),
        lambda: functional.flash_attn_varlen_func(*packed()),
    ]
    asked: list[str] = []
    decide = dispatch.explain
    monkeypatch.setattr(
        dispatch, "explain", lambda problem, card: (asked.append(problem.numerics.value), decide(problem, card))[1]
    )
    for environment in ("", "online", "", "online"):
        monkeypatch.setenv("AUTOATTN_NUMERICS", environment)
        for door in doors:
            door()
    assert asked == ["any"] * 3 + ["online"] * 3
    assert (len(card.ordinary), len(card.prepared)) == (6, 6)
    monkeypatch.setenv("AUTOATTN_NUMERICS", "nonsense")
    for door in doors:
        with pytest.raises(TensorError, match="AUTOATTN_NUMERICS must be any or online"):
            door()


def test_a_launch_has_its_tensors_device_current_and_then_the_callers_again(
    card: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(card, "run", lambda *given: seen.append((Current.index, given[3])))
    tensors = three()
    autoattn.attention(*tensors)
    for current in (0, 1):
        Current.index = current
        autoattn.attention(*tensors)
        assert Current.index == current
    assert seen == [(0, ("stream of", 0))] * 2


def test_launch_hooks_are_called_where_somebody_set_one(card: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_kernel_with_descriptors_and_scratch_is_prepared(card: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        SIGNATURE={"query": "tensordesc", "output": "tensordesc", "value_ptr": "*fp16", "scratch_ptr": "*i32"},
        DESCRIPTORS={"query": ([1, 1, 64, 16], "layout"), "output": ([1, 1, 64, 16], "layout")},
        grid=lambda batch, heads, seq, sm_count: (11,),
        scratch=lambda batch, heads, seq: 5,
    )
    kernel = Kernel(source=None, module=module, compiled=card, device=CUDA, sm_count=1)  # type: ignore[arg-type]
    monkeypatch.setattr(answer.compile, "load", lambda source, device: kernel)
    tensors = [three(), three()]
    for _ in range(2):
        for query, key, value in tensors:
            output = autoattn.attention(query, key, value)
    assert [grid for grid, _ in card.ordinary] == [(11, 1, 1)]
    assert [facts[0] for facts, _ in card.prepared] == [11] * 3
    passed = card.prepared[-1][1]
    assert passed[:2] == (Descriptor.of(query), Descriptor.of(output))
    assert passed[2] == value.data_ptr()
    assert passed[3] > 0
    assert card.prepared[0][1][0] is passed[0], "a descriptor is made once for an address"
    assert not any(isinstance(one, Tensor) for one in known_launch().given)


def test_a_kernel_whose_programs_share_tiles_is_prepared(card: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def sized(batch: int, heads: int, rows: int) -> int:
        asked.append((batch, heads, rows))
        return 6

    module = SimpleNamespace(
        SIGNATURE={"query_ptr": "*fp16", "arrivals_ptr": "*i32", "partial_ptr": "*fp32"},
        PACK_GQA=True,
        grid=lambda batch, heads, rows, sm_count: (batch * heads * rows,),
        arrivals=sized,
        partials=sized,
    )
    kernel = Kernel(source=None, module=module, compiled=card, device=CUDA, sm_count=1)  # type: ignore[arg-type]
    monkeypatch.setattr(answer.compile, "load", lambda source, device: kernel)
    query, key, value = three()
    group = query.shape[1] // key.shape[1]
    for _ in range(3):
        autoattn.attention(query, key, value)
    sizes = query.shape[0], key.shape[1], query.shape[2] * group
    assert set(asked) == {sizes}, "heads that share keys are the rows of one"
    assert [facts[0] for facts, _ in card.prepared] == [math.prod(sizes)] * 2
    for _, passed in card.prepared:
        assert all(address > 0 for address in passed)
        assert len(set(passed)) == 3


def known_launch() -> bound.Bound:
    (known,) = prepared._known.values()
    assert isinstance(known, prepared._Kernel)
    return known.launch


# --- the key ----------------------------------------------------------------------------------------------------------


def shifted(tensor: Tensor, by: int) -> Tensor:
    """The same numbers, `by` elements behind an address that 64 divides."""
    room = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
    start = -room.data_ptr() % 64 // room.element_size() + by
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor, pad: int) -> Tensor:
    """The same numbers in wider rows."""
    room = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + pad, dtype=tensor.dtype)
    room[..., : tensor.shape[-1]] = tensor
    return room[..., : tensor.shape[-1]]


shapes = st.sampled_from([(2, 4, 8, 16), (2, 8, 4, 16), (1, 4, 8, 16), (2, 4, 8, 20), (2, 2, 8, 16)])
words = {
    "mask": st.sampled_from([None, "causal", "full", "window:2,2", Mask.window(2, 2), Mask(), "nonsense", 1]),
    "causal": st.sampled_from([False, True, 0, 1, 1.0, "bottom-right", "top-left", None]),
    "window": st.sampled_from([None, (2, 2), (2.0, 2), (2, True), (2, 1), (-1, 0), [2, 2], (2,)]),
    "softcap": st.sampled_from([0.0, 0, False, 1.0, 1, True, 2.5, None]),
    "score_mod": st.sampled_from([None, "score + 1.0", "score * 2.0", ""]),
    "dropout": st.sampled_from([0.0, 0, False, 0.5, True]),
    "scale": st.sampled_from([None, 1.0, 1, True, 0.0, -1.0, float("nan"), "1"]),
    "layout": st.sampled_from(["bhsd", "bshd", "sbhd", None]),
    "precision": st.sampled_from([None, "ieee", "tf32", "tf32x3", "exact"]),
    "numerics": st.sampled_from([None, "any", "online", "lazy", ""]),
    "return_lse": st.sampled_from([False, True, 0, 1]),
}
tensor_facts = st.fixed_dictionaries(
    {
        "shapes": st.one_of(shapes.map(lambda shape: (shape, shape)), st.tuples(shapes, shapes)),
        "dtype": st.sampled_from([HALF, torch.bfloat16, torch.float32]),
        "place": st.integers(0, 2),  # of the tensor that the next three speak of
        "by": st.sampled_from([0, 1, 4, 8, 9]),
        "pad": st.sampled_from([0, 1, 8]),
        "other_dtype": st.sampled_from([False] * 4 + [True]),
        "gradient": st.sampled_from([None, 0, 1, 2]),
        "grad": st.booleans(),
        "autocast": st.sampled_from([None, HALF, torch.bfloat16]),
        "matmul": st.sampled_from(["highest", "high"]),
        "environment": st.sampled_from(["", "any", "online", "lazy"]),
    }
)
few_words = st.lists(st.sampled_from([*words]), max_size=2, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: words[name] for name in names})  # more are seldom one valid call
)
calls = st.tuples(tensor_facts, few_words)


def posed(call: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Any, Any]:
    """A call's key, and all that the ordinary way decides of it; an error is a decision too."""
    facts, asked = call
    tensors = [torch.zeros(shape, dtype=facts["dtype"]) for shape in (facts["shapes"][0], *facts["shapes"][1:] * 2)]
    changed = facts["place"]
    moved = shifted(tensors[changed], facts["by"])
    tensors[changed] = strided(moved, facts["pad"]) if facts["pad"] else moved
    if facts["other_dtype"]:
        tensors[changed] = tensors[changed].to(torch.bfloat16)
    if facts["gradient"] is not None:
        tensors[facts["gradient"]].requires_grad_()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(facts["matmul"])
    kind = facts["autocast"]
    environment = mock.patch.dict(os.environ, AUTOATTN_NUMERICS=facts["environment"])
    try:
        with (
            environment,
            torch.set_grad_enabled(facts["grad"]),
            torch.autocast("cpu", dtype=kind, enabled=kind is not None),
        ):
            return key_of(*tensors, **asked), decided(tensors, asked)
    finally:
        torch.set_float32_matmul_precision(before)


def decided(tensors: list[Tensor], asked: dict[str, Any]) -> Any:
    given = {name: word for name, word in asked.items() if name != "return_lse"}
    lse = asked.get("return_lse", False)
    try:
        call = arguments.read(*tensors, **given, seed=1)  # type: ignore[arg-type]
        plan = answer.plan(call, lse=lse)
        traits = answer._traits(call.problem, call.operands, lse) if plan.kernel is not None else None
    except AutoattnError:
        return "an error"
    numbers = repr(call.operands.scale), call.operands.softcap, call.operands.dropout
    strides = [one.stride() for one in (call.operands.query, call.operands.key, call.operands.value)]
    return call.problem, numbers, strides, traits, plan.explanation.route, call.empty, call.operands.query.dtype


FACTS = ["shapes", "dtype", "by", "pad", "gradient", "grad", "autocast", "matmul", "environment", *words]


@settings(max_examples=600)
@given(calls, st.sampled_from(FACTS), st.tuples(tensor_facts, st.fixed_dictionaries(words)))
def test_calls_with_one_key_are_decided_alike(one: Any, change: str, donor: Any) -> None:
    """The second call is the first one but for a fact, so that keys that forget it meet."""
    facts, asked = ({**mine, **{change: given[change]}} if change in given else mine
                    for mine, given in zip(one, donor, strict=True))  # fmt: skip
    with planned_for_a_card():
        (key, plan), (other_key, other_plan) = posed(one), posed((facts, asked))
    if key is not None and key == other_key:
        assert plan == other_plan


class planned_for_a_card:  # noqa: N801 - a context
    """The fixture's plans, for a test that hypothesis runs many times."""

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        patch = self.patch
        patch.setattr(answer, "_why_not_on", lambda device: None)
        patch.setattr(answer.compile, "load", lambda source, device: SimpleNamespace(compiled=None))
        patch.setattr(gpu, "present", lambda index: samples.H200)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(render, "render", lambda problem, variant, traits: (problem, traits))

    def __exit__(self, *error: object) -> None:
        self.patch.undo()
        answer._loaded.cache_clear()
        functional.forget()


EACH: dict[str, dict[str, Any]] = {
    "mask": {"mask": "causal"},
    "causal": {"causal": True},
    "causal, as a number": {"causal": 0},
    "window": {"window": (3, 3)},
    "window, as other numbers": {"window": (3.0, 3)},
    "softcap": {"softcap": 1.0},
    "score_mod": {"score_mod": "score + 1.0"},
    "numerics": {"numerics": "online"},
    "numerics, said": {"numerics": "any"},
    "dropout": {"dropout": 0.5},
    "scale": {"scale": 1.0},
    "layout": {"layout": "bshd"},
    "precision": {"precision": "tf32"},
    "return_lse": {"return_lse": True},
}


def key_of(*tensors: Any, **asked: Any) -> Any:
    """The key that `attention` asks for."""
    with mock.patch.object(prepared, "find") as find:
        functional.attention(*tensors, **asked)
    find.assert_called_once()
    return find.call_args.args[0]


def test_each_argument_makes_another_key() -> None:
    tensors = three(dtype=torch.float32)
    keys = [key_of(*tensors), *(key_of(*tensors, **asked) for asked in EACH.values())]
    assert None not in keys
    for one, other in itertools.combinations(keys, 2):
        assert one != other


def test_each_fact_of_a_tensor_makes_another_key() -> None:
    query, key, value = (shifted(tensor, 0) for tensor in three(dtype=torch.float32))
    keys = [
        key_of(query, key, value),
        key_of(query[:1], key, value),
        key_of(strided(query, 4), key, value),
        key_of(query, strided(key, 4), value),
        key_of(query, key, strided(value, 4)),
        key_of(shifted(query, 1), key, value),
        key_of(query, shifted(key, 2), value),
        key_of(*(tensor.half() for tensor in (query, key, value))),
        key_of(*(tensor.to("meta") for tensor in (query, key, value))),
        key_of(query, key, value.clone().requires_grad_()),
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.append(key_of(query, key, value))
    with torch.autocast("cpu", dtype=HALF):
        keys.append(key_of(query, key, value))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    keys.append(key_of(query, key, value))
    torch.set_float32_matmul_precision(before)
    assert None not in keys
    for one, other in itertools.combinations(keys, 2):
        assert one != other


def test_equal_calls_on_other_tensors_have_one_key() -> None:
    one, other = ([shifted(tensor, 0) for tensor in three()] for _ in range(2))
    assert key_of(*one, window=(3, 0)) == key_of(*other, window=(3, 0))
    with torch.no_grad():
        learning = [tensor.requires_grad_() for tensor in other]
        assert key_of(*one) == key_of(*learning), "where no gradient is recorded, nobody needs one"


def test_where_more_than_a_look_is_needed_there_is_no_key() -> None:
    query, key, value = three()
    for asked in ({"mask": query > 0}, {"score_mod": lambda score, *place: score}, {"window": [3, 0]},
                  {"scale": torch.tensor(1.0)}, {"mask": object()}):  # fmt: skip
        assert key_of(query, key, value, **asked) is None
    assert key_of(query, key.float(), value) is key_of(query, key, value.to("meta")) is None, "an error, or autocast's"
    subclass = query.as_subclass(type("Own", (Tensor,), {}))
    for tensor in (subclass, query.to_sparse(), query.tolist(), None):
        assert key_of(tensor, key, value) is None
    keys: list[Any] = []
    torch.func.vmap(lambda tensor: keys.append(key_of(tensor, key, value)) or tensor)(query)
    assert keys == [None]


# --- what is not prepared ---------------------------------------------------------------------------------------------

ORDINARY: dict[str, Callable[[], dict[str, Any]]] = {
    "a bias": lambda: {"bias": torch.zeros(48, 48)},
    "a tensor as mask": lambda: {"mask": torch.ones(48, 48, dtype=torch.bool)},
    "slopes": lambda: {"alibi_slopes": torch.ones(4)},
    "sinks": lambda: {"sinks": torch.zeros(4)},
    "a function": lambda: {"score_mod": lambda score, b, h, q, k: score + 1.0},
    "a drawn seed": lambda: {"dropout": 0.5},
    "a seed": lambda: {"dropout": 0.5, "seed": 3},
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_a_key_cannot_hold_takes_the_ordinary_way_each_time(name: str, card: Noted) -> None:
    tensors = three()
    for _ in range(3):
        autoattn.attention(*tensors, **ORDINARY[name]())
    assert (len(card.ordinary), len(card.prepared)) == (3, 0)


def test_float8_and_tensors_that_autocast_turns_are_made_anew_each_time(
    card: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "present", lambda index: samples.H200)
    eighths = [tensor.to(torch.float8_e4m3fn) for tensor in three()]
    for _ in range(2):
        autoattn.attention(*eighths)
    wide = three(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert autoattn.attention(*wide).dtype is torch.bfloat16
    assert (len(card.ordinary), len(card.prepared)) == (4, 0)


def test_a_call_without_tokens_is_not_prepared(card: Noted) -> None:
    for _ in range(2):
        assert autoattn.attention(*three(seq=0)).shape == (2, 4, 0, 16)
    assert (card.ordinary, card.prepared, prepared._known) == ([], [], {})


def test_an_error_is_raised_each_time(card: Noted) -> None:
    tensors = three()
    autoattn.attention(*tensors, causal=True, window=(3, 3), softcap=1.0)
    for wrong in ({"causal": 1}, {"window": (3.0, 3)}, {"softcap": True}, {"layout": "sbhd"}, {"precision": "tf32"}):
        for _ in range(2):
            with pytest.raises(AutoattnError):
                autoattn.attention(*tensors, **({"causal": True, "window": (3, 3), "softcap": 1.0} | wrong))
    assert len(prepared._known) == 1


def test_what_a_graph_forbade_is_not_kept(card: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = three()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        autoattn.attention(*tensors)
    assert (card.ordinary, prepared._known) == ([], {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    autoattn.attention(*tensors)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    autoattn.attention(*tensors)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)


def test_wrong_offsets_are_seen_though_the_call_was_prepared(card: Noted) -> None:
    given = packed()
    for _ in range(2):
        autoattn.packed_attention(*given)
    given[4][2] = 41
    with pytest.raises(TensorError, match="cu_seqlens_kv must end within the 40 tokens, got 41"):
        autoattn.packed_attention(*given)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)


def test_a_compiled_call_runs_what_was_prepared_for_it(card: Noted) -> None:
    """The operator answers as the function does, which knows its second call."""
    tensors = three()
    traced = torch.compile(lambda *given: autoattn.attention(*given), backend="eager", fullgraph=True)
    for _ in range(3):
        assert traced(*tensors).shape == tensors[0].shape
    assert (len(card.ordinary), len(card.prepared)) == (1, 2)


@pytest.mark.parametrize("learns", [False, True])
def test_a_compiled_training_step_runs_the_kernel_forward(card: Noted, learns: bool) -> None:
    tensors = [tensor.requires_grad_(learns) for tensor in three()]
    torch.compile(lambda *given: autoattn.attention(*given), backend="aot_eager", fullgraph=True)(*tensors)
    assert len(card.ordinary) == 1
    autoattn.attention(*tensors)  # where nobody traces, what needs a gradient goes to PyTorch
    assert len(card.ordinary) + len(card.prepared) == (1 if learns else 2)


# --- PyTorch's part ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"causal": "top-left"}, {"layout": "bshd"}, {"scale": 2.0}])
def test_pytorchs_answer_is_prepared_and_the_same(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(2, 4, 6, 16), *(torch.randn(2, 2, 6, 16) for _ in range(2))]
    if asked.get("layout") == "bshd":
        tensors = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    ordinary = autoattn.attention(*tensors, **asked)
    monkeypatch.setattr(arguments, "read", None)
    found = autoattn.attention(*tensors, **asked)
    assert torch.equal(found, ordinary)
    assert found.stride() == ordinary.stride()


def test_a_prepared_answer_of_pytorchs_has_gradients() -> None:
    for _ in range(2):
        query, key, value = (tensor.requires_grad_() for tensor in three(dtype=torch.float32))
        autoattn.attention(query, key, value).sum().backward()
        assert all(tensor.grad is not None for tensor in (query, key, value))


@pytest.mark.parametrize("asked", [{"window": (2, 2)}, {"scale": -1.0}, {"scale": 0.0}, {"return_lse": True}])
def test_what_pytorch_does_not_take_as_it_is_is_not_prepared(asked: dict[str, Any]) -> None:
    autoattn.attention(*three(dtype=torch.float32), **asked)
    assert prepared._known == {}


def test_a_backend_that_refuses_later_gives_way(card: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = dispatch.Explanation(problem=None, route="sdpa-flash", level=Level.EXACT, reason="it was the fastest")
    monkeypatch.setattr(dispatch, "explain", lambda problem, device: chosen)
    monkeypatch.setattr(answer.rivals, "sdpa", lambda problem, operands, backend="sdpa": backend)
    monkeypatch.setattr(rivals, "bind", lambda problem, scale, backend: lambda *three: attend(backend))
    refused: list[type[Exception]] = []

    def attend(backend: str) -> str:
        if refused:
            raise refused.pop()("No available kernel")
        return f"prepared {backend}"

    tensors = three()
    monkeypatch.setattr(answer, "_by_pytorch", lambda *facts: (torch.zeros(1), None))
    autoattn.attention(*tensors)
    assert autoattn.attention(*tensors) == "prepared sdpa-flash"
    refused.append(RuntimeError)
    assert isinstance(autoattn.attention(*tensors), Tensor), "the ordinary way answered"
    refused.append(torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        autoattn.attention(*tensors)
    assert autoattn.attention(*tensors) == "prepared sdpa-flash", "the next call may find room"


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_oldest_gives_way_where_there_are_too_many(card: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST", 3)
    calls = [three(seq=seq) for seq in (16, 17, 18, 19)]
    for tensors in calls:
        autoattn.attention(*tensors)
    assert len(prepared._known) == 3
    for tensors in (calls[1], calls[3], calls[0]):
        autoattn.attention(*tensors)
    assert (len(card.ordinary), len(card.prepared)) == (5, 2)


def test_forgetting_forgets_what_was_prepared(card: Noted) -> None:
    for _ in range(2):
        autoattn.attention(*three())
        functional.forget()
    assert (len(card.ordinary), len(card.prepared)) == (2, 0)


def test_nothing_prepared_holds_a_tensor(card: Noted) -> None:
    autoattn.attention(*three(), return_lse=True)
    autoattn.packed_attention(*packed())
    for known in prepared._known.values():
        assert not any(isinstance(given, Tensor) for given in known.launch.given)


def test_threads_may_call_at_once(card: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST", 4)
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
