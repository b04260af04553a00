"""Times kernels on the GPU: cold L2, warm clocks, rivals interleaved in random order.

Each sample is one call between two CUDA events. The L2 is flushed before it by writing exactly its size, and a spin
of the GPU lets the host enqueue the whole sample first, so that launch overhead is not measured. A host that came late
all the same, as it does while compilers are at work on all cores, leaves a gap between the events: that sample is taken
again, behind a longer spin.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoattn import torch_private
from autoattn.core import paired_stats
from autoattn.core.paired_stats import Pulse, Round
from autoattn.core.trial import Energy, Measurement
from autoattn.hardware import cuda_graph, nvidia

Call = Callable[[], object]
WARM_SECONDS = 0.15  # less leaves the first contestants slower: triton issue 2306
SPIN_CYCLES = 450_000  # about 250 us at 1.8 GHz: the host needs up to 80 us to enqueue one call of SDPA's backends
HIDDEN_US = 220.0  # of the host's time that the spin hides at any clock up to 1980 MHz, less what enqueuing it takes
RETAKES = 3  # of a sample for which the host came late, each behind a spin twice as long as the one before
HOST_BOUND_US = 2_000.0  # calls longer than this hide the host's work by themselves
LOSER = 1.5  # a call this many times slower than the best is not measured further
SCREEN_SECONDS = 0.03  # of GPU time for one variant of the search
MIN_SAMPLES, MAX_SAMPLES = 3, 40
LONG_US = 100_000.0  # a call this long is timed once or twice: its noise is small and its cost is not
MODULE_LOAD_US = 20_000.0  # what loading a module may add to a first call
ENERGY_BATCH_US = 5_000.0  # of calls between two looks at the counter of energy
ENERGY_CALLS = 8  # at least, however long they take
ENERGY_WARM_SECONDS = 0.1  # of the same calls before: power follows load by tens of milliseconds
STUCK_SECONDS = 2.0  # a counter that stands still for so long counts nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """A quick look at one call."""

    median_us: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What a contest took, raw."""

    times_us: dict[str, list[float]]  # of each call, one sample a round
    pulses: list[Pulse]  # of the card, one a round; empty without NVML


class Stopwatch:
    """Times calls on one CUDA device.

    Args:
        spins: in front of each sample, each of SPIN_CYCLES; more of them hide more of the host's work.
    """

    def __init__(self, device: torch.device, *, spins: int = 1) -> None:
        self.device, self.spins = device, spins
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(size, dtype=torch.int8, device=device)
        self._warm_until = 0.0

    @property
    def hidden_us(self) -> float:
        """Microseconds of the host's work that are hidden before each sample."""
        return self.spins * HIDDEN_US

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
        events = [self._sample(call, self.spins if spin else 0) for _ in range(count)]
        torch.cuda.synchronize(self.device)
        self.stay_warm()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]

    def _sample(self, call: Call, spins: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueues one call between two events; behind spins, again where the GPU was done with them too soon."""
        for retake in range(RETAKES + 1):
            self._flush.zero_()
            if spins:
                torch_private.spin(spins * 2**retake * SPIN_CYCLES)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            if not spins or not begin.query():
                break
        return begin, end

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

        Ends after `seconds`, but not before three rounds. `flops` are those of one call.
        """
        taken = self.rounds(calls, seconds=seconds, seed=seed)
        return {name: summary(values, flops, taken.pulses) for name, values in taken.times_us.items()}

    def rounds(self, calls: Mapping[str, Call], *, seconds: float, seed: int, count: int | None = None) -> Rounds:
        """The rounds of a contest: `count` of them, or as many as begin within `seconds` and at least three."""
        begin = self._settled(calls)

        def enough(done: list[Round]) -> bool:
            if count is not None:
                return len(done) >= count
            return len(done) >= paired_stats.MIN_ROUNDS and time.perf_counter() - begin >= seconds

        done = self._hold(calls, seed, enough)
        return Rounds(
            times_us={name: [round_.times_us[name] for round_ in done] for name in calls},
            pulses=[round_.pulse for round_ in done if round_.pulse is not None],
        )

    def finals(self, calls: Mapping[str, Call], finalists: Sequence[str], *, seconds: float, seed: int) -> list[Round]:
        """Rounds until it is known who of the `finalists` is fastest and how they stand to the other calls, or until
        `seconds` are used (rounds.stopper)."""
        self._settled(calls)
        return self._hold(calls, seed, paired_stats.stopper(finalists, seconds=seconds, now=time.perf_counter))

    def _settled(self, calls: Mapping[str, Call]) -> float:
        """Runs every call once on a warm card; returns the time when that was done, in seconds."""
        self.warm()
        for call in calls.values():
            call()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _hold(self, calls: Mapping[str, Call], seed: int, enough: Callable[[list[Round]], bool]) -> list[Round]:
        return paired_stats.hold(
            list(calls),
            lambda name: self.samples(calls[name], 1)[0],
            lambda: nvidia.pulse(self.index),
            seed=seed,
            enough=enough,
        )

    def energy(self, call: Call, seconds: float) -> Energy | None:
        """What a call costs when calls follow one another for about `seconds`, the L2 left as they leave it.

        Returns:
            None where NVML or the card counts no energy.
        """
        if nvidia.joules(self.index) is None:
            return None
        guess = max(1.0, min(self.samples(call, 3)))
        count = max(1, int(ENERGY_BATCH_US / guess))
        batch = self._repeated(call, count, graph=guess < HIDDEN_US)
        flying: deque[torch.cuda.Event] = deque()

        def step() -> int:  # one batch stays ahead, so that the card never waits for the host
            batch()
            flying.append(torch.cuda.Event())
            flying[-1].record()
            if len(flying) <= 2:
                return 0
            flying.popleft().synchronize()
            return count

        begin = time.perf_counter()
        while time.perf_counter() - begin < ENERGY_WARM_SECONDS:
            step()
        energy = metered(
            step,
            lambda: nvidia.joules(self.index),
            time.perf_counter,
            seconds=max(seconds, ENERGY_CALLS * guess / 1e6),
        )
        torch.cuda.synchronize(self.device)
        return energy

    def _repeated(self, call: Call, count: int, *, graph: bool) -> Call:
        """So many calls as one: as a CUDA graph where the host would be slower than the card, and where that works."""
        if graph:
            try:
                return self.graph(call, count)
            except Exception:  # it does something that a graph cannot hold
                torch.cuda.synchronize(self.device)
        return _in_a_row(call, count)

    def graph(self, call: Call, count: int, stream: torch.cuda.Stream | None = None) -> Call:
        """A call that replays a CUDA graph of `count` calls, one behind the other.

        Args:
            stream: on which they are recorded; one of PyTorch's when None.

        Raises:
            RuntimeError: the call does something that a graph cannot hold.
        """
        return cuda_graph.capture(_in_a_row(call, count), self.device, stream=stream).replay

    def cold_graph(self, call: Call, count: int) -> Call:
        """A call that replays a CUDA graph of `count` calls, each behind a flush of the L2: `flushes` are in its time.

        Raises:
            RuntimeError: the call does something that a graph cannot hold.
        """
        call()  # outside of the graph, where kernels make the zeros that graphs are given (`zeroed_scratch`)
        return self.graph(lambda: (self._flush.zero_(), call()), count)

    def flushes(self, count: int) -> Call:
        """A call that replays a CUDA graph of as many flushes of the L2."""
        return self.graph(self._flush.zero_, count)


def _in_a_row(call: Call, count: int) -> Callable[[], None]:
    """So many calls as one, whose outputs are let go."""

    def several() -> None:
        for _ in range(count):
            call()

    return several


def metered(
    step: Callable[[], int], joules: Callable[[], float | None], now: Callable[[], float], *, seconds: float
) -> Energy | None:
    """Energy by a counter that moves in steps: from one of its steps to one at least `seconds` later.

    Args:
        step: keeps the card busy for a few milliseconds; returns how many calls were finished.

    Returns:
        None where the counter stands still.
    """

    def next_step() -> tuple[float, float, int] | None:
        before, begin, finished = joules(), now(), 0
        while now() - begin < STUCK_SECONDS:
            finished += step()
            after = joules()
            if before is not None and after is not None and after != before:
                return after, now(), finished
        return None

    first = next_step()
    if first is None:
        return None
    calls = 0
    while now() - first[1] < seconds:
        calls += step()
    last = next_step()
    if last is None or calls + last[2] == 0:
        return None
    used = last[0] - first[0]
    return Energy(joules=used / (calls + last[2]), watts=used / (last[1] - first[1]))


def summary(times_us: Sequence[float], flops: int, pulses: Sequence[Pulse]) -> Measurement:
    """Median and quantiles of a contestant's samples, with what the card did meanwhile."""
    ordered = sorted(times_us)
    median = statistics.median(ordered)
    return Measurement(
        median_us=median,
        p20_us=ordered[int(0.2 * (len(ordered) - 1))],
        p80_us=ordered[int(0.8 * (len(ordered) - 1) + 0.999)],
        samples=len(ordered),
        tflops=flops / median / 1e6,
        clock_mhz=int(statistics.median(pulse.clock_mhz for pulse in pulses)) if pulses else None,
        throttled=any(pulse.slowed for pulse in pulses),
    )
