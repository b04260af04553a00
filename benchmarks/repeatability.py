"""How often two tunes agree: `python benchmarks/repeatability.py simulated|measured|redo ... [--write]`.

simulated: draws noisy times of a recording's variants, searches and holds the finals by the tuner's own rules, over and
over; needs no GPU. Beside it stands what the same rounds give whoever takes the lowest median.

measured: runs `autoattn tune` so many times in fresh processes on the card in this machine, each with a cache of
entries and studies that is empty, and lets the winners meet in one more contest. What was compiled is kept from one to
the next: what repeats is the search and the measurements. Ctrl-C tells of the tunes so far.

redo: reads the raw samples of finals (`<cache>/<device>/studies/*.finals.json`) and prints intervals and class anew.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from kept import keep

from autoattn.cache import finals_samples, search_recording, store
from autoattn.cache.search_recording import Recording
from autoattn.codegen import resources, search_space
from autoattn.core import device_profiles, paired_stats
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.paired_stats import Round
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Evidence, Outcome, Trial, Verdict
from autoattn.core.variant import Variant, digest_of
from autoattn.hardware import nvidia
from autoattn.hardware.timer import summary
from autoattn.search import finals, replay
from autoattn.search.finals import Decision
from autoattn.search.gpu_jobs import Finished, finalist_name
from autoattn.search.search_options import PROFILES, Effort, Objective
from autoattn.search.study import Sampler
from autoattn.search.trial_pipeline import MEASURED_WINDOW, Workshop
from autoattn.shapes import shapes_file
from autoattn.workers.worker_pool import Failure

HERE = Path(__file__).parent
RECORDINGS = HERE / "data" / "recordings" / Evidence.MEASURED.value
SPREADS = (0.002, 0.005, 0.01, 0.03)  # of one sample, as a share of its time
OUTLIERS, OUTLIER = 0.01, 1.3  # so many samples take so much longer
DRIFT = 0.02  # of the clock, common to all samples of a round
SESSION = 0.002  # by which a kernel's time differs from one process to the next: where its tensors lie, and the like
RIGHT = Verdict(ok=True, checks=1, max_error=1e-3, rms_error=1e-4, allowed=4e-3)
ROUND_GAP_US = 400.0  # beside each call: the flush of the L2, the spin, the host


# --- simulated --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What one simulated tune came to; kernels go by the digests of their sources."""

    winner: str
    members: frozenset[str]
    lowest: str  # what the lowest median of the same rounds would have chosen
    regret: float  # of the winner's true time over that of the best finalist
    lowest_regret: float
    has_best: bool  # the truly fastest finalist is in the class
    rounds: int
    decided: bool


class Noise:
    """The times of one session on one card."""

    def __init__(self, true_us: Mapping[str, float], spread: float, seed: int) -> None:
        self.rng, self.spread = random.Random(seed), spread
        # A kernel keeps its deviation for the session: its true time is what the rounds of the session can see.
        self.true_us = {name: time_us * math.exp(self.rng.gauss(0.0, SESSION)) for name, time_us in true_us.items()}

    def sample(self, name: str) -> float:
        """One sample of a kernel, in microseconds."""
        outlier = OUTLIER if self.rng.random() < OUTLIERS else 1.0
        return self.true_us[name] * outlier * math.exp(self.rng.gauss(0.0, self.spread))

    def screened(self, name: str) -> float:
        """The median of a first look."""
        return statistics.median(self.sample(name) for _ in range(20))


def contest(problem: Problem, trials: Sequence[Trial], noise: Noise, effort: Effort) -> Tuned:
    """The finals of some trials by the tuner's own rules."""
    named = {finalist_name(place): trial.digest for place, trial in enumerate(trials)}
    clock_s, common = 0.0, 1.0

    def sample(name: str) -> float:
        nonlocal clock_s
        time_us = noise.sample(named[name]) * common
        clock_s += (time_us + ROUND_GAP_US) / 1e6
        return time_us

    def pulse() -> None:
        nonlocal common
        common = math.exp(noise.rng.gauss(0.0, DRIFT))

    enough = paired_stats.stopper(list(named), seconds=PROFILES[effort].final_seconds, now=lambda: clock_s)
    taken = paired_stats.hold(list(named), sample, pulse, seed=0, enough=enough)
    times = [summary([round_.times_us[name] for round_ in taken], problem.flops(), []) for name in named]
    result = Finished(verdicts=(RIGHT,) * len(trials), measurements=tuple(times), rivals=(), rounds=tuple(taken))
    decision = finals.decide(trials, result, objective=Objective.TIME, default=trials[0].variant, previous=None)
    assert isinstance(decision, Decision), decision
    lowest = trials[min(range(len(trials)), key=lambda place: times[place].median_us)].digest
    best = min((trial.digest for trial in trials), key=noise.true_us.__getitem__)
    members = frozenset(finalist.source_digest for finalist in decision.finals.finalists if finalist.tied)
    return Tuned(
        winner=decision.winner.digest,
        members=members,
        lowest=lowest,
        regret=noise.true_us[decision.winner.digest] / noise.true_us[best] - 1,
        lowest_regret=noise.true_us[lowest] / noise.true_us[best] - 1,
        has_best=best in members,
        rounds=len(taken),
        decided=decision.finals.decided,
    )


def searched(recorded: Recording, spread: float, seed: int, effort: Effort) -> Tuned:
    """One search on noisy times, with the tuner's default seed, and its finals."""
    digests = {variant: digest_of(str(variant)) for variant in recorded.trials}
    times = {digests[variant]: trial.time_us for variant, trial in recorded.trials.items() if trial.time_us is not None}
    noise = Noise(times, spread, seed)
    limit = PROFILES[effort].trials
    shipped = search_space.load("triton/forward").seeds_for(
        recorded.header.problem, device_profiles.named(recorded.header.device)
    )
    own = recorded.space.choices
    seeds = [
        Variant.of(recorded.header.template, {name: v for name, v in shipped_seed.params if name in own})
        for shipped_seed in shipped
    ]
    study = replay.search_of(recorded, Sampler.TPE, seed=0, seeds=seeds, budget=limit)
    flying: deque[Variant] = deque()
    working: list[Trial] = []
    begun = 0
    while True:
        while begun < limit and len(flying) < MEASURED_WINDOW and (variant := study.propose()) is not None:
            flying.append(variant)
            begun += 1
        if not flying:
            break
        trial = recorded.trials[flying.popleft()]
        if trial.measurement is not None and trial.time_us is not None:
            digest = digests[trial.variant]
            looked = replace(trial.measurement, median_us=noise.screened(digest))
            trial = replace(trial, measurement=looked, digest=digest, verdict=RIGHT)
            working.append(trial)
        study.record(trial)
    trials = finals.shortlist(working, PROFILES[effort].finalists, Objective.TIME)
    return contest(recorded.header.problem, trials, noise, effort)


def met_again(entry: CacheEntry, spread: float, seed: int, effort: Effort) -> Tuned:
    """The finals of an entry's winner and candidates, at the times that the entry has for them."""
    times = {
        entry.source_digest: entry.time_us,
        **{candidate.source_digest: candidate.time_us for candidate in entry.candidates},
    }
    points = {
        entry.source_digest: entry.variant,
        **{candidate.source_digest: candidate.variant for candidate in entry.candidates},
    }
    trials = [Trial(variant=points[digest], outcome=Outcome.OK, digest=digest, report=entry.report) for digest in times]
    return contest(entry.problem, trials, Noise(times, spread, seed), effort)


def usual(winners: Sequence[object]) -> int:
    """How many have the winner that most have."""
    return Counter(winners).most_common(1)[0][1]


def agreeing(tunes: Sequence[Tuned]) -> int:
    """How many have the usual winner, or one that shares a class with it in either tune."""
    first = Counter(tune.winner for tune in tunes).most_common(1)[0][0]
    reference = frozenset().union(*(tune.members for tune in tunes if tune.winner == first))
    return sum(tune.winner in reference or first in tune.members for tune in tunes)


COLUMNS = (
    "spread of a sample", "same winner", "same class", "problems whose tunes all do", "lowest median: same winner",
    "class has the fastest", "winner above it: mean, worst", "lowest median above it: mean, worst", "rounds: median",
    "decided",
)  # fmt: skip
HEAD = [f"| {' | '.join(COLUMNS)} |", f"|{'--:|' * len(COLUMNS)}"]


def row(spread: float, groups: Sequence[Sequence[Tuned]]) -> str:
    """One line over groups of repeated tunes of one problem each."""
    tunes = [tune for group in groups for tune in group]
    regrets, lowest = [tune.regret for tune in tunes], [tune.lowest_regret for tune in tunes]
    same = sum(usual([tune.winner for tune in group]) for group in groups)
    agreed = [agreeing(group) for group in groups]
    whole = sum(count == len(group) for count, group in zip(agreed, groups, strict=True))
    by_median = sum(usual([tune.lowest for tune in group]) for group in groups)
    best = sum(tune.has_best for tune in tunes)
    return (
        f"| {spread:.1%} | {same / len(tunes):.1%} | {sum(agreed) / len(tunes):.1%} | {whole} of {len(groups)} "
        f"| {by_median / len(tunes):.1%} | {best / len(tunes):.1%} "
        f"| {statistics.fmean(regrets):.2%}, {max(regrets):.2%} "
        f"| {statistics.fmean(lowest):.2%}, {max(lowest):.2%} | {statistics.median(tune.rounds for tune in tunes):.0f} "
        f"| {sum(tune.decided for tune in tunes) / len(tunes):.1%} |"
    )


def simulated(tunes: int) -> list[str]:
    """The tables: searches of recordings, and the finals of the shipped winners and runners-up."""
    lines = []
    effort = Effort.STANDARD
    for path in sorted(RECORDINGS.glob("*.jsonl")):
        recorded = search_recording.read(path)
        lines += [f"## Search and finals: {recorded.header.problem}, {len(recorded.trials)} variants", "", *HEAD]
        for spread in SPREADS:
            lines.append(row(spread, [[searched(recorded, spread, seed, effort) for seed in range(tunes)]]))
        lines.append("")
    for file in store.read_folder(resources.shipped_cache()):
        entries = [entry for entry in file.entries.values() if entry.evidence is Evidence.MEASURED and entry.candidates]
        if not entries:
            continue
        lines += [f"## Finals of the winner and candidates of {len(entries)} problems on {file.device}", "", *HEAD]
        for spread in SPREADS:
            groups = [[met_again(entry, spread, seed, effort) for seed in range(tunes)] for entry in entries]
            lines.append(row(spread, groups))
            print(lines[-1], flush=True)
        lines.append("")
    return lines


# --- measured ---------------------------------------------------------------------------------------------------------


def tuned(arguments: Sequence[str], folder: Path) -> dict[str, CacheEntry]:
    """The entries of one `autoattn tune` in a process of its own, with a cache of its own."""
    command = [sys.executable, "-m", "autoattn", "tune", "--device", "auto", "--cache", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    card = nvidia.present()
    assert card is not None
    return store.lookup(folder, card, Op.FORWARD)


def met(problem: Problem, winners: Sequence[Variant], seconds: float) -> str:
    """The winners of several tunes in one contest of their own, in words."""
    if len(winners) == 1:
        return "one kernel"
    card = nvidia.present()
    assert card is not None
    with Workshop(card, measured=True) as shop:
        result = shop.alone(shop.final(problem, list(winners), seconds=seconds, seed=1))
    if isinstance(result, Failure):
        return f"{result.outcome.value}: {result.detail}"
    counted = paired_stats.good(result.rounds)
    names = [finalist_name(place) for place in range(len(winners))]
    ties = paired_stats.ties(counted, names)
    leads = [
        paired_stats.interval(counted, name, ties.leader, finalists=len(names)) for name in names if name != ties.leader
    ]
    words = ", ".join(f"{lead.ratio:.4f} ({lead.low:.4f}-{lead.high:.4f})" for lead in leads if lead is not None)
    return f"{len(ties.members)} of {len(names)} in one class; over the fastest: {words or 'too few rounds'}"


def measured(file: Path, group: str | None, effort: str, tunes: int, more: Sequence[str]) -> tuple[int, list[str]]:
    """How many tunes ended, and the table over them."""
    named = [
        named_problem for named_problem in shapes_file.load(file) if group is None or group in named_problem.groups
    ]
    arguments = ["--shapes", str(file), "--effort", effort, *(["--group", group] if group else []), *more]
    caches = []
    with contextlib.suppress(KeyboardInterrupt):  # what was tuned by then is told
        for number in range(tunes):
            begin = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                caches.append(tuned(arguments, Path(folder)))
            print(f"tune {number + 1} of {tunes}: {time.monotonic() - begin:.1f} s", flush=True)
    if not caches:
        raise SystemExit("no tune ended")
    tunes = len(caches)
    lines = [
        "| problem | same winner | same or one class, by the entries | distinct winners in a contest of their own "
        "| class sizes | us | rounds |",
        "|---|--:|--:|---|---|---|---|",
    ]
    for named_problem in named:
        entries = [entries[named_problem.problem.key] for entries in caches]
        winners = Counter(entry.source_digest for entry in entries)
        first = winners.most_common(1)[0][0]
        classes = [
            {each.source_digest for each in entry.finals.finalists if each.tied} if entry.finals is not None else set()
            for entry in entries
        ]
        pairs = list(zip([entry.source_digest for entry in entries], classes, strict=True))
        reference = {first}.union(*(group for winner, group in pairs if winner == first))
        agree = sum(winner in reference or first in group for winner, group in pairs)
        distinct = {entry.source_digest: entry.variant for entry in entries}
        lines.append(
            f"| {named_problem.problem} | {winners[first]} of {tunes} | {agree} of {tunes} "
            f"| {met(named_problem.problem, list(distinct.values()), 5.0)} "
            f"| {', '.join(str(len(group)) for group in classes)} "
            f"| {', '.join(f'{entry.time_us:.1f}' for entry in entries)} "
            f"| {', '.join(str(entry.finals.rounds) for entry in entries if entry.finals is not None)} |"
        )
    return tunes, [*lines, ""]


# --- redo -------------------------------------------------------------------------------------------------------------


def redone(path: Path) -> list[str]:
    """The statistics of one file of raw samples."""
    samples = finals_samples.read(path)
    if samples is None:
        raise SystemExit(f"there is no {path}")
    taken: list[Round] = list(samples.rounds)
    counted = paired_stats.good(taken)
    ours = list(samples.kernels)
    ties = paired_stats.ties(counted, ours)
    winner = next(name for name, digest in samples.kernels.items() if digest == samples.winner)
    lines = [
        f"## {samples.problem}, {samples.fingerprint}",
        "",
        f"{len(taken)} rounds, {len(taken) - len(counted)} of them discarded; winner {samples.winner}, "
        f"class of {len(ties.members)}{'' if ties.decided else ', undecided'}.",
        "",
        "| contestant | median us | time over the winner's | class |",
        "|---|--:|--:|---|",
    ]
    medians = {name: statistics.median(round_.times_us[name] for round_ in counted) for name in taken[0].times_us}
    for name in sorted(medians, key=medians.__getitem__):
        lead = None if name == winner else paired_stats.interval(counted, name, winner, finalists=len(ours))
        words = f"{lead.ratio:.4f} ({lead.low:.4f}-{lead.high:.4f})" if lead is not None else "-"
        tied = "tied" if name in ties.members else ""
        lines.append(f"| {samples.kernels.get(name, name)} | {medians[name]:.2f} | {words} | {tied} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode in ("simulated", "measured"):
        subparser = modes.add_parser(mode)
        subparser.add_argument("--tunes", type=int, default=20)
        subparser.add_argument("--write", action="store_true", help="keep the tables under benchmarks/results/")
        if mode == "measured":
            subparser.add_argument("--shapes", type=Path, required=True)
            subparser.add_argument("--group")
            subparser.add_argument("--effort", default="quick")
            subparser.add_argument("more", nargs="*", help="further options of autoattn tune, behind --")
    modes.add_parser("redo").add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.mode == "redo":
        print("\n".join(line for path in options.files for line in redone(path)))
        return
    if options.mode == "simulated":
        lines = simulated(options.tunes)
        about = (
            "Each tune holds its finals by the tuner's own rules and the budget of `standard`. A sample has the spread "
            f"given, {OUTLIERS:.0%} of samples take {OUTLIER:g} times as long, {DRIFT:.0%} of drift is common to a "
            f"round, and a kernel's true time differs by {SESSION:.1%} from one tune to the next (assumed figures). "
            '"Same class": the usual winner, or one that shares a class with it in either tune. "Above it": above the '
            "true time of the fastest finalist. The lowest median is that of the same rounds."
        )
    else:
        tunes, lines = measured(options.shapes, options.group, options.effort, options.tunes, options.more)
        card = nvidia.present()
        assert card is not None
        about = (
            f"{card.full_name}, driver {nvidia.driver_version()}; {tunes} of {options.tunes} tunes in fresh processes, "
            "which share what is compiled and start with no entries and no studies."
        )
    title = f"# How often tunes agree, {options.mode}"
    command = f"`python benchmarks/repeatability.py {' '.join(sys.argv[1:])}`, {date.today()}."
    text = "\n".join([title, "", command, about, "", *lines]).rstrip()
    print(text)
    if options.write:
        keep(f"repeatability_{options.mode}", text)


if __name__ == "__main__":
    main()
