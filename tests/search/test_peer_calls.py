"""Peers in the finals on the CPU, where peers compute as they are told; with FlexAttention on a card below."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from fake_device import Timer
from planted_bench import planted, raising
from torch import Tensor
from torch._functorch import config as functorch

from autoattn.baselines import external, pytorch_sdpa
from autoattn.core.paired_stats import Round
from autoattn.core.problem import DType, Op, Precision, Problem
from autoattn.hardware import nvidia
from autoattn.hardware.timer import HIDDEN_US
from autoattn.search import peer_calls, search_options, tuner
from autoattn.search.gpu_jobs import Admit, Final, Finished
from autoattn.search.peer_calls import PeerCall
from autoattn.search.search_options import Effort
from autoattn.tensors.operands import Operands
from autoattn.validation import gradient_check, output_check

CPU = torch.device("cpu")
FORWARD = kernels.problem(mask="causal")
BACKWARD = replace(FORWARD, op=Op.BACKWARD)
Answer = Callable[[Problem, Operands], Tensor]


def case_of(problem: Problem) -> Any:
    gates = gradient_check if problem.op is Op.BACKWARD else output_check
    return gates.full_case(problem, CPU, torch.Generator().manual_seed(0))


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds a peer that computes as it is told."""

    def add(name: str, answer: Answer = pytorch_sdpa.sdpa, **changes: Any) -> None:
        monkeypatch.setitem(external.PEERS, name, planted(name, answer, **changes))

    return add


def prepared(problem: Problem = FORWARD, name: str = "peer") -> PeerCall | str:
    gates = gradient_check if problem.op is Op.BACKWARD else output_check
    return peer_calls.prepare(name, case_of(problem), gates)


# --- who is asked -----------------------------------------------------------------------------------------------------


def test_an_effort_without_time_for_a_peer_says_so_or_what_the_peer_lacks(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "FINALS_PEERS", ("ready", "here", "gone", "other"))
    plant("ready", package="torch")
    plant("here", package="torch", compiles=True)
    plant("gone", package="no-such-package", compiles=True)
    plant("other", package="torch", compiles=True, refuses=lambda problem: "it takes 16-bit inputs")
    assert peer_calls.invited(FORWARD, Effort.STANDARD) == (("ready", "here", "gone", "other"), {})
    assert peer_calls.invited(FORWARD, Effort.MAX) == (("ready", "here", "gone", "other"), {})
    absent = {
        "here": "it compiles for each problem, for which --effort quick leaves no time",
        "gone": "not installed (no package no-such-package)",
        "other": "it takes 16-bit inputs",
    }
    assert peer_calls.invited(FORWARD, Effort.QUICK) == (("ready",), absent)
    absent["here"] = absent["here"].replace("quick", "instant")
    absent["ready"] = "its package must be imported, for which --effort instant leaves no time"
    assert peer_calls.invited(FORWARD, Effort.INSTANT) == ((), absent)


# --- what is prepared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [FORWARD, BACKWARD, replace(BACKWARD, deterministic=True)])
def test_a_right_peer_is_ready_with_its_errors(problem: Problem, plant: Callable[..., None]) -> None:
    plant("peer")
    peer = prepared(problem)
    assert isinstance(peer, PeerCall), peer
    assert 0.0 < peer.rms_error <= peer.max_error < 0.05
    assert peer.call() is not None
    assert peer.host_us > 0.0


def nan(problem: Problem, operands: Operands) -> Tensor:
    return pytorch_sdpa.sdpa(problem, operands) * math.nan


@pytest.mark.parametrize("problem", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    ("answer", "changes", "reason"),
    [
        (nan, {}, peer_calls.NOT_FINITE),
        (raising(RuntimeError("no kernel\nimage")), {}, "it raised RuntimeError: no kernel image"),
        (raising(KeyError()), {}, "it raised KeyError"),
        (raising(torch.cuda.OutOfMemoryError("CUDA")), {}, "out of GPU memory"),
        (nan, {"refuses": lambda problem: "its head dim is at most 256"}, "its head dim is at most 256"),
    ],
)
def test_a_peer_that_fails_says_why(
    problem: Problem, answer: Answer, changes: dict[str, Any], reason: str, plant: Callable[..., None]
) -> None:
    plant("peer", answer, **changes)
    assert prepared(problem) == reason


def test_a_peer_that_is_not_installed_says_so(plant: Callable[..., None]) -> None:
    def load() -> object:
        raise ModuleNotFoundError("no", name="flash_attn")

    plant("peer", load=load)
    assert prepared() == "not installed (no module flash_attn)"


def test_gradients_of_a_deterministic_problem_must_repeat(plant: Callable[..., None]) -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (1.0 + 1e-2 * torch.rand(()))

    plant("peer", lambda problem, operands: Noisy.apply(pytorch_sdpa.sdpa(problem, operands)))
    assert "do not repeat to the bit" in str(prepared(replace(BACKWARD, deterministic=True)))
    assert isinstance(prepared(BACKWARD), PeerCall)


def test_a_compiled_peer_runs_with_the_precision_of_products_that_it_was_compiled_with(
    plant: Callable[..., None],
) -> None:
    """Else torch.compile compiles it anew in the rounds."""
    seen = []

    def answer(problem: Problem, operands: Operands) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return pytorch_sdpa.sdpa(problem, operands)

    plant("peer", answer, compiles=True)
    peer = prepared(replace(FORWARD, dtype=DType.FLOAT32, precision=Precision.TF32))
    assert isinstance(peer, PeerCall)
    peer.call()
    assert set(seen) == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_backward_passes_of_a_compiled_peer_keep_what_was_saved_for_them(plant: Callable[..., None]) -> None:
    """torch.compile lets a backward pass overwrite it otherwise, and the rounds run it again and again."""
    donated = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            donated.append(functorch.donated_buffer)
            return grad

    plant("peer", lambda problem, operands: Noted.apply(pytorch_sdpa.sdpa(problem, operands)), compiles=True)
    peer = prepared(BACKWARD)
    assert isinstance(peer, PeerCall), peer
    prepares = len(donated)
    peer.call()
    assert donated == [False] * (prepares + 1)


def test_more_of_the_hosts_work_needs_more_spins() -> None:
    spins = [
        PeerCall(call=lambda: None, max_error=0.0, rms_error=0.0, host_us=share * HIDDEN_US).spins
        for share in (0.0, 0.9, 1.1, 2.5, 1000.0)
    ]
    assert spins == [1, 1, 2, 3, peer_calls.MOST_SPINS]


# --- the jobs ---------------------------------------------------------------------------------------------------------


class FinalsTimer(Timer):
    """Rounds in which everybody takes as long."""

    def finals(self, calls: Mapping[str, Any], finalists: Sequence[str], *, seconds: float, seed: int) -> list[Round]:
        for call in calls.values():
            call()
        return [Round(times_us=dict.fromkeys(calls, 10.0)) for _ in range(4)]


def memory_of(problem: Problem) -> dict[Any, Any]:
    """What a worker keeps that has operands and a timer."""
    return {"full cases": {problem: case_of(problem)}, **{("stopwatch", spins): FinalsTimer() for spins in range(1, 9)}}


def admitted(memory: dict[Any, Any], problem: Problem = FORWARD, best_us: float | None = None) -> Any:
    return Admit(problem=problem, peer="peer", best_us=best_us).run(memory)


def final(memory: dict[Any, Any], problem: Problem = FORWARD) -> Finished:
    result = Final(problem=problem, finalists=(), seconds=0.1, seed=0, peers=("peer",)).run(memory)
    assert isinstance(result, Finished)
    return result


@pytest.mark.parametrize("problem", [FORWARD, BACKWARD])
def test_an_admitted_peer_is_prepared_once_and_timed_beside_pytorchs_backends(
    problem: Problem, plant: Callable[..., None]
) -> None:
    prepares = []

    def prepare(problem: Problem, operands: Operands) -> Callable[[], Tensor]:
        prepares.append(problem)
        return lambda: pytorch_sdpa.sdpa(problem, operands)

    plant("peer", prepare=prepare)
    memory = memory_of(problem)
    before = set(memory)
    assert admitted(memory, problem) is None
    result = final(memory, problem)
    assert len(prepares) == 1
    assert {"sdpa", "peer"} <= {rival.name for rival in result.rivals}
    peer = next(rival for rival in result.rivals if rival.name == "peer")
    assert peer.measurement.median_us == 10.0
    assert peer.max_error is not None
    assert 0.0 < peer.max_error < 0.05
    assert result.absent == {}
    assert set(memory) == before, "the peer's copies of the inputs are kept no longer"


def test_a_peer_whose_worker_died_is_prepared_again(plant: Callable[..., None]) -> None:
    plant("peer")
    assert "peer" in [rival.name for rival in final(memory_of(FORWARD)).rivals]
    plant("peer", raising(RuntimeError("out of luck")))
    result = final(memory_of(FORWARD))
    assert "peer" not in [rival.name for rival in result.rivals]
    assert result.absent == {"peer": "it raised RuntimeError: out of luck"}


def test_a_peer_much_slower_than_our_kernels_is_not_admitted(plant: Callable[..., None]) -> None:
    plant("peer")
    assert admitted(memory_of(FORWARD), best_us=101.0) is None  # the fake timer's looks take 1,000 us
    memory = memory_of(FORWARD)
    assert admitted(memory, best_us=99.0) == "too slow: 1000 us at a first look, where our fastest kernel takes 99 us"
    assert ("peer", "peer", FORWARD) not in memory


def test_a_peers_first_look_hides_its_work_on_the_host(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(name: str, case: Any, gates: Any) -> PeerCall:
        return PeerCall(call=lambda: None, max_error=0.0, rms_error=0.0, host_us=2.5 * HIDDEN_US)

    monkeypatch.setattr(peer_calls, "prepare", prepare)
    memory = memory_of(FORWARD)
    memory["stopwatch", 3].guess = 10.0
    assert admitted(memory, best_us=10.0) is None


def test_a_peers_compiler_does_not_move_tritons_cache(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    def answer(problem: Problem, operands: Operands) -> Tensor:
        os.environ["TRITON_CACHE_DIR"] = "/elsewhere"
        return pytorch_sdpa.sdpa(problem, operands)

    plant("peer", answer)
    memory = memory_of(FORWARD)
    assert admitted(memory) is None
    assert "TRITON_CACHE_DIR" not in os.environ
    final(memory)
    assert "TRITON_CACHE_DIR" not in os.environ


@pytest.mark.gpu
@pytest.mark.parametrize("op", [Op.FORWARD, Op.BACKWARD])
def test_a_tune_on_a_card_meets_flex_attention(op: Op, tmp_path: Path) -> None:
    device = nvidia.present()
    assert device is not None
    problem = kernels.problem(
        op=op, dtype=DType.FLOAT16, batch=2, heads_q=8, heads_kv=8, seq_q=2048, seq_kv=2048, head_dim=64, mask="causal"
    )
    options = search_options.Options(effort=search_options.Effort.STANDARD, trials=3, cache=tmp_path)
    summary = tuner.tune([problem], device, measured=True, options=options)
    assert summary.failed == {}
    entry = summary.entries[problem.key]
    assert entry.absent is not None
    flex = next((rival for rival in entry.rivals if rival.name == "flex"), None)
    assert flex is not None, entry.absent
    assert flex.max_error is not None
    assert entry.choice in ("kernel", pytorch_sdpa.SDPA, *pytorch_sdpa.BACKENDS)
    assert {rival.name for rival in entry.rivals}.isdisjoint(entry.absent)
    assert {*external.FINALS_PEERS} <= {*entry.absent, *(rival.name for rival in entry.rivals)}
