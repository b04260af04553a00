"""Code that computes tiles again lies behind what always runs, and computes what it did."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hopper_gradients
import pytest
from code_layout import as_ptxas_lays_out
from gluon_kernels import problem, source

from autoattn.core.problem import Layout
from autoattn.core.variant import Source, Value
from autoattn.kernels import code_layout, compiler
from autoattn.kernels.code_layout import Block, blocks_of
from autoattn.kernels.sass import disassembler

PREFETCHED = 64 * 1024  # bytes of code that a launch brings into the instruction cache (docs/decisions/code-layout.md)
ROOT = Path(__file__).parents[2]
# Kernels of one and of several consumers, by tile and by program
KERNELS: dict[str, dict[str, Value]] = {
    "two consumers": {"BLOCK_M": 128, "BLOCK_N": 64, "schedule": "one_tile", "output_buffer": "shared"},
    "one consumer": {"BLOCK_M": 64, "BLOCK_N": 64, "schedule": "dynamic"},
    "eight warps": {"BLOCK_M": 128, "BLOCK_N": 64, "WARPGROUPS": 2, "schedule": "persistent"},
    "packed sequences": {"BLOCK_M": 128, "BLOCK_N": 64, "schedule": "one_tile", "output_buffer": "shared"},
}


def kernel(name: str, softmax: str = "first_max", mask: str = "causal") -> Source:
    layout = Layout.PACKED if name.startswith("packed") else Layout.BHSD
    call = problem(head_dim=128, mask=mask, layout=layout)
    return source(call, None, softmax=softmax, num_stages=2, **KERNELS[name])


@cache
def as_triton_writes(name: str, softmax: str = "first_max", mask: str = "causal") -> Any:
    """A compiled kernel that is not laid out."""
    with TemporaryDirectory() as folder, as_ptxas_lays_out(Path(folder)):
        compiled = compiler.build(kernel(name, softmax, mask), 90)
        return dict(compiled.asm)


def places_of(cubin: bytes, instruction: str) -> list[int]:
    """Where instructions lie in the machine code of a kernel, in bytes."""
    text = disassembler.sections_of(cubin)[".text.forward"]
    names = [name for name, _, _ in disassembler.decode(cubin, text, 90)]
    return [i * disassembler.INSTRUCTION_BYTES for i, name in enumerate(names) if name.startswith(instruction)]


class Warp:
    """A warp that takes branches as a seed says: the same ones in two kernels that ask in the same order."""

    def __init__(self, seed: int, never: str) -> None:
        self.never = {"%never", never}  # conditions that hold for no warp
        self.seed, self.evaluated, self.time = seed, Counter[str](), 0

    def run(self, blocks: Mapping[str, Block]) -> list[str]:
        """The instructions that it runs, less branches."""
        ran, block = list[str](), next(iter(blocks.values()))
        while len(ran) < 100_000:
            lines = [line.strip() for line in block.lines if not line.strip().startswith(("//", ".", "$"))]
            ran += [line for line in lines if line and not code_layout.BRANCH.match(line)]
            if not block.successors:
                return ran
            block = blocks[self._next(block, lines)]
        raise AssertionError("a warp that takes branches by chance ends")

    def _next(self, block: Block, lines: Sequence[str]) -> str:
        if len(block.targets) > 1:
            return self._role(block.targets)
        branch = code_layout.BRANCH.match(lines[-1]) if lines else None
        if branch is None or not branch["condition"]:
            return block.successors[0]
        negated, predicate = branch["condition"].strip()[1:].partition("%")[::2]
        predicate = f"%{predicate}"
        taken = predicate not in self.never and self._is_true(predicate) != bool(negated)
        return block.successors[0 if taken else 1]

    def _role(self, roles: Sequence[str]) -> str:
        """One of the first time, then of the second time or the end, then the end."""
        self.time += 1
        half, end = len(roles) // 2, len(roles) - 1
        low, high = {1: (0, half - 1), 2: (half, end)}.get(self.time, (end, end))
        return roles[random.Random(f"{self.seed} {self.time}").randint(low, high)]

    def _is_true(self, predicate: str) -> bool:
        self.evaluated[predicate] += 1
        return random.Random(f"{self.seed} {predicate} {self.evaluated[predicate]}").random() < 0.5


# --- where code lies --------------------------------------------------------------------------------------------------


def test_two_consumers_write_their_outputs_by_code_that_a_launch_brings() -> None:
    before = places_of(as_triton_writes("two consumers")["cubin"], "UTMASTG")
    assert sum(place < PREFETCHED for place in before) == 2  # those of one consumer, and what it computes again
    after = compiler.build(kernel("two consumers"), 90).asm["cubin"]
    assert [place < PREFETCHED for place in places_of(after, "UTMASTG")] == [True, True, False, False]
    assert places_of(after, "EXIT")[0] < PREFETCHED


def test_compiled_kernels_are_laid_out() -> None:
    ptx = as_triton_writes("two consumers")["ptx"]
    assert compiler.build(kernel("two consumers"), 90).asm["ptx"] == code_layout.rare_code_last(ptx) != ptx


# --- what it computes -------------------------------------------------------------------------------------------------


def check_runs_as_before(ptx: str) -> None:
    """Warps that take the same branches run the same instructions, laid out and not."""
    before = blocks_of(ptx)
    after = blocks_of(code_layout.rare_code_last(ptx).replace("$L_behind", "$L_between"))
    added = {line.strip() for line in code_layout.NEVER}
    no_role = next(
        block.lines[-1].split()[0].removeprefix("@")
        for block in before.values()
        if block.below is not None and len(before[block.below].targets) > 1
    )
    again = 0
    for seed in range(300):
        ran = Warp(seed, no_role).run(before)
        laid_out = [line for line in Warp(seed, no_role).run(after) if line not in added]
        assert laid_out == [*ran[: len(laid_out) - 1], "ret;"], seed
        # Warps that would have waited for another role and found that there is none end before they look.
        left_out = ran[len(laid_out) - 1 : -1]
        assert not [line for line in left_out if line.startswith(("st.", "red.", "bar", "cp.", "mbarrier"))], seed
        again += any(code_layout.AGAIN in line for line in ran)
    assert again > 10  # of these warps computed again


@pytest.mark.parametrize("name", KERNELS)
def test_whatever_branches_are_taken_the_same_instructions_run(name: str) -> None:
    check_runs_as_before(as_triton_writes(name)["ptx"])


def test_tables_of_roles_may_stand_in_front_and_name_a_role_without_work_twice() -> None:
    # as Triton 3.7 to 3.9 write them
    ptx = as_triton_writes("two consumers")["ptx"]
    table = code_layout.TABLE.search(ptx)
    assert table is not None
    roles = [label.strip() for label in table[2].split(",")]
    for place, role in enumerate(roles[6:8], 6):  # of eight and the end: those of warps that only fill a warpgroup
        if role != roles[2]:
            ptx = re.sub(rf"{re.escape(role)}:.*?(?=\n\$L_)", "", ptx, flags=re.DOTALL)
            roles[place] = roles[2]
    in_front = f"{{\nJTI0_0:\n\t.branchtargets\n\t\t{', '.join(roles)};"
    before, _, after = ptx.replace(table[0], "").replace(f"{table[1]};", "JTI0_0;").partition("\n{")
    ptx = f"{before}\n{in_front}{after}"
    assert code_layout.rare_code_last(ptx) != ptx
    check_runs_as_before(ptx)


def test_kernels_whose_roles_stand_in_no_table_keep_their_ptx() -> None:
    ptx = as_triton_writes("two consumers")["ptx"].replace(".branchtargets", ".calltargets")
    assert code_layout.rare_code_last(ptx) == ptx


def test_kernels_that_compute_nothing_again_keep_their_ptx() -> None:
    gradients = hopper_gradients.source(hopper_gradients.problem(head_dim=64))
    outputs = as_triton_writes("two consumers", "online", "full")["ptx"]
    for ptx in (outputs, compiler.build(gradients, 90, "backward_keys").asm["ptx"]):
        assert code_layout.rare_code_last(ptx) == ptx


def test_kernels_whose_warps_wait_in_another_way_keep_their_ptx() -> None:
    ptx = as_triton_writes("two consumers")["ptx"].replace("barrier.sync", "barrier.cta.sync")
    assert code_layout.rare_code_last(ptx) == ptx


def test_only_what_computes_tiles_again_begins_as_it_does() -> None:
    files = [path for path in (ROOT / "templates").rglob("*.j2") if code_layout.AGAIN in path.read_text("utf-8")]
    assert [path.name for path in files] == ["again.j2"]
