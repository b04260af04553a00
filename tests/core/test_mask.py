"""Masks: their names, what they refuse, and what of them a kernel's text depends on."""

from __future__ import annotations

import pytest

from autoattn.core.mask import Mask, MaskKind
from autoattn.errors import ProblemError


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("full", "full"),
        (False, "full"),
        ("causal", "causal:bottom-right"),
        (True, "causal:bottom-right"),
        ("causal:bottom-right", "causal:bottom-right"),
        ("causal:top-left", "causal:top-left"),
        ("window:128,0", "window:128,0"),
        ("window:128,-1", "window:128,-1"),
        ("window:-1,16", "window:-1,16"),
        ("window:0,0", "window:0,0"),
        ("window:-1,0", "causal:bottom-right"),
        ("window:-1,-1", "full"),
        ("blocks:128x64,0.25", "blocks:128x64,0.25"),
    ],
)
def test_mask_reads_its_names(text: str | bool, written: str) -> None:
    mask = Mask.parse(text)
    assert str(mask) == written
    assert Mask.parse(str(mask)) == mask
    assert mask.causal == written.startswith("causal")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Causal",
        "causal:",
        "full:",
        "full:top-left",
        "causal:left",
        "window",
        " causal",
        "1",
        "window:1",
        "window:-2,0",
        "window:1,2,3",
        "window:a,0",
        "blocks:128",
        "blocks:128x128",
        "blocks:128x128,",
    ],
)
def test_mask_refuses_other_names(text: str) -> None:
    with pytest.raises(ProblemError, match="must be"):
        Mask.parse(text)


@pytest.mark.parametrize("size", [0, 8, 24, 8192, True, 16.0, "16"])
def test_blocks_are_powers_of_two_that_a_tile_can_divide(size: object) -> None:
    with pytest.raises(ProblemError, match="must be powers of two from 16 to 4096"):
        Mask.blocks(size, 16, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("density", [-0.1, 1.1, True, "0.5", float("nan")])
def test_a_density_is_a_share(density: object) -> None:
    with pytest.raises(ProblemError, match="density of a mask must be from 0 to 1"):
        Mask.blocks(16, 16, density)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "kept"), [(0.0, 0.0), (0.001, 1 / 64), (0.5, 0.5), (0.51, 33 / 64), (1, 1.0)])
def test_a_density_is_rounded_up_to_a_64th(given: float, kept: float) -> None:
    assert Mask.blocks(16, 16, given).density == kept


@pytest.mark.parametrize("side", [-2, True, 1.0, None])
def test_the_sides_of_a_window_are_whole_numbers_from_minus_one(side: object) -> None:
    for sides in ((side, 0), (0, side)):
        with pytest.raises(ProblemError, match="a window must be two whole numbers from -1"):
            Mask.window(*sides)  # type: ignore[arg-type]


def test_causal_makes_the_right_side_of_a_window_zero() -> None:
    assert Mask.window(5, 9, causal=True) == Mask.window(5, 0)
    assert Mask.window(-1, 9, causal=True) == Mask.parse("causal")
    assert Mask.window(5, -1, causal=True) == Mask.window(5, 0)


def test_a_window_without_a_bound_on_one_side_is_not_causal() -> None:
    mask = Mask.window(128, -1)
    assert (mask.kind, mask.bounded_left, mask.bounded_right) == (MaskKind.WINDOW, True, False)


def test_widths_and_density_are_no_structure_and_sides_are() -> None:
    same = [("window:5,3", "window:7,9"), ("window:5,0", "window:9,0"), ("blocks:16x16,0.5", "blocks:16x16,0.25")]
    for first, second in same:
        assert Mask.parse(first).structure == Mask.parse(second).structure
    apart = ["full", "causal", "causal:top-left", "window:5,3", "window:5,0", "window:5,-1", "window:-1,3",
             "blocks:16x16,0.5", "blocks:16x32,0.5"]  # fmt: skip
    assert len({Mask.parse(text).structure for text in apart}) == len(apart)
    assert Mask.blocks(16, 16, 0.5, "q_idx > 3").structure != Mask.blocks(16, 16, 0.5).structure
