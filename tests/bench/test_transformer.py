"""The language models: their sizes, and that each attention computes the same loss."""

from __future__ import annotations

from typing import Any

import kernels
import pytest
import samples
import torch
from checkout_paths import BENCHMARKS
from torch import Tensor

from autoattn import functional
from autoattn.bench import transformer
from autoattn.bench.training_results import Mode, Whose
from autoattn.bench.transformer import SIZES, Size, Transformer
from autoattn.core.problem import Problem
from autoattn.runtime.plan.explanations import Explanation, Level
from autoattn.runtime.plan.reasons import Reasons
from autoattn.shapes import shapes_file

CPU = torch.device("cpu")
TINY = Size(name="tiny", width=32, hidden=64, layers=2, heads=2, vocabulary=50)


def model_and_tokens(length: int = 32) -> tuple[Transformer, Tensor, Tensor]:
    torch.manual_seed(0)
    drawn = torch.randint(TINY.vocabulary, (2, length + 1))
    return Transformer(TINY, length), drawn[:, :-1], drawn[:, 1:]


def test_heads_and_head_dims_are_those_of_the_shapes_file() -> None:
    file = [
        entry
        for entry in shapes_file.load(BENCHMARKS / "shapes/language_models.yaml")
        if "language-models" in entry.groups
    ]
    assert {(entry.problem.heads_q, entry.problem.head_dim, entry.problem.batch) for entry in file} == {
        (size.heads, size.head_dim, 4) for size in SIZES.values()
    }
    assert list(SIZES) == ["S", "M", "L", "XL", "2.7B"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("S", 128_625_408), ("M", 423_183_360), ("L", 969_411_840), ("XL", 1_998_235_200), ("2.7B", 3_406_809_600)],
)
def test_models_have_as_many_parameters_as_the_assignment_s_architecture(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Transformer(SIZES[name], 8)
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name].parameters == parameters


@pytest.mark.parametrize("autocast", [False, True])
def test_all_attentions_give_the_same_loss(autocast: bool) -> None:
    model, tokens, targets = model_and_tokens()
    losses = {}
    for whose in Whose:
        model.attend_by(transformer.attention_of(whose, 32, CPU))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses[whose] = float(model(tokens, targets))
    expected = losses.pop(Whose.NAIVE)
    assert losses == pytest.approx(dict.fromkeys(losses, expected), rel=2e-3 if autocast else 1e-5)


@pytest.mark.parametrize("whose", [Whose.SDPA, Whose.OURS])  # FlexAttention has no gradients on the CPU
def test_gradients_are_those_of_the_formula(whose: Whose) -> None:
    model, tokens, targets = model_and_tokens()
    model(tokens, targets).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    model.attend_by(transformer.attention_of(whose, 32, CPU))
    model(tokens, targets).backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=1e-4, atol=1e-6)


def test_a_token_sees_none_that_follow() -> None:
    model, tokens, _ = model_and_tokens()
    logits: list[Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % TINY.vocabulary
    model(tokens, tokens)
    model(changed, tokens)
    torch.testing.assert_close(logits[0][:, :20], logits[1][:, :20])
    assert not torch.allclose(logits[0][:, 20:], logits[1][:, 20:])


def test_scores_of_rotated_heads_depend_on_the_distance_alone() -> None:
    with torch.no_grad():
        model = Transformer(TINY, 32)
        query, key = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 1, 32, 16)  # the same at each place
        turned = [transformer.rotate(tensor, model.cosines, model.sines) for tensor in (query, key)]
    scores = (turned[0] @ turned[1].mT)[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores.diagonal(), (query * key).sum(-1)[0, 0])
    assert scores[0].std() > 0.1


def test_autoattn_s_own_function_runs_once_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, targets = model_and_tokens()
    model.attend_by(transformer.attention_of(Whose.OURS, 32, CPU))
    calls: list[dict[str, Any]] = []
    attention = functional.attention

    def noted(*tensors: Tensor, **given: Any) -> Any:
        calls.append({"shape": tuple(tensors[0].shape), **given})
        return attention(*tensors, **given)

    monkeypatch.setattr(functional, "attention", noted)
    model(tokens, targets)
    assert calls == [{"shape": (2, 2, 32, 16), "causal": True}] * TINY.layers


def three() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3))
    return query, key, value


@pytest.mark.parametrize(
    ("whose", "mode", "words"),
    [
        (Whose.SDPA, Mode.EAGER, "flash"),
        (Whose.OURS, Mode.EAGER, "sdpa flash"),
        (Whose.OURS, Mode.COMPILED, "sdpa flash, traced"),
        (Whose.NAIVE, Mode.EAGER, "the formula"),
        (Whose.FLEX, Mode.EAGER, "flex_attention, compiled"),
    ],
)
def test_what_ran_is_named(whose: Whose, mode: Mode, words: str) -> None:
    if mode is Mode.COMPILED:
        torch.compiler.reset()
    assert transformer.ran(whose, mode, *three()).startswith(words)


def explanation_of(route: str, problem: Problem) -> Explanation:
    variant = samples.measured(problem).variant
    return Explanation(problem=problem, route=route, level=Level.EXACT, reasons=Reasons(""), variant=variant)


@pytest.mark.parametrize(
    ("learns", "free", "mode", "words"),
    [
        ("kernel", "kernel", Mode.EAGER, "triton/forward, exact"),
        ("kernel", "kernel", Mode.COMPILED, "triton/forward, exact"),
        ("sdpa-cudnn", "kernel", Mode.EAGER, "sdpa-cudnn, exact"),
        ("sdpa", "kernel", Mode.COMPILED, "triton/forward, exact; gradients by PyTorch"),
    ],
)
def test_of_autoattn_s_rows_the_kernel_is_named_and_who_gives_gradients(
    learns: str, free: str, mode: Mode, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explain(*tensors: Tensor, causal: bool) -> Explanation:
        return explanation_of(learns if torch.is_grad_enabled() else free, kernels.problem())

    monkeypatch.setattr(functional, "explain", explain)
    monkeypatch.setattr(transformer, "traced_backend", lambda *tensors: None)
    assert transformer.ran(Whose.OURS, mode, *three()) == words


def test_sdpa_without_a_fused_backend_is_named_math() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert transformer.ran(Whose.SDPA, Mode.EAGER, *three()) == "math"
