"""Calls of new lengths whose tensors, modes and switches change between calls: each is answered as if alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import computed_launches
import pytest
import torch
from fake_device import Launches
from noted_launches import card, nothing_prepared  # noqa: F401 - fixtures
from torch import Tensor

import autoattn
from autoattn.errors import AutoattnError

computed = computed_launches.card
Lengths = Iterator[int]


def three(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, heads, length, 16, generator=generator).half() for heads in (4, 2, 2)]


def check(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output, which is right."""
    output = autoattn.attention(query, key, value)
    assert isinstance(output, Tensor)
    exact = [tensor.detach().float() for tensor in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, enable_gqa=True)
    torch.testing.assert_close(output.detach().float(), expected, rtol=1e-2, atol=1e-2)
    return output


@pytest.fixture
def lengths(computed: dict[str, Any]) -> Lengths:
    """Lengths that no call had; a family for them is known."""
    new = itertools.count(130)
    for _ in range(2):
        check(*three(next(new)))
    assert computed["resized"] == 1
    return new


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_expanded_tensors_are_read_as_they_lie(place: int, axis: int, lengths: Lengths) -> None:
    for _ in range(2):
        tensors = three(next(lengths))
        tensors[place] = tensors[place].narrow(axis, 0, 1).expand(tensors[place].shape)
        check(*tensors)
        check(*three(next(lengths)))


def test_tensors_that_overlap_are_read_as_they_lie(lengths: Lengths) -> None:
    for length in itertools.islice(lengths, 3):
        room = torch.randn(32 * length + 4096).half()
        check(*(room.as_strided((2, heads, length, 16), (64, 32, 8, 1)) for heads in (4, 2, 2)))
        whole = torch.randn(2, 4, length, 16).half()
        check(whole, whole, whole)


def test_wanted_gradients_and_inference_mode_may_change_with_each_length(lengths: Lengths) -> None:
    for learner in (0, 1, 2, 0):
        with torch.inference_mode():
            assert check(*three(next(lengths))).is_inference()
        assert not check(*three(next(lengths))).requires_grad
        tensors = three(next(lengths))
        tensors[learner].requires_grad_()
        check(*tensors).float().sum().backward()
        assert tensors[learner].grad is not None
        with torch.no_grad():
            assert not check(*(tensor.requires_grad_() for tensor in three(next(lengths)))).requires_grad


def test_autocast_decides_the_dtype_at_each_length(lengths: Lengths) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            for tensors in (three(next(lengths)), [tensor.float() for tensor in three(next(lengths))]):
                output = autoattn.attention(*tensors)
                assert isinstance(output, Tensor)
                assert output.dtype is dtype
        assert check(*three(next(lengths))).dtype is torch.float16


def test_numerics_of_the_environment_count_at_each_length(
    lengths: Lengths, computed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for numerics in ("online", "any", "online", "any"):
        monkeypatch.setenv("AUTOATTN_NUMERICS", numerics)
        for _ in range(2):
            check(*three(next(lengths)))
        assert ("online" in str(computed["problem"])) is (numerics == "online")
    monkeypatch.setenv("AUTOATTN_NUMERICS", "wrong")
    with pytest.raises(AutoattnError, match="AUTOATTN_NUMERICS must be any or online"):
        autoattn.attention(*three(next(lengths)))


def test_deterministic_mode_may_be_switched_between_lengths(lengths: Lengths) -> None:
    try:
        for switched in (True, False, True, False):
            torch.use_deterministic_algorithms(switched)
            tensors = [tensor.requires_grad_() for tensor in three(next(lengths))]
            gradients = torch.autograd.grad(check(*tensors).float().square().sum(), tensors)
            exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
            expected = torch.nn.functional.scaled_dot_product_attention(*exact, enable_gqa=True)
            for ours, other in zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True):
                torch.testing.assert_close(ours.float(), other, rtol=2e-2, atol=2e-2)
            check(*three(next(lengths)))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q, k.to("meta"), v), "key must be on the query's device cpu, got meta"),
        (lambda q, k, v: (q.to("meta"), k, v), "key must be on the query's device meta, got cpu"),
        (lambda q, k, v: (q, k, v[:, :1]), "value must be"),
        (lambda q, k, v: (q[:, :3], k, v), "query heads must be a multiple of key heads, got 3 and 2"),
        (lambda q, k, v: (q, k[..., :8], v), "key must be"),
        (lambda q, k, v: (q[0], k, v), "query must be"),
        (lambda q, k, v: (q, k, v.float()), "value must have the query's dtype"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v), "head_dim must be at least 1, got 0"),
        (
            lambda q, k, v: (q, *(t[:, :, :1].expand(-1, -1, 2**31, -1) for t in (k, v))),
            "seq_kv must be a whole number",
        ),
        (lambda q, k, v: tuple(t[:1, :, :1].expand(2**31, -1, -1, -1) for t in (q, k, v)), "batch must be a whole"),
    ],
)
def test_a_mistake_at_a_new_length_is_one_sentence(change: Any, words: str, lengths: Lengths) -> None:
    with pytest.raises(AutoattnError, match=words) as caught:
        autoattn.attention(*change(*three(next(lengths))))
    assert "\n" not in str(caught.value)
    check(*three(next(lengths)))


def test_packed_mistakes_at_a_new_length_are_one_sentence(computed: dict[str, Any]) -> None:
    def call(tokens: int, starts: Tensor) -> Any:
        return autoattn.packed_attention(*(torch.randn(tokens, 4, 16).half() for _ in range(3)), starts, starts, 99, 99)

    for tokens in (90, 91):
        call(tokens, torch.tensor([0, 40, tokens], dtype=torch.int32))
    assert computed["resized"] == 1
    starts = torch.tensor([0, 40, 92], dtype=torch.int32)
    for wrong, words in ((starts.to("meta"), "device cpu, got meta"), (starts[[0, 2, 1]], "must never decrease")):
        with pytest.raises(AutoattnError, match=words):
            call(92, wrong)
    call(92, starts)
    assert computed["resized"] == 2
    starts[1] = 100
    with pytest.raises(AutoattnError, match="never decrease"):
        call(92, starts)  # its key is known, and its offsets were written since


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tokens_past_what_offsets_can_count_are_refused(device: str, lengths: Lengths) -> None:
    tokens = torch.zeros(1, 4, 16, dtype=torch.float16, device=device).expand(2**31, -1, -1)
    starts = torch.tensor([0, 40, 90], dtype=torch.int32, device=device)
    with pytest.raises(AutoattnError, match="tokens_q must be a whole number from 1 to 2147483647"):
        autoattn.packed_attention(tokens, tokens, tokens, starts, starts, 99, 99)


def test_batches_past_the_second_axis_of_a_grid_are_launched(card: Launches) -> None:
    """65,535 is the most that CUDA takes there."""
    for batch in (70_000, 70_001):
        tensors = [torch.zeros(1, 1, 16, 16, dtype=torch.float16).expand(batch, -1, -1, -1) for _ in range(3)]
        autoattn.attention(*tensors)
    assert (len(card.ordinary), len(card.prepared)) == (1, 1)
    (programs, *others), *_ = card.ordinary[0]
    assert programs >= 70_000
    assert all(size <= 65_535 for size in others)
    facts, _ = card.prepared[0]
    assert facts[0] >= 70_001
    assert all(size <= 65_535 for size in facts[1:3])
