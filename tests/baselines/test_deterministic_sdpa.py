"""Gradients that must repeat to the bit: which kernels and entries may give them, and what PyTorch is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gradient_kernels
import pytest
import samples
import torch
import triton
from computed_launches import attend, card, enter, inputs  # noqa: F401 - the first two are fixtures
from torch import Tensor

import autoattn
from autoattn import functional, torch_private
from autoattn.baselines import deterministic_sdpa, pytorch_sdpa
from autoattn.cache import store
from autoattn.codegen import search_space
from autoattn.codegen.space_facts import facts_of
from autoattn.codegen.space_rules import Rule
from autoattn.core import kernel_kind
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Op
from autoattn.errors import ProblemError, TensorError
from autoattn.runtime import call_cache, call_keys
from autoattn.runtime.parse import arguments
from autoattn.runtime.plan import cache_lookup, gradient_problem, planner
from autoattn.runtime.plan.explanations import Explanation, Level

FORWARD = samples.problem()
LOOSE = gradient_problem.backward_of(FORWARD)
STRICT = gradient_problem.backward_of(FORWARD, deterministic=True)
NEAR = replace(LOOSE, seq_q=2048)
TEMPLATE = gradient_kernels.TEMPLATE


# --- the problem ------------------------------------------------------------------------------------------------------


def test_it_is_a_fact_of_gradients_that_names_show_only_where_it_holds() -> None:
    assert STRICT.key == f"{LOOSE.key}_deterministic"
    assert str(STRICT) == f"{LOOSE} deterministic"
    assert "deterministic" not in LOOSE.key
    assert kernel_kind.shares_kernels(STRICT, LOOSE)
    with pytest.raises(ProblemError, match="deterministic is a choice for the operation backward alone, got forward"):
        replace(FORWARD, deterministic=True)


def test_entries_from_before_hold_and_say_nothing_of_it(tmp_path: Path) -> None:
    entries = [measured(LOOSE), measured(STRICT)]
    path = store.merge(tmp_path, samples.H200, Op.BACKWARD, entries)
    assert path.read_text().count("deterministic") == 2  # the second one's: its key and its fact
    assert {key: entry.problem for key, entry in store.read(path).entries.items()} == {
        LOOSE.key: LOOSE,
        STRICT.key: STRICT,
    }


@pytest.fixture
def atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward template, as if its sums came in any order."""
    load, points = search_space.load, replace(search_space.load(TEMPLATE), deterministic=Rule("0"))
    monkeypatch.setattr(search_space, "load", lambda template: points if template == TEMPLATE else load(template))


def test_rules_know_it_and_a_template_of_atomic_sums_has_no_variant_for_it(atomic: None) -> None:
    points = search_space.load(TEMPLATE)
    assert [facts_of(problem, samples.H200)["deterministic"] for problem in (LOOSE, STRICT)] == [0, 1]
    first = next(points.feasible(LOOSE, samples.H200))
    assert points.why_infeasible(first, LOOSE, samples.H200) is None
    reason = points.why_infeasible(first, STRICT, samples.H200)
    assert reason is not None
    assert reason.startswith("such kernels of triton/backward do not repeat themselves to the bit, and the problem is")
    assert list(points.feasible(STRICT, samples.H200)) == points.seeds_for(STRICT, samples.H200) == []


# --- dispatch ---------------------------------------------------------------------------------------------------------


def measured(problem: Any, **changes: Any) -> CacheEntry:
    return samples.tuned(problem, gradient_kernels.variant(), versions={"triton": triton.__version__}, **changes)


def explanation_of(folder: Path, problem: Any, *entries: CacheEntry) -> Explanation:
    store.merge(folder, samples.H200, Op.BACKWARD, entries)
    return cache_lookup.explain(problem, samples.H200, folder)


def test_an_entry_of_its_own_comes_first(tmp_path: Path) -> None:
    other = gradient_kernels.variant(QUERIES_BLOCK_M=32).as_dict()
    explanation = explanation_of(tmp_path, STRICT, measured(LOOSE), measured(STRICT, params=other))
    assert (explanation.level, explanation.route, explanation.steps) == (Level.EXACT, "kernel", ())
    assert explanation.variant is not None
    assert explanation.variant["QUERIES_BLOCK_M"] == 32


def test_what_was_tuned_for_any_gradients_serves_where_its_kernel_repeats_itself(tmp_path: Path) -> None:
    explanation = explanation_of(tmp_path, STRICT, measured(LOOSE))
    assert (explanation.level, explanation.route) == (Level.EXACT, "kernel")
    assert explanation.entry is not None
    assert explanation.entry.problem == LOOSE


def test_and_not_where_its_sums_are_atomic(tmp_path: Path, atomic: None) -> None:
    explanation = explanation_of(tmp_path, STRICT, measured(LOOSE, rivals=()))
    assert (explanation.level, explanation.route) == (Level.DEFAULT, "kernel")
    assert explanation.variant is not None
    assert explanation.variant.template != "triton/backward"
    assert "do not repeat themselves to the bit" in explanation.steps[0]
    assert explanation_of(tmp_path, LOOSE).level is Level.EXACT


def test_cudnns_time_is_none_of_gradients_that_repeat_so_that_the_best_of_the_others_serves(tmp_path: Path) -> None:
    """Of its own gradients the kernel takes 400 us, cuDNN 364 and FlashAttention, which would not get faster, 568."""
    explanation = explanation_of(tmp_path, STRICT, measured(LOOSE, choice="sdpa-cudnn"))
    assert (explanation.level, explanation.route) == (Level.EXACT, "kernel")
    assert explanation.reason.endswith("its kernel of triton/backward was the fastest beside it")
    slow = measured(LOOSE, choice="sdpa-cudnn")
    slow = replace(slow, measurement=samples.measurement(LOOSE, 700.0))
    assert explanation_of(tmp_path, STRICT, slow).route == "sdpa-flash"
    assert explanation_of(tmp_path, LOOSE).route == "sdpa-cudnn"


def test_neighbours_of_its_kind_come_before_nearer_ones_of_the_other(tmp_path: Path) -> None:
    near, loose = (
        replace(problem, heads_kv=problem.heads_q) for problem in (NEAR, LOOSE)
    )  # others need near neighbours
    strict = replace(near, deterministic=True)
    explanation = explanation_of(
        tmp_path, replace(loose, seq_q=1000, deterministic=True), measured(loose), measured(strict)
    )
    assert explanation.entry is not None
    assert explanation.entry.problem == strict
    explanation = explanation_of(tmp_path, replace(loose, seq_q=1000))
    assert explanation.entry is not None
    assert explanation.entry.problem == loose


def test_any_gradients_take_an_entry_of_deterministic_ones_where_there_is_no_other(tmp_path: Path) -> None:
    explanation = explanation_of(tmp_path, LOOSE, measured(STRICT))
    assert (explanation.level, explanation.route) == (Level.BUCKET, "kernel")
    assert "0.0 octaves away" in explanation.reason


def test_and_one_of_programs_that_take_turns(tmp_path: Path) -> None:
    loose, strict = (replace(problem, dtype=DType.BFLOAT16, modifiers=Modifiers()) for problem in (LOOSE, STRICT))
    points = search_space.load("gluon/backward")
    chosen = points.default(strict, samples.H200)
    assert chosen["order"] != "any"
    entry = measured(strict, template=chosen.template, params=chosen.as_dict())
    explanation = explanation_of(tmp_path, loose, entry)
    assert (explanation.level, explanation.route, explanation.variant) == (Level.BUCKET, "kernel", chosen)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """What PyTorch's attention found switched on in its two passes, in their order."""
    seen: list[tuple[str, bool]] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: Tensor) -> Tensor:
            seen.append(("forward", torch.are_deterministic_algorithms_enabled()))
            return output.clone()

        @staticmethod
        def backward(ctx: Any, push: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(("backward", torch.are_deterministic_algorithms_enabled()))
            return push

    def watched(*tensors: Tensor, **given: Any) -> Any:
        return Watched.apply(attention(*tensors, **given))

    monkeypatch.setattr(torch_private, "sdpa", watched)
    functional.forget()
    yield seen
    functional.forget()
    assert not torch.are_deterministic_algorithms_enabled()


def learnt(call: Callable[..., Any], tensors: list[Tensor], **given: Any) -> tuple[Tensor, ...]:
    output = call(*tensors, **given)
    return (output, *torch.autograd.grad(output.float().square().sum(), tensors))


def test_pytorch_is_switched_in_both_passes_and_for_no_longer(switch: list[tuple[str, bool]]) -> None:
    tensors = inputs(dtype=torch.float32)
    plain = learnt(autoattn.attention, tensors)
    assert switch == [("forward", False), ("backward", False)]
    runs = [learnt(autoattn.attention, tensors, deterministic=True) for _ in range(2)]  # the second could be prepared
    assert switch[2:] == [("forward", True), ("backward", True)] * 2
    for run in runs:
        for ours, theirs in zip(run, plain, strict=True):
            torch.testing.assert_close(ours, theirs)
    learnt(autoattn.Attention(deterministic=True), tensors)
    assert switch[-2:] == [("forward", True), ("backward", True)]


def test_pytorchs_own_switch_says_so_for_all_calls(
    switch: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs(dtype=torch.float32)
    switched: list[bool] = []
    monkeypatch.setattr(torch_private, "set_deterministic_algorithms", lambda on, **_: switched.append(on))
    torch.use_deterministic_algorithms(True)
    try:
        assert arguments.read(*tensors).deterministic
        assert not switched, "it is on already"
        learnt(autoattn.attention, tensors)
        assert call_cache.find(key_of(tensors)) is not None  # PyTorch switches itself
    finally:
        torch.use_deterministic_algorithms(False)
    assert not arguments.read(*tensors).deterministic
    assert call_cache.find(key_of(tensors)) is None
    assert switch == [("forward", True), ("backward", True)]


def key_of(tensors: list[Tensor]) -> Any:
    return call_keys.of(*tensors, (), (False, 0.0, 0.0, None, "bhsd", False, False), None)  # type: ignore[call-arg]


def test_calls_that_nobody_differentiates_are_left_alone(switch: list[tuple[str, bool]]) -> None:
    tensors = [tensor.detach() for tensor in inputs(dtype=torch.float32)]
    autoattn.attention(*tensors, deterministic=True)
    assert switch == [("forward", False)]


def test_the_formula_is_switched_too_and_gives_the_lse_its_gradient() -> None:
    tensors = inputs(dtype=torch.float32)
    pushes = torch.randn(2, 4, 33), torch.randn(2, 4, 33, 24)
    both = []
    for deterministic in (False, True):
        output, lse = autoattn.attention(*tensors, softcap=3.0, return_lse=True, deterministic=deterministic)
        both.append(torch.autograd.grad((lse, output), tensors, pushes))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_saved_is_freed_unless_the_graph_is_kept(switch: list[tuple[str, bool]]) -> None:
    tensors = inputs(dtype=torch.float32)
    loss = autoattn.attention(*tensors, deterministic=True).sum()
    loss.backward(retain_graph=True)
    first = tensors[0].grad.clone()
    loss.backward()
    torch.testing.assert_close(tensors[0].grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_switches_of_several_threads_end_with_the_last() -> None:
    first, second = deterministic_sdpa.switched_on(), deterministic_sdpa.switched_on()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.are_deterministic_algorithms_enabled()
    second.__exit__(None, None, None)
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with deterministic_sdpa.switched_on():
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)


def test_explain_tells_of_it() -> None:
    explanation = autoattn.explain(*inputs(), deterministic=True)
    assert explanation.steps[-1] == "deterministic: both passes run with torch.use_deterministic_algorithms(True)"
    assert explanation.steps[-1] not in autoattn.explain(*inputs()).steps


@pytest.mark.parametrize("given", [1, None, "yes"])
def test_it_is_true_or_false(given: Any) -> None:
    with pytest.raises(TensorError, match="deterministic must be True or False, got"):
        autoattn.attention(*inputs(), deterministic=given)


def test_torch_func_is_told_the_way_out() -> None:
    tensors = inputs(dtype=torch.float32)

    def loss(query: Tensor) -> Tensor:
        return autoattn.attention(query, *tensors[1:], deterministic=True).sum()

    with pytest.raises(TensorError, match=r"call torch.use_deterministic_algorithms\(True\) around both passes"):
        torch.func.grad(loss)(tensors[0].detach())


def test_a_compiled_step_is_the_operator_which_switches_when_it_runs(switch: list[tuple[str, bool]]) -> None:
    torch._dynamo.reset()
    tensors = inputs(dtype=torch.float32)
    plain = learnt(autoattn.attention, tensors)
    compiled = torch.compile(partial(autoattn.attention, deterministic=True), backend="aot_eager", fullgraph=True)
    del switch[:]
    for ours, theirs in zip(learnt(compiled, tensors), plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert switch[-2:] == [("forward", True), ("backward", True)]  # computed again, to differentiate that


# --- calls on a card --------------------------------------------------------------------------------------------------


def test_a_deterministic_call_asks_for_kernels_of_a_deterministic_problem(
    card: dict[str, Any], attend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    tensors = inputs()
    with torch.no_grad():
        problem = autoattn.explain(*tensors).problem
    assert problem is not None
    enter(card, problem)
    deterministic: list[bool] = []
    explain = cache_lookup.explain
    monkeypatch.setattr(
        cache_lookup,
        "explain",
        lambda requested, *facts: (deterministic.append(requested.deterministic), explain(requested, *facts))[1],
    )
    learnt(attend, tensors, deterministic=True)
    assert True in deterministic
    assert card["backward"] == 1


def test_where_sums_are_atomic_pytorch_serves_it_alone(
    card: dict[str, Any], atomic: None, switch: list[tuple[str, bool]]
) -> None:  # fmt: skip
    tensors = inputs(dtype=torch.float32)
    with torch.no_grad():
        problem = autoattn.explain(*tensors).problem
    assert problem is not None
    enter(card, problem)
    learnt(autoattn.attention, tensors)
    assert (card["backward"], switch) == (1, [])
    learnt(autoattn.attention, tensors, deterministic=True)
    assert (card["backward"], switch) == (1, [("forward", True), ("backward", True)])
    planned = planner.plan(arguments.read(*tensors, deterministic=True), lse=False)
    assert planned.repeats
    assert planned.kernel is None


def test_rivals_of_a_deterministic_problem_are_timed_with_the_switch(switch: list[tuple[str, bool]]) -> None:
    problem = gradient_kernels.problem(dtype=DType.FLOAT32, deterministic=True)
    operands = autoattn.reference.inputs.make(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    calls = pytorch_sdpa.gradient_calls(problem, operands, torch.ones(2, 4, 33, 16))
    del switch[:]
    calls["sdpa"]()
    assert switch == [("backward", True)]
