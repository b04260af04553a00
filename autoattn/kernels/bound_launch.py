"""A kernel launch with everything bound but the tensors' addresses.

What Triton's own way costs at each call is paid once here: TMA descriptors are encoded once for an address, and the C
function beneath Triton's launcher is called by itself, with its arguments in the release's order (`_Direct`). Where the
installed Triton has another launcher, its own serves.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import triton

from autoattn import torch_private
from autoattn.core import triton_release
from autoattn.kernels.compiler import Kernel, make_current
from autoattn.kernels.manifest import described
from autoattn.kernels.precompiled_kernel import LoadedFunction
from autoattn.kernels.tma_descriptor import Axes, Descriptor
from autoattn.kernels.zeroed_scratch import POOLS, ScratchPool

Addresses = tuple[int, ...]  # of a call's tensors, in bytes; 0 for one that is not there
# (address, shape, strides) of a descriptor -> what a launch takes for it
Encode: TypeAlias = Callable[[int, tuple[int, ...], tuple[int, ...]], Any]
MOST_MAPS = 1 << 14  # encoded descriptors, of all launches together; 256 bytes each
_STREAM = 3  # its place among what a launch takes, behind the grid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchForm:
    """What launches of a kernel share, whatever the sizes of their calls."""

    compiled: Any  # Triton's CompiledKernel
    launch: Callable[..., object]
    hooks: int  # the place of the launch's metadata in `given`, behind which its two hooks stand
    begin: int  # the place of the first argument
    listed: bool  # whether `launch` takes the arguments as one list
    stepped: bool  # whether the shape and the strides of a descriptor follow it, as arguments of their own
    index: int  # of the device
    pointers: tuple[tuple[int, int], ...]  # (place in `given`, place among the addresses)
    described: tuple[str, ...]  # the tensors that descriptors are of
    sized: tuple[tuple[int, int], ...]  # (place in `given`, place among the numbers that sizes decide)
    device_of: Callable[[], int]  # -> current device
    stream_of: Callable[[int], int]  # device -> handle of its current stream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """A launch of a kernel that takes the addresses of its call's tensors."""

    form: LaunchForm
    given: list[object]  # what `launch` takes: grid, stream, settings, hooks, arguments; None where one moves
    maps: tuple[tuple[int, int, Maps], ...]  # (place in `given`, place among the addresses), and descriptors
    zeros: tuple[int, int, int, ScratchPool] | None  # (place in `given`, place among the addresses, numbers, whose)

    def __call__(self, addresses: Addresses) -> None:
        """Launches on the current stream of the kernel's device.

        Where the kernel needs zeros and their address is 0, the launch takes those of its stream.
        """
        if self.form.device_of() != self.form.index:
            with torch.cuda.device(self.form.index):
                self._launch(addresses)
            return
        self._launch(addresses)

    def _launch(self, addresses: Addresses) -> None:
        """Addresses are passed as numbers, since Triton asks a tensor for its own, and then the driver whose it is."""
        form, given = self.form, self.given.copy()
        for place, number in form.pointers:
            given[place] = addresses[number]
        for place, number, maps in self.maps:
            given[place] = maps[addresses[number]]
        given[_STREAM] = stream = form.stream_of(form.index)
        if self.zeros is not None:
            place, number, size, pool = self.zeros
            if not addresses[number]:
                buffer = pool.buffer(form.index, stream, size)  # held until the launch is in the stream
                given[place] = buffer.address
        begin, hooks = form.begin, triton.knobs.runtime
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # as _set, without calling it
            facts = form.compiled.launch_metadata(tuple(given[:_STREAM]), stream, *given[begin:])
            given[form.hooks : form.hooks + 3] = facts, _set(enter), _set(leave)
        if form.listed:
            form.launch(*given[:begin], given[begin:])
        else:
            form.launch(*given)


def _set(hook: Any) -> Any:
    """A launch hook; None for Triton's chain of hooks that holds none, which would be called all the same."""
    return hook if getattr(hook, "calls", hook) else None


def bind(
    kernel: Kernel,
    grid: tuple[int],
    arguments: Mapping[str, object],
    order: tuple[str, ...],
    zeros: tuple[str, int] | None,
    sized: tuple[str, ...] = (),
) -> Bound:
    """The launch `kernel.launch(grid, arguments)`, ready for tensors that lie elsewhere.

    Args:
        order: names of the arguments whose addresses a launch takes, in its order. The descriptors of a
            tensor `name` go by the address of `name`_ptr.
        zeros: the argument that takes int32 zeros, and how many; None where the kernel has none.
        sized: names of the arguments that sizes decide, in the order in which `resize` takes them.
    """
    direct, compiled = _direct(kernel), kernel.compiled
    addresses, numbers = _places(order), _places(sized)
    settings, behind = direct.settings(compiled) if direct else ((compiled.function, compiled.packed_metadata), ())
    flat: list[object] = [*grid, 1, 1, None, *settings]
    hooks = len(flat)
    flat += [None, None, None, *behind]
    begin = len(flat)
    pointers: list[tuple[int, int]] = []
    maps: list[tuple[int, int, Maps]] = []
    of_sizes: list[tuple[int, int]] = []
    tensors: list[str] = []
    taken = None
    for name in kernel.parameters:
        given = arguments.get(name)
        if isinstance(given, Descriptor):
            tensors.append(described(name))
            # Triton's own launcher takes a descriptor as it is.
            encode = direct.encoder(len(maps), kernel.device) if direct else Descriptor.at
            axes = given.shape, given.strides
            maps.append((len(flat), addresses[f"{described(name)}_ptr"], Maps(axes, encode)))
            flat += [None, *given.shape, *given.strides] if direct else [None]
            continue
        if (address := addresses.get(name)) is not None:
            pointers.append((len(flat), address))
            if zeros is not None and name == zeros[0]:
                taken = len(flat), address, zeros[1], POOLS[name]
            flat.append(None)
            continue
        if (number := numbers.get(name)) is not None:
            of_sizes.append((len(flat), number))
        flat.append(0 if given is None else given)  # a pointer to nothing
    form = LaunchForm(
        compiled=compiled,
        launch=direct.launch if direct else compiled.run,
        hooks=hooks,
        begin=begin,
        listed=direct is not None and direct.listed is not None,
        stepped=direct is not None,
        index=kernel.device.index,
        pointers=tuple(pointers),
        described=tuple(tensors),
        sized=tuple(of_sizes),
        device_of=torch_private.current_device,
        stream_of=torch_private.current_stream,
    )
    return Bound(form=form, given=flat, maps=tuple(maps), zeros=taken)


def resize(bound: Bound, grid: tuple[int], numbers: tuple[int, ...], boxes: Mapping[str, Axes], zeros: int) -> Bound:
    """The same launch with other sizes.

    Args:
        numbers: what sizes decide, in the order that `bind` was told.
        boxes: shape and strides of descriptors, by the names of their tensors.
        zeros: how many the launch takes, where it takes any.
    """
    form, given, maps, taken = bound.form, bound.given.copy(), bound.maps, bound.zeros
    given[0] = grid[0]
    for place, number in form.sized:
        given[place] = numbers[number]
    if maps:
        changed = []
        for name, (place, address, old) in zip(form.described, maps, strict=True):
            axes = boxes[name]
            if axes != old.axes:
                if form.stepped:
                    shape, strides = axes
                    given[place + 1 : place + 1 + 2 * len(shape)] = shape + strides
                old = Maps(axes, old.encode)
            changed.append((place, address, old))
        maps = tuple(changed)
    if taken is not None:
        taken = (*taken[:2], zeros, taken[3])
    return Bound(form=form, given=given, maps=maps, zeros=taken)


# --- Triton's launcher ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Direct:
    """The C function beneath Triton's launcher. It takes encoded descriptors, each followed by its shape and strides.

    Triton 3.6 compiles one for each signature. It takes: grid, stream, function, cooperative, dependent, scratch,
    profile scratch, metadata, launch metadata, hooks, and each argument.
    Since 3.7 there is one for all signatures. It takes: grid, stream, function, cooperative, dependent, metadata,
    launch metadata, hooks, scratch, profile scratch, annotations, signature, and a list of the arguments.
    """

    launch: Callable[..., object]
    cooperative: bool
    dependent: bool
    listed: tuple[object, object] | None  # annotations and signature, where arguments are one list; None in Triton 3.6
    encode: Callable[..., list[Any]] | None  # (descriptor, facts, ...) -> [encoded, *shape, *strides]
    facts: list[Any]  # how each descriptor is to be encoded, by its place among them

    @classmethod
    def of(cls, kernel: Kernel, *, boxes: bool) -> _Direct | None:
        """None where the installed Triton's launcher does not look like that, or allocates memory of its own.

        Args:
            boxes: whether the kernel takes descriptors
        """
        launcher = kernel.compiled.run
        release = triton_release.release_of(triton.__version__)
        if release not in triton_release.SUPPORTED:
            return None
        try:
            if launcher.global_scratch_size or launcher.profile_scratch_size:
                return None
            launch, encode, facts = launcher.launch, None, []
            if boxes:
                inside = inspect.getclosurevars(launch)
                launch, facts = inside.nonlocals["launcher"], inside.nonlocals["tensordesc_meta"]
                encode = {**inside.globals, **inside.nonlocals}["make_tensordesc_arg"]
                if None in facts:
                    return None
            return cls(
                launch=launch,
                cooperative=launcher.launch_cooperative_grid,
                dependent=launcher.launch_pdl,
                listed=None if release == "3.6" else (launcher.arg_annotations, launcher.kernel_signature),
                encode=encode,
                facts=list(facts),
            )
        except (AttributeError, KeyError, TypeError):
            return None

    def settings(self, compiled: Any) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """What stands between the stream and the launch's metadata, and what between its hooks and the arguments."""
        kernel = compiled.function, self.cooperative, self.dependent
        if self.listed is None:
            return (*kernel, None, None, compiled.packed_metadata), ()
        return (*kernel, compiled.packed_metadata), (None, None, *self.listed)

    def encoder(self, place: int, device: torch.device) -> Encode:
        """What encodes the descriptor at a place among them."""
        encode, facts = self.encode, self.facts[place]
        assert encode is not None
        # Since 3.8 an encoder is also told what the launch takes before its arguments, and does not ask for it.
        ignored = (None,) * (len(inspect.signature(encode).parameters) - 2)

        def encoded(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            make_current(device)
            return encode(Descriptor.at(address, shape, strides), facts, *ignored)[0]

        return encoded


@lru_cache(maxsize=16)
def _places(names: tuple[str, ...]) -> dict[str, int]:
    """Where each name stands."""
    return {name: place for place, name in enumerate(names)}


@lru_cache(maxsize=1024)
def _direct(kernel: Kernel) -> _Direct | LoadedFunction | None:
    """What launches a kernel without Triton's launcher; it is looked for once."""
    if isinstance(kernel.compiled, LoadedFunction):
        return kernel.compiled
    boxes = any(name in kernel.manifest.descriptors for name in kernel.parameters)
    return _Direct.of(kernel, boxes=boxes)


class Maps(dict[int, Any]):
    """Address -> what a launch takes for the descriptor of a tensor there, made when it is first asked for."""

    __slots__ = ("__weakref__", "axes", "encode")

    def __init__(self, axes: Axes, encode: Encode) -> None:
        self.axes, self.encode = axes, encode

    def __missing__(self, address: int) -> Any:
        tensor_map = self.encode(address, *self.axes)
        with _writing:
            if len(filled_maps) >= MOST_MAPS:  # calls on ever new addresses, or ever new shapes
                for maps in {id(maps): maps for maps in filled_maps}.values():
                    maps.clear()
                filled_maps.clear()
            filled_maps.append(self)
            self[address] = tensor_map
        return tensor_map


filled_maps: list[Maps] = []  # one for each encoded descriptor: where it is
_writing = threading.Lock()
