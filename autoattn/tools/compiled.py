"""The machine code of cached kernels: compiles it for a folder or a bundle, adds it to a cache, and verifies it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from autoattn.cache import inventory, whole_files
from autoattn.cache.file_format import CacheFile
from autoattn.codegen import precompiled, render
from autoattn.codegen.precompiled import PrecompiledKernel
from autoattn.core import device_profiles, triton_release
from autoattn.core.cache_entry import KERNEL
from autoattn.core.problem import Problem
from autoattn.core.variant import Source
from autoattn.errors import AutoattnError, CacheError, DeviceError
from autoattn.runtime import warm_up
from autoattn.runtime.warm_up import COMPILE_SECONDS
from autoattn.workers.compile_job import Precompile
from autoattn.workers.worker_pool import Failure, Pool, cores


def problems_of(cache: Path, arch: int) -> list[Problem]:
    """The problems of a cache folder that were tuned on cards of an architecture.

    Raises:
        CacheError: the folder or one of its files cannot be read.
    """
    problems: list[Problem] = []
    for _folder, file in inventory.read(cache):
        try:
            tuned_arch = device_profiles.named(file.device).arch
        except DeviceError:  # a card that nobody described has no architecture that is known here
            continue
        if tuned_arch == arch:
            problems += [entry.problem for entry in file.entries.values()]
    return problems


def of_entries(files: Iterable[CacheFile], cache: Path | None = None) -> list[PrecompiledKernel]:
    """The kernels that calls of the entries' problems need, with machine code; compiles those that no folder has.

    Args:
        cache: the only cache to read; the user's over the shipped one when None.

    Raises:
        DeviceError: a file is of a device that nobody described.
        HostError: the machine cannot compile.
    """
    with tempfile.TemporaryDirectory(prefix="autoattn-compiled-") as folder:
        kept = Path(folder)
        for file in files:
            problems = [entry.problem for entry in file.entries.values() if entry.choice == KERNEL]
            card = device_profiles.named(file.device)
            for _ in warm_up.kernels_of(problems, card, cache=cache, keep=kept):
                pass
        kernels = [precompiled.read(path) for path in precompiled.paths_in(kept)]
    return [kernel for kernel in kernels if kernel is not None]


def add(cache: Path, kernels: Iterable[PrecompiledKernel]) -> int:
    """Adds kernels to a cache folder, but for those that it has with the same text; returns how many it took.

    Raises:
        CacheError: the folder cannot be written.
    """
    taken = 0
    for kernel in kernels:
        path = precompiled.path_of(cache, kernel.facts.arch, kernel.facts.key)
        try:
            known = precompiled.read(path)
        except CacheError:  # a damaged one makes way
            known = None
        if known is None or known.facts.digest != kernel.facts.digest:
            whole_files.write_new(path, precompiled.encode(kernel))
            taken += 1
    return taken


def prune(cache: Path, arch: int) -> int:
    """Removes kernels of a cache folder whose text the templates do not give by now; returns how many.

    Raises:
        CacheError: the folder cannot be written.
    """
    removed = 0
    for path in precompiled.paths_in(cache, arch):
        finding = _read(path)[1]
        if finding is not None and finding.finding in (CodeFinding.STALE, CodeFinding.DAMAGED):
            whole_files.remove(path)
            removed += 1
    return removed


class CodeFinding(str, Enum):
    """What a verification finds of machine code."""

    SAME = "same"  # compiling gives the same bytes
    UNCHECKED = "unchecked"  # its text is right, and another Triton compiled it
    STALE = "stale"  # the templates give another text by now
    DIFFERENT = "different"  # the same compiler gives other bytes
    DAMAGED = "damaged"  # the file is not what it says


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVerification:
    """What became of one precompiled kernel."""

    path: Path
    finding: CodeFinding
    detail: str

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against it."""
        return self.finding in (CodeFinding.SAME, CodeFinding.UNCHECKED)


def verify(cache: Path, arch: int, jobs: int | None = None) -> Iterator[CodeVerification]:
    """Renders and compiles the kernels of a cache folder again, and compares texts and machine code.

    Args:
        arch: of the kernels that are verified.
        jobs: compiler processes; one for each core if None.

    Raises:
        CacheError: the folder cannot be read.
    """
    paths = precompiled.paths_in(cache, arch)
    if not paths:
        return
    with Pool(size=max(1, min(len(paths), jobs or cores()))) as pool:
        waiting: dict[int, tuple[Path, PrecompiledKernel]] = {}
        for path in paths:
            kernel, finding = _read(path)
            if kernel is None or finding is not None:
                assert finding is not None
                yield finding
                continue
            facts = kernel.facts
            source = Source(name=facts.name, text=kernel.text, variant=facts.variant, traits=facts.traits)
            ticket = pool.submit(Precompile(source=source, kind=facts.kind, arch=arch), COMPILE_SECONDS)
            waiting[ticket] = path, kernel
        while waiting:
            for ticket, result in pool.next_results():
                yield _compared(*waiting.pop(ticket), result)


def _read(path: Path) -> tuple[PrecompiledKernel | None, CodeVerification | None]:
    """The kernel of a file that is to be compiled again, else what was found without that."""
    try:
        kernel = precompiled.read(path)
        if kernel is None:
            raise CacheError(f"the precompiled kernel {path} has gone")
        facts = kernel.facts
        text = render.text_of(facts.kind, facts.variant, facts.traits, facts.release)
    except AutoattnError as error:
        return None, CodeVerification(path=path, finding=CodeFinding.DAMAGED, detail=str(error))
    if text != kernel.text:
        detail = f"the templates give another text for {facts.variant.template}; run autoattn cache compile"
        return None, CodeVerification(path=path, finding=CodeFinding.STALE, detail=detail)
    if facts.compiler != triton_release.installed():
        detail = f"compiled with Triton {facts.compiler}, and {triton_release.installed()} is installed"
        return None, CodeVerification(path=path, finding=CodeFinding.UNCHECKED, detail=detail)
    return kernel, None


def _compared(path: Path, kernel: PrecompiledKernel, result: bytes | Failure) -> CodeVerification:
    if isinstance(result, Failure):
        return CodeVerification(path=path, finding=CodeFinding.DIFFERENT, detail=result.detail)
    again = precompiled.decode(result, path)
    same = again.facts == kernel.facts and again.launch_text == kernel.launch_text
    detail = f"{kernel}, {len(kernel.code)} functions"
    if not same:
        detail = f"Triton {kernel.facts.compiler} gives other machine code or facts of launches by now"
    return CodeVerification(path=path, finding=CodeFinding.SAME if same else CodeFinding.DIFFERENT, detail=detail)
