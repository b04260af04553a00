"""The forward template on caches of keys and values, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cached
import kernels
import pytest
import torch
from cached import CAPACITY, LENGTHS
from interpreted import SECONDS
from rarely import diagonal

from autoattn.core.key_cache import KeyCache
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Precision
from autoattn.core.trial import Verdict
from autoattn.search import rehearsal
from autoattn.search.gpu_jobs import Rehearse
from autoattn.workers.worker_pool import Pool

pytestmark = pytest.mark.interpreter

CONTIGUOUS, PAGED = KeyCache(), KeyCache(page=16)
# Pages of one key, of a step, of several steps, and of a size that no step fits; caches with rows and padding; padded
# and packed queries; one program a tile, several, and heads that share keys in the rows of one.
CASES: tuple[tuple[str, bool, str, dict[str, Any]], ...] = (
    ("paged:1", False, "full", {}),
    ("paged:1", True, "window:9,3", {"SPLITS": 2}),
    ("paged:16", False, "causal", {"PACK_GQA": 1}),
    ("paged:16", True, "causal", {"PACK_GQA": 1, "SPLITS": 4, "PART_BLOCKS": 2}),
    ("paged:16", False, "full", {"softmax": "first_max", "SPLITS": 2}),
    ("paged:16", True, "window:9,0", {"BLOCK_N": 32, "mask_loop": "branch"}),
    ("paged:48", True, "causal", {"mask_loop": "every", "softmax": "lazy"}),
    ("paged:3", False, "window:9,-1", {"PACK_GQA": 1, "SPLITS": 2}),
    ("paged:3", True, "full", {"PERSISTENT": 1}),
    ("contiguous", False, "causal", {"SPLITS": 2}),
    ("contiguous", True, "window:9,3", {"PACK_GQA": 1}),
    ("contiguous,rows", False, "full", {"PACK_GQA": 1, "SPLITS": 4}),
    ("paged:16", False, "causal", {"PACK_GQA": 1, "SPLITS": 4, "SHARED_PROGRAMS": 8}),
    ("contiguous", False, "window:9,3", {"SPLITS": 2, "SHARED_PROGRAMS": 64}),
    ("paged:16,float8_e4m3", True, "causal", {"PACK_GQA": 1, "SPLITS": 2}),
    ("contiguous,float8_e4m3", False, "window:9,3", {"softmax": "first_max"}),
    ("contiguous,leftpad", True, "causal", {}),
    ("contiguous,rows,leftpad", False, "window:9,3", {"SPLITS": 2}),
    ("contiguous", False, "full", {"SPLITS": 4, "first_block": "ahead", "parts_read": "at_once"}),
    ("paged:16", False, "causal", {"PACK_GQA": 1, "SPLITS": 2, "first_block": "ahead", "mask_loop": "every"}),
    ("paged:3", False, "full", {"PACK_GQA": 1, "SPLITS": 2, "first_block": "ahead", "softmax": "lazy"}),
    ("contiguous,rows,leftpad", False, "causal", {"SPLITS": 2, "first_block": "ahead", "mask_loop": "branch"}),
    ("paged:16,float8_e4m3", False, "causal", {"SPLITS": 4, "PART_BLOCKS": 2, "first_block": "ahead"}),
    ("paged:16", True, "causal", {"PACK_GQA": 1, "SPLITS": 4, "parts_read": "at_once"}),
    ("contiguous", False, "window:9,3", {"SPLITS": 2, "SHARED_PROGRAMS": 64, "parts_read": "at_once"}),
    ("contiguous", False, "full", {"PACK_GQA": 1, "SPLITS": 4, "parts_read": "by_rows", "first_block": "ahead"}),
    ("paged:16", True, "causal", {"PACK_GQA": 1, "SPLITS": 16, "parts_read": "by_groups"}),
    ("paged:3", False, "window:9,3", {"SPLITS": 16, "SHARED_PROGRAMS": 64, "parts_read": "by_groups"}),
    ("contiguous", False, "causal", {"SPLITS": 2, "SHARED_PROGRAMS": 64, "parts_read": "by_rows"}),
)


@pytest.mark.parametrize(("text", "packed", "mask", "changes"), CASES)
def test_every_cache_matches_the_reference(
    child: Pool, text: str, packed: bool, mask: str, changes: dict[str, Any]
) -> None:
    cached.check(child, cached.problem(KeyCache.parse(text), packed=packed, mask=mask), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 24, "head_dim_v": 40},
        {"heads_q": 6, "heads_kv": 1, "modifiers": Modifiers(softcap=True, sinks=True)},
        {"modifiers": Modifiers(alibi=True), "mask": "causal"},
        {"dtype": DType.FLOAT32},
        {"dtype": DType.FLOAT32, "precision": Precision.TF32X3},  # whose values lie in another order
    ],
    ids=str,
)
def test_head_dims_modifiers_and_products_match_the_reference(child: Pool, changes: dict[str, Any]) -> None:
    cached.check(child, cached.problem(KeyCache(page=3), **changes))


def test_programs_are_shared_out_among_more_sequences_than_a_vector_has(child: Pool) -> None:
    lengths = tuple(7 * place % (CAPACITY + 1) for place in range(130))
    problem = cached.problem(PAGED, lengths, heads_q=1, heads_kv=1, seq_q=1)
    cached.check(child, problem, lengths, SPLITS=4, SHARED_PROGRAMS=64)


def test_permuted_pages_give_the_same_bits(child: Pool) -> None:
    problem = cached.problem(PAGED, mask="causal")
    first, second = (cached.run(child, problem, seed=seed, PACK_GQA=1, SPLITS=2) for seed in (1, 2))
    assert not torch.equal(cached.operands(problem, seed=1).key, cached.operands(problem, seed=2).key)
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def test_pages_and_a_contiguous_cache_give_the_same_bits(child: Pool) -> None:
    by_cache = [cached.run(child, cached.problem(cache), SPLITS=2) for cache in (CONTIGUOUS, PAGED, KeyCache(page=3))]
    for other in by_cache[1:]:
        assert all(torch.equal(left, right) for left, right in zip(by_cache[0], other, strict=True))


def test_a_sequence_gives_the_same_bits_whatever_shares_its_batch(child: Pool) -> None:
    splits = {"SPLITS": 4, "PART_BLOCKS": 1}
    beside, _ = cached.run(child, cached.problem(PAGED, (37, 48, 5), seq_q=1), lengths=(37, 48, 5), **splits)
    alone, _ = cached.run(child, cached.problem(PAGED, (37,), seq_q=1), lengths=(37,), **splits)
    assert torch.equal(beside[:1], alone)


def test_lengths_of_nothing_give_zero_and_an_lse_of_minus_infinity(child: Pool) -> None:
    output, lse = cached.run(child, cached.problem(PAGED, mask="causal"), SPLITS=2)
    assert LENGTHS[0] == 0
    assert bool((output[0] == 0.0).all())
    assert bool((lse[0] == -torch.inf).all())


@pytest.mark.parametrize("cache", [CONTIGUOUS, KeyCache(page=16)], ids=str)
def test_lengths_that_lie_stop_at_the_end_of_the_cache_and_at_zero(child: Pool, cache: KeyCache) -> None:
    problem = cached.problem(cache, (CAPACITY, 0), batch=2)
    honest = cached.run(child, problem, lengths=(CAPACITY, 0))
    lying = cached.run(child, problem, lengths=(CAPACITY, 0), read_lengths=(2**31 - 1, -5))
    assert all(torch.equal(left, right) for left, right in zip(honest, lying, strict=True))


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "packed"), [("paged:16,splits=4", True), ("contiguous,split_length=64", False)])
def test_the_gate_asks_whether_a_sequence_has_the_same_bits_in_every_batch(
    child: Pool, text: str, packed: bool
) -> None:
    problem = cached.problem(KeyCache.parse(text), packed=packed, mask="full")
    kind, source = rehearsal.structure(problem, kernels.variant(SPLITS=2))
    verdict = child.result(Rehearse(problem=kind, source=source), SECONDS)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.ok, verdict.reason


def test_values_that_are_no_finite_numbers_stay_in_the_rows_that_see_them_where_a_block_is_ahead(child: Pool) -> None:
    problem = cached.problem(PAGED, mask="causal")
    changes: dict[str, Any] = {"SPLITS": 2, "first_block": "ahead", "parts_read": "at_once", "mask_loop": "every"}
    kind, source = rehearsal.structure(problem, kernels.variant(**changes))
    verdict = child.result(Rehearse(problem=kind, source=source), SECONDS)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.ok, verdict.reason


def test_the_gate_refuses_a_kernel_that_cuts_a_sequence_by_those_that_share_its_batch(child: Pool) -> None:
    problem = cached.problem(KeyCache(splits=4), mask="full")
    source = kernels.source(problem, SPLITS=4, SHARED_PROGRAMS=8)
    verdict = child.result(Rehearse(problem=problem, source=source), SECONDS)
    assert isinstance(verdict, Verdict), verdict
    assert "other bits alone" in verdict.reason


@pytest.mark.parametrize(
    ("text", "layout"),
    diagonal(("paged:16", "paged:3", "contiguous,rows,leftpad", "paged:16,float8_e4m3"), (Layout.BSHD, Layout.PACKED)),
)
def test_a_rehearsal_passes_the_gate(child: Pool, text: str, layout: Layout) -> None:
    problem = cached.problem(KeyCache.parse(text), packed=layout is Layout.PACKED, mask="causal")
    kind, source = rehearsal.structure(problem, kernels.variant(PACK_GQA=1, SPLITS=2))
    verdict = child.result(Rehearse(problem=kind, source=source), SECONDS)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("// PAGE, mask", "// PAGE * 0, mask"),  # the first page for all
        ("start_n // PAGE * PAGE", "start_n"),  # the first key of the page
        ("tl.load(lengths_ptr + i_b)", "capacity"),
        ("tl.load(key_scale_ptr + ", "tl.load(value_scale_ptr + "),
        ("share *= tl.load(value_scale_ptr + scaled", "share *= tl.load(value_scale_ptr + 0"),
    ],
)
def test_the_gate_refuses_a_kernel_that_reads_other_keys(child: Pool, right: str, wrong: str) -> None:
    problem = cached.problem(KeyCache(page=32, float8="scale" in right))
    source = kernels.source(problem)
    assert right in source.text
    broken = replace(source, text=source.text.replace(right, wrong))
    verdict = child.result(Rehearse(problem=problem, source=broken), SECONDS)
    assert isinstance(verdict, Verdict), verdict
    assert not verdict.ok
