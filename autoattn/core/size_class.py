"""Classes of sizes: problems of one kind whose batch and lengths round down to the same numbers.

Which kernel is best changes little over an eighth of an octave, and over a half where a size is large: thousands of
keys fill a card as tens of thousands do. So a choice is made once for a class, by the problem of its smallest sizes,
and calls whose lengths never repeat find it made. The smallest decides because rules mostly ask whether there is enough
work for a kernel: what it may run, all of the class may.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from autoattn.core.mask import Alignment, MaskKind
from autoattn.core.problem import MAX_SIZE, SIZES, Problem

BITS = 4  # that a rounded size keeps: 8 sizes an octave
# Below SMALL, each size by itself: a tile of 32 rows may serve from 17 on, where the class of 16 has what is left.
SMALL_BITS = 5
LARGE_BITS = 3  # the same from LARGE on: 4 sizes an octave
LARGEST_BITS = 2  # from LARGEST on
PACKED_BITS = 2  # of packed sequences, which differ in more sizes from batch to batch
INVARIANT_BATCH = 8  # sequences of the batch for which a kernel is chosen that serves batches of all sizes alike
SMALL, LARGE, LARGEST = 32, 4096, 16384


def rounded(size: int, bits: int = SMALL_BITS) -> int:
    """A size rounded down to so many binary digits, or fewer where it is large: powers of two stay, and small sizes."""
    most = SMALL_BITS if size < SMALL else BITS if size < LARGE else LARGE_BITS if size < LARGEST else LARGEST_BITS
    bits = min(bits, most)
    step = max(size.bit_length() - bits, 0)
    return size >> step << step


def rounding(*, packed: bool) -> Callable[[int], int]:
    """How the sizes of a problem are rounded."""
    return _round_packed if packed else _round


_round = lru_cache(maxsize=1 << 14)(rounded)
_round_packed = lru_cache(maxsize=1 << 14)(partial(rounded, bits=PACKED_BITS))


def regardless_of_batch(problem: Problem) -> Problem:
    """The problem that speaks for all batches of a problem where the bits of a sequence must be the same in each; any
    other problem speaks for itself."""
    if problem.cache is None or not problem.cache.batch_invariant:
        return problem
    tokens_q, tokens_kv = (INVARIANT_BATCH * seq * problem.packed for seq in (problem.seq_q, problem.seq_kv))
    return problem.resized(INVARIANT_BATCH, problem.seq_q, problem.seq_kv, tokens_q, min(tokens_kv, MAX_SIZE))


def representative(problem: Problem) -> Problem:
    """The problem that speaks for the class of a problem: the smallest of it, with as many heads.

    The problem speaks for itself where smaller sizes give its mask another name (`Problem.simplified`).
    """
    smallest = problem.resized(*map(rounding(packed=problem.packed), (getattr(problem, name) for name in SIZES)))
    mask = problem.mask
    if mask.alignment is Alignment.TOP_LEFT and smallest.seq_q == smallest.seq_kv:
        return problem
    return smallest if mask.kind is not MaskKind.WINDOW or smallest.simplest_mask == mask else problem
