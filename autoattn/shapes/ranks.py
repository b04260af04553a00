"""The problems of a context-parallel call: what a rank of a zigzag computes of a sequence that ranks share."""

from __future__ import annotations

from dataclasses import replace

from autoattn.core.mask import Mask
from autoattn.core.problem import Problem
from autoattn.errors import ProblemError


def problems(whole: Problem, ranks: int) -> list[Problem]:
    """The calls of one rank, whose kernels leave the LSE; docs/context-parallel.md says where each comes from.

    Args:
        whole: the problem of one process, with as many queries as keys.

    Raises:
        ProblemError: ranks do not share such a sequence in equal chunks.
    """
    seq, mask = whole.seq_q, whole.mask
    if whole.packed or whole.cache is not None or mask.sparse or seq != whole.seq_kv:
        raise ProblemError(
            f"ranks share a sequence with as many queries as keys and no table, cache or packing, got {whole}; leave "
            "ranks out, or the rest"
        )
    if seq % (2 * ranks):
        raise ProblemError(
            f"{ranks} ranks must share a sequence in {2 * ranks} equal chunks, got {seq} tokens; take a multiple"
        )
    own = seq // ranks
    if mask.left is not None:  # a chunk of queries, and the keys that it reaches
        chunk, reach = own // 2, mask.left + (mask.right or 0)
        return [_sized(whole, chunk, min(chunk + reach, seq), mask)]
    if not mask.bounded_right:
        return [_sized(whole, own, own, mask)]
    hops = [(own, own // 2), (own // 2, own)] if ranks > 1 else []
    return [_sized(whole, own, own, mask), *(_sized(whole, *sizes, Mask()) for sizes in hops)]


def _sized(problem: Problem, seq_q: int, seq_kv: int, mask: Mask) -> Problem:
    return replace(problem, seq_q=seq_q, seq_kv=seq_kv, mask=mask).simplified()
