"""What ranks tell and send one another: agreement on a call, keys and values of a hop, gradients on their way back.

PyTorch's groups run communication on a stream of their own; here it is begun before the computation that it runs
beside, and waited for behind that.
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoattn.distributed.rectangles import Span
from autoattn.distributed.schedule import Hop, Transfer
from autoattn.errors import GroupError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of a process group."""

    group: dist.ProcessGroup
    rank: int  # this process's own
    size: int

    def sends(self, tensor: Tensor, rank: int) -> dist.P2POp:
        """A send to a rank of the group."""
        return dist.P2POp(dist.isend, tensor, group=self.group, group_peer=rank)

    def receives(self, tensor: Tensor, rank: int) -> dist.P2POp:
        """A receive from a rank of the group."""
        return dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=rank)


def ranks_of(group: Any) -> Ranks:
    """The ranks of a group.

    Args:
        group: a ProcessGroup, or a DeviceMesh with one axis.

    Raises:
        UsageError: it is none, or this process is not in it.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(
                f"group must be a DeviceMesh with one axis, got one with {group.ndim}; give mesh['name'] of the axis"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"group must be a ProcessGroup or a DeviceMesh with one axis, got {type(group).__name__}; give "
            "torch.distributed.group.WORLD for all ranks"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError("group must hold the calling process, got one without it; call on its ranks alone")
    return Ranks(group=group, rank=rank, size=dist.get_world_size(group))


# --- Agreement --------------------------------------------------------------------------------------------------------

_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
_agreeing = threading.Lock()
_REMEMBERED = 4096  # calls of a group that are known to be alike


def agree(ranks: Ranks, call: str, refusal: Exception | None, device: torch.device) -> None:
    """Compares what the ranks call, before anything else is sent; a call that was compared is not compared again.

    Args:
        call: all that must be the same on each rank, in words.
        refusal: why this rank cannot take part.

    Raises:
        The refusal, or UsageError with that of another rank, or where two ranks call different things.
        GroupError: a rank does not answer.
    """
    known = _agreed.setdefault(ranks.group, set())
    if refusal is None and call in known:
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UsageError("a call over ranks must be compared before a CUDA graph holds it; call it once before")
    answers: list[Any] = [None] * ranks.size
    with reporting(ranks):
        dist.all_gather_object(answers, (call, None if refusal is None else str(refusal)), group=ranks.group)
    if refusal is not None:
        raise refusal
    for rank, (other, why) in enumerate(answers):
        if why is not None:
            raise UsageError(f"rank {rank} of the group refused the call: {why}")
        if other != call:
            raise UsageError(
                f"all ranks must make the same call, got {_difference(call, other)} on ranks {ranks.rank} and {rank}; "
                "give each rank its part of the same sequences"
            )
    with _agreeing:
        if len(known) >= _REMEMBERED:
            known.clear()
        known.add(call)


def _difference(call: str, other: str) -> str:
    """The first words in which two calls differ."""
    pairs = zip(call.split("; "), other.split("; "), strict=False)
    return next((f"{word} and {other_word}" for word, other_word in pairs if word != other_word), f"{call} and {other}")


@contextmanager
def reporting(ranks: Ranks) -> Iterator[None]:
    """Turns what a group raises where a rank is gone, or too late, into one sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise GroupError(
            f"all {ranks.size} ranks of the group must take part in a call, but rank {ranks.rank} lost one ({reason}); "
            "look for the first error among the ranks and start them again"
        ) from error


# --- Keys and values, and their gradients -----------------------------------------------------------------------------

_ALIGNED = 64  # elements: where a tensor in a message begins, kernels read as much at once as in one of its own


class Exchange:
    """Tensors on their way between ranks; `wait` orders what comes next behind their arrival."""

    def __init__(self, ranks: Ranks, operations: Sequence[dist.P2POp]) -> None:
        self._ranks = ranks
        self._works: list[Any] = []
        if operations:
            with reporting(ranks):
                self._works = dist.batch_isend_irecv(list(operations))

    def wait(self) -> None:
        """Waits on the current stream of a GPU, or for the CPU's."""
        if not self._works:
            return
        with reporting(self._ranks):
            for work in self._works:
                work.wait()
        self._works.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """Memory for the same tokens of several tensors, keys and values or their gradients, which travel at once.

    On two H100s PyTorch and NCCL took about 0.6 ms of the host for a hop of four messages, as long as a short call
    computes (benchmarks/results/2026-11-25_h100_context_parallel.md).
    """

    whole: Tensor  # [elements], the parts one behind the other, with gaps
    parts: list[Tensor]  # without gaps, each as its tensor but for the number of tokens

    @classmethod
    def of(cls, tensors: Sequence[Tensor], transfer: Transfer, axis: int) -> Message:
        """New memory for the tokens of a transfer.

        Args:
            tensors: of one dtype, with the tokens on an axis.
        """
        elements, places = _places(tuple([tensor.shape for tensor in tensors]), transfer.length, axis)
        whole = tensors[0].new_empty(elements)
        return cls(whole=whole, parts=[whole.as_strided(*place) for place in places])


Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides, elements before it


@lru_cache(maxsize=1024)
def _places(shapes: tuple[torch.Size, ...], length: int, axis: int) -> tuple[tuple[int], list[Place]]:
    """The size of a message of so many tokens of tensors with these shapes, and where their parts lie in it."""
    parts = [(*shape[:axis], length, *shape[axis + 1 :]) for shape in shapes]
    *begins, elements = accumulate((-(-math.prod(part) // _ALIGNED) * _ALIGNED for part in parts), initial=0)
    strides = [tuple(math.prod(part[dim + 1 :]) for dim in range(len(part))) for part in parts]
    return (elements,), list(zip(parts, strides, begins, strict=True))


class Arrival:
    """Keys and values of a hop on their way."""

    def __init__(
        self, ranks: Ranks, hop: Hop, indices: HopIndices, tensors: Sequence[Tensor], axis: int,
        before: Arrival | None,
    ) -> None:  # fmt: skip
        """Begins to send to the targets and to receive of the sources.

        Args:
            tensors: the rank's own keys and values, with the tokens on an axis.
            before: that of the hop before, whose message serves once more where targets need the same tokens.
        """
        self._axis, self._indices = axis, indices
        self._parts: list[list[Tensor]] = [[] for _ in tensors]
        self._sent: tuple[tuple[Span, ...], Message] | None = None if before is None else before._sent
        operations = []
        for target, index in zip(hop.targets, indices.targets, strict=True):
            if target.rank != ranks.rank:
                if self._sent is None or self._sent[0] != target.spans:
                    message = Message.of(tensors, target, axis)
                    for room, tensor in zip(message.parts, tensors, strict=True):
                        write(room, tensor, target.spans, index, axis)
                    self._sent = target.spans, message
                operations.append(ranks.sends(self._sent[1].whole, target.rank))
        for source, index in zip(hop.sources, indices.sources, strict=True):
            if source.rank == ranks.rank:
                arrived = [taken(tensor, source.spans, index, axis) for tensor in tensors]
            else:
                message = Message.of(tensors, source, axis)
                arrived = message.parts
                operations.append(ranks.receives(message.whole, source.rank))
            for parts, part in zip(self._parts, arrived, strict=True):
                parts.append(part)
        self._exchange = Exchange(ranks, operations)

    def wait(self) -> list[Tensor]:
        """Keys and values in the order that the calls of the hop read."""
        self._exchange.wait()
        if pieces := self._indices.pieces:
            return [
                torch.cat([parts[source].narrow(self._axis, *span) for source, span in pieces], self._axis)
                for parts in self._parts
            ]
        tensors = [parts[0] if len(parts) == 1 else torch.cat(parts, self._axis) for parts in self._parts if parts]
        if self._indices.order is None:
            return tensors
        return [tensor.index_select(self._axis, self._indices.order) for tensor in tensors]


class Return:
    """Gradients of a hop's keys and values on their way to the ranks that hold these."""

    def __init__(
        self, ranks: Ranks, hop: Hop, indices: HopIndices, gradients: Sequence[Tensor], own: Sequence[Tensor], axis: int
    ) -> None:
        """Begins to send to the sources and to receive of the targets.

        Args:
            gradients: of the hop's keys and values, in the order of its calls; [] for a hop without sources.
            own: the rank's own keys and values, of which others have the gradients.
        """
        operations = []
        self._received: list[tuple[Transfer, list[Tensor]]] = []
        if indices.places is not None:
            gradients = [gradient.index_select(axis, indices.places) for gradient in gradients]
        for source, spans in zip(hop.sources, indices.returning, strict=True):
            if source.rank == ranks.rank:
                self._received.append((source, [_together(gradient, spans, axis) for gradient in gradients]))
            else:
                message = Message.of(own, source, axis)
                for room, gradient in zip(message.parts, gradients, strict=True):
                    _write_together(room, gradient, spans, axis)
                operations.append(ranks.sends(message.whole, source.rank))
        for target in hop.targets:
            if target.rank != ranks.rank:
                message = Message.of(own, target, axis)
                operations.append(ranks.receives(message.whole, target.rank))
                self._received.append((target, message.parts))
        self._received.sort(key=lambda each: each[0].rank)
        self._exchange = Exchange(ranks, operations)

    def wait(self) -> list[tuple[Transfer, list[Tensor]]]:
        """What came, in the order of the ranks."""
        self._exchange.wait()
        return self._received


Range: TypeAlias = tuple[int, int]  # the first token, and how many
MOST_PIECES = 8  # that are put together one by one; an index of more takes less of the host


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HopIndices:
    """Places of tokens on a device, where spans do not say them as a view: [tokens] int64."""

    sources: tuple[Tensor | None, ...]
    targets: tuple[Tensor | None, ...]
    # How the tokens of the sources come into the order of the calls, where that is another: as pieces, or as places
    # among all of them where pieces would be many.
    pieces: tuple[tuple[int, Range], ...]  # in the order of the calls: place of the source, and where among its tokens
    order: Tensor | None
    places: Tensor | None  # the other way round
    returning: tuple[tuple[Range, ...], ...]  # of each source, where gradients stand that are in the calls' order

    @classmethod
    def of(cls, hop: Hop, device: torch.device) -> HopIndices:
        """Of a hop."""
        begins = list(accumulate((source.length for source in hop.sources), initial=0))
        few = len(hop.order) <= MOST_PIECES
        order = None if few else index_of(hop.order)
        pieces = [(bisect_right(begins, begin) - 1, begin, end - begin) for begin, end in hop.order] if few else []
        returning: list[list[tuple[int, Range]]] = [[] for _ in hop.sources]
        place = 0
        for source, begin, length in pieces:
            returning[source].append((begin, (place, length)))
            place += length
        if not pieces:
            returning = [[(0, (begin, source.length))] for begin, source in zip(begins, hop.sources, strict=False)]
        return cls(
            sources=tuple(_index(source.spans, device) for source in hop.sources),
            targets=tuple(_index(target.spans, device) for target in hop.targets),
            pieces=tuple((source, (begin - begins[source], length)) for source, begin, length in pieces),
            returning=tuple(tuple(span for _, span in sorted(spans)) for spans in returning),
            order=None if order is None else on(order, device),
            places=None if order is None else on(torch.argsort(order), device),
        )


def index_of(spans: Sequence[Span]) -> Tensor:
    """[tokens] int64 on the CPU: the tokens of the spans."""
    return torch.cat([torch.arange(*span) for span in spans]) if spans else torch.empty(0, dtype=torch.int64)


def on(index: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device; the copy waits for nothing."""
    return (index.pin_memory() if device.type == "cuda" else index).to(device, non_blocking=True)


def taken(tensor: Tensor, spans: Sequence[Span], index: Tensor | None, axis: int) -> Tensor:
    """Some tokens of a tensor, as a view where they lie side by side."""
    if index is not None:
        return tensor.index_select(axis, index)
    begin, end = spans[0]
    return tensor.narrow(axis, begin, end - begin)


def _together(tensor: Tensor, ranges: Sequence[Range], axis: int) -> Tensor:
    """Ranges of a tensor's tokens one behind the other."""
    parts = [tensor.narrow(axis, *span) for span in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _write_together(room: Tensor, tensor: Tensor, ranges: Sequence[Range], axis: int) -> None:
    """The same into a new tensor's memory."""
    if len(ranges) == 1:
        room.copy_(tensor.narrow(axis, *ranges[0]))
    else:
        torch.cat([tensor.narrow(axis, *span) for span in ranges], axis, out=room)


def _index(spans: Sequence[Span], device: torch.device) -> Tensor | None:
    return None if len(spans) == 1 else on(index_of(spans), device)


def write(room: Tensor, tensor: Tensor, spans: Sequence[Span], index: Tensor | None, axis: int) -> None:
    """Writes what `taken` takes into a new tensor's memory."""
    if index is None:
        room.copy_(taken(tensor, spans, None, axis))
    else:
        torch.index_select(tensor.detach(), axis, index, out=room)
