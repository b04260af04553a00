"""PTX in the Gluon interpreter: what a text computes on all lanes."""

from __future__ import annotations

import math

import pytest
import torch

from autoattn.errors import InterpretationError
from autoattn.kernels.gluon_interpreter import scheduler
from autoattn.kernels.gluon_interpreter.global_memory import GlobalMemory
from autoattn.kernels.gluon_interpreter.inline_assembly import inline_asm_elementwise
from autoattn.kernels.gluon_interpreter.scheduler import Partition, Program
from autoattn.kernels.gluon_interpreter.tensors import Tensor


def run(
    asm: str, constraints: str, *args: torch.Tensor, dtype: torch.dtype = torch.float32, pack: int = 1
) -> torch.Tensor:
    program = Program(
        number=0, count=1, memory=GlobalMemory({f"{place}": arg for place, arg in enumerate(args)}), seed=0
    )
    with scheduler.acting_as(Partition(name="kernel", warps=4, program=program)):
        return inline_asm_elementwise(asm, constraints, [Tensor(arg) for arg in args], dtype, True, pack).data


def test_a_text_has_as_many_elements_as_it_packs() -> None:
    numbers = torch.arange(8.0).reshape(2, 4)
    swapped = run("mov.f32 $0, $3; mov.f32 $1, $2;", "=f,=f,f,f", numbers, pack=2)
    assert swapped.tolist() == [[1.0, 0.0, 3.0, 2.0], [5.0, 4.0, 7.0, 6.0]]


def test_the_elements_of_a_thread_of_a_product_are_of_two_rows() -> None:
    rows = torch.arange(64.0)[:, None].expand(64, 16).contiguous()
    # Registers 0 and 1 lie in one row, 2 and 3 eight rows below (PTX ISA, fragments of wgmma's D).
    text = "sub.rn.f32 $0, $10, $8; " + " ".join(f"mov.f32 ${place}, 0f00000000;" for place in range(1, 8))
    difference = run(text, ",".join(["=f"] * 8 + ["f"] * 8), rows, pack=8)
    assert difference[0, 0] == 8.0
    assert int((difference != 0.0).sum()) == 128  # the first register of each thread


def test_packed_pairs_are_rounded_to_nearest_even() -> None:
    low, high = torch.tensor([1.0 + 2.0**-9, 3.0]), torch.tensor([1.0 + 3 * 2.0**-9, -2.0])
    words = run("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", low, high, dtype=torch.int32)
    pairs = words.view(torch.bfloat16).reshape(2, 2).float()
    assert torch.equal(pairs[:, 0], low.bfloat16().float())
    assert torch.equal(pairs[:, 1], high.bfloat16().float())


def test_lanes_that_branch_ahead_skip_what_lies_between() -> None:
    text = (
        "{ .reg .pred large; mov.f32 $0, $1; setp.gt.f32 large, $1, 0f40000000; @large bra done; "
        "mul.rn.f32 $0, $1, 0f41200000; done: add.rn.f32 $0, $0, 0f3F800000; }"
    )
    assert run(text, "=f,f", torch.tensor([1.0, 3.0])).tolist() == [11.0, 4.0]


def test_a_vote_is_of_a_warp() -> None:
    text = (
        "{ .reg .pred mine, any; setp.gt.f32 mine, $1, 0f00000000; vote.sync.any.pred any, mine, 0xffffffff; "
        "mov.f32 $0, 0f00000000; @!any bra done; mov.f32 $0, 0f3F800000; done: }"
    )
    numbers = torch.zeros(128)
    numbers[40] = 1.0
    votes = run(text, "=f,f", numbers)
    assert votes.reshape(4, 32).sum(1).tolist() == [0.0, 32.0, 0.0, 0.0]


def test_nan_and_large_numbers_pass_the_maximum() -> None:
    numbers = torch.tensor([math.nan, -5.0, 5.0])
    assert run("max.NaN.f32 $0, $1, 0f00000000;", "=f,f", numbers)[0].isnan()
    assert run("max.NaN.f32 $0, $1, 0f00000000;", "=f,f", numbers)[1:].tolist() == [0.0, 5.0]


def test_threads_add_to_memory_side_by_side() -> None:
    memory = torch.zeros(512)
    address = torch.tensor(memory.data_ptr(), dtype=torch.int64)
    text = (
        "{ .reg .u32 thread; .reg .u64 place; mov.u32 thread, %tid.x; mad.wide.u32 place, thread, 16, $1; "
        "red.relaxed.gpu.global.add.v4.f32 [place+0], {$2, $2, $2, $2}; mov.u32 $0, 0; }"
    )
    program = Program(number=0, count=1, memory=GlobalMemory({"memory": memory}), seed=0)
    with scheduler.acting_as(Partition(name="kernel", warps=4, program=program)):
        args = [Tensor(address), Tensor(torch.tensor(2.0))]
        inline_asm_elementwise(text, "=r,l,f", args, torch.int32, False, 1)
    assert bool((memory == 2.0).all())


def test_the_approximate_tangent_errs_by_what_ptx_allows() -> None:
    numbers = torch.linspace(-6.0, 6.0, 4096)
    exact = torch.tanh(numbers.double())
    error = (run("tanh.approx.f32 $0, $1;", "=f,f", numbers).double() / exact - 1).abs().max()
    assert 2.0**-12 < float(error) <= 1.001 * 2.0**-11


@pytest.mark.parametrize("asm", ["lop3.b32 $0, $1, $1;", "mov.f32 $0, nothing;", "@p mov.f32 $0, $1;"])
def test_an_unknown_instruction_is_said(asm: str) -> None:
    with pytest.raises(InterpretationError, match="inline assembly"):
        run(asm, "=f,f", torch.ones(2))
