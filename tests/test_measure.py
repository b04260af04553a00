"""What is made of samples; the stopwatch itself is tested on a GPU."""

from __future__ import annotations

import random
import statistics

import pytest

from autoattn.measure import summary


def test_a_summary_holds_the_median_and_the_quantiles() -> None:
    times = [float(value) for value in range(1, 102)]
    random.Random(0).shuffle(times)
    found = summary(times, flops=51_000_000, clock_mhz=1755, throttled=False)
    assert (found.median_us, found.p20_us, found.p80_us) == (51.0, 21.0, 81.0)
    assert (found.samples, found.clock_mhz, found.throttled) == (101, 1755, False)
    assert found.tflops == pytest.approx(1.0)


@pytest.mark.parametrize("count", range(1, 30))
def test_quantiles_are_samples_that_enclose_the_median(count: int) -> None:
    times = [random.Random(count).uniform(1.0, 9.0) for _ in range(count)]
    found = summary(times, flops=1, clock_mhz=None, throttled=True)
    assert found.median_us == statistics.median(times)
    assert found.p20_us in times
    assert found.p80_us in times
    assert found.p20_us <= found.median_us <= found.p80_us
    assert sum(time < found.p20_us for time in times) <= 0.2 * count
    assert sum(time > found.p80_us for time in times) <= 0.2 * count
    assert found.throttled


def test_one_outlier_moves_no_quantile() -> None:
    calm = summary([10.0] * 20, flops=1, clock_mhz=None, throttled=False)
    shaken = summary([10.0] * 19 + [1e6], flops=1, clock_mhz=None, throttled=False)
    assert calm == shaken
