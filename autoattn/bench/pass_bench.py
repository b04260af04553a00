"""Benchmark of the passes of one attention: checked, then timed on the same inputs in interleaved rounds.

Everything that goes wrong with one attention becomes the state of its row, and the others go on.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch

from autoattn.bench import kernel_bench, transformer
from autoattn.bench.kernel_results import LOOSE
from autoattn.bench.pass_results import TABLES, Case, Options, Part, Row, Time
from autoattn.bench.training_bench import reason_of
from autoattn.bench.training_results import Mode, State, Whose
from autoattn.bench.transformer import Attend
from autoattn.core.device import Device
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError, StateError
from autoattn.hardware import cuda_graph, nvidia, timer
from autoattn.hardware.timer import Rounds, Stopwatch
from autoattn.runtime.plan import gradient_problem, needed_kernels
from autoattn.runtime.plan.needed_kernels import Answer
from autoattn.tensors.operands import Gradients
from autoattn.validation import gradient_check, output_check

ROWS = 32  # query rows of all sequences whose output is compared
LAUNCH_BOUND_US = 250.0  # from here down the host may need longer to enqueue a pass than the card to run it
GRAPH_CALLS, GRAPH_US = 20, 1000.0  # calls of one replay at most, and their time


class Gauge(Protocol):
    """Clock and memory of a device."""

    device: torch.device

    def samples(self, call: timer.Call, count: int) -> list[float]:
        """Times `count` calls, in microseconds each."""

    def rounds(self, calls: Mapping[str, timer.Call], *, seconds: float, seed: int) -> Rounds:
        """Interleaved rounds of some calls."""

    def graph(self, make: Callable[[], timer.Call], count: int) -> timer.Call:
        """A CUDA graph of `count` calls of what `make` gives."""

    def allocated(self) -> int:
        """Bytes that are allocated now."""

    def forget_peak(self) -> None:
        """Begins to count anew what is allocated at most."""

    def peak(self) -> int:
        """Bytes that were allocated at most since `forget_peak`."""

    def clear(self) -> None:
        """Gives back the memory that nothing uses, and tells whether the device still runs."""


class Card:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        stopwatch = Stopwatch(self.device)
        self.samples, self.rounds, self._warm = stopwatch.samples, stopwatch.rounds, stopwatch.warm
        self._graph = stopwatch.graph

    def graph(self, make: Callable[[], timer.Call], count: int) -> timer.Call:
        # A backward pass runs on the streams of its forward pass, so that the latter must know the graph's.
        with cuda_graph.side_stream(self.device) as stream:
            call = make()
            call()
        return self._graph(call, count, stream)

    def allocated(self) -> int:
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.memory_allocated(self.device))

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def clear(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self._warm()


def rows(options: Options, gauge: Gauge | None = None) -> Iterator[list[Row]]:
    """Times one call after the other, by default on the current CUDA device; gives a row for each attention.

    Raises:
        StateError: an attention has broken the CUDA context, so that nothing more can run in this process.
    """
    if gauge is None:
        gauge = Card()
        if (card := nvidia.present(gauge.device.index)) is not None:
            kernel_bench.compile_ahead(sources(options.cases(), card), card.arch)
    for case in options.cases():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case_rows = _Bench(case, options, gauge).rows()
        try:
            gc.collect()
            gauge.clear()
        except RuntimeError as error:
            raise StateError(
                "the GPU must go on after each call, but one of "
                f"{', '.join(whose.value for whose in options.attention)} "
                f"broke it on {case} ({reason_of(error)}); run the others with --attention"
            ) from None
        yield case_rows


def sources(cases: Iterable[Case], card: Device) -> list[Source]:
    """The distinct kernels of both passes that calls will run, where kernels of ours run."""
    kernels: dict[Source, None] = {}
    for case in cases:
        needs = {need.answer: need for need in needed_kernels.of_call(case.problem, card)}
        if Answer.GRADIENTS in needs:
            for answer in (Answer.OUTPUT_AND_LSE, Answer.GRADIENTS):
                kernels |= dict.fromkeys(islice(needs[answer].sources(card), 1))
    return list(kernels)


@dataclass(slots=True)
class _Entrant:
    """One attention on its way to its numbers."""

    row: Row
    attend: Attend

    def note(self, **facts: Any) -> None:
        """Notes facts of the row."""
        self.row = replace(self.row, **facts)

    def fail(self, error: Exception) -> None:
        """Makes the error the row's state."""
        state = State.MEMORY if isinstance(error, torch.OutOfMemoryError) else State.FAILED
        self.note(state=state, detail=reason_of(error))


class _Bench:
    """One call."""

    def __init__(self, case: Case, options: Options, gauge: Gauge) -> None:
        self.case, self.options, self.gauge = case, options, gauge
        self.causal = TABLES[case.table].causal

    def rows(self) -> list[Row]:
        entrants = [
            _Entrant(Row(case=self.case, whose=whose), transformer.attention_of(
                whose, self.case.context, self.gauge.device, causal=self.causal
            ))
            for whose in self.options.attention
        ]  # fmt: skip
        try:
            self._judge_and_time(entrants)
        except (torch.OutOfMemoryError, AutoattnError) as error:  # of inputs and of what is to be expected
            for entrant in entrants:
                if not entrant.row.times:
                    entrant.fail(error)
        return [entrant.row for entrant in entrants]

    def _judge_and_time(self, entrants: list[_Entrant]) -> None:
        problem = self.case.problem
        generator = torch.Generator().manual_seed(self.options.seed)
        judged = gradient_check.full_case(gradient_problem.backward_of(problem), self.gauge.device, generator)
        outputs = output_check.case_of(problem, judged.operands, generator, rows=ROWS)
        three = judged.operands.query, judged.operands.key, judged.operands.value
        self.leaves = tuple(tensor.detach().requires_grad_() for tensor in three)
        self.pull = judged.saved.output_grad
        for entrant in entrants:
            try:
                self._check(entrant, outputs, judged)
                if entrant.row.state is State.OK:
                    self._weigh(entrant)
                    ran = transformer.ran(entrant.row.whose, Mode.EAGER, *self.leaves, causal=self.causal)
                    entrant.note(ran=ran)
            except Exception as error:
                entrant.fail(error)
            gc.collect()
        right = [entrant for entrant in entrants if entrant.row.state is State.OK]
        for part in Part:
            self._time(right, part)

    def _check(self, entrant: _Entrant, outputs: output_check.Case, judged: gradient_check.Case) -> None:
        """Compares the output and the gradients with the reference's."""
        output = entrant.attend(*self.leaves)
        query, key, value = torch.autograd.grad(output, self.leaves, self.pull)
        gradients = Gradients(query=query, key=key, value=value)
        errors = {name: (error, judged.allowed[name]) for name, (error, _) in
                  gradient_check.errors_by_name(gradients, judged).items()}  # fmt: skip
        errors["output"] = output_check.errors(output.detach(), outputs)[0], outputs.allowed
        loose = 1.0 if entrant.row.whose is Whose.OURS else LOOSE
        for name, (error, allowed) in errors.items():
            if not error <= loose * allowed:
                what = name if name == "output" else f"{name}'s gradient"
                detail = f"the {what} has error {error:.3g} where {loose * allowed:.3g} is allowed"
                entrant.note(state=State.WRONG, detail=detail)

    def _weigh(self, entrant: _Entrant) -> None:
        """What is allocated, as if nothing else were in the memory."""
        own = sum(tensor.numel() * tensor.element_size() for tensor in (*self.leaves, self.pull))
        base = self.gauge.allocated() - own
        self.gauge.forget_peak()
        output = entrant.attend(*self.leaves)
        before = self.gauge.allocated() - base
        torch.autograd.grad(output, self.leaves, self.pull)
        entrant.note(before_bytes=before, peak_bytes=self.gauge.peak() - base)

    def _call(self, attend: Attend, part: Part) -> timer.Call:
        """A part of a step, ready to be timed.

        Its leaves are its own: autograd goes back to the stream on which a leaf was first used, and a graph that is
        captured on another stream must not wait for that one.
        """
        leaves = tuple(leaf.detach().requires_grad_() for leaf in self.leaves)
        if part is Part.FORWARD:
            return partial(attend, *leaves)
        if part is Part.BACKWARD:
            output = attend(*leaves)
            return partial(torch.autograd.grad, output, leaves, self.pull, retain_graph=True)
        return lambda: torch.autograd.grad(attend(*leaves), leaves, self.pull)

    def _time(self, entrants: list[_Entrant], part: Part) -> None:
        """Times a part of all, in the same way: by CUDA graphs where the host could hold one of them up."""
        if not entrants:
            return
        named = {entrant.row.whose.value: entrant for entrant in entrants}
        try:
            calls = {name: self._call(entrant.attend, part) for name, entrant in named.items()}
            guesses = {name: min(self.gauge.samples(call, 3)) for name, call in calls.items()}
            counts, graph = dict.fromkeys(named, 1), min(guesses.values()) < LAUNCH_BOUND_US
            if graph:
                try:
                    wanted = {name: max(1, min(GRAPH_CALLS, int(GRAPH_US / guess))) for name, guess in guesses.items()}
                    makers = {name: partial(self._call, entrant.attend, part) for name, entrant in named.items()}
                    calls = {name: self.gauge.graph(make, wanted[name]) for name, make in makers.items()}
                    counts = wanted
                except Exception as error:  # then all are timed without, in the same way
                    graph = False
                    for entrant in entrants:
                        entrant.note(detail=f"{part.value} timed without CUDA graphs: {reason_of(error)}")
            seconds = self.options.seconds * len(named)
            taken = self.gauge.rounds(calls, seconds=seconds, seed=self.options.seed)
        except RuntimeError as error:  # out of memory, too; which one's it was nobody knows
            for entrant in entrants:
                entrant.note(detail=f"{part.value} not timed: {reason_of(error)}")
            return
        for name, entrant in named.items():
            samples = tuple(sample / counts[name] for sample in taken.times_us[name])
            entrant.note(times={**entrant.row.times, part: Time(samples_us=samples, calls=counts[name], graph=graph)})
