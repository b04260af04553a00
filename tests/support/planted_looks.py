"""Looks that no card takes, for the test of benchmarks/variants.py; imported by workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from looks import Looked

from autoattn.core.trial import Outcome
from autoattn.workers.worker_pool import Failure

WRONG = 32  # every kernel with this BLOCK_N


@dataclass(frozen=True, kw_only=True)
class Look:
    """Makes a time of the tile's rows."""

    problem: Any
    source: Any
    ptx_arch: Any
    gate: bool

    def run(self, memory: dict[Any, Any]) -> Any:
        variant = self.source.variant
        if variant["BLOCK_N"] == WRONG:
            return Failure(outcome=Outcome.WRONG_RESULT, detail="made up")
        return Looked(median_us=float(variant["BLOCK_M"]), registers=1, report=None)


@dataclass(frozen=True, kw_only=True)
class Translate:
    """Translates nothing."""

    sources: Any
    ptx_arch: Any

    def run(self, memory: dict[Any, Any]) -> int:
        return len(self.sources)
