"""The gate on a card, for every axis of a problem: what the interpreter computes otherwise or not at all."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import drawn
import kernels
import pytest
import torch

from autoattn.codegen import render, search_space
from autoattn.core.device import Device
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.variant import Value, Variant
from autoattn.errors import CompileError
from autoattn.hardware import nvidia
from autoattn.kernels import compiler
from autoattn.reference.inputs import Scores
from autoattn.validation.output_check import Gate

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HOPPER = "gluon/forward"


def judged(problem: Problem, *, seed: int | None = None, template: str = kernels.TEMPLATE) -> Any:
    """The gate's verdict on the template's default for this kind of problem, or on a random feasible variant."""
    device = nvidia.present()
    assert device is not None
    points = search_space.load(template)
    rng = random.Random(seed)
    variant = points.default(problem, device) if seed is None else next(points.feasible(problem, device, rng))
    source = render.render(problem, variant, render.natural_traits(problem, lse=True))
    return Gate(problem, CUDA).judge(compiler.load(source, CUDA))


def sized(**changes: Any) -> Problem:
    facts: dict[str, Any] = {"dtype": DType.BFLOAT16, "seq_q": 512, "seq_kv": 512, "head_dim": 64, **changes}
    if facts.get("layout") is Layout.PACKED:
        facts |= {"tokens_q": 1024, "tokens_kv": 1024}
    return kernels.problem(**facts)


@pytest.fixture(autouse=True)
def only_numbers_that_the_card_has(request: pytest.FixtureRequest) -> None:
    point = request.node.callspec.params.get("numbers") if hasattr(request.node, "callspec") else None
    device = nvidia.present()
    if point is not None and point[0] is DType.FLOAT8 and device is not None and device.arch < 89:
        pytest.skip("float8 needs compute capability 8.9")


MASKS = (
    "full", "causal", "causal:top-left", "window:128,0", "window:128,-1", "window:-1,64", "window:128,64",
    "blocks:64x64,0.5", "packed full", "packed causal", "packed window:64,0",
)  # fmt: skip


def masked(words: str) -> dict[str, Any]:
    return {"mask": words.removeprefix("packed "), **({"layout": Layout.PACKED} if words.startswith("packed") else {})}


@pytest.mark.parametrize("numbers", kernels.NUMBERS, ids=lambda numbers: "-".join(part.value for part in numbers))
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_in_every_precision_passes(mask: str, numbers: tuple[DType, Precision]) -> None:
    verdict = judged(sized(dtype=numbers[0], precision=numbers[1], **masked(mask)))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    "dims", [(8, 8), (24, 24), (57, 57), (80, 80), (96, 96), (192, 128), (64, 256), (256, 256), (128, 512), (72, 40)]
)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_head_dims_of_their_own_pass(dims: tuple[int, int], dtype: DType) -> None:
    verdict = judged(sized(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], mask="causal"))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("softmax", ["online", "lazy", "first_max"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_way_to_add_up_the_parts_of_a_tile_passes(mask: str, softmax: str) -> None:
    problem = sized(seq_q=3, seq_kv=1024, heads_q=8, heads_kv=2, **masked(mask))
    small: dict[str, Any] = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3, "softmax": softmax}
    for parts_read, shared, together in (("by_rows", 64, 1), ("by_rows", 8, 0), ("by_groups", 64, 1)):
        if (together and problem.mask.sparse) or (parts_read == "by_groups" and softmax == "first_max"):
            continue
        traits = render.natural_traits(problem, lse=True)
        source = kernels.source(problem, traits, SPLITS=shared, PACK_GQA=together, parts_read=parts_read, **small)
        verdict = Gate(problem, CUDA).judge(compiler.load(source, CUDA))
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("softmax", ["online", "lazy", "first_max"])
@pytest.mark.parametrize("mask", MASKS)
def test_programs_that_share_tiles_and_heads_that_share_rows_pass(mask: str, softmax: str) -> None:
    problem = sized(seq_q=200, seq_kv=1024, heads_q=8, heads_kv=2, **masked(mask))
    small: dict[str, Any] = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 2, "num_stages": 2, "softmax": softmax}
    for shared, together in ((4, 0), (16, 1), (1, 1)):
        if together and problem.mask.sparse:
            continue
        source = kernels.source(
            problem, render.natural_traits(problem, lse=True), SPLITS=shared, PACK_GQA=together, **small
        )
        verdict = Gate(problem, CUDA).judge(compiler.load(source, CUDA))
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("modifiers", kernels.MODIFIERS[1:], ids=lambda modifiers: "-".join(modifiers.names))
@pytest.mark.parametrize("mask", ["full", "causal", "window:128,0"])
def test_every_modifier_passes(modifiers: Modifiers, mask: str) -> None:
    verdict = judged(sized(modifiers=modifiers, mask=mask))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("seed", range(12))
def test_random_variants_of_random_kinds_pass_or_are_refused_by_the_compiler(seed: int) -> None:
    rng = random.Random(seed)
    try:
        verdict = judged(drawn.call_of(rng, drawn.LARGE).problem, seed=seed)
    except CompileError:  # an outcome of a trial; test_templates_compile knows what must compile
        return
    assert verdict.ok, verdict.reason


HOPPER_MASKS = (
    "full", "causal", "causal:top-left", "window:128,0", "window:100,30", "window:-1,64", "window:128,-1",
    "packed full", "packed causal", "packed window:100,0",
    "blocks:128x128,0.5", "blocks:64x32,0.1",
)  # fmt: skip
HOPPER_DIMS = ((64, 64), (128, 128), (256, 256), (56, 56), (80, 80), (96, 96), (16, 16), (192, 128), (64, 128))
PIECED_DIMS = ((72, 72), (80, 80), (96, 96), (160, 160), (192, 192), (192, 128), (64, 96))  # each in one piece or two

HOPPER_KINDS = (
    *itertools.product([DType.BFLOAT16], HOPPER_MASKS, HOPPER_DIMS),
    *itertools.product([DType.FLOAT16], ("blocks:128x128,0.5", "blocks:64x64,0.3"), PIECED_DIMS),
    *itertools.product([DType.FLOAT8], HOPPER_MASKS[:7:2], [dims for dims in HOPPER_DIMS if 56 not in dims]),
)


@pytest.mark.parametrize(("dtype", "mask", "dims"), HOPPER_KINDS)
def test_every_hopper_seed_passes(dtype: DType, mask: str, dims: tuple[int, int]) -> None:
    problem = sized(dtype=dtype, **masked(mask), head_dim=dims[0], head_dim_v=dims[1], batch=2, heads_q=64, heads_kv=64)
    device = hopper()
    seeds = search_space.load(HOPPER).seeds_for(problem, device)
    assert seeds
    gate = Gate(problem, CUDA)
    for variant in seeds:
        source = render.render(problem, variant, render.natural_traits(problem, lse=True))
        verdict = gate.judge(compiler.load(source, CUDA))
        assert verdict.ok, f"{variant}: {verdict.reason}"


def assert_early_seeds_pass(mask: str, head_dim: int, modifiers: Modifiers) -> None:
    problem = sized(**masked(mask), head_dim=head_dim, head_dim_v=head_dim, heads_q=8, heads_kv=4, modifiers=modifiers)
    seeds = search_space.load(HOPPER).seeds_for(problem, hopper())
    assert seeds
    for variant in seeds[:2]:
        source = render.render(problem, variant, render.natural_traits(problem, lse=True))
        verdict = Gate(problem, CUDA).judge(compiler.load(source, CUDA))
        assert verdict.ok, f"{variant}: {verdict.reason}"


CHANGED = (
    Modifiers(softcap=True),
    Modifiers(alibi=True),
    Modifiers(sinks=True),
    Modifiers(softcap=True, alibi=True, sinks=True),
)


@pytest.mark.parametrize("modifiers", CHANGED, ids=lambda modifiers: "-".join(modifiers.names))
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window:128,0", "packed causal"])
def test_every_hopper_seed_passes_with_changed_scores(mask: str, head_dim: int, modifiers: Modifiers) -> None:
    assert_early_seeds_pass(mask, head_dim, modifiers)


@pytest.mark.parametrize("text", drawn.SCORE_MODS)
@pytest.mark.parametrize(
    ("mask", "head_dim"), [("full", 64), ("window:128,0", 80), ("causal", 128), ("packed causal", 128), ("causal", 256)]
)
def test_every_hopper_seed_passes_with_a_score_mod(mask: str, head_dim: int, text: str) -> None:
    assert_early_seeds_pass(mask, head_dim, Modifiers(score_mod=text))


@pytest.mark.parametrize("seed", range(60))
def test_random_hopper_variants_pass_or_are_refused_by_the_compiler(seed: int) -> None:
    rng = random.Random(seed)
    dtype = rng.choice((DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8))
    head_dim, head_dim_v = rng.choice([dims for dims in HOPPER_DIMS if dtype is not DType.FLOAT8 or 56 not in dims])
    problem = sized(
        dtype=dtype, **masked(rng.choice(HOPPER_MASKS[: 7 if dtype is DType.FLOAT8 else None])), batch=2, heads_q=64,
        heads_kv=64, head_dim=head_dim, head_dim_v=head_dim_v,
    )  # fmt: skip
    variant = next(search_space.load(HOPPER).feasible(problem, hopper(), rng))
    source = render.render(problem, variant, render.natural_traits(problem, lse=rng.random() < 0.5))
    try:
        kernel = compiler.load(source, CUDA)
    except CompileError:
        return
    verdict = Gate(problem, CUDA, seed=seed).judge(kernel)
    assert verdict.ok, f"{variant}: {verdict.reason}"


# A consumer of eight warps has 128 rows, which a smaller block of the mask would not fill.
PAIRED_MASKS = HOPPER_MASKS[:-1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", PAIRED_MASKS)
def test_random_consumers_of_eight_warps_pass_or_are_refused_by_the_compiler(
    mask: str, dims: tuple[int, int], seed: int
) -> None:
    rng = random.Random(f"{mask} {dims} {seed}")
    problem = sized(
        **masked(mask), head_dim=dims[0], head_dim_v=dims[1], seq_q=600, seq_kv=700, heads_q=64, heads_kv=16
    )
    variant = paired(problem, rng)
    source = render.render(problem, variant, render.natural_traits(problem, lse=rng.random() < 0.5))
    try:
        kernel = compiler.load(source, CUDA)
    except CompileError:
        assert variant.as_dict().get("CTAS") == 2, "programs that share an SM may want more registers than they have"
        return
    verdict = Gate(problem, CUDA, seed=seed).judge(kernel)
    assert verdict.ok, f"{variant}: {verdict.reason}"


def paired(problem: Problem, rng: random.Random) -> Variant:
    """A random feasible variant whose consumer has eight warps."""
    space = search_space.load(HOPPER)
    fixed: dict[str, tuple[Value, ...]] = {"WARPGROUPS": (2,), "BLOCK_M": (128,), "ping_pong": ("none",)}
    return next(replace(space, choices=space.choices | fixed).feasible(problem, hopper(), rng))


def hopper() -> Device:
    device = nvidia.present()
    assert device is not None
    if device.arch != 90:
        pytest.skip("the template's instructions are Hopper's")
    return device


def test_dropout_draws_the_references_numbers() -> None:
    """In float32 one wrong decision is far outside of what is allowed."""
    problem = sized(dtype=DType.FLOAT32, modifiers=Modifiers(dropout=True))
    verdict = judged(problem)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("bias", [Bias.KEYS, Bias.BOOLEAN, Bias.ADDITIVE])
def test_wild_values_reach_just_the_rows_that_see_them(bias: Bias) -> None:
    problem = sized(modifiers=Modifiers(bias=bias), mask="causal")
    source = kernels.source(problem, render.natural_traits(problem, lse=True), BLOCK_M=64, BLOCK_N=32, num_warps=4)
    call = drawn.Call(problem=problem, seed=1, scores=Scores.PLAIN, apart=True, wild=0.001)
    assert drawn.fault(compiler.load(source, CUDA), call) == ""
