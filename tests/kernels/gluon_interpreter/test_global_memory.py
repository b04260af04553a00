"""Global memory of the Gluon interpreter: loads, stores and sums at addresses."""

from __future__ import annotations

import pytest
import torch

from autoattn.errors import SynchronizationError
from autoattn.kernels import backward
from autoattn.kernels.gluon_interpreter.global_memory import GlobalMemory
from autoattn.kernels.gluon_interpreter.tensors import Tensor
from autoattn.tensors.operands import View

NUMBERS = torch.arange(16, dtype=torch.int32)


def at(tensor: torch.Tensor, places: list[int]) -> Tensor:
    return Tensor(tensor.data_ptr() + torch.tensor(places) * tensor.itemsize, tensor.dtype)


def test_a_mask_leaves_out_addresses_that_are_no_memory() -> None:
    memory = GlobalMemory({"numbers": NUMBERS[4:8]})
    inside = Tensor(torch.tensor([True, False]))
    assert memory.load(at(NUMBERS, [5, 99999]), inside, 7).data.tolist() == [5, 7]
    with pytest.raises(SynchronizationError, match="it reads memory that no tensor of the launch holds"):
        memory.load(at(NUMBERS, [5, 99999]), None, None)


def test_sums_count_each_address_as_often_as_it_is_named() -> None:
    numbers = torch.zeros(4)
    memory = GlobalMemory({"numbers": numbers})
    before = memory.add(at(numbers, [1, 1, 2]), Tensor(torch.tensor([1.0, 2.0, 5.0])))
    assert before.data.tolist() == [0.0] * 3
    assert numbers.tolist() == [0.0, 3.0, 5.0, 0.0]


def test_a_store_converts_to_the_type_of_the_memory() -> None:
    numbers = torch.zeros(2, dtype=torch.float8_e4m3fn)
    GlobalMemory({"numbers": numbers}).store(at(numbers, [1]), Tensor(torch.tensor([3.0])), None)
    assert numbers.float().tolist() == [0.0, 3.0]


def test_an_address_must_be_a_multiple_of_the_element() -> None:
    memory = GlobalMemory({"numbers": NUMBERS})
    with pytest.raises(SynchronizationError, match="no multiple of 4 bytes"):
        memory.load(Tensor(torch.tensor([NUMBERS.data_ptr() + 2]), torch.int32), None, None)


def test_a_box_whose_steps_pass_the_end_of_the_addresses_is_read_and_written_where_they_come_back() -> None:
    numbers = torch.arange(24, dtype=torch.int32).reshape(6, 4)
    view = View((1, 1, 6, 4), (24, 4, 4, 1))
    shape, strides = backward.ragged_view(view)
    box = GlobalMemory({"numbers": numbers}).box(numbers.data_ptr(), shape, strides, torch.int32)
    end, rows = 5, 3  # a sequence of three rows before row 5
    begins, sizes = (backward.EDGE, end, 0, backward.EDGE - rows, 0), (1, 1, 1, rows, 4)
    part = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
    assert torch.equal(box[part].reshape(3, 4), numbers[2:5])
    box[part] = torch.zeros(1, 1, 1, 3, 4, dtype=torch.int32)
    assert numbers.any(1).tolist() == [True, True, False, False, False, True]
    before = (slice(0, 1), slice(0, 1), slice(0, 1), slice(0, backward.EDGE), slice(0, 4))
    with pytest.raises(SynchronizationError, match="memory that no tensor of the launch holds"):
        box[before]
