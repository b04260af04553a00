"""The template for latent caches on Hopper, in the interpreter of Gluon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cached
import latent_kernels
import pytest
import torch
from latent_kernels import CPU, MLA, TEMPLATE
from rarely import diagonal, rarely

from autoattn.core.problem import DType, Problem
from autoattn.core.trial import Verdict
from autoattn.core.variant import Source
from autoattn.errors import SynchronizationError
from autoattn.kernels import forward
from autoattn.kernels.compiler import Kernel, load
from autoattn.search.gpu_jobs import Rehearse

pytestmark = pytest.mark.interpreter

LONG = (0, 1, 63, 64, 65, 200, 256)  # keys of sequences in a cache of 256
FLOAT8 = "paged:64,float8_e4m3,latent"
WIDE = {"head_dim": 192, "head_dim_v": 128}  # the smallest where tiles of few rows are the columns of products
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("paged:32,latent", {"mask": "causal"}, {}),
    ("paged:32,latent", {"mask": "full", "seq_q": 2}, {"num_stages": 1}),
    ("paged:64,latent", {"mask": "causal", "seq_q": 4}, {"BLOCK_N": 64, "SPLITS": 2}),
    ("paged:64,latent", {"mask": "window:-1,3", "seq_q": 3, "heads_q": 5}, {"num_stages": 4}),
    ("contiguous,latent", {"mask": "causal", "seq_q": 3}, {"BLOCK_N": 64, "num_stages": 1}),
    ("contiguous,latent,rows,leftpad", {"mask": "causal", "dtype": DType.FLOAT16}, {"SPLITS": 2}),
    ("paged:32,latent", {"mask": "causal", "heads_q": 80, "seq_q": 2}, {}),  # three tiles of rows
    ("paged:32,latent", {"mask": "causal", "heads_q": 6, "heads_kv": 2, "seq_q": 3}, {}),
    ("paged:64,latent", {"mask": "causal", **WIDE}, {"BLOCK_M": 16, "BLOCK_N": 64}),
    ("paged:64,latent", {"mask": "full", "seq_q": 3, **WIDE}, {"BLOCK_M": 16, "BLOCK_N": 64, "num_stages": 1}),
    ("contiguous,latent", {"mask": "causal", "seq_q": 5, **WIDE}, {"BLOCK_M": 32, "BLOCK_N": 64, "PERSISTENT": 1}),
    (FLOAT8, {"mask": "causal"}, {"byte_stages": 2}),
    (FLOAT8, {"mask": "causal", "seq_q": 4, **WIDE}, {"BLOCK_M": 32, "BLOCK_N": 64, "byte_stages": 3, "SPLITS": 2}),
    (FLOAT8, {"mask": "full", "seq_q": 2}, {"byte_stages": 4, "num_stages": 1}),
    (FLOAT8, {"mask": "causal", "dtype": DType.FLOAT16}, {"BLOCK_N": 64, "num_stages": 1, "SPLITS": 2}),
)


@pytest.mark.parametrize(("text", "facts", "changes"), CASES)
def test_every_latent_cache_matches_the_reference(text: str, facts: dict[str, Any], changes: dict[str, Any]) -> None:
    latent_kernels.check(latent_kernels.problem(text, **facts), **changes)


@pytest.mark.parametrize(("text", "queries"), diagonal(("paged:64,latent", FLOAT8), (1, 2, 4)))
def test_keys_of_576_elements_match_the_reference(text: str, queries: int) -> None:
    problem = latent_kernels.problem(text, seq_q=queries, mask="causal", **MLA)
    latent_kernels.check(problem, byte_stages=2 if problem.caches_float8 else 1, SPLITS=2)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("", {"SPLITS": 4, "PART_BLOCKS": 2}),
        ("", {"SPLITS": 8}),
        ("", {"SPLITS": 16}),  # more parts than a group has
        (",split_length=64", {"SPLITS": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize("text", ["paged:64,latent", FLOAT8])
def test_programs_that_share_a_tile_add_up_its_parts(
    text: str, words: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (*LONG, 512) if changes["SPLITS"] == 16 else LONG
    monkeypatch.setattr(cached, "CAPACITY", max(lengths))
    latent_kernels.check(latent_kernels.problem(text + words, lengths, seq_q=2, mask="causal"), lengths, **changes)


@pytest.mark.parametrize(
    ("text", "programs", "heads"),
    rarely(
        [(text, *run) for run in ((1, 8), (5, 8), (7, 40), (40, 8)) for text in ("paged:64,latent", FLOAT8)],
        lambda case: (case[0] == FLOAT8) is (case[1] in (5, 40)),
    ),
)
def test_persistent_programs_share_all_blocks_whatever_tiles_they_are_of(
    text: str, programs: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "CAPACITY", 512)
    lengths = *LONG, 512  # 25 blocks of 32 keys, of which 16 are of the last sequence
    problem = latent_kernels.problem(text, lengths, seq_q=2, heads_q=heads, mask="causal")
    latent_kernels.check(problem, lengths, programs=programs, PERSISTENT=1)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 3, 0), (1,)])
def test_persistent_programs_write_the_outputs_of_sequences_without_keys(lengths: tuple[int, ...]) -> None:
    problem = latent_kernels.problem("paged:32,latent", lengths, mask="causal")
    latent_kernels.check(problem, lengths, programs=4, PERSISTENT=1, PART_BLOCKS=2)


@pytest.mark.parametrize("changes", [{"SPLITS": 16}, {"PERSISTENT": 1}], ids=str)
def test_counters_are_zeros_again_behind_a_launch(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "CAPACITY", 512)
    problem, lengths = latent_kernels.problem("paged:64,latent", (512, 0, 300)), (512, 0, 300)
    kernel = replace(load(latent_kernels.source(problem, **changes), CPU), sm_count=20)
    given = cached.operands(problem, lengths)
    output, lse = forward.empty_output(problem, given.query), torch.empty(3, problem.heads_q, 1)
    name, count = forward.zeros(kernel, problem, given.query) or ("", 0)
    counters = torch.zeros(count, dtype=torch.int32)
    room = torch.empty(forward.partials(kernel, problem, given.query))
    arguments = forward.launch_arguments(kernel, problem, given, output, lse) | {name: counters, "partial_ptr": room}
    kernel.launch(forward.launch_grid(kernel, problem, given.query), arguments)
    assert name == "arrivals_ptr"
    assert not bool(counters.any())


def test_the_order_in_which_warps_take_turns_changes_no_bit() -> None:
    problem = latent_kernels.problem("paged:32,latent", seq_q=2, mask="causal")
    kernel, given = load(latent_kernels.source(problem, SPLITS=2), CPU), cached.operands(problem)
    first = latent_kernels.run(problem, kernel, given)
    for _ in range(5):  # each launch of a module has another order
        assert all(map(torch.equal, latent_kernels.run(problem, kernel, given), first))


def test_lengths_that_lie_read_nothing_outside_of_the_cache() -> None:
    problem = latent_kernels.problem("paged:32,latent", (64, 64, 64), seq_kv=64, mask="causal")
    kernel, given = load(latent_kernels.source(problem), CPU), cached.operands(problem, (48, 48, 48))
    assert given.cache is not None
    caches = [
        replace(given.cache, lengths=torch.tensor(each, dtype=torch.int32)) for each in ((99, -7, 48), (64, 0, 48))
    ]
    lied, true = (latent_kernels.run(problem, kernel, replace(given, cache=each))[1] for each in caches)
    assert torch.equal(lied.nan_to_num(), true.nan_to_num())


# What is written otherwise, how, and what is found
FAULTS = (
    ("        wait_read()  # the weights before\n", "", "deadlock|missed barrier|comes to"),
    ("        fence_async_shared()\n        say_weighed()", "        say_weighed()", "missed fence"),
    ("        mbarrier.wait(key_full.index(slot), phase)\n", "", "missed barrier|nobody has written"),
    ("        say_read()\n        mbarrier.arrive(key_free", "        mbarrier.arrive(key_free", "deadlock"),
    ("    fence_async_shared()\n    meet()\n", "    fence_async_shared()\n", "missed barrier|nobody has written|came"),
)


def launch_often(problem: Problem, kernel: Kernel) -> None:
    """Launches a kernel five times, in which its warps take turns in other orders."""
    for _ in range(5):
        latent_kernels.run(problem, kernel, cached.operands(problem))


@pytest.mark.parametrize(("right", "wrong", "words"), FAULTS)
def test_the_interpreter_finds_what_is_not_waited_for(right: str, wrong: str, words: str) -> None:
    problem = latent_kernels.problem("paged:32,latent", mask="causal")
    rendered = latent_kernels.source(problem)
    assert right in rendered.text
    kernel = load(replace(rendered, text=rendered.text.replace(right, wrong)), CPU)
    with pytest.raises(SynchronizationError, match=words):
        launch_often(problem, kernel)


def judged(rendered: Source, text: str = "paged:32,latent") -> Verdict:
    """What the gate says of a kernel, on small problems."""
    problem = latent_kernels.problem(text, seq_q=2, mask="causal")
    verdict = Rehearse(problem=problem, source=rendered).run({})
    assert isinstance(verdict, Verdict)
    return verdict


def test_the_gate_passes_a_kernel_and_refuses_one_that_takes_other_numbers() -> None:
    problem = latent_kernels.problem("paged:32,latent", seq_q=2, mask="causal")
    rendered = latent_kernels.source(problem)
    assert judged(rendered).ok
    wrong = "kept = kept & (values * 0.0 == 0.0)"  # 0 * NaN
    assert wrong in rendered.text
    assert not judged(replace(rendered, text=rendered.text.replace(wrong, "pass"))).ok


def test_values_are_the_bytes_of_keys() -> None:
    text = latent_kernels.source(latent_kernels.problem("paged:32,latent")).text
    assert '"value' not in text
    assert TEMPLATE in text
