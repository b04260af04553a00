"""Numbers of the Gluon interpreter follow Triton's rules for types."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from autoattn.errors import SynchronizationError
from autoattn.kernels.gluon_interpreter.tensors import Product, Tensor, converted, extreme, row_max, to_tensor, where


def scalar(value: float, dtype: torch.dtype) -> Tensor:
    return Tensor(torch.tensor(value, dtype=dtype))


def test_a_scalar_is_as_wide_as_its_number_needs() -> None:
    assert to_tensor(7).dtype is torch.int32
    assert to_tensor(2**40).dtype is torch.int64
    assert to_tensor(0.5).dtype is torch.float32
    assert to_tensor(True).dtype is torch.bool


@pytest.mark.parametrize(("left", "right"), [(7, 2), (-7, 2), (7, -2), (-7, -2)])
def test_whole_numbers_are_divided_toward_zero(left: int, right: int) -> None:
    quotient = scalar(left, torch.int32) // right
    assert int(quotient) == math.trunc(left / right)
    assert int(scalar(left, torch.int32) % right) == left - int(quotient) * right


def test_a_wide_scalar_widens_a_block() -> None:
    rows = Tensor(torch.arange(4, dtype=torch.int32))
    assert (rows + scalar(1, torch.int64)).dtype is torch.int64
    assert (rows + 1).dtype is torch.int32
    halves: Any = rows * 0.5
    assert halves.dtype is torch.float32
    mixed: Any = Tensor(torch.ones(2, dtype=torch.bfloat16)) * scalar(2, torch.float32)
    assert mixed.dtype is torch.float32


def test_numbers_of_32_bits_wrap_around() -> None:
    assert int(scalar(2**31 - 1, torch.int32) + 1) == -(2**31)


def test_a_pointer_steps_by_elements() -> None:
    pointer = Tensor(torch.tensor(1000, dtype=torch.int64), torch.float32)
    assert int((pointer + 3)._data) == 1012
    assert int((scalar(3, torch.int32) + pointer)._data) == 1012


def test_the_larger_of_a_number_and_nan_is_the_number() -> None:
    nan = scalar(math.nan, torch.float32)
    assert float(extreme(nan, 1.0, largest=True).data) == 1.0
    rows = torch.tensor([[math.nan, 2.0], [math.nan, math.nan]])
    assert row_max(Tensor(rows), 1).data.isnan().tolist() == [False, True]


def test_float8_saturates_and_keeps_nan() -> None:
    numbers = converted(torch.tensor([1000.0, -1000.0, math.nan]), torch.float8_e4m3fn).float()
    assert numbers[:2].tolist() == [448.0, -448.0]
    assert bool(numbers[2].isnan())


def test_where_takes_numbers_of_python() -> None:
    chosen = where(Tensor(torch.tensor([True, False])), 1, 0)
    assert chosen.dtype is torch.int32
    assert where(Tensor(torch.tensor([True, False])), 1, -math.inf).data.tolist() == [1.0, -math.inf]


def test_a_product_is_used_once_somebody_waited_and_nobody_spoilt_it() -> None:
    product = Product(event=2, words="the product")
    result = Tensor(torch.ones(2), product=product)
    with pytest.raises(SynchronizationError, match="the result of the product is used before anybody waits for it"):
        result + 1.0
    product.done, product.fault = True, "spoilt"
    with pytest.raises(SynchronizationError, match="spoilt"):
        result + 1.0
