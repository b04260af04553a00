"""Side by side: what becomes of each contestant of a row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_device
import kernels
import pytest
import samples
import torch
from fake_device import HostClock, Timer
from planted_bench import CPU, benched, named, planted, raising, timer  # noqa: F401 - a fixture
from torch import Tensor

from autoattn.baselines import pytorch_sdpa
from autoattn.bench import entrants, kernel_bench
from autoattn.bench.kernel_results import Ours, State, Timing
from autoattn.cache import store
from autoattn.codegen import resources
from autoattn.core.cache_entry import KERNEL
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Op, Precision, Problem
from autoattn.errors import StateError
from autoattn.reference import attention_formula, inputs
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import cache_lookup, planner
from autoattn.tensors.operands import Operands

# --- what becomes of a contestant -------------------------------------------------------------------------------------


def test_ours_and_a_right_peer_are_checked_and_timed(timer: Timer) -> None:
    row = benched(planted("right", pytorch_sdpa.sdpa), seconds=0.5)
    assert [contestant.state for contestant in row.contestants] == [State.OK, State.OK]
    ours, right = row.contestants
    assert (ours.name, ours.ours, ours.route, ours.level) == ("autoattn", True, "sdpa", "sdpa")
    assert ours.times_us == (100.0,) * 3
    assert right.times_us == (200.0,) * 3
    assert row.ratio == 2.0
    assert right.max_error is not None
    assert right.allowed is not None
    assert right.max_error < right.allowed
    assert right.host_us == pytest.approx(1.0)
    assert right.first_s is not None
    assert timer.seconds == 1.0, "seconds are those of each contestant"
    assert len(row.pulses) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "window:20,3", "layout": Layout.BSHD},
        {"mask": "causal:top-left"},
        {"dtype": DType.FLOAT32, "precision": Precision.TF32},
        {"numerics": Numerics.ONLINE},
        {"mask": "causal", "modifiers": Modifiers(softcap=True, alibi=True)},
        {"mask": "causal", "layout": Layout.PACKED, "tokens_q": 60, "tokens_kv": 90},
    ],
)
def test_ours_is_a_call_of_the_front_door_for_the_problem_itself(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[Problem] = []
    whole = planner.plan

    def plan(call: Call, *, lse: bool) -> planner.Plan:
        problems.append(call.problem)
        return whole(call, lse=lse)

    monkeypatch.setattr(planner, "plan", plan)
    problem = kernels.problem(**changes)
    operands = inputs.make(problem, CPU, torch.Generator().manual_seed(0))
    output = entrants.front_door(problem, operands)()
    expected, _ = attention_formula.attention(problem, operands)
    torch.testing.assert_close(output.double(), expected, rtol=5e-3, atol=5e-3)
    assert set(problems) == {problem}


WRONG: list[tuple[Callable[[Problem, Operands], Tensor], State, str]] = [
    (lambda problem, operands: pytorch_sdpa.sdpa(problem, operands) + 0.5, State.WRONG, "error 0.5"),
    (lambda problem, operands: pytorch_sdpa.sdpa(problem, operands) * torch.nan, State.WRONG, "error nan"),
    (raising(ValueError("no such\nkernel")), State.FAILED, "ValueError: no such kernel"),
    (raising(torch.cuda.OutOfMemoryError("CUDA out of memory.")), State.MEMORY, "out of memory"),
]


@pytest.mark.usefixtures("timer")
@pytest.mark.parametrize(("call", "state", "words"), WRONG)
def test_what_goes_wrong_with_a_peer_is_a_value_and_the_others_go_on(
    call: Callable[[Problem, Operands], Tensor], state: State, words: str
) -> None:
    row = benched(planted("bad", call), planted("right", pytorch_sdpa.sdpa))
    bad = named(row, "bad")
    assert bad.state is state
    assert words in bad.detail
    assert bad.times_us == ()
    assert row.best_peer is named(row, "right")


@pytest.mark.usefixtures("timer")
def test_a_peer_that_fails_while_it_is_timed_keeps_no_time() -> None:
    row = benched(planted("late", raising(ValueError("late"), after=4)), planted("right", pytorch_sdpa.sdpa))
    assert (named(row, "late").state, named(row, "late").times_us) == (State.FAILED, ())
    assert named(row, "right").times_us


@pytest.mark.usefixtures("timer")
def test_a_peer_that_cannot_be_called_is_absent_with_its_reason_and_never_prepared() -> None:
    def prepare(problem: Problem, operands: Operands) -> Callable[[], Tensor]:
        raise AssertionError

    missing = planted("away", pytorch_sdpa.sdpa, prepare=prepare, load=lambda: __import__("no_such_package"))
    refusing = planted("coy", pytorch_sdpa.sdpa, prepare=prepare, refuses=lambda problem: "it has no such mask")
    row = benched(missing, refusing)
    assert [contestant.state for contestant in row.contestants] == [State.OK, State.ABSENT, State.ABSENT]
    assert "not installed (no module no_such_package" in named(row, "away").detail
    assert named(row, "coy").detail == "it has no such mask"
    assert row.ours is not None, "without any peer ours runs"
    assert (row.best_peer, row.ratio) == (None, None)


@pytest.mark.usefixtures("timer")
def test_a_peer_may_err_a_little_more_than_ours() -> None:
    def off(times: float) -> Callable[[Problem, Operands], Tensor]:
        def call(problem: Problem, operands: Operands) -> Tensor:
            return pytorch_sdpa.sdpa(problem, operands) + times * (named(known, "exact").allowed or 0.0)

        return call

    known = benched(planted("exact", pytorch_sdpa.sdpa))
    row = benched(planted("rough", off(2.0)), planted("wrong", off(6.0)))
    assert named(row, "rough").state is State.OK
    assert named(row, "wrong").state is State.WRONG


def test_a_peer_that_breaks_the_card_ends_the_run_in_one_sentence(
    timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[bool] = []

    def synchronize(device: object = None) -> None:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def call(problem: Problem, operands: Operands) -> Tensor:
        broken.append(True)
        return pytorch_sdpa.sdpa(problem, operands)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(StateError, match=r"but rogue broke it on fp16 .*illegal memory access.*; bench without it"):
        benched(planted("rogue", call))


def waiting(host: HostClock) -> Callable[[Problem, Operands], Tensor]:
    """A peer's call that keeps the host for 2 ms."""

    def call(problem: Problem, operands: Operands) -> Tensor:
        host.sleep(0.002)
        return pytorch_sdpa.sdpa(problem, operands)

    return call


def test_a_host_that_takes_longer_than_is_hidden_is_told_where_no_graph_hides_it(timer: Timer) -> None:
    timer.breaks = True
    slow = named(benched(planted("slow", waiting(timer.host))), "slow")
    assert slow.state is State.OK
    assert slow.host_us == pytest.approx(2001.0)
    assert "more than the 220 us that the first spin hides" in slow.detail


def test_small_problems_are_replayed_from_graphs_of_several_calls_less_their_flushes(timer: Timer) -> None:
    timer.guess, timer.flush_us = 10.0, 2.0
    row = benched(planted("right", pytorch_sdpa.sdpa))
    assert row.timing is Timing.GRAPH
    assert named(row, "right").calls == kernel_bench.GRAPH_CALLS
    assert named(row, "right").times_us[0] == 200.0 / kernel_bench.GRAPH_CALLS - 2.0
    assert {contestant.name for contestant in row.contestants} == {"autoattn", "right"}, (
        "flushes are no contestant of the row"
    )
    assert named(row, "right").host_us is None
    timer.guess = 1000.0
    assert benched(planted("right", pytorch_sdpa.sdpa)).timing is Timing.EVENTS


def test_calls_whose_host_takes_longer_than_is_hidden_are_replayed_from_graphs(timer: Timer) -> None:
    timer.guess = 1000.0
    row = benched(planted("slow", waiting(timer.host)))
    assert row.timing is Timing.GRAPH
    assert named(row, "slow").host_us is None


def test_where_one_contestant_cannot_be_recorded_all_are_timed_without_graphs(timer: Timer) -> None:
    timer.guess, timer.breaks = 10.0, True
    row = benched(planted("right", pytorch_sdpa.sdpa))
    assert row.timing is Timing.EVENTS
    assert {contestant.calls for contestant in row.contestants} == {1}
    assert "not permitted when stream is capturing" in row.note


@pytest.mark.usefixtures("timer")
def test_variants_are_what_the_seeds_name_without_the_one_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.set_device(monkeypatch, samples.H200)
    row = benched(problem=kernels.problem(head_dim=64), ours=Ours.VARIANTS)
    others = [contestant for contestant in row.contestants if contestant.name.startswith("variant ")]
    plain = [
        contestant
        for contestant in others
        if contestant.variant is not None and contestant.variant.template == "triton/forward"
    ]
    assert plain
    assert {contestant.state for contestant in plain} == {State.FAILED}, (
        "outside of its interpreter, Triton runs nothing here"
    )
    assert len({contestant.variant for contestant in row.contestants}) == len(row.contestants)


def test_what_will_run_is_known_before_so_that_all_cores_compile_it() -> None:
    entry = samples.current(
        samples.measured(kernels.problem(dtype=DType.BFLOAT16, head_dim=64, mask="causal"), choice=KERNEL)
    )
    store.merge(resources.user_cache(), samples.H200, Op.FORWARD, [entry])
    others = [entry.problem, kernels.problem(head_dim=64), kernels.problem(head_dim=64, batch=2)]
    sources = kernel_bench.sources(others, samples.H200, Ours.DISPATCH)
    assert len(sources) == 2, "one is tuned, the others share the default"
    assert sources[0].variant == entry.variant
    assert set(sources) < set(kernel_bench.sources(others, samples.H200, Ours.VARIANTS))


def test_the_kernel_that_ran_is_no_other_variant_of_itself() -> None:
    explanation = cache_lookup.explain(kernels.problem(head_dim=64), samples.H200)
    assert explanation.variant in kernel_bench.variants_beside(explanation, None, samples.H200)
    assert explanation.variant not in kernel_bench.variants_beside(explanation, explanation.variant, samples.H200)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_kernels_are_compiled_ahead_by_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = kernel_bench.sources([kernels.problem(head_dim=64)], samples.A30, Ours.VARIANTS)[
        : kernel_bench.WORTH_A_POOL
    ]
    kernel_bench.compile_ahead(sources, samples.A30.arch)
    assert len(list(tmp_path.glob("*/*.cubin"))) == kernel_bench.WORTH_A_POOL


@pytest.mark.usefixtures("timer")
def test_why_a_backend_does_not_take_the_inputs_is_told_and_nothing_else() -> None:
    def call(problem: Problem, operands: Operands) -> Tensor:
        warnings.warn("Flash attention kernel not used because: (Triggered internally at /a/b.cpp:1)", stacklevel=1)
        warnings.warn("CuDNN attention has been runtime disabled.", stacklevel=1)
        warnings.warn("Expected head dims below 256. (Triggered internally at /a/b.cpp:2)", stacklevel=1)
        raise RuntimeError("No available kernel.")

    row = benched(planted("picky", call))
    assert named(row, "picky").detail == "RuntimeError: No available kernel. (Expected head dims below 256.)"
