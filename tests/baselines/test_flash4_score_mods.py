"""Score_mods for FlashAttention-4: CuTe computes what a text says, and both passes get the right functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import cute_stand_in
import drawn
import kernels
import pytest
import torch
from cute_stand_in import Memory, Vector
from torch import Tensor

from autoattn.baselines import external, flash4_score_mods
from autoattn.baselines.external import PEERS
from autoattn.baselines.flash4_score_mods import Change
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Layout, Op, Problem
from autoattn.expressions import derivative, language
from autoattn.expressions.expression import FUNCTIONS, OPERATORS
from autoattn.expressions.language import SCORE_NAMES
from autoattn.reference import attention_formula, inputs
from autoattn.validation import gradient_check

CPU = torch.device("cpu")
TEXTS = (
    *drawn.SCORE_MODS,
    "20.0 * tanh(score / 20.0)",
    "captured0: float32[1]\nscore - captured0[h] * abs(q_idx - kv_idx)",
    "captured0: int32[1]\nwhere(captured0[q_idx] == captured0[kv_idx], score, -inf)",
    "captured0: float32[2]\nscore + captured0[h, q_idx - kv_idx]",
    "captured0: int64[1]\ncaptured1: bfloat16[1]\nscore * captured0[kv_idx - 9] + captured1[0] * captured1[-1]",
    "captured0: bool[1]\nscore + captured0[q_idx] + 2 * to_float(captured0[kv_idx + 3])",
    "exp(score / 4) + exp2(-score) + sigmoid(kv_idx)",
    "log(score * score + 1) + log2(abs(score) + 1)",
    "sqrt(score * score + 1) * rsqrt(abs(score) + 2)",
    "sin(score) * cos(score / 2) + floor(score) - floor(kv_idx)",
    "minimum(score, kv_idx) + maximum(q_idx, 2) - minimum(log(-1 - score * score), 1.0)",
    "(q_idx - kv_idx) % 3 + (kv_idx - q_idx) % -4 + score % 0.75 - (q_idx + 0.5) % -0.3",
    "(q_idx - kv_idx) // 3 - (kv_idx - q_idx) // -4 + score // 0.3",
    "score % 0.1",
    "near = ~(q_idx == kv_idx) | (h > 1)\nwhere(near ^ (b == 0) & (score <= 1.0), score, ~q_idx)",
    "h + (q_idx >= 1) + ((q_idx != 1) == (kv_idx < 3)) + (q_idx & 3 | 4) ^ 1",
    "x = 2 * score\ny = where(q_idx >= kv_idx, x, -inf)\nx = 3 * score\ny",
    "to_int(score) + to_float(kv_idx > 2) + where(score > 0, 1, 0)",
    "q_idx",
    "1.5",
)


@pytest.fixture(autouse=True)
def traced_by_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cute_stand_in.install(monkeypatch)
    external.why_not_loadable.cache_clear()
    yield
    external.why_not_loadable.cache_clear()


def pairs() -> dict[str, Tensor]:
    """Every pair of a small problem once."""
    sizes = (2, 4, 5, 6)
    score = 3.0 * torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    score[0, 0, 0] = torch.tensor([0.0, 1.0, 0.75, 2.25, -1.5, 1.5])
    score[0, 0, 1, :2] = torch.tensor([0.9, 4.5000014])  # over 0.1 and 0.3 they are rounded to the next whole number
    grid = torch.meshgrid(*(torch.arange(size, dtype=torch.int32) for size in sizes), indexing="ij")
    return dict(zip(SCORE_NAMES, (score.flatten(), *(place.flatten() for place in grid)), strict=True))


def captured(text: str) -> tuple[Tensor, ...]:
    generator, tensors = torch.Generator().manual_seed(1), []
    for capture in language.parse(text, SCORE_NAMES).captures:
        numbers, kind = torch.randn((6,) * capture.axes, generator=generator), getattr(torch, capture.dtype)
        tensors.append(numbers > 0 if kind is torch.bool else (4 * numbers).to(kind))
    return tuple(tensors)


def called(function: Callable[..., Any], tensors: tuple[Tensor, ...], *vectors: Tensor, seq_q: int = 5) -> Tensor:
    """The numbers of a function that is called as FlashAttention-4 calls it."""
    *first, q_idx, kv_idx = map(Vector, vectors)
    lengths = ModuleType("lengths")
    lengths.seqlen_q = seq_q  # type: ignore[attr-defined]
    memory = [Memory(flash4_score_mods.readable(tensor)) for tensor in tensors]
    answer = function(*first, q_idx=q_idx, kv_idx=kv_idx, seqlen_info=lengths, aux_tensors=memory)
    assert answer.numbers.dtype is torch.float32
    numbers: Tensor = answer.numbers
    return numbers


def change_of(text: str, **facts: Any) -> Change:
    return Change(text=text, sizes=tuple(tuple(tensor.shape) for tensor in captured(text)), **facts)


def evaluated(expression: Any, text: str) -> Tensor:
    """The numbers of an expression over tensors."""
    names: dict[str, Any] = {name: place.long() for name, place in pairs().items()} | {"score": pairs()["score"]}
    names |= {f"captured{place}": tensor for place, tensor in enumerate(captured(text))}
    answer = torch.as_tensor(expression.evaluate(names, attention_formula.FUNCTIONS)).float()
    return answer.expand_as(names["score"])


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbounded", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_cute_computes_what_a_text_says(text: str, unbounded: bool) -> None:
    scores = called(
        flash4_score_mods.score_mod(change_of(text, unbounded=unbounded)), captured(text), *pairs().values()
    )
    expected = evaluated(language.parse(text, SCORE_NAMES), text)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("text", [text for text in TEXTS if "score //" not in text])
def test_cute_multiplies_gradients_by_the_derivative_of_a_text(text: str) -> None:
    grad = torch.arange(240.0) / 100
    gradients = called(flash4_score_mods.gradient_mod(change_of(text)), captured(text), grad, *pairs().values())
    expected = grad * evaluated(derivative.of(text), text)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_each_function_and_operator_of_the_language_is_among_them() -> None:
    together = " ".join(TEXTS)
    assert all(f"{name}(" in together for name in FUNCTIONS)
    assert all(f" {act} " in together for act, _ in OPERATORS.values())
    assert "~(" in together
    assert "-score" in together


def test_places_that_a_backward_pass_moved_are_put_back() -> None:
    """Hopper's takes query and head apart as its forward pass does where four heads lie side by side."""
    text = "captured0: float32[2]\nscore + captured0[h, q_idx] + 100 * h + 10 * q_idx + kv_idx"
    score, b, h, q_idx, kv_idx = pairs().values()
    moved = (score, b, 4 * h + q_idx % 4, q_idx // 4, kv_idx)
    expected = evaluated(language.parse(text, SCORE_NAMES), text)
    change = change_of(text, group=4)
    torch.testing.assert_close(called(flash4_score_mods.score_mod(change), captured(text), *moved), expected)
    torch.testing.assert_close(called(flash4_score_mods.gradient_mod(change), captured(text), score, *moved), score)
    assert not torch.equal(
        called(flash4_score_mods.score_mod(change_of(text)), (torch.zeros(20, 6),), *moved), expected
    )


def test_queries_behind_the_last_one_read_no_tensor_outside() -> None:
    text = "captured0: float32[1]\nscore + captured0[q_idx]"
    score, b, h, q_idx, kv_idx = pairs().values()
    moved = (score, b, 4 * h + q_idx % 4, 16 + q_idx // 4, kv_idx)
    scores = called(flash4_score_mods.score_mod(change_of(text, group=4)), captured(text), *moved, seq_q=6)
    torch.testing.assert_close(scores, score + captured(text)[0][5])


def test_rows_without_a_key_read_no_tensor_outside() -> None:
    text = "captured0: float32[1]\nscore + captured0[kv_idx]"
    score, b, h, q_idx, kv_idx = pairs().values()
    function = flash4_score_mods.score_mod(change_of(text, unbounded=True))
    assert called(function, captured(text), score, b, h, q_idx, kv_idx - 128).isfinite().all()
    with pytest.raises(AssertionError):
        called(flash4_score_mods.score_mod(change_of(text)), captured(text), score, b, h, q_idx, kv_idx - 128)


def test_each_change_has_one_function_and_a_digest_of_its_own() -> None:
    text = "captured0: float32[1]\nscore * captured0[h]"
    changes = [Change(text=text, sizes=((4,),), group=1), Change(text=text, sizes=((5,),)),
               Change(text=text, sizes=((4,),), group=2), Change(text=text, sizes=((4,),), unbounded=True),
               Change(text="score * 2", sizes=())]  # fmt: skip
    functions = [
        make(change) for make in (flash4_score_mods.score_mod, flash4_score_mods.gradient_mod) for change in changes
    ]
    assert len({function.__cute_hash__ for function in functions}) == len(functions)  # type: ignore[attr-defined]
    assert flash4_score_mods.score_mod(Change(text=text, sizes=((4,),))) is functions[0]


def test_booleans_are_read_as_bytes_and_the_callers_tensors_stay_as_they_are() -> None:
    for tensor in (torch.ones(3, 1, dtype=torch.bool), torch.ones(1, 1)):
        readable = flash4_score_mods.readable(tensor)
        assert readable.dtype is (torch.uint8 if tensor.dtype is torch.bool else torch.float32)
        assert readable.data_ptr() == tensor.data_ptr()
        assert readable.__leading_dim__ == 1  # type: ignore[attr-defined]
        assert not hasattr(tensor, "__leading_dim__")


# --- how FlashAttention-4 is asked ------------------------------------------------------------------------------------


class Hopper(torch.autograd.Function):
    """FlashAttention-4's attention, whose backward pass moves queries and heads where heads share keys."""

    @staticmethod
    def scores(function: Any, ctx: Any, query: Tensor, key: Tensor, grad: Tensor | None, group: int) -> Tensor:
        rows = query @ key.transpose(2, 3) * ctx.facts["softmax_scale"]
        grid = torch.meshgrid(*(torch.arange(size, dtype=torch.int32) for size in rows.shape), indexing="ij")
        b, h, q_idx, kv_idx = (place.flatten() for place in grid)
        if group > 1:
            h, q_idx = h * group + q_idx % group, q_idx // group
        given = (rows.flatten(),) if grad is None else (grad.flatten(), rows.flatten())
        tensors = tuple(ctx.facts.get("aux_tensors", ()))
        return called(function, tensors, *given, b, h, q_idx, kv_idx, seq_q=rows.shape[2]).view_as(rows)

    @staticmethod
    def weights(function: Any, ctx: Any, query: Tensor, key: Tensor, group: int) -> Tensor:
        scores = Hopper.scores(function, ctx, query, key, None, group)
        if ctx.facts["causal"]:
            kept = torch.ones(scores.shape[2:], dtype=torch.bool).tril(scores.shape[3] - scores.shape[2])
            scores = scores.masked_fill(~kept, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0)

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> tuple[Tensor, None]:
        ctx.facts, ctx.score_mod, ctx.group = facts, facts["score_mod"], query.shape[2] // key.shape[2]
        ctx.save_for_backward(query, key, value)
        query, key, value = Hopper.spread(ctx, query, key, value)
        return (Hopper.weights(ctx.score_mod, ctx, query, key, 1) @ value).half().transpose(1, 2).contiguous(), None

    @staticmethod
    def spread(ctx: Any, query: Tensor, *shared: Tensor) -> list[Tensor]:
        tensors = (query, *(tensor.repeat_interleave(ctx.group, 2) for tensor in shared))
        return [tensor.transpose(1, 2).float() for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = Hopper.spread(ctx, *ctx.saved_tensors)
        pull, scale = pulls[0].transpose(1, 2).float(), ctx.facts["softmax_scale"]
        weights = Hopper.weights(ctx.score_mod, ctx, query, key, ctx.group)
        pulled = pull @ value.transpose(2, 3)
        grad = weights * (pulled - (weights * pulled).sum(-1, keepdim=True))
        grad = scale * Hopper.scores(ctx.facts["score_mod_bwd"], ctx, query, key, grad, ctx.group)
        shared = (grad.transpose(2, 3) @ query, weights.transpose(2, 3) @ pull)
        summed = (tensor.unflatten(1, (-1, ctx.group)).sum(2) for tensor in shared)
        return (*(tensor.half().transpose(1, 2) for tensor in (grad @ key, *summed)), None)


@pytest.fixture
def flash4_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a FlashAttention-4 was asked for that stands in for the real one."""
    seen: list[dict[str, Any]] = []

    def dense(query: Tensor, key: Tensor, value: Tensor, **facts: Any) -> Any:
        seen.append(facts)
        return Hopper.apply(query, key, value, facts)

    module = ModuleType("flash_attn.cute")
    module.flash_attn_func = module.flash_attn_varlen_func = dense  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return seen


def changed(text: str, **facts: Any) -> Problem:
    return kernels.problem(modifiers=Modifiers(score_mod=text), **facts)


@pytest.mark.parametrize("text", drawn.SCORE_MODS)
def test_fa4_means_what_we_mean_by_a_score_mod(text: str, flash4_calls: list[dict[str, Any]]) -> None:
    problem = changed(text, mask="causal")
    operands = inputs.make(problem, CPU, torch.Generator().manual_seed(0))
    assert PEERS["fa4"].why_not(problem) is None
    output = PEERS["fa4"].prepare(problem, operands)()
    expected, _ = attention_formula.attention(problem, operands)
    torch.testing.assert_close(output.double(), expected, rtol=5e-3, atol=5e-3)
    assert ("aux_tensors" in flash4_calls[0]) is bool(operands.score_captures)
    assert "score_mod_bwd" not in flash4_calls[0]


@pytest.mark.sampled
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("text", [*drawn.SCORE_MODS, "20.0 * tanh(score / 20.0)"])
def test_gradients_of_fa4_are_ours_whether_or_not_its_backward_pass_moves_queries(
    text: str, moves: bool, flash4_calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash4_score_mods, "moves_queries", lambda device: moves)
    problem = changed(text, mask="causal", op=Op.BACKWARD, heads_kv=2 if moves else 4)
    case = gradient_check.full_case(problem, CPU, torch.Generator().manual_seed(0))
    differentiate = external.backward_pass(PEERS["fa4"], problem, case.operands, case.saved.output_grad)
    for gradients in (differentiate(), differentiate()):
        for gradient, (error, _) in gradient_check.errors_by_name(gradients, case).items():
            assert error <= 4.0 * case.allowed[gradient], gradient
    assert "score_mod_bwd" in flash4_calls[0]


@pytest.mark.parametrize(
    ("facts", "unbounded"),
    [
        ({"mask": "causal"}, False),
        ({"mask": "window:40,9"}, False),
        ({"seq_q": 80}, False),
        ({"seq_q": 80, "mask": "causal"}, True),
        ({"seq_q": 60, "mask": "window:-1,20"}, False),
        ({"seq_q": 80, "mask": "window:-1,20"}, True),
        ({"layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 90}, True),
    ],
)
def test_reads_are_kept_inside_where_a_query_may_see_no_key(facts: dict[str, Any], unbounded: bool) -> None:
    text = "captured0: float32[1]\nscore * captured0[kv_idx]"
    problem = changed(text, **facts)
    operands = inputs.make(problem, CPU, torch.Generator().manual_seed(0))
    calls: list[dict[str, Any]] = []
    flash4_score_mods.changing(lambda *tensors, **facts: calls.append(facts), problem, operands)()
    sizes = (tuple(operands.score_captures[0].shape),)
    assert calls[0]["score_mod"] is flash4_score_mods.score_mod(Change(text=text, sizes=sizes, unbounded=unbounded))


class Moving:
    def apply_score_mod(self) -> dict[str, int]:
        return {"qhead_per_kvhead": 4}


class Staying:
    def apply_score_mod(self) -> dict[str, int]:
        pack_gqa = False
        return {"qhead_per_kvhead": 4 if pack_gqa else 1}


@pytest.mark.parametrize(
    ("kernel", "capability", "moves"), [(Moving, 9, True), (Staying, 9, False), (Moving, 10, False)]
)
def test_what_a_backward_pass_moves_is_read_in_its_source(
    kernel: type, capability: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    module = ModuleType("flash_attn.cute.flash_bwd_sm90")
    module.FlashAttentionBackwardSm90 = kernel  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    flash4_score_mods.moves_queries.cache_clear()
    assert flash4_score_mods.moves_queries(CPU) is moves
    flash4_score_mods.moves_queries.cache_clear()


@pytest.mark.parametrize(
    ("name", "facts", "word"),
    [
        ("fa2", {"modifiers": Modifiers(score_mod="score * 2")}, "no score_mod"),
        ("fa3", {"modifiers": Modifiers(score_mod="score * 2")}, "no score_mod"),
        ("fa4", {"modifiers": Modifiers(score_mod="score * 2", softcap=True)}, "not both"),
        ("fa4", {"modifiers": Modifiers(score_mod="score * 2", alibi=True)}, "alibi"),
        ("fa4", {"modifiers": Modifiers(score_mod="score // 2"), "op": Op.BACKWARD}, "no derivative"),
    ],
)
def test_what_no_function_says_is_refused_in_words(name: str, facts: dict[str, Any], word: str) -> None:
    assert word in (PEERS[name].refuses(kernels.problem(**facts)) or "")
