"""Portfolios: which variant a call runs that no entry serves, whatever its template."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import strategies
from hypothesis import example, given

from autoattn.codegen import cost_network, portfolio, resources, search_space
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
PREFILL = samples.problem(mask=Mask())
Write = Callable[[str], None]


def seed(template: str, place: int) -> Variant:
    """A seed of a template that runs PREFILL on both cards, where the template runs there at all."""
    return search_space.load(template).seeds_for(PREFILL, H200)[place]


GLUON, OTHER = seed("gluon/forward", 0), seed("triton/forward", 2)
TRITON = search_space.load("triton/forward").seeds_for(DECODE, H200)[0]
WIDEST = 4096  # rows of the documents' networks


def document(few: Sequence[Variant], many: Sequence[Variant], **others: Any) -> str:
    """A portfolio that ranks its variants as `few` for one row, and as `many` for WIDEST ones; others come last."""
    variants = list(dict.fromkeys([*few, *many, GLUON, OTHER, TRITON]))
    places = [[each.index(variant) if variant in each else 99 for variant in variants] for each in (few, many)]
    low, high = cost_network.logarithms(np.array([[1.0], [WIDEST]]), np.array([[1.0, WIDEST]]))[:, 0]
    slopes = [(last - first) / (high - low) for first, last in zip(*places, strict=True)]
    begins = [first - slope * low for first, slope in zip(places[0], slopes, strict=True)]
    whole = {
        "about": [],
        "version": portfolio.VERSION,
        "operation": "forward",
        "let": {"rows": "queries / batch"},
        "left_out": "sm_count < 1",
        "variants": {
            f"variant_{variant.digest}": {"template": variant.template, "params": variant.as_dict()}
            for variant in variants
        },
        "network": {"inputs": {"rows": [1, WIDEST]}, "layers": [[slopes, begins]]},
    }
    return json.dumps({**whole, **others})


def changed(**others: Any) -> str:
    """A portfolio whose network has other parts than it should."""
    return document((), (), network={**json.loads(TWO)["network"], **others})


TWO = document((TRITON, GLUON), (GLUON, OTHER))


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


def test_variants_of_all_templates_come_in_the_order_of_what_they_are_expected_to_cost(write: Write) -> None:
    write(TWO)
    assert portfolio.load(Op.FORWARD).ranked(DECODE, H200)[:2] == (TRITON, GLUON)
    assert portfolio.variants_for(DECODE, H200)[0] == TRITON
    assert portfolio.variants_for(PREFILL, H200) == [GLUON, OTHER]
    assert portfolio.default(DECODE, H200) == TRITON
    assert portfolio.default(PREFILL, H200) == GLUON


def test_what_lies_beyond_the_range_of_an_input_counts_as_its_end(write: Write) -> None:
    few, many = (samples.problem(seq_q=rows, mask=Mask()) for rows in (2, WIDEST))
    write(document((GLUON, OTHER), (OTHER, GLUON), network={**json.loads(TWO)["network"], "inputs": {"rows": [1, 2]}}))
    ranked = portfolio.load(Op.FORWARD).ranked
    assert ranked(few, H200) == ranked(many, H200)
    write(document((GLUON, OTHER), (OTHER, GLUON)))
    ranked = portfolio.load(Op.FORWARD).ranked
    assert ranked(few, H200) != ranked(many, H200)


def test_a_hidden_layer_adds_up_what_is_above_zero(write: Write) -> None:
    rows = {"rows": [1, WIDEST]}
    network = {"inputs": rows, "layers": [[[1.0, -1.0], [-6.0, 6.0]], [[1, 0, 0], [0, 1, 0], [0.0, 1.0, 9.0]]]}
    write(document((GLUON, OTHER, TRITON), (), network=network))
    # log2 of rows is 6 at 64; GLUON costs what is above, OTHER 1 more than what is below, TRITON 9
    costs = portfolio.load(Op.FORWARD).network.costs
    np.testing.assert_allclose(costs([64.0]), [0.0, 1.0, 9.0], atol=0.001)
    np.testing.assert_allclose(costs([256.0]), [2.0, 1.0, 9.0], atol=0.001)
    np.testing.assert_allclose(costs([16.0]), [0.0, 3.0, 9.0], atol=0.001)


def test_what_is_left_out_runs_the_seeds(write: Write) -> None:
    write(document((), (OTHER,), left_out="sm_count < 100 or rows >= 4096"))
    assert portfolio.default(PREFILL, H200) == OTHER
    assert portfolio.variants_for(PREFILL, A30) == []
    assert portfolio.variants_for(LONG, H200) == []
    assert portfolio.default(LONG, H200) == search_space.load("gluon/forward").default(LONG, H200)


def test_a_search_begins_with_the_first_few_that_can_run(write: Write) -> None:
    spaces = (search_space.load(f"{family}/forward") for family in ("gluon", "triton"))
    seeds = [seed for space in spaces for seed in space.seeds_for(LONG, H200)]
    assert len(seeds) > portfolio.STARTERS
    write(document((), [TRITON, *seeds]))
    assert not portfolio.is_feasible(TRITON, LONG, H200), "programs that share keys are for few queries"
    assert portfolio.variants_for(LONG, H200) == seeds[: portfolio.STARTERS]


def test_a_default_is_what_the_class_of_sizes_runs_before_what_the_sizes_ask_for(write: Write, tmp_path: Path) -> None:
    keys = {"inputs": {"seq_kv": [1, 9999]}, "layers": [[[1, 0, 0], [-12.05, 0, 9]]]}  # 12.05 is 4,300 keys
    write(document((GLUON, OTHER, TRITON), (), network=keys))
    between = samples.problem(seq_kv=4500, mask=Mask())  # of the class from 4,097 keys on
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
    write(document((), (first, OTHER)))
    return first, OTHER


def test_where_scores_change_the_same_tile_stands_in_for_a_first_variant_that_cannot_run(write: Write) -> None:
    first, second = listed_for_long(write)
    assert portfolio.default(LONG, H200) == first
    changed = replace(LONG, modifiers=Modifiers(alibi=True))  # without a mask, no first maximum may be kept
    assert portfolio.variants_for(changed, H200)[0] == second
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
    write(document((), (pieces, first, OTHER)))
    assert portfolio.default(LONG, H200) == first
    for facts in ({"modifiers": Modifiers(alibi=True)}, {"numerics": Numerics.ONLINE}):
        stand_in = portfolio.default(replace(LONG, **facts), H200)
        assert [stand_in.as_dict()[name] for name in TILE] == [first.as_dict()[name] for name in TILE]


def test_a_packed_call_runs_the_tile_that_sequences_apart_would_run(write: Write) -> None:
    apart = replace(LONG, head_dim=80, head_dim_v=80)
    seeds = search_space.load("gluon/forward").seeds_for(apart, H200)
    pieces = next(variant for variant in seeds if variant.as_dict().get("HEAD_SPLIT"))
    small = search_space.load("gluon/forward").seeds_for(apart, H200)[-1]
    write(document((), (pieces, small, OTHER)))
    packed = replace(apart, layout=Layout.PACKED, tokens_q=8192, tokens_kv=8192)
    assert portfolio.default(apart, H200) == pieces
    assert portfolio.variants_for(packed, H200)[0] == small, "no packed values lie in two pieces"
    stand_in = portfolio.default(packed, H200)
    assert [stand_in.as_dict()[name] for name in TILE] == [pieces.as_dict()[name] for name in TILE]


def test_the_next_variant_runs_problems_of_measured_facts_and_where_programs_share_keys(write: Write) -> None:
    shared = next(
        variant
        for variant in search_space.load("triton/forward").seeds_for(DECODE, H200)
        if "SPLITS" in variant.as_dict() and "PACK_GQA" in variant.as_dict()
    )
    write(document((shared, TRITON), ()))
    packed = samples.problem(seq_q=1, layout=Layout.PACKED, tokens_q=4, tokens_kv=8192)
    able = portfolio.variants_for(packed, H200)
    assert portfolio.default(packed, H200) == (able or search_space.load("gluon/forward").seeds_for(packed, H200))[0]
    write(TWO)
    assert portfolio.default(PREFILL, A30) == OTHER


def test_a_portfolio_that_is_read_again_is_asked_again(write: Write) -> None:
    for variant in [GLUON, OTHER] * 20:
        write(document((), (variant,)))
        assert portfolio.variants_for(PREFILL, H200)[0] == variant


def test_without_a_file_the_first_templates_seed_is_the_default(write: Write) -> None:
    assert portfolio.variants_for(PREFILL, H200) == []
    assert portfolio.default(PREFILL, H200) == search_space.load("gluon/forward").default(PREFILL, H200)
    with pytest.raises(SpaceError, match="must have a feasible seed"):
        portfolio.default(samples.problem(dtype=DType.FLOAT8), device_profiles.named("a10"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (document((), (), version=1), f"of version {portfolio.VERSION}, got forward of version 1"),
        (document((), (), operation="backward"), "a portfolio of forward"),
        (document((), (), let={"rows": "quereis / batch"}), "got quereis; did you mean queries"),
        (document((), (), left_out="row > 16"), "got row; did you mean rows"),
        (changed(inputs={"row": [1, 2]}), "'inputs of the network' must speak of what is known to it, got row"),
        (changed(inputs={"rows": [1]}), r"Expected `array` of length 2 - at `\$.network.inputs\[...\]`"),
        (changed(layers=[]), "layers of a network must be matrices, one at least"),
        (changed(layers=[[1, 2]]), r"Expected `array`, got `int` - at `\$.network.layers\[0\]\[0\]`"),
        (changed(layers=[[[1, 2, 3], [4, 5]]]), "rows of a layer must be of one length"),
        (changed(layers=[[[1, 2, 3]]]), r"a row for each input and one more, \[2\] here, got \[1\]"),
        (changed(layers=[[[1], [2]], [[1, 2, 3]]]), r"a row for each input and one more, \[2, 2\] here, got \[2, 1\]"),
        (changed(layers=[[[1, 2], [3, 4]]]), "a column for each of 3 variants, got 2"),
        (document((), (), tree=[]), "unknown field `tree`"),
        (
            document((), (), variants={"odd": {"template": "triton/forward", "params": {"BLOCK_M": 3}}}),
            "a variant of triton/forward sets",
        ),
        ("network: []", "must be a portfolio, but JSON is malformed"),
    ],
)
def test_a_file_that_is_no_portfolio_is_refused_in_a_sentence(write: Write, text: str, words: str) -> None:
    write(text)
    with pytest.raises(SpaceError, match=words):
        portfolio.load(Op.FORWARD)


def test_inputs_know_the_card(write: Write) -> None:
    first = seed("triton/forward", 0)
    write(
        document(
            (first, OTHER), (), network={"inputs": {"sm_count": [1, 200]}, "layers": [[[-1, 0, 0, 0], [7, 0.5, 9, 9]]]}
        )
    )
    assert portfolio.default(PREFILL, H200) == first, "7 - log2(132) is less than 0.5"
    assert portfolio.default(PREFILL, A30) == OTHER, "and 7 - log2(56) is more"


MOSTLY_EMPTY = samples.problem(
    layout=Layout.PACKED, batch=4, seq_q=1, seq_kv=500, tokens_q=1, tokens_kv=2000
)  # less than one query a sequence


@given(strategies.problems(tiny=False))
@example(MOSTLY_EMPTY)
def test_the_shipped_portfolio_expects_a_cost_of_every_variant_on_every_problem(problem: Problem) -> None:
    shipped = portfolio.load(Op.FORWARD)
    facts = DerivedFacts(facts_of(problem, H200), shipped.let)
    costs = shipped.network.costs([float(facts[name]) for name in shipped.network.inputs])
    assert costs.shape == (len(shipped.variants),)
    assert np.isfinite(costs).all()


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
def test_packed_sequences_of_which_most_have_no_query_have_a_default(tokens: int) -> None:
    call = replace(MOSTLY_EMPTY, tokens_q=tokens)
    default = portfolio.default(call, H200)
    assert search_space.load(default.template).why_infeasible(default, call, H200) is None
