"""Bound launches: what reaches the C function beneath Triton's launcher, descriptors encoded once, and zeros.

There is no card here: the C function and the encoder only note what they get.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_device
import kernels
import pytest
import torch
import triton
from triton.backends.nvidia.driver import wrap_handle_tensordesc

from autoattn.codegen import render, search_space
from autoattn.core import device_profiles
from autoattn.core.variant import Variant
from autoattn.kernels import bound_launch, compiler, forward
from autoattn.kernels.bound_launch import Bound
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.forward import POINTERS
from autoattn.kernels.manifest import described
from autoattn.kernels.tma_descriptor import Descriptor
from autoattn.kernels.zeroed_scratch import POOLS
from autoattn.reference import inputs

TEMPLATE = "gluon/forward"
H200 = device_profiles.named("h200")
GRID = (5, 1, 1)
FACTS = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}
ADDRESSES = (16, 32, 48, 64, 80, 96, 0, 0, 0, 0)


class Card:
    """Stands in for the driver: encodes to a tuple of what it is given, and notes what is launched."""

    context: fake_device.Context

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.encoded: list[tuple[Any, ...]] = []
        self.stream = 7
        self.utils = SimpleNamespace(fill_tma_descriptor=self.encode, fill_tma_descriptor_tiled=self.encode)

    def encode(self, *given: Any) -> tuple[Any, ...]:
        self.encoded.append(given)
        return ("encoded", *given)

    def launch(self, *given: Any) -> None:
        self.launched.append(given)

    def get_current_stream(self, index: int) -> int:
        return self.stream


@pytest.fixture
def card(zeros_on_the_host: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    here = Card()
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(here)
    here.context = fake_device.set_context(monkeypatch)
    fake_device.set_streams(monkeypatch, here.get_current_stream)
    monkeypatch.setattr(bound_launch, "filled_maps", [])
    yield here
    triton.runtime.driver._active = before


def kernel_and_arguments(card: Card, **launcher: Any) -> tuple[Kernel, dict[str, object]]:
    """A Gluon kernel beneath the installed Triton's own wrapper, and a call's arguments."""
    problem = kernels.problem(head_dim=64, seq_q=256, seq_kv=256, mask="causal", batch=1, heads_q=2, heads_kv=2)
    variant = Variant.of(
        TEMPLATE, search_space.load(TEMPLATE).default(problem, H200).as_dict() | {"schedule": "dynamic"}
    )
    module = compiler.load_module(render.render(problem, variant))
    signature = dict(enumerate(module.SIGNATURE.values()))
    facts: dict[str, Any] = {
        "launch": wrap_handle_tensordesc(card.launch, signature, [FACTS] * len(module.DESCRIPTORS)),
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "arg_annotations": "annotations",
        "kernel_signature": "kernel signature",
    }
    compiled = SimpleNamespace(
        run=SimpleNamespace(**facts | launcher),
        function="function",
        packed_metadata="metadata",
        launch_metadata=lambda grid, stream, *given: "facts",
    )
    operands = inputs.make(problem, device=torch.device("cpu"), generator=torch.Generator().manual_seed(0))
    kernel = Kernel(source=None, module=module, compiled=compiled, device=torch.device("cuda", 0), sm_count=4)  # type: ignore[arg-type]
    return kernel, forward.launch_arguments(
        kernel, problem, operands, forward.empty_output(problem, operands.query), None
    )


def passed(hooks: tuple[object, object, object], arguments: list[Any]) -> tuple[Any, ...]:
    """What the installed Triton's launcher passes on for GRID on the card's stream."""
    kernel = "function", False, False
    if triton.__version__.startswith("3.6."):
        return (*GRID, 7, *kernel, None, None, "metadata", *hooks, *arguments)
    return (*GRID, 7, *kernel, "metadata", *hooks, None, None, "annotations", "kernel signature", arguments)


def arguments_of(launched: tuple[Any, ...]) -> list[Any]:
    """The kernel's arguments among what was launched."""
    return launched[-1] if isinstance(launched[-1], list) else list(launched[13:])


def bind(card: Card, **launcher: Any) -> Bound:
    kernel, arguments = kernel_and_arguments(card, **launcher)
    return bound_launch.bind(kernel, (5,), arguments, POINTERS, ("scratch_ptr", 300))


def test_the_c_function_gets_what_tritons_own_wrapper_passes_on(card: Card) -> None:
    kernel, arguments = kernel_and_arguments(card)
    moved = {
        name: Descriptor(
            address=ADDRESSES[POINTERS.index(f"{name}_ptr")], shape=argument.shape, strides=argument.strides
        )
        for name, argument in arguments.items()
        if isinstance(argument, Descriptor)
    }
    moved |= {name: address for name, address in zip(POINTERS, ADDRESSES, strict=False) if address}
    ordered = [(arguments | moved)[name] for name in kernel.module.SIGNATURE]
    kernel.compiled.run.launch(*passed((None, None, None), ordered))
    bound_launch.bind(kernel, (5,), arguments, POINTERS, ("scratch_ptr", 300))(ADDRESSES)
    by_triton, by_us = card.launched
    assert by_us == by_triton
    assert len(card.encoded) == 2 * len(kernel.module.DESCRIPTORS)


def test_a_resized_launch_is_the_one_that_is_bound_at_other_sizes(card: Card) -> None:
    kernel, arguments = kernel_and_arguments(card)
    first = bound_launch.bind(kernel, (5,), arguments, POINTERS, ("scratch_ptr", 300), forward.SIZED)
    grown = {
        name: replace(argument, shape=(*argument.shape[:2], argument.shape[2] + 7, argument.shape[3]))
        if name.startswith("key")
        else argument
        for name, argument in arguments.items()
        if isinstance(argument, Descriptor)
    }
    numbers = tuple(range(1000, 1000 + len(forward.SIZED)))
    changed = {**arguments, **grown, **dict(zip(forward.SIZED, numbers, strict=True))}
    second = bound_launch.bind(kernel, (9,), changed, POINTERS, ("scratch_ptr", 400), forward.SIZED)
    boxes = {described(name): (descriptor.shape, descriptor.strides) for name, descriptor in grown.items()}
    resized = bound_launch.resize(first, (9,), numbers, boxes, 400)
    for launch in (second, resized):
        launch(ADDRESSES)
    assert card.launched[0] == card.launched[1]
    assert resized.zeros == second.zeros
    assert [maps.axes for _, _, maps in resized.maps] == [
        (descriptor.shape, descriptor.strides) for descriptor in grown.values()
    ]
    kept = [new is old for (_, _, new), (_, _, old) in zip(resized.maps, first.maps, strict=True)]
    assert kept == [name != "key" for name in resized.form.described], "what did not change is not encoded again"


def test_a_descriptor_that_is_made_past_its_dataclass_is_the_same() -> None:
    shape, strides = (2, 3, 100, 64), (19200, 6400, 64, 1)
    assert Descriptor.at(4096, shape, strides) == Descriptor(address=4096, shape=shape, strides=strides)


def test_a_descriptor_is_encoded_once_for_an_address(card: Card) -> None:
    launch = bind(card)
    for addresses in (ADDRESSES, ADDRESSES, (160, *ADDRESSES[1:]), ADDRESSES):
        launch(addresses)
    assert [given[0] for given in card.encoded] == [16, 32, 48, 64, 160]
    assert card.launched[0] == card.launched[1] == card.launched[3]


def test_a_context_is_current_once_in_each_thread_that_encodes(card: Card) -> None:
    launch = bind(card)
    launch(ADDRESSES)
    launch((160, *ADDRESSES[1:]))
    assert card.context.threads == [threading.get_ident()]
    other = threading.Thread(target=launch, args=((176, *ADDRESSES[1:]),))
    other.start()
    other.join()
    assert card.context.threads == [threading.get_ident(), other.ident]


def test_encoded_descriptors_do_not_pile_up(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_launch, "MOST_MAPS", 10)
    launches = [bind(card) for _ in range(3)]
    for step in range(20):
        for launch in launches:
            launch((16 * step, *ADDRESSES[1:]))
            assert arguments_of(card.launched[-1])[0][1] == 16 * step
            assert (
                sum(len(maps) for bound in launches for _, _, maps in bound.maps) == len(bound_launch.filled_maps) <= 10
            )


@pytest.mark.parametrize(
    "launcher",
    [{"global_scratch_size": 8}, {"launch": lambda *given: None}, {"launch": print}],
    ids=["memory of its own", "another wrapper", "no wrapper"],
)
def test_where_triton_has_another_launcher_it_serves_with_descriptors(card: Card, launcher: dict[str, Any]) -> None:
    kernel, arguments = kernel_and_arguments(card, **launcher)
    seen: list[tuple[Any, ...]] = []
    kernel.compiled.run = type("Run", (SimpleNamespace,), {"__call__": lambda self, *given: seen.append(given)})(
        **vars(kernel.compiled.run)
    )
    bound_launch.bind(kernel, (5,), arguments, POINTERS, ("scratch_ptr", 300))(ADDRESSES)
    assert seen[0][:8] == (*GRID, 7, "function", "metadata", None, None)
    assert [argument.address for argument in seen[0] if isinstance(argument, Descriptor)] == [16, 32, 48, 64]
    assert len(seen[0]) == 9 + len(kernel.module.SIGNATURE)


def test_another_triton_is_not_called_past_its_launcher(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.12.0")
    kernel, arguments = kernel_and_arguments(card)
    assert bound_launch.bind(kernel, (5,), arguments, POINTERS, ("scratch_ptr", 300)).form.launch is kernel.compiled.run


def test_hooks_are_called_by_the_c_function(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(facts: object) -> None: ...

    launch = bind(card)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", enter)
    launch(ADDRESSES)
    assert card.launched[0] == passed(("facts", enter, None), arguments_of(card.launched[0]))


# --- zeros ------------------------------------------------------------------------------------------------------------


def taken(card: Card, launch: Bound) -> int:
    """The address of the zeros that a launch takes by itself."""
    launch((*ADDRESSES[:5], 0, 0, 0))
    assert launch.zeros is not None
    return arguments_of(card.launched[-1])[launch.zeros[0] - launch.form.begin]


def test_launches_take_the_zeros_of_their_stream(card: Card) -> None:
    first, second = bind(card), bind(card)
    address = taken(card, first)
    assert address == POOLS["scratch_ptr"].buffer(0, 7, 300).address
    assert taken(card, second) == address
    card.stream = 8
    assert taken(card, first) == POOLS["scratch_ptr"].buffer(0, 8, 300).address != address


def test_a_call_that_brings_its_own_zeros_keeps_them(card: Card) -> None:
    launch = bind(card)
    launch(ADDRESSES)
    assert launch.zeros is not None
    assert arguments_of(card.launched[0])[launch.zeros[0] - launch.form.begin] == 96
    assert POOLS["scratch_ptr"].buffers == {}
