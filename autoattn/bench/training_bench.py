"""Benchmark of training steps of whole models: forward, backward and both, each between two CUDA events.

The attentions of a case take turns, a step each in random order, since what the host does in between would else be one
attention's luck. Everything that goes wrong with one row becomes its state, and the others go on.
"""

from __future__ import annotations

import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from autoattn import torch_private
from autoattn.bench import transformer
from autoattn.bench.training_results import Mode, Numbers, Options, Row, State, Times
from autoattn.bench.transformer import Attend, Size, Transformer
from autoattn.errors import StateError
from autoattn.hardware import timer

FEWEST = 3  # timed steps; a row that has fewer when its time is up is too long
ALONE_STEPS = 10  # of one layer's attention
SEED = 0
# Share by which losses of one case may differ: the same weights and tokens, rounded differently.
ALLOWED = {Numbers.FLOAT32: 1e-3, Numbers.BFLOAT16: 1e-2}


class Gauge(Protocol):
    """Clock and memory of a device."""

    device: torch.device

    def mark(self) -> Any:
        """An event, now, on the current stream."""

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds between two events that are over."""

    def settle(self) -> None:
        """Waits until all is over."""

    def hide(self) -> None:
        """Keeps the device busy while the host enqueues what comes next."""

    def clear(self) -> None:
        """Gives back the memory that nothing uses."""

    def forget_peak(self) -> None:
        """Begins to count anew what is allocated at most."""

    def peak(self) -> int:
        """Bytes that were allocated at most since `forget_peak`."""


class Card:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def hide(self) -> None:
        torch_private.spin(timer.SPIN_CYCLES)

    def clear(self) -> None:
        torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))


def step(gauge: Gauge, forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> tuple[Times, Tensor]:
    """Runs a step and waits for it.

    Returns:
        Its times, and what `forward` gave.
    """
    whole_begin = gauge.mark()
    forward_begin = gauge.mark()
    output = forward()
    forward_end = gauge.mark()
    backward_begin = gauge.mark()
    backward(output)
    backward_end = gauge.mark()
    whole_end = gauge.mark()
    gauge.settle()
    times = Times(
        forward_ms=gauge.between(forward_begin, forward_end),
        backward_ms=gauge.between(backward_begin, backward_end),
        total_ms=gauge.between(whole_begin, whole_end),
    )
    return times, output.detach()


def rows(sizes: list[Size], options: Options, gauge: Gauge | None = None) -> Iterator[Row]:
    """Times one case after the other, by default on the current CUDA device.

    Raises:
        StateError: a row has broken the CUDA context, so that nothing more can run in this process.
    """
    gauge = gauge or Card()
    for size in sizes:
        model, why = _built(size, max(options.contexts), gauge)
        for case in _planned(size, options):
            if model is None:
                yield from (replace(row, state=State.MEMORY, detail=why) for row in case)
                continue
            with warnings.catch_warnings(), torch_private.without_autograd_cache():  # it would hide what is fused
                warnings.simplefilter("ignore")  # what PyTorch's compiler has to say
                yield from _timed([_Trial(model, row, options, gauge) for row in case], options.steps)
        del model
        gc.collect()
        gauge.clear()


def _timed(trials: list[_Trial], steps: int) -> Iterator[Row]:
    """The rows of one case."""
    torch.compiler.reset()  # so that no length is taken for a dynamic one
    order = random.Random(SEED)
    for trial in trials:
        trial.guarded(trial.warm)
    for _ in range(steps):
        for trial in order.sample(trials, len(trials)):
            if trial.going:
                trial.guarded(trial.step)
    losses: list[float] = []
    for trial in trials:
        if trial.loss is not None:
            trial.guarded(trial.end)
        trial.leave()
        if trial.row.loss is not None:
            losses.append(trial.row.loss)
            yield _compared(trial.row, losses[0])
        else:
            yield trial.row


def _planned(size: Size, options: Options) -> Iterator[list[Row]]:
    """Cases: rows that differ in their attention alone."""
    for context in options.contexts:
        for numbers in options.numbers:
            for mode in options.modes:
                yield [
                    Row(
                        model=size.name, context=context, batch=options.batch, layers=size.layers, numbers=numbers,
                        mode=mode, whose=whose,
                    )
                    for whose in options.attention
                ]  # fmt: skip


def _built(size: Size, context: int, gauge: Gauge) -> tuple[Transformer | None, str]:
    """The model with the same weights at every call; None, and why, when it does not fit."""
    torch.manual_seed(SEED)
    try:
        with gauge.device:
            return Transformer(size, context), ""
    except torch.OutOfMemoryError as error:
        return None, f"the weights: {reason_of(error)}"


def _compared(row: Row, expected: float) -> Row:
    """A right row whose loss is not the others' is wrong."""
    assert row.loss is not None
    if row.state is not State.OK or abs(row.loss - expected) <= ALLOWED[row.numbers] * abs(expected):
        return row
    return replace(row, state=State.WRONG, detail=f"its loss is {row.loss:.6g}, that of the others {expected:.6g}")


def reason_of(error: Exception) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")


@dataclass(slots=True)
class _Trial:
    """One row on its way to its numbers."""

    model: Transformer
    row: Row
    options: Options
    gauge: Gauge
    attend: Attend | None = None
    forward: Callable[[], Tensor] | None = None
    taken: list[Times] = field(default_factory=list)
    loss: Tensor | None = None
    peak: int = 0  # bytes
    spent: float = 0.0  # seconds of its steps, without the first
    going: bool = True  # whether more steps may be timed

    def guarded(self, work: Callable[[], None]) -> None:
        """Does a part of the work; what goes wrong becomes the row's state."""
        try:
            work()
        except torch.OutOfMemoryError as error:
            self._failed(State.MEMORY, error)
        except Exception as error:
            self._failed(State.FAILED, error)
        else:
            return
        self.going, self.forward = False, None
        self.leave()

    def leave(self) -> None:
        """Gives back what the row had on the device."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()  # what an error held is gone by now
        try:
            self.gauge.settle()
        except RuntimeError as error:
            raise StateError(
                f"the GPU must go on after each row, but {self.row.whose.value} broke it on {self.row.model} at "
                f"{self.row.context} tokens ({reason_of(error)}); run the others with --attention"
            ) from None
        self.gauge.clear()

    def _failed(self, state: State, error: Exception) -> None:
        # An error of the attention alone takes no times from a model that has them.
        self._note(detail=reason_of(error))
        if not self.row.times:
            self._note(state=state)
            self.loss = None

    def _note(self, **facts: Any) -> None:
        self.row = replace(self.row, **facts)

    def warm(self) -> None:
        """Compiles, and takes the steps that do not count."""
        self.attend = transformer.attention_of(self.row.whose, self.row.context, self.gauge.device)
        fused = torch_private.count_fused_attention()
        compiled = self.row.mode is Mode.COMPILED
        call: Any = torch.compile(self.model, dynamic=False) if compiled else self.model
        tokens, targets = self._tokens()

        def forward() -> Tensor:
            with self._autocast():
                loss: Tensor = call(tokens, targets)
            return loss

        self.forward = forward
        for number in range(self.options.warmup):
            begin = time.monotonic()
            self._step()
            if number == 0:
                self._note(first_s=time.monotonic() - begin)
                self.spent = 0.0  # from here on, since compilers take their time
            if self.spent >= self.options.limit:
                break
        self.going = self.spent < self.options.limit
        if torch_private.count_fused_attention() > fused:
            self._note(ran="SDPA, by torch.compile")
        self.leave()

    def step(self) -> None:
        """Takes a step that counts."""
        self.gauge.forget_peak()
        self.taken.append(self._step())
        self.peak = max(self.peak, self.gauge.peak())
        self.going = self.spent < self.options.limit

    def _step(self) -> Times:
        assert self.attend is not None
        assert self.forward is not None
        self.model.attend_by(self.attend)
        self.model.zero_grad(set_to_none=True)
        begin = time.monotonic()
        times, self.loss = step(self.gauge, self.forward, Tensor.backward)
        self.spent += time.monotonic() - begin
        return times

    def end(self) -> None:
        """Notes what came of the steps, and times the attention of one layer alone."""
        if len(self.taken) < min(FEWEST, self.options.steps):
            why = (
                f"{len(self.taken)} of {self.options.steps} steps were timed in the {self.options.limit:g} s of --limit"
            )
            self._note(state=State.LONG, detail=why, ran="")
            return
        assert self.attend is not None
        assert self.loss is not None
        self._note(times=tuple(self.taken), peak_bytes=self.peak, loss=float(self.loss))
        self._attention(self.attend)

    def _tokens(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        shape = self.row.batch, self.row.context + 1
        drawn = torch.randint(self.model.size.vocabulary, shape, generator=generator).to(self.gauge.device)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def _autocast(self) -> AbstractContextManager[Any]:
        enabled = self.row.numbers is Numbers.BFLOAT16
        context: AbstractContextManager[Any] = torch.autocast(self.gauge.device.type, torch.bfloat16, enabled=enabled)
        return context

    def _attention(self, attend: Attend) -> None:
        """Times one layer's attention alone, on tensors that lie as the model's do, and notes what runs."""
        self.model.zero_grad(set_to_none=True)  # leaves it the room that the gradients took
        size = self.model.size
        dtype = torch.bfloat16 if self.row.numbers is Numbers.BFLOAT16 else torch.float32
        generator = torch.Generator(self.gauge.device).manual_seed(SEED)
        shape = self.row.batch, self.row.context, size.heads, size.head_dim
        drawn = (torch.randn(shape, generator=generator, device=self.gauge.device, dtype=dtype) for _ in range(4))
        query, key, value, pull = (tensor.transpose(1, 2) for tensor in drawn)
        query, key = query.contiguous(), key.contiguous()  # as rotary positions leave them
        leaves = tuple(tensor.requires_grad_() for tensor in (query, key, value))
        if not self.row.ran:
            with self._autocast():
                self._note(ran=transformer.ran(self.row.whose, self.row.mode, *leaves))
        call: Any = torch.compile(attend, dynamic=False) if self.row.mode is Mode.COMPILED else attend

        def forward() -> Tensor:
            with self._autocast():
                output: Tensor = call(*leaves)
            return output

        taken: list[Times] = []
        for number in range(self.options.warmup + ALONE_STEPS):
            for leaf in leaves:
                leaf.grad = None
            self.gauge.hide()
            times, _ = step(self.gauge, forward, lambda output: output.backward(pull))
            if number >= self.options.warmup:
                taken.append(times)
        self._note(alone=tuple(taken))
