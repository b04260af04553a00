"""Benchmark of kernels beside baselines: one process, the same inputs, all checked, in interleaved rounds.

Everything that goes wrong with one contestant becomes a value in its row, and the others go on.
"""

from __future__ import annotations

import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import torch
import triton

import autoattn
from autoattn.baselines import external
from autoattn.baselines.external import Peer
from autoattn.bench import entrants
from autoattn.bench.entrants import Answers
from autoattn.bench.kernel_results import Contestant, Options, Ours, Row, State, Timing
from autoattn.codegen import portfolio, render
from autoattn.core.device import Device
from autoattn.core.paired_stats import Pulse
from autoattn.core.problem import Op, Problem
from autoattn.core.variant import Source, Variant
from autoattn.errors import AutoattnError, DeviceError, StateError
from autoattn.hardware import nvidia, timer
from autoattn.hardware.timer import Stopwatch
from autoattn.runtime.plan import cache_lookup, explanations
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Pool, cores

GUESSES = 3  # samples before it is known how a row is timed
SMALL_US = 100.0  # from here down a sample is the replay of a CUDA graph
FLUSHES = "flushes"  # of the L2, which a graph has before each call: a contestant of the rounds, but not of the row
GRAPH_CALLS = 20  # in one replay, at most
WORTH_A_POOL = 3  # kernels; starting workers takes as long as compiling a few
COMPILE_SECONDS = 120.0  # for one kernel
GRAPH_US = 1000.0  # of work in one replay; fewer calls when they are longer
BACKWARD_SPINS = 4  # autograd and the launches of several kernels keep the host up to four times as long


def machine(peers: Iterable[Peer]) -> dict[str, str]:
    """What stands in the header: the card, and versions of all that takes part.

    Raises:
        DeviceError: there is no CUDA GPU.
    """
    card = nvidia.present()
    if card is None:
        raise DeviceError("autoattn bench needs an NVIDIA GPU in this machine, found none; run it where there is one")
    return {
        "card": f"{card.full_name}, sm_{card.arch}, {card.sm_count} SMs",
        "driver": nvidia.driver_version() or "unknown",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "triton": triton.__version__,
        "Python": platform.python_version(),
        "autoattn": autoattn.__version__,
        **{peer.package: peer.version() for peer in peers if peer.package != "torch" and not peer.why_missing()},
    }


def rows(problems: Iterable[Problem], peers: list[Peer], options: Options) -> Iterator[Row]:
    """Benches one problem after the other, on the current CUDA device.

    Raises:
        StateError: a contestant has broken the CUDA context, so that nothing more can run in this process.
    """
    problems = list(problems)
    bench = _Bench(peers, options)
    if bench.card is not None:
        compile_ahead(sources(problems, bench.card, options.ours), bench.card.arch)
    for problem in problems:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a peer has to say of itself, once a row
            row = bench.row(problem)
        yield row


def sources(problems: Iterable[Problem], card: Device, ours: Ours) -> list[Source]:
    """The distinct kernels that the rows will run, as calls on contiguous tensors need them."""
    kernels: dict[Source, None] = {}
    for problem in problems:
        explanation = cache_lookup.explain(problem, card)
        ran = (
            entrants.of_cache(explanation)
            if problem.op is Op.BACKWARD
            else list(cache_lookup.variants(explanation, card))[:1]
        )
        for variant in [*ran, *(variants_beside(explanation, None, card) if ours is Ours.VARIANTS else ())]:
            with suppress(AutoattnError):  # it is told where the row runs
                kernels[render.render(problem, variant)] = None
    return list(kernels)


def compile_ahead(kernels: list[Source], arch: int) -> None:
    """Fills Triton's cache by all cores, while nothing is timed; what the compiler refuses is told in its row."""
    if len(kernels) < WORTH_A_POOL:
        return
    with Pool(size=min(len(kernels), cores())) as pool:
        for kernel in kernels:
            pool.submit(Inspect(source=kernel, arch=arch), COMPILE_SECONDS)
        while pool.next_results():
            pass


def variants_beside(explanation: explanations.Explanation, ran: Variant | None, card: Device | None) -> list[Variant]:
    """The planned kernel, the entry's and its runners-up, then seeds of each template; without the one that ran."""
    problem, variants = explanation.problem, [] if explanation.variant is None else [explanation.variant]
    if explanation.entry is not None:
        variants += [explanation.entry.variant, *(candidate.variant for candidate in explanation.entry.candidates)]
    if problem is not None and card is not None:
        variants += portfolio.starters_for(problem, card)
    return [variant for variant in dict.fromkeys(variants) if variant != ran]


class _Guarded:
    """A call that remembers what it raised and how long it kept the host; once it failed, it does nothing."""

    def __init__(self, contestant: Contestant, call: Callable[[], object] | None) -> None:
        self.contestant, self.call = contestant, call
        self.host_us: list[float] = []
        self.failed = call is None

    def __call__(self) -> object:
        if self.failed or self.call is None:
            return None
        begin = time.perf_counter()
        try:
            answer = self.call()
        except Exception as error:
            self.fail(error)
            return None
        self.host_us.append((time.perf_counter() - begin) * 1e6)
        return answer

    def recorded(self) -> None:
        """The call as a CUDA graph takes it: what goes wrong there is raised."""
        if self.call is not None:
            self.call()

    def fail(self, error: Exception) -> None:
        """Makes the error the contestant's outcome."""
        self.failed = True
        self.contestant = replace(self.contestant, state=state_of(error), detail=reason_of(error))

    def mark(self, **facts: object) -> None:
        """Notes facts of the contestant."""
        self.contestant = replace(self.contestant, **facts)  # type: ignore[arg-type]

    def note(self, words: str) -> None:
        """Adds to what is told of the contestant."""
        self.mark(detail="; ".join(filter(None, (self.contestant.detail, words))))


def state_of(error: Exception) -> State:
    """Running out of memory is told from other failures."""
    return State.MEMORY if isinstance(error, torch.cuda.OutOfMemoryError) else State.FAILED


def reason_of(error: Exception) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")


class _Bench:
    """What all rows share."""

    def __init__(self, peers: list[Peer], options: Options) -> None:
        self.peers, self.options = peers, options
        self.device = current_device()
        self.card = nvidia.present(self.device.index)
        self.stopwatches: dict[Op, Stopwatch] = {}

    def row(self, problem: Problem) -> Row:
        """Checks and times all contestants of one problem."""
        torch.cuda.empty_cache()
        try:
            answers = entrants.of(problem, self.device, self.options)
        except (torch.cuda.OutOfMemoryError, AutoattnError) as error:
            return Row(problem=problem, note=f"no inputs: {reason_of(error)}")
        with external.settled(problem):
            lineup = [*self._ours(answers), *self._peers(answers)]
            for entrant in lineup:
                self._check(entrant, answers)
            right = [entrant for entrant in lineup if entrant.contestant.state is State.OK]
            try:
                timing, pulses, note = self._time(right, problem.op)
            except RuntimeError as error:
                raise _broken(
                    f"one of {', '.join(entrant.contestant.name for entrant in right)}", problem, error
                ) from None
        return Row(
            problem=problem,
            contestants=tuple(entrant.contestant for entrant in lineup),
            timing=timing,
            pulses=pulses,
            note=note,
        )

    def _ours(self, answers: Answers) -> Iterator[_Guarded]:
        """What a call runs, and on demand the kernels that it could have run."""
        try:
            explanation, first, call = answers.ours(self.card)
        except AutoattnError as error:
            yield _Guarded(Contestant(name=entrants.OURS, ours=True, state=State.FAILED, detail=reason_of(error)), None)
            return
        yield _Guarded(first, call)
        for name, variant in self.options.beside.get(answers.problem.key, {}).items():
            facts = Contestant(name=name, ours=True, route=variant.template, variant=variant)
            yield _Guarded(facts, answers.by_kernel(variant))
        if self.options.ours is not Ours.VARIANTS:
            return
        for number, variant in enumerate(variants_beside(explanation, first.variant, self.card), start=1):
            facts = Contestant(name=f"variant {number}", ours=True, route=variant.template, variant=variant)
            yield _Guarded(facts, answers.by_kernel(variant))

    def _peers(self, answers: Answers) -> Iterator[_Guarded]:
        for peer in self.peers:
            entrant = _Guarded(Contestant(name=peer.name), answers.by_peer(peer))
            why_not = peer.why_not(answers.problem)
            if why_not is not None:
                entrant.mark(state=State.ABSENT, detail=why_not)
            yield entrant

    def _check(self, entrant: _Guarded, answers: Answers) -> None:
        """Runs a contestant and compares it with the reference."""
        if entrant.contestant.state is not State.OK:
            return
        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            answer = entrant()
        if entrant.failed and (why := _why(said)):
            entrant.mark(detail=f"{entrant.contestant.detail} ({why})")
        try:
            self._settle(entrant, answers.problem)
            entrant.mark(first_s=time.perf_counter() - begin)
            if not entrant.failed:
                judged = answers.judge(answer, entrant, ours=entrant.contestant.ours)
                entrant.mark(max_error=judged.max_error, allowed=judged.allowed)
                if judged.wrong:
                    entrant.mark(state=State.WRONG, detail=judged.wrong)
        except torch.cuda.OutOfMemoryError as error:
            entrant.fail(error)
        if entrant.contestant.state is not State.OK:
            entrant.call = None  # and its copies of the inputs with it
            torch.cuda.empty_cache()

    def _settle(self, entrant: _Guarded, problem: Problem) -> None:
        """Waits for the GPU, which tells what went wrong there."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise _broken(entrant.contestant.name, problem, error) from None

    def _stopwatch(self, op: Op) -> Stopwatch:
        if op not in self.stopwatches:
            self.stopwatches[op] = Stopwatch(self.device, spins=BACKWARD_SPINS if op is Op.BACKWARD else 1)
        return self.stopwatches[op]

    def _time(self, right: list[_Guarded], op: Op) -> tuple[Timing, tuple[Pulse, ...], str]:
        """Times those that are right, all in the same way."""
        if not right:
            return Timing.EVENTS, (), ""
        stopwatch = self._stopwatch(op)
        stopwatch.warm()
        guesses = {entrant.contestant.name: min(stopwatch.samples(entrant, GUESSES)) for entrant in right}
        named = {entrant.contestant.name: entrant for entrant in right if not entrant.failed}
        counts, note = dict.fromkeys(named, 1), ""
        calls: dict[str, timer.Call] = {**named}
        late = any(statistics.median(entrant.host_us[-GUESSES:]) > stopwatch.hidden_us for entrant in named.values())
        # Autograd runs a backward pass on the stream of its forward pass, which is not the one that a graph records.
        by_graph = op is Op.FORWARD and (late or any(guesses[name] < SMALL_US for name in named))
        if by_graph:
            try:
                for name, entrant in named.items():
                    counts[name] = max(1, min(GRAPH_CALLS, int(GRAPH_US / guesses[name])))
                    calls[name] = stopwatch.cold_graph(entrant.recorded, counts[name])
                calls[FLUSHES] = stopwatch.flushes(GRAPH_CALLS)
            except Exception as error:  # then all are timed without, in the same way
                torch.cuda.synchronize(self.device)
                calls, counts, by_graph = {**named}, dict.fromkeys(named, 1), False
                note = f"timed without CUDA graphs: {reason_of(error)}"
        for entrant in right:
            entrant.host_us.clear()
        taken = stopwatch.rounds(
            calls, seconds=self.options.seconds * len(named), seed=self.options.seed, count=self.options.rounds
        )
        flush_us = statistics.median(taken.times_us[FLUSHES]) / GRAPH_CALLS if by_graph else 0.0
        for name, entrant in named.items():
            if entrant.failed:
                continue
            times = tuple(sample / counts[name] - flush_us for sample in taken.times_us[name])
            host = statistics.median(entrant.host_us) if entrant.host_us and not by_graph else None
            entrant.mark(times_us=times, calls=counts[name], host_us=host)
            if host is not None and host > stopwatch.hidden_us:
                entrant.note(
                    f"its host takes more than the {stopwatch.hidden_us:.0f} us that the first spin hides; "
                    "its time may have some"
                )
        return Timing.GRAPH if by_graph else Timing.EVENTS, tuple(taken.pulses), note


def _why(said: Iterable[warnings.WarningMessage]) -> str:
    """What PyTorch warns of when a backend does not take the inputs, without what it says of the other backends."""
    texts = [" ".join(str(warning.message).split()).split(" (Triggered internally")[0] for warning in said]
    return "; ".join(text for text in texts if not re.search(r"not used because|runtime disabled", text))[:300]


def current_device() -> torch.device:
    """The device that rows are benched on."""
    return torch.device("cuda", torch.cuda.current_device())


def _broken(who: str, problem: Problem, error: Exception) -> StateError:
    return StateError(
        f"the GPU must go on after each contestant, but {who} broke it on {problem} ({reason_of(error)}); bench "
        "without it, or the other rows with --only"
    )
