"""Explanations of calls: who answers one, how near to a tuned problem that is, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from autoattn.baselines.pytorch_sdpa import SDPA
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant
from autoattn.runtime.plan.reasons import Reasons, Text


class Level(str, Enum):
    """How close what was found is to what was asked."""

    EXACT = "exact"  # this problem was measured on this card
    BUCKET = "bucket"  # a problem whose lengths and heads round to the same powers of two was
    NEAREST = "nearest"  # some problem with the same kernels was
    SISTER = "sister"  # such a problem was measured on another card of the architecture
    PREDICTED = "predicted"  # this problem was tuned for this kind of card without having one
    DEFAULT = "default"  # nothing was; the template's default runs
    SDPA = "sdpa"  # no kernel of ours can run


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What runs for a problem, and why."""

    problem: Problem | None
    route: str  # "kernel", or the name of the rival that runs: "sdpa", "sdpa-cudnn", ...
    level: Level
    reasons: Reasons
    entry: CacheEntry | None = None
    variant: Variant | None = None
    unavailable: str = ""  # why a tuned kernel that would serve cannot run with the installed Triton, and the way out
    chosen_for: Problem | None = None  # the problem that the choice was made for, where it holds for a class of sizes
    precompiled: str = ""  # which compiler made the kernel's machine code, where a cache folder has it
    gradients: Explanation | None = None  # of the backward pass, where a kernel computes it behind this one

    def __str__(self) -> str:
        ready = ", precompiled" if self.precompiled else ""
        return f"{self.route} ({self.levels}{ready}): {self.reason}"

    @property
    def reason(self) -> str:
        """Why it runs, in one sentence."""
        return self.reasons.reason

    @property
    def steps(self) -> tuple[str, ...]:
        """What was tried before, one sentence each."""
        return self.reasons.steps

    @property
    def levels(self) -> str:
        """The level; of a call whose gradients are a kernel's, that of each pass."""
        if self.gradients is None:
            return self.level.value
        return f"forward: {self.level.value}, backward: {self.gradients.level.value}"


def of_sdpa(reason: Text, problem: Problem | None = None, steps: Iterable[Text] = ()) -> Explanation:
    """The explanation of a call that PyTorch answers."""
    return Explanation(problem=problem, route=SDPA, level=Level.SDPA, reasons=Reasons(reason, steps))
