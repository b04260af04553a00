"""Small Gluon kernels as text, which the interpreter of Gluon runs, and faults that are planted in rendered ones."""

from __future__ import annotations

import linecache
import textwrap
from dataclasses import replace
from typing import Any

import gluon_kernels
import torch

from autoattn.codegen import render
from autoattn.core.problem import DType, Problem
from autoattn.core.variant import Source, Traits, Value
from autoattn.errors import AutoattnError
from autoattn.kernels import compiler
from autoattn.kernels.gluon_interpreter import module_loader
from autoattn.kernels.gluon_interpreter.module_loader import InterpretedModule
from autoattn.kernels.tma_descriptor import Descriptor
from autoattn.reference.inputs import Scores
from autoattn.validation import output_check

CPU = torch.device("cpu")
PATH = "autoattn_rendered_small.py"
HEAD = """
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILE = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
BARRIER = mbarrier.MBarrierLayout()
DESCRIPTORS = {"source": ([64, 16], TILE), "target": ([64, 16], TILE)}
OPTIONS = {"num_warps": 4}
SIGNATURE = {
    "source": "tensordesc<fp16[64, 16],layout>",
    "target": "tensordesc<fp16[64, 16],layout>",
    "halves_ptr": "*fp16",
    "numbers_ptr": "*i32",
    "sums_ptr": "*fp32",
    "count": "i32",
}


"""


def module(body: str) -> InterpretedModule:
    """A module whose kernel is the function `kernel` of the body."""
    text = HEAD + textwrap.dedent(body)
    linecache.cache[PATH] = (len(text), None, text.splitlines(keepends=True), PATH)
    return module_loader.load_module("small", PATH, text)


def launch(body: str, *, seed: int = 0, programs: int = 1, **arguments: Any) -> None:
    """Runs `kernel` of the body on tensors, of which `source` and `target` are read and written in boxes."""
    loaded = module(body)
    loaded.launches = seed
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    boxes = {
        name: Descriptor(address=tensor.data_ptr(), shape=tuple(tensor.shape), strides=tensor.stride())
        for name, tensor in tensors.items()
        if name in ("source", "target")
    }
    # The memory of a box is that of a tensor beside it.
    module_loader.launch(
        loaded,
        "kernel",
        (programs,),
        {**{f"{name} memory": tensor for name, tensor in tensors.items()}, **arguments, **boxes},
    )


def source(problem: Problem, *, lse: bool = False, **changes: Value) -> Source:
    """A rendered forward kernel."""
    return gluon_kernels.source(problem, replace(render.natural_traits(problem), lse=lse), **changes)


def planted(rendered: Source, right: str, wrong: str, *, place: int = 0) -> Source:
    """The same kernel with one occurrence of a text replaced."""
    at = -1
    for _ in range(place + 1):
        at = rendered.text.index(right, at + 1)
    text = rendered.text[:at] + wrong + rendered.text[at + len(right) :]
    return Source(name=rendered.name, text=text, variant=rendered.variant, traits=rendered.traits)


def said(
    rendered: Source, problem: Problem, lengths: tuple[int, int] = (70, 200), scores: Scores = Scores.PLAIN, *,
    sm_count: int = 1, number: int = 1,
) -> str:  # fmt: skip
    """What the gate says of a kernel in the interpreter, or the fault that ends it; empty where it is right."""
    kernel = replace(compiler.load(rendered, CPU), sm_count=sm_count)
    generator = torch.Generator().manual_seed(0)
    case = output_check.make_small_case(problem, *lengths, number, CPU, generator, scores=scores)
    try:
        return output_check.judge(kernel, [case]).reason
    except AutoattnError as error:
        return str(error)


__all__ = ["CPU", "DType", "Traits", "launch", "module", "planted", "said", "source"]
