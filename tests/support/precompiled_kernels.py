"""Precompiled kernels of made-up parts, and machine code that no card runs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import kernels

from autoattn.codegen import precompiled, render
from autoattn.codegen.precompiled import MAIN, Facts, Function, PrecompiledKernel, TensorMap
from autoattn.core import kernel_kind, triton_release
from autoattn.core.problem import Problem
from autoattn.core.variant import Traits, Variant, digest_of

PROBLEM = kernels.problem(head_dim=64)
VARIANT = kernels.variant()
TRAITS = Traits()
ARGUMENTS = (
    ("query", "tensordesc<bf16[1, 64], layout>"), ("output_ptr", "*bf16"), ("stride_ob", "i64"), ("seq_q", "i32"),
    ("scale", "fp32"),
)  # fmt: skip
QUERY_MAP = TensorMap(element_type=9, element_bytes=2, swizzle=3, box=(1, 64))


def cubin(arch: int = 90, content: bytes = b"instructions") -> bytes:
    """What looks like machine code for an architecture."""
    head = bytearray(64)
    head[:4], head[8], head[18:20] = b"\x7fELF", 7, (190).to_bytes(2, "little")
    head[48:52] = (arch | arch << 16).to_bytes(4, "little")
    return bytes(head) + content


def function(code: bytes | None = None, **facts: Any) -> Function:
    """A function with a descriptor, a pointer and numbers."""
    digest = hashlib.sha256(cubin() if code is None else code).hexdigest()
    defaults: dict[str, Any] = {
        "name": "forward", "role": MAIN, "sha256": digest, "warps": 4, "shared_bytes": 1024, "dependent": False,
        "cooperative": False, "arguments": ARGUMENTS, "tensor_maps": {"query": QUERY_MAP},
    }  # fmt: skip
    return Function(**defaults | facts)


def precompiled_kernel(
    problem: Problem = PROBLEM,
    variant: Variant = VARIANT,
    traits: Traits = TRAITS,
    code: bytes | None = None,
    text: str | None = None,
    launch_text: str = "SIGNATURE = {}\n",
    **facts: Any,
) -> PrecompiledKernel:
    """A precompiled kernel with the text that the templates give, and made-up machine code."""
    code = cubin() if code is None else code
    release = triton_release.installed_release()
    source = render.render(problem, variant, traits, release=release)
    text = source.text if text is None else text
    defaults: dict[str, Any] = {
        "format": precompiled.FORMAT, "kind": kernel_kind.of(problem), "variant": variant, "traits": traits, "arch": 90,
        "compiler": "3.6.0", "release": release, "name": source.name, "digest": digest_of(text),
        "digests": {release: digest_of(text)},
        "launch_sha256": hashlib.sha256(launch_text.encode()).hexdigest(), "functions": (function(code),),
    }  # fmt: skip
    return PrecompiledKernel(
        facts=Facts(**defaults | facts), text=text, launch_text=launch_text, code={"forward": code}
    )


def with_facts(kernel: PrecompiledKernel, **facts: Any) -> PrecompiledKernel:
    """The kernel with other facts."""
    return replace(kernel, facts=replace(kernel.facts, **facts))
