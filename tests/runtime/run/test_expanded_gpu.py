"""Tensors of which an axis repeats one part (stride 0), as torch.expand makes them, in every family's kernels."""

from __future__ import annotations

import pytest
import torch
from functional_calls_gpu import TOLERANCE, check_kernel, largest_error, no_shipped_cache, normal  # noqa: F401
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.core.variant import Source
from autoattn.errors import CompileError
from autoattn.hardware import nvidia
from autoattn.kernels import compiler
from autoattn.runtime.plan import planner

pytestmark = pytest.mark.gpu

SHAPE = (2, 8, 1024, 64)  # [batch, heads, seq, head_dim], which Gluon runs on Hopper
AXES = {"batch": 0, "heads, as one key head for all": 1, "seq": 2}
WHICH = (("query",), ("key",), ("value",), ("key", "value"), ("query", "key", "value"))


def repeating(axis: int, which: tuple[str, ...]) -> list[Tensor]:
    """Query, key and value; those of `which` have a single part along the axis."""
    return [
        normal(*SHAPE).narrow(axis, 0, 1).expand(SHAPE) if name in which else normal(*SHAPE)
        for name in ("query", "key", "value")
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", WHICH, ids=" ".join)
@pytest.mark.parametrize("axis", AXES.values(), ids=list(AXES))
def test_what_repeats_is_read_as_it_lies(axis: int, which: tuple[str, ...], causal: bool) -> None:
    """On Hopper by the TMA unit, whose descriptors then have a stride of 0."""
    tensors = repeating(axis, which)
    variant = autoattn.explain(*tensors, causal=causal).variant
    assert variant is not None
    assert variant.template == family()
    check_kernel(*tensors, causal=causal)
    output = autoattn.attention(*tensors, causal=causal)  # prepared by now
    assert largest_error(output, *tensors, causal=causal) <= TOLERANCE[torch.bfloat16]


def family() -> str:
    card = nvidia.present()
    assert card is not None
    return "gluon/forward" if card.arch == 90 else "triton/forward"


@pytest.mark.parametrize("axis", AXES.values(), ids=list(AXES))
def test_plain_triton_reads_them_too(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load = compiler.load

    def refusing(source: Source, device: torch.device) -> compiler.Kernel:
        if source.variant.template != "triton/forward":
            raise CompileError("only plain Triton is asked here")
        return load(source, device)

    monkeypatch.setattr(planner.compiler, "load", refusing)
    planner.load_once.cache_clear()
    functional.forget()
    tensors = repeating(axis, ("key", "value"))
    variant = autoattn.explain(*tensors).variant
    assert variant is not None
    assert variant.template == "triton/forward"
    check_kernel(*tensors)
