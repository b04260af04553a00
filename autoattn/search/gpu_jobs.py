"""Jobs of workers with tensors: rehearsals in an interpreter, screening and finals on the GPU."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from autoattn.baselines import external
from autoattn.core import paired_stats
from autoattn.core.cache_entry import Rival, WorstCase
from autoattn.core.mask import MaskKind
from autoattn.core.paired_stats import Round
from autoattn.core.problem import Layout, Numerics, Op, Problem
from autoattn.core.trial import Energy, Measurement, Outcome, Verdict
from autoattn.core.variant import Source
from autoattn.errors import CompileError, InterpretationError, SynchronizationError
from autoattn.hardware.timer import Call, Stopwatch, summary
from autoattn.kernels import compiler, forward, interpreter
from autoattn.kernels.manifest import Language
from autoattn.reference import inputs
from autoattn.reference.inputs import Scores
from autoattn.search import peer_calls
from autoattn.search.peer_calls import PeerCall
from autoattn.validation import gradient_check, output_check
from autoattn.workers.worker_pool import Failure

WORST_SECONDS = 0.02  # of rounds, but at least three; the check before them takes 40 ms on an H200
KEPT_SHARE = 0.1  # of the card's memory, for the operands of several problems; one alone may take what it needs
Memory = dict[Hashable, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearse:
    """Checks a kernel's numbers on the CPU, in a worker that runs Triton's interpreter; that of Gluon runs anywhere."""

    problem: Problem
    source: Source

    def run(self, memory: Memory) -> Verdict | Failure:
        """The verdict over tiny cases, or that the interpreter could not run the kernel."""
        device, gates = torch.device("cpu"), _gates(self.problem)
        try:
            kernel = compiler.load(self.source, device)
            rings = kernel.manifest.language is Language.GLUON
            name = "gate", kind_of(self.problem), rings
            gate = _remembered(memory, name, lambda: gates.Gate(self.problem, device, tiny=True, rings=rings))
            verdict: Verdict = gate.judge(kernel)
        except SynchronizationError as error:
            return Failure.of(error, Outcome.WRONG_RESULT, str(error))
        except (InterpretationError, interpreter.InterpreterError) as error:
            return Failure.of(error, Outcome.INTERPRETER_CRASH, interpreter.words(error))
        return verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Makes what the looks at one problem's variants need, while the first of them are compiled."""

    problem: Problem

    def run(self, memory: Memory) -> Failure | None:
        """What went wrong, if anything; the looks will say it again."""
        with _failures() as failed:
            _gate(memory, self.problem)
            _full_case(memory, self.problem)
            _stopwatch(memory)
            return None
        return failed[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """A variant that passed the gate, and a first look at its time."""

    verdict: Verdict
    median_us: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Validates on the GPU, then takes a first look at the time; the order is the point."""

    problem: Problem
    source: Source
    verdict: Verdict | None  # known from another problem with the same source
    best_us: float | None  # a variant much slower than this is not measured further

    def run(self, memory: Memory) -> Screened | Failure:
        """The verdict and the time, or what went wrong."""
        with _failures() as failed:
            kernel, gates = _kernel(memory, self.source), _gates(self.problem)
            verdict = self.verdict
            if verdict is None:
                verdict = _gate(memory, self.problem).judge(kernel)
            if not verdict.ok:
                return Failure(outcome=Outcome.WRONG_RESULT, detail=verdict.reason)
            case = _full_case(memory, self.problem)
            looked = _stopwatch(memory).screen(gates.call_of(kernel, case, gates.room_of(case)), self.best_us)
            return Screened(verdict=verdict, median_us=looked.median_us, samples=looked.samples)
        return failed[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The finals of one problem."""

    verdicts: tuple[Verdict, ...]  # of each finalist at full size, in the order given
    measurements: tuple[Measurement | None, ...]  # None for a finalist that failed the gate
    rivals: tuple[Rival, ...]
    rounds: tuple[Round, ...] = ()  # all of them, raw; finalists go by finalist_name, rivals by their own
    energies: tuple[Energy | None, ...] = ()  # of each finalist; empty where nobody asked
    absent: Mapping[str, str] = field(default_factory=dict)  # rival or peer that was asked for and left out -> why


def finalist_name(place: int) -> str:
    """What a finalist is called in the rounds, by its place in the order given."""
    return f"finalist {place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Prepares one peer for the finals of a problem.

    It is a job of its own, so that a peer that hangs or crashes is known by name.
    """

    problem: Problem
    peer: str
    best_us: float | None  # of our fastest kernel at a first look; a peer much slower takes no part

    def run(self, memory: Memory) -> str | Failure | None:
        """Why it does not take part, in one clause; None when it does, and is kept for the finals."""
        with _failures() as failed:
            case, gates = _full_case(memory, self.problem), _gates(self.problem)
            with external.triton_environment():
                prepared = peer_calls.prepare(self.peer, case, gates)
                if isinstance(prepared, str):
                    return prepared
                reason = peer_calls.why_slow(prepared, _stopwatch(memory, prepared.spins), self.best_us)
            if reason is None:
                memory["peer", self.peer, self.problem] = prepared
            return reason
        return failed[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """Validates the finalists at full size and times them against one another and the rivals, interleaved."""

    problem: Problem
    finalists: tuple[Source, ...]
    seconds: float  # of rounds, at most; but see rounds.PATIENCE
    seed: int
    energy_seconds: float = 0.0  # of calls in a row for each contestant's energy; 0 asks for none
    peers: tuple[str, ...] = ()  # that were admitted

    def run(self, memory: Memory) -> Finished | Failure:
        """The measurements, or what went wrong."""
        with _failures() as failed, external.triton_environment():
            case, gates = _full_case(memory, self.problem), _gates(self.problem)
            room = gates.room_of(case)
            kernels = [_kernel(memory, source) for source in self.finalists]
            verdicts = tuple(gates.judge(kernel, [case]) for kernel in kernels)
            rivals = gates.rival_calls(case)
            accuracy = {name: gates.errors(call(), case) for name, call in rivals.items()}
            peers, absent = self._peers(memory, case, gates)
            absent |= {name: peer_calls.NOT_FINITE for name in rivals if not math.isfinite(accuracy[name][0])}
            rivals = {name: call for name, call in rivals.items() if name not in absent}
            rivals |= {name: peer.call for name, peer in peers.items()}
            accuracy |= {name: (peer.max_error, peer.rms_error) for name, peer in peers.items()}
            ours = {
                finalist_name(place): gates.call_of(kernel, case, room)
                for place, (kernel, verdict) in enumerate(zip(kernels, verdicts, strict=True))
                if verdict.ok
            }
            spins = max((peer.spins for peer in peers.values()), default=1)
            finished = self.time(_stopwatch(memory, spins), ours, rivals, verdicts, accuracy)
            return replace(finished, absent=absent)
        return failed[0]

    def _peers(self, memory: Memory, case: Any, gates: ModuleType) -> tuple[dict[str, PeerCall], dict[str, str]]:
        """The peers' calls, and why others are left out; what was kept for these finals is kept no longer."""
        peers: dict[str, PeerCall] = {}
        absent: dict[str, str] = {}
        for name in self.peers:
            prepared = memory.pop(("peer", name, self.problem), None)
            if prepared is None:  # another worker had prepared it, which died since
                prepared = peer_calls.prepare(name, case, gates)
            if isinstance(prepared, str):
                absent[name] = prepared
            else:
                peers[name] = prepared
        return peers, absent

    def time(
        self,
        stopwatch: Stopwatch,
        ours: Mapping[str, Call],
        rivals: Mapping[str, Call],
        verdicts: tuple[Verdict, ...],
        accuracy: Mapping[str, tuple[float, float]],
    ) -> Finished:
        """Times what was found right.

        Args:
            ours: the finalists' calls, by `finalist_name`.
            rivals: the rivals' calls.
            verdicts: of all finalists.
            accuracy: the rivals' largest error and root mean square error.
        """
        calls = {**rivals, **ours}
        taken = stopwatch.finals(calls, list(ours), seconds=self.seconds, seed=self.seed)
        counted = paired_stats.good(taken)
        pulses = [round_.pulse for round_ in counted if round_.pulse is not None]
        flops = self.problem.flops()
        times = {name: summary([round_.times_us[name] for round_ in counted], flops, pulses) for name in calls}
        metered = calls if self.energy_seconds else {}
        used = {name: stopwatch.energy(call, self.energy_seconds) for name, call in metered.items()}
        names = [finalist_name(place) for place in range(len(verdicts))]
        return Finished(
            verdicts=verdicts,
            measurements=tuple(times.get(name) for name in names),
            rivals=tuple(
                Rival(
                    name=name,
                    measurement=times[name],
                    max_error=accuracy[name][0],
                    rms_error=accuracy[name][1],
                    energy=used.get(name),
                )
                for name in rivals
            ),
            rounds=tuple(taken),
            energies=tuple(used.get(name) for name in names),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgrow:
    """Checks and times a kernel that keeps its first maximum, on inputs that have it compute its tiles twice."""

    problem: Problem
    source: Source
    seed: int

    def run(self, memory: Memory) -> WorstCase | Failure:
        """Its worst case, or what went wrong."""
        with _failures() as failed:
            kernel = _kernel(memory, self.source)
            usual = _full_case(memory, self.problem).operands
            worst = inputs.outgrown(usual)
            case = output_check.case_of(
                self.problem,
                worst,
                torch.Generator().manual_seed(1),
                scores=Scores.OUTGROWN,
                rows=output_check.SPOT_ROWS,
            )
            verdict = output_check.judge(kernel, [case])
            if not verdict.ok:
                return Failure(outcome=Outcome.WRONG_RESULT, detail=verdict.reason)
            output = forward.empty_output(self.problem, usual.query)
            flags = forward.launch(kernel, self.problem, worst, output, None, counting=True)
            return self.time(
                _stopwatch(memory),
                partial(forward.launch, kernel, self.problem, usual, output, None),
                partial(forward.launch, kernel, self.problem, worst, output, None),
                verdict,
                flags,
            )
        return failed[0]

    def time(
        self, stopwatch: Stopwatch, usual: Call, worst: Call, verdict: Verdict, flags: torch.Tensor | None
    ) -> WorstCase:
        """Times a call of usual inputs and one of the worst; `flags` are 1 for tiles that the latter computed twice."""
        taken = stopwatch.rounds({"usual": usual, "worst": worst}, seconds=WORST_SECONDS, seed=self.seed).times_us
        return WorstCase(
            median_us=statistics.median(taken["worst"]),
            slowdown=statistics.median(
                slow / quick for slow, quick in zip(taken["worst"], taken["usual"], strict=True)
            ),
            rounds=len(taken["worst"]),
            max_error=verdict.max_error,
            tiles=len(flags) if flags is not None else 0,
            redone=int(flags.sum()) if flags is not None else 0,
        )


def _gates(problem: Problem) -> ModuleType:
    """The room that judges what a problem's operation computes, and makes calls of it; both have the same functions."""
    return gradient_check if problem.op is Op.BACKWARD else output_check


def kind_of(problem: Problem) -> Problem:
    """What problems share whose gate is the same: what only tells the launch is set to the smallest."""
    mask = problem.mask
    if mask.kind is MaskKind.WINDOW:
        right = mask.right if mask.right is None else min(mask.right, 1)
        mask = replace(mask, left=1 if mask.bounded_left else None, right=right)
    elif mask.sparse:
        mask = replace(mask, density=0.5)
    return replace(
        problem,
        batch=1,
        heads_q=1,
        heads_kv=1,
        seq_q=2,
        seq_kv=3,
        key_lengths=None,
        tokens_q=2 if problem.packed else 0,
        tokens_kv=3 if problem.packed else 0,
        mask=mask,
        layout=problem.layout if problem.packed else Layout.BHSD,
        numerics=Numerics.ANY,
        deterministic=False,
    )


@contextlib.contextmanager
def _failures() -> Iterator[list[Failure]]:
    """Turns errors that leave the GPU healthy into a Failure; any other ends the worker, which may be poisoned."""
    failed: list[Failure] = []
    try:
        yield failed
    except CompileError as error:
        failed.append(Failure.of(error, Outcome.COMPILE_ERROR, str(error)))
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        failed.append(
            Failure(outcome=Outcome.LAUNCH_ERROR, detail=f"out of GPU memory: {' '.join(str(error).split())[:200]}")
        )


def _remembered(memory: Memory, name: Hashable, make: Any) -> Any:
    if name not in memory:
        memory[name] = make()
    return memory[name]


def _stopwatch(memory: Memory, spins: int = 1) -> Stopwatch:
    stopwatch: Stopwatch = _remembered(
        memory, ("stopwatch", spins), lambda: Stopwatch(torch.device("cuda"), spins=spins)
    )
    return stopwatch


def _kernel(memory: Memory, source: Source) -> compiler.Kernel:
    kernel: compiler.Kernel = _remembered(
        memory, ("kernel", source.digest), lambda: compiler.load(source, torch.device("cuda"))
    )
    return kernel


def _gate(memory: Memory, problem: Problem) -> Any:
    return _remembered(memory, ("gate", kind_of(problem)), lambda: _gates(problem).Gate(problem, torch.device("cuda")))


def _full_case(memory: Memory, problem: Problem) -> Any:
    """The problem itself with contiguous inputs; those of several problems as long as they fill little of the card."""
    cases: dict[Problem, Any] = memory.setdefault("full cases", {})
    if problem in cases:
        cases[problem] = cases.pop(problem)  # the one that was asked for last is the last to go
        return cases[problem]
    room = KEPT_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    while cases and sum(kept.bytes() for kept in (*cases, problem)) > room:
        cases.pop(next(iter(cases)))
    torch.cuda.empty_cache()
    generator = torch.Generator().manual_seed(1)
    cases[problem] = _gates(problem).full_case(problem, torch.device("cuda"), generator)
    return cases[problem]
