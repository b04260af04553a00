"""The host side of the forward kernel: what memory asks of its code, and what it is launched with."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import kernels
import pytest
import torch
from torch import Tensor

from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Problem
from autoattn.core.variant import Traits
from autoattn.errors import TensorError
from autoattn.kernels import forward, manifest
from autoattn.kernels.compiler import load_module
from autoattn.reference import inputs
from autoattn.tensors.operands import Operands, View

HALF = torch.float16


def zeros(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def far(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = HALF) -> Tensor:
    """A tensor with any strides and no memory behind it."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


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


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bool, "u8"), (torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")]
)
def test_what_a_bias_holds_is_a_trait(dtype: torch.dtype, name: str) -> None:
    assert forward.traits_of(zeros(2, 3, 4, 64), bias=zeros(1, 1, 4, 5, dtype=dtype)) == Traits(
        bias=name, bias_alignment=1
    )


@pytest.mark.parametrize(
    ("dtype", "view", "alignment"),
    [
        (torch.float16, lambda full: full[..., :40], 8),
        (torch.float16, lambda full: full[:, :, :1, :40].expand(2, 3, 4, 40), 8),  # queries share it
        (torch.float16, lambda full: full[..., :44], 1),  # a load of 8 keys would pass the last one
        (torch.float16, lambda full: full[..., 1:41], 1),  # begins between two such loads
        (torch.float16, lambda full: full[..., ::2], 0),
        (torch.float16, lambda full: full[..., :1].expand(2, 3, 4, 40), 0),  # keys share it
        (torch.float32, lambda full: full[..., :44], 4),
        (torch.bool, lambda full: full[..., :48], 16),
        (torch.bool, lambda full: full[:, :, :1, :48], 0),  # of keys alone, which each are loaded once
    ],
)
def test_how_wide_a_bias_may_be_loaded_is_a_trait(dtype: torch.dtype, view: Any, alignment: int) -> None:
    bias = view(zeros(2, 3, 4, 80, dtype=dtype))
    assert forward.traits_of(zeros(2, 3, 4, 64), bias=bias).bias_alignment == alignment


@pytest.mark.parametrize(
    ("shape", "shared"), [((2, 3, 4, 40), False), ((1, 3, 1, 40), True), ((1, 1, 1, 1), True), ((2, 3, 4, 1), False)]
)
def test_whether_queries_share_the_row_of_a_bias_is_a_trait(shape: tuple[int, ...], shared: bool) -> None:
    bias = zeros(*shape).expand(2, 3, 4, 40)
    assert forward.traits_of(zeros(2, 3, 4, 64), bias=bias).bias_shared is shared
    assert not forward.traits_of(zeros(2, 3, 1, 64), bias=zeros(2, 3, 1, 40)).bias_shared, "one query shares nothing"


def test_a_tensor_that_starts_inside_an_element_is_refused() -> None:
    storage = torch.zeros(2 * 64 + 1, dtype=torch.int8)
    torn = torch.frombuffer(bytearray(storage.numpy().tobytes()), dtype=HALF, count=64, offset=1).reshape(1, 1, 1, 64)
    assert torn.data_ptr() % 2 == 1
    with pytest.raises(TensorError, match="multiple of their element size, 2 bytes; clone them"):
        forward.traits_of(torn)


# --- launch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "strides"),
    [
        (zeros(2, 6, 5, 24), (1200, 200, 40, 1)),
        (zeros(2, 5, 6, 24).transpose(1, 2), (1200, 40, 240, 1)),  # as a projection leaves heads
        (zeros(2, 5, 6, 3, 24)[:, :, :, 1].transpose(1, 2), (1200, 40, 240, 1)),  # with keys and values beside them
        (zeros(2, 6, 9, 24)[:, :, :5], (1200, 200, 40, 1)),
        (zeros(2, 6, 5, 24).mT.contiguous().mT, (1200, 200, 40, 1)),
        (zeros(2, 1, 5, 24).expand(2, 6, 5, 24), (1200, 200, 40, 1)),
    ],
)
def test_the_output_lies_in_memory_as_the_query_without_gaps(query: Tensor, strides: tuple[int, ...]) -> None:
    problem = kernels.problem(heads_q=6, heads_kv=3, seq_q=5, seq_kv=7, head_dim=24, head_dim_v=40)
    output = forward.empty_output(problem, query)
    assert (output.shape, output.dtype, output.stride()) == ((2, 6, 5, 40), HALF, strides)


@pytest.mark.parametrize(("seq", "far"), [(2**31 // (64 * 512) - 256, True), (2**31 // (64 * 512) - 257, False)])
def test_an_output_of_wider_rows_than_the_query_may_reach_far_where_heads_lie_within_tokens(
    seq: int, far: bool
) -> None:
    query = torch.empty(1, seq, 64, 16, dtype=HALF, device="meta")
    assert forward.reaches_far(View.of(query.transpose(1, 2)), 512) is far
    assert not forward.reaches_far(View.of(query.transpose(1, 2).contiguous()), 512)


def test_the_output_has_the_values_head_dim_and_is_bfloat16_for_float8() -> None:
    problem = kernels.problem(dtype=DType.FLOAT8, head_dim=24, head_dim_v=40)
    output = forward.empty_output(problem, zeros(2, 4, 33, 24).to(torch.float8_e4m3fn))
    assert (output.shape, output.dtype) == ((2, 4, 33, 40), torch.bfloat16)


def launched_with(problem: Problem, operands: Operands, output: Tensor, lse: Tensor | None) -> dict[str, Any]:
    """The arguments and the grid of a launch."""
    seen: dict[str, Any] = {}

    def launch(grid: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        seen.update(arguments, grid=grid)

    module = SimpleNamespace(grid=lambda *sizes: ("grid", *sizes))
    kernel: Any = SimpleNamespace(launch=launch, sm_count=7, manifest=manifest.of(module), before=None, dealt={})
    forward.launch(kernel, problem, operands, output, lse)
    return seen


def test_a_launch_passes_sizes_strides_and_the_scale_by_name() -> None:
    problem = kernels.problem(heads_q=6, heads_kv=3, seq_q=5, seq_kv=7, head_dim=24, mask="window:3,2")
    query, key, value = zeros(2, 6, 5, 24), zeros(2, 3, 70, 24).mT.contiguous().mT[:, :, ::10], zeros(2, 3, 7, 24)
    output, lse = zeros(2, 6, 8, 24)[:, :, :5], torch.zeros(2, 6, 5)
    launched = launched_with(problem, Operands(query=query, key=key, value=value, scale=0.25), output, lse)
    pointers = {"query_ptr": query, "key_ptr": key, "value_ptr": value, "output_ptr": output, "lse_ptr": lse}
    for name, tensor in pointers.items():
        assert launched[name] is tensor
    assert launched["scale_log2"] == pytest.approx(0.25 * math.log2(math.e))
    sizes = {
        "grid": ("grid", 2, 6, 5, 7), "batch_heads": 12, "heads_q": 6, "group_size": 2, "seq_q": 5, "seq_kv": 7,
        "scale": 0.25, "window_left": 3, "window_right": 2,
    }  # fmt: skip
    assert {name: launched[name] for name in sizes} == sizes
    strides = {"q": (720, 120, 24, 1), "k": (5040, 1680, 10, 70), "v": (504, 168, 24, 1), "o": (1152, 192, 24, 1)}
    for name, steps in strides.items():
        assert tuple(launched[f"stride_{name}{axis}"] for axis in "bhsd") == steps


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": "window:3,2"},
    "causal and softcap": {"mask": "causal", "modifiers": Modifiers(softcap=True)},
    "alibi and sinks": {"modifiers": Modifiers(alibi=True, sinks=True)},
    "score_mod": {"modifiers": Modifiers(score_mod="captured0: float32[2]\nscore + captured0[h, kv_idx]")},
    "dropout": {"modifiers": Modifiers(dropout=True)},
    "keys": {"modifiers": Modifiers(bias=Bias.KEYS)},
    "pairs": {"modifiers": Modifiers(bias=Bias.BOOLEAN)},
    "bias": {"modifiers": Modifiers(bias=Bias.ADDITIVE)},
    "float8": {"dtype": DType.FLOAT8},
    "packed": {"layout": Layout.PACKED, "tokens_q": 40, "tokens_kv": 60},
    "table": {"mask": Mask.blocks(16, 16, 0.5, "q_idx >= kv_idx")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_has_every_argument_that_a_signature_names(kind: str) -> None:
    problem = kernels.problem(**KINDS[kind])
    operands = inputs.make(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    output = forward.empty_output(problem, operands.query)
    lse = torch.zeros(output.shape[:3])
    tensors = operands.query, operands.key, operands.value, output
    traits = replace(forward.traits_of(*tensors, lse=True, bias=operands.bias), alignment=1)
    source = kernels.source(problem, traits)
    launched = launched_with(problem, operands, output, lse)
    missing = [name for name in load_module(source).SIGNATURE if name not in launched or launched[name] is None]
    assert missing == []


def test_booleans_of_a_bias_travel_as_bytes() -> None:
    problem = kernels.problem(modifiers=Modifiers(bias=Bias.BOOLEAN))
    operands = inputs.make(problem, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert operands.bias is not None
    launched = launched_with(problem, operands, forward.empty_output(problem, operands.query), None)
    assert launched["bias_ptr"].dtype is torch.uint8
    assert launched["bias_ptr"].data_ptr() == operands.bias.data_ptr()
    assert tuple(launched[f"stride_b{axis}"] for axis in "bhsn") == operands.bias.stride()
