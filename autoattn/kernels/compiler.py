"""Compiles a kernel's source to machine code; the only module that calls Triton's compiler."""

from __future__ import annotations

import contextlib
import hashlib
import io
import linecache
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, LazyDict
from triton.runtime.errors import OutOfResources

from autoattn.core.device import capabilities_of
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Source
from autoattn.errors import CompileError
from autoattn.kernels import assembler, cuda_driver, manifest
from autoattn.kernels.manifest import DealtSizes, Language, Manifest
from autoattn.kernels.sass import disassembler, loops

if TYPE_CHECKING:  # compilers start sooner without it: it takes most of their start
    import torch

# Bytes of local memory that a thread of a kernel with warpgroup products may use. Kernels with 3.7 KB and more gave
# wrong numbers and touched illegal memory on an H200 (Triton 3.6); winners need none to 1.4 KB.
MAX_SPILLED = 2048
BEFORE = "_before"  # behind the name of a kernel: the one that is launched before it


@lru_cache(maxsize=4096)
def load_module(source: Source) -> ModuleType:
    """Imports a rendered kernel from its text; no file is written.

    Triton reads a kernel's text through `inspect`, which asks `linecache`; so do tracebacks.
    """
    name = f"autoattn_rendered_{source.digest}"
    path = f"{name}.py"
    # An entry without a time is one that linecache never looks for on the disk.
    linecache.cache[path] = (len(source.text), None, source.text.splitlines(keepends=True), path)
    module = ModuleType(name)
    module.__file__ = path
    exec(compile(source.text, path, "exec"), module.__dict__)
    return module


def build(source: Source, arch: int, name: str | None = None) -> Any:
    """Compiles for compute capability `arch` (80, 90, ...), which need not be in this machine.

    Returns Triton's CompiledKernel; `compiled[grid](*arguments)` launches it where it fits the current device.

    Args:
        name: which kernel of the source; None is its main one.

    Raises:
        CompileError: the compiler refused, in its own words.
    """
    module = _imported(source)
    function = getattr(module, name or source.name)
    names = function.arg_names
    divisible = {argument: by for argument, by in module.DIVISIBLE.items() if argument in names}
    kernel = _ast_source(function)(
        fn=function,
        signature={argument: module.SIGNATURE[argument] for argument in names},
        constexprs={},
        attrs={(names.index(argument),): [["tt.divisibility", by]] for argument, by in divisible.items()},
    )
    facts = capabilities_of(arch)
    target = GPUTarget(facts.backend.value, arch, facts.warp_size)
    options = manifest.of(module).parts.get(name or "") or module.OPTIONS
    try:
        with triton.knobs.compilation.scope():
            # Part of Triton's cache key, so the same everywhere; line tables make a cubin four times as large.
            triton.knobs.compilation.disable_line_info = True
            # Every Triton up to 3.9 fuses by default; 3.9 warns that the next one will not.
            options = {**options, "enable_fp_fusion": True}
            silent = contextlib.redirect_stdout(io.StringIO())  # where Triton prints whole kernels that ptxas refuses
            with silent, assembler.stages(arch) as added:
                return triton.compile(kernel, target=target, options={**options, **added})
    except Exception as error:  # Triton raises many types, some of them bare RuntimeError
        reason = " ".join(str(error).split())[:300]
        raise CompileError(
            f"Triton {triton.__version__} cannot compile this variant for sm_{arch}: {reason}"
        ) from error


def _ast_source(function: Any) -> Any:
    """What Triton compiles a function from: each of its two languages has its own."""
    if not _in_gluon(function):
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _in_gluon(function: Any) -> bool:
    """Whether a kernel is written in Gluon rather than in Triton; a rendered file may hold both."""
    is_gluon = getattr(function, "is_gluon", None)  # of what the interpreter runs, there is no such question
    return is_gluon is not None and bool(is_gluon())


def _imported(source: Source) -> ModuleType:
    try:
        return load_module(source)
    except (ImportError, AttributeError) as error:  # Gluon is experimental: a release may lack or move it
        raise CompileError(f"Triton {triton.__version__} cannot import this variant: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """A kernel that is ready to launch on one device, or in an interpreter."""

    source: Source
    module: ModuleType
    compiled: Any  # Triton's CompiledKernel, or a LoadedFunction; None in an interpreter, and where there are parts
    device: torch.device
    sm_count: int
    name: str = ""  # of a part's function, which takes some of SIGNATURE; empty is a whole source's, which takes all
    before: Kernel | None = (
        None  # what takes the same arguments, on `manifest.grid_before`, and makes input ready for it
    )
    parts: tuple[Kernel, ...] = ()  # kernels that do the work together, in the order in which they are launched
    precompiled: str = ""  # which compiler made the machine code, where a file held it
    manifest: Manifest = field(init=False)  # what the module says of launches
    # (batch, heads, rows) -> what the manifest says of them
    dealt: dict[tuple[int, int, int], DealtSizes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "manifest", manifest.of(self.module))

    @property
    def parameters(self) -> Iterable[str]:
        """The names of what a launch takes, in its order."""
        names: Iterable[str] = self.manifest.signature
        if self.precompiled and self.compiled is not None:
            names = self.compiled.parameters
        elif self.name:
            names = getattr(self.module, self.name).arg_names
        return names

    def _interpret(self, grid: tuple[int], arguments: Mapping[str, object]) -> None:
        """Runs the kernel in Triton's interpreter, or in Gluon's."""
        name = self.name or self.source.name
        if self.manifest.language is not Language.GLUON:
            getattr(self.module, name)[grid](*(arguments[parameter] for parameter in self.parameters))
            return
        from autoattn.kernels.gluon_interpreter import module_loader

        assert isinstance(self.module, module_loader.InterpretedModule)
        module_loader.launch(self.module, name, grid, arguments)

    def launch(self, grid: tuple[int], arguments: Mapping[str, object]) -> None:
        """Launches on the current stream of the kernel's device; takes the arguments by their SIGNATURE names."""
        if self.compiled is None:
            self._interpret(grid, arguments)
            return
        ordered = [arguments[name] for name in self.parameters]
        import torch

        with torch.cuda.device(self.device):
            make_current(self.device)
            self.compiled[(*grid, 1, 1)](*ordered)


def make_current(device: torch.device) -> None:
    """Makes the driver know, on this thread, the context of the current device.

    PyTorch leaves that to the first call that needs one. In a thread where there was none yet, as in autograd's when
    attention is the last of a model, the driver refuses to encode a descriptor ("invalid device context").
    """
    try:
        known = current_contexts.known
    except AttributeError:
        known = current_contexts.known = set()
    if device.index in known:
        return
    import torch

    # The question is itself a call that makes a context current, and the only one that no capture forbids.
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.mem_get_info(device)  # cudaMemGetInfo: among the cheapest
        known.add(device.index)


current_contexts = threading.local()  # known: indices of the devices whose context a thread has


def load(source: Source, device: torch.device, *, ptx_arch: int | None = None) -> Kernel:
    """Compiles for the card `device` and makes the kernel ready to launch there.

    A CPU device gives a kernel that runs in the interpreter of its language: Triton's, in a process started with
    TRITON_INTERPRET=1, or Gluon's, in any.

    Args:
        ptx_arch: an older compute capability to write the PTX for, of which the driver then makes the card's machine
            code; so an Ampere kernel's numbers can be checked on Hopper. None means the card's own.

    Raises:
        CompileError: the compiler refused, or the kernel does not fit the card.
    """
    module = _imported(source)
    facts = manifest.of(module)
    if device.type == "cpu":
        return _interpreted(source, module, facts, device)
    import torch

    if device.index is None:  # launches ask for the stream of a numbered device
        device = torch.device(device.type, torch.cuda.current_device())
    if facts.parts:
        parts = [replace(_ready(source, module, device, ptx_arch, name), name=name) for name in facts.parts]
        return of_parts(parts)
    before = None
    if facts.grid_before is not None:
        before = _ready(source, module, device, ptx_arch, source.name + BEFORE)
    return replace(_ready(source, module, device, ptx_arch, source.name), before=before)


def _interpreted(source: Source, module: ModuleType, facts: Manifest, device: torch.device) -> Kernel:
    """A kernel for the interpreter of its language."""
    # Both import numpy; compilers need none.
    if facts.language is Language.GLUON:
        from autoattn.kernels.gluon_interpreter import module_loader

        assert module.__file__ is not None
        module = module_loader.load_module(module.__name__, module.__file__, source.text)
    else:
        from autoattn.kernels import interpreter

        interpreter.repair()
    kernel = Kernel(source=source, module=module, compiled=None, device=device, sm_count=1)
    if facts.grid_before is not None:
        kernel = replace(kernel, before=replace(kernel, name=source.name + BEFORE))
    return replace(kernel, parts=tuple(replace(kernel, name=name) for name in facts.parts))


def of_parts(parts: Sequence[Kernel]) -> Kernel:
    """One kernel of those that do its work together, in the order in which they are launched."""
    return replace(parts[0], name="", compiled=None, parts=tuple(parts))


def launch_hooks() -> tuple[Any, Any]:
    """Triton's launch hooks, before and after; None for one that is not set, and for a chain that holds none."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    enter, leave = (hook if getattr(hook, "calls", hook) else None for hook in hooks)
    return enter, leave


def launch_facts(facts: dict[str, object]) -> Any:
    """What Triton's launch hooks get of a launch."""
    return LazyDict(facts)


def _ready(source: Source, module: ModuleType, device: torch.device, ptx_arch: int | None, name: str) -> Kernel:
    import torch

    properties = torch.cuda.get_device_properties(device)
    compiled = build(source, ptx_arch or properties.major * 10 + properties.minor, name)
    if ptx_arch is not None:
        compiled.kernel = translated(compiled.asm["ptx"], device)
    try:
        with torch.cuda.device(device):
            compiled.run  # noqa: B018 - loads the module onto the card now, not at the first launch
    except OutOfResources as error:
        raise CompileError(f"this variant does not fit {properties.name}: {error}") from None
    _check_spills(compiled, compiled.n_spills * 4)
    return Kernel(
        source=source, module=module, compiled=compiled, device=device, sm_count=properties.multi_processor_count
    )


@lru_cache(maxsize=256)
def translated(ptx: str, device: torch.device) -> bytes:
    """The cubin that the driver makes for a card of a PTX text, which may be written for an older one.

    Raises:
        CompileError: the driver refused; it says why only in its number of the error.
    """
    import torch

    torch.cuda.synchronize(device)  # makes the card's context this thread's own
    return cuda_driver.link(ptx)


def inspect(source: Source, arch: int, *, ptx_arch: int | None = None) -> StaticReport:
    """Compiles and reads the machine code.

    Of kernels that work together, the report names the most that any of them needs, and all their code and loops.

    Args:
        ptx_arch: an older compute capability to write the PTX for; ptxas then makes code for `arch` of it, as the
            driver does where `load` is given the same.

    Raises:
        CompileError: the compiler refused, or it made code of warpgroup products that is no use.
    """
    names = manifest.of(_imported(source)).parts or (source.name,)
    reports = [_inspected(source, arch, ptx_arch, name) for name in names]
    return reports[0] if len(reports) == 1 else _together(reports)


def _inspected(source: Source, arch: int, ptx_arch: int | None, name: str) -> StaticReport:
    compiled = build(source, ptx_arch or arch, name)
    cubin = compiled.asm["cubin"] if ptx_arch is None else assembler.assemble(compiled.asm["ptx"], arch)
    report = disassembler.read(
        cubin,
        digest=source.digest,
        arch=arch,
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
    )
    _check_spills(compiled, report.spilled_bytes)
    module = load_module(source)
    if _in_gluon(getattr(module, name)) and (reason := disassembler.why_slow(report, cubin)):
        raise CompileError(f"this variant compiles for sm_{arch} into code that is not worth launching: {reason}")
    code = hashlib.sha256(compiled.asm["cubin"])
    code.update(repr((report.num_warps, report.shared_bytes, _launch_facts(module))).encode())
    if manifest.of(module).grid_before is not None:  # into Triton's cache, while the card is busy with another variant
        code.update(build(source, arch, name + BEFORE).asm["cubin"])
    return replace(report, code=code.hexdigest()[:16])


def _launch_facts(module: ModuleType) -> list[object]:
    """What the host side of a rendered kernel says: its tables, its functions, and the constants that they read."""
    facts: list[object] = []
    for name, value in sorted(vars(module).items()):
        if name in ("SIGNATURE", "DESCRIPTORS", "RAGGED", "PACK_GQA", "PARTS", "PERSISTENT"):
            facts.append((name, repr(value)))
        elif isinstance(value, FunctionType) and value.__module__ == module.__name__:  # Triton's are of other types
            read = [
                (symbol, repr(getattr(module, symbol))) for symbol in value.__code__.co_names if symbol in vars(module)
            ]
            facts.append((name, value.__code__.co_code, value.__code__.co_consts, read))
    return facts


def _together(reports: Sequence[StaticReport]) -> StaticReport:
    """One report of kernels that run one after another; loops are of those with tensor core products, if any has."""
    walks = [report for report in reports if any(name.startswith(loops.TENSOR) for name in report.loop)] or reports
    most = ("registers", "spilled_bytes", "shared_bytes", "num_warps")
    return replace(
        reports[0],
        code=hashlib.sha256(" ".join(report.code for report in reports).encode()).hexdigest()[:16],
        code_bytes=sum(report.code_bytes for report in reports),
        loop=dict(sum((Counter(walk.loop) for walk in walks), Counter())),
        masked_loop=dict(sum((Counter(walk.masked_loop) for walk in walks), Counter())),
        **{name: max(getattr(report, name) for report in reports) for name in most},
    )


def was_killed(error: CompileError) -> bool:
    """Whether ptxas or nvdisasm was killed, by a person or a system short of memory: the variant is not to blame."""
    cause, killed = error.__cause__, -signal.SIGKILL
    return getattr(cause, "returncode", 0) == killed or f"failed with error code {killed}" in str(cause)


def _check_spills(compiled: Any, spilled_bytes: int) -> None:
    if spilled_bytes > MAX_SPILLED and "wgmma" in compiled.asm["ptx"]:
        raise CompileError(
            f"kernels with warpgroup products must spill at most {MAX_SPILLED} bytes a thread to be trusted, got "
            f"{spilled_bytes}; choose smaller tiles or more warps"
        )
