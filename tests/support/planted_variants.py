"""Variants of which one is planted to fail on a card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernels

from autoattn.core.problem import DType, Problem
from autoattn.core.trial import Outcome

GONE = (Outcome.CRASH, Outcome.LAUNCH_ERROR)  # an illegal address ends the worker, one way or the other


GOOD = kernels.variant(BLOCK_M=64, BLOCK_N=32, num_warps=4)


BAD = kernels.variant(BLOCK_M=32, BLOCK_N=32, num_warps=2)


def large(problem: Problem) -> Problem:
    """The same kind, in a size that can be timed."""
    lengths: dict[str, Any] = {"tokens_q": 2048, "tokens_kv": 2048} if problem.packed else {}
    return replace(problem, dtype=DType.BFLOAT16, seq_q=512, seq_kv=512, head_dim=64, head_dim_v=64, **lengths)
