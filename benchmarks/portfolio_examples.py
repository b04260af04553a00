"""Problems with the times of variants, measured or predicted, of which a portfolio is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from autoattn.codegen import head_order
from autoattn.core import device_profiles
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant

CHOSEN = "chosen"  # in the names of files whose problems met few variants, chosen for each; others met a whole cover
DATA = Path(__file__).resolve().parent / "data" / "portfolios"
SCREENED = DATA / "screened"  # rough times
FINALISTS = 16  # variants of a problem that meet in rounds, at most


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

    @cached_property
    def running_us(self) -> Mapping[Variant, float]:
        """The times of what calls run, by the names that variants have in a portfolio.

        Where rows differ in length, calls run each variant in the order of heads that suits the problem (`head_order`).
        """
        if not head_order.is_uneven(self.problem):
            return self.times_us
        return {
            as_kept(variant, self.problem): time_us
            for variant, time_us in self.times_us.items()
            if variant == head_order.suiting(variant, self.problem, self.device)
        }


def as_kept(variant: Variant, problem: Problem) -> Variant:
    """A variant of a problem as a portfolio has it: with one head after another where calls choose the order."""
    return head_order.in_order(variant, 1) if head_order.is_uneven(problem) else variant


def read(path: Path) -> list[Example]:
    """The problems of a file, with what was measured on each."""
    card, kind, _ = path.name.split("_")
    device = device_profiles.named(card)
    examples = []
    for text in path.read_text(encoding="utf-8").splitlines():
        document = json.loads(text)
        times = {Variant.of(template, params): time_us for template, params, time_us in document["times_us"]}
        problem = msgspec.convert(document["problem"], Problem)
        examples.append(
            Example(
                problem=problem,
                device=device,
                times_us=times,
                rivals_us=document["rivals_us"],
                met_cover=kind != CHOSEN,
            )
        )
    return examples


def mask_name(mask: Mask) -> str:
    """What tables call a mask: all windows alike, and all causal masks."""
    if mask.bounded_left:
        return "window"
    return "causal" if mask.bounded_right else "full"


def examples_of(folder: Path) -> list[Example]:
    """The problems of all files of a folder."""
    return [example for path in sorted(folder.glob("*.jsonl")) for example in read(path)]
