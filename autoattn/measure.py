"""Time on the GPU: cold L2, warm clocks, rivals interleaved in random order.

Each sample is one call between two CUDA events. The L2 is flushed before it by writing exactly its size, and a spin
of the GPU lets the host enqueue the whole sample first, so that launch overhead is not measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autoattn import gpu
from autoattn.trial import Measurement

Call = Callable[[], object]
WARM_SECONDS = 0.15  # less leaves the first contestants slower: triton issue 2306
SPIN_CYCLES = 450_000  # about 250 us at 1.8 GHz: the host needs up to 80 us to enqueue one call of SDPA's backends
HIDDEN_US = 220.0  # of the host's time that the spin hides at any clock up to 1980 MHz, less what enqueuing it takes
HOST_BOUND_US = 2_000.0  # calls longer than this hide the host's work by themselves
LOSER = 1.5  # a call this many times slower than the best is not measured further
SCREEN_SECONDS = 0.03  # of GPU time for one variant of the search
MIN_SAMPLES, MAX_SAMPLES = 3, 40
LONG_US = 100_000.0  # a call this long is timed once or twice: its noise is small and its cost is not
MODULE_LOAD_US = 20_000.0  # what loading a module may add to a first call
MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """A quick look at one call."""

    median_us: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What a contest took, raw."""

    times_us: dict[str, list[float]]  # of each call, one sample a round
    pulses: list[gpu.Pulse]  # of the card, one a round; empty without NVML


class Stopwatch:
    """Times calls on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(size, dtype=torch.int8, device=device)
        self._warm_until = 0.0

    def warm(self) -> None:
        """Keeps the GPU busy until its clocks are up, unless it was just now."""
        begin = time.perf_counter()
        if begin < self._warm_until:
            return
        matrix = torch.randn(2048, 2048, dtype=torch.float16, device=self.device)
        while time.perf_counter() - begin < WARM_SECONDS:
            for _ in range(20):
                matrix = (matrix @ matrix).clamp_(-1.0, 1.0)
            torch.cuda.synchronize(self.device)
        self.stay_warm()

    def stay_warm(self) -> None:
        """Notes that the GPU has just worked."""
        self._warm_until = time.perf_counter() + 0.5

    def samples(self, call: Call, count: int, *, spin: bool = True) -> list[float]:
        """Times `count` calls, in microseconds each."""
        events = []
        for _ in range(count):
            self._flush.zero_()
            if spin:
                torch.cuda._sleep(SPIN_CYCLES)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize(self.device)
        self.stay_warm()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]

    def screen(self, call: Call, best_us: float | None) -> Screening:
        """A first median; stops as soon as the call is clearly no rival of the best so far."""
        self.warm()
        first = self.samples(call, 1)  # it also loads the module, which only makes it look slower
        limit = None if best_us is None else LOSER * max(best_us, MODULE_LOAD_US)
        if limit is not None and first[0] > limit:
            return Screening(median_us=first[0], samples=1)
        again = self.samples(call, 2 if first[0] < LONG_US else 1)
        guess = min(again)
        if guess >= LONG_US or (best_us is not None and guess > LOSER * best_us):
            return Screening(median_us=guess, samples=len(again))
        count = min(MAX_SAMPLES, int(SCREEN_SECONDS * 1e6 / guess))
        rest = self.samples(call, max(MIN_SAMPLES - len(again), count), spin=guess < HOST_BOUND_US)
        return Screening(median_us=statistics.median(again + rest), samples=len(again) + len(rest))

    def contest(self, calls: dict[str, Call], flops: int, *, seconds: float, seed: int) -> dict[str, Measurement]:
        """Times all calls against one another: each round runs every call once, in random order.

        Ends after `seconds`, but not before MIN_ROUNDS. `flops` are those of one call.
        """
        taken = self.rounds(calls, seconds=seconds, seed=seed)
        clock = int(statistics.median(pulse.clock_mhz for pulse in taken.pulses)) if taken.pulses else None
        slowed = any(pulse.slowed for pulse in taken.pulses)
        return {name: summary(values, flops, clock, slowed) for name, values in taken.times_us.items()}

    def rounds(self, calls: Mapping[str, Call], *, seconds: float, seed: int, count: int | None = None) -> Rounds:
        """The rounds of a contest: `count` of them, or as many as begin within `seconds` and at least MIN_ROUNDS."""
        rng = random.Random(seed)
        order = list(calls)
        times: dict[str, list[float]] = {name: [] for name in order}
        pulses: list[gpu.Pulse] = []
        self.warm()
        for call in calls.values():
            call()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        done = 0
        while (done < MIN_ROUNDS or time.perf_counter() - begin < seconds) if count is None else done < count:
            rng.shuffle(order)
            for name in order:
                times[name] += self.samples(calls[name], 1)
            done += 1
            pulse = gpu.pulse(self.index)
            pulses += [] if pulse is None else [pulse]
        return Rounds(times_us=times, pulses=pulses)

    def graph(self, call: Call, count: int) -> Call:
        """A call that replays a CUDA graph of `count` calls, one behind the other.

        Raises:
            RuntimeError: the call does something that a graph cannot hold.
        """
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(recorded):
            for _ in range(count):
                call()
        replay: Call = recorded.replay
        return replay


def summary(times_us: list[float], flops: int, clock_mhz: int | None, throttled: bool) -> Measurement:
    """Median and quantiles of a contestant's samples."""
    ordered = sorted(times_us)
    median = statistics.median(ordered)
    return Measurement(
        median_us=median,
        p20_us=ordered[int(0.2 * (len(ordered) - 1))],
        p80_us=ordered[int(0.8 * (len(ordered) - 1) + 0.999)],
        samples=len(ordered),
        tflops=flops / median / 1e6,
        clock_mhz=clock_mhz,
        throttled=throttled,
    )
