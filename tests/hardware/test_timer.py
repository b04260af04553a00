"""What is made of samples; the stopwatch itself is tested on a GPU."""

from __future__ import annotations

import random
import statistics

import pytest

from autoattn.core.paired_stats import Pulse
from autoattn.hardware.timer import STUCK_SECONDS, metered, summary


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
