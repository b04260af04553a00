"""What the Gluon template makes of its rarer choices; no GPU is needed."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import gluon_kernels
import numpy as np
import pytest
from gluon_kernels import H200, TEMPLATE, feasible, variant
from rarely import rarely

from autoattn.codegen import render, search_space
from autoattn.core.problem import Problem
from autoattn.core.variant import Source, Value
from autoattn.kernels.compiler import build, inspect, load_module

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.sampled]


def problem(**changes: Any) -> Problem:
    return gluon_kernels.problem(**{"head_dim": 128, **changes})


def source(problem: Problem, **changes: Value) -> Source:
    return render.render(problem, feasible(problem, **changes))


# --- choices that came later ------------------------------------------------------------------------------------------


def test_a_choice_that_came_later_leaves_the_text_alone_where_it_is_not_made() -> None:
    """So that what was tuned before stays valid."""
    call = problem()
    old = feasible(call)
    text = render.render(call, old).text
    assert "CTAS" not in text
    assert "software" not in text
    assert (
        render.render(call, search_space.load(TEMPLATE).variant({**old.as_dict(), "CTAS": 1, "software_exp2": 0})).text
        == text
    )


# --- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "window:600,64"])
def test_turns_by_mbarriers_wait_for_the_parity_of_the_block(mask: str) -> None:
    """Each consumer takes one turn for each block of keys, so that the ring's place says which one it is."""
    rendered = source(problem(mask=mask), ping_pong="mbarrier", overlap=1, mask_loop="split", BLOCK_M=128, BLOCK_N=64)
    module = load_module(rendered)
    stages = module.STAGES.value
    for count in range(4 * stages):
        slot, phase = count % stages, count // stages % 2
        assert (phase * stages + slot) & 1 == count & 1
    for part in rendered.text.split("@gluon.jit"):
        body = part.split('"""')[-1]
        if "def step" in part or "def attend(" in part:
            assert body.count("take_turn(c, turns, slot, phase)") == body.count("pass_turn(c, turns)") == 1
            assert body.index("take_turn") < body.index("multiply_keys(") < body.index("advance(slot, phase)")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", rarely(["full", "window:600,64"], lambda mask: mask == "full"))
def test_turns_by_mbarriers_serialise_no_product(mask: str) -> None:
    call = problem(head_dim=64, mask=mask)
    chosen: dict[str, Value] = {"overlap": 1, "mask_loop": "split", "BLOCK_M": 128, "BLOCK_N": 64}
    assert inspect(source(call, ping_pong="mbarrier", **chosen), 90).loop


# --- powers of two ----------------------------------------------------------------------------------------------------


def run(asm: str, numbers: list[float]) -> list[float]:
    """What a few lines of PTX make of four numbers, in float32."""
    registers: dict[str, Any] = {f"${4 + i}": np.float32(number) for i, number in enumerate(numbers)}

    def read(name: str) -> Any:
        return np.uint32(int(name[2:], 16)).view(np.float32) if name.startswith("0f") else registers[name]

    acts: dict[str, Any] = {
        "mov.f32": lambda x: x,
        "ex2.approx.ftz.f32": lambda x: np.float32(2.0) ** x,
        "max.NaN.f32": np.maximum,
        "min.NaN.f32": np.minimum,
        "add.rn.f32": np.add,
        "sub.rn.f32": np.subtract,
        "mul.rn.f32": np.multiply,
        "fma.rn.f32": lambda x, y, z: np.float32(np.float64(x) * np.float64(y) + np.float64(z)),
    }
    for line in asm.strip("{} ").split(";"):
        words = line.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        act, target, *names = words
        if act == "mov.b32" and target == "bits":
            registers[target] = np.float32(read(names[0])).view(np.uint32)
        elif act == "mov.b32":
            registers[target] = registers[names[0]].view(np.float32)
        elif act == "shl.b32":
            registers[target] = np.uint32((int(registers[names[0]]) << int(names[1])) & 0xFFFFFFFF)
        else:
            registers[target] = np.float32(acts[act](*map(read, names)))
    return [float(registers[f"${i}"]) for i in range(4)]


@pytest.mark.parametrize(("every", "places"), [(4, {1}), (2, {1, 3})])
@pytest.mark.parametrize("name", ["POWERS", "POWERS_AROUND"])
def test_software_powers_are_nearer_than_16_bits_can_tell(every: int, places: set[int], name: str) -> None:
    asm = getattr(load_module(source(problem(), softmax="first_max", software_exp2=every)), name).value
    assert asm.count("ex2.approx") == 4 - len(places)
    place = min(places)

    def power(number: float) -> float:
        return run(asm, [number if i == place else 0.0 for i in range(4)])[place]

    with np.errstate(all="ignore"):
        for number in np.linspace(-126.0, 0.0, 2003):
            assert power(number) == pytest.approx(2.0**number, rel=1e-4)
        assert power(0.0) == pytest.approx(1.0, rel=1e-4)
        assert power(8.0) == pytest.approx(256.0, rel=1e-4)
        assert power(-127.0) == power(-3e38) == power(-math.inf) == 0.0
        assert math.isnan(power(math.nan))
        if name == "POWERS_AROUND":  # the tile is computed again, so these must be too large for a sum, and no less
            for number in (61.0, 127.4, 128.0, 1e4, 3e38, math.inf):
                assert power(number) >= 2.0**60


@pytest.mark.exhaustive
def test_software_powers_take_work_off_the_exp_unit() -> None:
    call = problem(head_dim=64)
    chosen: dict[str, Value] = {"softmax": "first_max", "BLOCK_M": 128, "BLOCK_N": 64}
    counts = [inspect(source(call, software_exp2=every, **chosen), 90).loop["MUFU.EX2"] for every in (0, 4, 2)]
    assert counts == [32, 24, 16]


def test_the_polynomials_numbers_are_floats() -> None:
    asm = load_module(source(problem(), software_exp2=4)).POWERS.value
    numbers = [struct.unpack(">f", bytes.fromhex(word))[0] for word in re.findall(r"0f([0-9A-F]{8})", asm)]
    assert numbers[:2] == [-127.0, 1.5 * 2**23 + 127]


# --- programs that share an SM ----------------------------------------------------------------------------------------

SMALL: dict[str, Value] = {
    "BLOCK_M": 128, "BLOCK_N": 64, "overlap": 0, "num_stages": 2, "query_stages": 1, "softmax": "lazy", "CTAS": 2,
    "ping_pong": "none",
}  # fmt: skip


def test_two_programs_an_sm_halve_its_registers_and_its_memory() -> None:
    rendered = source(problem(head_dim=64), **SMALL)
    module = load_module(rendered)
    assert module.OPTIONS == {"num_warps": 4, "maxnreg": 80}  # 3 warpgroups of 128 threads: 240 registers of 256
    assert "[104, 24]" in rendered.text
    assert module.grid(4, 32, 4096, 132) == (264,)
    assert module.grid(1, 1, 4096, 132) == (32,)
    compiled = build(rendered, 90)
    assert 2 * (compiled.metadata.shared + 1024) <= H200.shared_bytes_per_sm
    assert ".maxnreg 80" in compiled.asm["ptx"]
    assert inspect(rendered, 90).spilled_bytes == 0


@pytest.mark.parametrize(
    ("facts", "params", "words"),
    [
        ({"head_dim": 64}, {"BLOCK_M": 192, "BLOCK_N": 128}, "registers"),
        ({"head_dim": 128}, {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3}, "share an SM also share its memory"),
        ({"head_dim": 64, "batch": 1, "heads_q": 8, "heads_kv": 8}, {}, "more tiles than there are SMs"),
    ],
)
def test_what_two_programs_have_no_room_for_is_refused(
    facts: dict[str, Any], params: dict[str, Value], words: str
) -> None:
    call = problem(**facts)
    reason = search_space.load(TEMPLATE).why_infeasible(variant(call, **{**SMALL, **params}), call, H200)
    assert reason is not None
    assert words in reason
