"""Compiles ahead what calls will need, so that none of them waits for a compiler.

Kernels go to Triton's cache, where every process of this user finds them; those whose machine code a cache folder has
are ready as they are. Nothing is launched, so that a machine without the card can fill the cache of an image that runs
on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from autoattn.cache import inventory, whole_files
from autoattn.codegen import precompiled, render, search_space
from autoattn.codegen.precompiled import PrecompiledKernel
from autoattn.core import kernel_kind
from autoattn.core.device import Device
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.problem import Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Source, Variant
from autoattn.errors import CacheError, DeviceError, HostError
from autoattn.hardware import nvidia
from autoattn.runtime.plan import machine_code, needed_kernels
from autoattn.runtime.plan.needed_kernels import Answer, Need
from autoattn.shapes import shapes_file
from autoattn.workers.compile_job import Inspect, Precompile
from autoattn.workers.worker_pool import Failure, Pool, cores

COMPILE_SECONDS = 120.0  # for one kernel; those of Hopper take up to ten


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmKernel:
    """What became of one answer of a problem."""

    problem: Problem
    answer: Answer
    variant: Variant | None  # of the kernel that is ready; None where there is none
    reason: str  # why there is none, or why it is not the first choice; empty where it is
    refused: bool = False  # whether the compiler refused all kernels of the answer
    precompiled: str = ""  # which compiler made the machine code that a cache folder has, so that none was asked

    def __str__(self) -> str:
        if self.variant is None:
            return f"{self.problem}, {self.answer.value}: no kernel, {self.reason}"
        instead = f" ({self.reason})" if self.reason else ""
        ready = f", {self.precompiled}" if self.precompiled else ""
        tile = search_space.load(self.variant.template).tile_of(self.variant)
        return f"{self.problem}, {self.answer.value}: {self.variant.template} {tile}{ready}{instead}"


def warm(
    problems: str | Path | Iterable[Problem],
    device: str | None = None,
    *,
    cache: Path | None = None,
    jobs: int | None = None,
) -> list[WarmKernel]:
    """Compiles the kernels that calls of these problems need: the output, the output with the LSE, and the gradients.

    Args:
        problems: a shapes file, or problems.
        device: a name, as "h200", or "auto"; the GPU of this machine if None.
        cache: the only cache to read; the user's over the shipped one if None.
        jobs: compiler processes; one for each core if None.

    Returns:
        What became of each answer of each problem, in the order in which it was known.

    Raises:
        ShapesError: the shapes file is none.
        DeviceError: there is no such device, or no GPU in this machine.
        HostError: the machine cannot compile: a disk is full, a program is missing.
    """
    if isinstance(problems, str | Path):
        problems = [named.problem for named in shapes_file.load(Path(problems))]
    card = nvidia.resolve(device)[0] if device is not None else nvidia.present()
    if card is None:
        raise DeviceError("warm needs an NVIDIA GPU in this machine, or device=NAME; give the device to compile for")
    return list(kernels_of(problems, card, cache=cache, jobs=jobs))


def kernels_of(
    problems: Iterable[Problem],
    card: Device,
    *,
    cache: Path | None = None,
    jobs: int | None = None,
    keep: Path | None = None,
) -> Iterator[WarmKernel]:
    """The same for a known card, each as soon as it is known.

    Args:
        keep: a cache folder that gets the machine code too, as precompiled kernels.
    """
    choices = [
        _Choice(need=need, sources=need.sources(card))
        for problem in dict.fromkeys(problems)
        for need in needed_kernels.of_call(problem, card, cache)
    ]
    with Pool(size=max(1, min(len(choices), jobs or cores()))) as pool:
        yield from _Compilation(pool, card.arch, keep, cache).run(choices)


_Kernel = tuple[Source, KernelKind]


@dataclass(slots=True, kw_only=True)
class _Choice:
    """A need, and the kernels that are left to try for it."""

    need: Need
    sources: Iterator[Source]
    refusals: list[str] = field(default_factory=list)

    def ready(self, source: Source, precompiled: str = "") -> WarmKernel:
        """A kernel is compiled, now or before."""
        return self._outcome(source.variant, self.refusals[0] if self.refusals else "", precompiled)

    def nothing_left(self) -> WarmKernel:
        """No kernel is left: the compiler refused them all, or PyTorch's attention answers."""
        return self._outcome(None, self.refusals[0] if self.refusals else self.need.explanation.reason)

    def _outcome(self, variant: Variant | None, reason: str, precompiled: str = "") -> WarmKernel:
        return WarmKernel(
            problem=self.need.problem,
            answer=self.need.answer,
            variant=variant,
            reason=reason,
            refused=variant is None and bool(self.refusals),
            precompiled=precompiled,
        )


class _Compilation:
    """Compiles each distinct kernel once; where one is refused, its needs go on to their next."""

    def __init__(self, pool: Pool, arch: int, keep: Path | None, cache: Path | None) -> None:
        self.pool, self.arch, self.keep, self.cache = pool, arch, keep, cache
        self.refusals: dict[_Kernel, str | None] = {}  # None: it is compiled
        self.waiting: dict[_Kernel, list[_Choice]] = {}
        self.tickets: dict[int, _Kernel] = {}

    def run(self, choices: list[_Choice]) -> Iterator[WarmKernel]:
        """What becomes of each choice, as soon as it is known."""
        while choices or self.tickets:
            for choice in choices:
                yield from self._advance(choice)
            choices = []
            for ticket, result in self.pool.next_results():
                kernel = self.tickets.pop(ticket)
                self.refusals[kernel] = refusal = self._refusal_of(kernel, result)
                for choice in self.waiting.pop(kernel):
                    if refusal is None:
                        yield choice.ready(kernel[0])
                    else:
                        choice.refusals.append(refusal)
                        choices.append(choice)

    def _advance(self, choice: _Choice) -> Iterator[WarmKernel]:
        """Goes down the kernels of a choice, to one that is compiled or has to be."""
        for source in choice.sources:
            kernel = source, kernel_kind.of(choice.need.problem)
            if self.keep is None and (stored := self._stored(choice.need.problem, source)) is not None:
                yield choice.ready(source, str(stored))
                return
            if kernel not in self.refusals and self.keep is not None and self._kept(*kernel, self.keep):
                self.refusals[kernel] = None
            if kernel not in self.refusals:
                if kernel not in self.waiting:
                    self.tickets[self.pool.submit(self._job(*kernel), COMPILE_SECONDS)] = kernel
                self.waiting.setdefault(kernel, []).append(choice)
                return
            if (refusal := self.refusals[kernel]) is None:
                yield choice.ready(source)
                return
            choice.refusals.append(refusal)
        yield choice.nothing_left()

    def _job(self, source: Source, kind: KernelKind) -> Inspect | Precompile:
        if self.keep is None:
            return Inspect(source=source, arch=self.arch)
        return Precompile(source=source, kind=kind, arch=self.arch)

    def _stored(self, problem: Problem, source: Source) -> PrecompiledKernel | None:
        """The machine code that calls take without a compiler; None where no cache folder has any."""
        return machine_code.find(problem, source.variant, source.traits, self.arch, self.cache)

    def _kept(self, source: Source, kind: KernelKind, keep: Path) -> bool:
        """Whether the folder has the kernel, of the text that the templates give now, from whichever compiler.

        One that another cache folder has is copied.
        """
        key = precompiled.key_of(kind, source.variant, source.traits)
        for folder in dict.fromkeys((keep, *inventory.folders(self.cache))):
            try:
                kernel = precompiled.read(precompiled.path_of(folder, self.arch, key))
            except CacheError:
                continue
            if kernel is None or kernel.text != render.text_of(
                kind, source.variant, source.traits, kernel.facts.release
            ):
                continue
            if folder != keep:
                whole_files.write_new(precompiled.path_of(keep, self.arch, key), precompiled.encode(kernel))
            return True
        return False

    def _refusal_of(self, kernel: _Kernel, result: StaticReport | bytes | Failure) -> str | None:
        """Why a kernel was not compiled; None where it was, and the folder has it."""
        if isinstance(result, Failure):
            if result.outcome.of_environment:
                raise HostError(result.detail)
            return result.detail
        if isinstance(result, bytes) and self.keep is not None:
            source, kind = kernel
            key = precompiled.key_of(kind, source.variant, source.traits)
            whole_files.write_new(precompiled.path_of(self.keep, self.arch, key), result)
        return None
