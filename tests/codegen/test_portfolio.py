"""Portfolios: which variant a call runs that no entry serves, whatever its template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import samples

from autoattn.codegen import portfolio, resources, search_space
from autoattn.core import device_profiles
from autoattn.core.problem import DType, Op
from autoattn.core.variant import Variant
from autoattn.errors import SpaceError

H200, A30 = samples.H200, samples.A30
DECODE = samples.problem(seq_q=1)
PREFILL = samples.problem()
Write = Callable[[str], None]


def seed(template: str, place: int) -> Variant:
    """A seed of a template that runs PREFILL on both cards, where the template runs there at all."""
    return search_space.load(template).seeds_for(PREFILL, H200)[place]


def document(*rules: tuple[str, tuple[Variant, ...]]) -> str:
    """A portfolio of these rules and their variants."""
    names = {variant: f"variant_{variant.digest}" for _, variants in rules for variant in variants}
    lines = ["version: 1", "operation: forward", "let:", "  rows: queries / batch", "variants:"]
    for variant, name in names.items():
        params = ", ".join(f"{name}: {value}" for name, value in variant.as_dict().items())
        lines.append(f"  {name}: {{template: {variant.template}, params: {{{params}}}}}")
    lines.append("rules:")
    for when, variants in rules:
        lines += [f"  - when: {when}", f"    variants: [{', '.join(names[variant] for variant in variants)}]"]
    return "\n".join(lines) + "\n"


GLUON, OTHER = seed("gluon/forward", 0), seed("triton/forward", 2)
TRITON = search_space.load("triton/forward").seeds_for(DECODE, H200)[0]
HEAD = "version: 1\noperation: forward\nlet:\n  rows: queries / batch\n"
TWO = document(("rows < 16", (TRITON, GLUON)), ("rows >= 16", (GLUON, OTHER)))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    path = tmp_path / "forward.portfolio.yaml"
    monkeypatch.setattr(resources, "portfolio_path", lambda op: path)
    portfolio.load.cache_clear()

    def write(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        portfolio.load.cache_clear()

    yield write  # type: ignore[misc]
    portfolio.load.cache_clear()


def test_the_rule_that_holds_gives_variants_of_all_templates_in_its_order(write: Write) -> None:
    write(TWO)
    assert portfolio.variants_for(DECODE, H200)[0] == TRITON
    assert portfolio.variants_for(PREFILL, H200) == [GLUON, OTHER]
    assert portfolio.default(DECODE, H200) == TRITON
    assert portfolio.default(PREFILL, H200) == GLUON


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


def test_a_portfolio_that_is_read_again_is_judged_again(write: Write) -> None:
    for variant in [GLUON, OTHER] * 20:  # a judgement that outlives its portfolio may meet the next one at its address
        write(document(("rows >= 16", (variant,))))
        assert portfolio.variants_for(PREFILL, H200) == [variant]


def test_without_a_file_the_first_templates_seed_is_the_default(write: Write) -> None:
    assert portfolio.variants_for(PREFILL, H200) == []
    assert portfolio.default(PREFILL, H200) == search_space.load("gluon/forward").default(PREFILL, H200)
    with pytest.raises(SpaceError, match="must have a feasible seed"):
        portfolio.default(samples.problem(dtype=DType.FLOAT8), device_profiles.named("a10"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "version: 2\noperation: forward\nlet: {}\nvariants: {}\nrules: []\n",
            "of version 1, got forward of version 2",
        ),
        ("version: 1\noperation: backward\nlet: {}\nvariants: {}\nrules: []\n", "a portfolio of forward"),
        (document(("row < 16", (TRITON,))), "got row; did you mean rows"),
        (f"{HEAD}variants: {{}}\nrules: 3\n", "must be a portfolio, but Expected `array`"),
        (f"{HEAD}variants: {{}}\nrules: [{{when: rows < 16, variants: [fast]}}]\n", "variants of the file, got 'fast'"),
        (
            f"{HEAD}variants: {{odd: {{template: triton/forward, params: {{BLOCK_M: 3}}}}}}\nrules: []\n",
            "a variant of triton/forward sets",
        ),
    ],
)
def test_a_file_that_is_no_portfolio_is_refused_in_a_sentence(write: Write, text: str, words: str) -> None:
    write(text)
    with pytest.raises(SpaceError, match=words):
        portfolio.load(Op.FORWARD)


def test_rules_know_the_card(write: Write) -> None:
    first = seed("triton/forward", 0)
    write(document(("sm_count > 100", (first,)), ("sm_count <= 100", (OTHER,))))
    assert portfolio.default(PREFILL, H200) == first
    assert portfolio.default(PREFILL, A30) == OTHER
