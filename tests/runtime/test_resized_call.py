"""Calls of new lengths: answered by the plan of their class of sizes, as if each had been planned by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import computed_launches
import fake_device
import pytest
import samples
import torch
from fake_device import Launches
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from noted_launches import card, nothing_prepared, same  # noqa: F401 - fixtures
from threads import together
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.cache import file_stamps, store
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Op
from autoattn.errors import TensorError
from autoattn.hardware import nvidia
from autoattn.runtime import call_cache, call_keys, resized_call
from autoattn.runtime.parse import arguments
from autoattn.runtime.plan import cache_lookup, machine_code, planner
from autoattn.runtime.plan.explanations import Level

computed = computed_launches.card
HALF = torch.float16
FACTS: dict[str, Any] = {"dtype": DType.FLOAT16, "batch": 2, "heads_q": 4, "heads_kv": 4}
DEVICES = {"A30": samples.A30, "H200": samples.H200}
WORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "named": {"mask": "causal"},
    "window": {"window": (50, 0), "return_lse": True},
    "two sides": {"window": (40, 50)},
    "softcap": {"softcap": 5.0, "scale": 0.3},
    "online": {"numerics": "online"},
}


def attend(
    sizes: tuple[int, int, int], words: dict[str, Any], layout: str = "bhsd", heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
) -> Any:  # fmt: skip
    """A call of (batch, queries, keys); keys and values are views of a longer cache, as while text is generated."""
    batch, seq_q, seq_kv = sizes
    query = torch.zeros(batch, heads[0], seq_q, head_dim, dtype=HALF)
    key, value = (torch.zeros(batch, heads[1], seq_kv + 100, head_dim, dtype=HALF)[:, :, :seq_kv] for _ in range(2))
    tensors = [query, key, value]
    if layout == "bshd":
        tensors = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    return autoattn.attention(*tensors, layout=layout, **words)


def attend_packed(lengths: list[tuple[int, int]], words: dict[str, Any], spare: int = 0) -> Any:
    """A packed call of sequences of these queries and keys."""
    offsets, tokens = [], []
    for side in (0, 1):
        ends = torch.tensor([0, *(length[side] for length in lengths)]).cumsum(0).int()
        offsets.append(ends)
        tokens.append(int(ends[-1]) + spare)
    query, key, value = (torch.zeros(count, 4, 64, dtype=HALF) for count in (tokens[0], tokens[1], tokens[1]))
    longest = (max(length[side] for length in lengths) for side in (0, 1))
    return autoattn.packed_attention(query, key, value, *offsets, *longest, **words)


def take_apart(tensors: list[Tensor], scale: float | None = None) -> resized_call.SizedKey:
    query, key, value = tensors
    words = False, 0.0, 0.0, scale, "bhsd", False, False
    sized = resized_call.take_apart(
        call_keys.of(query, key, value, (), words, None), "bhsd", {"mask": None, "window": None}
    )
    assert sized is not None
    return sized


def assert_alike(output: Any, expected: Any) -> None:
    output, expected = (answer if isinstance(answer, tuple) else (answer,) for answer in (output, expected))
    for ours, other in zip(output, expected, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_new_length_launches_what_a_call_of_its_own_would(
    device: str, name: str, layout: str, card: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_device.set_device(monkeypatch, DEVICES[device])
    words = WORDS[name]
    attend((3, 113, 225), words, layout)
    output = attend((3, 118, 235), words, layout)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)
    functional.forget()
    assert_alike(output, attend((3, 118, 235), words, layout))
    same(card.ordinary[1], card.prepared[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [{}, {"causal": True, "return_lse": True}, {"window": (50, 0)}], ids=str)
def test_new_packed_lengths_launch_what_a_call_of_their_own_would(
    device: str, words: dict[str, Any], card: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_device.set_device(monkeypatch, DEVICES[device])
    attend_packed([(30, 60), (113, 225), (66, 68)], words)
    lengths = [(60, 50), (118, 238), (33, 79)]
    output = attend_packed(lengths, words)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)
    functional.forget()
    assert_alike(output, attend_packed(lengths, words))
    same(card.ordinary[1], card.prepared[0])


sizes = st.tuples(st.integers(1, 9), st.integers(1, 300), st.integers(1, 600))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    first=sizes,
    second=sizes,
    close=st.booleans(),
    name=st.sampled_from(sorted(WORDS)),
    layout=st.sampled_from(["bhsd", "bshd"]),
    heads=st.sampled_from([(4, 4), (6, 2), (8, 1)]),
    head_dim=st.sampled_from([16, 40, 64, 80, 128]),
    device=st.sampled_from(sorted(DEVICES)),
)
def test_whatever_came_before_a_call_launches_what_it_would_alone(
    first: tuple[int, int, int], second: tuple[int, int, int], close: bool, name: str, layout: str,
    heads: tuple[int, int], head_dim: int, device: str, card: Launches, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if close:  # of the same class, mostly
        second = (first[0], first[1] + second[1] % 5, first[2] + second[2] % 9)
    assume(first != second)
    fake_device.set_device(monkeypatch, DEVICES[device])
    facts = WORDS[name], layout, heads, head_dim
    functional.forget()
    card.ordinary.clear()
    card.prepared.clear()
    attend(first, *facts)
    output = attend(second, *facts)
    resized = card.prepared[0] if card.prepared else None
    functional.forget()
    assert_alike(output, attend(second, *facts))
    if resized is not None:
        same(card.ordinary[-1], resized)
    else:
        assert card.ordinary[1][0] == card.ordinary[2][0]


def test_a_new_length_of_a_known_class_is_neither_parsed_nor_planned_nor_looked_up(
    card: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend((2, 1, 1930), {})
    attend_packed([(3, 120), (5, 60)], {}, spare=1800)
    of_parse = ((arguments, "read"), (arguments, "read_packed"))
    for module, name in (*of_parse, (planner, "plan"), (file_stamps, "of"), (file_stamps, "are_unchanged")):
        monkeypatch.setattr(module, name, lambda *given, name=name, **words: pytest.fail(f"{name} was asked"))
    for length in range(1950, 2000):
        attend((2, 1, length), {})
        attend_packed([(3, 120), (5, 60)], {}, spare=length - 160)
    assert (len(card.ordinary), len(card.prepared)) == (2, 100)


def test_a_new_class_that_known_kernels_serve_is_not_parsed(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    attend((8, 500, 1000), {})
    for name in ("read", "read_packed"):
        monkeypatch.setattr(arguments, name, lambda *given, **words: pytest.fail("it was parsed"))
    for length in (1100, 1200, 1300, 1500):
        attend((8, 500, length), {})
    assert (len(card.ordinary), len(card.prepared)) == (1, 4)


def test_a_new_class_that_known_kernels_serve_asks_arithmetic_alone(
    card: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in (1000, 1100):
        attend((8, 500, length), {})
    modules = {nvidia: ["present"], machine_code: ["find"], planner: ["prepare", "load_once"]}
    modules[file_stamps] = ["of", "are_unchanged"]
    with monkeypatch.context() as patch:
        for module, names in modules.items():
            for name in names:
                patch.setattr(module, name, lambda *given, name=name, **words: pytest.fail(f"{name} was asked"))
        for length in (1200, 1300, 1500):
            attend((8, 500, length), {})
    assert (len(card.ordinary), len(card.prepared)) == (1, 4)


def test_a_length_that_comes_again_is_found_by_its_key(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (199, 200):
        attend((2, 1, length), {})
    monkeypatch.setattr(resized_call, "prepare", lambda *given: pytest.fail("it was prepared again"))
    attend((2, 1, 200), {})
    assert (len(card.ordinary), len(card.prepared)) == (1, 2)


def test_generation_is_right_at_every_length(computed: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 1, 16, generator=generator).half()
    key, value = (torch.randn(2, 2, 160, 16, generator=generator).half() for _ in range(2))
    for length in range(90, 160):
        output, lse = autoattn.attention(query, key[:, :, :length], value[:, :, :length], return_lse=True)
        scores = (query.float() @ key[:, :, :length].float().repeat_interleave(2, 1).mT) / 4
        expected = scores.softmax(-1) @ value[:, :, :length].float().repeat_interleave(2, 1)
        torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
    assert computed["resized"] > 50


def test_a_mask_that_means_another_one_at_other_lengths_is_another_family(computed: dict[str, Any]) -> None:
    """Top-left is bottom-right where lengths agree, and a window of all keys is none."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 115, 16, generator=generator).half() for _ in range(3))
    for words, lengths, window in (
        ({"causal": "top-left"}, (96, 97, 113, 115, 114, 96), None),
        ({"window": (105, 0)}, (105, 106, 107, 108, 106), 105),
    ):
        for length in lengths:
            given = query[:, :, :96], key[:, :, :length], value[:, :, :length]
            rows, columns = torch.arange(96)[:, None], torch.arange(length)
            last = rows if window is None else rows + length - 96
            seen = (columns <= last) & (window is None or columns >= last - (window or 0))
            expected = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=seen)
            torch.testing.assert_close(autoattn.attention(*given, **words), expected, rtol=1e-2, atol=1e-2)
    assert computed["resized"] >= 3


def test_threads_that_meet_new_lengths_at_once_get_right_answers(computed: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 2, 400, 16, generator=generator).half() for _ in range(3)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for length in range(200 + number, 400, 3):
            query, key, value = (tensor[:, :, :length] for tensor in tensors)
            output = autoattn.attention(query, key, value, causal=True)
            expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            if not torch.allclose(output, expected, rtol=1e-2, atol=1e-2):
                wrong.append(length)

    together(work)
    assert not wrong
    assert computed["resized"] > 100


def test_a_problem_that_was_tuned_itself_is_planned_by_itself(computed: dict[str, Any]) -> None:
    def tensors(length: int) -> list[Tensor]:
        return [torch.randn(2, 4, length, 64).half() for _ in range(3)]

    default = autoattn.explain(*tensors(1000))
    assert default.problem is not None
    assert default.variant is not None
    store.merge(computed["cache"], samples.H200, Op.FORWARD, [samples.tuned(default.problem, default.variant)])
    functional.forget()
    for length, level in ((1001, Level.BUCKET), (1000, Level.EXACT), (1002, Level.BUCKET)):
        autoattn.attention(*tensors(length))
        explanation = autoattn.explain(*tensors(length))
        assert explanation.level is level
        assert (explanation.chosen_for is None) is (level is Level.EXACT)
    for length, is_known in ((1000, False), (1003, True)):
        given = tensors(length)
        prepared = resized_call.prepare(take_apart(given), tuple(given))
        assert (prepared is not None) is is_known, "what decides is the tuning"


def test_what_runs_is_what_explain_says(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.set_device(monkeypatch, samples.H200)
    shapes = [(2, 4, length, 64) for length in (300, 299, 290, 270, 257, 256, 129, 100, 65, 64, 33, 17, 5, 1)]
    for shape in shapes:
        tensors = [torch.zeros(shape, dtype=HALF) for _ in range(3)]
        explanation = autoattn.explain(*tensors)
        autoattn.attention(*tensors)
        prepared = call_cache.prepared_calls()[-1]
        assert prepared.kernel.source.variant == explanation.variant  # type: ignore[attr-defined]


@pytest.mark.parametrize("tuned", [True, False], ids=["tuned", "default"])
def test_gradients_of_new_lengths_are_right(tuned: bool, computed: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 130, 16, generator=generator).half() for _ in range(3)]

    def step(length: int) -> None:
        leaves = [tensor[:, :, :length].clone().requires_grad_() for tensor in tensors]
        output = autoattn.attention(*leaves, causal=True)
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
        exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
        expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
        torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)
        for ours, other in zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True):
            torch.testing.assert_close(ours.float(), other, rtol=2e-2, atol=2e-2)

    if tuned:
        computed_launches.tune(computed, [tensor[:, :, :100] for tensor in tensors], causal=True)
    for length in range(112, 120):
        step(length)
    assert computed["resized"] == 7
    assert computed["backward"] == 8
    # The first call is no prepared one, and the second binds what the others refill.
    assert computed["resized_gradients"] == 6


def test_mistakes_of_a_new_length_are_told_as_those_of_a_first_one(card: Launches) -> None:
    attend((2, 4, 100), {})
    query, key, value = (torch.zeros(2, heads, 100, 64, dtype=HALF) for heads in (4, 2, 2))
    with pytest.raises(TensorError, match="value must be"):
        autoattn.attention(query, key[:, :, :99], value[:, :, :98])
    with pytest.raises(TensorError, match="key must be"):
        autoattn.attention(query[:1], key, value)
    attend_packed([(50, 50), (50, 50)], {})
    tokens = [torch.zeros(count, 4, 64, dtype=HALF) for count in (99, 99, 99)]
    for offsets, longest, words in (
        ([0, 60, 50], 99, "never decrease"),
        ([0, 50, 99], 40, "given maximum of 40"),
        ([1, 50, 99], 99, "start at 0"),
        ([0, 50, 100], 99, "end within the 99 tokens"),
    ):
        ends = torch.tensor(offsets, dtype=torch.int32)
        with pytest.raises(TensorError, match=words):
            autoattn.packed_attention(*tokens, ends, ends.clone(), longest, longest)
    ends_q, ends_kv = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 50, 99], [0, 50]))
    with pytest.raises(TensorError, match="as many sequences"):
        autoattn.packed_attention(*tokens, ends_q, ends_kv, 50, 50)


def test_lengths_of_nothing_are_answered_with_nothing(card: Launches) -> None:
    attend((2, 4, 100), {})
    assert attend((2, 0, 99), {}).shape == (2, 4, 0, 64)
    assert attend((0, 4, 99), {}).shape == (0, 4, 4, 64)
    assert not attend((2, 4, 0), {}).any()
    assert len(card.ordinary) == 1


def test_steps_that_kernels_read_in_another_way_are_planned(card: Launches) -> None:
    attend((2, 4, 100), {})
    query, key, value = (torch.zeros(2, heads, 99, 72, dtype=HALF)[..., :64] for heads in (4, 2, 2))
    autoattn.attention(query[:, :, :4], key, value)
    assert len(card.prepared) == 1, "rows 144 bytes apart are read as rows of 128 are"
    query, key, value = (torch.zeros(2, heads, 98, 66, dtype=HALF)[..., :64] for heads in (4, 2, 2))
    autoattn.attention(query[:, :, :4], key, value)
    assert (len(card.prepared), len(card.ordinary)) == (1, 2), "rows 132 bytes apart are not"


def test_what_is_kept_is_bounded(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_FAMILIES", 3)
    monkeypatch.setattr(resized_call, "MAX_CLASSES", 4)
    for scale in range(1, 6):
        attend((2, 4, 100), {"scale": float(scale)})
    assert call_cache.info().families == 3
    for length in (16, 32, 64, 128, 256, 512):
        attend((2, 4, length), {"scale": 5.0})
        given = [torch.zeros(2, heads, seq, 64, dtype=HALF) for heads, seq in ((4, 4), (2, 100), (2, 100))]
        sized = take_apart(given, 5.0)
        assert 1 <= len(call_cache.find_family(sized.family).choices) <= 4
    functional.forget()
    assert call_cache.info().families == 0


@pytest.mark.parametrize("words", [{"mask": Mask.window(30, 0)}, {"mask": "window:30,0"}, {"window": (30, 0, 1)}])
def test_masks_that_do_not_tell_in_the_key_what_sizes_change_are_planned(words: dict[str, Any], card: Launches) -> None:
    for length in (100, 99):
        if len(words.get("window", ())) == 3:
            with pytest.raises(TensorError, match="window"):
                attend((2, 4, length), words)
        else:
            attend((2, 4, length), words)
    assert not card.prepared


def test_a_launch_past_the_largest_grid_is_left_to_the_plan(card: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    attend((2, 100, 100), {})
    monkeypatch.setattr(planner.forward, "MAX_TILES", 2 * 4 * 7 - 1)
    monkeypatch.setattr(planner, "plan", lambda *given, **words: pytest.fail("planned"))
    with pytest.raises(pytest.fail.Exception, match="planned"):
        attend((2, 99, 99), {})


def test_the_folder_of_a_cache_is_looked_at_for_each_new_class(computed: dict[str, Any]) -> None:
    """A file that was written since counts for classes that are new, as for problems that are."""
    folder: Path = computed["cache"]
    tensors = [torch.randn(2, 4, 500, 64).half() for _ in range(3)]
    autoattn.attention(*tensors)
    tuned = samples.problem(**FACTS, mask=Mask.parse("full"), seq_q=300, seq_kv=300, head_dim=64)
    store.merge(folder, samples.H200, Op.FORWARD, [samples.current(samples.measured(tuned))])
    known = cache_lookup.explain(tuned, samples.H200, folder)
    assert known.level is Level.EXACT
    assert autoattn.explain(*(tensor[:, :, :290] for tensor in tensors)).level is Level.BUCKET


def test_float32_is_multiplied_as_the_switch_says_at_new_lengths_too(card: Launches) -> None:
    def call(length: int) -> None:
        autoattn.attention(*(torch.zeros(2, 4, length, 64) for _ in range(3)))

    before = torch.get_float32_matmul_precision()
    try:
        for place, precision in enumerate(("highest", "high")):
            torch.set_float32_matmul_precision(precision)
            call(100)
            call(99)
            assert (len(card.ordinary), len(card.prepared)) == (place + 1, place + 1)
    finally:
        torch.set_float32_matmul_precision(before)
