"""Side by side with gradients: whose backward passes run, on what, and how they are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_device
import gradient_kernels
import kernels
import pytest
import samples
import torch
from fake_device import Timer
from planted_bench import CPU, benched, named, planted, raising, timer  # noqa: F401 - a fixture
from torch import Tensor

from autoattn.baselines import external, pytorch_sdpa
from autoattn.bench import entrants, kernel_bench
from autoattn.bench.kernel_results import Inputs, Options, Ours, Row, State, Timing
from autoattn.cache import store
from autoattn.codegen import render, resources, search_space
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import Layout, Op, Problem
from autoattn.core.variant import Source
from autoattn.kernels import backward, compiler
from autoattn.reference import attention_formula
from autoattn.runtime.plan import cache_lookup, planner
from autoattn.tensors.operands import Gradients, Operands, Saved
from autoattn.validation import gradient_check

PROBLEM = gradient_kernels.problem(mask="causal")
REPEATED = replace(PROBLEM, deterministic=True)


def remembered(**changes: Any) -> CacheEntry:
    """The cache as it is when the problem was tuned on an H200."""
    variant = search_space.load(gradient_kernels.TEMPLATE).default(PROBLEM, samples.H200)
    entry = samples.tuned(PROBLEM, variant, **changes)
    store.merge(resources.user_cache(), samples.H200, Op.BACKWARD, [entry])
    return entry


class Differentiator:
    """Stands in for the launches of a backward kernel, by PyTorch."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.problems: list[Problem] = []
        self.off = 0.0  # what it adds to the keys' gradients

    def load(self, source: Source, device: torch.device) -> Any:
        self.sources.append(source)
        return source

    def launch(self, kernel: Any, problem: Problem, operands: Operands, saved: Saved, gradients: Gradients) -> None:
        self.problems.append(problem)
        exact, sums = attention_formula.attention(problem, operands)
        torch.testing.assert_close(saved.lse, sums.float(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(saved.output.double(), exact, rtol=5e-3, atol=5e-3)
        expected = external.backward_pass(planted("ours", pytorch_sdpa.sdpa), problem, operands, saved.output_grad)()
        gradients.query.copy_(expected.query)
        gradients.key.copy_(expected.key + self.off)
        gradients.value.copy_(expected.value)


@pytest.fixture
def kernel(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> Differentiator:
    """A card on which a backward kernel runs."""
    differentiator = Differentiator()
    fake_device.set_device(monkeypatch, samples.H200)
    monkeypatch.setattr(compiler, "load", differentiator.load)
    monkeypatch.setattr(backward, "launch", differentiator.launch)
    return differentiator


def states(row: Row) -> dict[str, State]:
    return {contestant.name: contestant.state for contestant in row.contestants}


# --- ours -------------------------------------------------------------------------------------------------------------


def test_the_kernel_of_the_cache_runs_as_a_training_call_runs_it(kernel: Differentiator) -> None:
    entry = remembered()
    row = benched(planted("right", pytorch_sdpa.sdpa), problem=PROBLEM)
    ours = row.contestants[0]
    assert (ours.name, ours.state, ours.route, ours.level) == ("autoattn", State.OK, "triton/backward", "exact")
    assert ours.variant == entry.variant
    assert "left to PyTorch" not in ours.detail
    assert [source.digest for source in kernel.sources] == [entry.source_digest]
    assert set(kernel.problems) == {PROBLEM}
    assert row.ratio == 2.0
    assert row.tflops(ours) * 1e6 == PROBLEM.flops() / 100.0
    assert PROBLEM.flops() == 5 * replace(PROBLEM, op=Op.FORWARD).flops() // 2


def test_a_kernel_that_lost_to_a_rival_runs_too_and_its_row_says_so(kernel: Differentiator) -> None:
    entry = remembered(choice="sdpa-cudnn")
    ours = benched(problem=PROBLEM).contestants[0]
    assert (ours.state, ours.variant) == (State.OK, entry.variant)
    assert "left to PyTorch: sdpa-cudnn was the fastest for the gradients" in ours.detail


def test_a_kernel_with_a_wrong_gradient_is_named_with_it(kernel: Differentiator) -> None:
    remembered()
    kernel.off = 0.1
    row = benched(planted("right", pytorch_sdpa.sdpa), problem=PROBLEM)
    assert states(row) == {"autoattn": State.WRONG, "right": State.OK}
    assert row.contestants[0].detail.startswith("the key's gradient has error 0.1")
    assert row.ours is None


def test_the_seeds_of_backward_templates_are_the_other_variants(kernel: Differentiator) -> None:
    entry = remembered()
    row = benched(problem=PROBLEM, ours=Ours.VARIANTS)
    others = [contestant for contestant in row.contestants if contestant.name.startswith("variant ")]
    assert others
    assert {contestant.route.split("/")[1] for contestant in others} == {"backward"}
    assert entry.variant not in {contestant.variant for contestant in others}


def test_the_kernel_of_the_cache_is_compiled_ahead() -> None:
    entry = remembered(choice="sdpa-cudnn")
    (source,) = kernel_bench.sources([PROBLEM, replace(PROBLEM, head_dim=64)], samples.H200, Ours.DISPATCH)
    assert source.variant == entry.variant


def test_a_default_of_gradients_is_launched_as_by_all_calls_but_the_first(
    kernel: Differentiator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of the first call launches through Triton, which may take the CPU longer than the card."""
    variant = search_space.load(gradient_kernels.TEMPLATE).default(PROBLEM, samples.H200)
    default: Any = SimpleNamespace(source=render.render(PROBLEM, variant))
    explanation = cache_lookup.explain(PROBLEM, samples.H200)
    monkeypatch.setattr(planner, "plan", lambda call, **_: planner.Plan(explanation=explanation, gradients=default))
    ours = benched(problem=PROBLEM).contestants[0]
    assert (ours.state, ours.route, ours.level) == (State.OK, "triton/backward", "default")
    assert ours.variant == variant
    assert set(kernel.problems) == {PROBLEM}


@pytest.mark.usefixtures("timer")
@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "causal", "deterministic": True},
        {"mask": "window:20,3", "layout": Layout.BSHD},
        {"mask": "causal", "layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 90},
        {"modifiers": Modifiers(sinks=True)},
        {"modifiers": Modifiers(bias=Bias.LEARNED)},
        {"modifiers": Modifiers(alibi=True, learned_slopes=True), "mask": "causal"},
    ],
)
def test_where_nothing_was_tuned_ours_is_what_autograd_runs_behind_a_call(changes: dict[str, Any]) -> None:
    problem = gradient_kernels.problem(**changes)
    ours = benched(problem=problem).contestants[0]
    assert ours.state is State.OK, ours.detail
    assert (ours.route, ours.variant) == ("eager" if problem.packed or problem.modifiers.names else "sdpa", None)


# --- peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("timer")
def test_only_the_backward_pass_of_a_peer_is_timed() -> None:
    forward: list[None] = []

    def call(problem: Problem, operands: Operands) -> Tensor:
        forward.append(None)
        return pytorch_sdpa.sdpa(problem, operands)

    row = benched(planted("counted", call), problem=PROBLEM)
    assert named(row, "counted").timed
    assert len(forward) == 1


WRONG: list[tuple[Callable[[Problem, Operands], Tensor], State, str]] = [
    (lambda problem, operands: 1.5 * pytorch_sdpa.sdpa(problem, operands), State.WRONG, "gradient has error"),
    (lambda problem, operands: torch.nan * pytorch_sdpa.sdpa(problem, operands), State.WRONG, "gradient has error inf"),
    (lambda problem, operands: pytorch_sdpa.sdpa(problem, operands).detach(), State.FAILED, "does not require grad"),
    (raising(torch.cuda.OutOfMemoryError("CUDA out of memory.")), State.MEMORY, "out of memory"),
]


@pytest.mark.usefixtures("timer")
@pytest.mark.parametrize(("call", "state", "words"), WRONG)
def test_what_goes_wrong_with_a_peers_gradients_is_a_value_and_the_others_go_on(
    call: Callable[[Problem, Operands], Tensor], state: State, words: str
) -> None:
    row = benched(planted("bad", call), planted("right", pytorch_sdpa.sdpa), problem=PROBLEM)
    assert states(row) == {"autoattn": State.OK, "bad": state, "right": State.OK}
    assert words in named(row, "bad").detail
    assert row.best_peer is named(row, "right")


class _Tilted(torch.autograd.Function):
    """What it is given; each backward pass adds a little more to the gradients than the one before."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, share: float) -> Tensor:
        ctx.share, ctx.passes = share, 0
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor, None]:
        ctx.passes += 1
        return pulls[0] * (1.0 + ctx.share * ctx.passes), None


def tilted(share: float) -> Callable[[Problem, Operands], Tensor]:
    def call(problem: Problem, operands: Operands) -> Tensor:
        output: Tensor = _Tilted.apply(pytorch_sdpa.sdpa(problem, operands), share)
        return output

    return call


@pytest.mark.usefixtures("timer")
def test_a_peer_may_err_a_little_more_than_ours() -> None:
    row = benched(planted("rough", tilted(0.005)), planted("wrong", tilted(0.02)), problem=PROBLEM)
    assert states(row) == {"autoattn": State.OK, "rough": State.OK, "wrong": State.WRONG}
    allowed = named(row, "autoattn").allowed or 0.0
    assert allowed == named(row, "rough").allowed
    assert (named(row, "autoattn").max_error or 0.0) < allowed < (named(row, "rough").max_error or 0.0)


@pytest.mark.usefixtures("timer")
def test_deterministic_gradients_must_be_the_same_twice() -> None:
    others = [planted("tilted", tilted(0.001)), planted("right", pytorch_sdpa.sdpa)]
    assert set(states(benched(*others, problem=PROBLEM)).values()) == {State.OK}
    row = benched(*others, problem=REPEATED)
    assert states(row) == {"autoattn": State.OK, "tilted": State.WRONG, "right": State.OK}
    assert "two runs on the same inputs differ in the" in named(row, "tilted").detail


@pytest.mark.usefixtures("timer")
def test_peers_run_deterministically_where_that_is_asked_and_only_there() -> None:
    seen: list[bool] = []

    def call(problem: Problem, operands: Operands) -> Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return pytorch_sdpa.sdpa(problem, operands)

    for benched_problem in (PROBLEM, REPEATED):
        benched(planted("looker", call), problem=benched_problem)
    assert seen == [False, True]
    assert not torch.are_deterministic_algorithms_enabled()
    row = benched(external.PEERS["sdpa-cudnn"], problem=REPEATED)
    assert (named(row, "sdpa-cudnn").state, named(row, "sdpa-cudnn").detail) == (
        State.ABSENT, "its gradients do not repeat to the bit",
    )  # fmt: skip


@pytest.mark.usefixtures("timer")
@pytest.mark.parametrize("op", Op)
def test_trained_inputs_reach_every_contestant(op: Op) -> None:
    seen: list[float] = []

    def call(problem: Problem, operands: Operands) -> Tensor:
        scores = operands.query.float() @ operands.key.float().repeat_interleave(problem.group_size, 1).mT
        seen.append(float(scores[..., :4].mean() * operands.scale))
        return pytorch_sdpa.sdpa(problem, operands)

    benched_problem = kernels.problem(op=op, head_dim=64, seq_q=64)
    assert benched(planted("looker", call), problem=benched_problem, inputs=Inputs.TRAINED).ours is not None
    assert 10.0 < seen[0] < 14.0


# --- how they are timed -----------------------------------------------------------------------------------------------


def test_a_backward_pass_is_timed_by_events_behind_a_longer_spin(timer: Timer) -> None:
    timer.guess = 10.0
    row = benched(planted("right", pytorch_sdpa.sdpa), problem=PROBLEM)
    assert row.timing is Timing.EVENTS
    assert timer.hidden_us == 880.0
    assert all(contestant.host_us for contestant in row.contestants)


def test_a_host_that_takes_longer_than_is_hidden_is_told(timer: Timer) -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: Tensor) -> Tensor:
            return output.clone()

        @staticmethod
        def backward(ctx: Any, *pulls: Tensor) -> Tensor:
            timer.host.sleep(0.002)
            return pulls[0]

    def call(problem: Problem, operands: Operands) -> Tensor:
        output: Tensor = Slow.apply(pytorch_sdpa.sdpa(problem, operands))
        return output

    slow = named(benched(planted("slow", call), problem=PROBLEM), "slow")
    assert slow.state is State.OK
    assert "more than the 880 us that the first spin hides" in slow.detail


def test_a_row_without_room_for_its_inputs_says_so(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_case(*facts: object, **more: object) -> gradient_check.Case:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(gradient_check, "full_case", full_case)
    assert benched(problem=PROBLEM).note == "no inputs: OutOfMemoryError: CUDA out of memory."


def test_each_operation_has_its_own_answers() -> None:
    answers = [entrants.of(problem, CPU, Options()) for problem in (PROBLEM, replace(PROBLEM, op=Op.FORWARD))]
    assert [type(answer) for answer in answers] == [entrants.BackwardPasses, entrants.Outputs]
