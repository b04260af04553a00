"""The host side of the forward kernel: what tensors pose which problem, what their memory asks, what is launched."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import kernels
import pytest
import torch
from torch import Tensor

from autoattn.errors import ProblemError, TensorError
from autoattn.ops import forward
from autoattn.mask import Mask
from autoattn.problem import DType, Layout, Precision, Problem
from autoattn.variant import Traits

HALF = torch.float16


def zeros(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def far(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = HALF) -> Tensor:
    """A tensor with any strides and no memory behind it."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def posed(query: Any, key: Any, value: Any, layout: Layout = Layout.BHSD, **facts: Any) -> Problem:
    return forward.problem_of(query, key, value, mask=facts.pop("mask", Mask()), layout=layout, **facts)


# --- problems ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "query", "key"),
    [(Layout.BHSD, (2, 6, 5, 24), (2, 3, 7, 24)), (Layout.BSHD, (2, 5, 6, 24), (2, 7, 3, 24))],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tensors_pose_the_problem_of_their_shapes(
    dtype: torch.dtype, layout: Layout, query: tuple[int, ...], key: tuple[int, ...]
) -> None:
    one = posed(zeros(*query, dtype=dtype), zeros(*key, dtype=dtype), zeros(*key, dtype=dtype), layout)
    assert one == Problem(
        dtype=DType(str(dtype).removeprefix("torch.")), batch=2, heads_q=6, heads_kv=3, seq_q=5, seq_kv=7, head_dim=24,
        layout=layout,
    )  # fmt: skip


def test_the_mask_is_the_callers() -> None:
    mask = Mask.parse("causal:top-left")
    assert posed(zeros(1, 1, 2, 8), zeros(1, 1, 3, 8), zeros(1, 1, 3, 8), mask=mask).mask == mask


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, Precision.TF32), (torch.bfloat16, Precision.IEEE)])
def test_tf32_speaks_of_float32_alone(dtype: torch.dtype, kept: Precision) -> None:
    tensors = [zeros(1, 1, 2, 8, dtype=dtype)] * 3
    assert posed(*tensors, precision=Precision.TF32).precision is kept


GOOD = zeros(2, 6, 5, 8)
WRONG: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "no tensor": ((GOOD, [1.0], GOOD), "key must be a torch.Tensor, got list; convert it first"),
    "nothing": ((None, GOOD, GOOD), "query must be a torch.Tensor, got NoneType; convert it first"),
    "three axes": (
        (GOOD, GOOD, zeros(6, 5, 8)),
        "value must be [batch, heads, seq, head_dim], got shape (6, 5, 8); add or merge axes",
    ),
    "float64": (
        (GOOD.double(), GOOD.double(), GOOD.double()),
        "query must be float16, bfloat16 or float32, got torch.float64; cast it with .to()",
    ),
    "integers": (
        (GOOD, GOOD.int(), GOOD),
        "key must be float16, bfloat16 or float32, got torch.int32; cast it with .to()",
    ),
    "two dtypes": (
        (GOOD, GOOD, GOOD.bfloat16()),
        "value must have the query's dtype torch.float16, got torch.bfloat16; cast one of them",
    ),
    "two devices": (
        (GOOD, GOOD.to("meta"), GOOD),
        "key must be on the query's device cpu, got meta; move it",
    ),
    "two batches": (
        (GOOD, zeros(3, 6, 5, 8), zeros(3, 6, 5, 8)),
        "key must be [batch, heads, seq, head_dim] with the query's batch 2 and head_dim 8, got shape (3, 6, 5, 8); "
        "check the axes and the layout",
    ),
    "two head dims": (
        (GOOD, GOOD, zeros(2, 6, 5, 16)),
        "value must be [batch, heads, seq, head_dim] with the query's batch 2 and head_dim 8, got shape (2, 6, 5, 16); "
        "check the axes and the layout",
    ),
    "two lengths": (
        (GOOD, GOOD, zeros(2, 6, 4, 8)),
        "key and value must have one shape, got (2, 6, 5, 8) and (2, 6, 4, 8); check the axes",
    ),
    "no keys": (
        (GOOD, zeros(2, 6, 0, 8), zeros(2, 6, 0, 8)),
        "query and key must not be empty, got shapes (2, 6, 5, 8) and (2, 6, 0, 8); skip the call",
    ),
    "no queries": (
        (zeros(2, 6, 0, 8), GOOD, GOOD),
        "query and key must not be empty, got shapes (2, 6, 0, 8) and (2, 6, 5, 8); skip the call",
    ),
    "heads that do not divide": (
        (GOOD, zeros(2, 4, 5, 8), zeros(2, 4, 5, 8)),
        "query heads must be a multiple of key heads, got 6 and 4; check the layout or repeat the key heads",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_make_no_call_are_refused_in_one_sentence(name: str) -> None:
    tensors, sentence = WRONG[name]
    with pytest.raises(TensorError) as caught:
        posed(*tensors)
    assert str(caught.value) == sentence


def test_a_sentence_names_the_axes_of_the_callers_layout() -> None:
    with pytest.raises(TensorError, match=r"key must be \[batch, seq, heads, head_dim\] with"):
        posed(zeros(2, 5, 6, 8), zeros(3, 5, 6, 8), zeros(3, 5, 6, 8), Layout.BSHD)
    with pytest.raises(TensorError, match="multiple of key heads, got 5 and 6"):
        posed(zeros(2, 6, 5, 8), zeros(2, 5, 6, 8), zeros(2, 5, 6, 8), Layout.BSHD)


def test_a_head_dim_above_256_is_refused() -> None:
    with pytest.raises(ProblemError, match="head_dim must be at most 256, got 257"):
        posed(*[zeros(1, 1, 2, 257)] * 3)


# --- traits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "head_dim", "alignment"),
    [
        (torch.float16, 64, 8), (torch.float16, 8, 8), (torch.float16, 20, 4), (torch.float16, 6, 2),
        (torch.float16, 57, 1), (torch.float32, 64, 4), (torch.float32, 58, 2), (torch.float32, 57, 1),
    ],
)  # fmt: skip
def test_contiguous_tensors_are_as_aligned_as_a_row(dtype: torch.dtype, head_dim: int, alignment: int) -> None:
    tensor = zeros(2, 3, 4, head_dim, dtype=dtype)
    assert forward.traits_of(tensor, tensor, tensor) == Traits(alignment=alignment)


def room(*shape: int) -> Tensor:
    return zeros(*shape)


@pytest.mark.parametrize(
    ("tensor", "alignment"),
    [
        (room(2, 4, 3, 64).transpose(1, 2), 8),
        (room(2, 3, 64, 4).transpose(2, 3), 1),  # the head dim is not the last axis in memory
        (room(2, 3, 4, 128)[..., ::2], 1),
        (room(2, 3, 4, 68)[..., :64], 4),
        (room(2, 3, 4, 65)[..., :64], 1),
        (room(2, 3, 4, 72)[..., 8:], 8),  # starts 8 elements into its storage
        (room(2, 3, 4, 72)[..., 2:66], 2),
        (room(2, 3, 4, 72)[..., 1:65], 1),
        (room(1, 1, 4, 64).expand(5, 6, 4, 64), 8),  # strides of 0
        (room(2, 3, 1, 64).expand(2, 3, 9, 64), 8),
        (room(12, 64).as_strided((2, 3, 2, 64), (260, 68, 64, 1)), 4),  # only a step between heads is odd
        (room(12, 64).as_strided((2, 3, 2, 64), (262, 64, 64, 1)), 2),  # only a step between sequences is
    ],
    ids=str,
)
def test_alignment_is_what_divides_every_step_and_the_start(tensor: Tensor, alignment: int) -> None:
    aligned = zeros(2, 3, 4, 64)
    assert aligned.data_ptr() % 16 == 0
    assert forward.traits_of(tensor).alignment == alignment
    assert forward.traits_of(aligned, tensor, aligned).alignment == alignment, "the worst tensor decides"


@pytest.mark.parametrize(
    ("shape", "stride", "wide"),
    [
        ((1, 1, 4096, 128), (0, 0, 128, 1), False),
        ((1, 1, 2**24 + 512, 128), (0, 0, 128, 1), True),
        ((4, 8, 64, 64), (2**40, 2**35, 64, 1), False),  # batch and heads are counted in 64 bits anyway
        ((1, 1, 8, 64), (0, 0, 2**29, 1), True),
        ((1, 1, 2, 64), (0, 0, 1, 2**26), True),
        ((1, 1, 2, 64), (0, 0, 1, 2**20), False),
        ((1, 1, 1, 64), (0, 0, 2**40, 1), True),  # a stride that is never walked must still fit its type
        ((1, 1, 2, 1), (0, 0, 1, 2**31), True),
    ],
    ids=str,
)
def test_offsets_are_wide_when_32_bits_cannot_count_them(
    shape: tuple[int, ...], stride: tuple[int, ...], wide: bool
) -> None:
    tensor = far(shape, stride)
    assert forward.traits_of(tensor).wide is wide
    assert forward.traits_of(zeros(2, 3, 4, 64), tensor).wide is wide


def test_wanting_the_lse_is_a_trait() -> None:
    tensor = zeros(2, 3, 4, 64)
    assert forward.traits_of(tensor, lse=True) == Traits(lse=True)


def test_a_tensor_that_starts_inside_an_element_is_refused() -> None:
    storage = torch.zeros(2 * 64 + 1, dtype=torch.int8)
    torn = torch.frombuffer(bytearray(storage.numpy().tobytes()), dtype=HALF, count=64, offset=1).reshape(1, 1, 1, 64)
    assert torn.data_ptr() % 2 == 1
    with pytest.raises(TensorError, match="multiple of their element size, 2 bytes; clone them"):
        forward.traits_of(torn)


# --- launch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(Layout))
def test_the_output_is_contiguous_in_the_callers_layout(layout: Layout) -> None:
    query = zeros(2, 6, 5, 24).transpose(2, 3).contiguous().transpose(2, 3)
    output = forward.empty_output(query, layout)
    assert (output.shape, output.dtype) == (query.shape, query.dtype)
    assert (output if layout is Layout.BHSD else output.transpose(1, 2)).is_contiguous()


def test_a_launch_passes_sizes_strides_and_the_scale_by_name() -> None:
    launched: dict[str, Any] = {}

    def launch(grid: tuple[int], arguments: dict[str, Any]) -> None:
        launched.update(arguments, grid=grid)

    kernel: Any = SimpleNamespace(
        launch=launch, sm_count=7, module=SimpleNamespace(grid=lambda *sizes: ("grid", *sizes))
    )
    query, key, value = zeros(2, 6, 5, 24), zeros(2, 3, 70, 24).transpose(2, 3).contiguous().mT, zeros(2, 3, 7, 24)
    key = key[:, :, ::10]
    output, lse = zeros(2, 6, 8, 24)[:, :, :5], torch.zeros(2, 6, 5)
    forward.launch(kernel, query, key, value, output, lse, 0.25)
    assert launched.pop("grid") == ("grid", 12, 5, 7)
    pointers = ("query_ptr", "key_ptr", "value_ptr", "output_ptr", "lse_ptr")
    assert [
        launched.pop(name) is tensor for name, tensor in zip(pointers, (query, key, value, output, lse), strict=True)
    ]
    assert launched.pop("scale_log2") == pytest.approx(0.25 * math.log2(math.e))
    sizes = {"batch_heads": 12, "heads_q": 6, "group_size": 2, "seq_q": 5, "seq_kv": 7}
    assert {name: launched.pop(name) for name in sizes} == sizes
    strides = {"q": (720, 120, 24, 1), "k": (5040, 1680, 10, 70), "v": (504, 168, 24, 1), "o": (1152, 192, 24, 1)}
    assert launched == {
        f"stride_{name}{axis}": step
        for name, steps in strides.items()
        for axis, step in zip("bhsd", steps, strict=True)
    }


def test_a_launch_has_every_argument_that_a_signature_may_name() -> None:
    from autoattn.compile import load_module

    source = kernels.source(kernels.problem(), Traits(alignment=1, lse=True))
    launched: dict[str, Any] = {}
    kernel: Any = SimpleNamespace(
        launch=lambda grid, arguments: launched.update(arguments),
        sm_count=1,
        module=SimpleNamespace(grid=lambda *sizes: sizes),
    )
    tensor = zeros(1, 1, 4, 16)
    forward.launch(kernel, tensor, tensor, tensor, tensor, torch.zeros(1, 1, 4), 1.0)
    assert set(launched) == set(load_module(source).SIGNATURE)
