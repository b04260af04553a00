"""Portfolios: what is measured, and the network that is trained on it."""

from __future__ import annotations

import json
import math
import pickle
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import drawn_calls
import gaussian_process
import measured_files
import numpy as np
import portfolio_derivation
import portfolio_examples
import portfolio_model
import portfolio_network
import portfolio_predictions
import portfolio_text
import portfolios
import pytest
import samples
import variant_pool
from gaussian_process import GaussianProcess
from portfolio_examples import Example
from portfolio_model import TimeModel
from portfolio_predictions import Predictor
from typer.testing import CliRunner

from autoattn.cache import store
from autoattn.codegen import head_order, portfolio, render, resources, search_space
from autoattn.codegen.portfolio import Portfolio
from autoattn.core import kernel_kind
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Numerics, Op, Precision, Problem
from autoattn.core.variant import Variant
from autoattn.kernels import compiler

H200 = samples.H200
FULL = Mask()
SIXTEEN_BITS = {DType.FLOAT16, DType.BFLOAT16}
SPACE = search_space.load("triton/forward")
SEEDS = [SPACE.variant(params) for _, params in SPACE.seeds]


def problem_of(rows: int, head_dim: int = 64, mask: Mask = FULL) -> Problem:
    return samples.problem(
        batch=2, heads_q=4, heads_kv=4, seq_q=rows, seq_kv=max(rows, 512), head_dim=head_dim, dtype=DType.FLOAT16,
        mask=mask,
    )  # fmt: skip


def feasible(*problems: Problem) -> list[Variant]:
    """Seeds that run all of these problems."""
    return [
        seed
        for seed in dict.fromkeys(SEEDS)
        if all(SPACE.why_infeasible(seed, problem, H200) is None for problem in problems)
    ]


def example(problem: Problem, times_us: dict[Variant, float]) -> Example:
    return Example(problem=problem, device=H200, times_us=times_us, rivals_us={})


LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 256, 384, 512, 640, 768, 1024, 1536, 2048)
SHORT, LONG = feasible(*map(problem_of, LENGTHS))[:3:2]


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """One variant is twice as fast below 16 rows, another one above."""
    by_length = []
    for rows in LENGTHS:
        times = {SHORT: 10.0, LONG: 20.0} if rows < 16 else {SHORT: 20.0, LONG: 10.0}
        by_length.append(example(problem_of(rows), times))
    return by_length


def samples_of(examples: list[Example]) -> Iterator[portfolio_model.Sample]:
    """All times of some examples."""
    for each in examples:
        for variant, time_us in each.times_us.items():
            yield portfolio_model.Sample(
                problem=each.problem, device=H200, variant=variant, time_us=time_us, rough=False
            )


@pytest.fixture(scope="module")
def derived(examples: list[Example]) -> Portfolio:
    return trained(examples)


def trained(examples: list[Example], epochs: int = 500) -> Portfolio:
    """A network of examples that are few, so that each is seen often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portfolio_network, "EPOCHS", epochs)
        return portfolio_network.train(examples)


def choice(problem: Problem, derived: Portfolio) -> Variant | None:
    return portfolio_network.choice(example(problem, {}), derived)


def test_the_network_tells_problems_apart(examples: list[Example], derived: Portfolio) -> None:
    assert [portfolio_network.regret(each, derived) for each in examples] == [1.0] * len(examples)
    assert choice(problem_of(9), derived) == SHORT
    assert choice(problem_of(4096), derived) == LONG
    assert portfolio_network.regret(example(problem_of(1), {LONG: 1.0}), derived) is None, "SHORT was not measured"


def test_costs_are_logarithms_of_time_over_the_best(derived: Portfolio, examples: list[Example]) -> None:
    for each in examples:
        facts = portfolio_network.facts_of_inputs(each.problem, H200)
        costs = dict(zip(derived.variants, derived.network.costs(facts), strict=True))
        expected = [math.log(each.times_us[variant] / 10.0) for variant in (SHORT, LONG)]
        assert [costs[variant] for variant in (SHORT, LONG)] == pytest.approx(expected, abs=0.1)


def test_the_same_data_give_the_same_bytes_whatever_their_order(examples: list[Example]) -> None:
    shuffled = list(examples)
    random.Random(1).shuffle(shuffled)
    texts = [portfolio_text.text_of(each, trained(each, 20)) for each in (examples, shuffled)]
    assert texts[0] == texts[1]


def test_the_same_weights_come_of_sums_in_another_order(
    examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another BLAS library, or another processor, adds them up."""
    matrices = [np.random.default_rng(place).normal(size=(300, 300)) for place in range(2)]
    order = np.random.default_rng(2).permutation(300)

    reordered = matrices[0][:, order], matrices[1][order]
    assert (matrices[0] @ matrices[1] != reordered[0] @ reordered[1]).any()
    product = portfolio_network.exact_product(*matrices)
    np.testing.assert_array_equal(product, portfolio_network.exact_product(*reordered))
    np.testing.assert_allclose(product, matrices[0] @ matrices[1], atol=1e-3)
    here = trained(examples, 20)
    exact = portfolio_network.exact_product
    monkeypatch.setattr(
        portfolio_network, "exact_product", lambda left, right: exact(left[:, ::-1], np.ascontiguousarray(right[::-1]))
    )
    for layer, same in zip(here.network.layers, trained(examples, 20).network.layers, strict=True):
        np.testing.assert_array_equal(layer, same)


def test_a_choice_costs_more_as_better_variants_are_expected_to_be_slower() -> None:
    expected, costs = np.array([[0.01, 0.0, 0.04, 0.0]]), np.array([[0.0, 0.05, 0.2, 0.7]])
    able = np.array([[True, True, True, False]])

    def cost(column: int, change: float) -> float:
        beyond = expected[0, :3] + np.where(np.arange(3) == column, change, 0.0)  # the second is the least
        shares = (1.0 + beyond / portfolio_network.SOFTNESS) ** -4
        return float(shares @ costs[0, :3] / shares.sum())

    gradient = portfolio_network.choice_gradient(expected, costs, able)
    slopes = [(cost(column, 1e-6) - cost(column, -1e-6)) / 2e-6 for column in range(3)]
    assert gradient[0] == pytest.approx([*slopes, 0.0], rel=1e-4)
    assert gradient[0, 0] > 0.0 > gradient[0, 1]


def test_what_is_derived_is_what_calls_run(
    examples: list[Example], derived: Portfolio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "forward.portfolio.json"
    path.write_text(portfolio_text.text_of(examples, derived), encoding="utf-8")
    monkeypatch.setattr(resources, "portfolio_path", lambda op: path)
    portfolio.load.cache_clear()
    try:
        assert [portfolio.default(each.problem, H200) for each in examples] == [SHORT] * 8 + [LONG] * 8
        written = portfolio.load(Op.FORWARD)
    finally:
        portfolio.load.cache_clear()
    assert written.variants == derived.variants
    assert written.network.inputs == derived.network.inputs
    pairs = zip(written.network.layers, derived.network.layers, strict=True)
    for layer, same in [(written.network.ranges, derived.network.ranges), *pairs]:
        np.testing.assert_array_equal(layer, same)


def test_a_variant_that_did_not_come_to_the_rounds_is_not_believed_to_be_good() -> None:
    """The one that did on a single problem, and was a little faster there, is expected to be behind elsewhere."""
    screened = [example(problem_of(1), {SHORT: 9.0}), example(problem_of(2), {LONG: 9.0})]
    measured = [example(problem_of(rows), {SHORT: 10.0}) for rows in LENGTHS]
    measured[0] = example(problem_of(1), {SHORT: 10.0, LONG: 9.9})
    predicted = portfolio_derivation.predicted(measured, screened, [])
    elsewhere = {each.problem: each.times_us for each in predicted if each.problem.seq_q >= 256}
    assert len(elsewhere) == sum(rows >= 256 for rows in LENGTHS)
    assert all(times_us[LONG] > 1.05 * times_us[SHORT] for times_us in elsewhere.values())


def test_what_cannot_run_gives_way_to_the_next_best() -> None:
    gluon = search_space.load("gluon/forward")
    odd, even = problem_of(1024, head_dim=60), problem_of(1024, head_dim=64)
    fast = next(seed for seed in gluon.seeds_for(even, H200) if gluon.why_infeasible(seed, odd, H200) is not None)
    plain, slow = feasible(odd, even)[:2]
    each = [example(even, {fast: 10.0, plain: 15.0, slow: 20.0}), example(odd, {plain: 15.0, slow: 25.0})]
    derived = trained(each)
    assert choice(even, derived) == fast
    assert choice(odd, derived) == plain


def test_sizes_of_a_kind_share_its_kernels() -> None:
    first = drawn_calls.draw(portfolios.RESERVED, 1)[0]
    sizes = drawn_calls.with_sizes(first, 4)
    assert sizes[0] == first
    assert len(set(sizes)) == 4
    assert all(kernel_kind.shares_kernels(size, first) for size in sizes)


def test_kinds_differ_in_numbers_head_dim_or_mask() -> None:
    kinds = [(each.dtype.bytes, each.precision, each.head_dim, each.mask.structure)
             for each in portfolios.distinct(portfolios.RESERVED, 12)]  # fmt: skip
    assert len(set(kinds)) == 12


def test_a_cover_has_a_variant_near_the_best_of_each_problem(examples: list[Example]) -> None:
    assert set(variant_pool.cover(examples)) == {SHORT, LONG}
    everywhere = [example(each.problem, {SHORT: 10.0, LONG: 10.0}) for each in examples]
    assert len(variant_pool.cover(everywhere)) == 1


def test_what_a_model_expects_of_a_variant_lets_it_cover_problems_that_it_was_not_measured_on() -> None:
    """Each is the fastest on two problems, and the first is expected to be nearly as fast on all."""
    variants = feasible(*map(problem_of, LENGTHS))[:3]
    measured = [
        example(problem_of(rows), {variants[place % 3]: 10.0})
        for place, rows in enumerate(LENGTHS[: 2 * len(variants)])
    ]
    assert variant_pool.winners_of(measured) == sorted(variants, key=str)
    assert variant_pool.winners_of(measured[:-1]) == sorted(variants[:-1], key=str), "one win is too few"
    assert set(variant_pool.cover(measured)) == set(variants)
    expected = {(each.problem, H200): {variants[0]: 10.001, variants[1]: 20.0} for each in measured}
    assert variant_pool.cover(measured, expected) == [variants[0]]
    expected = {owner: dict.fromkeys(variants, 20.0) for owner in expected}
    assert set(variant_pool.cover(measured, expected)) == set(variants), (
        "what was measured counts before what is expected"
    )


def test_what_rules_allow_and_no_measurement_has_is_taken_to_fail() -> None:
    """Where fewer variants worked than may meet in rounds, none was left out for being slow."""
    screened = [example(problem_of(1), {SHORT: 9.0}), example(problem_of(2), {LONG: 9.0})]
    screened.append(example(problem_of(3), {SHORT: 9.0}))  # a second win lets it into the cover
    measured = [example(problem_of(rows), {LONG: 10.0}) for rows in LENGTHS]
    drawn = portfolio_derivation.predicted(measured, screened, [problem_of(700)])
    alike = [
        each
        for each in drawn
        if portfolio_derivation.numbers_of(each.problem) == portfolio_derivation.numbers_of(problem_of(1))
    ]
    assert alike
    assert all(each.times_us[SHORT] == portfolio_derivation.FAILED * each.best_us for each in alike)
    chosen = [replace(each, met_cover=False) for each in measured]  # few met; SHORT may not have been among them
    predicted = portfolio_derivation.predicted(chosen, screened, [problem_of(700)])
    assert any(each.times_us[SHORT] != portfolio_derivation.FAILED * each.best_us for each in predicted)


def test_predictions_have_double_precision_though_the_factor_has_single(examples: list[Example]) -> None:
    known = portfolio_model.targets_of(list(samples_of(examples)) * 20)
    rng = np.random.default_rng(0)
    shape = known.inputs.shape
    known = replace(known, inputs=rng.normal(size=shape), values=rng.normal(size=shape[:1]))
    process = GaussianProcess(known, [0.2] * shape[1])  # far too smooth for such values: large weights
    scaled = (known.inputs - known.inputs.mean(axis=0)) / known.inputs.std(axis=0)
    scaled *= 0.2 / gaussian_process.LENGTH_SCALE
    distance = math.sqrt(3.0) * np.sqrt(((scaled[:, None] - scaled) ** 2).sum(axis=2))
    covariance = (1.0 + distance) * np.exp(-distance)
    numbers = known.numbers()
    noisy = covariance + np.diag(known.noise) + gaussian_process.IN_COMMON * (numbers[:, None] == numbers)
    mean = known.values.mean()
    exact = mean + covariance @ np.linalg.solve(noisy, known.values - mean)
    np.testing.assert_allclose(process.predict(known.inputs), exact, atol=1e-6)


def test_what_is_predicted_of_a_problem_is_what_rules_let_run(examples: list[Example]) -> None:
    cover = portfolio.load(Op.FORWARD).variants[::7]
    predictor = Predictor(model=TimeModel(samples_of(examples)), cover=cover, card=H200)
    drawn = drawn_calls.draw(portfolios.RESERVED, 40)
    online = [replace(problem, numerics=Numerics.ONLINE) for problem in drawn]
    for problem in [*drawn, *online, *(replace(problem, seq_q=1) for problem in drawn)]:
        able = [place for place, variant in enumerate(cover) if portfolio.is_feasible(variant, problem, H200)]
        assert predictor.able(problem) == able


@pytest.mark.exhaustive  # each process takes seconds to start
def test_processes_predict_what_one_does(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    model = TimeModel(samples_of(examples))
    drawn = [problem_of(rows, head_dim) for rows in (1, 100, 3000) for head_dim in (64, 60, 64)]
    alone = portfolio_predictions.of(model, [SHORT, LONG], drawn, H200)
    monkeypatch.setattr(portfolio_predictions, "CHUNK", 2)
    assert portfolio_predictions.of(model, [SHORT, LONG], drawn, H200) == alone
    assert set(alone[0]) == {SHORT, LONG}
    assert alone[0] != alone[3] != alone[6]


def test_candidates_begin_with_what_a_call_runs_today_and_go_on_with_what_is_expected_to_be_the_fastest(
    examples: list[Example],
) -> None:
    model, problem = TimeModel(samples_of(examples)), problem_of(700)
    (candidates,) = portfolio_predictions.candidates(model, [SHORT, LONG], [problem], H200)
    assert candidates[0] == portfolio.starters_for(problem, H200)[0]
    assert len(candidates) == portfolio_predictions.SHORT_CANDIDATES
    others = candidates[1:]
    assert others == sorted(others, key=lambda each: (model.times_us(problem, [each], H200)[each], str(each)))
    every = [each for each in variant_pool.pool(problem, H200) if each not in candidates]
    assert min(model.times_us(problem, others, H200).values()) <= min(model.times_us(problem, every, H200).values())


def test_a_model_goes_to_other_processes_without_what_only_its_errors_need(examples: list[Example]) -> None:
    model = TimeModel(list(samples_of(examples)) * 10, with_errors=True)
    sent = pickle.dumps(model)
    factor_bytes = 4 * (10 * 2 * len(examples)) ** 2
    assert len(sent) < factor_bytes / 2
    case = problem_of(700), [SHORT, LONG], H200
    assert pickle.loads(sent).times_us(*case) == model.times_us(*case)


def test_times_of_one_size_of_elements_say_nothing_of_another(examples: list[Example]) -> None:
    wide = [replace(each, problem=replace(each.problem, dtype=DType.FLOAT32)) for each in examples]
    swapped = [replace(each, times_us={SHORT: each.times_us[LONG], LONG: each.times_us[SHORT]}) for each in wide]
    both = TimeModel(samples_of([*examples, *swapped]))
    case = problem_of(700), [SHORT, LONG], H200
    assert both.times_us(*case) == TimeModel(samples_of(examples)).times_us(*case)
    wide_case = replace(problem_of(1280), dtype=DType.FLOAT32), [SHORT, LONG], H200
    assert both.times_us(*wide_case)[SHORT] < both.times_us(*wide_case)[LONG]


def test_the_model_tells_variants_apart_on_sizes_that_it_has_not_seen(examples: list[Example]) -> None:
    model = TimeModel(samples_of(examples))
    few, many = (model.times_us(problem_of(rows), [SHORT, LONG], H200) for rows in (3, 1280))
    assert few[SHORT] < few[LONG]
    assert many[LONG] < many[SHORT]


def test_the_model_counts_what_the_last_program_of_a_tile_adds_up() -> None:
    decode = samples.problem(batch=1, heads_q=4, heads_kv=1, seq_q=1, seq_kv=60_000, head_dim=64)
    space = search_space.load("triton/forward")
    tile = {**variant_pool.TRITON_BASE, "BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "HEAD_SPLIT": 0}
    tile |= {"SPLITS": 64, "PACK_GQA": 1}
    variants = [space.variant({**tile, "parts_read": way}) for way in ("maxima_first", "by_rows", "by_groups")]
    work = portfolio_model.work_of(decode, portfolio_model.Kernels(variants), H200)
    assert work.added.tolist() == [64 * 16 * 64, 64 * 4 * 64, (8 + 8) * 16 * 64]


def test_derive_writes_a_portfolio_that_its_check_accepts_until_it_is_changed(
    examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, digests = tmp_path / "forward.portfolio.json", tmp_path / "digests.json"
    monkeypatch.setattr(portfolio_derivation, "TARGET", target)
    monkeypatch.setattr(portfolio_derivation, "DIGESTS", digests)
    monkeypatch.setattr(portfolios, "examples_of", lambda folder: examples)
    monkeypatch.setattr(portfolio_predictions, "drawn_problems", lambda: [problem_of(700)])
    monkeypatch.setattr(portfolio_derivation, "digest_of_part", lambda: "of a part")
    monkeypatch.setattr(portfolio_network, "EPOCHS", 3)
    assert "of the best time" in CliRunner().invoke(portfolios.app, ["derive"]).output
    assert json.loads(digests.read_text())["portfolio"] == portfolio_derivation.digest_of_files(target)
    assert CliRunner().invoke(portfolios.app, ["derive", "--check"]).exit_code == 0
    target.write_text(target.read_text().replace("Not to be edited", "Edited"))
    refused = CliRunner().invoke(portfolios.app, ["derive", "--check"])
    assert refused.exit_code == 1
    assert "is not what the data give; run python benchmarks/portfolios.py derive" in refused.output


def test_the_shipped_portfolio_was_derived_from_the_measurements_that_are_there() -> None:
    """If this fails, run `python benchmarks/portfolios.py derive`, which takes the better part of an hour."""
    known = json.loads(portfolio_derivation.DIGESTS.read_text(encoding="utf-8"))
    assert known["measurements"] == portfolio_derivation.digest_of_measurements()
    assert known["portfolio"] == portfolio_derivation.digest_of_files(portfolio_derivation.TARGET)


@pytest.mark.exhaustive
def test_the_derivation_does_what_it_did_when_the_shipped_portfolio_was_derived() -> None:
    """The whole takes the better part of an hour: `python benchmarks/portfolios.py derive --check`."""
    known = json.loads(portfolio_derivation.DIGESTS.read_text(encoding="utf-8"))
    assert known["part"] == portfolio_derivation.digest_of_part()


@pytest.mark.exhaustive
def test_the_shipped_portfolio_chooses_well_on_measured_problems() -> None:
    """Bounds are a little above what its choices took (docs/decisions/portfolios.md)."""
    shipped = portfolio.load(Op.FORWARD)
    # Where rows differ in length, few were measured in the order that calls run.
    for dtypes, count, mean, largest in ((SIXTEEN_BITS, 2200, 1.01, 1.4), ({DType.FLOAT32}, 880, 1.015, 2.0)):
        examples = [each for each in portfolio_examples.examples_of(portfolio_examples.DATA)
                    if each.problem.dtype in dtypes]  # fmt: skip
        regrets = [regret for each in examples if (regret := portfolio_network.regret(each, shipped)) is not None]
        assert len(regrets) > count
        assert statistics.geometric_mean(regrets) < mean
        assert max(regrets) < largest


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(DType.BFLOAT16, Precision.IEEE), *((DType.FLOAT32, precision) for precision in Precision)],
    ids=lambda part: part.value,
)
def test_what_untuned_calls_run_fits_an_sm(dtype: DType, precision: Precision) -> None:
    """A first choice that does not compile costs seconds, and the next one was not chosen for such sizes."""
    drawn = [replace(each, dtype=dtype, precision=precision) for each in drawn_calls.draw(5, 60)]
    kinds = {(each.head_dim_padded, each.mask.structure, each.seq_q > 16): each for each in drawn}
    assert len(kinds) > 12
    for each in kinds.values():
        first = portfolio.variants_for(each, H200)[0]
        assert compiler.inspect(render.render(each, first), 90).shared_bytes <= H200.shared_bytes_per_block, first


def test_measurements_of_seeds_that_are_examined_are_refused() -> None:
    result = CliRunner().invoke(portfolios.app, ["measure", "--seed", "7"])
    assert result.exit_code == 2
    assert "seeds below 1000 draw what untuned.py examines" in " ".join(result.output.split())


def test_finals_of_shipped_entries_become_measurements_of_drawn_kinds(tmp_path: Path) -> None:
    assert CliRunner().invoke(portfolios.app, ["finals", "--out", str(tmp_path)]).exit_code == 0
    measurements = portfolio_examples.read(tmp_path / "h200_chosen_shipped.jsonl")
    assert len(measurements) > 100
    assert max(each.problem.seq_q for each in measurements) >= 16_384
    assert all(each.times_us and not each.met_cover for each in measurements)
    assert not any(each.problem.packed or each.problem.mask.sparse or each.problem.cache for each in measurements)
    entries = {
        entry.problem: entry
        for file in store.read_folder(resources.shipped_cache())
        for entry in file.entries.values()
        if file.device == "h200"
    }
    first = measurements[0]
    entry = entries[first.problem]
    assert entry.measurement is not None
    assert first.times_us[entry.variant] == round(entry.measurement.median_us, 2)


def test_finals_of_another_cache_have_a_file_of_their_own(tmp_path: Path) -> None:
    problem = samples.problem(seq_q=640, seq_kv=640, dtype=DType.FLOAT16)
    variant = SPACE.default(problem, H200)
    store.merge(tmp_path / "cache", H200, Op.FORWARD, [samples.tuned(problem, variant)])
    options = ["--cache", str(tmp_path / "cache"), "--name", "examined7", "--out", str(tmp_path)]
    assert CliRunner().invoke(portfolios.app, ["finals", *options]).exit_code == 0
    (measurement,) = portfolio_examples.read(tmp_path / "h200_chosen_examined7.jsonl")
    assert (measurement.problem, set(measurement.times_us), measurement.met_cover) == (problem, {variant}, False)


def test_a_file_of_measurements_reads_back(tmp_path: Path) -> None:
    problem, times_us = problem_of(64), {SHORT: 12.5, LONG: 10.0}
    (read,) = portfolio_examples.read(measured_files.written(tmp_path / "h200_forward_1000.jsonl", {problem: times_us}))
    assert (read.problem, read.times_us, read.device) == (problem, times_us, H200)


def test_losses_are_times_of_what_untuned_calls_run_over_the_best_measured_ones(tmp_path: Path) -> None:
    best, behind, unmeasured = problem_of(64), problem_of(300), problem_of(5000)
    times_us = {
        best: {portfolio.default(best, H200): 10.0, LONG: 20.0},
        behind: {portfolio.default(behind, H200): 12.5, LONG: 10.0},
        unmeasured: {SHORT: 10.0},
    }
    path = measured_files.written(tmp_path / "h200_chosen_1000.jsonl", times_us)
    result = CliRunner().invoke(portfolios.app, ["losses", str(path), "--most", "1"])
    assert result.output.splitlines() == [
        "h200_chosen_1000.jsonl: 3 problems, 2 by a measured variant: 1.118 of the best time, at most 1.250; "
        "1 within 2%, 1 by more than 15%",
        f"  1.250 {behind}",
    ]


CAUSAL = problem_of(4096, mask=Mask.parse("causal"))


def in_all_orders(variant: Variant) -> list[Variant]:
    """One head after another, and all side by side, which suits CAUSAL."""
    return [head_order.in_order(variant, group) for group in (1, head_order.ALL)]


def test_where_rows_differ_in_length_a_portfolio_learns_from_the_order_that_calls_run() -> None:
    (short, short_all), (long, _) = map(in_all_orders, (SHORT, LONG))
    each = example(CAUSAL, {short: 12.0, short_all: 10.0, long: 11.0})
    assert each.running_us == {short: 10.0}, "and the other was not measured as it would run"
    assert example(problem_of(4096), {short: 12.0}).running_us == {short: 12.0}
    assert variant_pool.winners_of([each] * 2) == [short]
    shipped = trained([example(CAUSAL, {short: 10.0, long: 20.0})] * 2)
    assert portfolio_network.regret(each, shipped) == 1.0


def test_what_is_measured_where_rows_differ_in_length_is_what_calls_run() -> None:
    pool = variant_pool.pool(CAUSAL, H200)
    assert pool == [head_order.suiting(variant, CAUSAL, H200) for variant in pool]
    assert len(set(pool)) == len(pool) >= 12
    predictor = Predictor(model=Echo(), cover=[SHORT, LONG], card=H200)  # type: ignore[arg-type]
    times = dict(predictor.times_us(CAUSAL))
    assert [times[place] for place in range(2)] == [head_order.ALL, head_order.ALL]


class Echo:
    """A model by which a variant takes as long as it has heads side by side."""

    def times_us(self, problem: Problem, variants: list[Variant], device: Device) -> dict[Variant, float]:
        return {variant: float(variant[head_order.GROUP]) for variant in variants}


def test_the_model_knows_how_long_the_last_tiles_of_an_order_run_on() -> None:
    few = replace(CAUSAL, heads_q=8, heads_kv=8, seq_q=2048, seq_kv=2048)
    tiles = (each for each in variant_pool.pool(few, H200) if each.template == "gluon/forward")
    orders = in_all_orders(next(each for each in tiles if each["BLOCK_M"] == 128))
    kernels = portfolio_model.Kernels(orders)
    after_another, side_by_side = portfolio_model.work_of(few, kernels, H200).tail
    assert after_another > 1.1
    assert side_by_side == 1.0
    assert portfolio_model.work_of(problem_of(4096), kernels, H200).tail.tolist() == [1.0, 1.0]
    spans = [portfolio_model.features(few, [variant], H200)["span"] for variant in orders]
    assert spans[0] > spans[1]
