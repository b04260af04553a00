"""Measures variants on drawn problems, and derives from that which of them calls run that nobody tuned.

python benchmarks/portfolios.py screen --seed 1000 --seconds 500     needs a GPU; adds to data/portfolios/screened/
python benchmarks/portfolios.py measure --seed 1002 --seconds 300    needs a GPU; adds to data/portfolios/
python benchmarks/portfolios.py derive                               writes search_spaces/forward.portfolio.yaml

screen: for each drawn problem, a wide pool of variants (`variant_pool.py`) is compiled, passes the gate and has a first
look. These times are rough: compilers are at work, and what is slow is looked at once.

measure: of the screened variants, few cover all problems (`variant_pool.cover`). On each drawn problem these pass the
gate, and the best of them meet PyTorch's backends in interleaved rounds. What is in a file already is left out.

derive: a model of the measured times (`portfolio_model.py`) predicts those of the cover on many drawn problems. A
decision tree grows on these, over the sizes and the kind of a problem. A leaf has the variants whose first feasible one
is the fastest in the geometric mean of the leaf's problems. The same data give the same bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import drawn_calls
import msgspec
import portfolio_model
import portfolio_tree
import typer
import variant_pool
from portfolio_tree import Example, PortfolioRule

from autoattn.codegen import portfolio, resources
from autoattn.core import device_profiles
from autoattn.core.device import Device
from autoattn.core.problem import DType, Op, Precision, Problem
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.hardware import nvidia
from autoattn.search import finals, multi_template
from autoattn.search.gpu_jobs import Finished
from autoattn.search.multi_template import Contest
from autoattn.search.search_options import Objective
from autoattn.search.study import Study
from autoattn.search.trial_pipeline import Steps, Workshop
from autoattn.workers.worker_pool import Failure

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data" / "portfolios"
TARGET = resources.portfolio_path(Op.FORWARD)
SCREENED = DATA / "screened"
AT_ONCE = 8  # problems whose variants are measured together, so that compilers and the GPU both have work
FINAL_SECONDS = 0.35
FINALISTS = 16  # variants of a problem that meet in rounds, at most
BEHIND = 1.1  # times the last of these: what a variant counts as that is not among them
WEIGHT = 8  # drawn problems that a measured one counts as
NEAR = 1.02
# The problems that rules speak of. Of 16 bits and many rows, the first variants of most rules are Gluon's, which take
# no bias, and the last ones were measured to suit other problems; seeds of triton/forward know such problems.
SCOPE = "(not bias_of_pairs or element_bytes == 4 or shared_rows < 80)"
PREDICTED_FROM = 3000  # the first seed of the problems whose times are predicted
PREDICTED = {DType.FLOAT16: 3600, Precision.TF32: 1200, Precision.IEEE: 1200}  # problems; the first, of 16 bits
RESERVED = 1000  # seeds from here on are for portfolios; smaller ones are for benchmarks/untuned.py

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


class Subject:
    """One problem on its way."""

    def __init__(self, problem: Problem, device: Device, variants: Sequence[Variant], finalists: int) -> None:
        self.problem, self.device, self.variants, self.finalists = problem, device, variants, finalists
        self.trials: list[Trial] = []

    def steps(self, shop: Workshop) -> Steps[dict[str, Any] | str]:
        """Its line of the file, or in words why there is none."""
        spaces = multi_template.spaces(self.problem, self.device, True)
        study = Contest([Study(None, space, self.problem, self.device, seed=0, budget=0) for space in spaces])
        study.enqueue(self.variants)
        yield from shop.search(study, more=lambda: study.waiting, late=lambda: False, heard=self.trials.append)
        working = [trial for trial in self.trials if trial.outcome is Outcome.OK]
        if not working:
            return "no variant worked"
        best = [trial.variant for trial in finals.shortlist(working, self.finalists, Objective.TIME)]
        result = yield from shop.final(self.problem, best, seconds=FINAL_SECONDS, seed=0, energy_seconds=0.0)
        if isinstance(result, Failure):
            return f"the finals ended with a {result.outcome.value}: {result.detail}"
        return line(self.problem, best, result)


def line(problem: Problem, best: Sequence[Variant], result: Finished) -> dict[str, Any]:
    """What a file keeps of a problem: the times of its finalists and of its rivals."""
    times: dict[Variant, float] = {}
    for variant, measurement in zip(best, result.measurements, strict=True):
        if measurement is not None:
            times[variant] = measurement.median_us
    return {
        "problem": msgspec.to_builtins(problem),
        "times_us": [[variant.template, variant.as_dict(), round(time_us, 2)] for variant, time_us in times.items()],
        "rivals_us": {rival.name: round(rival.measurement.median_us, 2) for rival in result.rivals},
    }


def lines(subjects: Iterator[Subject], end: float, device: Device) -> Iterator[tuple[Problem, dict[str, Any] | str]]:
    """Measures several problems at a time until all is done; after `end` none is begun."""
    with Workshop(device, measured=True) as shop:
        active: list[tuple[Subject, Steps[dict[str, Any] | str]]] = []
        while True:
            while len(active) < AT_ONCE and time.monotonic() < end:
                subject = next(subjects, None)
                if subject is None:
                    break
                active.append((subject, subject.steps(shop)))
            if not active:
                return
            going = []
            for subject, steps in active:
                try:
                    next(steps)
                except StopIteration as finished:
                    yield subject.problem, finished.value
                else:
                    going.append((subject, steps))
            if len(going) == len(active):
                shop.wait()
            active = going


def distinct(seed: int, count: int) -> list[Problem]:
    """Drawn problems of which no two have the same width of elements, precision, head dim and structure of the mask."""
    kinds: dict[tuple[Any, ...], Problem] = {}
    for problem in drawn_calls.draw(seed, 12 * count):
        kind = problem.dtype.bytes, problem.precision, problem.head_dim, problem.mask.structure
        kinds.setdefault(kind, problem)
    return list(kinds.values())[:count]


Seed = Annotated[int, typer.Option(help=f"Of the drawn problems, from {RESERVED} on.")]
Seconds = Annotated[float, typer.Option(help="After so long no problem is begun.")]
Count = Annotated[int, typer.Option(help="Kinds of kernels that are drawn.")]
Sizes = Annotated[int, typer.Option(help="Problems of each kind, which share compiled kernels.")]


@app.command()
def screen(
    seed: Seed = RESERVED, seconds: Seconds = 500.0, count: Count = 40, sizes: Sizes = 5,
    variants: Annotated[int, typer.Option(help="Variants of each problem, at most.")] = 72,
    out: Annotated[Path, typer.Option(help="The folder of the measurements.")] = SCREENED,
) -> None:  # fmt: skip
    """Look at a wide pool of variants on drawn problems."""
    problems = _drawn(seed, count, sizes)
    card = _card()
    _write(
        out / f"{card.name}_forward_{seed}.jsonl", card, seconds, problems,
        lambda problem: Subject(problem, card, variant_pool.pool(problem, card)[:variants], variants),
    )  # fmt: skip


@app.command()
def measure(
    seed: Seed = RESERVED, seconds: Seconds = 300.0, count: Count = 40, sizes: Sizes = 5,
    finalists: Annotated[int, typer.Option(help="Variants that meet in rounds, at most.")] = FINALISTS,
    out: Annotated[Path, typer.Option(help="The folder of the measurements.")] = DATA,
) -> None:  # fmt: skip
    """Measure few variants that cover what was screened, on drawn problems."""
    problems = _drawn(seed, count, sizes)
    card = _card()
    cover = variant_pool.cover(_all_of(SCREENED))
    _write(
        out / f"{card.name}_forward_{seed}.jsonl", card, seconds, problems,
        lambda problem: Subject(problem, card, variant_pool.feasible(cover, problem, card), finalists),
    )  # fmt: skip


def _card() -> Device:
    card = nvidia.present()
    if card is None:
        sys.exit("benchmarks/portfolios.py measures on an NVIDIA GPU in this machine, and found none")
    return card


def _drawn(seed: int, count: int, sizes: int) -> list[Problem]:
    if seed < RESERVED:
        raise typer.BadParameter(f"seeds below {RESERVED} draw what untuned.py examines, got {seed}")
    every = (each for problem in distinct(seed, count) for each in drawn_calls.with_sizes(problem, sizes))
    return list(dict.fromkeys(every))


def _write(
    path: Path, card: Device, seconds: float, problems: Sequence[Problem], subject_of: Callable[[Problem], Subject]
) -> None:
    """Adds a line to a file for each problem that it does not have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {example.problem for example in read(path)} if path.exists() else set()
    subjects = (subject_of(problem) for problem in problems if problem not in known)
    for problem, result in lines(subjects, time.monotonic() + seconds, card):
        if isinstance(result, str):
            print(f"no line: {problem}: {result}", flush=True)
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        best = min(time_us for *_, time_us in result["times_us"])
        print(f"{problem}: {best} us of {len(result['times_us'])}, {result['rivals_us']}", flush=True)


def read(path: Path) -> list[Example]:
    """The problems of a file, with what was measured on each."""
    device = device_profiles.named(path.name.partition("_")[0])
    examples = []
    for text in path.read_text(encoding="utf-8").splitlines():
        document = json.loads(text)
        times = {Variant.of(template, params): time_us for template, params, time_us in document["times_us"]}
        problem = msgspec.convert(document["problem"], Problem)
        examples.append(Example(problem=problem, device=device, times_us=times, rivals_us=document["rivals_us"]))
    return examples


def _all_of(folder: Path) -> list[Example]:
    """The problems of all files of a folder."""
    return [example for path in sorted(folder.glob("*.jsonl")) for example in read(path)]


def text_of(examples: Sequence[Example], rules: Sequence[PortfolioRule]) -> str:
    """The file of a portfolio that these examples gave."""
    sources = ", ".join(sorted({example.device.full_name for example in examples}))
    head = (
        "# What calls run that nobody tuned: variants of the rule that holds, best first, then the templates' seeds.\n"
        f"# Written by `python benchmarks/portfolios.py derive` from {len(examples)} problems measured on {sources}\n"
        "# and a model of their times.\n"
        "# Not to be edited; docs/decisions/portfolios.md says how it is made.\n"
    )
    lines = [f"version: {portfolio.VERSION}", f"operation: {Op.FORWARD.value}", "let:"]
    lines += [f"  {name}: {json.dumps(text)}" for name, text in portfolio_tree.LET.items()]
    units = {example.device.capabilities.matrix_unit.value for example in examples}
    (unit,) = units  # what suits cards with other products, nobody measured
    names = _names({variant: None for rule in rules for variant in rule.variants})
    lines.append("variants:")
    for variant, name in names.items():
        params = ", ".join(f"{parameter}: {value}" for parameter, value in variant.as_dict().items())
        lines.append(f"  {name}: {{template: {variant.template}, params: {{{params}}}}}")
    lines.append("rules:")
    for rule in rules:
        listed = ", ".join(names[variant] for variant in rule.variants)
        lines += [f"  - when: {json.dumps(f'{unit} == 1 and {SCOPE} and {rule.when}')}", f"    variants: [{listed}]"]
    return head + "\n".join(lines) + "\n"


def _names(variants: Iterable[Variant]) -> dict[Variant, str]:
    """A name for each: its family, its tile, and a number."""
    names: dict[Variant, str] = {}
    count: Counter[str] = Counter()
    for variant in sorted(variants, key=lambda variant: (variant.template, str(variant))):
        params = variant.as_dict()
        stem = f"{variant.template.partition('/')[0]}_{params['BLOCK_M']}x{params['BLOCK_N']}"
        count[stem] += 1
        names[variant] = f"{stem}_{count[stem]}"
    return names


def predicted(measured: Sequence[Example], screened: Sequence[Example]) -> list[Example]:
    """Measured problems and drawn ones, with the times of the cover as a model of the measured times predicts them."""
    cover, card = variant_pool.cover(screened), measured[0].device
    failing = _failing(measured, cover)
    model = portfolio_model.fit([*_samples(measured, cover, failing), *_rough_samples(screened)])
    examples = []
    known = {example.problem: example.times_us for example in measured}
    for problem in [*list(known) * WEIGHT, *_problems_to_predict()]:
        variants = [variant for variant in variant_pool.feasible(cover, problem, card)
                    if variant not in failing[numbers_of(problem)]]  # fmt: skip
        if variants:
            times = {**model.times_us(problem, variants, card), **known.get(problem, {})}
            examples.append(Example(problem=problem, device=card, times_us=times, rivals_us={}))
    return examples


def numbers_of(problem: Problem) -> tuple[int, Precision, int, int]:
    """What decides whether a kernel fits the registers and the shared memory of an SM."""
    return problem.dtype.bytes, problem.precision, problem.head_dim_padded, problem.head_dim_v_padded


def _failing(measured: Sequence[Example], cover: Sequence[Variant]) -> dict[tuple[Any, ...], set[Variant]]:
    """Variants that rules allow and that did not work, where fewer worked than may meet in rounds."""
    failing: defaultdict[tuple[Any, ...], set[Variant]] = defaultdict(set)
    for example in measured:
        if len(example.times_us) < FINALISTS:
            allowed = variant_pool.feasible(cover, example.problem, example.device)
            failing[numbers_of(example.problem)] |= set(allowed) - set(example.times_us)
    return failing


def _samples(
    measured: Sequence[Example], cover: Sequence[Variant], failing: Mapping[tuple[Any, ...], set[Variant]]
) -> Iterator[portfolio_model.Sample]:
    """Measured times; a variant that did not come to the rounds counts as somewhat slower than the last that did."""
    for example in measured:
        facts: dict[str, Any] = {"problem": example.problem, "device": example.device}
        for variant, time_us in example.times_us.items():
            yield portfolio_model.Sample(**facts, variant=variant, time_us=time_us, rough=False)
        behind = BEHIND * max(example.times_us.values())
        left_out = failing[numbers_of(example.problem)].union(example.times_us)
        for variant in variant_pool.feasible(cover, example.problem, example.device):
            if variant not in left_out:
                yield portfolio_model.Sample(**facts, variant=variant, time_us=behind, rough=True)


def _rough_samples(screened: Sequence[Example]) -> Iterator[portfolio_model.Sample]:
    """Screened times, as far as more than one look was taken."""
    for example in screened:
        for variant, time_us in example.times_us.items():
            if time_us <= variant_pool.FAR * example.best_us:
                yield portfolio_model.Sample(
                    problem=example.problem, device=example.device, variant=variant, time_us=time_us, rough=True
                )


def _problems_to_predict() -> list[Problem]:
    """Drawn problems, so many of each way to form products; float32 is seldom drawn, and its rules need as many."""
    left = dict(PREDICTED)
    problems: dict[Problem, None] = {}
    for seed in itertools.count(PREDICTED_FROM):
        for problem in drawn_calls.draw(seed, 50):
            numbers = problem.precision if problem.dtype is DType.FLOAT32 else DType.FLOAT16
            if left[numbers] and problem not in problems:
                left[numbers] -= 1
                problems[problem] = None
        if not any(left.values()):
            return list(problems)
    raise AssertionError("seeds never end")


@app.command()
def derive(
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the file that is there, and write none.")
    ] = False,
) -> None:
    """Write the portfolio, and say how far from the best the problems' choices are."""
    examples, screened = (
        [e for path in sorted(folder.glob("*.jsonl")) for e in read(path)] for folder in (DATA, SCREENED)
    )
    rules = portfolio_tree.grow(predicted(examples, screened))
    text = text_of(examples, rules)
    if check:
        if TARGET.read_text(encoding="utf-8") != text:
            sys.exit(f"{TARGET} is not what the data give; run python benchmarks/portfolios.py derive")
        return
    TARGET.write_text(text, encoding="utf-8")
    regrets = [regret for example in examples if (regret := portfolio_tree.regret(example, rules)) is not None]
    mean = math.exp(statistics.fmean(map(math.log, regrets)))
    within = sum(regret <= NEAR for regret in regrets)
    print(
        f"{len(rules)} rules of {len({variant for rule in rules for variant in rule.variants})} variants; "
        f"{len(examples)} problems, {len(regrets)} by a measured variant: {mean:.3f} of the best time, at most "
        f"{max(regrets):.3f}; {within} within {NEAR - 1:.0%}"
    )


if __name__ == "__main__":
    app()
