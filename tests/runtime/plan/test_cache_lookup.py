"""Which kernel runs for a problem, and why: every level, from cache files that were written for the test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples
import strategies
import triton
from hypothesis import HealthCheck, given, settings

from autoattn.cache import store
from autoattn.codegen import portfolio, render, resources, search_space
from autoattn.core import device_profiles, triton_release
from autoattn.core.cache_entry import CacheEntry, Candidate, Finding, Mark
from autoattn.core.device import Device
from autoattn.core.key_cache import KeyCache
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Op, Precision, Problem
from autoattn.core.variant import Variant
from autoattn.errors import CacheError
from autoattn.runtime.plan import cache_lookup, explanations, tuned_entries
from autoattn.runtime.plan.explanations import Level

H200, A30 = samples.H200, samples.A30
H100 = device_profiles.named("h100")
TEMPLATE = "triton/forward"
PROBLEM = samples.problem()
# Of the same kernels as PROBLEM: in its bucket, a tenth and a fifth of an octave away, and two octaves.
IN_BUCKET = samples.problem(seq_q=1000)
NEAR = samples.problem(seq_q=1100)
FARTHER = samples.problem(seq_q=1180)
FAR = samples.problem(seq_q=2048, seq_kv=8192)


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "shipped")


def fresh(entry: CacheEntry, **changes: Any) -> CacheEntry:
    """The entry, tuned with today's template and Triton."""
    entry = replace(entry, **{"versions": {"triton": triton.__version__}, **changes})
    return entry if "source_digest" in changes else samples.current(entry)


def measured(problem: Problem, **changes: Any) -> CacheEntry:
    return fresh(samples.measured(problem), **{"choice": "kernel", **changes})


def predicted(problem: Problem, **changes: Any) -> CacheEntry:
    return fresh(samples.predicted(problem), **changes)


def written(folder: Path, *entries: CacheEntry, device: Device = H200) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    store.merge(folder, device, Op.FORWARD, entries)
    return folder


def explained(folder: Path, problem: Problem = PROBLEM, device: Device | None = H200) -> explanations.Explanation:
    return cache_lookup.explain(problem, device, folder)


def on_cache(**changes: Any) -> Problem:
    """A step of generation on a contiguous cache, of eight heads of keys."""
    facts: dict[str, Any] = {"batch": 1, "heads_q": 32, "heads_kv": 8, "seq_q": 1, "seq_kv": 1024, "mask": Mask()}
    cache = KeyCache.parse("contiguous")
    return samples.problem(**{**facts, "layout": Layout.BSHD, "cache": cache, **changes})


# --- levels -----------------------------------------------------------------------------------------------------------


def test_the_problem_itself_beats_its_bucket(tmp_path: Path) -> None:
    entries = [measured(PROBLEM, params={**samples.measured().params, "num_warps": 4}), measured(IN_BUCKET)]
    explanation = explained(written(tmp_path, *entries))
    assert (explanation.level, explanation.route, explanation.entry) == (
        Level.EXACT,
        "kernel",
        explained(tmp_path).entry,
    )
    assert explanation.variant is not None
    assert explanation.variant["num_warps"] == 4
    assert explanation.reason == "this problem was measured on this card"
    assert explanation.steps == ()


def test_the_bucket_beats_a_farther_neighbour(tmp_path: Path) -> None:
    explanation = explained(written(tmp_path, measured(NEAR), measured(IN_BUCKET), measured(FARTHER)))
    assert explanation.level is Level.BUCKET
    assert explanation.entry is not None
    assert explanation.entry.problem == IN_BUCKET


def test_the_nearest_of_several_neighbours_is_taken(tmp_path: Path) -> None:
    explanation = explained(written(tmp_path, measured(FARTHER), measured(NEAR), predicted(PROBLEM)))
    assert explanation.level is Level.NEAREST
    assert explanation.entry is not None
    assert explanation.entry.problem == NEAR
    assert "0.1 octaves away" in explanation.reason
    assert explanation.steps[0] == "exact: this problem was not measured on this card"


def test_a_neighbour_beats_a_prediction(tmp_path: Path) -> None:
    assert explained(written(tmp_path, measured(FARTHER), predicted(PROBLEM))).level is Level.NEAREST


def test_a_prediction_beats_the_default_and_says_that_it_is_none_measured(tmp_path: Path) -> None:
    explanation = explained(written(tmp_path, predicted(PROBLEM)))
    assert (explanation.level, explanation.route) == (Level.PREDICTED, "kernel")
    assert explanation.reason == "predicted for h200, not measured"
    assert [step.partition(":")[0] for step in explanation.steps] == ["exact", "bucket, nearest"]


def test_a_prediction_for_a_neighbour_is_not_used(tmp_path: Path) -> None:
    assert explained(written(tmp_path, predicted(IN_BUCKET))).level is Level.DEFAULT


@pytest.mark.usefixtures("no_portfolio")
def test_without_any_entry_the_templates_default_runs(tmp_path: Path) -> None:
    explanation = explained(tmp_path)
    assert (explanation.level, explanation.route, explanation.entry) == (Level.DEFAULT, "kernel", None)
    assert explanation.variant == search_space.load("gluon/forward").default(PROBLEM, H200)
    assert explanation.reason.startswith("no tuned entry can serve it, so a default of gluon/forward runs")
    assert [step.partition(":")[0] for step in explanation.steps] == ["exact", "bucket, nearest", "predicted"]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": DType.FLOAT16},
        {"head_dim": 64},
        {"mask": Mask()},
        {"mask": Mask.parse("causal:top-left")},
        {"dtype": DType.FLOAT32},
    ],
    ids=str,
)
def test_an_entry_of_other_kernels_is_no_neighbour(tmp_path: Path, change: dict[str, Any]) -> None:
    assert explained(written(tmp_path, measured(samples.problem(**change)))).level is Level.DEFAULT


def test_products_of_float32_make_other_kernels(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"dtype": DType.FLOAT32, "head_dim": 64}
    exact, coarse, _ = (samples.problem(**facts, precision=precision) for precision in Precision)
    assert explained(written(tmp_path, measured(exact)), coarse).level is Level.DEFAULT


@pytest.mark.usefixtures("no_portfolio")  # beside one, only near entries are asked
@pytest.mark.parametrize("change", [{"layout": Layout.BSHD}, {"heads_kv": 4}, {"batch": 8}, {"heads_q": 64}], ids=str)
def test_batch_heads_and_layout_make_a_neighbour(tmp_path: Path, change: dict[str, Any]) -> None:
    assert explained(written(tmp_path, measured(samples.problem(**change)))).level in (Level.BUCKET, Level.NEAREST)


@pytest.mark.usefixtures("no_portfolio")  # beside one, only near entries are asked
def test_beyond_eight_octaves_nothing_is_a_neighbour(tmp_path: Path) -> None:
    within, beyond = samples.problem(seq_q=2**14, seq_kv=2**16), samples.problem(seq_q=2**14, seq_kv=2**17)
    assert explained(written(tmp_path / "within", measured(within))).level is Level.NEAREST
    assert explained(written(tmp_path / "beyond", measured(beyond))).level is Level.DEFAULT


@pytest.mark.parametrize(
    ("tuned", "serves"),
    [
        ({"seq_kv": 1400}, True),
        ({"seq_kv": 2048}, False),
        ({"batch": 2}, False),
        ({"batch": 32}, False),
    ],
    ids=str,
)
def test_the_winner_of_a_cache_serves_sizes_that_ask_for_as_many_shared_programs(
    tmp_path: Path, tuned: dict[str, Any], serves: bool
) -> None:
    level = explained(written(tmp_path, measured(on_cache(**tuned))), on_cache()).level
    assert (level in (Level.BUCKET, Level.NEAREST)) == serves


def test_winners_of_caches_that_need_no_shared_programs_serve_one_another(tmp_path: Path) -> None:
    folder = written(tmp_path, measured(on_cache(batch=64, seq_kv=8192)))
    assert explained(folder, on_cache(batch=32, seq_kv=16384)).level is Level.NEAREST
    assert explained(folder, on_cache(batch=16, seq_kv=16384)).level is Level.DEFAULT


@pytest.mark.usefixtures("no_portfolio")  # beside one, only near entries are asked
def test_of_equally_near_neighbours_always_the_same_is_taken(tmp_path: Path) -> None:
    entries = [measured(samples.problem(seq_q=length)) for length in (512, 2048)]
    taken = [explained(written(tmp_path / str(turn), *entries[:: (-1) ** turn])).entry for turn in range(2)]
    assert taken[0] is not None
    assert taken[0] == taken[1]


# --- numerics ---------------------------------------------------------------------------------------------------------

ONLINE = samples.problem(numerics=Numerics.ONLINE)
KEPT = {**samples.measured().params, "softmax": "first_max"}


def of_numerics(problem: Problem, make: Callable[..., CacheEntry]) -> CacheEntry:
    """An entry of a problem whose winner keeps the maximum where it may."""
    online = problem.numerics is Numerics.ONLINE
    return make(problem) if online else make(problem, params=KEPT)


@pytest.mark.parametrize("make", [measured, predicted])
def test_online_numerics_take_what_was_tuned_for_any_when_no_maximum_is_kept(
    make: Callable[..., CacheEntry], tmp_path: Path
) -> None:
    entry = make(PROBLEM)
    assert entry.params["softmax"] != "first_max"
    explanation = explained(written(tmp_path, entry), ONLINE)
    assert (explanation.problem, explanation.variant, explanation.route) == (ONLINE, entry.variant, "kernel")
    assert explanation.level is (Level.EXACT if make is measured else Level.PREDICTED)


@pytest.mark.parametrize("make", [measured, predicted])
def test_online_numerics_refuse_a_kept_maximum_with_the_spaces_words(
    make: Callable[..., CacheEntry], tmp_path: Path
) -> None:
    alone = (replace(of_numerics(problem, make), rivals=(), candidates=()) for problem in (PROBLEM, NEAR))
    folder = written(tmp_path, *alone)
    assert explained(folder).variant == Variant.of(TEMPLATE, KEPT)
    explanation = explained(folder, ONLINE)
    assert explanation.level is Level.DEFAULT
    assert explanation.variant is not None
    assert explanation.variant["softmax"] != "first_max"
    reasons = [step for step in explanation.steps if "cannot serve, numerics online asks for" in step]
    assert len(reasons) == (2 if make is measured else 1)
    assert f"{PROBLEM} cannot serve" in reasons[0]


def test_entries_of_both_numerics_serve_their_own(tmp_path: Path) -> None:
    for plain, online in ((PROBLEM, ONLINE), (samples.problem(seq_q=1000), replace(ONLINE, seq_q=1000))):
        folder = written(tmp_path, of_numerics(PROBLEM, measured), of_numerics(ONLINE, measured))
        for problem, tuned in ((plain, PROBLEM), (online, ONLINE)):
            explanation = explained(folder, problem)
            assert explanation.entry is not None
            assert explanation.entry.problem == tuned


def test_a_winner_among_online_kernels_alone_serves_no_near_problem_of_any_numerics(tmp_path: Path) -> None:
    folder = written(tmp_path, measured(replace(ONLINE, seq_q=1000)))
    assert explained(folder).level is Level.DEFAULT
    assert explained(folder, ONLINE).level is Level.BUCKET


def test_an_entry_from_before_there_were_numerics_is_one_for_any(tmp_path: Path) -> None:
    path = store.path_of(written(tmp_path, measured(PROBLEM)), H200, Op.FORWARD)
    document = json.loads(path.read_text())
    for entry in document["entries"].values():
        assert entry["problem"].pop("numerics") == "any"
    path.write_text(json.dumps(document))
    explanation = explained(tmp_path)
    assert explanation.level is Level.EXACT
    assert explanation.entry is not None
    assert explanation.entry.problem.numerics is Numerics.ANY


# --- distance ---------------------------------------------------------------------------------------------------------


def test_distance_counts_octaves_and_is_the_same_both_ways() -> None:
    assert tuned_entries.distance_between(PROBLEM, PROBLEM) == 0.0
    assert tuned_entries.distance_between(PROBLEM, FAR) == tuned_entries.distance_between(FAR, PROBLEM) == 2.0
    assert tuned_entries.distance_between(PROBLEM, samples.problem(batch=1)) == 2.0
    assert tuned_entries.distance_between(PROBLEM, samples.problem(heads_kv=32)) == 2.0


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"seq_q": 513}, True),
        ({"seq_q": 512}, False),
        ({"seq_q": 1025}, False),
        ({"seq_kv": 4095}, True),
        ({"batch": 3}, True),
        ({"batch": 2}, False),
        ({"heads_kv": 16}, False),
    ],
    ids=str,
)
def test_a_bucket_rounds_sizes_up_to_powers_of_two(change: dict[str, int], same: bool) -> None:
    assert (tuned_entries.bucket(samples.problem(**change)) == tuned_entries.bucket(PROBLEM)) is same


def test_windows_tables_and_packed_sequences_are_as_far_apart_as_the_keys_that_they_keep() -> None:
    def far(*masks: str, **facts: Any) -> float:
        return tuned_entries.distance_between(*(samples.problem(mask=Mask.parse(mask), **facts) for mask in masks))

    assert far("window:127,128", "window:511,512", seq_q=4096) == pytest.approx(2.0, abs=0.2)
    assert far("blocks:64x64,0.5", "blocks:64x64,0.125") == 2.0
    packed = [
        samples.problem(layout=Layout.PACKED, mask=Mask(), seq_q=1024, seq_kv=1024, tokens_q=tokens, tokens_kv=tokens)
        for tokens in (4096, 2048)
    ]
    assert tuned_entries.distance_between(*packed) > 1.0  # half of the queries, and fewer keys for each
    wide, narrow = (samples.problem(mask=Mask.window(left, 0), seq_q=4096) for left in (2000, 100))
    assert tuned_entries.bucket(wide) != tuned_entries.bucket(narrow)


def test_an_entry_of_another_search_space_is_skipped_and_said(tmp_path: Path) -> None:
    params = {name: value for name, value in samples.measured().params.items() if name != "HEAD_SPLIT"}
    old = measured(PROBLEM, params=params, space_digest="0" * 16, source_digest="0" * 16)
    explanation = explained(written(tmp_path, old, measured(NEAR)))
    assert (explanation.level, explanation.entry and explanation.entry.problem) == (Level.NEAREST, NEAR)
    assert f"{PROBLEM} cannot serve, it was tuned in another search space of triton/forward" in explanation.steps[0]


def test_what_the_card_has_no_products_for_goes_to_pytorch_with_the_reason(tmp_path: Path) -> None:
    explanation = explained(tmp_path, samples.problem(dtype=DType.FLOAT8), A30)
    assert (explanation.route, explanation.level) == ("sdpa", Level.SDPA)
    assert "float8 products need an NVIDIA GPU of compute capability 8.9 or newer" in explanation.reason


# --- what cannot serve ------------------------------------------------------------------------------------------------


def test_an_entry_that_was_tuned_for_another_template_is_skipped_and_said(tmp_path: Path) -> None:
    explanation = explained(written(tmp_path, measured(PROBLEM, source_digest="0" * 16), measured(NEAR)))
    assert (explanation.level, explanation.entry and explanation.entry.problem) == (Level.NEAREST, NEAR)
    (step,) = explanation.steps
    assert step.startswith(f"exact: {PROBLEM} cannot serve, it was tuned for another text of triton/forward")
    assert "autoattn tune" in step


def test_every_stale_entry_is_said_once(tmp_path: Path) -> None:
    stale = [measured(problem, source_digest="0" * 16) for problem in (PROBLEM, NEAR)]
    explanation = explained(written(tmp_path, *stale, predicted(FARTHER)))
    assert explanation.level is Level.DEFAULT
    assert sum(f"{PROBLEM} cannot serve" in step for step in explanation.steps) == 1
    assert sum(f"{NEAR} cannot serve" in step for step in explanation.steps) == 1


@pytest.mark.usefixtures("no_portfolio")  # beside one, only near entries are asked
def test_a_neighbour_that_cannot_run_this_problem_is_skipped_and_said(tmp_path: Path) -> None:
    """Persistent programs need more tiles than this short problem has."""
    short = samples.problem(batch=1, heads_q=8, seq_q=128, seq_kv=512)
    near = samples.problem(batch=1, heads_q=8, seq_q=1024, seq_kv=4096)
    farther = samples.problem(batch=1, heads_q=8, seq_q=2048, seq_kv=4096)
    persistent = measured(near, params={**samples.measured(near).params, "PERSISTENT": 1})
    explanation = explained(written(tmp_path, persistent, measured(farther)), short)
    assert explanation.entry is not None
    assert explanation.entry.problem == farther
    assert any("persistent programs need more tiles" in step for step in explanation.steps)


def test_an_entry_for_another_triton_serves_and_is_said(tmp_path: Path) -> None:
    other = another_release()
    explanation = explained(written(tmp_path, measured(PROBLEM, versions={"triton": other})))
    assert explanation.level is Level.EXACT
    assert explanation.steps == (f"{PROBLEM} was tuned with Triton {other}, this is {triton.__version__}",)


def another_release() -> str:
    """A version of Triton that is supported and not installed."""
    return f"{next(release for release in triton_release.SUPPORTED if release != triton_release.installed_release())}.0"


def test_an_entry_of_the_installed_triton_goes_before_one_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another = measured(PROBLEM, versions={"triton": another_release()})
    own, shipped = written(tmp_path / "own", of_another), written(tmp_path / "shipped", measured(PROBLEM))
    for user, other in ((own, shipped), (shipped, own)):
        monkeypatch.setattr(resources, "user_cache", lambda user=user: user)
        monkeypatch.setattr(resources, "shipped_cache", lambda other=other: other)
        explanation = cache_lookup.explain(PROBLEM, H200)
        assert explanation.entry is not None
        assert explanation.entry.versions == {"triton": triton.__version__}
    alone = cache_lookup.explain(PROBLEM, H200, own).entry
    assert alone is not None
    assert alone.versions == of_another.versions


def test_measurements_of_another_architecture_of_that_name_are_ignored_and_said(tmp_path: Path) -> None:
    other = replace(H200, arch=80)
    explanation = explained(written(tmp_path, measured(PROBLEM), predicted(NEAR)), device=other)
    assert explanation.level is Level.DEFAULT
    assert explanation.steps[0].endswith(f"speaks of {H200.fingerprint}, not of {other.fingerprint}")


# --- Portfolios -------------------------------------------------------------------------------------------------------


FIFTEEN = samples.problem(seq_q=15)


@pytest.fixture
def portfolio_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Variant, Variant]:
    """A portfolio whose first variant is for few queries, its second for others; both are plain Triton's."""
    seeds_of = search_space.load("triton/forward").seeds_for
    few = next(seed for seed in seeds_of(samples.problem(seq_q=1), H200) if seed in seeds_of(FIFTEEN, H200))
    many = seeds_of(PROBLEM, H200)[3]
    named = {"few": few, "many": many}
    document = {
        "about": [],
        "version": portfolio.VERSION,
        "operation": "forward",
        "let": {"rows": "queries / batch"},
        "left_out": "rows < 1",
        "variants": {name: {"template": each.template, "params": each.as_dict()} for name, each in named.items()},
        "network": {"inputs": {"rows": [1, 9999]}, "layers": [[[1, -1], [-4, 4]]]},  # log2(rows) - 4 and its negative
    }
    path = tmp_path / "forward.portfolio.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setattr(resources, "portfolio_path", lambda op: path)
    portfolio.load.cache_clear()
    yield few, many  # type: ignore[misc]
    portfolio.load.cache_clear()


def test_the_portfolio_goes_before_the_first_templates_default(
    tmp_path: Path, portfolio_of_two: tuple[Variant, Variant]
) -> None:
    few, many = portfolio_of_two
    for seq_q, expected in ((1, few), (15, few), (1024, many), (4096, many)):
        explanation = explained(written(tmp_path / "own"), samples.problem(seq_q=seq_q, mask=Mask()))
        assert (explanation.level, explanation.variant) == (Level.DEFAULT, expected)
        assert "that the portfolio has for these sizes" in explanation.reason
    assert next(iter(cache_lookup.variants(explanation, H200))) == many


@pytest.mark.parametrize("sister", [False, True])
def test_the_portfolio_goes_before_entries_that_are_far(
    sister: bool, tmp_path: Path, portfolio_of_two: tuple[Variant, Variant]
) -> None:
    """The H200's winner of 1,024 tokens took 1.7 times the tuned time of 128 tokens on an H100, where the portfolio
    had 1.1."""
    card = device_profiles.named("h100") if sister else H200
    long = samples.problem(seq_q=1024, seq_kv=1024)
    folder = written(tmp_path / "own", measured(long))
    levels = {
        length: cache_lookup.explain(samples.problem(seq_q=length, seq_kv=length), card, folder).level
        for length in (128, 1000, 1040, 1300)
    }
    near = {Level.SISTER} if sister else {Level.BUCKET, Level.NEAREST}
    assert levels[128] is levels[1300] is Level.DEFAULT
    assert {levels[1000], levels[1040]} <= near


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": DType.FLOAT8},
        {"modifiers": Modifiers(softcap=True)},
        {"layout": Layout.PACKED, "tokens_q": 4096, "tokens_kv": 4096},
    ],
    ids=["float8", "softcap", "packed"],
)
def test_where_the_portfolio_was_not_measured_far_entries_go_before_it(
    changes: dict[str, Any], tmp_path: Path, portfolio_of_two: tuple[Variant, Variant]
) -> None:
    tuned = samples.problem(seq_q=1024, seq_kv=1024, **changes)
    folder = written(tmp_path / "own", measured(tuned))
    tokens: dict[str, Any] = {"tokens_q": 2048, "tokens_kv": 2048} if tuned.packed else {}
    short = replace(tuned, seq_q=256, seq_kv=256, batch=2, **tokens)
    assert tuned_entries.distance_between(tuned, short) > cache_lookup.NEAR
    assert cache_lookup.explain(short, H200, folder).level is Level.NEAREST


def test_where_the_portfolio_has_nothing_that_can_run_the_templates_default_does(
    tmp_path: Path, portfolio_of_two: tuple[Variant, Variant]
) -> None:
    problem = samples.problem(head_dim_v=512)
    explanation = explained(written(tmp_path / "own"), problem)
    assert explanation.variant not in portfolio_of_two
    assert explanation.variant == search_space.load("triton/forward").default(problem, H200)


# --- Sister cards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sister", [H100, replace(H200, sm_count=120)], ids=["another name", "a slice"])
def test_what_another_card_of_the_architecture_measured_serves_as_a_sisters(sister: Device, tmp_path: Path) -> None:
    explanation = explained(written(tmp_path, measured(PROBLEM)), device=sister)
    assert explanation.level is Level.SISTER
    assert explanation.entry is not None
    assert explanation.entry.problem == PROBLEM
    assert "was measured on NVIDIA H200, another card of sm_90" in explanation.reason


def test_a_sisters_time_is_scaled_by_the_cards_rates(tmp_path: Path) -> None:
    one_query = samples.problem(seq_q=1, seq_kv=60_000)  # bound by memory
    written(tmp_path, measured(one_query, measurement=samples.measurement(one_query, 480.0)))
    reason = explained(tmp_path, one_query, device=H100).reason
    assert "its 480 us there are about 687.8 us here" in reason, "4.80 TB/s over 3.35"


def test_a_sisters_choice_of_a_backend_holds_here(tmp_path: Path) -> None:
    written(tmp_path, measured(PROBLEM, choice="sdpa-cudnn"))
    assert explained(tmp_path, device=H100).route == "sdpa-cudnn"


def test_own_measurements_go_before_a_sisters_and_those_before_predictions(tmp_path: Path) -> None:
    written(tmp_path, predicted(PROBLEM), device=H100)
    written(tmp_path, measured(PROBLEM))
    assert explained(tmp_path, device=H100).level is Level.SISTER
    written(tmp_path, measured(NEAR), device=H100)
    near = explained(tmp_path, device=H100)
    assert near.level is Level.NEAREST
    assert near.entry is not None
    assert near.entry.problem == NEAR


def test_what_a_sister_measured_goes_before_what_is_more_than_an_octave_farther_here(tmp_path: Path) -> None:
    written(tmp_path, measured(PROBLEM))
    written(tmp_path, measured(FAR), device=H100)
    assert explained(tmp_path, device=H100).level is Level.SISTER
    assert explained(tmp_path, FAR, device=H100).level is Level.EXACT


def test_a_sisters_problem_far_away_serves_no_more_than_ones_own_would(tmp_path: Path) -> None:
    written(tmp_path, measured(samples.problem(batch=1, heads_q=1, heads_kv=1, seq_q=64, seq_kv=64)))
    assert explained(tmp_path, device=H100).level is Level.DEFAULT


def test_the_sisters_problem_with_as_much_work_for_each_sm_serves(tmp_path: Path) -> None:
    """A slice with half of the SMs asks for 8 sequences: 16 gave the SMs of the whole card as much to do."""
    half = replace(H200, sm_count=66)
    sixteen, four = samples.problem(batch=16), samples.problem(batch=4)
    written(tmp_path, measured(sixteen), measured(four))
    explanation = explained(tmp_path, samples.problem(batch=8), device=half)
    assert explanation.entry is not None
    assert explanation.entry.problem == sixteen


def test_a_sisters_entry_that_is_written_later_is_seen(tmp_path: Path) -> None:
    assert explained(tmp_path, device=H100).level is Level.DEFAULT
    written(tmp_path, measured(PROBLEM))
    assert explained(tmp_path, device=H100).level is Level.SISTER
    written(tmp_path, measured(PROBLEM, choice="sdpa-flash"))
    assert explained(tmp_path, device=H100).route == "sdpa-flash"


def test_a_sisters_kernel_that_is_marked_as_wrong_does_not_run(tmp_path: Path) -> None:
    written(tmp_path, measured(PROBLEM, mark=Mark(finding=Finding.WRONG, detail="off by one")))
    explanation = explained(tmp_path, device=H100)
    assert explanation.entry is None or explanation.variant != explanation.entry.variant


def test_gradients_that_a_sister_measured_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "user_cache", lambda: tmp_path)
    assert not cache_lookup.differentiates(H100)
    backward = samples.problem(op=Op.BACKWARD, seq_q=4096)
    variant = search_space.load("triton/backward").default(backward, H200)
    store.merge(tmp_path, H200, Op.BACKWARD, [samples.tuned(backward, variant)])
    assert cache_lookup.differentiates(H100)


def test_predictions_for_another_card_of_that_name_are_taken(tmp_path: Path) -> None:
    explanation = explained(written(tmp_path, predicted(PROBLEM)), device=replace(H200, sm_count=66))
    assert explanation.level is Level.PREDICTED


def test_entries_of_another_device_are_not_seen(tmp_path: Path) -> None:
    assert explained(written(tmp_path, measured(PROBLEM)), device=A30).level is Level.DEFAULT


@pytest.mark.usefixtures("no_portfolio")
def test_a_kernel_that_cannot_run_here_makes_way_for_the_seeds_of_all_templates(tmp_path: Path) -> None:
    default = explained(tmp_path)
    seeds = [seed for space in search_space.of(PROBLEM.op) for seed in space.seeds_for(PROBLEM, H200)]
    assert list(cache_lookup.variants(default, H200)) == seeds
    assert seeds[0] == default.variant
    assert {seed.template for seed in seeds} == {TEMPLATE, "gluon/forward"}
    params = {**samples.measured(PROBLEM).params, "PERSISTENT": 2}
    exact = explained(written(tmp_path / "exact", measured(PROBLEM, params=params)))
    assert exact.variant is not None
    others = [seed for seed in seeds if seed != exact.variant]
    assert list(cache_lookup.variants(exact, H200)) == [exact.variant, *others]
    rival = explained(written(tmp_path / "rival", measured(PROBLEM, choice="sdpa-cudnn")))
    assert not list(cache_lookup.variants(rival, H200))
    assert not list(cache_lookup.variants(explained(tmp_path, device=None), None))


def without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_release, "installed", lambda: "3.12.0")


def hoppers(**changes: Any) -> CacheEntry:
    """A measured entry whose kernel is Hopper's, with runners-up of both templates."""
    gluon, plain = (search_space.load(name).default(PROBLEM, H200) for name in ("gluon/forward", TEMPLATE))
    tuned = measured(PROBLEM, template=gluon.template, params=gluon.as_dict())
    runners_up = tuple(
        Candidate(
            template=variant.template,
            params=variant.as_dict(),
            source_digest=render.render(PROBLEM, variant).digest,
            time_us=time_us,
        )
        for variant, time_us in ((gluon, 401.0), (plain, 440.0))
    )
    return replace(tuned, candidates=runners_up, **changes)


@pytest.mark.usefixtures("no_portfolio")
def test_without_the_winners_language_the_fastest_of_runners_up_and_rivals_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = hoppers()
    assert explained(written(tmp_path / "here", entry)).variant == entry.variant
    without_gluon(monkeypatch)
    slow = tuple(rival for rival in entry.rivals if rival.measurement.median_us > 440.0)
    assert len(slow) < len(entry.rivals)
    explanation = explained(written(tmp_path / "slow", replace(entry, rivals=slow)))
    assert (explanation.level, explanation.route, explanation.variant) == (
        Level.EXACT,
        "kernel",
        entry.candidates[1].variant,
    )
    assert "its kernel cannot run here; a runner-up of triton/forward was the fastest beside it" in explanation.reason
    assert "written for Triton 3.6" in explanation.steps[0]
    best = min(entry.rivals, key=lambda rival: rival.measurement.median_us)
    explanation = explained(written(tmp_path / "fast", entry))
    assert (explanation.level, explanation.route) == (Level.EXACT, best.name)
    assert explanation.variant == search_space.load(TEMPLATE).default(PROBLEM, H200), "for calls that ask for the LSE"


def test_what_was_measured_beside_a_kernel_of_another_text_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = hoppers(source_digest="0" * 16)
    without_gluon(monkeypatch)
    explanation = explained(written(tmp_path, entry))
    assert explanation.level is Level.DEFAULT


# --- rivals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "level"), [(PROBLEM, Level.EXACT), (IN_BUCKET, Level.BUCKET), (NEAR, Level.NEAREST)]
)
def test_a_rival_that_was_faster_is_followed(tmp_path: Path, problem: Problem, level: Level) -> None:
    explanation = explained(written(tmp_path, measured(problem, choice="sdpa-cudnn")))
    assert (explanation.level, explanation.route) == (level, "sdpa-cudnn")
    assert "sdpa-cudnn was the fastest, 1.10x faster than the kernel" in explanation.reason


def test_a_backend_that_is_followed_is_not_called_the_fastest_where_a_peer_was_faster(tmp_path: Path) -> None:
    entry = measured(PROBLEM, choice="sdpa-cudnn", absent={})
    quicker = replace(entry.rivals[0], name="fa4", measurement=samples.measurement(PROBLEM, 0.5 * entry.time_us))
    explanation = explained(written(tmp_path, replace(entry, rivals=(*entry.rivals, quicker))))
    assert explanation.route == "sdpa-cudnn"
    assert "sdpa-cudnn was the fastest that a call can run, 1.10x faster than the kernel" in explanation.reason


def test_a_faster_peer_does_not_take_the_kernels_place(tmp_path: Path) -> None:
    entry = measured(PROBLEM, absent={})
    quicker = replace(entry.rivals[0], name="fa4", measurement=samples.measurement(PROBLEM, 0.5 * entry.time_us))
    assert explained(written(tmp_path, replace(entry, rivals=(quicker,)))).route == "kernel"


def test_a_rival_that_nobody_knows_is_skipped_and_said(tmp_path: Path) -> None:
    (unknown, *others) = samples.measured().rivals
    rivals = (replace(unknown, name="sdpa-of-tomorrow"), *others)
    explanation = explained(written(tmp_path, measured(PROBLEM, choice="sdpa-of-tomorrow", rivals=rivals)))
    assert explanation.level is Level.DEFAULT
    assert explanation.steps[0].endswith("cannot serve, its choice sdpa-of-tomorrow is none of PyTorch's backends")


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path / "user"))
    return tmp_path / "user", tmp_path / "shipped"


def warps(explanation: explanations.Explanation) -> Any:
    assert explanation.variant is not None
    return explanation.variant["num_warps"]


def with_warps(number: int, **changes: Any) -> CacheEntry:
    return measured(PROBLEM, params={**samples.measured().params, "num_warps": number}, **changes)


def test_the_users_cache_shadows_the_shipped_one(folders: tuple[Path, Path]) -> None:
    user, shipped = folders
    written(shipped, with_warps(8), measured(NEAR))
    assert warps(cache_lookup.explain(PROBLEM, H200)) == 8
    written(user, with_warps(4))
    assert warps(cache_lookup.explain(PROBLEM, H200)) == 4
    assert cache_lookup.explain(NEAR, H200).level is Level.EXACT, "what the user has not tuned is still found"


def test_a_stale_entry_of_the_user_does_not_hide_a_shipped_one_that_holds(folders: tuple[Path, Path]) -> None:
    user, shipped = folders
    written(shipped, with_warps(8))
    written(user, with_warps(4, source_digest="0" * 16))
    explanation = cache_lookup.explain(PROBLEM, H200)
    assert (explanation.level, warps(explanation)) == (Level.EXACT, 8)


def test_a_shipped_prediction_yields_to_the_users_measurement(folders: tuple[Path, Path]) -> None:
    user, shipped = folders
    written(shipped, predicted(PROBLEM))
    written(user, with_warps(4))
    assert cache_lookup.explain(PROBLEM, H200).level is Level.EXACT


def test_a_folder_that_was_named_is_the_only_one_that_is_read(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for folder in folders:
        written(folder, measured(PROBLEM))
    (tmp_path / "empty").mkdir()
    assert explained(tmp_path / "empty").level is Level.DEFAULT
    with pytest.raises(CacheError, match="must be a folder that is there, but it does not exist"):
        explained(tmp_path / "emty")
    with pytest.raises(CacheError, match="but it does not exist"):
        explained(tmp_path / "emty", device=None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: json.dumps({**json.loads(text), "schema": 999}),
        lambda text: "[]",
        lambda text: text.replace('"num_warps": 8', '"num_warps": 7'),
    ],
    ids=["cut", "newer", "foreign", "impossible"],
)
def test_a_file_that_cannot_be_trusted_is_refused_and_left(tmp_path: Path, damage: Any) -> None:
    path = store.path_of(written(tmp_path, measured(PROBLEM)), H200, Op.FORWARD)
    text = damage(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CacheError, match=str(path)):
        explained(tmp_path)
    assert path.read_text(encoding="utf-8") == text


# --- without a card that can -----------------------------------------------------------------------------------------


def test_on_the_cpu_pytorch_answers_and_no_cache_is_read(tmp_path: Path) -> None:
    path = store.path_of(tmp_path, H200, Op.FORWARD)
    path.parent.mkdir(parents=True)
    path.write_text("damaged", encoding="utf-8")
    explanation = explained(tmp_path, device=None)
    assert (explanation.route, explanation.level) == ("sdpa", Level.SDPA)
    assert explanation.reason == "the tensors are on the CPU, where PyTorch's own attention runs"
    assert explanation.problem == PROBLEM


def test_on_a_card_older_than_ampere_pytorch_answers(tmp_path: Path) -> None:
    turing = replace(A30, name="t4", full_name="Tesla T4", arch=75)
    explanation = explained(tmp_path, device=turing)
    assert (explanation.route, explanation.level) == ("sdpa", Level.SDPA)
    assert explanation.reason == "Tesla T4 is sm_75, and the kernels need sm_80 or newer"


def test_an_explanation_reads_as_one_line(tmp_path: Path) -> None:
    assert str(explained(tmp_path)).startswith("kernel (default): no tuned entry is near enough, so a kernel of")


# --- classes of sizes -------------------------------------------------------------------------------------------------


def test_sizes_of_a_class_share_what_its_smallest_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, measured(NEAR))
    first = explained(folder, samples.problem(seq_kv=4400))
    assert first.chosen_for == samples.problem(seq_kv=4097)
    monkeypatch.setattr(cache_lookup.tuned_entries, "distance", lambda *sizes: pytest.fail("a known class was walked"))
    second = explained(folder, samples.problem(seq_kv=4500))
    assert second == replace(first, problem=samples.problem(seq_kv=4500))


def test_the_level_of_a_class_is_that_of_each_problem(tmp_path: Path) -> None:
    folder = written(tmp_path, measured(samples.problem(seq_kv=4096)))
    levels = [explained(folder, samples.problem(seq_kv=length)).level for length in (4095, 4096, 4097, 4500)]
    assert levels == [Level.BUCKET, Level.EXACT, Level.NEAREST, Level.NEAREST]


def test_a_kernel_of_a_class_that_cannot_run_at_a_problems_sizes_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = samples.problem(seq_q=64, seq_kv=64, batch=1)
    space = search_space.load("gluon/forward")
    alone = explained(tmp_path, short)
    larger = short.resized(16, 4096, 4096)
    monkeypatch.setattr(cache_lookup.size_class, "representative", lambda problem, sm_count: larger)
    cache_lookup.tuned_entries.of(short, H200, cache_lookup.inventory.folders(tmp_path)).answers.clear()
    chosen = explained(tmp_path, larger).variant
    assert chosen is not None
    assert space.why_infeasible(chosen, short, H200) is not None
    explanation = explained(tmp_path, short)
    assert (explanation.variant, explanation.chosen_for) == (alone.variant, None)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strategies.problems(tiny=False))
def test_what_a_class_gets_can_run_at_every_size_of_it(tmp_path: Path, problem: Problem) -> None:
    for device in (H200, A30):
        explanation = explained(tmp_path, problem.simplified(), device)
        if explanation.variant is not None:
            space = search_space.load(explanation.variant.template)
            assert space.why_infeasible(explanation.variant, problem.simplified(), device) is None
