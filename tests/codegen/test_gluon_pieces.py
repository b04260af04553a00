"""Head dims and blocks of keys that two powers of two hold, in the Gluon family; no GPU is needed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from gluon_kernels import H200, TEMPLATE, problem
from rarely import rarely

from autoattn.codegen import portfolio, render, search_space
from autoattn.core import triton_release
from autoattn.core.problem import DType, Layout
from autoattn.core.variant import Source, Traits, Value
from autoattn.kernels import manifest
from autoattn.kernels.compiler import inspect, load_module

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.exhaustive]

SPLIT: dict[str, Value] = {"HEAD_SPLIT": 1}
PACKED: dict[str, Any] = {"layout": Layout.PACKED, "tokens_q": 9000, "tokens_kv": 9000}
ONE_TILE: dict[str, Value] = {"schedule": "one_tile", "output_buffer": "shared"}
# What each is there for: pieces of both head dims, of one, of none; one tile of keys, two of them, and both at once
KINDS: tuple[tuple[dict[str, Any], dict[str, Value]], ...] = (
    ({"head_dim": 80}, {**SPLIT, "softmax": "first_max", "ping_pong": "named"}),
    ({"head_dim": 72, "mask": "window:600,64"}, {**SPLIT, "softmax": "vote"}),
    ({"head_dim": 96}, {"HEAD_SPLIT": 2, "softmax": "first_max", "BLOCK_N": 96}),
    ({"head_dim": 192, "head_dim_v": 128}, {**SPLIT, "softmax": "first_max", "output_buffer": "shared"}),
    ({"head_dim": 64, "head_dim_v": 96, "mask": "causal"}, {**SPLIT, "overlap": 0, "row_sum": "each"}),
    ({"head_dim": 128}, {**ONE_TILE, "BLOCK_N": 192, "ping_pong": "named"}),
    ({"head_dim": 256, "mask": "causal"}, {"BLOCK_N": 80, "softmax": "vote", "output_buffer": "shared"}),
    ({"head_dim": 96, "mask": "causal"}, {**SPLIT, "BLOCK_N": 96, "softmax": "lazy", "queries_in": "registers"}),
    ({"head_dim": 80, "mask": "window:600,0"}, {**SPLIT, "BLOCK_N": 160, "mask_loop": "branch", "row_sum": "each"}),
    ({"head_dim": 80, "mask": "causal"}, {**SPLIT, "mask_loop": "split_own", "softmax": "vote", "software_exp2": 4}),
    ({"head_dim": 64, "dtype": DType.FLOAT16}, {"BLOCK_N": 160, "ping_pong": "mbarrier", "software_exp2": 2}),
    ({"head_dim": 80}, {**SPLIT, "BLOCK_M": 64, "BLOCK_N": 80, "CTAS": 2, "softmax": "first_max", "software_exp2": 4}),
    ({"head_dim": 192, "head_dim_v": 128, **PACKED}, {**SPLIT, "BLOCK_N": 64, "softmax": "vote"}),
    ({"head_dim": 80, "mask": "causal", **PACKED}, {"HEAD_SPLIT": 2, "softmax": "first_max"}),
    ({"head_dim": 96, "mask": "blocks:128x128,0.5"}, {**SPLIT, "softmax": "first_max", "ping_pong": "named"}),
    ({"head_dim": 72, "mask": "blocks:64x64,0.5"}, {**SPLIT, "BLOCK_M": 64, "BLOCK_N": 64, "CTAS": 2, "num_stages": 3}),
)
# Those that each run compiles, both of a head dim in two pieces; all others are left to the exhaustive tests.
COMPILED = [KINDS[11]]  # the others take twice as long
PIECED = pytest.mark.parametrize(("kind", "params"), KINDS, ids=str)


def rendered(kind: dict[str, Any], params: dict[str, Value], traits: Traits | None = None) -> Source:
    """A feasible variant: what the space's first base says, changed."""
    points, call = search_space.load(TEMPLATE), problem(**kind)
    variant = points.variant(points.seeds[-1][1] | BASE | params)
    assert points.why_infeasible(variant, call, H200) is None
    return render.render(call, variant, traits)


BASE: dict[str, Value] = {
    **{"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "overlap": 1, "schedule": "dynamic", "output_buffer": "own"},
    **{"mask_loop": "split", "softmax": "online"},
}


def boxes(source: Source, tensor: str) -> list[list[int]]:
    """[rows, width] of each box in which a tensor is read or written, as the kernel's file says."""
    described = load_module(source).DESCRIPTORS.items()
    return [block[2:] for name, (block, _) in described if manifest.described(name) == tensor]


@PIECED
def test_boxes_hold_a_block_and_no_more_padding_than_two_powers_of_two(
    kind: dict[str, Any], params: dict[str, Value]
) -> None:
    source, call = rendered(kind, params), problem(**kind)
    held = {64: 64, 72: 80, 80: 80, 96: 96, 128: 128, 192: 192, 256: 256}
    width, width_v = held[call.head_dim], held[call.head_dim_v]
    if source.variant.as_dict().get("HEAD_SPLIT") == 2:
        width_v = call.head_dim_v_padded
    block_n = int(source.variant["BLOCK_N"])
    for tensor, rows, elements in (
        ("query", 64, width),
        ("key", block_n, width),
        ("value", block_n, width_v),
        ("output", 64, width_v),
    ):
        pieces = boxes(source, tensor)
        assert sum(math.prod(box) for box in pieces) == rows * elements
        assert all(size & (size - 1) == 0 for box in pieces for size in box), "the compiler takes powers of two"


@PIECED
def test_barriers_expect_the_bytes_of_all_boxes_that_are_asked_for(
    kind: dict[str, Any], params: dict[str, Value]
) -> None:
    """A byte less or more, and the kernel would wait for ever or read what has not come."""
    source = rendered(kind, params)
    for stem, ring in (("key", "keys"), ("value", "values"), ("query", "queries")):
        body = re.search(rf"def load_{ring}\(.*?(?=\n\n\n)", source.text, re.DOTALL)
        assert body is not None
        expected = re.search(r"mbarrier\.expect\(\w+\.index\(slot\), (.*)\)\n", body[0])
        assert expected is not None
        load = re.escape(triton_release.gluon_names(triton_release.installed_release()).tma_load)
        box = rf"{load}\({stem}(\[\d\])?, .*?{ring}(\[\d\])?\.index"
        loads = re.findall(box, body[0], re.DOTALL)
        assert [place for place, _ in loads] == [room for _, room in loads]
        assert len(set(loads)) == len(boxes(source, stem))
        if expected[1] != f"{stem}.block_type.nbytes":
            numbers = re.sub(r"[A-Z_]+", lambda name: str(getattr(load_module(source), name[0]).value), expected[1])
            assert eval(numbers) == sum(2 * math.prod(box) for box in boxes(source, stem))
        else:
            assert loads == [("", "")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "params"), rarely(KINDS, lambda case: case in COMPILED), ids=str)
def test_products_are_as_many_as_the_pieces_need_and_run_side_by_side(
    kind: dict[str, Any], params: dict[str, Value]
) -> None:
    source, call = rendered(kind, params, Traits(lse=True)), problem(**kind)
    loop = inspect(source, 90).loop
    scores = sum(width // 16 for _, width in boxes(source, "key"))
    sums = sum(rows // 16 for rows, _ in boxes(source, "value"))
    products = sum(count for name, count in loop.items() if name.startswith("HGMMA"))
    assert products == scores + sums, call
    assert loop["WARPGROUP.ARRIVE"] == len(boxes(source, "key")) + len(boxes(source, "value"))


def test_two_tiles_are_waited_for_while_all_their_sums_are_under_way() -> None:
    """The wait for the scores lets as many products go on as add values: one for each tile and piece of them."""
    for kind, params in KINDS:
        source = rendered(kind, params)
        if source.variant["overlap"]:
            waits = re.findall(r"scores = warpgroup_mma_wait\(num_outstanding=(\d+)", source.text)
            assert str(len(boxes(source, "value"))) in waits, kind
            assert {"0", str(len(boxes(source, "value")))} == set(waits)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "less padding than one": ({"head_dim": 64}, SPLIT),
    "both head dims": ({"head_dim": 192, "head_dim_v": 128}, {"HEAD_SPLIT": 2, "BLOCK_N": 64}),
    "registers": ({"head_dim": 256}, {"BLOCK_N": 160, "num_stages": 1, "output_buffer": "shared"}),
    "shared memory": ({"head_dim": 256}, {"BLOCK_N": 96, "output_buffer": "shared"}),
    "room of their own": ({"head_dim": 96, "head_dim_v": 80}, {**SPLIT, "output_buffer": "shared"}),
    "float8 is held in one tile": ({"head_dim": 80, "dtype": DType.FLOAT8}, SPLIT),
    "its weights packed for one": ({"head_dim": 64, "dtype": DType.FLOAT8}, {"BLOCK_N": 96}),
    "its last outputs stored": ({"head_dim": 80, **PACKED}, SPLIT),
    "values of a packed sequence's last block": ({"head_dim": 64, **PACKED}, {"BLOCK_N": 96}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_in_words(words: str) -> None:
    kind, params = REFUSED[words]
    points = search_space.load(TEMPLATE)
    chosen = points.variant(points.seeds[-1][1] | BASE | params)
    assert words in (points.why_infeasible(chosen, problem(**kind), H200) or "")


@pytest.mark.parametrize("mask", ["blocks:128x128,0.5", "blocks:64x64,0.5", "blocks:128x64,0.1"])
@pytest.mark.parametrize("dims", [(72, 72), (80, 80), (96, 96), (160, 160), (192, 192), (192, 128)])
def test_untuned_block_tables_run_or_are_tuned_with_head_dims_in_pieces(dims: tuple[int, int], mask: str) -> None:
    call = problem(head_dim=dims[0], head_dim_v=dims[1], mask=mask)
    default = search_space.load(TEMPLATE).default(call, H200)
    assert default.as_dict()["HEAD_SPLIT"] == 1
    assert (default["num_stages"] >= 2, default["overlap"]) == (True, 1)
    # The portfolio may put another template first: it takes block tables for problems of their sizes.
    assert any(
        (variant.template, variant.as_dict().get("HEAD_SPLIT")) == (TEMPLATE, 1)
        for variant in portfolio.starters_for(call, H200)
    )


@pytest.mark.parametrize("kind", [{"head_dim": 80}, {"head_dim": 192, "head_dim_v": 128}], ids=str)
def test_whole_values_let_float8_and_packed_sequences_in(kind: dict[str, Any]) -> None:
    """Rules refuse pieces to them, and nothing else that other problems of these head dims are given."""
    points = search_space.load(TEMPLATE)
    whole = points.variant(points.seeds[-1][1] | BASE | {"BLOCK_N": 64})
    for change in ({"dtype": DType.FLOAT8}, PACKED):
        assert points.why_infeasible(whole, problem(**kind, **change), H200) is None


def test_descriptors_go_by_the_tensor_whose_boxes_they_are() -> None:
    """float8's value_columns is a tensor of its own."""
    stems = {"query_low": "query", "key_rest": "key", "value_rest_high": "value", "output": "output"}
    assert {name: manifest.described(name) for name in stems} == stems
    assert manifest.described("value_columns") == "value_columns"


def test_kernels_from_before_pieces_keep_their_variants_and_texts() -> None:
    points, call = search_space.load(TEMPLATE), problem(head_dim=80)
    whole = points.variant({**points.default(call, H200).as_dict(), "HEAD_SPLIT": 0})
    assert "HEAD_SPLIT" not in whole.as_dict()
    text = render.render(call, whole).text
    assert "HEAD_SPLIT" not in text
    assert "_low" not in text
    assert "key_rest" not in text


def test_files_have_short_lines() -> None:
    for kind, params in KINDS:
        lines = rendered(kind, params, Traits(lse=True)).text.splitlines()
        assert [line for line in lines if line != line.rstrip()] == []
        assert max(map(len, lines)) <= render.MAX_LINE, kind
