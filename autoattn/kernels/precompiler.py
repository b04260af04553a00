"""Makes precompiled kernels: compiles a source and gathers what launches of its machine code must know."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import triton

from autoattn.codegen import precompiled, render
from autoattn.codegen.precompiled import BEFORE, MAIN, PART, Facts, Function, PrecompiledKernel, TensorMap
from autoattn.core import triton_release
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.variant import Source, digest_of
from autoattn.errors import CompileError
from autoattn.kernels import compiler, manifest
from autoattn.kernels.manifest import TMA
from autoattn.kernels.precompiled_kernel import parameters_of

_FLOAT_ORDER = {8: 10, 9: 8, 10: 9}  # Triton's number of an element type -> that of CUtensorMapDataType, where another
_PARAMETER = re.compile(r"\.param (?:\.align (?P<align>\d+) )?\.(?P<kind>[bsuf]\d+) [^\[,\n]*(?:\[(?P<count>\d+)\])?")


def precompile(source: Source, kind: KernelKind, arch: int) -> PrecompiledKernel:
    """Compiles a source for an architecture; needs no card.

    Args:
        kind: of the problem that the source was rendered for.

    Raises:
        CompileError: the compiler refused, or the machine code takes what only Triton's launcher gives.
    """
    compiler.inspect(source, arch)  # which refuses what a call would not launch
    module = compiler.load_module(source)
    described = manifest.of(module)
    roles = dict.fromkeys(described.parts, PART) or {source.name: MAIN}
    if described.grid_before is not None:
        roles[source.name + compiler.BEFORE] = BEFORE
    functions, code = [], {}
    for name, role in roles.items():
        compiled = compiler.build(source, arch, name)
        code[name] = compiled.asm["cubin"]
        functions.append(_function(name, role, compiled, module))
    text = launch_text(source, module)
    facts = Facts(
        format=precompiled.FORMAT,
        kind=kind,
        variant=source.variant,
        traits=source.traits,
        arch=arch,
        compiler=triton.__version__,
        release=triton_release.release_of(triton.__version__),
        name=source.name,
        digest=source.digest,
        digests=_digests(source, kind),
        launch_sha256=hashlib.sha256(text.encode()).hexdigest(),
        functions=tuple(functions),
    )
    return PrecompiledKernel(facts=facts, text=source.text, launch_text=text, code=code)


def _digests(source: Source, kind: KernelKind) -> dict[str, str]:
    """The digest of the kernel's text in the names of each supported release of Triton."""
    texts = {
        release: render.text_of(kind, source.variant, source.traits, release) for release in triton_release.SUPPORTED
    }
    return {release: digest_of(text) for release, text in texts.items()}


def _function(name: str, role: str, compiled: Any, module: ModuleType) -> Function:
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise CompileError(f"{name} takes scratch memory or clusters of Triton's launcher; it cannot be precompiled")
    arguments = tuple((argument, module.SIGNATURE[argument]) for argument in getattr(module, name).arg_names)
    boxes = [argument for argument, kind in arguments if kind.startswith(TMA)]
    encodings = metadata.tensordesc_meta or []
    if len(boxes) != len(encodings) or None in encodings:
        raise CompileError(f"{name} has descriptors that no TMA unit reads; it cannot be precompiled")
    function = Function(
        name=name,
        role=role,
        sha256=hashlib.sha256(compiled.asm["cubin"]).hexdigest(),
        warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        dependent=bool(metadata.launch_pdl),
        cooperative=bool(metadata.launch_cooperative_grid),
        arguments=arguments,
        tensor_maps=dict(zip(boxes, map(_tensor_map, encodings), strict=True)),
    )
    _check_parameters(function, compiled.asm["ptx"])
    return function


def _tensor_map(encoding: Mapping[str, Any]) -> TensorMap:
    if encoding["fp4_padded"]:
        raise CompileError("a descriptor of padded four-bit numbers cannot be precompiled")
    kind = encoding["elem_type"]
    return TensorMap(
        element_type=_FLOAT_ORDER.get(kind, kind),
        element_bytes=encoding["elem_size"],
        swizzle=encoding["swizzle"],
        box=tuple(encoding["block_size"]),
    )


def _check_parameters(function: Function, ptx: str) -> None:
    """Raises a CompileError where the PTX takes other parameters than a launch would give."""
    head = ptx[ptx.index(f".entry {function.name}(") :].partition("{")[0]
    taken = []
    for parameter in _PARAMETER.finditer(head.replace(".ptr .global .align 1 ", "").replace(".ptr .align 1 ", "")):
        size = int(parameter["kind"][1:]) // 8 * int(parameter["count"] or 1)
        taken.append((size, int(parameter["align"] or size)))
    given = [(size, alignment) for size, alignment, _ in parameters_of(function)]
    if taken != given:
        raise CompileError(
            f"the PTX of {function.name} must take the {len(given)} parameters that its signature says, got "
            f"{len(taken)} or others; Triton {triton.__version__} passes arguments in another way"
        )


def launch_text(source: Source, module: ModuleType) -> str:
    """Python that defines what a kernel's text says of its launches, and needs no kernel language to run.

    Functions of the host side stay as they are. Constants become their values; of a value in words of a kernel
    language, such as a layout, None is left.
    """
    tree = ast.parse(source.text)
    constants: dict[str, str] = {}
    functions = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            functions.append(ast.get_source_segment(source.text, node) or "")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            value = _literal(getattr(module, name))
            if value != "None":
                constants[name] = value
    lines = [f"{name} = {value}" for name, value in constants.items()]
    head = f'"""The host side of the kernel {source.digest}: its tables, grids and buffers."""\n\nimport triton\n'
    return "\n\n".join([f"{head}import triton.language as tl", "\n".join(lines), *functions]) + "\n"


def _literal(value: object) -> str:
    """A value as Python writes it; None where it is no plain one."""
    if isinstance(value, triton.language.constexpr):
        inner = _literal(value.value)
        return "None" if inner == "None" else f"tl.constexpr({inner})"
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_literal(item)}, " for item in value) + ")"
    return "None"
