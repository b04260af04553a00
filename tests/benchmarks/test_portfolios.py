"""Portfolios: what is measured, and the tree that is derived from it."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import drawn_calls
import numpy as np
import portfolio_model
import portfolio_predictions
import portfolio_text
import portfolio_tree
import portfolio_vote
import portfolios
import pytest
import samples
import variant_pool
from portfolio_tree import Example
from typer.testing import CliRunner

from autoattn.cache import store
from autoattn.codegen import portfolio, render, resources, search_space
from autoattn.codegen.portfolio import Question, Tree, Vote
from autoattn.core import kernel_kind
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Op, Precision, Problem
from autoattn.core.variant import Variant
from autoattn.kernels import compiler

H200 = samples.H200
SPACE = search_space.load("triton/forward")
SEEDS = [SPACE.variant(params) for _, params in SPACE.seeds]


def problem_of(rows: int, head_dim: int = 64) -> Problem:
    return samples.problem(
        batch=2, heads_q=4, heads_kv=4, seq_q=rows, seq_kv=max(rows, 512), head_dim=head_dim, dtype=DType.FLOAT16
    )


def feasible(*problems: Problem) -> list[Variant]:
    """Seeds that run all of these problems."""
    return [
        seed
        for seed in dict.fromkeys(SEEDS)
        if all(SPACE.why_infeasible(seed, problem, H200) is None for problem in problems)
    ]


def example(problem: Problem, times_us: dict[Variant, float]) -> Example:
    return Example(problem=problem, device=H200, times_us=times_us, rivals_us={})


def first_of(tree: Tree, count: int = 1) -> tuple[Variant, ...]:
    """The first variants of a tree that asks nothing."""
    assert isinstance(tree, tuple)
    return tree[:count]


LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 256, 384, 512, 640, 768, 1024, 1536, 2048)
SHORT, LONG = feasible(*map(problem_of, LENGTHS))[:2]


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


def test_the_tree_asks_what_tells_the_problems_apart(examples: list[Example]) -> None:
    tree = portfolio_vote.grow(examples)
    assert {variants[0] for variants in portfolio_tree.leaves(tree)} == {SHORT, LONG}
    assert [portfolio_tree.regret(each, tree) for each in examples] == [1.0] * len(examples)
    assert portfolio_tree.choice(example(problem_of(9), {}), tree) == SHORT
    assert portfolio_tree.choice(example(problem_of(4096), {}), tree) == LONG


def test_the_same_data_give_the_same_bytes_whatever_their_order(examples: list[Example]) -> None:
    shuffled = list(examples)
    random.Random(1).shuffle(shuffled)
    texts = [portfolio_text.text_of(each, portfolio_vote.grow(each)) for each in (examples, shuffled)]
    assert texts[0] == texts[1]


def test_what_is_derived_is_what_calls_run(
    examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "forward.portfolio.json"
    tree = portfolio_vote.grow(examples)
    path.write_text(portfolio_text.text_of(examples, tree), encoding="utf-8")
    monkeypatch.setattr(resources, "portfolio_path", lambda op: path)
    portfolio.load.cache_clear()
    try:
        for each in examples:
            assert portfolio.default(each.problem, H200) == portfolio_tree.choice(each, tree)
    finally:
        portfolio.load.cache_clear()


def test_trees_that_vote_ask_otherwise_than_each_other(examples: list[Example]) -> None:
    vote = portfolio_vote.grow(examples)
    assert isinstance(vote, Vote)
    assert len(vote.trees) == portfolio_vote.TREES
    assert len({tree.fact for tree in vote.trees if isinstance(tree, Question)}) > 1


def test_processes_grow_the_same_trees(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    here = portfolio_vote.grow(examples)
    monkeypatch.setattr(portfolio_vote, "FEW", 0)
    assert portfolio_vote.grow(examples) == here


def test_one_variant_that_is_best_everywhere_needs_no_question() -> None:
    each = [example(problem_of(rows), {SHORT: 10.0, LONG: 11.0}) for rows in LENGTHS]
    assert first_of(portfolio_vote.grow(each)) == (SHORT,)


def test_a_variant_that_was_not_measured_is_not_believed_to_be_good() -> None:
    """Without that, the one that was tried on a single problem would win."""
    each = [example(problem_of(rows), {SHORT: 10.0}) for rows in LENGTHS]
    each[0] = example(problem_of(1), {SHORT: 10.0, LONG: 9.9})
    assert first_of(portfolio_vote.grow(each)) == (SHORT,)


@pytest.mark.parametrize("plain_us", [20.0, 11.0], ids=["which is slow", "which is nearly as fast everywhere"])
def test_where_the_first_cannot_run_the_next_is_for_what_is_left(plain_us: float) -> None:
    gluon = search_space.load("gluon/forward")
    odd, even = problem_of(1024, head_dim=60), problem_of(1024, head_dim=64)
    fast = next(seed for seed in gluon.seeds_for(even, H200) if gluon.why_infeasible(seed, odd, H200) is not None)
    plain = feasible(odd, even)[0]
    each = [example(even, {fast: 10.0, plain: plain_us}), example(odd, {plain: plain_us})]
    assert first_of(portfolio_vote.grow(each), 2) == (fast, plain)


def test_a_list_has_what_problems_near_it_run_that_its_own_examples_never_need() -> None:
    """No question tells head dims 60 and 64 apart, and none of 60 was drawn with as many rows."""
    gluon = search_space.load("gluon/forward")
    many, odd = problem_of(1024), problem_of(1024, head_dim=60)
    fast = next(seed for seed in gluon.seeds_for(many, H200) if gluon.why_infeasible(seed, odd, H200) is not None)
    each = [example(problem_of(1024), {fast: 10.0, SHORT: 20.0, LONG: 30.0})] * 6
    each += [example(problem_of(rows), {fast: 30.0, SHORT: 10.0, LONG: 10.5}) for rows in range(1, 7)]
    each += [example(problem_of(rows, head_dim=60), {SHORT: 12.0, LONG: 10.0}) for rows in range(1, 7)]
    tree = portfolio_vote.grow(each)
    assert portfolio_tree.choice(example(many, {}), tree) == fast
    assert portfolio_tree.choice(example(odd, {}), tree) == LONG


def test_numbers_are_asked_first_though_sizes_tell_more_apart(examples: list[Example]) -> None:
    exact = [
        example(replace(each.problem, dtype=DType.FLOAT32), {SHORT: 10.0, LONG: 10.0 if each is examples[0] else 10.5})
        for each in examples
    ]
    tree = portfolio_vote.grow([*examples, *exact])
    assert isinstance(tree, Question)
    assert (tree.fact, tree.below) == ("ieee", 1.0)
    assert isinstance(tree.then, Vote), "of what is left, all have 16 bits"
    assert first_of(tree.otherwise) == (SHORT,)


def test_one_call_at_half_the_speed_costs_more_than_many_at_nine_tenths() -> None:
    each = [example(problem_of(rows), {SHORT: 10.0, LONG: 11.1}) for rows in LENGTHS[:7]]
    each.append(example(problem_of(LENGTHS[7]), {SHORT: 20.0, LONG: 10.0}))
    assert first_of(portfolio_vote.grow(each)) == (LONG,)


@pytest.mark.parametrize(
    ("values", "expected"),
    [((1.0, 60.0), 2.0), ((1.0, 4.0), 2.0), ((72.0, 80.0), 80.0), ((0.0, 1.0), 0.5), ((3.0, 4.0), 4.0)],
)
def test_thresholds_are_round_and_between(values: tuple[float, float], expected: float) -> None:
    (threshold,) = portfolio_tree.thresholds(values)
    assert threshold == expected
    assert values[0] < threshold <= values[1]


def test_the_pool_is_feasible_and_begins_with_seeds_of_the_problem() -> None:
    for problem in drawn_calls.draw(portfolios.RESERVED, 6):
        pool = variant_pool.pool(problem, H200)
        spaces = {space.template: space for space in search_space.of(Op.FORWARD)}
        seeds = [seed for space in spaces.values() for seed in space.seeds_for(problem, H200)]
        assert pool[0] in seeds
        assert len(set(pool)) == len(pool) >= 12
        assert all(spaces[each.template].why_infeasible(each, problem, H200) is None for each in pool)


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


def test_what_rules_allow_and_no_measurement_has_is_taken_to_fail() -> None:
    """Where fewer variants worked than may meet in rounds, none was left out for being slow."""
    screened = [example(problem_of(1), {SHORT: 9.0}), example(problem_of(2), {LONG: 9.0})]
    measured = [example(problem_of(rows), {LONG: 10.0}) for rows in LENGTHS]
    drawn = portfolios.predicted(measured, screened, [problem_of(700)])
    alike = [each for each in drawn if portfolios.numbers_of(each.problem) == portfolios.numbers_of(problem_of(1))]
    assert alike
    assert all(SHORT not in each.times_us for each in alike)
    chosen = [replace(each, met_cover=False) for each in measured]  # few met; SHORT may not have been among them
    assert any(SHORT in each.times_us for each in portfolios.predicted(chosen, screened, [problem_of(700)]))


def test_predictions_have_double_precision_though_the_factor_has_single(examples: list[Example]) -> None:
    known = portfolio_model.Targets.of(list(samples_of(examples)) * 20)
    rng = np.random.default_rng(0)
    shape = len(known.values), len(known.names)
    known = replace(known, inputs=rng.normal(size=shape), values=rng.normal(size=shape[0]))
    model = portfolio_model.TimeModel(known, [0.2] * shape[1])  # far too smooth for such values: large weights
    scaled = (known.inputs - known.inputs.mean(axis=0)) / known.inputs.std(axis=0) * 0.2 / portfolio_model.LENGTH_SCALE
    distance = math.sqrt(3.0) * np.sqrt(((scaled[:, None] - scaled) ** 2).sum(axis=2))
    covariance = (1.0 + distance) * np.exp(-distance)
    numbers = known.numbers()
    noisy = covariance + np.diag(known.noise) + portfolio_model.IN_COMMON * (numbers[:, None] == numbers)
    mean = known.values.mean()
    exact = mean + covariance @ np.linalg.solve(noisy, known.values - mean)
    np.testing.assert_allclose(model.predict(known.inputs), exact, atol=1e-6)


@pytest.mark.exhaustive  # each process takes seconds to start
def test_processes_predict_what_one_does(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    model = portfolio_model.fit(list(samples_of(examples)))
    drawn = [problem_of(rows, head_dim) for rows in (1, 100, 3000) for head_dim in (64, 60, 64)]
    alone = portfolio_predictions.of(model, [SHORT, LONG], drawn, H200)
    monkeypatch.setattr(portfolio_predictions, "CHUNK", 2)
    assert portfolio_predictions.of(model, [SHORT, LONG], drawn, H200) == alone
    assert set(alone[0]) == {SHORT, LONG}
    assert alone[0] != alone[3] != alone[6]


def test_a_model_goes_to_other_processes_without_what_only_its_errors_need(examples: list[Example]) -> None:
    model = portfolio_model.fit(list(samples_of(examples)) * 10)
    sent = pickle.dumps(model)
    factor_bytes = 4 * (10 * 2 * len(examples)) ** 2
    assert len(sent) < factor_bytes / 2
    case = problem_of(700), [SHORT, LONG], H200
    assert pickle.loads(sent).times_us(*case) == model.times_us(*case)


def test_the_model_tells_variants_apart_on_sizes_that_it_has_not_seen(examples: list[Example]) -> None:
    model = portfolio_model.fit(list(samples_of(examples)))
    few, many = (model.times_us(problem_of(rows), [SHORT, LONG], H200) for rows in (3, 1500))
    assert few[SHORT] < few[LONG]
    assert many[LONG] < many[SHORT]


def test_few_queries_have_variants_that_share_the_keys_of_a_head() -> None:
    pool = variant_pool.pool(samples.problem(seq_q=1, seq_kv=60_000), H200)
    assert {each.as_dict().get("SPLITS", 1) for each in pool if each.template == "triton/forward"} >= {1, 4, 16, 64}


def test_few_tiles_have_variants_whose_parts_are_added_up_at_once() -> None:
    decode = samples.problem(batch=1, heads_q=4, heads_kv=1, seq_q=1, seq_kv=60_000)
    params = [variant.as_dict() for variant in variant_pool.pool(decode, H200)]
    ways = {(each.get("parts_read"), each["SPLITS"]) for each in params if each.get("SPLITS", 1) > 1}
    assert {("by_rows", 64), ("by_rows", 128), ("by_groups", 64)} <= ways
    many = samples.problem(batch=64, heads_q=32, heads_kv=32, seq_q=1, seq_kv=60_000)
    assert not any(variant.as_dict().get("parts_read") for variant in variant_pool.pool(many, H200))


def test_few_tiles_of_many_rows_have_variants_that_fill_the_sms_and_many_tiles_have_none() -> None:
    few = samples.problem(
        batch=1, heads_q=2, heads_kv=1, seq_q=100, seq_kv=60_000, head_dim=112, mask=Mask.parse("causal")
    )
    params = [variant.as_dict() for variant in variant_pool.pool(few, H200)]
    ways = {(each["BLOCK_M"], each.get("SPLITS", 1), each.get("parts_read")) for each in params}
    assert {(64, 4, None), (64, 32, "by_groups"), (64, 64, "by_groups")} <= ways
    many = samples.problem(batch=8, heads_q=32, heads_kv=32, seq_q=4096, seq_kv=4096)
    alone = [each.as_dict() for each in variant_pool.pool(many, H200) if each.template == "triton/forward"]
    assert {each.get("SPLITS", 1) for each in alone} == {1}


def test_programs_that_take_the_next_tile_are_in_the_pool_with_heads_side_by_side_under_a_causal_mask() -> None:
    def ways(mask: str) -> set[tuple[object, ...]]:
        prompt = samples.problem(heads_q=32, heads_kv=32, seq_q=4096, seq_kv=4096, mask=Mask.parse(mask))
        pool = variant_pool.pool(prompt, H200)
        params = [each.as_dict() for each in pool if each.template == "gluon/forward"]
        names = ("schedule", "query_stages", "HEAD_GROUP", "softmax")
        return {tuple(each[name] for name in names) for each in params}

    assert {("dynamic", 2, 1, "vote"), ("dynamic", 2, 1, "first_max"), ("dynamic", 2, 16, "vote")} <= ways("causal")
    assert ("dynamic", 2, 16, "vote") not in ways("full")


def test_keys_of_one_block_have_kernels_of_one_stage_and_more_keys_have_none() -> None:
    """Tuning found them for 33 tokens, where the pool of before had none."""

    def ways(length: int) -> set[tuple[object, ...]]:
        pool = variant_pool.pool(samples.problem(batch=2, heads_q=8, seq_q=length, seq_kv=length, head_dim=128), H200)
        params = [each.as_dict() for each in pool if each.template == "gluon/forward"]
        return {(each["BLOCK_N"], each["queries_in"], each["softmax"]) for each in params if each["num_stages"] == 1}

    assert {(64, "registers", "online"), (64, "registers", "lazy"), (64, "shared", "online")} <= ways(33)
    assert (64, "registers", "online") not in ways(300)


def test_float32_has_kept_maxima_and_where_queries_are_fewer_than_a_tile_has_rows_packed_heads() -> None:
    tf32 = samples.problem(
        dtype=DType.FLOAT32, precision=Precision.TF32, heads_q=32, heads_kv=4, seq_q=64, seq_kv=1919, head_dim=64
    )

    def ways(problem: Problem) -> set[tuple[object, ...]]:
        params = [each.as_dict() for each in variant_pool.pool(problem, H200) if each.template == "triton/forward"]
        return {(each.get("PACK_GQA", 0), each["softmax"]) for each in params}

    assert {(0, "online"), (0, "first_max"), (1, "online"), (1, "first_max")} <= ways(tf32)
    assert {pack for pack, _ in ways(replace(tf32, seq_q=1919))} == {0}


def test_the_model_counts_what_the_last_program_of_a_tile_adds_up() -> None:
    decode = samples.problem(batch=1, heads_q=4, heads_kv=1, seq_q=1, seq_kv=60_000, head_dim=64)
    space = search_space.load("triton/forward")
    tile = {**variant_pool.TRITON_BASE, "BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "HEAD_SPLIT": 0}
    tile |= {"SPLITS": 64, "PACK_GQA": 1}
    added = [
        portfolio_model.work_of(decode, space.variant({**tile, "parts_read": way}), H200).added
        for way in ("maxima_first", "by_rows", "by_groups")
    ]
    assert added == [64 * 16 * 64, 64 * 4 * 64, (8 + 8) * 16 * 64]


def test_few_rows_have_tiles_of_all_heads_that_share_keys_and_of_half_of_them() -> None:
    """Of 17 queries in groups of four, the fastest kernel of an H100 had two heads in a tile."""
    pool = variant_pool.pool(samples.problem(batch=32, heads_q=32, heads_kv=8, seq_q=17, seq_kv=17, head_dim=192), H200)
    assert {each.as_dict().get("PACK_GQA", 1) for each in pool if each.template == "gluon/forward"} >= {1, 2, 4}


@pytest.mark.exhaustive
def test_the_shipped_portfolio_is_what_the_committed_measurements_give() -> None:
    result = CliRunner().invoke(portfolios.app, ["derive", "--check"])
    assert result.exit_code == 0, result.output


def test_a_list_has_a_variant_for_problems_of_too_few_tiles_for_programs_that_take_turns() -> None:
    space = search_space.load("gluon/forward")
    seed = space.default(problem_of(1), H200).as_dict()
    in_turn, single, slow = (
        space.variant({**seed, "schedule": schedule, "BLOCK_N": keys})
        for schedule, keys in (("dynamic", 128), ("one_tile", 128), ("one_tile", 64))
    )
    examples = [example(problem_of(batch), {in_turn: 1.0, single: 1.001, slow: 2.0}) for batch in range(1, 9)]
    tree = portfolio_vote.grow(examples)
    assert tree == (in_turn, single)


def test_a_file_reads_back_as_the_tree_that_it_was_written_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Question(fact="rows", below=0.013, then=(SHORT, LONG), otherwise=())
    vote = Vote(trees=(split, (SHORT,), (LONG, SHORT)))
    tree = Question(fact="keys_per_row", below=4096.0, then=vote, otherwise=(LONG,))
    path = tmp_path / "forward.portfolio.json"
    path.write_text(portfolio_text.text_of([example(problem_of(1), {SHORT: 1.0})], tree), encoding="utf-8")
    monkeypatch.setattr(resources, "portfolio_path", lambda op: path)
    portfolio.load.cache_clear()
    try:
        whole = portfolio.load(Op.FORWARD).tree
    finally:
        portfolio.load.cache_clear()
    measured = Question(fact="prompt_of_pairs", below=1.0, then=tree, otherwise=())
    assert whole == Question(fact="wgmma", below=1.0, then=(), otherwise=measured)


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
    measurements = portfolios.read(tmp_path / "h200_chosen_shipped.jsonl")
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
    (measurement,) = portfolios.read(tmp_path / "h200_chosen_examined7.jsonl")
    assert (measurement.problem, set(measurement.times_us), measurement.met_cover) == (problem, {variant}, False)


def test_a_file_of_measurements_reads_back(tmp_path: Path) -> None:
    problem = problem_of(64)
    trials = [(SHORT, 12.5), (LONG, 10.0)]
    document = {
        "problem": json.loads(json.dumps(portfolios.msgspec.to_builtins(problem))),
        "times_us": [[variant.template, variant.as_dict(), time_us] for variant, time_us in trials],
        "rivals_us": {"sdpa": 11.0},
    }
    path = tmp_path / "h200_forward_1000.jsonl"
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    (read,) = portfolios.read(path)
    assert (read.problem, dict(read.times_us), read.device) == (problem, dict(trials), H200)
