"""Compares what proposes variants, on recordings: `python benchmarks/samplers.py measured|predicted [--write]`.

Each sampler searches each recording under benchmarks/data/recordings/ once a seed of chance, with as many proposals in
flight as the tuner has on a GPU, and without the variants that a search space tries first: some of those were chosen on
such measurements, and would hide what the sampler does. Measured and predicted recordings are never in one table.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from pathlib import Path

import optuna
from kept import keep

from autoattn.cache import search_recording
from autoattn.cache.search_recording import Recording
from autoattn.codegen import search_space
from autoattn.core import device_profiles
from autoattn.core.trial import Evidence
from autoattn.core.variant import Variant
from autoattn.search import replay
from autoattn.search.replay import Run
from autoattn.search.study import Sampler
from autoattn.search.trial_pipeline import MEASURED_WINDOW

RECORDINGS = Path(__file__).parent / "data" / "recordings"
SHIPPED = "triton/forward"  # whose seeds are tried first
TRIALS = 64  # of each search: twice what `standard` spends
SHARES = (0.05, 0.02)
BUDGETS = (8, 16, 32, 64)
# Shorter searches for those that come to propose known variants over and over, which takes seconds a search.
SHORTER = {Sampler.TPE_EACH: 32, Sampler.GENETIC: 32}
DRAWS = 1000  # of the bootstrap


def recordings(evidence: Evidence) -> dict[Path, Recording]:
    return {path: search_recording.read(path) for path in sorted((RECORDINGS / evidence.value).glob("*.jsonl"))}


def seeds_of(recorded: Recording) -> list[Variant]:
    """The shipped seeds for the recording's problem, in the recording's own parameters."""
    shipped = search_space.load(SHIPPED).seeds_for(
        recorded.header.problem, device_profiles.named(recorded.header.device)
    )
    own = recorded.space.choices
    return [
        Variant.of(recorded.header.template, {name: value for name, value in seed.params if name in own})
        for seed in shipped
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    path: Path
    sampler: Sampler


def searched(setting: Setting, seed: int) -> Run:
    """One simulated search, without the variants that the shipped space tries first."""
    recorded = _read(setting.path)
    search = replay.search_of(recorded, setting.sampler, seed=seed)
    return replay.run(recorded, search, trials=SHORTER.get(setting.sampler, TRIALS), window=MEASURED_WINDOW)


_read = lru_cache(maxsize=None)(search_recording.read)


def needed(runs: Sequence[Run], share: float, quantile: float) -> str:
    """How many trials so many of the runs needed at most."""
    most = max(len(run.times_us) for run in runs)
    counts = sorted(run.trials_to(share) or most + 1 for run in runs)
    count = counts[math.ceil(quantile * len(counts)) - 1]
    return f"> {most}" if count > most else str(count)


def mean_regret(runs: Sequence[Run], trials: int) -> tuple[float, float, float]:
    """The mean over the runs, with the 95% interval of a bootstrap over them."""
    regrets = [run.regret(trials) for run in runs]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(regrets, k=len(regrets))) for _ in range(DRAWS))
    return statistics.fmean(regrets), means[round(0.025 * DRAWS)], means[round(0.975 * DRAWS) - 1]


def row(name: str, runs: Sequence[Run]) -> str:
    cells = [f"{needed(runs, share, 0.5)} / {needed(runs, share, 0.9)}" for share in SHARES]
    for trials in BUDGETS:
        if trials > len(runs[0].times_us):
            cells.append("")
            continue
        mean, low, high = mean_regret(runs, trials)
        cells.append(f"{mean:.1%} [{low:.1%}, {high:.1%}]" if math.isfinite(mean) else "none worked")
    return f"| {name} | {len(runs)} | {' | '.join(cells)} |"


def table(results: dict[Setting, list[Run]], title: str, paths: Sequence[Path]) -> list[str]:
    heads = [f"within {share:.0%}" for share in SHARES] + [f"after {trials}" for trials in BUDGETS]
    lines = [f"## {title}", "", f"| sampler | searches | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for sampler in Sampler:
        runs = [run for path in paths for run in results[Setting(path=path, sampler=sampler)]]
        lines.append(row(sampler.value, runs))
    return [*lines, ""]


def about(path: Path, recorded: Recording) -> str:
    """What a recording holds, and how far the shipped seeds come alone: some were chosen on such measurements."""
    seeds = [seed for seed in dict.fromkeys(seeds_of(recorded)) if seed in recorded.trials]
    search = replay.search_of(recorded, Sampler.ORDER, seed=0, seeds=seeds)
    regret = replay.run(recorded, search, trials=len(seeds)).regret(len(seeds))
    failed = sum(trial.time_us is None for trial in recorded.trials.values())
    return (
        f"- {recorded.header.problem}: {len(recorded.trials)} variants of {recorded.header.template}, "
        f"{failed} of which failed, best {recorded.best_us:.1f} us. "
        f"The {len(seeds)} shipped seeds among them end {regret:.1%} above it. "
        f"Times: {recorded.header.source} (`{path.name}`)."
    )


def experiment(evidence: Evidence, seeds: int, jobs: int) -> list[str]:
    """The tables of one kind of recording."""
    recordings_by_path = recordings(evidence)
    results = {}
    with ProcessPoolExecutor(jobs) as pool:
        for setting in (Setting(path=path, sampler=sampler) for path in recordings_by_path for sampler in Sampler):
            chunk = max(1, seeds // (2 * jobs))
            results[setting] = list(pool.map(partial(searched, setting), range(seeds), chunksize=chunk))
            print(f"{setting.path.stem} {setting.sampler.value}", flush=True)
    lines = [*(about(path, recorded) for path, recorded in recordings_by_path.items()), ""]
    lines += table(results, f"All {len(recordings_by_path)} together", list(recordings_by_path))
    for path, recorded in recordings_by_path.items():
        lines += table(results, str(recorded.header.problem), [path])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("evidence", choices=[kind.value for kind in Evidence])
    parser.add_argument("--seeds", type=int, default=50, help="searches of each sampler on each recording")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--write", action="store_true", help="keep the tables under benchmarks/results/")
    options = parser.parse_args()
    evidence = Evidence(options.evidence)
    lines = [
        f"# Samplers, compared by simulation on {evidence.value} times",
        "",
        f"`python benchmarks/samplers.py {evidence.value} --seeds {options.seeds}`, {date.today()}, Optuna "
        f"{optuna.__version__}: searches of {TRIALS} trials each (some samplers fewer), {MEASURED_WINDOW} proposals in "
        'flight. "Within" is the number of trials until a variant is so close to the best of its recording: of half of '
        'the searches / of nine tenths. "After" is how much slower the best of the first so many trials is: the mean, '
        "with the 95% interval of a bootstrap over the searches.",
        "",
        *experiment(evidence, options.seeds, options.jobs),
    ]
    text = "\n".join(lines).rstrip()
    print(text)
    if options.write:
        keep(f"samplers_{evidence.value}", text)


if __name__ == "__main__":
    main()
