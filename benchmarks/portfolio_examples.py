"""Problems with the times of variants, measured or predicted, of which a portfolio is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One problem on a card."""

    problem: Problem
    device: Device
    times_us: Mapping[Variant, float]  # measured, or of all that can run where they are predicted
    rivals_us: Mapping[str, float]
    met_cover: bool = True  # all variants of a cover were tried, so that what has no time is slow or failed

    @cached_property
    def best_us(self) -> float:
        """The shortest time of a variant."""
        return min(self.times_us.values())
