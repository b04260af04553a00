"""Source -> machine code: the only door to Triton's compiler."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from autoattn import resources, sass
from autoattn.errors import CompileError
from autoattn.trial import StaticReport
from autoattn.variant import Source

WARP_SIZE = 32
# Bytes of local memory that a thread of a kernel with warpgroup products may use. Kernels with 3.7 KB and more gave
# wrong numbers and touched illegal memory on an H200 (Triton 3.6); winners need none to 1.4 KB.
MAX_SPILLED = 2048
AGAIN = "_again"  # behind the name of a kernel: the one that is launched after it


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


def build(source: Source, arch: int, *, again: bool = False) -> Any:
    """Compiles for compute capability `arch` (80, 90, ...), which need not be in this machine.

    Returns Triton's CompiledKernel; `compiled[grid](*arguments)` launches it where it fits the current device.

    Args:
        again: compile the kernel that is launched afterwards, not the first one; see `Kernel`.

    Raises:
        CompileError: the compiler refused, in its own words.
    """
    module = _imported(source)
    names = list(module.SIGNATURE)
    attributes = {(names.index(name),): [["tt.divisibility", by]] for name, by in module.DIVISIBLE.items()}
    function = getattr(module, source.name + AGAIN * again)
    kernel = _ast_source(function)(fn=function, signature=module.SIGNATURE, constexprs={}, attrs=attributes)
    try:
        with triton.knobs.compilation.scope():
            # Part of Triton's cache key, so the same everywhere; line tables make a cubin four times as large.
            triton.knobs.compilation.disable_line_info = True
            # Every Triton up to 3.9 fuses by default; 3.9 warns that the next one will not.
            options = {**module.OPTIONS, "enable_fp_fusion": True}
            with contextlib.redirect_stdout(io.StringIO()):  # where Triton prints whole kernels that ptxas refuses
                return triton.compile(kernel, target=GPUTarget("cuda", arch, WARP_SIZE), options=options)
    except Exception as error:  # Triton raises many types, some of them bare RuntimeError
        reason = " ".join(str(error).split())[:300]
        raise CompileError(
            f"Triton {triton.__version__} cannot compile this variant for sm_{arch}: {reason}"
        ) from error


def _ast_source(function: Any) -> Any:
    """What Triton compiles a function from: each of its two languages has its own."""
    if not (hasattr(function, "is_gluon") and function.is_gluon()):
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _imported(source: Source) -> ModuleType:
    try:
        return load_module(source)
    except (ImportError, AttributeError) as error:  # Gluon is experimental: a release may lack or move it
        raise CompileError(f"Triton {triton.__version__} cannot import this variant: {error}") from error


Addresses = tuple[int, ...]  # of a call's tensors, in bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """A launch of a compiled kernel of which all is known but what depends on where the call's tensors lie."""

    compiled: Any  # Triton's CompiledKernel
    index: int  # of the device
    grid: tuple[int, int, int]
    arguments: tuple[object, ...]  # in the signature's order; None where one is moving
    moving: tuple[tuple[int, Callable[[Addresses], object]], ...]  # (place among the arguments, argument by addresses)
    stream_of: Callable[[int], int]  # device -> handle of its current stream

    def __call__(self, addresses: Addresses) -> None:
        """Launches on the current stream of the kernel's device."""
        if torch.cuda.current_device() == self.index:
            self._launch(addresses)
            return
        with torch.cuda.device(self.index):
            self._launch(addresses)

    def _launch(self, addresses: Addresses) -> None:
        """What CompiledKernel.__getitem__ does; it costs microseconds that a bound launch is there to save.

        Addresses are passed as numbers, since Triton asks a tensor for its own, and then the driver whose it is.
        """
        arguments = list(self.arguments)
        for place, argument in self.moving:
            arguments[place] = argument(addresses)
        compiled, stream = self.compiled, self.stream_of(self.index)
        enter, leave = _set(triton.knobs.runtime.launch_enter_hook), _set(triton.knobs.runtime.launch_exit_hook)
        facts = None if enter is leave is None else compiled.launch_metadata(self.grid, stream, *arguments)
        compiled.run(*self.grid, stream, compiled.function, compiled.packed_metadata, facts, enter, leave, *arguments)


def _set(hook: Any) -> Any:
    """A launch hook; None for Triton's chain of hooks that holds none, which would be called all the same."""
    return hook if getattr(hook, "calls", True) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """A kernel that is ready to launch on one device, or in Triton's interpreter."""

    source: Source
    module: ModuleType
    compiled: Any  # Triton's CompiledKernel; None in the interpreter
    device: torch.device
    sm_count: int
    # What takes the same arguments, on the grid `module.grid_again`, and computes anew what the kernel could not.
    again: Kernel | None = None

    def launch(self, grid: tuple[int], arguments: Mapping[str, object]) -> None:
        """Launches on the current stream of the kernel's device; takes the arguments by their SIGNATURE names."""
        ordered = [arguments[name] for name in self.module.SIGNATURE]
        if self.compiled is None:
            getattr(self.module, self.source.name)[grid](*ordered)
            return
        with torch.cuda.device(self.device):
            self.compiled[(*grid, 1, 1)](*ordered)

    def bind(
        self,
        grid: tuple[int],
        arguments: Mapping[str, object],
        moving: Mapping[str, Callable[[Addresses], object]],
    ) -> Bound:
        """The launch of `launch`, ready for tensors that lie elsewhere.

        Args:
            moving: for each argument that depends on where the tensors lie, what makes it of their addresses; what is
                costly to make, as a descriptor, is kept by address there.
        """
        names = list(self.module.SIGNATURE)
        return Bound(
            compiled=self.compiled,
            index=self.device.index,
            grid=(*grid, 1, 1),
            arguments=tuple(None if name in moving else arguments[name] for name in names),
            moving=tuple((names.index(name), argument) for name, argument in moving.items() if name in names),
            stream_of=driver.active.get_current_stream,
        )


def load(source: Source, device: torch.device) -> Kernel:
    """Compiles for the card `device` and makes the kernel ready to launch there.

    A CPU device gives a kernel that runs in Triton's interpreter, in a process started with TRITON_INTERPRET=1.

    Raises:
        CompileError: the compiler refused, or the kernel does not fit the card.
    """
    module = _imported(source)
    if device.type == "cpu":
        if hasattr(module, "DESCRIPTORS"):
            raise CompileError("Triton's interpreter does not run Gluon; load this variant on a GPU")
        return Kernel(source=source, module=module, compiled=None, device=device, sm_count=1)
    again = _ready(source, module, device, again=True) if hasattr(module, source.name + AGAIN) else None
    return replace(_ready(source, module, device), again=again)


def _ready(source: Source, module: ModuleType, device: torch.device, *, again: bool = False) -> Kernel:
    properties = torch.cuda.get_device_properties(device)
    compiled = build(source, properties.major * 10 + properties.minor, again=again)
    try:
        with torch.cuda.device(device):
            compiled.run  # noqa: B018 - loads the module onto the card now, not at the first launch
    except OutOfResources as error:
        raise CompileError(f"this variant does not fit {properties.name}: {error}") from None
    _check_spills(compiled, compiled.n_spills * 4)
    return Kernel(
        source=source, module=module, compiled=compiled, device=device, sm_count=properties.multi_processor_count
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What Triton's launcher asks of a tensor to make a TMA descriptor of it."""

    address: int  # a multiple of 16
    shape: tuple[int, ...]  # [batch, heads, seq, head_dim]
    strides: tuple[int, ...]  # in elements; multiples of 16 bytes, but the last, which is 1
    padding: str = "zero"

    @classmethod
    def of(cls, tensor: Tensor) -> Descriptor:
        """Of a [batch, heads, seq, head_dim] view."""
        shape, strides = tuple(tensor.shape), tensor.stride()
        # An axis of one element may step by anything, which the TMA unit would refuse.
        steps = [step if size > 1 else -(-shape[-1] // 8) * 8 for size, step in zip(shape, strides, strict=True)]
        return cls(address=tensor.data_ptr(), shape=shape, strides=(*steps[:-1], 1))

    @property
    def base(self) -> Descriptor:
        """Where Triton looks for the address."""
        return self

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def inspect(source: Source, arch: int) -> StaticReport:
    """Compiles and reads the machine code.

    Raises:
        CompileError: the compiler refused, or it made code of warpgroup products that is no use.
    """
    compiled = build(source, arch)
    report = sass.read(
        compiled.asm["cubin"],
        digest=source.digest,
        arch=arch,
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
    )
    _check_spills(compiled, report.spilled_bytes)
    module = load_module(source)
    if hasattr(module, "DESCRIPTORS") and (reason := sass.why_slow(report, compiled.asm["cubin"])):
        raise CompileError(f"this variant compiles for sm_{arch} into code that is not worth launching: {reason}")
    if hasattr(module, source.name + AGAIN):
        build(source, arch, again=True)  # into Triton's cache, while the card is busy with another variant
    return report


def _check_spills(compiled: Any, spilled_bytes: int) -> None:
    if spilled_bytes > MAX_SPILLED and "wgmma" in compiled.asm["ptx"]:
        raise CompileError(
            f"kernels with warpgroup products must spill at most {MAX_SPILLED} bytes a thread to be trusted, got "
            f"{spilled_bytes}; choose smaller tiles or more warps"
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
