"""Measures generation on caches of keys and values, beside PyTorch's attention and FlashInfer, on the GPU that is here.

python benchmarks/decode.py [--rounds 15] [--row TEXT] [--write]

Times are those of the GPU, by CUDA graph. Each graph holds calls on several caches in turn, which together are larger
than the L2, so that a call finds nothing of its cache there. A fraction is what a call reads and writes in its time, of
what a copy reaches (read and written) in the same process. All contestants of a row run in turn, in random order in
each round. Before they are timed, what their graphs write is compared with float32 formulas; where it is wrong, the row
says so in place of a time. Peers: SDPA's cuDNN and flash backends and FlexAttention on contiguous caches of one length,
both kernels of FlashInfer on pages where it is installed; a shared prefix meets the same call without it. autoattn runs
what was tuned for the card, or its defaults.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import torch
import triton
from cache_calls import (
    ALLOWED,
    DEVICE,
    ONE_LEVEL,
    OWN,
    ROWS,
    Call,
    Row,
    Tensors,
    by_sdpa,
    contestants,
    error_of,
    expected,
    own,
)
from kept import keep, printed
from torch import Tensor
from torch.nn.attention import SDPBackend

from autoattn.hardware import cuda_graph, nvidia
from autoattn.hardware.cuda_graph import CapturedCall

TIMES_L2 = 3  # so many times the L2 do the caches of a graph have together
MAX_COPIES = 64
REPLAYS = 3  # of a graph in a round
COPIED = 2**30  # bytes of the copy that is measured
HOST_CALLS = 200  # in a row, whose host time is measured
CapturedCalls: TypeAlias = CapturedCall[list[Tensor]]  # with an output of each call


def copies_of(row: Row) -> int:
    """Caches of a graph: enough to be larger than the L2 together."""
    cache = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return min(MAX_COPIES, max(1, math.ceil(TIMES_L2 * cache / row.bytes())))


def captured(calls: list[Call]) -> CapturedCalls:
    """A graph of the calls, one behind the other, with what only they hold, as scales and plans."""
    return cuda_graph.run_and_capture(lambda: [call() for call in calls], DEVICE, runs=2)


def timed(run: CapturedCalls) -> float:
    """Microseconds of one of the calls of a graph."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run.replay()  # the card is busy while the host records
    first.record()
    for _ in range(REPLAYS):
        run.replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e3 / (REPLAYS * len(run.output))


def copy_bandwidth(rounds: int) -> float:
    """Bytes read and written a second by a copy, the median of some rounds."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    run = captured([partial(target.copy_, source)])
    return 2 * COPIED / (statistics.median(timed(run) for _ in range(rounds)) * 1e-6)


def contest(row: Row, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Microseconds of each contestant in each round, and why the others have none."""
    tensors = [Tensors.of(row) for _ in range(copies_of(row))]
    runs: dict[str, CapturedCalls] = {}
    reasons: dict[str, str] = {}
    for name, make in contestants(row).items():
        try:
            with torch.no_grad():
                runs[name] = captured([make(each) for each in tensors])
        except Exception as error:  # whatever a peer raises
            if name == OWN:
                raise
            torch.cuda.synchronize()
            reasons[name] = "refused: " + " ".join(str(error).split())[:100]
    reasons |= wrong(runs, [expected(row, each) for each in tensors])
    times: dict[str, list[float]] = {name: [] for name in runs if name not in reasons}
    for _ in range(rounds):
        for name in random.sample([*times], len(times)):
            times[name].append(timed(runs[name]))
    return times, reasons


def wrong(runs: dict[str, CapturedCalls], right: list[Tensor]) -> dict[str, str]:
    """Which graphs write wrong answers, and how far off these are.

    Args:
        runs: all graphs of a row, so that one whose memory another has taken is found.
        right: what each call of a graph should write.
    """
    reasons = {}
    for name, run in runs.items():
        for output in run.output:
            output.fill_(math.nan)
        run.replay()
        error = max(map(error_of, run.output, right))
        if error > ALLOWED:
            reasons[name] = f"wrong: error {error:.2g}"
    return reasons


def lines_of(row: Row, times: dict[str, list[float]], reasons: dict[str, str], copy: float) -> Iterator[str]:
    """A line of markdown for each contestant."""
    for name, samples in times.items():
        median = statistics.median(samples)
        speed = row.bytes() / (median * 1e-6)
        spread = f"{median:.1f} ({min(samples):.1f} to {max(samples):.1f})"
        goal = row.goal if name == OWN else ""
        yield f"| {row} | {name} | {spread} | {speed / 1e12:.2f} | {speed / copy:.1%} | {goal} |"
    for name, why in reasons.items():
        yield f"| {row} | {name} | {why} | | | |"


def host_line(rounds: int) -> str:
    """What the host needs for a call whose lengths changed, and for a repeated call of SDPA."""
    row = Row(batch=8, heads=(32, 8), keys=512, goal="none")
    tensors = Tensors.of(row)
    calls = {OWN: own(row, tensors), "SDPA, cuDNN": by_sdpa(SDPBackend.CUDNN_ATTENTION, tensors)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            spent = 0
            for _ in range(HOST_CALLS):
                tensors.lengths.clamp_(max=row.keys)  # as a step that advances lengths writes them
                begin = time.perf_counter_ns()
                call()
                spent += time.perf_counter_ns() - begin
                torch.cuda.synchronize()
            times[name].append(spent / HOST_CALLS / 1e3)
    words = ", ".join(f"{name} {statistics.median(samples):.1f} us" for name, samples in times.items())
    return f"Host time of a call whose lengths changed: {words}."


def summary(medians: dict[str, dict[str, float]]) -> Iterator[str]:
    """How autoattn compares with the best peer of each row, and several queries with one."""
    ratios = {
        row: min(time for name, time in times.items() if name != OWN) / times[OWN]
        for row, times in medians.items()
        if OWN in times and len(times) > 1 and ONE_LEVEL not in times
    }
    if ratios:
        mean, worst = statistics.geometric_mean(ratios.values()), min(ratios, key=ratios.__getitem__)
        yield f"Best peers of {len(ratios)} rows take {mean:.3f} times as long, at least {ratios[worst]:.3f} ({worst})."
    own_times = {row: times[OWN] for row, times in medians.items() if OWN in times}
    single_query_time = own_times.get(str(ROWS[0]))
    for row in ROWS:
        if single_query_time is not None and row.queries > 1 and not row.latent and str(row) in own_times:
            yield f"{row.queries} queries take {own_times[str(row)] / single_query_time:.3f} times one query."


def table(rounds: int, only: str) -> Iterator[str]:
    """The lines of all rows whose text holds `only`."""
    copy, medians = copy_bandwidth(rounds), {}
    yield f"A copy reaches {copy / 1e12:.2f} TB/s."
    yield ""
    yield "| cache | who | GPU us | TB/s | of a copy | goal |"
    yield "|---|---|--:|--:|--:|---|"
    for row in ROWS:
        if only in str(row):
            times, reasons = contest(row, rounds)
            yield from lines_of(row, times, reasons, copy)
            medians[str(row)] = {name: statistics.median(samples) for name, samples in times.items()}
            torch.cuda.empty_cache()
    yield ""
    yield from summary(medians)
    with torch.no_grad():
        yield host_line(rounds)


def main() -> None:
    """Prints the table, and keeps it where that is asked for."""
    parser = argparse.ArgumentParser(description="Times attention on caches of keys and values beside its peers.")
    parser.add_argument("--rounds", type=int, default=15, help="of each row, in which all contestants run")
    parser.add_argument("--row", default="", help="only rows whose text holds this")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    options = parser.parse_args()
    card = nvidia.present()
    assert card is not None, "needs an NVIDIA GPU"
    torch.manual_seed(0)
    versions = f"torch {torch.__version__}, triton {triton.__version__}: `python benchmarks/decode.py`"
    lines = printed([f"# Generation on caches of keys and values, on an {card.full_name}", "", versions, ""])
    lines += printed(table(options.rounds, options.row))
    if options.write:
        keep(f"{card.name}_decode", "\n".join(lines))


if __name__ == "__main__":
    main()
