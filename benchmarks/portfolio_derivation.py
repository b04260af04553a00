"""Derives a portfolio from measured problems, and says what it was derived from.

A model (`portfolio_model.py`) learns the times of all measured variants. Few variants cover all measured problems. What
each of these takes on many drawn problems is predicted (`portfolio_predictions.py`), and a network learns what each
costs (`portfolio_network.py`).

That takes the better part of an hour. Three digests show in seconds that a portfolio is out of date: of its file, of
the measurements, and of the portfolio that a small part of these gives. The last is another one whenever a step of
the derivation does something else with this part.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import portfolio_model
import portfolio_network
import portfolio_predictions
import portfolio_text
import variant_pool
from portfolio_examples import DATA, FINALISTS, SCREENED, Example, examples_of
from portfolio_model import Sample, TimeModel

from autoattn.codegen import resources
from autoattn.codegen.portfolio import Portfolio
from autoattn.core.problem import Op, Precision, Problem
from autoattn.core.variant import Variant

TARGET = resources.portfolio_path(Op.FORWARD)
DIGESTS = Path(__file__).resolve().parent / "data" / "portfolio_digests.json"
BEHIND = 1.1  # times the last of the finalists: what a variant counts as that is not among them
FAILED = 2.0  # times the best: what a variant counts as that failed on problems alike
WEIGHT = 8  # drawn problems that a measured one counts as
PART_OF = 40  # measured problems of which a part has one
PART_PREDICTED_OF = 200  # predicted ones


def derived(measured: Sequence[Example], screened: Sequence[Example], drawn: Sequence[Problem]) -> Portfolio:
    """The portfolio that measured and screened problems give, with drawn ones to learn from."""
    return portfolio_network.train(predicted(measured, screened, drawn))


def digests() -> dict[str, str]:
    """Of the portfolio's file, of what it is derived from, and of what a part of that gives."""
    return {
        "portfolio": digest_of_files(TARGET),
        "measurements": digest_of_measurements(),
        "part": digest_of_part(),
    }


def digest_of_measurements() -> str:
    """Of all measured and screened problems, and of the weights of the model's features."""
    return digest_of_files(*sorted(DATA.glob("*.jsonl")), *sorted(SCREENED.glob("*.jsonl")), portfolio_model.SCALES)


def digest_of_part() -> str:
    """Of the portfolio that a small part of the measurements gives."""
    measured, screened = examples_of(DATA)[::PART_OF], examples_of(SCREENED)[::PART_OF]
    counts = {numbers: count // PART_PREDICTED_OF for numbers, count in portfolio_predictions.PREDICTED.items()}
    part = derived(measured, screened, portfolio_predictions.drawn_problems(counts))
    return hashlib.sha256(portfolio_text.text_of(measured, part).encode()).hexdigest()


def digest_of_files(*paths: Path) -> str:
    """Of their names and what they hold."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()


def predicted(measured: Sequence[Example], screened: Sequence[Example], drawn: Sequence[Problem]) -> list[Example]:
    """Measured problems and drawn ones, with the times of the cover as a model of the measured times predicts them."""
    ((card, _),) = Counter(example.device for example in measured).most_common(1)
    failing = _failing(measured, variant_pool.cover(screened))
    model = TimeModel(all_samples(measured, screened))
    cover = portfolio_predictions.cover(model, [*screened, *measured])
    known = {example.problem: example.running_us for example in measured}
    problems = list(dict.fromkeys([*known, *drawn]))
    predictions = portfolio_predictions.of(model, cover, problems, card)
    examples: dict[Problem, Example] = {}
    for problem, times in zip(problems, predictions, strict=True):
        able = {variant: time_us for variant, time_us in times.items() if variant not in failing[numbers_of(problem)]}
        if able:
            able |= {variant: time_us for variant, time_us in known.get(problem, {}).items() if variant in able}
            times = dict.fromkeys(times, FAILED * min(able.values())) | able
            examples[problem] = Example(problem=problem, device=card, times_us=times, rivals_us={})
    return [examples[problem] for problem in [*list(known) * WEIGHT, *drawn] if problem in examples]


def all_samples(measured: Sequence[Example], screened: Sequence[Example]) -> list[Sample]:
    """Of measured and of screened problems."""
    cover = variant_pool.cover(screened)
    return [*_samples(measured, cover, _failing(measured, cover)), *_rough_samples(screened)]


def numbers_of(problem: Problem) -> tuple[int, Precision, int, int]:
    """What decides whether a kernel fits the registers and the shared memory of an SM."""
    return problem.dtype.bytes, problem.precision, problem.head_dim_padded, problem.head_dim_v_padded


def _failing(measured: Sequence[Example], cover: Sequence[Variant]) -> dict[tuple[Any, ...], set[Variant]]:
    """Variants that rules allow and that worked nowhere, where fewer worked than may meet in rounds."""
    failing: defaultdict[tuple[Any, ...], set[Variant]] = defaultdict(set)
    for example in measured:
        if example.met_cover and len(example.times_us) < FINALISTS:
            allowed = variant_pool.feasible(cover, example.problem, example.device)
            failing[numbers_of(example.problem)] |= set(allowed) - set(example.times_us)
    for example in measured:
        failing[numbers_of(example.problem)] -= set(example.times_us)
    return failing


def _samples(
    measured: Sequence[Example], cover: Sequence[Variant], failing: Mapping[tuple[Any, ...], set[Variant]]
) -> Iterator[Sample]:
    """Measured times; a variant that did not come to the rounds counts as somewhat slower than the last that did."""
    for example in measured:
        facts: dict[str, Any] = {"problem": example.problem, "device": example.device}
        for variant, time_us in example.times_us.items():
            yield Sample(**facts, variant=variant, time_us=time_us, rough=False)
        if not example.met_cover:
            continue
        behind = BEHIND * max(example.times_us.values())
        left_out = failing[numbers_of(example.problem)].union(example.times_us)
        for variant in variant_pool.feasible(cover, example.problem, example.device):
            if variant not in left_out:
                yield Sample(**facts, variant=variant, time_us=behind, rough=True)


def _rough_samples(screened: Sequence[Example]) -> Iterator[Sample]:
    """Screened times, as far as more than one look was taken."""
    for example in screened:
        for variant, time_us in example.times_us.items():
            if time_us <= variant_pool.FAR * example.best_us:
                yield Sample(
                    problem=example.problem, device=example.device, variant=variant, time_us=time_us, rough=True
                )
