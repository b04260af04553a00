"""The derivative of a score_mod is the one that autograd finds."""

from __future__ import annotations

import pytest
import torch

from autoattn.errors import ProblemError
from autoattn.expressions import derivative, language
from autoattn.expressions.expression import FUNCTIONS
from autoattn.expressions.language import SCORE_NAMES
from autoattn.reference.attention_formula import FUNCTIONS as IN_TORCH

TEXTS = (
    "score",
    "score * 2 + 1",
    "-score - (3 - score) * q_idx",
    "score / (1 + abs(score)) - 2 / (score * score + 1)",
    "exp(score) + exp2(-score) * tanh(score) + sigmoid(2 * score)",
    "log(score * score + 1) + log2(abs(score) + 1)",
    "sqrt(score * score + 1) * rsqrt(abs(score) + 2)",
    "sin(score) * cos(score / 2)",
    "where(q_idx >= kv_idx, score * 3, -inf)",
    "where(score > 0, score * score, score * (q_idx // 2))",
    "near = q_idx - kv_idx < 3\nshown = where(near, -inf, tanh(score))\nwhere(q_idx == h, shown * 2, shown)",
    "x = 2 * score\ny = where(q_idx >= kv_idx, x, -inf)\nx = 3 * score\ny",
    "minimum(score, 0.5 * kv_idx) + maximum(score * 2, 1)",
    "minimum(score, score * score) - maximum(score, score)",
    "score % 0.75 + floor(score) + (score * score) % (kv_idx + 1)",
    "to_float(to_int(score)) + to_float(score)",
    "captured0: float32[1]\nscore * captured0[h] + captured0[to_int(score) % 4]",
    "far = q_idx - kv_idx > 1\nbent = tanh(score / 4)\ngrowth_of_bent = bent * 4\nwhere(far, growth_of_bent, bent)",
    "twice = score\ntwice + to_float(h) * twice",
    "1.0 * q_idx",
)


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_what_autograd_finds(text: str) -> None:
    generator = torch.Generator().manual_seed(0)
    score = 3.0 * torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)
    score[0, 0] = torch.tensor([0.0, 1.0, 0.5, 2.0, -1.0, 1.5])  # corners
    names = {
        "score": score.requires_grad_(),
        "b": torch.zeros(1, 1, 1, dtype=torch.int64),
        "h": torch.arange(4)[:, None, None],
        "q_idx": torch.arange(5)[None, :, None],
        "kv_idx": torch.arange(6)[None, None, :],
        "captured0": torch.randn(4, generator=generator, dtype=torch.float64),
    }
    answer = language.parse(text, SCORE_NAMES).evaluate(names, IN_TORCH)
    expected = torch.zeros_like(score)
    if answer.requires_grad:
        (expected,) = torch.autograd.grad(answer.expand_as(score).sum(), score)
    gradient = derivative.of(text).evaluate(names, IN_TORCH)
    gradient = gradient if isinstance(gradient, torch.Tensor) else torch.tensor(gradient)
    gradient = gradient.double().expand_as(score).where(answer != -torch.inf, 0.0)  # pairs without a weight have none
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_a_pair_that_is_hidden_has_the_derivative_of_the_others() -> None:
    hiding = "x = where(q_idx < kv_idx, -inf, score + q_idx)\ny = where(h > 2, x, -inf)\ny"
    answer = derivative.of(hiding).answer
    assert (answer.act, answer.number) == ("number", 1.0)
    kept = derivative.of("minimum(where(q_idx >= kv_idx, score, -inf), 3.0)").answer
    assert kept.act == "where", "what is made of -inf may have a weight"


def test_rounding_that_pytorch_does_not_differentiate_is_refused() -> None:
    for text in ("half = score // 2\nhalf + score", "3.0 % score", "score // q_idx"):
        with pytest.raises(ProblemError, match=r"must have a derivative in PyTorch, got (//|%) of a score"):
            derivative.of(text)


def test_every_function_and_operator_is_among_them() -> None:
    together = " ".join(TEXTS)
    assert all(f"{name}(" in together for name in FUNCTIONS)
    assert all(f" {act} " in together for act in ("+", "-", "*", "/", "//", "%"))


def test_what_is_no_step_is_computed_once() -> None:
    """Lines keep their names, and a line that grows has one more behind it, whose name is free."""
    expression = derivative.of("x = tanh(score)\ngrowth_of_x = x * x\ngrowth_of_x + q_idx")
    assert [name for name, _ in expression.steps] == ["x", "growth_of_x_", "growth_of_x", "growth_of_growth_of_x"]
    assert expression.triton()[-1] == "return own_growth_of_growth_of_x"
