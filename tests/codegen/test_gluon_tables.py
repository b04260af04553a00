"""Block tables in the Gluon family: what its machine code says of the walk over a table; no GPU is needed."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import gluon_kernels
import pytest
from rarely import rarely

from autoattn.core.variant import Source, Value
from autoattn.kernels.compiler import build, inspect
from autoattn.kernels.sass import disassembler

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.exhaustive]

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;(.*)$")
# The unit of a uniform register that an instruction writes: "UIADD3 UR4, ..." or "UIADD3.64 UR4, ..." for UR4 and UR5
WRITTEN = re.compile(r"^(U[A-Z0-9]+|R2UR|S2UR|VOTEU|REDUX)(\S*) (?:!?UP[T\d], |P\d, )*UR(\d+)\b")


def source(mask: str, head_dim: int = 128, **changes: Any) -> Source:
    return gluon_kernels.source(gluon_kernels.problem(head_dim=head_dim, mask=mask), **changes)


def listing(cubin: bytes, folder: Path) -> tuple[list[str], list[list[int]], int]:
    """Instructions, those that may come right before each, and where the roles of the warps part."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    said = subprocess.run(
        [disassembler.disassembler(), "-c", "-ndf", str(file)], capture_output=True, text=True, check=True
    )
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in said.stdout.splitlines():
        if match := LABEL.match(line.strip()):
            labels[match[1]] = len(code)
        elif match := INSTRUCTION.match(line):
            code.append((match[1], match[2]))
    before: list[list[int]] = [[] for _ in code]
    for place, (text, rest) in enumerate(code):
        bare = re.sub(r"^@!?U?P\d+ ", "", text)
        leaves = bare.startswith(("BRA", "BRX", "EXIT"))
        if leaves:
            for label in re.findall(r"\.L_x_\d+", text + rest):
                before[labels[label]].append(place)
        if (not leaves or bare != text) and place + 1 < len(code):
            before[place + 1].append(place)
    return [text for text, _ in code], before, next(i for i, (text, _) in enumerate(code) if text.startswith("BRX"))


def never_made(code: list[str], before: list[list[int]], roles: int) -> list[str]:
    """Products with a descriptor that some way from the beginning of their role does not make."""
    writers: dict[int, set[int]] = {}
    for place, text in enumerate(code):
        if match := WRITTEN.match(text):
            wide = ".64" in match[2] or "WIDE" in match[2]
            for register in range(int(match[3]), int(match[3]) + 1 + wide):
                writers.setdefault(register, set()).add(place)
    lost = []
    for place, text in enumerate(code):
        if (match := re.search(r"gdesc\[UR(\d+)\]", text)) and text.startswith("HGMMA"):
            first = int(match[1]) + (2 if re.match(r"HGMMA\S* R\d+, R\d+, gdesc", text) else 0)
            for register in range(first, int(match[1]) + 4):
                seen, ways = set(), list(before[place])
                while ways:
                    way = ways.pop()
                    if way not in seen and way not in writers.get(register, ()):
                        seen.add(way)
                        ways += before[way] if way != roles else []  # what was written before is not the role's own
                if roles in seen or 0 in seen:
                    lost.append(f"{text}: UR{register}")
    return lost


@pytest.mark.parametrize(
    ("head_dim", "changes"),
    rarely(
        [
            *itertools.product(
                (128, 80, 192),
                ({"softmax": "online", "overlap": 0, "ping_pong": "none"}, {"softmax": "vote"}),
            ),
            *itertools.product((128, 72, 80, 96, 160, 192), ({"softmax": "first_max"},)),
        ],
        lambda case: case == (128, {"softmax": "online", "overlap": 0, "ping_pong": "none"}),
    ),
)
def test_whole_blocks_find_the_queries_in_a_tile_without_partial_ones(
    head_dim: int, changes: dict[str, Value], tmp_path: Path
) -> None:
    """ptxas took their descriptor from the loop over partial blocks, even where that does not run (Triton 3.6)."""
    compiled = build(source("blocks:128x128,0.5", head_dim, **changes), 90)
    code, before, roles = listing(compiled.asm["cubin"], tmp_path)
    assert sum(text.startswith("HGMMA") for text in code) >= 32
    assert never_made(code, before, roles) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("head_dim", "most"), [(80, 16), (96, 16), (128, 16), (192, 24)])
def test_a_table_costs_the_loop_over_whole_blocks_little(head_dim: int, most: int) -> None:
    """Wide heads in pieces have more descriptors than registers of their kind: moves bring some of them."""
    masks = ("full", "blocks:128x128,0.5")
    dense, listed = (inspect(source(mask, head_dim, softmax="first_max"), 90).loop for mask in masks)
    # With Triton 3.9 each product's descriptor costs two moves, which ptxas shares in the dense loop alone.
    instructions = [sum(count for name, count in loop.items() if name != "UMOV") for loop in (listed, dense)]
    assert abs(instructions[0] - instructions[1]) < most
    assert "LDG" not in "".join(listed)
