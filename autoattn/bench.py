"""Our kernel and its peers side by side: one process, the same inputs, all checked, in interleaved rounds.

Everything that goes wrong with one contestant becomes a value in its row, and the others go on.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

import autoattn
from autoattn import answer, compile, dispatch, functional, gpu, measure, render, space, validate
from autoattn.arguments import Call
from autoattn.comparison import LOOSE, Contestant, Inputs, Options, Ours, Row, State, Timing
from autoattn.device import Device
from autoattn.entry import KERNEL
from autoattn.errors import AutoattnError, DeviceError, StateError
from autoattn.inputs import Scores
from autoattn.inspecting import Inspect
from autoattn.measure import Stopwatch
from autoattn.operands import Operands
from autoattn.ops import forward
from autoattn.peers import Peer
from autoattn.problem import DType, Layout, Precision, Problem
from autoattn.rounds import Pulse
from autoattn.validate import Case
from autoattn.variant import Source, Variant
from autoattn.workers import Pool

OURS = "autoattn"  # what a call of autoattn.attention runs
ROWS = 32  # query rows that are compared with the reference, of all heads and sequences
SMALL_US = 100.0  # from here down a sample is the replay of a CUDA graph
GRAPH_CALLS = 20  # in one replay, at most
WORTH_A_POOL = 3  # kernels; starting workers takes as long as compiling a few
COMPILE_SECONDS = 120.0  # for one kernel
GRAPH_US = 1000.0  # of work in one replay; fewer calls when they are longer


def machine(peers: Iterable[Peer]) -> dict[str, str]:
    """What stands in the header: the card, and versions of all that takes part.

    Raises:
        DeviceError: there is no CUDA GPU.
    """
    card = gpu.present()
    if card is None:
        raise DeviceError("autoattn bench needs an NVIDIA GPU in this machine, found none; run it where there is one")
    return {
        "card": f"{card.full_name}, sm_{card.arch}, {card.sm_count} SMs",
        "driver": gpu.driver_version() or "unknown",
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
    found: dict[Source, None] = {}
    for problem in problems:
        told = dispatch.explain(problem, card)
        ran = dispatch.variants(told, card)[:1]
        for variant in [*ran, *(_variants(told, None, card) if ours is Ours.VARIANTS else ())]:
            with suppress(AutoattnError):  # it is told where the row runs
                found[render.render(problem, variant)] = None
    return list(found)


def compile_ahead(kernels: list[Source], arch: int) -> None:
    """Fills Triton's cache by all cores, while nothing is timed; what the compiler refuses is told in its row."""
    if len(kernels) < WORTH_A_POOL:
        return
    with Pool(size=min(len(kernels), os.cpu_count() or 1)) as pool:
        for kernel in kernels:
            pool.submit(Inspect(source=kernel, arch=arch), COMPILE_SECONDS)
        while pool.next_results():
            pass


def _variants(told: dispatch.Explanation, ran: Variant | None, card: Device | None) -> list[Variant]:
    """The entry's own kernel and runners-up, then the seeds of each template; without the one that ran."""
    problem, found = told.problem, []
    if told.entry is not None:
        found = [told.entry.variant, *(candidate.variant for candidate in told.entry.candidates)]
    if problem is not None and card is not None:
        for one in space.of(problem.op):
            found += one.seeds_for(problem, card)
    return [variant for variant in dict.fromkeys(found) if variant != ran]


class _Guarded:
    """A call that remembers what it raised and how long it kept the host; once it failed, it does nothing."""

    def __init__(self, contestant: Contestant, call: Callable[[], Tensor] | None) -> None:
        self.contestant, self.call = contestant, call
        self.host_us: list[float] = []
        self.failed = call is None

    def __call__(self) -> Tensor | None:
        if self.failed or self.call is None:
            return None
        begin = time.perf_counter()
        try:
            output = self.call()
        except Exception as error:
            self.fail(error)
            return None
        self.host_us.append((time.perf_counter() - begin) * 1e6)
        return output

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
        self.device = _device()
        self.card = gpu.present(self.device.index)
        self.stopwatch = Stopwatch(self.device)

    def row(self, problem: Problem) -> Row:
        """Checks and times all contestants of one problem."""
        torch.cuda.empty_cache()
        try:
            case = self._case(problem)
        except (torch.cuda.OutOfMemoryError, AutoattnError) as error:
            return Row(problem=problem, note=f"no inputs: {reason_of(error)}")
        with _precision(problem):
            entrants = [*self._ours(case), *self._peers(case)]
            for entrant in entrants:
                self._check(entrant, case)
            right = [one for one in entrants if one.contestant.state is State.OK]
            try:
                timing, pulses, note = self._time(right)
            except RuntimeError as error:
                raise _broken(f"one of {', '.join(one.contestant.name for one in right)}", problem, error) from None
        return Row(
            problem=problem,
            contestants=tuple(one.contestant for one in entrants),
            timing=timing,
            pulses=pulses,
            note=note,
        )

    def _case(self, problem: Problem) -> Case:
        generator = torch.Generator().manual_seed(self.options.seed)
        scores = Scores.TRAINED if self.options.inputs is Inputs.TRAINED else Scores.PLAIN
        return validate.make_case(problem, self.device, generator, scores=scores, rows=ROWS, guard=0)

    def _ours(self, case: Case) -> Iterator[_Guarded]:
        """What a call runs, and on demand the kernels that it could have run."""
        try:
            told = answer.plan(Call(problem=case.problem, operands=case.operands), lse=False).explanation
        except AutoattnError as error:
            yield _Guarded(Contestant(name=OURS, ours=True, state=State.FAILED, detail=reason_of(error)), None)
            return
        route = told.variant.template if told.route == KERNEL and told.variant is not None else told.route
        first = Contestant(name=OURS, ours=True, route=route, level=told.level.value)
        if told.route == KERNEL and told.variant is not None:
            first = replace(first, variant=told.variant)
        yield _Guarded(first, front_door(case.problem, case.operands))
        if self.options.ours is not Ours.VARIANTS:
            return
        ran = told.variant if told.route == KERNEL else None
        for number, variant in enumerate(_variants(told, ran, self.card), start=1):
            facts = Contestant(name=f"variant {number}", ours=True, route=variant.template, variant=variant)
            yield _Guarded(facts, _Kernel(case, variant))

    def _peers(self, case: Case) -> Iterator[_Guarded]:
        for peer in self.peers:
            entrant = _Guarded(Contestant(name=peer.name), _Prepared(peer, case))
            why_not = peer.why_not(case.problem)
            if why_not is not None:
                entrant.mark(state=State.ABSENT, detail=why_not)
            yield entrant

    def _check(self, entrant: _Guarded, case: Case) -> None:
        """Runs a contestant once and compares it with the reference."""
        if entrant.contestant.state is not State.OK:
            return
        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            output = entrant()
        if entrant.failed and (why := _why(said)):
            entrant.mark(detail=f"{entrant.contestant.detail} ({why})")
        try:
            self._settle(entrant, case.problem)
            entrant.mark(first_s=time.perf_counter() - begin)
            if output is not None:
                error = validate.errors(output, case)[0]
                entrant.mark(max_error=error, allowed=case.allowed)
                limit = case.allowed * (1.0 if entrant.contestant.ours else LOOSE)
                if not error <= limit:
                    entrant.mark(state=State.WRONG, detail=f"error {error:.3g} where {limit:.3g} is allowed")
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

    def _time(self, entrants: list[_Guarded]) -> tuple[Timing, tuple[Pulse, ...], str]:
        """Times those that are right, all in the same way."""
        if not entrants:
            return Timing.EVENTS, (), ""
        self.stopwatch.warm()
        guesses = {one.contestant.name: min(self.stopwatch.samples(one, 3)) for one in entrants}
        named = {one.contestant.name: one for one in entrants if not one.failed}
        counts, note = dict.fromkeys(named, 1), ""
        calls: dict[str, measure.Call] = {**named}
        by_graph = any(guesses[name] < SMALL_US for name in named)
        if by_graph:
            try:
                for name, one in named.items():
                    counts[name] = max(1, min(GRAPH_CALLS, int(GRAPH_US / guesses[name])))
                    calls[name] = self.stopwatch.graph(one.recorded, counts[name])
            except Exception as error:  # then all are timed without, in the same way
                torch.cuda.synchronize(self.device)
                calls, counts, by_graph = {**named}, dict.fromkeys(named, 1), False
                note = f"timed without CUDA graphs: {reason_of(error)}"
        for one in entrants:
            one.host_us.clear()
        taken = self.stopwatch.rounds(
            calls, seconds=self.options.seconds * len(named), seed=self.options.seed, count=self.options.rounds
        )
        for name, one in named.items():
            if one.failed:
                continue
            times = tuple(sample / counts[name] for sample in taken.times_us[name])
            host = statistics.median(one.host_us) if one.host_us and not by_graph else None
            one.mark(times_us=times, calls=counts[name], host_us=host)
            if host is not None and host > measure.HIDDEN_US:
                one.mark(
                    detail=f"its host takes more than the {measure.HIDDEN_US:.0f} us that are hidden; its time has some"
                )
        return Timing.GRAPH if by_graph else Timing.EVENTS, tuple(taken.pulses), note


def _why(said: Iterable[warnings.WarningMessage]) -> str:
    """What PyTorch warns of when a backend does not take the inputs, without what it says of the other backends."""
    texts = [" ".join(str(one.message).split()).split(" (Triggered internally")[0] for one in said]
    return "; ".join(text for text in texts if not re.search(r"not used because|runtime disabled", text))[:300]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _broken(who: str, problem: Problem, error: Exception) -> StateError:
    return StateError(
        f"the GPU must go on after each contestant, but {who} broke it on {problem} ({reason_of(error)}); bench "
        "without it, or the other rows with --only"
    )


def front_door(problem: Problem, operands: Operands) -> Callable[[], Tensor]:
    """A call of `autoattn.attention`; from its plan on where other tensors than query, key and value take part."""
    special = problem.packed or problem.mask.sparse or problem.modifiers.names or problem.dtype is DType.FLOAT8
    if special:
        call = Call(problem=problem, operands=operands)
        plan = answer.plan(call, lse=False)
        return lambda: answer.run(call, plan, lse=False)[0]
    swapped = problem.layout is Layout.BSHD
    tensors = (operands.query, operands.key, operands.value)
    query, key, value = (tensor.transpose(1, 2) if swapped else tensor for tensor in tensors)
    facts: dict[str, Any] = {
        "mask": problem.mask,
        "layout": problem.layout.value,
        "precision": problem.precision.value if problem.dtype is DType.FLOAT32 else None,
        "numerics": problem.numerics.value,
    }

    def attend() -> Tensor:
        output = functional.attention(query, key, value, **facts)
        assert isinstance(output, Tensor)
        return output.transpose(1, 2) if swapped else output

    return attend


class _Prepared:
    """A peer's call, prepared when it is first made, so that a failure there is the contestant's own."""

    def __init__(self, peer: Peer, case: Case) -> None:
        self.peer, self.case = peer, case
        self.call: Callable[[], Tensor] | None = None

    def __call__(self) -> Tensor:
        if self.call is None:
            self.call = self.peer.prepare(self.case.problem, self.case.operands)
        return self.call()


class _Kernel:
    """One variant of ours, compiled when it is first called."""

    def __init__(self, case: Case, variant: Variant) -> None:
        self.case, self.variant = case, variant
        self.kernel: compile.Kernel | None = None

    def __call__(self) -> Tensor:
        problem, operands = self.case.problem, self.case.operands
        if self.kernel is None:
            self.kernel = compile.load(render.render(problem, self.variant), operands.query.device)
        output = forward.empty_output(problem, operands.query)
        forward.launch(self.kernel, problem, operands, output, None)
        return output


@contextmanager
def _precision(problem: Problem) -> Iterator[None]:
    """Lets peers form float32 products as the problem allows ours to."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if problem.precision is Precision.TF32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
