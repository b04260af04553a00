"""ptxas: which of those that Triton brings assembles a kernel, what it gets, and assembling without Triton's compiler.

Since 3.9, Triton assembles for Hopper with the ptxas of CUDA 13 and asks it for `--regAllocOptLevel=2`. Attention's
kernels lose by it: the dense winner of head dim 128 under a causal mask has 330 stores of spilled registers, and 190
where the ptxas of CUDA 12.9 assembles it, which the same wheel brings along. On an H200 the 26 problems of
benchmarks/shapes/h200_dense.yaml run at 0.968 of their speed with Triton 3.6, and at 0.986 with the older ptxas
(benchmarks/results/2026-11-23_h200_tritons.md). So kernels for Hopper are assembled with the older one, as
Triton 3.6 to 3.8 do. Before that, their PTX is laid out (code_layout.py).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton

from autoattn.errors import CompileError
from autoattn.kernels import code_layout

HOPPER = 90
_CUDA_13_PTXAS = "ptxas_blackwell"  # Triton's name of the newer one, also where it assembles for Hopper
_OVERRIDE = "TRITON_PTXAS_BLACKWELL_PATH"  # by which a user names another; it is left alone
_SECONDS = 120
# What ptxas does anyway. It tells laid-out kernels apart in Triton's cache; one more of it for each other layout.
_MARK = "-O3"
_installing = threading.RLock()  # the hook is Triton's for the whole process


@contextmanager
def stages(arch: int) -> Iterator[Mapping[str, object]]:
    """Lets this thread's compilations for `arch` lay out their code, and use the older ptxas, where that helps.

    Gives the options that such a compilation takes besides: they are part of Triton's cache key, so that its other
    compilations find none of these kernels.
    """
    if arch != HOPPER:
        yield {}
        return
    tool, runtime = _older(), triton.knobs.runtime
    options: dict[str, object] = {"ptx_options": " ".join((triton.knobs.nvidia.ptxas_options or "", _MARK)).strip()}
    if tool is not None:
        from triton.backends.nvidia.compiler import ptx_get_version

        options["ptx_version"] = ptx_get_version(tool.version)  # which the older ptxas reads
    with _installing:
        before = runtime.add_stages_inspection_hook
        runtime.add_stages_inspection_hook = _hook(tool, threading.get_ident(), before)
        try:
            yield options
        finally:
            runtime.add_stages_inspection_hook = before


def _older() -> Any | None:
    """Triton's older ptxas, where the installed Triton assembles for Hopper with a newer one by itself."""
    from triton.backends.nvidia import compiler

    choose = getattr(compiler, "get_ptxas", None)
    if choose is None or os.environ.get(_OVERRIDE):
        return None
    try:
        older, chosen = triton.knobs.nvidia.ptxas, choose(HOPPER)
    except (AttributeError, RuntimeError):  # a release that brings only one
        return None
    return older if _version(older) < _version(chosen) else None


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))


def _hook(tool: Any | None, thread: int, before: Callable[..., Any] | None) -> Callable[..., Any]:
    """What Triton calls once without arguments, for a cache key, and once to look at the stages of a compilation."""

    def hook(backend: Any = None, stages: Any = None, options: Any = None, *rest: Any) -> tuple[str, str] | None:
        if backend is None:
            key, digest = before() if before is not None else ("", "")
            ours = f"ptxas {tool.version}" if tool is not None and threading.get_ident() == thread else ""
            return key + ours, digest + ours
        if before is not None:
            before(backend, stages, options, *rest)
        if threading.get_ident() == thread:
            write = stages["ptx"]
            stages["ptx"] = lambda source, metadata: code_layout.rare_code_last(write(source, metadata))
            if tool is not None:
                flags = options.ptx_options.split()
                stages["cubin"] = lambda ptx, metadata: _assembled(ptx, tool.path, f"sm_{HOPPER}a", flags)
        return None

    return hook


def assemble(ptx: str, arch: int) -> bytes:
    """The cubin that Triton's ptxas makes for `arch` of a PTX text, which may be written for an older one.

    Raises:
        CompileError: ptxas refused.
    """
    try:
        return _assembled(ptx, triton.knobs.nvidia.ptxas.path, f"sm_{arch}", [])
    except RuntimeError as error:
        raise CompileError(f"ptxas must make code for sm_{arch} of an older PTX, but {error}") from error


def _assembled(ptx: str, ptxas: str, name: str, flags: list[str]) -> bytes:
    """Raises RuntimeError in the words that Triton has for it: `was_killed` of compile reads them."""
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_text(ptx, encoding="utf-8")
        lines = ["-lineinfo", "-suppress-debug-info"]
        command = [ptxas, *lines, *flags, f"--gpu-name={name}", str(text), "-o", str(cubin)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(f"`ptxas` did not run: {error}") from error
        if result.returncode:
            said = " ".join(result.stderr.split())
            raise RuntimeError(f"`ptxas` failed with error code {result.returncode}: {said}")
        return cubin.read_bytes()
