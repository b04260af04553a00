"""The forward template on latent caches, whose values are the first elements of their keys, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cached
import kernels
import pytest
import torch
from interpreted import SECONDS
from rarely import diagonal, rarely

from autoattn.core.key_cache import KeyCache
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.trial import Verdict
from autoattn.reference import attention_formula
from autoattn.search import rehearsal
from autoattn.search.gpu_jobs import Rehearse
from autoattn.workers.worker_pool import Pool

pytestmark = pytest.mark.interpreter

# As `test_cached_forward_interpreter` has them
CASES: tuple[tuple[str, bool, str, dict[str, Any]], ...] = (
    ("paged:1,latent", False, "full", {"PACK_GQA": 1}),
    ("paged:1,latent", True, "window:9,3", {"SPLITS": 2}),
    ("paged:16,latent", False, "causal", {"PACK_GQA": 1, "SPLITS": 4, "PART_BLOCKS": 2}),
    ("paged:16,latent", True, "causal", {"PACK_GQA": 1, "SPLITS": 4}),
    ("paged:16,latent", False, "full", {"softmax": "lazy", "PACK_GQA": 1, "SPLITS": 4, "SHARED_PROGRAMS": 8}),
    ("paged:48,latent", True, "causal", {"BLOCK_N": 32, "mask_loop": "every"}),
    ("paged:3,latent", False, "window:9,-1", {"PACK_GQA": 1, "mask_loop": "branch"}),
    ("paged:3,latent", True, "full", {"PERSISTENT": 1}),
    ("contiguous,latent", False, "causal", {"SPLITS": 2, "PACK_GQA": 1}),
    ("contiguous,latent,rows,leftpad", False, "window:9,3", {"SPLITS": 2}),
    ("paged:16,float8_e4m3,latent", True, "causal", {"PACK_GQA": 1, "SPLITS": 2}),
    ("contiguous,float8_e4m3,latent", False, "full", {"softmax": "lazy"}),
)


def make_problem(text: str, *, packed: bool = False, **changes: Any) -> Problem:
    """A small problem on a latent cache of 48 elements a key, of which 32 are its value."""
    return cached.problem(KeyCache.parse(text), packed=packed, **{"head_dim": 48, "head_dim_v": 32, **changes})


@pytest.mark.parametrize(("text", "packed", "mask", "changes"), CASES)
def test_every_latent_cache_matches_the_reference(
    child: Pool, text: str, packed: bool, mask: str, changes: dict[str, Any]
) -> None:
    cached.check(child, make_problem(text, packed=packed, mask=mask), HEAD_SPLIT=1, **changes)


@pytest.mark.parametrize(
    "facts",
    [
        {"head_dim": 576, "head_dim_v": 512, "heads_q": 16, "heads_kv": 1, "seq_q": 1},
        {"head_dim": 576, "head_dim_v": 512, "heads_q": 4, "heads_kv": 1, "mask": "causal"},
        {"head_dim": 41},  # the last tile of a key is not full, and nothing divides the strides
        {"modifiers": Modifiers(softcap=True, sinks=True), "mask": "causal"},
        {"modifiers": Modifiers(alibi=True)},
    ],
    ids=str,
)
def test_head_dims_modifiers_and_products_match_the_reference(child: Pool, facts: dict[str, Any]) -> None:
    cached.check(child, make_problem("paged:16,latent", **facts), HEAD_SPLIT=1, PACK_GQA=1, SPLITS=2)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_bfloat16_queries_of_a_float8_latent_become_float16_with_a_factor_for_each_row(child: Pool, mask: str) -> None:
    problem = make_problem("paged:16,float8_e4m3,latent", dtype=DType.BFLOAT16, mask=mask)
    assert "row_scale" in kernels.source(problem, HEAD_SPLIT=1).text
    output, lse = cached.run(child, problem, HEAD_SPLIT=1, PACK_GQA=1)
    expected, expected_lse = attention_formula.attention(problem, cached.operands(problem))
    torch.testing.assert_close(output.double(), expected, rtol=2**-7, atol=1e-3)  # the interpreter cuts bfloat16 off
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


def test_a_latent_kernel_takes_no_values_beside_the_keys() -> None:
    problem = make_problem("paged:16,latent")
    apart = replace(problem, cache=KeyCache(page=16))
    latent, other = (kernels.source(each, HEAD_SPLIT=1).text for each in (problem, apart))
    assert '"value_ptr": ' in other
    assert '"value_ptr": ' not in latent
    assert latent.count("latent = tl.load(") == 2  # with a mask and without


@pytest.mark.parametrize(
    ("text", "layout"),
    diagonal(("paged:16,latent", "paged:3,latent", "paged:16,float8_e4m3,latent"), (Layout.BSHD, Layout.PACKED)),
)
def test_a_rehearsal_passes_the_gate(child: Pool, text: str, layout: Layout) -> None:
    problem = make_problem(text, packed=layout is Layout.PACKED, mask="causal", head_dim=576, head_dim_v=512)
    kind, source = rehearsal.structure(problem, kernels.variant(HEAD_SPLIT=1, PACK_GQA=1, SPLITS=2))
    assert (kind.head_dim, kind.head_dim_v) == (48, 32)
    verdict = child.result(Rehearse(problem=kind, source=source), SECONDS)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.ok, verdict.reason


GROUPS = "add_parts(parts_ptr, groups, m_m, GROUP_PARTS)"


@pytest.mark.parametrize("read", rarely([GROUPS, GROUPS.replace("GROUP_PARTS", "1")], lambda read: read == GROUPS))
def test_parts_of_more_than_one_group_add_up(child: Pool, read: str) -> None:
    """Where the same bits are asked in every batch, the gate has a sequence of 150 keys: 10 parts of 16 keys."""
    problem = make_problem("paged:16,latent,splits=16", mask="full")
    source = kernels.source(problem, HEAD_SPLIT=1, PACK_GQA=1, SPLITS=16)
    assert GROUPS in source.text
    source = replace(source, text=source.text.replace(GROUPS, read))
    verdict = child.result(Rehearse(problem=problem, source=source), SECONDS)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.ok is (read == GROUPS), verdict.reason


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tl.trans(latent)", "tl.trans(latent * 1.01)"),
        (
            "acc = tl.dot(weights.to(latent.dtype), latent, acc)",
            "acc = tl.dot(weights.to(latent.dtype), latent * 1.01, acc)",
        ),
        ("        latent = tl.where(latent * 0.0 == 0.0, latent, 0.0)", "        pass"),  # 0 * NaN
        ("o_d_high = 32 + ", "o_d_high = 31 + "),
    ],
)
def test_the_gate_refuses_a_kernel_that_takes_other_numbers(child: Pool, right: str, wrong: str) -> None:
    problem = make_problem("paged:16,latent", mask="causal")
    source = kernels.source(problem, HEAD_SPLIT=1)
    assert right in source.text
    verdict = child.result(
        Rehearse(problem=problem, source=replace(source, text=source.text.replace(right, wrong))), SECONDS
    )
    assert isinstance(verdict, Verdict), verdict
    assert not verdict.ok
