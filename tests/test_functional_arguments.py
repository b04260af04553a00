"""What else a call of attention may ask for, on the CPU: what changes scores, dropout, no tokens, packed sequences."""

from __future__ import annotations

import math
from typing import Any

import formula
import pytest
import torch
from functional_calls import (
    ARGUMENTS,
    PAIRS,
    SINKS,
    SLOPES,
    close,
    inputs,
    noise,
    nothing_planned,  # noqa: F401 - a fixture
    packed,
)

import autoattn
from autoattn.core.problem import DType, Layout, Problem
from autoattn.errors import ProblemError, TensorError
from autoattn.runtime.plan.explanations import Level


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_what_a_call_asks_for_is_what_the_formula_gives(name: str, layout: str) -> None:
    given, meant = ARGUMENTS[name]
    tensors = inputs()
    placed = tensors if layout == "bhsd" else tuple(tensor.transpose(1, 2) for tensor in tensors)
    wanted, sums = formula.attention(*tensors, **meant)
    output = autoattn.attention(*placed, layout=layout, **given)
    both, lse = autoattn.attention(*placed, layout=layout, return_lse=True, **given)
    for answer in (output, both):
        close(answer if layout == "bhsd" else answer.transpose(1, 2), wanted)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
    close(lse, sums)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradients_follow_what_a_call_asks_for(name: str) -> None:
    given, meant = ARGUMENTS[name]
    ours = [tensor.requires_grad_() for tensor in inputs()]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    push = noise(2, 4, 5, 16)
    autoattn.attention(*ours, **given).backward(push)
    formula.attention(*theirs, **meant)[0].backward(push.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        close(mine.grad, other.grad)


def test_a_learned_bias_and_learned_sinks_get_their_gradients() -> None:
    learned = [noise(4, 5, 7).requires_grad_(), SINKS.clone().requires_grad_()]
    exact = [tensor.detach().double().requires_grad_() for tensor in learned]
    tensors, push = inputs(), noise(2, 4, 5, 16)
    autoattn.attention(*tensors, bias=learned[0], sinks=learned[1]).backward(push)
    formula.attention(*tensors, add=exact[0], sinks=exact[1])[0].backward(push.double())
    for mine, other in zip(learned, exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        close(mine.grad, other.grad)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_row_that_a_tensor_hides_whole_gives_zero_and_gradients_of_zero(return_lse: bool) -> None:
    for hidden in (torch.tensor(False), torch.tensor(-math.inf)):
        tensors = [tensor.requires_grad_() for tensor in inputs()]
        mask = torch.ones(5, 7, dtype=torch.bool) if hidden.dtype is torch.bool else torch.zeros(5, 7)
        mask[2] = hidden
        answer = autoattn.attention(*tensors, mask=mask, return_lse=return_lse)
        output = answer[0] if return_lse else answer
        assert (output[:, :, 2] == 0.0).all()
        if return_lse:
            assert (answer[1][:, :, 2] == -math.inf).all()
        output.sum().backward()
        for tensor in tensors:
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()
        assert (tensors[0].grad[:, :, 2] == 0.0).all()  # type: ignore[index]


def test_values_may_have_a_head_dim_of_their_own() -> None:
    query, key, _ = inputs()
    for head_dim_v in (8, 40):
        value = noise(2, 2, 7, head_dim_v)
        output = autoattn.attention(query, key, value, window=(2, 1))
        close(output, formula.attention(query, key, value, keep=formula.band(5, 7, 2, 1))[0])


def test_float8_numbers_are_multiplied_by_their_scales() -> None:
    tensors = tuple(tensor.to(torch.float8_e4m3fn) for tensor in inputs())
    scales = [noise(2, 2, seed=place).abs() + 0.5 for place in range(3)]
    names = ("query_scale", "key_scale", "value_scale")
    output, _ = autoattn.attention(*tensors, causal=True, return_lse=True, **dict(zip(names, scales, strict=True)))
    query, key, value = (tensor.double() * scale.repeat_interleave(tensor.shape[1] // 2, 1)[..., None, None]
                         for tensor, scale in zip(tensors, scales, strict=True))  # fmt: skip
    assert output.dtype is torch.bfloat16
    close(output, formula.attention(query, key, value, keep=formula.band(5, 7, -1, 0))[0])
    plain = autoattn.attention(*tensors)
    close(plain, formula.attention(*(tensor.double() for tensor in tensors))[0])


def test_windows_that_bind_nobody_are_the_plain_problem() -> None:
    tensors = inputs()
    for window, mask in (((6, 4), "full"), ((-1, 0), "causal:bottom-right"), ((5, 4), "window:5,-1")):
        explanation = autoattn.explain(*tensors, window=window)
        assert explanation.problem is not None
        assert str(explanation.problem.mask) == mask


def test_the_route_without_a_kernel_is_pytorchs_attention_or_the_plain_formula() -> None:
    tensors = inputs()
    assert autoattn.explain(*tensors, window=(2, 1)).route == "sdpa"
    assert autoattn.explain(*tensors, mask=PAIRS, causal=True).route == "sdpa"
    for given in ({"softcap": 2.0}, {"return_lse": True}, {"sinks": SINKS}, {"precision": "tf32x3"}):
        explanation = autoattn.explain(*tensors, **given)
        assert (explanation.route, explanation.level) == ("eager", Level.SDPA)
        assert explanation.steps[-1].startswith("sdpa: it ")


def test_the_plain_formula_counts_in_float32_under_autocast() -> None:
    tensors = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, lse = autoattn.attention(*tensors, softcap=2.0, return_lse=True)
    low = tuple(tensor.bfloat16() for tensor in tensors)
    wanted, sums = formula.attention(*low, change=lambda scores: 2.0 * torch.tanh(scores / 2.0))
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(output.double(), wanted, rtol=8e-3, atol=8e-3)
    close(lse, sums)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_drops_weights_and_the_others_grow() -> None:
    query, key, value = noise(1, 2, 64, 16), noise(1, 2, 64, 16), torch.eye(64).expand(1, 2, 64, 64)
    whole = autoattn.attention(query, key, value)
    output = autoattn.attention(query, key, value, dropout=0.25, seed=3)
    kept = output != 0.0
    assert abs(float(kept.double().mean()) - 0.75) < 0.02
    close(output[kept], whole[kept] / 0.75)
    assert not torch.equal(kept[0, 0], kept[0, 1])


def test_a_seed_decides_what_is_dropped() -> None:
    tensors = inputs()
    first, again, other = (autoattn.attention(*tensors, dropout=0.5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_a_seed_pytorchs_generator_decides_and_explaining_does_not_draw() -> None:
    tensors = inputs()
    torch.manual_seed(5)
    first, second = (autoattn.attention(*tensors, dropout=0.5) for _ in range(2))
    torch.manual_seed(5)
    autoattn.explain(*tensors, dropout=0.5)
    assert torch.equal(autoattn.attention(*tensors, dropout=0.5), first)
    assert not torch.equal(first, second)


# --- nothing to compute -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_call_without_queries_or_keys_gives_zeros_and_an_lse_of_minus_infinity(
    sizes: tuple[int, int, int], layout: str
) -> None:
    batch, seq_q, seq_kv = sizes
    shapes = ((batch, 4, seq_q, 16), (batch, 2, seq_kv, 16), (batch, 2, seq_kv, 24))
    tensors = [torch.full(shape, math.nan) for shape in shapes]
    if layout == "bshd":
        tensors = [tensor.transpose(1, 2) for tensor in tensors]
    for given in ({}, {"causal": True}, {"window": (2, 1), "softcap": 2.0}, {"mask": torch.ones(seq_q, seq_kv) > 0}):
        output, lse = autoattn.attention(*tensors, layout=layout, return_lse=True, **given)
        assert output.shape == (*tensors[0].shape[:3], 24)
        assert (output == 0.0).all()
        assert lse.shape == (batch, 4, seq_q)
        assert (lse == -math.inf).all()
        assert autoattn.explain(*tensors, layout=layout, **given).reason.startswith("there is no query or no key")


def test_a_call_without_keys_leaves_a_sink_in_the_lse_and_gives_gradients_of_zero() -> None:
    tensors = [noise(2, 4, 5, 16), noise(2, 2, 0, 16), noise(2, 2, 0, 16)]
    for tensor in tensors:
        tensor.requires_grad_()
    output, lse = autoattn.attention(*tensors, sinks=SINKS, return_lse=True)
    assert torch.equal(lse, SINKS[None, :, None].expand(2, 4, 5))
    output.sum().backward()
    assert (tensors[0].grad == 0.0).all()


def test_a_call_without_keys_is_checked_all_the_same() -> None:
    query, key = noise(2, 4, 5, 16), noise(2, 2, 0, 16)
    with pytest.raises(TensorError, match="softcap must be"):
        autoattn.attention(query, key, key, softcap=-1.0)
    with pytest.raises(ProblemError, match="diagonal"):
        autoattn.attention(query, key, key, mask="diagonal")


# --- packed sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [
    {}, {"causal": True}, {"window": (2, 1)}, {"window": (1, 3), "causal": True}, {"softcap": 2.0, "sinks": SINKS},
    {"alibi_slopes": SLOPES}, {"alibi_slopes": noise(5, 4).abs(), "causal": True}, {"score_mod": "score * (1.0 + b)"},
    {"dropout": 0.5, "seed": 3, "scale": 0.3},
], ids=str)  # fmt: skip
def test_packed_sequences_are_as_many_calls(given: dict[str, Any]) -> None:
    query, key, value, *lengths = packed()
    output, lse = autoattn.packed_attention(query, key, value, *lengths, return_lse=True, **given)
    assert (output.shape, lse.shape, lse.dtype) == ((17, 4, 24), (4, 17), torch.float32)
    assert torch.equal(autoattn.packed_attention(query, key, value, *lengths, **given), output)
    for place, (first, end, first_kv, end_kv) in enumerate(
        zip(lengths[0][:-1], lengths[0][1:], lengths[1][:-1], lengths[1][1:], strict=True)
    ):
        alone = dict(given)
        if alone.get("alibi_slopes", SLOPES).dim() == 2:
            alone["alibi_slopes"] = alone["alibi_slopes"][place]
        if "score_mod" in alone:
            alone["score_mod"] = f"score * (1.0 + {place})"
        tensors = (query[None, first:end], key[None, first_kv:end_kv], value[None, first_kv:end_kv])
        if "dropout" in alone and place > 0:
            continue  # each sequence drops others than a call of its own would
        wanted, sums = autoattn.attention(*tensors, layout="bshd", return_lse=True, **alone)
        close(output[first:end], wanted[0])
        close(lse[:, first:end], sums[0])
    assert (output[14:] == 0.0).all()
    assert (lse[:, 14:] == -math.inf).all()


def test_packed_gradients_are_those_of_each_sequence_and_zero_behind_the_last() -> None:
    query, key, value, *lengths = packed((3, 4), (5, 2))
    ours = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    push = noise(10, 4, 24)
    autoattn.packed_attention(*ours, *lengths, causal=True).backward(push)
    theirs = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    for rows, columns in ((slice(0, 3), slice(0, 5)), (slice(3, 7), slice(5, 7))):
        parts = [
            tensor[part][None].transpose(1, 2) for tensor, part in zip(theirs, (rows, columns, columns), strict=True)
        ]
        keep = formula.band(parts[0].shape[2], parts[1].shape[2], -1, 0)
        formula.attention(*parts, keep=keep)[0].backward(push[rows][None].transpose(1, 2).double())
    for mine, other in zip(ours, theirs, strict=True):
        close(mine.grad, other.grad)


@pytest.mark.parametrize(("queries", "keys"), [((), ()), ((0, 0), (3, 2)), ((3, 2), (0, 0)), ((0,), (0,))])
@pytest.mark.parametrize("tail", [0, 3])
def test_packed_sequences_without_tokens_give_zeros(queries: tuple[int, ...], keys: tuple[int, ...], tail: int) -> None:
    arguments = packed(queries, keys, tail)
    output, lse = autoattn.packed_attention(*arguments, sinks=SINKS, return_lse=True)
    assert output.shape == (sum(queries) + tail, 4, 24)
    assert (output == 0.0).all()
    assert torch.equal(lse[:, : sum(queries)], SINKS[:, None].expand(4, sum(queries)))
    assert (lse[:, sum(queries) :] == -math.inf).all()
    assert autoattn.explain_packed(*arguments).route == "eager"


def test_a_packed_call_poses_a_packed_problem() -> None:
    explanation = autoattn.explain_packed(*packed(), window=(2, -1))
    assert explanation.route == "eager"
    assert explanation.problem == Problem(
        dtype=DType.FLOAT32, batch=5, heads_q=4, heads_kv=2, seq_q=5, seq_kv=6, head_dim=16, head_dim_v=24,
        mask=autoattn.Mask.window(2, -1), layout=Layout.PACKED, tokens_q=17, tokens_kv=19,
    )  # fmt: skip


def test_the_longest_sequence_may_be_a_bound_that_is_too_high() -> None:
    *tensors, _, _ = packed()
    exact = autoattn.packed_attention(*packed(), causal=True)
    longest: dict[str, Any] = {"max_seqlen_q": 2**20, "max_seqlen_kv": 2**20}
    assert torch.equal(autoattn.packed_attention(*tensors, **longest, causal=True), exact)
