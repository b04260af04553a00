"""Turns in which programs of Hopper's backward template add to the queries' gradients: each is counted, and comes."""

from __future__ import annotations

import re
from collections import Counter
from types import FunctionType, SimpleNamespace
from typing import Any

import hopper_gradients
import pytest
import triton.language as tl

from autoattn.codegen import render, search_space
from autoattn.kernels.compiler import load_module

BATCH, HEADS = 2, 3


class Number(int):
    """An integer of a kernel, where a negative one must not be divided: rounding is not Python's there."""

    def __floordiv__(self, other: int) -> Number:
        assert self >= 0
        return Number(int(self) // other)

    def __add__(self, other: int) -> Number:
        return Number(int(self) + other)

    def __sub__(self, other: int) -> Number:
        return Number(int(self) - other)

    def __rsub__(self, other: int) -> Number:
        return Number(other - int(self))

    def __mul__(self, other: int) -> Number:
        return Number(int(self) * other)

    __radd__, __rmul__ = __add__, __mul__


LANGUAGE = SimpleNamespace(
    cdiv=lambda dividend, divisor: (Number(dividend) + (divisor - 1)) // divisor,
    minimum=lambda first, second: Number(min(first, second)),
    maximum=lambda first, second: Number(max(first, second)),
    where=lambda test, chosen, otherwise: chosen if test else otherwise,
)


def functions_of(module: Any) -> SimpleNamespace:
    """The module's functions of numbers alone, in Python."""
    names = {
        name: member.value if isinstance(member, tl.constexpr) else member for name, member in vars(module).items()
    }
    names["gl"] = LANGUAGE
    functions = ("place_of", "blocks_of", "turn_of")
    return SimpleNamespace(**{name: FunctionType(getattr(module, name).fn.__code__, names) for name in functions})


MASKS = (
    *(("causal", 128), ("causal:top-left", 64), ("window:130,70", 64), ("window:300,0", 256), ("window:200,-1", 128)),
    # Bounds on, before and behind the end of a block.
    *(("window:-1,90", 128), ("window:256,63", 128), ("window:127,64", 64), ("window:257,65", 128)),
)


@pytest.mark.parametrize(
    ("mask", "head_dim", "order"),
    [("full", 128, "ascending"), *((*kind, order) for kind in MASKS for order in ("ascending", "descending"))],
)
def test_a_turn_is_the_number_of_earlier_programs_that_add(mask: str, head_dim: int, order: str) -> None:
    for group in (1, 4):
        for block in (64, 128) if head_dim == 64 else (64,):
            problem = hopper_gradients.problem(mask=mask, head_dim=head_dim, deterministic=True)
            source = hopper_gradients.source(problem, order=order, HEAD_GROUP=group, BLOCK_M=block)
            functions = functions_of(load_module(source))
            for lengths in ((1000, 1000), (1, 700), (700, 1), (513, 1025), (1100, 300), (64, 64)):
                check(functions, problem.mask, *lengths, source.text)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window:600,64", "window:600,-1", "window:-1,90", "window:1023,0"])
def test_early_seeds_let_no_program_wait_for_the_whole_walk_of_another(mask: str, head_dim: int) -> None:
    problem = hopper_gradients.problem(mask=mask, head_dim=head_dim, seq_kv=4096, deterministic=True)
    for chosen in search_space.load(hopper_gradients.TEMPLATE).seeds_for(problem, hopper_gradients.H200)[:2]:
        functions = functions_of(load_module(render.render(problem, chosen)))
        sizes, bounds = [Number(size) for size in (1, 1, 1, 4096, 4096)], bounds_of(problem.mask, 0)
        programs = 4096 // (64 if head_dim == 256 else 128)
        ends: dict[int, int] = {}  # of the last addition to each block, in steps
        longest = last = 0
        for program in range(programs):  # all of them at once
            start_n, _, _ = functions.place_of(Number(program), *sizes)
            begin, inner_begin, inner_end, end = functions.blocks_of(start_n, *sizes[3:], *bounds)
            walk = list(range(begin, end))
            if chosen.as_dict()["mask_loop"] == "split":  # blocks that may be cut come first
                walk.sort(key=lambda i_m: inner_begin <= i_m < inner_end)
            now = 0
            for i_m in walk:
                now = ends[i_m] = max(now, ends.get(i_m, 0)) + 1
            longest, last = max(longest, len(walk)), max(last, now)
        assert last <= longest + programs, chosen


def bounds_of(mask: Any, shift: int) -> list[Number]:
    """What the kernels take of a mask."""
    left = [Number(shift - mask.left)] if mask.bounded_left else []
    return left + ([Number(shift + (mask.right or 0))] if mask.bounded_right else [])


def check(functions: Any, mask: Any, seq_q: int, seq_kv: int, text: str) -> None:
    """Every program's turn at each block that it adds to, in the order in which programs start."""
    bounds = bounds_of(mask, seq_kv - seq_q if "seq_kv - seq_q" in text else 0)
    sizes = [Number(size) for size in (BATCH, HEADS, HEADS, seq_q, seq_kv)]
    tile = 64 if "BLOCK_N = gl.constexpr(64)" in text else 128
    programs = -(-seq_kv // tile) * BATCH * HEADS
    added: Counter[tuple[int, int, int]] = Counter()
    seen = set()
    for program in range(programs):
        start_n, i_b, i_kv = functions.place_of(Number(program), *sizes)
        seen.add((start_n, i_b, i_kv))
        begin, inner_begin, inner_end, end = functions.blocks_of(start_n, *sizes[3:], *bounds)
        assert 0 <= begin <= inner_begin <= inner_end <= end
        for consumer in range(2):  # whose keys begin further on, in a tile of 128
            begins = start_n + (consumer * 64 if tile == 128 else 0)
            turns = {i_m: functions.turn_of(Number(i_m), begins, sizes[4], *bounds) for i_m in range(begin, end)}
            assert turns == {i_m: added[i_b, i_kv, i_m] for i_m in turns}, (seq_q, seq_kv, program)
        added.update((i_b, i_kv, i_m) for i_m in range(begin, end))
    assert len(seen) == programs


def test_split_loops_of_a_window_keep_the_order_of_blocks_where_programs_take_turns() -> None:
    def walks(order: str) -> list[str]:
        text = hopper_gradients.source(
            hopper_gradients.problem(mask="window:600,64"), order=order, mask_loop="split"
        ).text
        return re.findall(r"for block in range\((\w+, \w+)\)|for place in range", text)

    in_order = ["begin, inner_begin", "inner_begin, inner_end", "inner_end, end"]
    assert walks("descending") == in_order * 3, "of the producer, the consumers and the warps that wait for turns"
    assert walks("any") == ["", "inner_begin, inner_end"] * 2, "blocks that are cut come first"
