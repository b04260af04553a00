"""Cached entries -> are they still right? On the card when it is here, else by digests and the interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoattn import cache, gpu, space
from autoattn.device import Device
from autoattn.entry import CacheEntry
from autoattn.errors import UsageError
from autoattn.jobs import Screened
from autoattn.problem import Problem
from autoattn.workers import Failure
from autoattn.workshop import Workshop


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What became of one entry."""

    problem: Problem
    ok: bool
    detail: str


def verify(entries: Iterable[CacheEntry], device: Device) -> list[Verification]:
    """Checks that each entry is up to date, then the kernel's numbers.

    An entry whose variant renders as another text than the one that was tuned is stale, which counts as not ok.
    """
    card = gpu.present()
    measured = card is not None and card.fingerprint == device.fingerprint
    with Workshop(device, measured=measured) as shop:
        return [_verify(entry, device, shop) for entry in entries]


def _verify(entry: CacheEntry, device: Device, shop: Workshop) -> Verification:
    def failed(detail: str) -> Verification:
        return Verification(problem=entry.problem, ok=False, detail=detail)

    if (stale := cache.why_stale(entry)) is not None:
        return failed(f"stale: {stale}")
    try:
        reason = space.load(entry.template).why_infeasible(entry.variant, entry.problem, device)
    except UsageError as error:
        return failed(str(error))
    if reason is not None:
        return failed(f"infeasible by now: {reason}")
    result = shop.check(entry.problem, entry.variant)
    if isinstance(result, Failure):
        return failed(f"{result.outcome.value}: {result.detail}")
    if isinstance(result, Screened):
        detail = f"{result.verdict.checks} checks on the GPU; {result.median_us:.1f} us, was {entry.time_us:.1f} us"
        return Verification(problem=entry.problem, ok=True, detail=detail)
    detail = f"digests agree; {result.checks} checks of its structure in the interpreter"
    return Verification(problem=entry.problem, ok=result.ok, detail=detail if result.ok else result.reason)
