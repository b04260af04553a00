"""What untuned calls on caches run: as many parts as sizes ask for; those of short ones begin with a block ahead."""

from __future__ import annotations

from typing import Any

import pytest
from rarely import diagonal
from samples import A30, H200

from autoattn.codegen import search_space
from autoattn.core import device_profiles
from autoattn.core.device import Device
from autoattn.core.key_cache import KeyCache
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.variant import Value

H100 = device_profiles.named("h100")
SPACE = search_space.load("triton/forward")


def problem(cache: str = "contiguous", **changes: Any) -> Problem:
    facts: dict[str, Any] = {"batch": 1, "heads_q": 32, "heads_kv": 8, "seq_q": 1, "seq_kv": 1024, "mask": Mask()}
    dims: dict[str, Any] = {"head_dim": 128, "head_dim_v": 128, "dtype": DType.BFLOAT16, "layout": Layout.BSHD}
    return Problem(cache=KeyCache.parse(cache), **facts | dims | changes)


def default(problem: Problem, device: Device = H100) -> dict[str, Value]:
    return SPACE.params_of(SPACE.default(problem, device))


def begins_ahead(problem: Problem, device: Device = H100) -> bool:
    params = default(problem, device)
    return (params["first_block"], params["parts_read"]) == ("ahead", "at_once")


@pytest.mark.parametrize(
    ("batch", "heads", "keys", "splits"),
    [
        (1, (32, 8), 256, 2),
        (1, (32, 8), 1024, 8),
        (1, (32, 8), 4096, 32),
        (4, (32, 8), 1024, 8),
        (4, (32, 8), 8192, 8),
        (16, (32, 8), 512, 2),
        (16, (32, 8), 4096, 2),
        (1, (16, 16), 1024, 8),
        (1, (64, 8), 1000, 4),
    ],
)
@pytest.mark.parametrize("cache", ["contiguous", "paged:16"])
def test_parts_of_caches_fill_the_multiprocessors_and_have_a_block_of_128_keys_at_least(
    cache: str, batch: int, heads: tuple[int, int], keys: int, splits: int
) -> None:
    call = problem(cache, batch=batch, heads_q=heads[0], heads_kv=heads[1], seq_kv=keys)
    params = default(call)
    assert begins_ahead(call)
    assert (params["BLOCK_N"], params["SPLITS"]) == (128, splits)


@pytest.mark.parametrize(
    ("batch", "heads", "keys", "expected"),
    [
        (1, (32, 8), 8192, (16, "at_once")),
        (1, (32, 8), 131072, (16, "at_once")),
        (1, (8, 1), 32768, (128, "by_groups")),
        (1, (8, 1), 8192, (64, "by_groups")),
        (1, (4, 1), 32768, (128, "by_rows")),
        (2, (8, 2), 32768, (32, "by_rows")),
        (1, (8, 8), 32768, (16, "by_rows")),
        (7, (16, 2), 32768, (8, "at_once")),
    ],
)
def test_parts_of_long_caches_of_few_heads_fill_the_multiprocessors_once_and_are_added_up_at_once(
    batch: int, heads: tuple[int, int], keys: int, expected: tuple[int, str]
) -> None:
    for device in (H100, H200):
        params = default(problem(batch=batch, heads_q=heads[0], heads_kv=heads[1], seq_kv=keys), device)
        assert (params["SPLITS"], params["parts_read"]) == expected
        assert (params["first_block"], params["BLOCK_N"], params["mask_loop"]) == ("walked", 128, "branch")


def test_parts_of_long_pages_are_added_up_by_rows() -> None:
    assert default(problem("paged:16", seq_kv=32768))["parts_read"] == "by_rows"


def test_a_call_that_says_how_a_sequence_is_cut_takes_no_number_of_parts_from_its_batch() -> None:
    defaults = [default(problem("contiguous,splits=64", seq_kv=32768, batch=batch)) for batch in (1, 2, 8)]
    assert all(params["parts_read"] in ("maxima_first", "at_once") for params in defaults)


@pytest.mark.parametrize(
    ("batch", "keys", "heads_kv"), diagonal((1, 2, 4, 8, 16, 64), (128, 300, 1024, 5000, 8192, 131072), (8, 32))
)
def test_there_are_no_more_parts_than_blocks_and_no_more_programs_than_fill_the_multiprocessors_twice(
    batch: int, keys: int, heads_kv: int
) -> None:
    call = problem(batch=batch, seq_kv=keys, heads_kv=heads_kv)
    if begins_ahead(call):
        params = default(call)
        blocks, splits = -(-keys // int(params["BLOCK_N"])), int(params["SPLITS"])
        assert splits <= blocks <= 16 * splits
        assert batch * heads_kv * splits <= 2 * H100.sm_count


@pytest.mark.parametrize(
    "problem",
    [
        problem(seq_kv=131072),
        problem(batch=16, seq_kv=8192),
        problem(batch=64, seq_kv=1024),
        problem(seq_q=16, mask=Mask.parse("causal")),
        problem("paged:16,float8_e4m3"),
        problem(head_dim=256, head_dim_v=256),
        problem("contiguous,split_length=256"),
        problem(mask=Mask.window(500, 0)),
    ],
    ids=str,
)
def test_long_caches_many_sequences_and_what_was_not_measured_walk_from_the_first_block_on(problem: Problem) -> None:
    assert not begins_ahead(problem)


def test_cards_of_the_same_matrix_unit_choose_alike_and_older_ones_walk() -> None:
    assert begins_ahead(problem(), H200)
    assert not begins_ahead(problem(), A30)


def test_a_call_that_says_how_many_programs_share_a_sequence_has_no_more() -> None:
    call = problem("paged:16,splits=4", batch=8)
    assert begins_ahead(call)
    assert default(call)["SPLITS"] == 4
