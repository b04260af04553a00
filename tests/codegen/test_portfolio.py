"""Portfolios: which variant a call runs that no entry serves, whatever its template."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples
import strategies
from hypothesis import example, given

from autoattn.codegen import portfolio, resources, search_space
from autoattn.codegen.feasibility import DerivedFacts
from autoattn.codegen.space_facts import facts_of
from autoattn.core import device_profiles
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Op, Problem
from autoattn.core.variant import Variant
from autoattn.errors import SpaceError
from autoattn.runtime.plan import cache_lookup

H200, A30 = samples.H200, samples.A30
DECODE = samples.problem(seq_q=1)
PREFILL = samples.problem()
Write = Callable[[str], None]


def seed(template: str, place: int) -> Variant:
    """A seed of a template that runs PREFILL on both cards, where the template runs there at all."""
    return search_space.load(template).seeds_for(PREFILL, H200)[place]


def name_of(variant: Variant) -> str:
    """Its name in a file."""
    return f"variant_{variant.digest}"


def question(condition: str, then: Any, otherwise: Any) -> dict[str, Any]:
    """A question of a file; answers are questions, trees that vote, or variants."""
    answers = [answer if isinstance(answer, dict | list) else listed(*answer) for answer in (then, otherwise)]
    return {"if": condition, "then": answers[0], "else": answers[1]}


def listed(*variants: Variant) -> str:
    """A list of a file."""
    return " ".join(map(name_of, variants))


def document(tree: Any, more: Sequence[Variant] = (), **others: Any) -> str:
    """A portfolio of this tree."""
    named = {
        name_of(variant): {"template": variant.template, "params": variant.as_dict()}
        for variant in (*more, GLUON, OTHER, TRITON)
    }
    whole = {
        "about": [],
        "version": portfolio.VERSION,
        "operation": "forward",
        "let": {"rows": "queries / batch"},
        "variants": named,
        "tree": tree,
    }
    return json.dumps({**whole, **others})


GLUON, OTHER = seed("gluon/forward", 0), seed("triton/forward", 2)
TRITON = search_space.load("triton/forward").seeds_for(DECODE, H200)[0]
TWO = document(question("rows < 16", (TRITON, GLUON), (GLUON, OTHER)))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    path = tmp_path / "forward.portfolio.json"
    monkeypatch.setattr(resources, "portfolio_path", lambda op: path)
    portfolio.load.cache_clear()

    def write(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        portfolio.load.cache_clear()

    yield write  # type: ignore[misc]
    portfolio.load.cache_clear()


def test_answers_lead_to_variants_of_all_templates_in_their_order(write: Write) -> None:
    write(TWO)
    assert portfolio.variants_for(DECODE, H200)[0] == TRITON
    assert portfolio.variants_for(PREFILL, H200) == [GLUON, OTHER]
    assert portfolio.default(DECODE, H200) == TRITON
    assert portfolio.default(PREFILL, H200) == GLUON


def test_what_most_trees_put_first_comes_first(write: Write) -> None:
    few = question("rows < 16", (TRITON, OTHER), (GLUON, OTHER, TRITON))
    write(document(question("rows < 9999", [few, listed(OTHER, GLUON), few, listed(OTHER, TRITON)], (GLUON,))))
    assert portfolio.default(PREFILL, H200) == OTHER, "two trees each put GLUON and OTHER first, two OTHER behind it"
    write(document([few, listed(OTHER, GLUON), few]))
    assert portfolio.variants_for(PREFILL, H200) == [GLUON, OTHER]
    assert portfolio.default(DECODE, H200) == TRITON


def test_what_cannot_run_has_no_vote(write: Write) -> None:
    """TRITON has programs that share keys, for few queries alone."""
    assert not portfolio.is_feasible(TRITON, PREFILL, H200)
    write(document([listed(TRITON, GLUON, OTHER), listed(TRITON, GLUON, OTHER), listed(OTHER, GLUON), listed(GLUON)]))
    assert portfolio.load(Op.FORWARD).suiting(PREFILL, H200) == (GLUON, OTHER)


def test_a_place_in_a_list_counts_half_of_the_place_before_it(write: Write) -> None:
    first, second, third = (seed("triton/forward", place) for place in range(3))
    lists = [listed(first, second, third, GLUON), listed(third, second, GLUON), listed(GLUON, second, third)]
    write(document(lists, [first, second, third]))
    votes = {first: 1.0, second: 1.5, third: 1.25, GLUON: 1.0}
    assert portfolio.variants_for(PREFILL, H200) == sorted(votes, key=lambda variant: -votes[variant])


def test_the_last_of_a_list_has_no_vote_unless_it_is_alone_there(write: Write) -> None:
    plain = seed("triton/forward", 1)
    write(document([listed(GLUON, OTHER), listed(plain, OTHER), listed(plain, OTHER)], [plain]))
    assert portfolio.load(Op.FORWARD).suiting(PREFILL, H200) == (plain, GLUON, OTHER)
    write(document([listed(GLUON, OTHER), listed(OTHER), listed(OTHER)]))
    assert portfolio.load(Op.FORWARD).suiting(PREFILL, H200) == (OTHER, GLUON)
    write(document([listed(TRITON, OTHER), listed(TRITON, OTHER), listed(GLUON, OTHER)]))
    assert portfolio.load(Op.FORWARD).suiting(PREFILL, H200) == (GLUON, OTHER), "no more where the others cannot run"


def test_a_default_is_what_the_class_of_sizes_runs_before_what_the_sizes_ask_for(write: Write, tmp_path: Path) -> None:
    write(document(question("seq_kv < 4400", (GLUON,), (OTHER,))))
    between = samples.problem(seq_kv=4500)  # of the class from 4,097 keys on
    assert portfolio.default(between, H200) == cache_lookup.explain(between, H200, tmp_path).variant == GLUON
    assert portfolio.starters_for(between, H200)[:2] == [GLUON, OTHER]


def test_what_cannot_run_gives_way_to_the_next_and_then_to_seeds(write: Write) -> None:
    write(TWO)
    assert portfolio.variants_for(PREFILL, A30) == [OTHER]
    float8 = samples.problem(dtype=DType.FLOAT8, seq_q=16)
    assert portfolio.default(float8, H200) in [
        *portfolio.variants_for(float8, H200),
        *search_space.load("gluon/forward").seeds_for(float8, H200),
    ]
    wide = samples.problem(seq_q=4096, head_dim_v=512)
    assert portfolio.variants_for(wide, H200) == []
    assert portfolio.default(wide, H200) == search_space.load("triton/forward").default(wide, H200)


TILE = "BLOCK_M", "BLOCK_N"
LONG = samples.problem(batch=4, heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096, head_dim=128, mask=Mask())


def listed_for_long(write: Write) -> tuple[Variant, Variant]:
    """A list for LONG, whose first variant keeps the first maximum, and whose second is plain Triton's."""
    seeds = search_space.load("gluon/forward").seeds_for(LONG, H200)
    first = next(variant for variant in seeds if variant.as_dict()["softmax"] == "first_max")
    write(document(question("rows < 16", (), (first, OTHER)), [first]))
    return first, OTHER


def test_where_scores_change_the_same_tile_stands_in_for_a_first_variant_that_cannot_run(write: Write) -> None:
    first, second = listed_for_long(write)
    assert portfolio.default(LONG, H200) == first
    changed = replace(LONG, modifiers=Modifiers(alibi=True))  # without a mask, no first maximum may be kept
    assert portfolio.variants_for(changed, H200) == [second]
    stand_in = portfolio.default(changed, H200)
    assert stand_in.template == first.template
    assert [stand_in.as_dict()[name] for name in TILE] == [first.as_dict()[name] for name in TILE]
    assert portfolio.starters_for(changed, H200)[:2] == [stand_in, second]


def test_where_no_variant_of_the_template_can_run_the_nearest_tile_stands_in(write: Write) -> None:
    first, _ = listed_for_long(write)
    biased = replace(LONG, modifiers=Modifiers(bias=Bias.KEYS))  # Gluon's template adds no biases
    octaves = {
        variant: sum(abs(math.log2(variant.as_dict()[name] / first.as_dict()[name])) for name in TILE)
        for variant in portfolio.starters_for(biased, H200)
    }
    assert octaves[portfolio.default(biased, H200)] == min(octaves.values()) < max(octaves.values())


def test_what_the_same_sizes_could_not_run_either_has_no_stand_in(write: Write) -> None:
    """Heads of 128 columns lie in one tile: a variant of two pieces says nothing of what a changed call wants."""
    seeds = search_space.load("gluon/forward").seeds_for(LONG, H200)
    first = next(variant for variant in seeds if variant.as_dict()["softmax"] == "first_max")
    pieces = Variant.of("gluon/forward", {**first.as_dict(), "BLOCK_M": 64, "BLOCK_N": 32, "HEAD_SPLIT": 1})
    write(document(question("rows < 16", (), (pieces, first, OTHER)), [pieces, first]))
    assert portfolio.default(LONG, H200) == first
    for facts in ({"modifiers": Modifiers(alibi=True)}, {"numerics": Numerics.ONLINE}):
        stand_in = portfolio.default(replace(LONG, **facts), H200)
        assert [stand_in.as_dict()[name] for name in TILE] == [first.as_dict()[name] for name in TILE]


def test_a_packed_call_runs_the_tile_that_sequences_apart_would_run(write: Write) -> None:
    apart = replace(LONG, head_dim=80, head_dim_v=80)
    seeds = search_space.load("gluon/forward").seeds_for(apart, H200)
    pieces = next(variant for variant in seeds if variant.as_dict().get("HEAD_SPLIT"))
    small = search_space.load("gluon/forward").seeds_for(apart, H200)[-1]
    write(document(question("rows < 16", (), (pieces, small, OTHER)), [pieces, small]))
    packed = replace(apart, layout=Layout.PACKED, tokens_q=8192, tokens_kv=8192)
    assert portfolio.default(apart, H200) == pieces
    assert portfolio.variants_for(packed, H200)[0] == small, "no packed values lie in two pieces"
    stand_in = portfolio.default(packed, H200)
    assert [stand_in.as_dict()[name] for name in TILE] == [pieces.as_dict()[name] for name in TILE]


def test_the_last_of_a_list_stands_in_for_none(write: Write) -> None:
    seeds = search_space.load("gluon/forward").seeds_for(LONG, H200)
    kept = next(variant for variant in seeds if variant.as_dict()["softmax"] == "first_max")
    tile = {"BLOCK_M": 64, "BLOCK_N": 64, "CTAS": 2, "queries_in": "shared", "query_stages": 1}
    alone = {"schedule": "one_tile", "output_buffer": "shared", "ping_pong": "none"}
    first = Variant.of("gluon/forward", {**kept.as_dict(), **tile, **alone})
    changed = replace(LONG, modifiers=Modifiers(alibi=True))
    last = search_space.load("gluon/forward").seeds_for(changed, H200)[-1]  # of 64 by 32, the nearest tile
    write(document(question("rows < 16", (), (first, last)), [first, last]))
    assert portfolio.variants_for(changed, H200) == [last]
    assert portfolio.default(changed, H200) != last
    assert portfolio.default(LONG, H200) == first


def test_the_next_variant_runs_problems_of_measured_facts_and_where_programs_share_keys(write: Write) -> None:
    shared = next(
        variant
        for variant in search_space.load("triton/forward").seeds_for(DECODE, H200)
        if "SPLITS" in variant.as_dict() and "PACK_GQA" in variant.as_dict()
    )
    write(document(question("rows < 16", (shared, TRITON), ()), [shared]))
    packed = samples.problem(seq_q=1, layout=Layout.PACKED, tokens_q=4, tokens_kv=8192)
    able = portfolio.variants_for(packed, H200)
    assert portfolio.default(packed, H200) == (able or search_space.load("gluon/forward").seeds_for(packed, H200))[0]
    write(TWO)
    assert portfolio.default(PREFILL, A30) == OTHER


def test_a_portfolio_that_is_read_again_is_asked_again(write: Write) -> None:
    for variant in [GLUON, OTHER] * 20:
        write(document(question("rows < 16", (), (variant,))))
        assert portfolio.variants_for(PREFILL, H200) == [variant]


def test_without_a_file_the_first_templates_seed_is_the_default(write: Write) -> None:
    assert portfolio.variants_for(PREFILL, H200) == []
    assert portfolio.default(PREFILL, H200) == search_space.load("gluon/forward").default(PREFILL, H200)
    with pytest.raises(SpaceError, match="must have a feasible seed"):
        portfolio.default(samples.problem(dtype=DType.FLOAT8), device_profiles.named("a10"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (document("", version=1), f"of version {portfolio.VERSION}, got forward of version 1"),
        (document("", operation="backward"), "a portfolio of forward"),
        (document(question("row < 16", (), ())), "got row; did you mean rows"),
        (document(question("rows > 16", (), ())), "must be such as 'rows < 8', got 'rows > 16'"),
        (document(question("rows < many", (), ())), "must be such as 'rows < 8', got 'rows < many'"),
        (document(3), "must be a portfolio, but Expected `object | str | array`"),
        (document("fast"), "variants of the file, got 'fast'"),
        (document(["", "fast"]), "variants of the file, got 'fast'"),
        (document([["fast"]]), r"must be a portfolio, but Expected `str \| object`, got `array` - at `\$.tree\[0\]`"),
        (document("", rules=[]), "unknown field `rules`"),
        (
            document("", variants={"odd": {"template": "triton/forward", "params": {"BLOCK_M": 3}}}),
            "a variant of triton/forward sets",
        ),
        ("tree: []", "must be a portfolio, but JSON is malformed"),
    ],
)
def test_a_file_that_is_no_portfolio_is_refused_in_a_sentence(write: Write, text: str, words: str) -> None:
    write(text)
    with pytest.raises(SpaceError, match=words):
        portfolio.load(Op.FORWARD)


def test_questions_know_the_card(write: Write) -> None:
    first = seed("triton/forward", 0)
    write(document(question("sm_count < 100", (OTHER,), (first,)), [first]))
    assert portfolio.default(PREFILL, H200) == first
    assert portfolio.default(PREFILL, A30) == OTHER


def test_a_problem_is_asked_what_its_answers_lead_to_and_no_more(write: Write) -> None:
    """A tree of many leaves costs a call some ten questions: arithmetic of the others is not worked out."""
    undefined = question("nothing < 1", (), ())
    whole = question("rows < 16", question("group_size < 100", (TRITON,), undefined), undefined)
    write(document(whole, let={"rows": "queries / batch", "nothing": "1 / (batch - batch)"}))
    assert portfolio.variants_for(DECODE, H200)[0] == TRITON
    with pytest.raises(SpaceError, match="division by zero"):
        portfolio.variants_for(PREFILL, H200)


MOSTLY_EMPTY = samples.problem(
    layout=Layout.PACKED, batch=4, seq_q=1, seq_kv=500, tokens_q=1, tokens_kv=2000
)  # less than one query a sequence


@given(strategies.problems(tiny=False))
@example(MOSTLY_EMPTY)
def test_every_question_of_the_shipped_portfolio_has_an_answer_on_every_problem(problem: Problem) -> None:
    let = portfolio.load(Op.FORWARD).let
    facts = DerivedFacts(facts_of(problem, H200), let)
    assert all(math.isfinite(float(facts[name])) for name in let)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_packed_sequences_of_which_most_have_no_query_have_a_default(tokens: int) -> None:
    call = replace(MOSTLY_EMPTY, tokens_q=tokens)
    default = portfolio.default(call, H200)
    assert search_space.load(default.template).why_infeasible(default, call, H200) is None
