"""Compares calls that nobody tuned with tuned ones and with the best peer: `python benchmarks/untuned.py --seed 7`.

Needs a GPU. A seed draws realistic calls (`drawn_calls.py`). For each, these contestants meet in one process, in
interleaved rounds, once their answers were checked:

- untuned: what a call runs whose user never tuned, beside the shipped cache
- default: what it runs without any cache
- predicted: with --predicted DIR, what the predictions in DIR make it run, which `autoattn tune` made without the card
- tuned: what it runs after `autoattn tune --effort EFFORT`; not with --effort none, unless --cache was tuned before
- the peers of `autoattn bench`

Of untuned, default and predicted, those that run the same kernel are timed once.

Ratios above 1 say that the first one is faster. --cache DIR keeps what is tuned, so that a second run goes on. Ctrl-C
keeps what was compared.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import drawn_calls
import environment
from kept import keep

from autoattn import functional
from autoattn.baselines import external
from autoattn.baselines.external import Peer
from autoattn.bench import entrants, kernel_bench
from autoattn.bench.kernel_results import Contestant, Options, Row
from autoattn.cache import store
from autoattn.core import paired_stats
from autoattn.core.cache_entry import KERNEL
from autoattn.core.device import Device
from autoattn.core.paired_stats import Interval, Round
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant
from autoattn.hardware import nvidia
from autoattn.report import figures
from autoattn.runtime.plan import cache_lookup
from autoattn.runtime.plan.explanations import Explanation
from autoattn.search import search_options, tuner
from autoattn.search.search_options import Effort, Progress

TUNED, UNTUNED, DEFAULT, PREDICTED = "tuned", "untuned", "default", "predicted"
MEASURED = Path(__file__).resolve().parent / "data" / "portfolios"  # what the shipped portfolio rests on
PEERS = "sdpa-flash,sdpa-cudnn,sdpa-efficient,flex,fa4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a call of a problem runs, by the name of a contestant."""

    problem: Problem
    explanations: Mapping[str, Explanation]

    def kernels(self) -> dict[str, Variant]:
        """The kernels that run, each by the first contestant that runs it; that of untuned calls comes first."""
        kernels: dict[Variant, str] = {}
        for name, explanation in self.explanations.items():
            if explanation.route == KERNEL and explanation.variant is not None:
                kernels.setdefault(explanation.variant, name)
        return {name: variant for variant, name in kernels.items()}

    def timed_as(self, name: str) -> str:
        """The contestant whose times are those of `name`: the first with its kernel, or the backend that runs."""
        explanation = self.explanations[name]
        if explanation.route != KERNEL:
            return explanation.route
        return next((first for first, variant in self.kernels().items() if variant == explanation.variant), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One problem's contestants, as their times compare."""

    row: Row
    choices: Choices
    times_us: Mapping[str, float]  # TUNED, UNTUNED, ... -> median; without those that have none
    best_peer: Contestant | None
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # "A over B" -> B's time over A's

    def ratio(self, name: str, over: str) -> float | None:
        """How many times as fast `name` is as `over`; None where one of the two has no time."""
        other = self.best_peer.median_us if over == "peer" and self.best_peer is not None else self.times_us.get(over)
        own = self.times_us.get(name)
        return other / own if own and other else None


def choices(problems: Sequence[Problem], card: Device, predicted: Path | None) -> list[Choices]:
    """What calls run before anything is tuned; a folder without entries stands for a user who never tuned."""
    with tempfile.TemporaryDirectory() as empty, _user_cache(Path(empty)):
        return [
            Choices(
                problem=problem,
                explanations={
                    UNTUNED: cache_lookup.explain(problem, card),
                    DEFAULT: cache_lookup.explain(problem, card, Path(empty)),
                    **({PREDICTED: cache_lookup.explain(problem, card, predicted)} if predicted is not None else {}),
                },
            )
            for problem in problems
        ]


@contextmanager
def _user_cache(folder: Path) -> Iterator[None]:
    """Makes a folder the user's cache."""
    try:
        with environment.variable("AUTOATTN_CACHE", str(folder)):
            functional.forget()
            yield
    finally:
        functional.forget()


def standings(
    drawn: Sequence[Choices], peers: list[Peer], seconds: float, seed: int, *, tuned: bool
) -> Iterator[Standing]:
    """Times all contestants of each problem; the user's cache is the one that was tuned, or is empty."""
    by_problem = {choice.problem: choice for choice in drawn}
    beside = {choice.problem.key: timed_beside(choice, tuned=tuned) for choice in drawn}
    options = Options(seconds=seconds, seed=seed, beside=beside)
    for row in kernel_bench.rows([choice.problem for choice in drawn], peers, options):
        yield standing(row, by_problem[row.problem], tuned=tuned)


def timed_beside(choices: Choices, *, tuned: bool) -> dict[str, Variant]:
    """The kernels that are timed beside what a call runs now; where nothing was tuned, that is what runs untuned."""
    return {name: variant for name, variant in choices.kernels().items() if tuned or name != UNTUNED}


def gathered(compared: Iterable[Standing], count: int) -> list[Standing]:
    """All of so many, told as they come; where Ctrl-C ends the run, those that there are."""
    comparisons: list[Standing] = []
    with suppress(KeyboardInterrupt):
        for each in compared:
            comparisons.append(each)
            print(f"[{len(comparisons)}/{count}] {each.row.problem}: {_times(each)}", file=sys.stderr)
    return comparisons


def _times(each: Standing) -> str:
    """Of the contestants and of the best peer, in microseconds; all that is left of a run that was killed."""
    peer = {} if each.best_peer is None else {each.best_peer.name: each.best_peer.median_us}
    times_us = dict(each.times_us) | peer
    return ", ".join(f"{name} {figures.microseconds(time_us)} us" for name, time_us in times_us.items())


def standing(row: Row, choices: Choices, *, tuned: bool) -> Standing:
    """How the contestants of a row compare; a choice of a backend has the backend's time.

    Args:
        tuned: whether `autoattn tune` chose what the row's own call runs. If not, an untuned call runs it.
    """
    timed = {contestant.name: contestant for contestant in row.contestants if contestant.timed}
    aliases = {name: choices.timed_as(name) for name in choices.explanations}
    if tuned:
        aliases[TUNED] = entrants.OURS
    else:
        aliases = {name: entrants.OURS if alias == UNTUNED else alias for name, alias in aliases.items()}
    counting = {name: timed[alias] for name, alias in aliases.items() if alias in timed}
    best_peer = row.best_peer
    intervals = {}
    pairs = [(name, TUNED) for name in (UNTUNED, DEFAULT, PREDICTED)] + [(UNTUNED, "peer"), (PREDICTED, DEFAULT)]
    for name, over in pairs:
        other = best_peer if over == "peer" else counting.get(over)
        if name in counting and other is not None and counting[name] is not other:
            samples = zip(counting[name].times_us, other.times_us, strict=True)
            rounds = [Round(times_us={"own": own, "other": of_other}) for own, of_other in samples]
            lead = paired_stats.interval(rounds, "other", "own", finalists=1)
            if lead is not None:
                intervals[f"{name} over {over}"] = lead
    return Standing(
        row=row,
        choices=choices,
        times_us={name: contestant.median_us for name, contestant in counting.items()},
        best_peer=best_peer,
        intervals=intervals,
    )


def table(standings: Sequence[Standing]) -> list[str]:
    """A row for each problem."""
    names = [name for name in (UNTUNED, DEFAULT, PREDICTED, TUNED) if any(name in s.times_us for s in standings)]
    head = ["problem", "level", *(f"{name} us" for name in names), "best peer us", "peer"]
    ratios = _pairs(standings)
    lines = ["| " + " | ".join([*head, *(f"{name} over {over}" for name, over in ratios)]) + " |"]
    lines.append("|---|---|" + "--:|" * (len(names) + 1) + "---|" + "--:|" * len(ratios))
    for each in standings:
        level = each.choices.explanations[UNTUNED].level.value
        cells = [str(each.row.problem), level]
        cells += [figures.microseconds(each.times_us[name]) if name in each.times_us else "-" for name in names]
        peer = each.best_peer
        cells += [figures.microseconds(peer.median_us), peer.name] if peer is not None else ["-", "-"]
        for name, over in ratios:
            ratio, lead = each.ratio(name, over), each.intervals.get(f"{name} over {over}")
            cells.append(
                "-" if ratio is None else f"{ratio:.3f}" + (f" ({lead.low:.3f} to {lead.high:.3f})" if lead else "")
            )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def summary(standings: Sequence[Standing]) -> list[str]:
    """A row for each pair of contestants: how many times as fast the first is."""
    lines = ["| | problems | geometric mean | lowest | below 0.9 | its lowest problem |", "|---|--:|--:|--:|--:|---|"]
    for name, over in _pairs(standings):
        known = [(ratio, each) for each in standings if (ratio := each.ratio(name, over)) is not None]
        if not known:
            continue
        lowest, worst = min(known, key=lambda pair: pair[0])
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in known))
        below = sum(ratio < 0.9 for ratio, _ in known)
        lines.append(
            f"| {name} over {over} | {len(known)} | {mean:.3f} | {lowest:.3f} | {below} | {worst.row.problem} |"
        )
    return lines


def _pairs(standings: Sequence[Standing]) -> list[tuple[str, str]]:
    pairs = [
        (UNTUNED, TUNED), (UNTUNED, "peer"), (DEFAULT, TUNED), (DEFAULT, "peer"), (PREDICTED, TUNED),
        (PREDICTED, DEFAULT), (TUNED, "peer"),
    ]  # fmt: skip
    return [(name, over) for name, over in pairs if any(each.ratio(name, over) is not None for each in standings)]


def tune(problems: Sequence[Problem], card: Device, effort: Effort, cache: Path) -> None:
    """Tunes what is drawn, and tells of each problem when it is done."""

    def listen(progress: Progress) -> None:
        if progress.phase in ("done", "kept"):
            outcome = progress.detail if progress.best_us is None else progress.best_us
            print(f"[{progress.index + 1}/{progress.total}] {progress.problem} {outcome}", file=sys.stderr)

    options = search_options.Options(effort=effort, cache=cache)
    tuned = tuner.tune(problems, card, measured=True, options=options, listen=listen)
    print(f"tuned {len(tuned.entries)} problems in {tuned.seconds:.0f} s, {len(tuned.failed)} failed", file=sys.stderr)


def refuse_known(seed: int, measured: Path = MEASURED) -> None:
    """Ends the program for a seed whose tuned calls the portfolio has learned of (`portfolios.py finals`)."""
    for path in sorted(measured.glob(f"*_examined{seed}.jsonl")):
        sys.exit(
            "benchmarks/untuned.py examines calls that the portfolio knows nothing of, and it rests on those of seed "
            f"{seed} ({path.name}); name another --seed"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="leave out as many of the drawn calls")
    parser.add_argument("--effort", choices=["none", *(effort.value for effort in Effort)], default=Effort.QUICK.value)
    parser.add_argument("--cache", type=Path, help="keep what is tuned here")
    parser.add_argument("--predicted", type=Path, help="a cache folder with predictions for this card")
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--seconds", type=float, default=0.2, help="of rounds, for each contestant")
    parser.add_argument("--write", action="store_true", help="keep the page under benchmarks/results/")
    options = parser.parse_args()
    refuse_known(options.seed)
    card = nvidia.present()
    if card is None:
        sys.exit("benchmarks/untuned.py needs an NVIDIA GPU in this machine, found none; run it where there is one")
    peers = [peer for peer in external.named(options.peers) if peer.why_missing() is None]
    drawn = choices(drawn_calls.draw(options.seed, options.count)[options.first :], card, options.predicted)
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder)
        if options.effort != "none":
            tune([choice.problem for choice in drawn], card, Effort(options.effort), cache)
        tuned = any(file.entries for file in store.read_folder(cache))
        with _user_cache(cache):
            compared = gathered(standings(drawn, peers, options.seconds, options.seed, tuned=tuned), len(drawn))
    machine = ", ".join(f"{name} {value}" for name, value in kernel_bench.machine(peers).items())
    command = f"`python {shlex.join(['benchmarks/untuned.py', *sys.argv[1:]])}`"
    head = [f"# Calls that nobody tuned, {card.full_name}", "", command, "", machine, ""]
    if len(compared) < len(drawn):
        head += [f"{len(compared)} of {len(drawn)} calls were compared when the run was stopped.", ""]
    page = "\n".join([*head, *summary(compared), "", *table(compared)]) + "\n"
    print(page)
    if options.write:
        keep(f"{card.name}_untuned_{options.seed}", page)


if __name__ == "__main__":
    main()
