"""The sentences of a look-up, each formed when somebody reads it."""

from __future__ import annotations

from enum import Enum

import torch
import triton

from autoattn.baselines.pytorch_sdpa import BACKENDS, SDPA
from autoattn.cache.sister_cards import SisterCard
from autoattn.core.cache_entry import KERNEL, OURS, CacheEntry
from autoattn.core.device import Device
from autoattn.core.variant import Variant
from autoattn.runtime.plan.reasons import Text, formed


def default_reason(template: str) -> str:
    """Why a default runs."""
    return f"no tuned entry can serve it, so a default of {template} runs; autoattn tune finds a better one"


def portfolio_reason(template: str) -> str:
    """Why a portfolio's choice runs."""
    return (
        f"no tuned entry is near enough, so a kernel of {template} runs that the portfolio has for these sizes; "
        "autoattn tune may find a faster one"
    )


def without_default(why_not: Text) -> str:
    """Of a template that has none."""
    return f"default: {formed(why_not)}"


def predicted(device: Device) -> str:
    """Why the prediction for a problem is asked."""
    return f"predicted for {device.name}, not measured"


def distance_reason(entry: CacheEntry, octaves: float) -> str:
    """Why the entry of another problem is asked."""
    return f"{entry.problem} is {octaves:.1f} octaves away and was measured on this card"


def sister_reason(entry: CacheEntry, octaves: float, card: SisterCard, device: Device) -> str:
    """Why an entry of another card of the architecture is asked, and about how long it takes here."""
    sentence = f"{entry.problem} is {octaves:.1f} octaves away and was measured on {card.full_name}"
    ratio = card.time_ratio(entry.problem, device)
    here = "" if ratio is None else f"; its {entry.time_us:.4g} us there are about {ratio * entry.time_us:.4g} us here"
    return f"{sentence}, another card of sm_{card.arch}{here}"


def but(reason: Text, why: str) -> str:
    """Why a choice gives way."""
    return f"{formed(reason)}, but {why}"


def refusal(level: Enum, entry: CacheEntry, why_not: str) -> str:
    """Why an entry does not serve."""
    return f"{level.value}: {entry.problem} cannot serve, {why_not}"


def other_triton(entry: CacheEntry) -> str:
    """Of an entry that was tuned with another Triton."""
    return f"{entry.problem} was tuned with Triton {entry.versions.get('triton')}, this is {triton.__version__}"


def marked(entry: CacheEntry) -> str:
    """Of an entry that a verification marked."""
    return f"{entry.problem} is marked, {entry.mark}; run autoattn tune again"


def other_torch(entry: CacheEntry) -> str:
    """Of a rival that was timed with another PyTorch."""
    return f"{entry.choice} was {_fastest(entry)} with torch {entry.versions.get('torch')}, this is {torch.__version__}"


def fastest_since(reason: Text, choice: str) -> str:
    """Of a rival that a verification found to be the fastest."""
    return f"{formed(reason)}, and {choice} was the fastest when it was verified"


def fastest(reason: Text, entry: CacheEntry) -> str:
    """Of a rival that was the fastest."""
    rival = next((rival for rival in entry.rivals if rival.name == entry.choice), None)
    gain = f", {entry.time_us / rival.measurement.median_us:.2f}x faster than the kernel" if rival else ""
    return f"{formed(reason)}, and {entry.choice} was {_fastest(entry)}{gain}"


def _fastest(entry: CacheEntry) -> str:
    """What the choice of an entry was: peers of other packages may be faster, and no call runs on them."""
    times = {rival.name: rival.measurement.median_us for rival in entry.rivals}
    choice_us = times.get(entry.choice, 0.0)
    peers = times.keys() - {SDPA, *BACKENDS, *OURS}
    faster = any(times[name] < choice_us for name in peers)
    return "the fastest that a call can run" if faster else "the fastest"


def fastest_beside(reason: Text, route: str, variant: Variant | None, entry: CacheEntry) -> str:
    """Of the fastest beside a choice that cannot serve."""
    words = route
    if route == KERNEL and variant is not None:
        words = f"{'its kernel' if variant == entry.variant else 'a runner-up'} of {variant.template}"
    return f"{formed(reason)}; {words} was the fastest beside it"
