"""Gradients on a real GPU: the gate for every axis that has them, and autograd through tuned kernels."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import gradient_kernels
import hopper_gradients
import pytest
import torch
from tuned_gradients import tuned  # noqa: F401 - a fixture

import autoattn
from autoattn import masks
from autoattn.codegen import render, search_space
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.trial import Verdict
from autoattn.errors import CompileError
from autoattn.hardware import nvidia
from autoattn.kernels import compiler
from autoattn.validation import gradient_check
from autoattn.validation.gradient_check import Gate

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DOCUMENTS = "captured0: int32[1]\ncaptured0[q_idx] == captured0[kv_idx]"
KINDS: list[dict[str, Any]] = [
    {},
    {"mask": "causal", "head_dim": 128},
    {"mask": "causal:top-left", "head_dim": 80, "head_dim_v": 40},
    {"mask": "window:40,9", "dtype": DType.FLOAT16},
    {"mask": "window:7,-1", "head_dim": 57},
    {"mask": "window:-1,3", "head_dim": 192, "head_dim_v": 128},
    {"mask": "causal", "head_dim": 256},
    {"mask": "causal", "modifiers": Modifiers(softcap=True, alibi=True)},
    {"mask": "causal", "layout": Layout.PACKED, "tokens_q": 8192, "tokens_kv": 8192, "batch": 5, "head_dim": 128},
    {"mask": "window:40,9", "layout": Layout.PACKED, "tokens_q": 8192, "tokens_kv": 8192, "batch": 5},
    {"mask": "causal", "modifiers": Modifiers(sinks=True)},  # launched as calls do, which dropout is not
    {"mask": "causal", "modifiers": Modifiers(sinks=True, dropout=True)},
    {"mask": "causal", "modifiers": Modifiers(bias=Bias.ADDITIVE), "head_dim": 128},
    {"modifiers": Modifiers(bias=Bias.KEYS)},
    {"mask": "causal", "modifiers": Modifiers(score_mod="captured0: float32[2]\nscore * tanh(captured0[h, kv_idx])")},
    {"modifiers": Modifiers(score_mod="where(q_idx % 3 == b, score, 4 * tanh(score / 4))"), "head_dim": 128},
    {"mask": Mask.blocks(128, 128, 0.5), "modifiers": Modifiers(score_mod="score - abs(q_idx - kv_idx) / 8")},
    {"mask": "causal", "modifiers": Modifiers(bias=Bias.LEARNED)},
    {"modifiers": Modifiers(bias=Bias.LEARNED, softcap=True, sinks=True), "head_dim": 128},
    {"mask": "window:40,9", "modifiers": Modifiers(bias=Bias.LEARNED, dropout=True), "dtype": DType.FLOAT32},
    {"mask": Mask.blocks(128, 64, 0.5, DOCUMENTS), "modifiers": Modifiers(bias=Bias.LEARNED, alibi=True)},
    {"mask": "causal", "modifiers": Modifiers(alibi=True, learned_slopes=True)},
    {"modifiers": Modifiers(alibi=True, learned_slopes=True, softcap=True, sinks=True), "head_dim": 128},
    {"mask": "window:40,9", "modifiers": Modifiers(alibi=True, learned_slopes=True, dropout=True), "head_dim": 80},
    {"mask": "causal", "modifiers": Modifiers(alibi=True, learned_slopes=True), "dtype": DType.FLOAT32},
    {
        "mask": "causal",
        "modifiers": Modifiers(alibi=True, learned_slopes=True),
        "layout": Layout.PACKED,
        "tokens_q": 8192,
        "tokens_kv": 8192,
        "batch": 5,
        "dtype": DType.FLOAT16,
    },
    {
        "mask": Mask.blocks(128, 64, 0.5, DOCUMENTS),
        "modifiers": Modifiers(alibi=True, learned_slopes=True, bias=Bias.LEARNED),
    },
    {"mask": Mask.blocks(128, 128, 0.5)},
    {"mask": Mask.blocks(128, 128, 0.5, DOCUMENTS), "head_dim": 128},
    {"mask": Mask.blocks(64, 32, 0.5, "(q_idx + h) % 3 != kv_idx % 3"), "modifiers": Modifiers(softcap=True)},
    {"mask": Mask.blocks(128, 64, 0.3, "q_idx >= kv_idx"), "dtype": DType.FLOAT32},
    {"mask": "causal", "dtype": DType.FLOAT32},
    {"mask": "causal", "dtype": DType.FLOAT32, "precision": Precision.TF32, "head_dim": 128},
]


def present() -> Device:
    device = nvidia.present()
    assert device is not None
    return device


def sized(**changes: Any) -> Problem:
    facts = {"dtype": DType.BFLOAT16, "heads_q": 8, "heads_kv": 8, "seq_q": 2048, "seq_kv": 2048, "head_dim": 64}
    return gradient_kernels.problem(**{**facts, **changes})


def judged(problem: Problem, seed: int | None) -> Verdict | None:
    """The gate's verdict on the default or a random variant; None where it does not compile for this card."""
    points = search_space.load(gradient_kernels.TEMPLATE)
    rng = random.Random(seed)
    variant = points.default(problem, present()) if seed is None else next(points.feasible(problem, present(), rng))
    try:
        kernel = compiler.load(render.render(problem, variant), CUDA)
    except CompileError:
        assert seed is not None
        return None
    return Gate(problem, CUDA).judge(kernel)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_pass_the_gate(kind: dict[str, Any], seed: int | None) -> None:
    verdict = judged(sized(**kind), seed)
    assert verdict is None or verdict.ok, verdict.reason


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_every_seed_of_gradients_by_tf32_products_passes_the_gate(head_dim: int) -> None:
    """Those that turn factors in memory too, which no default does."""
    problem = sized(dtype=DType.FLOAT32, precision=Precision.TF32, mask="causal", head_dim=head_dim)
    for variant in search_space.load(gradient_kernels.TEMPLATE).seeds_for(problem, present()):
        verdict = Gate(problem, CUDA).judge(compiler.load(render.render(problem, variant), CUDA))
        assert verdict.ok, f"{variant}: {verdict.reason}"


HOPPERS: list[dict[str, Any]] = [
    {"head_dim": 128},
    {"mask": "causal", "head_dim": 128, "dtype": DType.FLOAT16},
    {"mask": "causal:top-left", "head_dim": 64},
    {"mask": "window:40,9", "head_dim": 80, "head_dim_v": 56},
    {"mask": "window:40,0", "head_dim": 64},
    {"mask": "window:7,-1", "head_dim": 32},
    {"mask": "window:-1,3", "head_dim": 128},
    {"mask": "causal", "head_dim": 96},
    {"head_dim": 112, "head_dim_v": 72},
    {"mask": "causal", "head_dim": 160},
    {"mask": "causal", "head_dim": 256},
    {"mask": "window:40,9", "head_dim": 192, "head_dim_v": 128, "dtype": DType.FLOAT16},
    {"mask": Mask.blocks(128, 128, 0.5), "head_dim": 128},
    {"mask": Mask.blocks(128, 128, 0.3, DOCUMENTS), "head_dim": 64, "heads_kv": 2},
    {"mask": Mask.blocks(64, 128, 0.5, "(q_idx + h) % 3 != kv_idx % 3"), "head_dim": 80, "seq_q": 2000},
    {"mask": Mask.blocks(256, 64, 0.5, DOCUMENTS), "head_dim": 192, "head_dim_v": 128, "seq_q": 1900, "seq_kv": 2500},
    {"mask": "causal", "head_dim": 128, "modifiers": Modifiers(softcap=True)},
    {"mask": "causal", "head_dim": 64, "modifiers": Modifiers(alibi=True)},
    {"mask": "window:40,0", "head_dim": 128, "modifiers": Modifiers(sinks=True)},
    {"head_dim": 256, "modifiers": Modifiers(softcap=True, sinks=True)},
    {
        "mask": "causal",
        "head_dim": 128,
        "modifiers": Modifiers(softcap=True, sinks=True),
        "layout": Layout.PACKED,
        "tokens_q": 8192,
        "tokens_kv": 8192,
        "batch": 5,
    },
]


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("kind", HOPPERS, ids=str)
def test_hoppers_gradients_pass_the_gate(kind: dict[str, Any], seed: int | None) -> None:
    problem, points = sized(**kind), search_space.load(hopper_gradients.TEMPLATE)
    if present().arch != 90:
        pytest.skip("the template is for Hopper")
    rng = random.Random(f"{kind} {seed}")
    chosen = points.seeds_for(problem, present()) if seed is None else [next(points.feasible(problem, present(), rng))]
    for variant in chosen:
        try:
            kernel = compiler.load(render.render(problem, variant), CUDA)
        except CompileError:
            assert seed is not None, variant
            continue
        verdict = Gate(problem, CUDA).judge(kernel)
        assert verdict.ok, f"{variant}: {verdict.reason}"


BENT = "where(q_idx % 3 == b, score, 4 * tanh(score / 4))"
TABLE = "captured0: float32[2]\nscore + captured0[h, q_idx - kv_idx]"
ALIKE = "captured0: int32[1]\nwhere(captured0[q_idx] == captured0[kv_idx], score, -inf)"
PACKED: dict[str, Any] = {"layout": Layout.PACKED, "tokens_q": 8192, "tokens_kv": 8192, "batch": 5, "mask": "causal"}
MODDED: list[dict[str, Any]] = [
    {"mask": "causal", "head_dim": 128, "modifiers": Modifiers(score_mod="score + 0.01 * (kv_idx - q_idx)")},
    {"mask": "causal", "head_dim": 64, "modifiers": Modifiers(score_mod=BENT)},
    {"head_dim": 128, "modifiers": Modifiers(score_mod=BENT, softcap=True, sinks=True)},
    {"mask": "causal", "head_dim": 256, "modifiers": Modifiers(score_mod=BENT)},
    {"mask": "window:40,9", "head_dim": 80, "modifiers": Modifiers(score_mod=ALIKE, alibi=True)},
    {"head_dim": 256, "modifiers": Modifiers(score_mod=ALIKE), "dtype": DType.FLOAT16},
    {"mask": "causal", "head_dim": 64, "modifiers": Modifiers(score_mod=TABLE)},
    {**PACKED, "head_dim": 64, "modifiers": Modifiers(score_mod=TABLE)},
    {**PACKED, "head_dim": 128, "modifiers": Modifiers(score_mod=ALIKE)},
]


@pytest.mark.parametrize("kind", MODDED, ids=str)
def test_hoppers_gradients_pass_the_gate_with_a_score_mod(kind: dict[str, Any]) -> None:
    problem, points = sized(**kind), search_space.load(hopper_gradients.TEMPLATE)
    if present().arch != 90:
        pytest.skip("the template is for Hopper")
    for variant in points.seeds_for(problem, present())[:2]:
        verdict = Gate(problem, CUDA).judge(compiler.load(render.render(problem, variant), CUDA))
        assert verdict.ok, f"{variant}: {verdict.reason}"


WALKED: list[dict[str, Any]] = [
    {"head_dim": 64},
    {"mask": "causal", "head_dim": 64},
    {"mask": "causal:top-left", "head_dim": 64, "heads_kv": 16, "seq_kv": 2900},  # keys that no query sees
    {"mask": "window:40,9", "head_dim": 80, "head_dim_v": 56, "dtype": DType.FLOAT16},
    {"mask": "window:7,-1", "head_dim": 32, "seq_q": 1900},
    {"head_dim": 128, "seq_kv": 2050},
    {"mask": "causal", "head_dim": 128, "seq_q": 2500},
]


@pytest.mark.parametrize("order", ["any", "ascending", "descending"])
@pytest.mark.parametrize("kind", WALKED, ids=str)
def test_programs_that_walk_many_tiles_give_the_gradients_of_programs_of_one(kind: dict[str, Any], order: str) -> None:
    """By the gate's measure, and to the bit where programs add in turn: again and again, as a race would show."""
    problem, points = (
        sized(**{"batch": 2, "heads_q": 16, "heads_kv": 8, **kind}),
        search_space.load(hopper_gradients.TEMPLATE),
    )
    if present().arch != 90:
        pytest.skip("the template is for Hopper")
    case = gradient_check.full_case(problem, CUDA, torch.Generator().manual_seed(0))
    tried = 0
    for stages, block in itertools.product((1, 2), (64, 128)):
        base = {**points.params_of(points.default(problem, present())), "summing": "tma", "num_stages": 2}
        base |= {"order": order, "score_grad_stages": stages, "BLOCK_M": block}
        walked, alone = (points.variant({**base, "schedule": each}) for each in ("dynamic", "one_tile"))
        if (reason := points.why_infeasible(walked, problem, present())) is not None:
            assert "registers" in reason or "shared memory" in reason or "mirror image" in reason, reason
            continue
        kernels = [compiler.load(render.render(problem, each), CUDA) for each in (walked, alone)]
        verdict = Gate(problem, CUDA).judge(kernels[0])
        assert verdict.ok, f"{walked}: {verdict.reason}"
        theirs = gradient_check.run(kernels[1], case)
        for _ in range(20):
            ours = gradient_check.run(kernels[0], case)
            for name in ("query", "key", "value") if order != "any" else ("key", "value"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), f"{walked}: {name}"
        tried += 1
    assert tried >= 1 or (order == "descending" and "mask" not in kind), "without a mask it is ascending's mirror image"


SHARED: list[dict[str, Any]] = [
    {"mask": "causal", "head_dim": 128},
    {"head_dim": 64, "heads_kv": 2, "seq_kv": 1500},
    {"mask": "window:40,9", "head_dim": 80, "head_dim_v": 56, "dtype": DType.FLOAT16},
    {"mask": "causal", "head_dim": 192, "head_dim_v": 128, "heads_kv": 2},
    {"mask": "causal", "head_dim": 256, "seq_q": 1000},
    {"mask": "causal", "head_dim": 64, "modifiers": Modifiers(softcap=True, sinks=True)},
    {"mask": Mask.blocks(128, 128, 0.5, DOCUMENTS), "head_dim": 128, "heads_kv": 2},
    {**PACKED, "head_dim": 128},
    {**PACKED, "head_dim": 64, "deterministic": True},
    {"mask": "causal", "head_dim": 128, "deterministic": True},
    {"head_dim": 256, "deterministic": True},
]


@pytest.mark.parametrize("kind", SHARED, ids=str)
def test_programs_that_walk_some_heads_of_their_keys_pass_the_gate(kind: dict[str, Any]) -> None:
    """Every seed of such programs; those that add in turn give the same bits again and again, as a race would show."""
    problem = sized(**{"batch": 1, "heads_kv": 1, **kind})
    if present().arch != 90:
        pytest.skip("the template is for Hopper")
    points = search_space.load(hopper_gradients.TEMPLATE)
    chosen = [each for each in points.seeds_for(problem, present()) if points.params_of(each)["WALKED_HEADS"]]
    assert chosen, "few heads of keys have programs that walk few heads"
    for variant in chosen:
        kernel = compiler.load(render.render(problem, variant), CUDA)
        verdict = Gate(problem, CUDA).judge(kernel)
        assert verdict.ok, f"{variant}: {verdict.reason}"
        if points.repeats(variant):
            case = gradient_check.full_case(problem, CUDA, torch.Generator().manual_seed(0))
            first = gradient_check.run(kernel, case)
            for _ in range(250):
                assert gradient_check.unlike(first, gradient_check.run(kernel, case)) == "", str(variant)


@pytest.mark.parametrize("template", [gradient_kernels.TEMPLATE, hopper_gradients.TEMPLATE])
def test_a_large_problem_is_right_at_its_first_and_last_head(template: str) -> None:
    problem = sized(batch=2, heads_q=16, heads_kv=4, seq_q=4096, seq_kv=4096, head_dim=128, mask="causal")
    case = gradient_check.full_case(problem, CUDA, torch.Generator().manual_seed(0))
    variant = search_space.load(template).default(problem, present())
    verdict = gradient_check.judge(compiler.load(render.render(problem, variant), CUDA), [case])
    assert verdict.ok, verdict.reason


EVERY = Modifiers(sinks=True, alibi=True, learned_slopes=True, bias=Bias.LEARNED)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("modifiers", [EVERY, replace(EVERY, dropout=True)], ids=["whole", "dropped"])
def test_the_gradients_of_what_changes_scores_are_right_at_full_size(modifiers: Modifiers, dtype: DType) -> None:
    problem = sized(
        batch=2, heads_q=16, heads_kv=4, seq_q=4096, seq_kv=4096, mask="causal", modifiers=modifiers, dtype=dtype
    )
    case = gradient_check.full_case(problem, CUDA, torch.Generator().manual_seed(0))
    assert set(case.allowed) == {"query", "key", "value", "sinks", "slopes", "bias"}
    variant = search_space.load(gradient_kernels.TEMPLATE).default(problem, present())
    verdict = gradient_check.judge(compiler.load(render.render(problem, variant), CUDA), [case])
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("push", ["random", "negated", "sum"])
def test_autograd_runs_both_passes_by_kernels(tuned: Any, layout: str, push: str) -> None:
    shapes = [(2, 8, 300, 64), (2, 2, 420, 64), (2, 2, 420, 64)]
    shapes = [(b, s, h, d) for b, h, s, d in shapes] if layout == "bshd" else shapes
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device=CUDA, requires_grad=True) for shape in shapes]
    tuned(*tensors, causal=True, layout=layout)
    explanation = autoattn.explain(*tensors, causal=True, layout=layout)
    assert explanation.route == "kernel"
    assert explanation.steps[-1].startswith("gradients: ")
    output = autoattn.attention(*tensors, causal=True, layout=layout)
    assert isinstance(output, torch.Tensor)
    weight = torch.ones((), device=CUDA, dtype=output.dtype) if push == "sum" else torch.randn_like(output)
    weight = torch._neg_view(weight) if push == "negated" else weight  # as gradients of conjugates are
    gradients = torch.autograd.grad(output, tensors, weight.expand_as(output))
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    three = [leaf.transpose(1, 2) if layout == "bshd" else leaf for leaf in leaves]
    seen = torch.ones(300, 420, dtype=torch.bool, device=CUDA).tril(120)
    exact = torch.nn.functional.scaled_dot_product_attention(*three, attn_mask=seen, enable_gqa=True)
    exact = exact.transpose(1, 2) if layout == "bshd" else exact
    expected = torch.autograd.grad(exact, leaves, weight.double().expand_as(exact))
    for ours, theirs in zip(gradients, expected, strict=True):
        assert float((ours.double() - theirs).abs().max()) < 0.02 * float(theirs.abs().max()) + 0.02


def test_documents_are_differentiated_by_kernels(tuned: Any) -> None:
    """A FlexAttention mask, with a table for each sequence."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2, (2, 600), generator=generator).cumsum(1).div(40, rounding_mode="floor").int().to(CUDA)
    mask = masks.document(ids, causal=True, block_size=64)
    tensors = [torch.randn(2, 4, 600, 64, dtype=torch.bfloat16, device=CUDA, requires_grad=True) for _ in range(3)]
    tuned(*tensors, mask=mask)
    assert autoattn.explain(*tensors, mask=mask).steps[-1].startswith("gradients: ")
    gradients = torch.autograd.grad(autoattn.attention(*tensors, mask=mask).float().square().sum(), tensors)
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    seen = (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(600, 600, device=CUDA).tril().bool()
    exact = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=seen)
    for ours, theirs in zip(gradients, torch.autograd.grad(exact.square().sum(), leaves), strict=True):
        assert float((ours.double() - theirs).abs().max()) < 0.02 * float(theirs.abs().max()) + 0.02


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(8, 300, 420), (2, 1, 300, 420), (420,), (1, 300, 1)])
def test_a_learned_bias_is_differentiated_by_kernels(tuned: Any, shape: tuple[int, ...], compiled: bool) -> None:
    shapes = [(2, 8, 300, 64), (2, 2, 420, 64), (2, 2, 420, 64)]
    tensors = [torch.randn(each, dtype=torch.bfloat16, device=CUDA, requires_grad=True) for each in shapes]
    bias = torch.randn(shape, device=CUDA, requires_grad=True)
    sinks = torch.randn(8, device=CUDA, requires_grad=True)  # with which even a bias that all keys share has a gradient
    tuned(*tensors, causal=True, bias=bias, sinks=sinks)
    assert autoattn.explain(*tensors, causal=True, bias=bias, sinks=sinks).steps[-1].startswith("gradients: ")
    attend = torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True) if compiled else autoattn.attention
    output = attend(*tensors, causal=True, bias=bias, sinks=sinks)
    inputs = [*tensors, bias, sinks]
    gradients = torch.autograd.grad(output.float().square().sum(), inputs)
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    key, value = (leaf.repeat_interleave(4, 1) for leaf in leaves[1:3])
    hidden = ~torch.ones(300, 420, dtype=torch.bool, device=CUDA).tril(120)
    scores = (leaves[0] @ key.mT / 8 + leaves[3]).masked_fill(hidden, -torch.inf)
    scores = torch.cat((scores, leaves[4][None, :, None, None].expand(2, 8, 300, 1)), -1)
    exact = scores.softmax(-1)[..., :-1] @ value
    for ours, theirs in zip(gradients, torch.autograd.grad(exact.square().sum(), leaves), strict=True):
        assert ours.shape == theirs.shape
        assert float((ours.double() - theirs).abs().max()) < 0.02 * float(theirs.abs().max()) + 0.02


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_learned_slopes_are_differentiated_by_kernels(tuned: Any, shape: tuple[int, ...], compiled: bool) -> None:
    shapes = [(2, 8, 300, 64), (2, 2, 420, 64), (2, 2, 420, 64)]
    tensors = [torch.randn(each, dtype=torch.bfloat16, device=CUDA, requires_grad=True) for each in shapes]
    slopes = (torch.rand(shape, device=CUDA) / 16).requires_grad_()
    tuned(*tensors, causal=True, alibi_slopes=slopes)
    assert autoattn.explain(*tensors, causal=True, alibi_slopes=slopes).steps[-1].startswith("gradients: ")
    attend = torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True) if compiled else autoattn.attention
    inputs = [*tensors, slopes]
    gradients, again = (
        torch.autograd.grad(attend(*tensors, causal=True, alibi_slopes=slopes).float().square().sum(), inputs)
        for _ in range(2)
    )
    assert all(torch.equal(left, right) for left, right in zip(gradients, again, strict=True))
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    key, value = (leaf.repeat_interleave(4, 1) for leaf in leaves[1:3])
    distance = torch.arange(300, device=CUDA)[:, None] + 120 - torch.arange(420, device=CUDA)
    scores = leaves[0] @ key.mT / 8 - leaves[3][..., None, None] * distance
    exact = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ value
    for ours, theirs in zip(gradients, torch.autograd.grad(exact.square().sum(), leaves), strict=True):
        assert ours.shape == theirs.shape
        assert float((ours.double() - theirs).abs().max()) < 0.02 * float(theirs.abs().max()) + 0.02


@pytest.mark.parametrize("seen", ["causal", "table"])
def test_a_training_step_fits_into_a_cuda_graph(tuned: Any, seen: str) -> None:
    tensors = [torch.randn(1, 4, 256, 64, dtype=torch.bfloat16, device=CUDA, requires_grad=True) for _ in range(3)]
    given: dict[str, Any] = {"causal": True}
    if seen == "table":
        given = {"mask": masks.from_mod(lambda b, h, q, k: q >= k, seq_q=256, seq_kv=256, device=CUDA, block_size=64)}
    tuned(*tensors, **given)

    def step() -> tuple[torch.Tensor, ...]:
        output = autoattn.attention(*tensors, **given)
        assert isinstance(output, torch.Tensor)
        return torch.autograd.grad(output, tensors, torch.ones_like(output))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        before = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(left, right) for left, right in zip(before, captured, strict=True))
