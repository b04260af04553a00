"""Source -> machine code: the only door to Triton's compiler."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources

from autoattn import resources, sass
from autoattn.errors import CompileError
from autoattn.trial import StaticReport
from autoattn.variant import Source

WARP_SIZE = 32


@lru_cache(maxsize=4096)
def load_module(source: Source) -> ModuleType:
    """Imports a rendered kernel; Triton reads a kernel's text from its file, so the file is kept."""
    path = _kept_file(source)
    spec = importlib.util.spec_from_file_location(f"autoattn_rendered_{source.digest}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(source: Source, arch: int) -> Any:
    """Compiles for compute capability `arch` (80, 90, ...), which need not be in this machine.

    Returns Triton's CompiledKernel; `compiled[grid](*arguments)` launches it where it fits the current device.

    Raises:
        CompileError: the compiler refused, in its own words.
    """
    module = load_module(source)
    names = list(module.SIGNATURE)
    attributes = {(names.index(name),): [["tt.divisibility", by]] for name, by in module.DIVISIBLE.items()}
    kernel = ASTSource(fn=getattr(module, source.name), signature=module.SIGNATURE, constexprs={}, attrs=attributes)
    try:
        with triton.knobs.compilation.scope():
            # Part of Triton's cache key, so the same everywhere; line tables make a cubin four times as large.
            triton.knobs.compilation.disable_line_info = True
            # Every Triton up to 3.9 fuses by default; 3.9 warns that the next one will not.
            options = {**module.OPTIONS, "enable_fp_fusion": True}
            return triton.compile(kernel, target=GPUTarget("cuda", arch, WARP_SIZE), options=options)
    except Exception as error:  # Triton raises many types, some of them bare RuntimeError
        reason = " ".join(str(error).split())[:300]
        raise CompileError(
            f"Triton {triton.__version__} cannot compile this variant for sm_{arch}: {reason}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """A kernel that is ready to launch on one device, or in Triton's interpreter."""

    source: Source
    module: ModuleType
    compiled: Any  # Triton's CompiledKernel; None in the interpreter
    device: torch.device
    sm_count: int

    def launch(self, grid: tuple[int], arguments: Mapping[str, object]) -> None:
        """Launches on the current stream of the kernel's device; takes the arguments by their SIGNATURE names."""
        ordered = [arguments[name] for name in self.module.SIGNATURE]
        if self.compiled is None:
            getattr(self.module, self.source.name)[grid](*ordered)
            return
        with torch.cuda.device(self.device):
            self.compiled[(*grid, 1, 1)](*ordered)


def load(source: Source, device: torch.device) -> Kernel:
    """Compiles for the card `device` and makes the kernel ready to launch there.

    A CPU device gives a kernel that runs in Triton's interpreter, in a process started with TRITON_INTERPRET=1.

    Raises:
        CompileError: the compiler refused, or the kernel does not fit the card.
    """
    module = load_module(source)
    if device.type == "cpu":
        return Kernel(source=source, module=module, compiled=None, device=device, sm_count=1)
    properties = torch.cuda.get_device_properties(device)
    compiled = build(source, properties.major * 10 + properties.minor)
    try:
        with torch.cuda.device(device):
            compiled.run  # noqa: B018 - loads the module onto the card now, not at the first launch
    except OutOfResources as error:
        raise CompileError(f"this variant does not fit {properties.name}: {error}") from None
    return Kernel(
        source=source, module=module, compiled=compiled, device=device, sm_count=properties.multi_processor_count
    )


def inspect(source: Source, arch: int) -> StaticReport:
    """Compiles and reads the machine code."""
    compiled = build(source, arch)
    return sass.read(
        compiled.asm["cubin"],
        digest=source.digest,
        arch=arch,
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
    )


def _kept_file(source: Source) -> Path:
    folder = resources.user_cache() / "rendered"
    path = folder / f"{source.digest}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source.text)
        os.replace(temporary, path)  # atomic: another process may be writing the same text
    return path
