"""Measures variants on drawn problems, and derives from that which of them calls run that nobody tuned.

python benchmarks/portfolios.py screen --seed 1000 --seconds 500     needs a GPU; adds to data/portfolios/screened/
python benchmarks/portfolios.py measure --seed 1002 --seconds 300    needs a GPU; adds to data/portfolios/
python benchmarks/portfolios.py choose --seed 1016                   best with a GPU; writes chosen.jsonl
python benchmarks/portfolios.py fill chosen.jsonl --seed 1016        needs a GPU; adds to data/portfolios/
python benchmarks/portfolios.py finals --device h200                 writes data/portfolios/h200_chosen_shipped.jsonl
python benchmarks/portfolios.py scales                               writes data/feature_scales.json
python benchmarks/portfolios.py derive                               writes search_spaces/forward.portfolio.json
python benchmarks/portfolios.py losses FILE ...                      says how far from the best untuned calls are

screen: for each drawn problem, a wide pool of variants (`variant_pool.py`) is compiled, passes the gate and has a first
look. These times are rough: compilers are at work, and what is slow is looked at once.

measure: of the screened variants, few cover all problems (`variant_pool.cover`). On each drawn problem these pass the
gate, and the best of them meet PyTorch's backends in interleaved rounds. What is in a file already is left out.

choose: of many drawn problems, those on which the portfolio's choice may lose most (`doubtful_calls.py`), those first.
The model of derive chooses a few variants of a pool for each. A GPU factors its matrix sooner.

fill: measures these. Short calls are measured last, on idle cores.

finals: those of a card's shipped entries, on problems of the kinds that are drawn, of which many are longer than what
`choose` finds. With --cache and --name, those of another cache: `untuned.py --cache` keeps what it tuned, and where a
default was slow it met the winner. A name of examinedN keeps `untuned.py` from seed N.

scales: how much each feature of a problem and a variant counts for the model (`portfolio_scales.py`), from all files.

derive: a network learns from a model of these times (`portfolio_derivation.py`). The same data give the same bytes
(`portfolio_text.py`), which --check shows.

losses: of problems that were measured, what the shipped portfolio's choice takes over the best variant.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import doubtful_calls
import drawn_calls
import measured_calls
import msgspec
import portfolio_derivation
import portfolio_examples
import portfolio_model
import portfolio_network
import portfolio_predictions
import portfolio_scales
import portfolio_text
import typer
import variant_pool
from measured_calls import Staged, Subject
from portfolio_examples import CHOSEN, DATA, FINALISTS, SCREENED, examples_of
from portfolio_model import TimeModel

from autoattn.codegen import portfolio, resources, search_space
from autoattn.core import device_profiles, kernel_kind
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem
from autoattn.hardware import nvidia

NEAR, FAR = 1.02, 1.15  # times over the best
RESERVED = 1000  # seeds from here on are for portfolios; smaller ones are for benchmarks/untuned.py

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


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
def choose(
    seed: Seed = RESERVED + 3,
    count: Annotated[int, typer.Option(help="Drawn problems.")] = 1200,
    device: Annotated[str, typer.Option(help="The card that will measure.")] = "h100",
    out: Annotated[Path, typer.Option(help="The file of the chosen problems.")] = Path("chosen.jsonl"),
) -> None:
    """Find drawn problems on which the portfolio's choice may lose most, and variants to be measured on each."""
    _refuse_examined(seed)
    card = device_profiles.named(device)
    measured, screened = examples_of(DATA), examples_of(SCREENED)
    known = {example.problem for example in measured}
    model = TimeModel(portfolio_derivation.all_samples(measured, screened), with_errors=True)
    cover = portfolio_predictions.cover(model, [*screened, *measured])
    problems = [problem for problem in doubtful_calls.quick(seed, count) if problem not in known]
    candidates = portfolio_predictions.candidates(model, cover, problems, card)
    drawn = list(zip(problems, candidates, strict=True))
    calls = list(doubtful_calls.first_of_kinds(doubtful_calls.ordered(model, drawn, card)))
    out.write_text("".join(msgspec.json.encode(call.document()).decode() + "\n" for call in calls), encoding="utf-8")
    print(f"{len(calls)} of {len(drawn)} problems, which may lose {calls[0].expected_loss:.0%} of the time and less")


@app.command()
def fill(
    chosen: Annotated[Path, typer.Argument(help="What `choose` wrote.", exists=True)],
    seed: Seed = RESERVED + 3, seconds: Seconds = 460.0,
    count: Annotated[int, typer.Option(help="The first problems of the file.")] = 100,
    part: Annotated[int, typer.Option(help="Of `--parts`, from 0 on: kinds of kernels are shared out.")] = 0,
    parts: Annotated[int, typer.Option(help="As many as GPUs measure at once.")] = 1,
    out: Annotated[Path, typer.Option(help="The folder of the measurements.")] = DATA,
) -> None:  # fmt: skip
    """Measure chosen problems, of which `choose` expects the largest losses."""
    card = _card()
    path = out / f"{card.name}_{CHOSEN}_{seed}.jsonl"
    calls = doubtful_calls.read(chosen)[:count]
    kinds = list(dict.fromkeys(kernel_kind.of(call.problem) for call in calls))
    own = {call.problem: call for call in calls if kinds.index(kernel_kind.of(call.problem)) % parts == part}
    problems = _unknown(path, list(own))
    print(f"{len(problems)} problems, {sum(len(own[problem].variants) for problem in problems)} variants", flush=True)
    subjects = [
        Subject(problem, card, own[problem].variants, FINALISTS, short=doubtful_calls.is_short(problem, card))
        for problem in problems
    ]
    _append(path, Staged(subjects, seconds, card).lines())


@app.command()
def measure(
    seed: Seed = RESERVED, seconds: Seconds = 300.0, count: Count = 40, sizes: Sizes = 5,
    finalists: Annotated[int, typer.Option(help="Variants that meet in rounds, at most.")] = FINALISTS,
    out: Annotated[Path, typer.Option(help="The folder of the measurements.")] = DATA,
) -> None:  # fmt: skip
    """Measure few variants that cover what was screened, on drawn problems."""
    problems = _drawn(seed, count, sizes)
    card = _card()
    cover = variant_pool.cover(examples_of(SCREENED))
    _write(
        out / f"{card.name}_forward_{seed}.jsonl", card, seconds, problems,
        lambda problem: Subject(problem, card, variant_pool.feasible(cover, problem, card), finalists),
    )  # fmt: skip


def _card() -> Device:
    card = nvidia.present()
    if card is None:
        sys.exit("benchmarks/portfolios.py measures on an NVIDIA GPU in this machine, and found none")
    return card


def _refuse_examined(seed: int) -> None:
    if seed < RESERVED:
        raise typer.BadParameter(f"seeds below {RESERVED} draw what untuned.py examines, got {seed}")


def _drawn(seed: int, count: int, sizes: int) -> list[Problem]:
    _refuse_examined(seed)
    every = (each for problem in distinct(seed, count) for each in drawn_calls.with_sizes(problem, sizes))
    return list(dict.fromkeys(every))


def _write(
    path: Path, card: Device, seconds: float, problems: Sequence[Problem], subject_of: Callable[[Problem], Subject]
) -> None:
    """Adds a line to a file for each problem that it does not have."""
    subjects = map(subject_of, _unknown(path, problems))
    _append(path, measured_calls.lines(subjects, time.monotonic() + seconds, card))


def _unknown(path: Path, problems: Sequence[Problem]) -> list[Problem]:
    """The problems that a file does not have."""
    known = {example.problem for example in portfolio_examples.read(path)} if path.exists() else set()
    return [problem for problem in problems if problem not in known]


def _append(path: Path, results: Iterable[tuple[Problem, dict[str, Any] | str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for problem, result in results:
        if isinstance(result, str):
            print(f"no line: {problem}: {result}", flush=True)
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        best = min(time_us for *_, time_us in result["times_us"])
        print(f"{problem}: {best} us of {len(result['times_us'])}, {result['rivals_us']}", flush=True)


@app.command()
def finals(
    device: Annotated[str, typer.Option(help="The card whose entries count.")] = "h200",
    cache: Annotated[Path | None, typer.Option(help="The folder of the entries, else the shipped ones.")] = None,
    name: Annotated[str, typer.Option(help="Of the file, without the card.")] = "shipped",
    out: Annotated[Path, typer.Option(help="The folder of the measurements.")] = DATA,
) -> None:
    """Write the times of tuned winners and of those that met them in finals."""
    card = device_profiles.named(device)
    entries = [
        entry
        for entry in variant_pool.entries_of(cache or resources.shipped_cache(), card)
        if entry.measurement is not None and _is_drawn(entry.problem)
    ]
    lines = [json.dumps(_finals_of(entry)) + "\n" for entry in sorted(entries, key=lambda entry: entry.problem.key)]
    (out / f"{card.name}_{CHOSEN}_{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _is_drawn(problem: Problem) -> bool:
    """Whether a problem is of a kind that `drawn_calls` draws."""
    apart = problem.cache is None and problem.head_dim == problem.head_dim_v
    return apart and problem.op is Op.FORWARD and portfolio.is_plain(problem)


def _finals_of(entry: CacheEntry) -> dict[str, Any]:
    """An entry as a line of a file: its kernel and the runners-up that are points of today's spaces."""
    assert entry.measurement is not None
    times = {entry.variant: entry.measurement.median_us} | {each.variant: each.time_us for each in entry.candidates}
    return {
        "problem": msgspec.to_builtins(entry.problem),
        "times_us": [
            [variant.template, variant.as_dict(), round(time_us, 2)]
            for variant, time_us in times.items()
            if search_space.load(variant.template).holds(variant.as_dict())
        ],
        "rivals_us": {
            rival.name: round(rival.measurement.median_us, 2)
            for rival in entry.rivals
            if rival.measurement is not None and rival.name.startswith("sdpa")
        },
    }


@app.command()
def scales() -> None:
    """Fit the weights of the model's features, for each size of elements."""
    samples = portfolio_model.of_sizes(portfolio_derivation.all_samples(examples_of(DATA), examples_of(SCREENED)))
    weights = {size: portfolio_scales.fit(samples[size]) for size in sorted(samples)}
    portfolio_model.SCALES.write_text(json.dumps(weights, indent=2) + "\n", encoding="utf-8")


@app.command()
def derive(
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the file that is there, and write none.")
    ] = False,
) -> None:
    """Write the portfolio, with digests of what it comes from, and say how far from the best its choices are."""
    examples, drawn = examples_of(DATA), portfolio_predictions.drawn_problems()
    derived = portfolio_derivation.derived(examples, examples_of(SCREENED), drawn)
    target = portfolio_derivation.TARGET
    text = portfolio_text.text_of(examples, derived)
    if check:
        if target.read_text(encoding="utf-8") != text:
            sys.exit(f"{target} is not what the data give; run python benchmarks/portfolios.py derive")
        return
    target.write_text(text, encoding="utf-8")
    digests = json.dumps(portfolio_derivation.digests(), indent=2)
    portfolio_derivation.DIGESTS.write_text(digests + "\n", encoding="utf-8")
    regrets = [regret for example in examples if (regret := portfolio_network.regret(example, derived)) is not None]
    print(f"{len(derived.variants)} variants; {_summary(regrets, len(examples))}")


@app.command()
def losses(
    files: Annotated[list[Path], typer.Argument(help="Of measured problems.", exists=True)],
    most: Annotated[int, typer.Option(help="Problems that are named of each file.")] = 5,
) -> None:
    """Say how much longer than the best measured variant a call takes that nobody tuned; the worst problems by name."""
    for path in files:
        examples = portfolio_examples.read(path)
        regrets = {
            example.problem: time_us / example.best_us
            for example in examples
            if (time_us := example.times_us.get(portfolio.default(example.problem, example.device))) is not None
        }
        print(f"{path.name}: {_summary(list(regrets.values()), len(examples))}")
        for problem in sorted(regrets, key=lambda problem: -regrets[problem])[:most]:
            print(f"  {regrets[problem]:.3f} {problem}")


def _summary(regrets: Sequence[float], count: int) -> str:
    """How far choices are from the best times, of those of so many problems whose choice was measured."""
    if not regrets:
        return f"{count} problems, none by a measured variant"
    mean = math.exp(statistics.fmean(map(math.log, regrets)))
    near, far = sum(regret <= NEAR for regret in regrets), sum(regret > FAR for regret in regrets)
    return (
        f"{count} problems, {len(regrets)} by a measured variant: {mean:.3f} of the best time, at most "
        f"{max(regrets):.3f}; {near} within {NEAR - 1:.0%}, {far} by more than {FAR - 1:.0%}"
    )


if __name__ == "__main__":
    app()
