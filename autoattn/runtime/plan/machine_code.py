"""Finds the precompiled kernel of a variant in the cache folders; a call that has one waits for no compiler."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from autoattn.cache import inventory
from autoattn.codegen import precompiled, render, resources
from autoattn.codegen.precompiled import PrecompiledKernel
from autoattn.core import kernel_kind
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.problem import Problem
from autoattn.core.variant import Source, Traits, Variant
from autoattn.errors import AutoattnError, CacheError, CompileError
from autoattn.kernels import compiler, precompiled_kernel, precompiler
from autoattn.kernels.compiler import Kernel

_logger = logging.getLogger("autoattn")
MAX_KERNELS = 4096  # that are known to be there, or not
_known: dict[tuple[KernelKind, Variant, Traits, int, tuple[Path, ...]], PrecompiledKernel | None] = {}


def find(
    problem: Problem, variant: Variant, traits: Traits, arch: int, folder: Path | None = None
) -> PrecompiledKernel | None:
    """The precompiled kernel that is of the text which would be compiled; None where there is none.

    Of a file that cannot be used, a warning tells.

    Args:
        arch: compute capability of the card, as 90.
        folder: the only cache to read; the user's over the shipped one when None.
    """
    folders = inventory.folders(folder)
    key = kernel_kind.of(problem), variant, traits, arch, folders
    if key not in _known:
        if len(_known) >= MAX_KERNELS:
            _known.clear()
        _known[key] = _first(problem, variant, traits, arch, folders)
    return _known[key]


def load(kernel: PrecompiledKernel, variant: Variant, traits: Traits, index: int) -> Kernel | None:
    """The kernel on a card; None, after a warning, where the driver refuses its machine code."""
    try:
        return _load_once(kernel, variant, traits, index)
    except CompileError as error:
        _warn(str(error))
        return None


def known() -> list[PrecompiledKernel | None]:
    """What `find` has answered since `forget`."""
    return list(_known.values())


def forget() -> None:
    """Looks into the folders anew from now on."""
    _known.clear()


@cache
def _load_once(kernel: PrecompiledKernel, variant: Variant, traits: Traits, index: int) -> Kernel:
    source = Source(name=kernel.facts.name, text=kernel.text, variant=variant, traits=traits)
    return precompiled_kernel.load(kernel, source, torch.device("cuda", index))


def _first(
    problem: Problem, variant: Variant, traits: Traits, arch: int, folders: tuple[Path, ...]
) -> PrecompiledKernel | None:
    name = precompiled.key_of(kernel_kind.of(problem), variant, traits)
    for folder in folders:
        try:
            kernel = precompiled.read(precompiled.path_of(folder, arch, name))
            if kernel is None:
                continue
            if resources.is_installed() and folder == resources.shipped_cache():
                return kernel
            if (same := _rendered_anew(kernel, problem, variant, traits)) is not None:
                return same
        except CacheError as error:
            _warn(str(error))
    return None


def _rendered_anew(
    kernel: PrecompiledKernel, problem: Problem, variant: Variant, traits: Traits
) -> PrecompiledKernel | None:
    """The kernel with the text that the templates give, of which it must be; no Python of a foreign file is run."""
    try:
        source = render.render(problem, variant, traits, release=kernel.facts.release)
        if source.digest != kernel.facts.digest:
            return None
        launch_text = precompiler.launch_text(source, compiler.load_module(source))
    except (AutoattnError, ImportError, AttributeError):  # this Triton lacks what the text imports
        return None
    return replace(kernel, text=source.text, launch_text=launch_text)


def _warn(reason: str) -> None:
    """Tells that a call waits for the compiler though machine code is there."""
    message = f"{reason}; the kernel is compiled in its place"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    if logging.root.handlers or _logger.handlers:
        _logger.warning(message)
