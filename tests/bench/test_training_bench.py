"""Timed training steps: whose events give which time, and what becomes of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoattn import functional
from autoattn.bench import training_bench, transformer
from autoattn.bench.training_results import Mode, Numbers, Options, Row, State, Times, Whose
from autoattn.bench.transformer import Size
from autoattn.errors import StateError

pytestmark = pytest.mark.sampled

TINY = Size(name="tiny", width=32, hidden=64, layers=2, heads=2, vocabulary=50)
NAMES = ("whole begins", "forward begins", "forward ends", "backward begins", "backward ends", "whole ends")


class Gauge:
    """A device that is the CPU, whose events are the numbers of their marks."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.log: list[str] = []
        self.marks = 0
        self.pairs: list[tuple[int, int]] = []
        self.breaks = False

    def mark(self) -> int:
        self.log.append(NAMES[self.marks % 6])
        self.marks += 1
        return self.marks - 1

    def between(self, begin: int, end: int) -> float:
        self.pairs.append((begin % 6, end % 6))
        return {(0, 5): 100.0, (1, 2): 10.0, (3, 4): 20.0}[begin % 6, end % 6]

    def settle(self) -> None:
        self.log.append("settled")
        self.marks = 0  # also of a step that was broken off
        if self.breaks:
            raise RuntimeError("an illegal memory access was encountered")

    def hide(self) -> None:
        self.log.append("hidden")

    def clear(self) -> None:
        self.log.append("cleared")

    def forget_peak(self) -> None:
        self.log.append("peak forgotten")

    def peak(self) -> int:
        return 1 << 30


def timed(gauge: Gauge | None = None, size: Size = TINY, **options: Any) -> list[Row]:
    facts: dict[str, Any] = {
        "models": ("tiny",), "contexts": (32,), "batch": 2, "numbers": (Numbers.FLOAT32,), "modes": (Mode.EAGER,),
        "attention": (Whose.OURS, Whose.NAIVE, Whose.SDPA), "warmup": 2, "steps": 4,
    }  # fmt: skip
    return list(training_bench.rows([size], Options(**facts | options), gauge or Gauge()))


def test_forward_backward_and_total_are_each_between_events_of_their_own() -> None:
    gauge = Gauge()
    times, step_loss = training_bench.step(
        gauge,
        lambda: gauge.log.append("forward") or torch.ones(()),  # type: ignore[func-returns-value]
        lambda loss: gauge.log.append("backward"),
    )
    assert gauge.log == [
        "whole begins", "forward begins", "forward", "forward ends", "backward begins", "backward", "backward ends",
        "whole ends", "settled",
    ]  # fmt: skip
    assert times == Times(forward_ms=10.0, backward_ms=20.0, total_ms=100.0), (
        "the total is no sum, no part a difference"
    )
    assert len({event for pair in gauge.pairs for event in pair}) == 6
    assert float(step_loss) == 1.0


def test_a_row_has_the_timed_steps_alone_and_the_peak_of_these() -> None:
    gauge = Gauge()
    (row,) = timed(gauge, attention=(Whose.OURS,), warmup=2, steps=4)
    assert row.times == (Times(forward_ms=10.0, backward_ms=20.0, total_ms=100.0),) * 4
    assert gauge.log[: gauge.log.index("peak forgotten")].count("whole ends") == 2, "warm-up comes before"
    assert gauge.log.count("peak forgotten") == 4, "of the steps that count"
    assert row.peak_bytes == 1 << 30
    assert len(row.alone) == training_bench.ALONE_STEPS
    assert gauge.log.count("hidden") == training_bench.ALONE_STEPS + 2, "attention alone, and not the model's steps"


def test_attentions_take_turns_in_an_order_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Whose] = []
    attending: list[Whose] = []
    step, attention_of = training_bench.step, transformer.attention_of

    def noting(whose: Whose, *given: Any, **facts: Any) -> Callable[..., Tensor]:
        attend = attention_of(whose, *given, **facts)
        return lambda *tensors: attending.append(whose) or attend(*tensors)  # type: ignore[func-returns-value]

    def noted(*given: Any) -> Any:
        attending.clear()
        ended = step(*given)
        taken.append(attending[0])
        return ended

    monkeypatch.setattr(transformer, "attention_of", noting)
    monkeypatch.setattr(training_bench, "step", noted)
    rows = timed(steps=8, warmup=1)
    del taken[:3]  # the warm-up of each
    taken = taken[:24]
    assert [len(row.times) for row in rows] == [8] * 3
    rounds = [tuple(taken[begin : begin + 3]) for begin in range(0, 24, 3)]
    assert {frozenset(order) for order in rounds} == {frozenset((Whose.OURS, Whose.NAIVE, Whose.SDPA))}
    assert len(set(rounds)) > 1


def test_a_row_that_fails_later_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))

    def fails(*tensors: Tensor) -> Tensor:
        if next(calls) >= 4 * TINY.layers:  # two steps of warm-up, two that count
            raise torch.OutOfMemoryError("CUDA out of memory")
        return transformer.naive(*tensors)

    replaced(monkeypatch, Whose.NAIVE, fails)
    rows = timed(warmup=2, steps=6)
    assert [row.state for row in rows] == [State.OK, State.MEMORY, State.OK]
    assert [len(row.times) for row in rows] == [6, 0, 6]


def test_the_share_is_that_of_all_layers_and_amdahl_follows_from_it() -> None:
    (row,) = timed(attention=(Whose.SDPA,))
    assert row.share == pytest.approx(2 * (10.0 + 20.0) / 100.0)
    assert row.bound == pytest.approx(1 / 0.4)


@pytest.mark.parametrize("numbers", list(Numbers))
def test_rows_have_the_same_loss(numbers: Numbers) -> None:
    rows = timed(numbers=(numbers,))
    assert [row.state for row in rows] == [State.OK] * 3
    assert [row.loss for row in rows] == pytest.approx([rows[0].loss] * 3, rel=training_bench.ALLOWED[numbers])


@pytest.mark.parametrize(("numbers", "dtype"), [(Numbers.FLOAT32, torch.float32), (Numbers.BFLOAT16, torch.bfloat16)])
def test_autoattn_runs_in_its_own_rows_alone(
    numbers: Numbers, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands: list[Tensor] = []
    attention = functional.attention

    def noted(*tensors: Tensor, **given: Any) -> Any:
        operands.extend(tensors)
        return attention(*tensors, **given)

    monkeypatch.setattr(functional, "attention", noted)
    timed(attention=(Whose.NAIVE, Whose.SDPA), numbers=(numbers,))
    assert not operands
    (row,) = timed(attention=(Whose.OURS,), numbers=(numbers,), warmup=1, steps=3)
    assert len(operands) == 3 * (4 * TINY.layers + 1 + training_bench.ALONE_STEPS)
    assert {tensor.dtype for tensor in operands} == {dtype}
    assert all(tensor.requires_grad for tensor in operands)
    assert row.ran.startswith("sdpa flash")


def replaced(monkeypatch: pytest.MonkeyPatch, whose: Whose, attend: Callable[..., Tensor]) -> None:
    """One of the attentions, replaced."""
    known = transformer.attention_of
    monkeypatch.setattr(
        transformer,
        "attention_of",
        lambda attention, *given: attend if attention is whose else known(attention, *given),
    )


@pytest.mark.parametrize(
    ("error", "state"),
    [(torch.OutOfMemoryError("CUDA out of memory"), State.MEMORY), (RuntimeError("no kernel"), State.FAILED)],
)
def test_a_row_that_fails_says_so_and_the_others_go_on(
    error: Exception, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*tensors: Tensor) -> Tensor:
        raise error

    replaced(monkeypatch, Whose.NAIVE, fails)
    rows = timed()
    assert [row.state for row in rows] == [State.OK, state, State.OK]
    assert str(error) in rows[1].detail
    assert not rows[1].times


def test_another_loss_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, Whose.NAIVE, lambda query, key, value: 30.0 * transformer.naive(query, key, value) + 1.0)
    rows = timed()
    assert [row.state for row in rows] == [State.OK, State.WRONG, State.OK]
    assert "its loss is" in rows[1].detail


def test_a_row_whose_steps_take_too_long_says_so() -> None:
    rows = timed(limit=0.0)
    assert [row.state for row in rows] == [State.LONG] * 3
    assert rows[0].detail == "0 of 4 steps were timed in the 0 s of --limit"


def test_weights_that_do_not_fit_are_told_in_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> transformer.Transformer:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training_bench, "Transformer", full)
    rows = timed()
    assert [row.state for row in rows] == [State.MEMORY] * 3
    assert all("the weights" in row.detail for row in rows)


def test_a_broken_context_ends_the_run_with_a_sentence() -> None:
    gauge = Gauge()
    gauge.breaks = True
    with pytest.raises(StateError, match="autoattn broke it on tiny at 32 tokens"):
        timed(gauge)


def test_no_row_leaves_gradients_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[transformer.Transformer] = []
    make = transformer.Transformer

    def kept(*given: Any) -> transformer.Transformer:
        built.append(make(*given))
        return built[-1]

    monkeypatch.setattr(training_bench, "Transformer", kept)
    timed(attention=(Whose.SDPA,))
    assert all(parameter.grad is None for parameter in built[0].parameters())


def test_a_compiled_row_compiles_the_model_and_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_(call: Any, **given: Any) -> Any:
        compiled.append(getattr(call, "__name__", type(call).__name__))
        return call

    monkeypatch.setattr(torch, "compile", compile_)
    timed(modes=(Mode.EAGER,), attention=(Whose.SDPA,))
    assert not compiled
    timed(modes=(Mode.COMPILED,), attention=(Whose.SDPA,))
    assert compiled == ["Transformer", "sdpa"]


def test_attention_alone_has_tensors_that_lie_as_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def noted(*tensors: Tensor) -> Tensor:
        output = transformer.sdpa(*tensors)
        output.register_hook(lambda pull: seen.append(("pull", pull.shape, pull.stride())))
        seen.append(tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors))
        return output

    replaced(monkeypatch, Whose.SDPA, noted)
    (row,) = timed(attention=(Whose.SDPA,), numbers=(Numbers.BFLOAT16,), warmup=1, steps=3)
    assert len(seen) == 2 * (4 * TINY.layers + 1 + training_bench.ALONE_STEPS)
    assert len(set(seen)) == 2
    assert row.timed
