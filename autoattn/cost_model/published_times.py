"""Times that others published for a card: a report sets predictions for the same problem beside them.

They are of other kernels, so that none of them says whether a prediction is right; a prediction far from all of them is
likely to be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Problem

KERNEL = "FlashAttention-2, run_mha_varlen_fwd"
SOURCE = "an nvbench table on an NVIDIA A30, benchmarks/shapes/varlen_a30.yaml"
# One sequence of 65,536 tokens, 128 heads, a head dim of 56, two bytes an element, in memory as bshd and packed alike.
# Mask -> milliseconds, the mean of the rows that are the same problem.
A30_MS = {
    "full": 1977.925,
    "window:128,-1": 1072.589,
    "window:1024,-1": 1105.207,
    "window:-1,128": 1165.533,
    "window:-1,1024": 1198.784,
    "window:128,128": 16.957,
    "window:1024,128": 45.996,
    "window:128,1024": 46.032,
    "window:1024,1024": 75.239,
    "causal": 990.811,
    "window:128,0": 12.835,
    "window:1024,0": 41.680,
}
_MASKS = {Mask.parse(words): ms for words, ms in A30_MS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What another kernel took for the same problem on the same kind of card."""

    kernel: str
    time_us: float
    source: str


def time_of(problem: Problem, device: str) -> Published | None:
    """What was published for a problem on a device; None where nothing was that is known here."""
    sizes = (problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q, problem.seq_kv)
    plain = problem.dtype in (DType.FLOAT16, DType.BFLOAT16) and not problem.modifiers.names
    alike = sizes == (1, 128, 128, 65536, 65536) and (problem.head_dim, problem.head_dim_v) == (56, 56)
    if device != "a30" or not plain or not alike or problem.layout is Layout.BHSD or problem.mask not in _MASKS:
        return None
    return Published(kernel=KERNEL, time_us=1e3 * _MASKS[problem.mask], source=SOURCE)
