"""How samples are taken of a GPU that is made up, and what is made of them; the stopwatch itself is tested on a GPU."""

from __future__ import annotations

import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from autoattn import torch_private
from autoattn.core.paired_stats import Pulse
from autoattn.hardware.timer import SPIN_CYCLES, STUCK_SECONDS, Stopwatch, metered, summary


def test_a_summary_holds_the_median_and_the_quantiles() -> None:
    times = [float(value) for value in range(1, 102)]
    random.Random(0).shuffle(times)
    measurement = summary(times, 51_000_000, [Pulse(clock_mhz=1755, slowed=False)])
    assert (measurement.median_us, measurement.p20_us, measurement.p80_us) == (51.0, 21.0, 81.0)
    assert (measurement.samples, measurement.clock_mhz, measurement.throttled) == (101, 1755, False)
    assert measurement.tflops == pytest.approx(1.0)


@pytest.mark.parametrize("count", range(1, 30))
def test_quantiles_are_samples_that_enclose_the_median(count: int) -> None:
    times = [random.Random(count).uniform(1.0, 9.0) for _ in range(count)]
    measurement = summary(times, 1, [Pulse(clock_mhz=1000, slowed=True), Pulse(clock_mhz=1755, slowed=False)])
    assert measurement.median_us == statistics.median(times)
    assert measurement.p20_us in times
    assert measurement.p80_us in times
    assert measurement.p20_us <= measurement.median_us <= measurement.p80_us
    assert sum(time < measurement.p20_us for time in times) <= 0.2 * count
    assert sum(time > measurement.p80_us for time in times) <= 0.2 * count
    assert measurement.throttled


def test_one_outlier_moves_no_quantile() -> None:
    calm = summary([10.0] * 20, 1, [])
    shaken = summary([10.0] * 19 + [1e6], 1, [])
    assert calm == shaken


class Queue:
    """A GPU whose spins take a millisecond each, and a host whose calls take so many at first."""

    def __init__(self, late_ms: list[float]) -> None:
        self.late_ms = late_ms  # of each call in turn; 0 when there are no more
        self.spun: list[float] = []  # milliseconds in front of each sample
        self.host_ms = 0.0

    def call(self) -> None:
        self.host_ms = self.late_ms.pop(0) if self.late_ms else 0.0

    def event(self, *, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        queue, number = self, len(self.spun)
        return SimpleNamespace(
            record=lambda: None,
            query=lambda: queue.host_ms > queue.spun[number - 1],
            elapsed_time=lambda end: float(number),
        )


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue([])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    monkeypatch.setattr(torch_private, "spin", lambda cycles: queue.spun.append(cycles / SPIN_CYCLES))
    return queue


@pytest.mark.parametrize(
    ("late_ms", "spun"),
    [
        ([], [1, 1]),  # the host came in time
        ([1.5], [1, 2, 1]),  # the first sample is taken again, behind twice the spin
        ([3.5, 3.5, 3.5], [1, 2, 4, 1]),
        ([99.0, 99.0, 99.0, 99.0], [1, 2, 4, 8, 1]),  # such a host is never in time: the last sample counts
    ],
)
def test_a_sample_for_which_the_host_came_late_is_taken_again_behind_a_longer_spin(
    queue: Queue, late_ms: list[float], spun: list[int]
) -> None:
    queue.late_ms = late_ms
    stopwatch = Stopwatch(torch.device("cpu"))
    times = stopwatch.samples(queue.call, 2)
    assert queue.spun == spun
    assert times == [1e3 * (len(spun) - 1), 1e3 * len(spun)]  # of the last try of each


def test_a_call_that_hides_its_host_by_its_own_length_is_taken_once(queue: Queue) -> None:
    queue.late_ms = [99.0]
    assert len(Stopwatch(torch.device("cpu")).samples(queue.call, 2, spin=False)) == 2
    assert queue.spun == []


class Card:
    """A card of so many watts whose counter moves in steps, and calls of so many seconds."""

    def __init__(self, *, watts: float, tick: float, call: float) -> None:
        self.watts, self.tick, self.call, self.time = watts, tick, call, 0.03

    def step(self) -> int:
        self.time += 3 * self.call
        return 3

    def joules(self) -> float:
        return self.watts * self.tick * (self.time // self.tick)

    def now(self) -> float:
        return self.time


@pytest.mark.parametrize("call", [1e-4, 1e-3, 0.02])
@pytest.mark.parametrize("tick", [0.02, 0.1])
def test_energy_is_right_though_the_counter_moves_in_steps(call: float, tick: float) -> None:
    card = Card(watts=500.0, tick=tick, call=call)
    energy = metered(card.step, card.joules, card.now, seconds=1.0)
    assert energy is not None
    assert energy.watts == pytest.approx(500.0, rel=0.1 if call > 0.01 else 0.01)
    assert energy.joules == pytest.approx(500.0 * call, rel=0.1 if call > 0.01 else 0.01)


def test_energy_of_a_counter_that_stands_still_is_none() -> None:
    card = Card(watts=0.0, tick=0.1, call=1e-3)
    assert metered(card.step, card.joules, card.now, seconds=0.1) is None
    assert card.time < 2 * STUCK_SECONDS
    assert metered(card.step, lambda: None, card.now, seconds=0.1) is None
