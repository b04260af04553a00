"""Global memory: the tensors of a launch, by address. An access outside of all of them is a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoattn.errors import SynchronizationError
from autoattn.kernels.gluon_interpreter.tensors import Tensor, converted

# In which bits are moved: not all of PyTorch's functions take float8.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_ADDRESSES = 2**48  # bytes that a GPU's addresses reach
_WRAP = 2**64  # bytes behind which the sums of steps begin again at 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrappingTensor:
    """A tensor whose steps pass the end of the addresses: not all of it is there, and its parts are looked up."""

    memory: GlobalMemory
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.address

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        """A view of a part of it, which must lie in one tensor of the launch."""
        shape = [each.stop - each.start for each in part]
        steps = sum(each.start * stride for each, stride in zip(part, self.strides, strict=True))
        strides = [stride if size > 1 else 0 for size, stride in zip(shape, self.strides, strict=True)]
        address = (self.address + steps * self.itemsize) % _WRAP
        view = self.memory.box(address, shape, strides, self.dtype)
        if isinstance(view, WrappingTensor):
            raise SynchronizationError(f"a box of {shape} elements passes the end of the addresses")
        return view

    def __setitem__(self, part: tuple[slice, ...], numbers: torch.Tensor) -> None:
        self[part].copy_(numbers)


class GlobalMemory:
    """The storages of the tensors that a launch was given."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self.writes = 0  # so far
        self._storages: list[tuple[str, int, torch.Tensor]] = []  # name of a tensor, address, bytes
        for name, tensor in arguments.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._storages.append((name, storage.data_ptr(), whole))

    def _holding(self, first: int, last: int, action: str) -> tuple[int, torch.Tensor]:
        """Address and bytes of the storage that holds these addresses."""
        for _, begin, whole in self._storages:
            if begin <= first and last < begin + whole.numel():
                return begin, whole
        near = [name for name, begin, whole in self._storages if begin <= first < begin + whole.numel()]
        beside = f"{last - first + 1} bytes from inside {near[0]} on" if near else f"the address {first:#x}"
        raise SynchronizationError(f"it {action} memory that no tensor of the launch holds: {beside}")

    def box(
        self, address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | WrappingTensor:
        """A strided view of a tensor that begins at an address."""
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype)
        reach = _reach(shape, strides)
        if reach * dtype.itemsize >= _ADDRESSES:
            return WrappingTensor(memory=self, address=address, shape=tuple(shape), strides=tuple(strides), dtype=dtype)
        begin, whole = self._holding(address, address + reach * dtype.itemsize - 1, "describes")
        return _typed(whole, dtype).as_strided(tuple(shape), tuple(strides), (address - begin) // dtype.itemsize)

    def load(self, pointer: Tensor, mask: Tensor | None, other: Any) -> Tensor:
        """The numbers at addresses; `other`, or nought, where `mask` is false."""
        assert pointer.element is not None
        addresses, dtype = pointer.data, pointer.element
        if mask is not None and not mask.data.dim() and bool(mask.data):
            mask = None
        if mask is None:
            elements, places = self._elements(addresses.reshape(-1), dtype, "reads")
            return Tensor(elements[places].reshape(addresses.shape))
        active, addresses = torch.broadcast_tensors(mask.data, addresses)
        result = torch.zeros(addresses.shape, dtype=dtype)
        if other is not None:
            result[...] = converted(other.data if isinstance(other, Tensor) else torch.tensor(other), dtype)
        if bool(active.any()):
            elements, places = self._elements(addresses[active], dtype, "reads")
            raw = _RAW[dtype.itemsize]
            result.view(raw)[active] = elements.view(raw)[places]
        return Tensor(result)

    def store(self, pointer: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Writes numbers to addresses where `mask` is true."""
        assert pointer.element is not None
        shapes = [pointer.data.shape, value.data.shape, *([mask.data.shape] if mask is not None else [])]
        shape = torch.broadcast_shapes(*shapes)
        places = pointer.data.expand(shape).reshape(-1)
        numbers = converted(value.data, pointer.element).expand(shape).reshape(-1)
        if mask is not None:
            active = mask.data.expand(shape).reshape(-1)
            places, numbers = places[active], numbers[active]
        if places.numel():
            elements, indices = self._elements(places, pointer.element, "writes")
            raw = _RAW[numbers.itemsize]
            elements.view(raw)[indices] = numbers.view(raw)
            self.writes += 1

    def add(self, pointer: Tensor, value: Tensor) -> Tensor:
        """Adds numbers to those at addresses, one after the other; gives what was there before."""
        assert pointer.element is not None
        before = self.load(pointer, None, None)
        self.writes += 1
        places = pointer.data.reshape(-1)
        elements, indices = self._elements(places, pointer.element, "adds to")
        elements.index_add_(0, indices, converted(value.data, pointer.element).expand(pointer.data.shape).reshape(-1))
        return before

    def _elements(self, addresses: torch.Tensor, dtype: torch.dtype, action: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A storage as elements of a type, and the indices of these addresses there."""
        first, last = (
            int(end) for end in (torch.aminmax(addresses) if addresses.numel() > 1 else (addresses, addresses))
        )
        begin, whole = self._holding(first, last + dtype.itemsize - 1, action)
        offsets = addresses - begin
        if bool((offsets % dtype.itemsize != 0).any()):
            raise SynchronizationError(f"it {action} an address that is no multiple of {dtype.itemsize} bytes")
        return _typed(whole, dtype), offsets // dtype.itemsize


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a tensor."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1


def _typed(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return whole[: whole.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
