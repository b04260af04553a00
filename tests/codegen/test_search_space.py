"""Search spaces: what a file may say and which variants it leaves."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout_paths import CHECKOUT
from kernels import every_point
from samples import A30, H200, problem

from autoattn.codegen import resources, search_space, space_file
from autoattn.codegen.search_space import SearchSpace
from autoattn.codegen.space_facts import FACTS, facts_of
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Op, Precision, Problem
from autoattn.core.variant import Variant
from autoattn.errors import SpaceError, UsageError

SMALL: dict[str, Any] = {
    "version": 1,
    "interpreted": True,
    "template": "triton/forward",
    "parameters": {
        "TILE": {"choices": [16, 32, 64], "about": "rows"},
        "warps": {"choices": [1, 2, 4], "about": "warps"},
        "mode": {"choices": ["plain", "fancy"], "about": "how"},
    },
    "let": {"threads": "32 * warps", "share": "TILE * head_dim / threads"},
    "require": [
        {"rule": "share <= 64", "because": "a thread must hold its share"},
        {"rule": "mode == 'plain' or causal", "because": "only a mask has a fancy mode"},
        {"rule": "seq_q >= 4", "because": "there must be a few rows"},
    ],
    "seeds": [
        {"when": "wgmma", "TILE": 64, "warps": 4, "mode": "fancy"},
        {"when": "head_dim == 64", "TILE": 32, "warps": 2},
        {"when": "head_dim == 64", "TILE": 32, "warps": 2, "mode": "plain"},
        {"TILE": 16, "warps": 4},
    ],
    "base": {"mode": "plain"},
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], SearchSpace]:
    """Writes a search space (text, bytes, or what YAML shall say) and loads it."""
    monkeypatch.setattr(resources, "root", lambda: tmp_path)
    path = tmp_path / "search_spaces" / "triton" / "forward.yaml"
    path.parent.mkdir(parents=True)

    def loaded(document: Any) -> SearchSpace:
        if not isinstance(document, str | bytes):
            document = yaml.safe_dump(document, sort_keys=False)
        path.write_bytes(document.encode() if isinstance(document, str) else document)
        return search_space.load.__wrapped__("triton/forward")

    return loaded


@pytest.fixture
def refusal(load: Callable[[Any], SearchSpace], tmp_path: Path) -> Callable[[Any], str]:
    def refused(document: Any) -> str:
        with pytest.raises(SpaceError) as caught:
            load(document)
        message = str(caught.value)
        assert str(tmp_path / "search_spaces" / "triton" / "forward.yaml") in message
        assert "\n" not in message
        return message.replace(str(tmp_path), "")

    return refused


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """SMALL with one value changed, or removed when it becomes `...`."""
    document = copy.deepcopy(SMALL)
    part: Any = document
    for step in path[:-1]:
        part = part[step]
    if to is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = to
    return document


# The file


def test_a_file_says_what_it_says(load: Callable[[Any], SearchSpace]) -> None:
    space = load(SMALL)
    assert space.template == "triton/forward"
    assert space.choices == {"TILE": (16, 32, 64), "warps": (1, 2, 4), "mode": ("plain", "fancy")}
    assert list(space.choices) == ["TILE", "warps", "mode"]
    assert space.about["TILE"] == "rows"
    assert space.require[0].rule.text == "share <= 64"
    assert space.seeds[1][1] == {"TILE": 32, "warps": 2, "mode": "plain"}


def test_kernels_repeat_themselves_to_the_bit_unless_the_file_says_no(load: Callable[[Any], SearchSpace]) -> None:
    plain, fancy = ({"TILE": 16, "warps": 1, "mode": mode} for mode in ("plain", "fancy"))
    for rule, expected in ((None, [True, True]), ("0", [False, False]), ("mode == 'plain'", [True, False])):
        points = load(SMALL if rule is None else {**SMALL, "deterministic": rule})
        assert [points.repeats(points.variant(params)) for params in (plain, fancy)] == expected
    with pytest.raises(SpaceError, match="must speak of what is known to it, got wgmma"):
        load({**SMALL, "deterministic": "wgmma"})


def test_a_rule_asks_for_capabilities_and_not_for_the_number_of_an_architecture(
    load: Callable[[Any], SearchSpace],
) -> None:
    with pytest.raises(SpaceError, match="must speak of what is known to it, got arch"):
        load({**SMALL, "let": {**SMALL["let"], "hopper": "arch >= 90"}})


def test_the_digest_is_the_texts(load: Callable[[Any], SearchSpace]) -> None:
    text = yaml.safe_dump(SMALL, sort_keys=False)
    assert load(text).digest == load(text).digest
    assert load(text).digest != load(text + "# a word\n").digest


@pytest.mark.parametrize("key", SMALL)
def test_every_part_is_needed(refusal: Callable[[Any], str], key: str) -> None:
    assert f"`{key}`" in refusal(changed(key, to=...))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("version",), 2, "must have version 1, got 2; use a matching autoattn"),
        (("version",), "1", "must be a search space, but Expected `int`, got `str` - at `$.version`"),
        (("template",), "triton/backward", "must speak of the template triton/forward, got 'triton/backward'"),
        (("parametres",), {}, "unknown field `parametres`"),
        (("parameters",), {}, "length >= 1 - at `$.parameters`"),
        (("parameters", "TILE", "choice"), [1], "unknown field `choice`"),
        (("parameters", "TILE", "choices"), [], "length >= 1 - at `$.parameters[...].choices`"),
        (("parameters", "TILE", "choices"), [0.5], "Expected `int | str`, got `float`"),
        (("parameters", "TILE", "choices"), [True, False], "Expected `int | str`, got `bool`"),
        (("parameters", "TILE", "choices"), [16, 32, 16], "the choices of TILE must differ, got [16, 32, 16]"),
        (("parameters", "TILE", "about"), "", "length >= 1 - at `$.parameters[...].about`"),
        (("parameters", "head_dim"), {"choices": [1], "about": "x"}, "got 'head_dim' a second time"),
        (("parameters", "l2_bytes"), {"choices": [1], "about": "x"}, "got 'l2_bytes' a second time"),
        (("parameters", "a b"), {"choices": [1], "about": "x"}, "must be named by a word that rules can hold"),
        (("parameters", "min"), {"choices": [1], "about": "x"}, "got 'min'"),
        (("parameters", "not"), {"choices": [1], "about": "x"}, "got 'not'"),
        (("parameters", 5), {"choices": [1], "about": "x"}, "Expected `str`"),
        (("let", "warps"), "1", "got 'warps' a second time"),
        (("let", "batch"), "1", "got 'batch' a second time"),
        (("let", "a.b"), "1", "got 'a.b'"),
        (("let", "threads"), 32, "Expected `str`, got `int`"),
        (("let", "threads"), "share", "the rule 'share' must speak of what is known to it, got share"),
        (("let", "share"), "share + 1", "got share"),
        (("let", "threads"), "import os", "must be arithmetic such as"),
        (("require", 0, "rule"), "TYLE <= 64", "got TYLE; did you mean TILE? correct it"),
        (("require", 0, "rule"), "zzzzzz == 1", "got zzzzzz; correct it"),
        (("require", 0, "rule"), "open('x')", "a rule may hold numbers, names"),
        (("require", 0, "rule"), 5, "Expected `str`, got `int`"),
        (("require", 0, "because"), "", "length >= 1 - at `$.require[0].because`"),
        (("require", 0, "becuase"), "x", "unknown field `becuase`"),
        (("seeds",), [], "length >= 1 - at `$.seeds`"),
        (("seeds", 0, "when"), "THREADS == 16", "got THREADS"),
        (("seeds", 0, "when"), "wgmaa == 1", "got wgmaa; did you mean wgmma?"),
        (("seeds", 0, "when"), "wgmma = 1", "must be arithmetic such as"),
        (("seeds", 0, "TYLE"), 16, "sets TILE, warps, mode, got 'TYLE' amiss"),
        (("seeds", 0, "TILE"), ..., "sets TILE, warps, mode, got 'TILE' amiss"),
        (("seeds", 0, "TILE"), 48, "TILE of triton/forward must be one of 16, 32, 64, got 48"),
        (("seeds", 0, "TILE"), "16", "TILE of triton/forward must be one of 16, 32, 64, got '16'"),
        (("seeds", 0, "TILE"), [16, 48], "TILE of triton/forward must be one of 16, 32, 64, got 48"),
        (("seeds", 0, "TILE"), {}, "Expected `int | str | array`, got `object`"),
        (("base", "mode"), "strange", "mode of triton/forward must be one of plain, fancy, got 'strange'"),
        (("base", "other"), 1, "got 'other' amiss"),
        (("base",), None, "Expected `object`, got `null` - at `$.base`"),
    ],
)
def test_a_fault_is_named_in_one_sentence(
    refusal: Callable[[Any], str], path: tuple[str | int, ...], value: Any, words: str
) -> None:
    assert words in refusal(changed(*path, to=value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "just words",
        "version: [",
        "version: 1\nversion: 1",
        "a: &x 1\nb: *x",
        "!!python/object/apply:os.system ['true']",
        b"\xff\xfe",
        b"version: \x00",
    ],
)
def test_what_is_no_search_space_is_refused(refusal: Callable[[Any], str], text: str | bytes) -> None:
    refusal(text)


def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "root", lambda: tmp_path)
    with pytest.raises(SpaceError, match=r"search_spaces/absent/forward\.yaml must be a YAML file, but there is none"):
        search_space.load("absent/forward")


@pytest.mark.parametrize("name", ["../../etc/passwd", "triton", "", "triton/forward/x", "Triton/forward"])
def test_no_name_leaves_the_folder(name: str) -> None:
    with pytest.raises(UsageError, match="a template is named family/operation"):
        search_space.load(name)


def test_facts_are_what_the_loader_knows() -> None:
    assert set(facts_of(problem(), A30)) == FACTS


def test_every_fact_is_documented() -> None:
    page = (CHECKOUT / "docs" / "search-spaces.md").read_text(encoding="utf-8")
    assert [name for name in sorted(FACTS) if f"`{name}`" not in page] == []


def test_facts_are_the_problems_and_the_devices() -> None:
    facts = facts_of(problem(head_dim=80, dtype=DType.FLOAT32, precision=Precision.TF32), H200)
    expected = {
        "dtype": "float32",
        "precision": "tf32",
        "element_bytes": 4,
        "causal": 1,
        "bounded_right": 1,
        "bounded_left": 0,
        "sparse": 0,
        "keys_per_row": 3584.5,
        "queries": 4096,
        "split": 1,
        "head_dim_split": 80,
        "float8": 0,
        "group_size": 4,
        "head_dim_padded": 128,
        "mma": 0,
        "wgmma": 1,
        "tcgen05": 0,
        "tma": 1,
        "float8_products": 1,
        "warp_size": 32,
        "sm_count": 132,
        "l2_bytes": 60 * 2**20,
    }
    assert {name: facts[name] for name in expected} == expected


def test_facts_speak_of_masks_layouts_and_modifiers() -> None:
    window = facts_of(problem(mask=Mask.window(100, -1)), A30)
    assert [window[name] for name in ("bounded_left", "bounded_right", "window_left", "causal")] == [1, 0, 100, 0]
    table = facts_of(problem(mask=Mask.blocks(64, 32, 0.5)), A30)
    assert [table[name] for name in ("sparse", "block_q", "block_kv", "keys_per_row")] == [1, 64, 32, 2048.0]
    packed = {"layout": Layout.PACKED, "seq_q": 100, "seq_kv": 100, "tokens_q": 200, "tokens_kv": 300, "mask": Mask()}
    assert [facts_of(problem(**packed), A30)[name] for name in ("packed", "queries", "token_major")] == [1, 200, 1]
    layouts = [facts_of(problem(layout=layout), A30)["token_major"] for layout in (Layout.BHSD, Layout.BSHD)]
    assert layouts == [0, 1]
    changed = facts_of(problem(modifiers=Modifiers(score_mod="-score", bias=Bias.KEYS, sinks=True, dropout=True)), A30)
    assert all(changed[name] == 1 for name in ("on_scores", "score_mod", "biased", "sinks", "dropout"))
    read = {
        "captured0: float32[2]\nscore + captured0[h, q_idx - kv_idx]": (1, 0, 1, 0),
        "captured0: float32[1]\nplace = to_int(score)\nscore + captured0[place]": (1, 0, 0, 0),
        "captured0: int32[1]\nwhere(captured0[q_idx] == captured0[kv_idx], score, -inf)": (0, 0, 1, 0),
        "score + sin(to_float(q_idx - kv_idx))": (0, 1, 1, 0),
        "score + 0.01 * (kv_idx - q_idx)": (0, 0, 1, 0),
        "captured0: float32[1]\nscore - captured0[h] * abs(q_idx - kv_idx)": (0, 0, 1, 1),
        "captured0: float32[1]\nslope = 2.0 * captured0[h]\nscore - (q_idx - kv_idx) * slope": (0, 0, 1, 1),
        "captured0: float32[1]\nscore - (q_idx - kv_idx) / captured0[h]": (0, 0, 1, 1),
        "captured0: float32[1]\nscore * captured0[h]": (0, 0, 0, 0),
        "20.0 * tanh(score / 20.0)": (0, 0, 0, 0),
    }
    for text, expected in read.items():
        facts = facts_of(problem(modifiers=Modifiers(score_mod=text)), A30)
        names = ("reads_pairs", "trigonometric", "scores_by_key", "reads_key_slopes")
        assert tuple(facts[name] for name in names) == expected
    assert facts_of(problem(modifiers=Modifiers(alibi=True)), A30)["scores_by_key"] == 1
    for bias in Bias:
        facts = facts_of(problem(op=Op.BACKWARD, modifiers=Modifiers(bias=bias)), A30)
        assert facts["bias_of_pairs"] == (bias not in (Bias.NONE, Bias.KEYS))
    wide = facts_of(problem(head_dim=192, head_dim_v=320), A30)
    assert [wide[name] for name in ("head_dim_v", "head_dim_v_padded", "head_dim_v_split")] == [320, 512, 320]


# Variants


def test_a_variant_names_every_parameter_once_and_takes_a_choice(load: Callable[[Any], SearchSpace]) -> None:
    space = load(SMALL)
    good: dict[str, Any] = {"TILE": 16, "warps": 1, "mode": "plain"}
    space.check(good)
    wrong: list[dict[str, Any]] = [
        {},
        {"TILE": 16, "warps": 1},
        {**good, "other": 1},
        {**good, "TILE": 17},
        {**good, "TILE": "16"},
        {**good, "warps": True},
        {**good, "warps": 1.0},
        {**good, "mode": "x" * 10**6},
        {**good, "y" * 10**6: 1},
    ]
    for params in wrong:
        with pytest.raises(SpaceError) as caught:
            space.check(params)
        assert len(str(caught.value)) < 500
        with pytest.raises(SpaceError):
            space.why_infeasible(Variant.of("triton/forward", params), problem(), A30)


def test_a_broken_rule_explains_itself_in_words(load: Callable[[Any], SearchSpace]) -> None:
    space = load(SMALL)
    wide = Variant.of("triton/forward", {"TILE": 64, "warps": 1, "mode": "plain"})
    assert space.why_infeasible(wide, problem(), A30) == "a thread must hold its share (needs share <= 64)"
    fancy = Variant.of("triton/forward", {"TILE": 16, "warps": 4, "mode": "fancy"})
    assert space.why_infeasible(fancy, problem(), A30) is None
    words = "only a mask has a fancy mode (needs mode == 'plain' or causal)"
    assert space.why_infeasible(fancy, problem(mask=Mask()), A30) == words


@pytest.mark.parametrize("seq_q", [1, 1024])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_feasible_is_every_point_that_breaks_no_rule(load: Callable[[Any], SearchSpace], seq_q: int, mask: str) -> None:
    space, call = load(SMALL), problem(seq_q=seq_q, mask=Mask.parse(mask))
    expected = [point for point in every_point(space) if space.why_infeasible(point, call, A30) is None]
    assert list(space.feasible(call, A30)) == expected
    assert bool(expected) is (seq_q >= 4)


def test_a_let_of_facts_alone_and_a_rule_without_names_are_checked_too(load: Callable[[Any], SearchSpace]) -> None:
    document = changed("let", "rows", to="batch * seq_q")
    document["require"] += [{"rule": "rows > 100", "because": "few"}]
    space = load(document)
    assert list(space.feasible(problem(), A30))
    assert not list(space.feasible(problem(batch=1, seq_q=64), A30))
    document["require"] += [{"rule": "1 == 2", "because": "never"}]
    assert not list(load(document).feasible(problem(), A30))


def test_random_order_gives_the_same_set_and_the_seed_fixes_it(load: Callable[[Any], SearchSpace]) -> None:
    space = load(SMALL)
    in_order = list(space.feasible(problem(), A30))
    orders = [list(space.feasible(problem(), A30, random.Random(seed))) for seed in range(4)]
    assert all(sorted(order, key=str) == sorted(in_order, key=str) for order in orders)
    assert any(order != in_order for order in orders)
    assert orders[3] == list(space.feasible(problem(), A30, random.Random(3)))


# Seeds


def test_a_seed_speaks_where_its_when_holds(load: Callable[[Any], SearchSpace]) -> None:
    space = load(SMALL)

    def tiles(call: Problem, device: Device) -> list[Any]:
        return [variant["TILE"] for variant in space.seeds_for(call, device)]

    assert tiles(problem(), H200) == [64, 16]
    assert tiles(problem(), A30) == [16]
    assert tiles(problem(head_dim=64), A30) == [32, 16]  # two seeds are one variant
    assert tiles(problem(mask=Mask()), H200) == [16]  # fancy needs a mask
    assert space.default(problem(), H200)["TILE"] == 64


def test_no_feasible_seed_is_an_error_that_says_so(load: Callable[[Any], SearchSpace]) -> None:
    space = load(SMALL)
    assert space.seeds_for(problem(seq_q=1), A30) == []
    with pytest.raises(
        SpaceError, match=r"must have a feasible seed to run bf16 .* on a30, but there must be a few rows"
    ):
        space.default(problem(seq_q=1), A30)


# --- implied parameters -----------------------------------------------------------------------------------------------


def with_a_later_parameter() -> dict[str, Any]:
    document = copy.deepcopy(SMALL)
    document["parameters"]["later"] = {"choices": [1, 2], "implied": 1, "about": "what came later"}
    document["require"].append({"rule": "later == 1 or TILE == 16", "because": "only small tiles know it"})
    document["seeds"].insert(0, {"when": "later == 2", "TILE": 16, "warps": 4, "later": 2})
    return document


def test_a_variant_states_no_parameter_that_is_implied(load: Callable[[Any], SearchSpace]) -> None:
    before, space = load(SMALL), load(with_a_later_parameter())
    call = problem(head_dim=64)
    old = {variant for variant in space.feasible(call, A30) if "later" not in variant.as_dict()}
    assert old == set(before.feasible(call, A30))
    new = set(space.feasible(call, A30)) - old
    assert new
    assert all(variant["later"] == 2 and variant["TILE"] == 16 for variant in new)
    assert space.seeds_for(call, A30)[1:] == before.seeds_for(call, A30)
    assert space.seeds_for(call, A30)[0]["later"] == 2


def test_a_point_from_before_a_parameter_is_still_one(load: Callable[[Any], SearchSpace]) -> None:
    point: dict[str, Any] = {"TILE": 32, "warps": 2, "mode": "plain"}
    space = load(with_a_later_parameter())
    assert space.holds(point)
    assert space.holds({**point, "later": 2})
    assert not space.holds({**point, "later": 3})
    assert space.variant({**point, "later": 1}) == space.variant(point) == Variant.of(space.template, point)
    assert space.params_of(space.variant(point)) == {**point, "later": 1}


def test_a_rule_reads_what_is_implied(load: Callable[[Any], SearchSpace]) -> None:
    space, call = load(with_a_later_parameter()), problem(head_dim=64)
    point: dict[str, Any] = {"TILE": 32, "warps": 2, "mode": "plain"}
    assert space.why_infeasible(space.variant(point), call, A30) is None
    reason = space.why_infeasible(space.variant({**point, "later": 2}), call, A30)
    assert reason == "only small tiles know it (needs later == 1 or TILE == 16)"


def test_what_is_implied_is_one_of_the_choices(refusal: Callable[[Any], str]) -> None:
    document = with_a_later_parameter()
    document["parameters"]["later"]["implied"] = 3
    assert "later of triton/forward must be one of 1, 2, got 3" in refusal(document)


# What a file says beside its rules


def test_a_rehearsal_sets_what_the_file_lists_and_leaves_the_rest(load: Callable[[Any], SearchSpace]) -> None:
    space = load(
        {**SMALL, "rehearsal": {"TILE": 16, "warps": "min(warps, 2)", "block_q": "8 * (1 + (block_q > TILE))"}}
    )
    variant = space.variant({"TILE": 64, "warps": 4, "mode": "fancy"})
    mask = Mask.blocks(128, 32, 0.5)
    small, blocks = space.rehearsed(variant, mask)
    assert small.as_dict() == {"TILE": 16, "warps": 2, "mode": "fancy"}
    assert blocks == dataclasses.replace(mask, block_q=16)
    assert space.rehearsed(variant, Mask.blocks(64, 32, 0.5))[1].block_q == 8, "one step is one step"
    assert space.rehearsed(variant, Mask()) == (small, Mask())
    assert load(SMALL).rehearsed(variant, mask) == (variant, mask)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rehearsal", {"TYLE": 16}, "must set parameters, block_q and block_kv, got 'TYLE'"),
        ("rehearsal", {"TILE": 48}, "the rehearsal of TILE must be one of 16, 32, 64, got 48"),
        ("rehearsal", {"mode": "'odd'"}, "the rehearsal of mode must be one of plain, fancy, got 'odd'"),
        ("rehearsal", {"mode": "plain"}, "must speak of what is known to it, got plain"),
        ("rehearsal", {"TILE": "min(TILE, seq_q)"}, "must speak of what is known to it, got seq_q"),
        ("heads_together", "1 + head_dim", "must speak of what is known to it, got head_dim"),
        ("tile", "{TILE}x{TYLE}", "a tile must name parameters in braces, got 'TYLE'"),
        ("specialised", "yes", "Expected `bool`"),
        ("ablation", ["warps", "wraps"], "an ablation must change parameters, got 'wraps'"),
        ("barriers", ["wraps"], "an ablation must change parameters, got 'wraps'"),
    ],
)
def test_a_fault_beside_the_rules_is_named(
    load: Callable[[Any], SearchSpace], key: str, value: Any, words: str
) -> None:
    with pytest.raises(SpaceError) as caught:
        load({**SMALL, key: value})
    assert words in str(caught.value)


def test_a_variant_is_called_by_its_tile(load: Callable[[Any], SearchSpace]) -> None:
    space = load({**SMALL, "tile": "{TILE} rows {warps}w {}"})
    variant = space.variant({"TILE": 64, "warps": 4, "mode": "fancy"})
    assert space.tile_of(variant) == "64 rows 4w {}"
    assert load(SMALL).tile_of(variant) == str(variant)
    older = Variant.of(space.template, {"TILE": 64})
    assert space.tile_of(older) == str(older)


def test_heads_are_together_as_the_file_says(load: Callable[[Any], SearchSpace]) -> None:
    call = problem(heads_q=32, heads_kv=8)
    assert load(SMALL).heads_of_tile({"warps": 4}, call) == 1
    assert load({**SMALL, "heads_together": "warps * group_size"}).heads_of_tile({"warps": 2}, call) == 8
    assert [load({**SMALL, **more}).specialised for more in ({}, {"specialised": True})] == [False, True]


def test_every_key_of_a_file_is_documented() -> None:
    page = (CHECKOUT / "docs" / "search-spaces.md").read_text(encoding="utf-8")
    keys = set(
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", page.partition("| of the problem")[0], re.M)))
    )
    assert keys == set(space_file.SpaceFile.__struct_fields__)
