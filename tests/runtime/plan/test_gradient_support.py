"""Every call that wants gradients and has a forward kernel has a backward one, on each card and with nothing tuned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import samples
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from rarely import diagonal, rarely

from autoattn.codegen import render
from autoattn.core import device_profiles
from autoattn.core.cache_entry import KERNEL
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Op, Precision, Problem
from autoattn.core.variant import Source
from autoattn.kernels import manifest
from autoattn.kernels.compiler import build, load_module
from autoattn.runtime.plan import decision, default_gradients, needed_kernels
from autoattn.runtime.plan.explanations import Explanation, Level
from autoattn.runtime.plan.needed_kernels import Answer

pytestmark = pytest.mark.usefixtures("no_portfolio")  # which variant computes the output is no matter here

CARDS = {name: device_profiles.named(name) for name in ("h200", "h100", "a100", "a30")}
PACKED = {"layout": Layout.PACKED, "tokens_q": 1500, "tokens_kv": 1500}
MOD = "captured0: bfloat16[1]\nx = score * captured0[h]\nwhere(q_idx % 3 == b, x, 4 * tanh(x / 4))"
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": Mask.parse("causal")},
    "causal, more keys": {"mask": Mask.parse("causal"), "seq_kv": 3000},
    "causal top-left": {"mask": Mask.parse("causal:top-left"), "seq_kv": 3000},
    "window": {"mask": Mask.parse("window:127,0")},
    "window ahead": {"mask": Mask.parse("window:40,9")},
    "grouped heads": {"heads_kv": 2},
    "bshd": {"layout": Layout.BSHD, "mask": Mask.parse("causal")},
    "packed": {**PACKED, "mask": Mask.parse("causal")},
    "packed window": {**PACKED, "mask": Mask.parse("window:127,0")},
    "packed softcap": {**PACKED, "modifiers": Modifiers(softcap=True)},
    "packed slopes": {**PACKED, "modifiers": Modifiers(alibi=True, learned_slopes=True)},
    "softcap": {"modifiers": Modifiers(softcap=True)},
    "ALiBi": {"modifiers": Modifiers(alibi=True), "mask": Mask.parse("causal")},
    "learned slopes": {"modifiers": Modifiers(alibi=True, learned_slopes=True)},
    "sinks": {"modifiers": Modifiers(sinks=True), "mask": Mask.parse("window:127,0")},
    "score_mod": {"modifiers": Modifiers(score_mod=MOD)},
    "dropout": {"modifiers": Modifiers(dropout=True), "mask": Mask.parse("causal")},
    "key padding": {"modifiers": Modifiers(bias=Bias.KEYS)},
    "boolean mask": {"modifiers": Modifiers(bias=Bias.BOOLEAN)},
    "bias": {"modifiers": Modifiers(bias=Bias.ADDITIVE), "mask": Mask.parse("causal")},
    "learned bias": {"modifiers": Modifiers(bias=Bias.LEARNED)},
    "block table": {"mask": Mask.blocks(128, 128, 0.4)},
    "small blocks": {"mask": Mask.blocks(16, 16, 0.4, "q_idx >= kv_idx")},
    "deterministic": {"deterministic": True, "mask": Mask.parse("causal")},
    "deterministic window": {"deterministic": True, "mask": Mask.parse("window:127,0")},
    "all at once": {
        "modifiers": Modifiers(
            score_mod=MOD, softcap=True, alibi=True, learned_slopes=True, bias=Bias.LEARNED, sinks=True, dropout=True
        ),
        "mask": Mask.parse("window:127,5"),
        "deterministic": True,
    },
    "one query": {"seq_q": 1},
    "short": {"seq_q": 7, "seq_kv": 5},
}
NUMBERS = (
    (DType.FLOAT16, Precision.IEEE),
    (DType.BFLOAT16, Precision.IEEE),
    *((DType.FLOAT32, precision) for precision in Precision),
)
HEAD_DIMS = (1, 3, 8, 16, 33, 57, 64, 80, 96, 111, 128, 160, 192, 255, 256)
VALUE_DIMS = ((16, 512), (64, 128), (128, 64), (192, 128), (256, 512), (256, 1), (1, 511))
USUAL = (64, 64), (128, 128), (256, 512), (57, 57)


def backward(kind: str, number: tuple[DType, Precision], dims: tuple[int, int]) -> Problem:
    facts = {"batch": 2, "heads_q": 6, "heads_kv": 6, "seq_q": 1000, "seq_kv": 1000, "op": Op.BACKWARD}
    dtype, precision = number
    facts |= {"dtype": dtype, "precision": precision, "head_dim": dims[0], "head_dim_v": dims[1], **KINDS[kind]}
    problem = Problem(**facts)  # type: ignore[arg-type]
    return with_exact_products(problem)


def with_exact_products(problem: Problem) -> Problem:
    """The gradients as a call asks for them: those of tf32x3 products are formed of exact ones."""
    precise = problem.precision is Precision.TF32X3
    return replace(problem, precision=Precision.IEEE) if precise else problem


Case = tuple[str, tuple[DType, Precision], tuple[int, int]]


def matrix() -> Iterator[Case]:
    for kind in KINDS:
        for number in NUMBERS:
            for dims in (*((head_dim, head_dim) for head_dim in HEAD_DIMS), *VALUE_DIMS):
                if dims in USUAL or kind in ("full", "window", "all at once"):
                    yield kind, number, dims


def part_of_matrix() -> Iterator[Case]:
    """Every seventh case: each kind, type of numbers and pair of head dims is there several times."""
    return islice(matrix(), 0, None, 7)


def check(problem: Problem, card: Device, folder: Path, *, lse: bool) -> Explanation:
    """That a training call has kernels in both passes, or PyTorch's fused ones by the estimate that names itself."""
    output = replace(problem, op=Op.FORWARD, deterministic=False)
    explanation = decision.explain(problem, card, folder, lse=lse, training=True)
    assert decision.of_output(output, card, folder, lse=True).route == KERNEL
    if explanation.route == KERNEL:
        assert explanation.levels == "forward: default, backward: default"
        return explanation
    assert explanation.steps[-1].startswith(f"{default_gradients.RULE}: "), (problem, explanation)
    assert (explanation.route, explanation.level) == ("sdpa", Level.SDPA)
    assert "believed faster" in explanation.reason
    modifiers = problem.modifiers
    assert not any((lse, problem.deterministic, modifiers.names, problem.packed)), problem
    assert (problem.dtype is DType.FLOAT32, problem.head_dim_v) == (False, problem.head_dim), problem
    square = problem.mask.causal and problem.seq_q == problem.seq_kv
    assert square or problem.mask == Mask(), problem
    return explanation


def test_a_call_with_a_forward_kernel_has_a_backward_one_with_nothing_tuned(tmp_path: Path) -> None:
    for kind, number, dims in part_of_matrix():
        assert check(backward(kind, number, dims), CARDS["h200"], tmp_path, lse=True).route == KERNEL


def test_the_part_of_the_matrix_has_all_that_the_matrix_has() -> None:
    whole, part = (list(zip(*cases, strict=True)) for cases in (matrix(), part_of_matrix()))
    assert [set(values) for values in part] == [set(values) for values in whole]


@pytest.mark.exhaustive
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", CARDS)
def test_each_call_with_a_forward_kernel_has_a_backward_one_on_each_card(name: str, lse: bool, tmp_path: Path) -> None:
    problems = [backward(*case) for case in matrix()]
    by_pytorch = [problem for problem in problems if check(problem, CARDS[name], tmp_path, lse=lse).route != KERNEL]
    assert bool(by_pytorch) is (name in ("a100", "a30") and not lse), "Hopper has defaults that are no slower"


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache without entries; one for all examples."""
    return tmp_path_factory.mktemp("empty")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CARDS)), strategies.problems(tiny=False), st.booleans())
def test_whatever_a_kernel_computes_it_differentiates(
    empty_folder: Path, name: str, problem: Problem, lse: bool
) -> None:
    if problem.dtype is not DType.FLOAT8:  # of which there are no gradients
        check(with_exact_products(replace(problem, op=Op.BACKWARD)), CARDS[name], empty_folder, lse=lse)


def source_of(problem: Problem, card: Device, folder: Path) -> Source:
    """The first kernel that a call of the gradients tries."""
    needs = {need.answer: need for need in needed_kernels.of_call(problem, card, folder)}
    return next(needs[Answer.GRADIENTS].sources(card))


@pytest.mark.parametrize(
    ("kind", "name"),
    diagonal([kind for kind in KINDS if kind not in ("full", "causal", "grouped heads", "bshd")], ("h200", "a30")),
)
def test_the_first_choice_renders_for_tensors_however_they_lie(name: str, kind: str, tmp_path: Path) -> None:
    for number, dims in ((NUMBERS[2], (57, 57)), (NUMBERS[0], (192, 512))):
        problem = backward(kind, number, dims)
        if decision.explain(problem, CARDS[name], tmp_path, training=True).route != KERNEL:
            continue
        assert "def backward" in source_of(problem, CARDS[name], tmp_path).text
        gradients = decision.of_gradients(problem, CARDS[name], tmp_path, lse=True)
        odd = replace(render.natural_traits(problem, lse=True), alignment=1, wide=True)
        rendered = [
            variant
            for variant in islice(needed_kernels.cache_lookup.variants(gradients, CARDS[name]), 200)
            if render.why_not(variant, problem, odd) is None
        ]
        assert rendered, "tensors that no TMA unit reads have a kernel as well"


COMPILED = [
    (90, "softcap", NUMBERS[0], (128, 128)),
    (80, "window", NUMBERS[1], (64, 64)),
    (80, "packed", NUMBERS[1], (128, 128)),
    (90, "packed", NUMBERS[1], (128, 128)),
    (80, "bias", NUMBERS[2], (64, 64)),
    (80, "sinks", NUMBERS[0], (256, 512)),
    (90, "window", NUMBERS[1], (128, 128)),
    (90, "all at once", NUMBERS[0], (57, 57)),
    (90, "dropout", NUMBERS[2], (128, 128)),
    (80, "learned bias", NUMBERS[0], (128, 128)),
    (90, "small blocks", NUMBERS[1], (192, 128)),
    (80, "score_mod", NUMBERS[1], (256, 256)),
    (90, "deterministic", NUMBERS[0], (64, 64)),
    (90, "causal, more keys", NUMBERS[0], (33, 33)),
]


@pytest.mark.parametrize(("arch", "kind", "number", "dims"), rarely(COMPILED, lambda case: case in COMPILED[:3]))
def test_the_first_choice_compiles(
    arch: int, kind: str, number: tuple[DType, Precision], dims: tuple[int, int], tmp_path: Path
) -> None:
    card = {80: samples.A30, 90: samples.H200}[arch]
    source = source_of(backward(kind, number, dims), card, tmp_path)
    for name in manifest.of(load_module(source)).parts:
        assert f".target sm_{arch}" in build(source, arch, name).asm["ptx"]
