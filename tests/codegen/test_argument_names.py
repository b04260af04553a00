"""The list of axes: what signatures, parameters and launches call the strides of a tensor."""

from __future__ import annotations

import pytest

from autoattn.codegen import argument_names


@pytest.mark.parametrize("tensor", argument_names.AXES)
def test_every_axis_has_a_stride_of_its_own(tensor: str) -> None:
    names = argument_names.strides(tensor)
    assert len(set(names)) == len(argument_names.AXES[tensor])
    assert all(name.startswith(f"stride_{tensor}") for name in names)


def test_no_two_tensors_share_the_name_of_a_stride() -> None:
    names = [name for tensor in argument_names.AXES for name in argument_names.strides(tensor)]
    assert len(set(names)) == len(names)


def test_a_kernel_takes_no_stride_of_the_head_dim_where_rows_are_contiguous() -> None:
    names = [name for name, _ in argument_names.typed_strides("q", offset="i32", strided=False)]
    assert names == ["stride_qb", "stride_qh", "stride_qs"]
    every = [name for name, _ in argument_names.typed_strides("q", offset="i32", strided=True)]
    assert tuple(every) == argument_names.strides("q")


@pytest.mark.parametrize("offset", ["i32", "i64"])
def test_only_strides_inside_a_head_have_the_type_of_offsets(offset: str) -> None:
    kinds = dict(argument_names.typed_strides("k", offset=offset, strided=True))
    assert kinds == {"stride_kb": "i64", "stride_kh": "i64", "stride_ks": offset, "stride_kd": offset}
    assert dict(argument_names.typed_strides("b", offset=offset, strided=True)).keys() == {
        "stride_bb", "stride_bh", "stride_bs", "stride_bn",
    }  # fmt: skip
    assert {kind for _, kind in argument_names.typed_strides("b", offset=offset, strided=True)} == {"i64"}
    assert {kind for _, kind in argument_names.typed_strides("t", offset=offset, strided=True)} == {"i32"}
