"""How near quick effort comes to the best there is: `python benchmarks/exhaustive.py measure|table ...`.

measure: tunes the problems of benchmarks/shapes/speed.yaml at quick effort from empty caches, in one run; then measures
many more variants of each: all that the tune tried on any problem of the same kind of kernel, the seeds of both
families, so many random feasible ones of each, and so many that differ from one of the kind's winners in one parameter.
Problems of a kind share these, so that each kernel is compiled once. The whole space has millions of points that nobody
can measure: "the best" is the best of those. The fastest of them by their screenings and the winner then meet in one
contest in one process, in interleaved rounds. Writes one line of JSON a problem, as soon as it is there, into FILE, and
goes on after the problems that are in it. With `--shard 0/2` and `--shard 1/2` two processes share the problems, each
with a card of its own (CUDA_VISIBLE_DEVICES).

table: the tables of such files.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from kept import tell
from speed import SHAPES, Write, card, empty_caches, machine, sampled, table

from autoattn.core import paired_stats
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.search import finals, multi_template, shared_trials, storage
from autoattn.search import tuner as tuning
from autoattn.search.gpu_jobs import finalist_name
from autoattn.search.multi_template import Contest
from autoattn.search.search_options import Effort, Objective, Options, Progress
from autoattn.search.study import Study
from autoattn.search.trial_pipeline import Steps, Workshop
from autoattn.shapes import shapes_file
from autoattn.workers.worker_pool import Failure

MET = 5  # of the other variants that meet the winner, by their screenings
SECONDS = 2.0  # of that contest, at most
AT_ONCE = 3  # problems whose variants are measured together, so that compilers and GPU both have work
NEAR = 0.02

app = typer.Typer(help=__doc__, add_completion=False)


def kinds(shard: int, shards: int) -> list[list[Problem]]:
    """The problems of a shard, those of one kind of kernel together: they share what is compiled."""
    groups: dict[str, list[Problem]] = {}
    for named in shapes_file.load(SHAPES):
        groups.setdefault(named.groups[0], []).append(named.problem)
    parts: list[list[list[Problem]]] = [[] for _ in range(shards)]
    for group in groups.values():
        min(parts, key=lambda part: sum(map(len, part))).append(group)
    return parts[shard]


@dataclass(slots=True, kw_only=True)
class Tuned:
    """What quick effort made of a problem."""

    winner: Variant
    choice: str
    trials: int
    seconds: float  # from its first result to its entry; several problems overlap
    tried: list[Variant]


def tuned(problems: Sequence[Problem], folder: Path) -> tuple[dict[str, Tuned], float]:
    """Quick effort's entries by problem key, and the seconds of the whole run."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}

    def listen(progress: Progress) -> None:
        first.setdefault(progress.problem.key, time.monotonic())
        last[progress.problem.key] = time.monotonic()

    options = Options(effort=Effort.QUICK, cache=folder)
    summary = tuning.tune(problems, card(), measured=True, options=options, listen=listen)
    if summary.interrupted:  # what is measured next would not be what quick effort is
        raise typer.Abort
    for key, reason in summary.failed.items():
        print(f"no winner: {key}: {reason}", flush=True)
    outcomes = {}
    for key, entry in summary.entries.items():
        journal = folder / card().name / "studies" / f"{key}.journal"
        tried = [
            trial.variant for trials in shared_trials.studies(storage.unchanged(journal)).values() for trial in trials
        ]
        outcomes[key] = Tuned(
            winner=entry.variant,
            choice=entry.choice,
            trials=entry.search.trials,
            seconds=last[key] - first[key],
            tried=tried,
        )
    return outcomes, summary.seconds


def neighbours(problem: Problem, winner: Variant, count: int, chance: random.Random) -> list[Variant]:
    """Some of the feasible variants that differ from the winner in one parameter."""
    space = next(
        candidate for candidate in multi_template.spaces(problem, card(), True) if candidate.template == winner.template
    )
    params = space.params_of(winner)
    near = [
        space.variant({**params, name: value})
        for name, values in space.choices.items()
        for value in values
        if value != params[name]
    ]
    near = [variant for variant in near if space.why_infeasible(variant, problem, card()) is None]
    chance.shuffle(near)
    return near[:count]


@dataclass(slots=True, kw_only=True)
class Measured:
    """All variants of one problem."""

    problem: Problem
    listed: list[Variant]
    trials: list[Trial] = field(default_factory=list)

    def steps(self, shop: Workshop) -> Steps[None]:
        """Validates and screens them."""
        spaces = multi_template.spaces(self.problem, card(), True)
        study = Contest([Study(None, space, self.problem, card(), seed=0, budget=0) for space in spaces])
        study.enqueue(self.listed)
        yield from shop.search(study, more=lambda: study.waiting, late=lambda: False, heard=self.trials.append)

    def row(self, shop: Workshop, quick: Tuned) -> dict[str, Any] | str:
        """How the winner stands to the best of them, in one contest; or why nobody can say."""
        working = [trial for trial in self.trials if trial.outcome is Outcome.OK]
        best = [trial.variant for trial in finals.shortlist(working, MET, Objective.TIME)]
        met = list(dict.fromkeys([quick.winner, *best]))
        result = shop.alone(shop.final(self.problem, met, seconds=SECONDS, seed=1))
        if isinstance(result, Failure):
            return f"the contest ended with a {result.outcome.value}: {result.detail}"
        if not result.verdicts[0].ok:
            return f"the winner is wrong at full size: {result.verdicts[0].reason}"
        counted = paired_stats.good(result.rounds)
        names = [finalist_name(place) for place, verdict in enumerate(result.verdicts) if verdict.ok]
        leader = paired_stats.leader(counted, names)
        ratios = [round_.times_us[names[0]] / round_.times_us[leader] for round_ in counted]
        lead = paired_stats.interval(counted, names[0], leader, finalists=len(names)) if leader != names[0] else None
        return {
            "problem": str(self.problem), "key": self.problem.key, "variants": len(self.trials), "right": len(working),
            "trials": quick.trials, "seconds": quick.seconds, "choice": quick.choice, "winner": str(quick.winner),
            "best": str(met[int(leader.split()[-1])]), "ratio": statistics.median(ratios),
            "low": lead.low if lead is not None else None, "high": lead.high if lead is not None else None,
            "best_us": statistics.median(round_.times_us[leader] for round_ in counted), "rounds": len(counted),
        }  # fmt: skip


def listed(group: Sequence[Problem], quick: dict[str, Tuned], count: int) -> list[Variant]:
    """The variants of one kind of kernel, which all its problems are measured with."""
    chance = random.Random(0)
    variants: dict[Variant, None] = {}
    for problem in group:
        variants |= dict.fromkeys(quick[problem.key].tried)
        variants |= dict.fromkeys(
            seed for space in multi_template.spaces(problem, card(), True) for seed in space.seeds_for(problem, card())
        )
    for winner, problem in {quick[problem.key].winner: problem for problem in group}.items():
        variants |= dict.fromkeys(neighbours(problem, winner, count, chance))
    for space in multi_template.spaces(group[0], card(), True):
        variants |= dict.fromkeys(sampled(group[0], count, space.template, seed=0))
    return list(variants)


def fitting(problem: Problem, variants: Sequence[Variant]) -> list[Variant]:
    """Those that are points of the problem's own search spaces."""
    spaces = {space.template: space for space in multi_template.spaces(problem, card(), True)}
    return [
        variant for variant in variants if spaces[variant.template].why_infeasible(variant, problem, card()) is None
    ]


def measured(
    groups: Sequence[Sequence[Problem]], quick: dict[str, Tuned], count: int
) -> Iterator[tuple[Problem, dict[str, Any] | str]]:
    """One row a problem, or why there is none; several problems are on their way at a time."""
    tuned_ones = [[problem for problem in group if problem.key in quick] for group in groups]
    waiting = [
        Measured(problem=problem, listed=fitting(problem, common))
        for group in tuned_ones
        if group
        for common in [listed(group, quick, count)]
        for problem in group
    ]
    with Workshop(card(), measured=True) as shop:
        active: list[tuple[Measured, Steps[None]]] = []
        while waiting or active:
            while waiting and len(active) < AT_ONCE:
                search = waiting.pop(0)
                active.append((search, search.steps(shop)))
            going = []
            for search, steps in active:
                if next(steps, "ended") == "ended":
                    yield search.problem, search.row(shop, quick[search.problem.key])
                else:
                    going.append((search, steps))
            if len(going) == len(active):
                shop.wait()
            active = going


@app.command()
def measure(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Lines of JSON; what is there is not measured again.")],
    shard: Annotated[str, typer.Option(help="This process's part of the problems.")] = "0/1",
    count: Annotated[int, typer.Option(help="Random variants of each family, and neighbours of the winner.")] = 40,
) -> None:
    """Tune at quick effort, then measure many variants, and compare."""
    number, shards = map(int, shard.split("/"))
    done = {json.loads(line)["key"] for line in path.read_text().splitlines()} if path.exists() else set()
    groups = [[problem for problem in group if problem.key not in done] for group in kinds(number, shards)]
    problems = [problem for group in groups for problem in group]
    with empty_caches(), tempfile.TemporaryDirectory() as folder:
        quick, seconds = tuned(problems, Path(folder))
        print(f"quick: {len(quick)} problems in {seconds:.1f} s", flush=True)
        for problem, row in measured(groups, quick, count):
            if isinstance(row, str):
                print(f"no row: {problem}: {row}", flush=True)
                continue
            row |= {"run_seconds": seconds / max(1, len(problems)), "machine": machine()}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['problem']}: {row['ratio']:.3f}, {row['right']} of {row['variants']} right", flush=True)


HEAD = (
    "problem", "tried at quick", "s from first result to entry", "variants", "right", "best, us",
    "winner over best", "interval", "within 2%",
)  # fmt: skip


@app.command(name="table")
def table_(files: Annotated[list[Path], typer.Argument(metavar="FILE...")], write: Write = False) -> None:
    """The table of what was measured."""
    records = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [
        (
            record["problem"], record["trials"], f"{record['seconds']:.1f}", record["variants"], record["right"],
            f"{record['best_us']:.1f}", f"{record['ratio']:.4f}",
            f"{record['low']:.3f} to {record['high']:.3f}" if record["low"] is not None else "the same kernel",
            "yes" if record["ratio"] <= 1 + NEAR else "no",
        )
        for record in records
    ]  # fmt: skip
    ratios = [record["ratio"] for record in records]
    words = [
        f"Within {NEAR:.0%} of the best: {sum(ratio <= 1 + NEAR for ratio in ratios)} of {len(records)} problems. "
        f"Worst {max(ratios):.3f}, mean {statistics.fmean(ratios):.4f}. Quick effort took "
        f"{max(record['run_seconds'] for record in records):.1f} s a problem over the slower process's run, workers "
        f"started and caches empty, and at most {max(record['seconds'] for record in records):.1f} s from a problem's "
        "first result on."
    ]
    lines = [records[0]["machine"], "", *words, "", *table(HEAD, rows)]
    command = "python benchmarks/exhaustive.py measure FILE --shard 0/2; ... table FILE..."
    tell("Quick effort beside many more variants", command, "\n".join(lines), "h200_exhaustive" if write else None)


if __name__ == "__main__":
    app()
