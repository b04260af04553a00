"""Classes of sizes: problems of one kind whose batch and lengths lie between the same numbers of few digits.

Which kernel is best changes little over an eighth of an octave, and over a half where a size is large: thousands of
keys fill a card as tens of thousands do. So a choice is made once for a class, by the problem of its smallest sizes,
and calls whose lengths never repeat find it made. The smallest decides because rules mostly ask whether there is enough
work for a kernel: what it may run, all of the class may. Tiles end at numbers of few digits, and one more row needs
another tile, so that such a number is a class of its own.

Few tiles take turns on the multiprocessors of a card: 132 are done in one turn of 132 multiprocessors, and 133 in two.
There another height of tiles is best, so that a class ends where the turns of its tiles do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from autoattn.core.mask import Alignment, MaskKind
from autoattn.core.problem import MAX_SIZE, Problem, Sizes, sizes_of

BITS = 4  # that a rounded size keeps: 8 sizes an octave
# Below SMALL, each size by itself: a tile of 32 rows may serve from 17 on, where the class of 16 has what is left.
SMALL_BITS = 5
LARGE_BITS = 3  # the same from LARGE on: 4 sizes an octave
LARGEST_BITS = 2  # from LARGEST on
PACKED_BITS = 2  # of packed sequences, which differ in more sizes from batch to batch
INVARIANT_BATCH = 8  # sequences of the batch for which a kernel is chosen that serves batches of all sizes alike
SMALL, LARGE, LARGEST = 32, 4096, 16384
TILE_ROWS = 64, 128, 192  # of the tiles whose turns count
MOST_TURNS = 4  # from more on, a turn of few tiles is a small part of all


def rounded(size: int, bits: int = SMALL_BITS) -> int:
    """The smallest size of the class of a size.

    That is the size itself where it has so many binary digits or less (fewer where it is large), and otherwise the next
    size above the largest such number: 256 is a class, and 257 to 287 are one.
    """
    most = SMALL_BITS if size < SMALL else BITS if size < LARGE else LARGE_BITS if size < LARGEST else LARGEST_BITS
    bits = min(bits, most)
    step = max(size.bit_length() - bits, 0)
    below = size >> step << step
    return size if below == size else below + 1


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


def smallest(sizes: Sizes, heads_q: int, sm_count: int) -> Sizes:
    """The smallest sizes of the class of a problem's sizes.

    Args:
        heads_q: of the problem.
        sm_count: multiprocessors of the card.
    """
    batch, seq_q, seq_kv, tokens_q, tokens_kv = map(rounding(packed=sizes[-1] > 0), sizes)
    if tokens_kv == 0:
        first = _first_of_turns(sizes[1], batch * heads_q, sm_count)
        if sizes[1] <= sizes[2]:
            seq_kv = max(seq_kv, first)
        seq_q = max(seq_q, first)
    return batch, seq_q, seq_kv, tokens_q, tokens_kv


@lru_cache(maxsize=1 << 14)
def _first_of_turns(seq_q: int, heads: int, sm_count: int) -> int:
    """The least queries of which all tiles take as many turns; 1 where there are many."""
    first = 1
    for rows in TILE_ROWS:
        turns = -(heads * -(-seq_q // rows) // -sm_count)
        if turns <= MOST_TURNS:
            full = (turns - 1) * sm_count // heads  # tiles of a head, at most, that are done in a turn less
            first = max(first, full * rows + 1)
    return first


def representative(problem: Problem, sm_count: int) -> Problem:
    """The problem that speaks for the class of a problem: the smallest of it, with as many heads.

    The problem speaks for itself where smaller sizes give its mask another name (`Problem.simplified`).

    Args:
        sm_count: multiprocessors of the card.
    """
    of_class = problem.resized(*smallest(sizes_of(problem), problem.heads_q, sm_count))
    mask = problem.mask
    if mask.alignment is Alignment.TOP_LEFT and of_class.seq_q == of_class.seq_kv:
        return problem
    return of_class if mask.kind is not MaskKind.WINDOW or of_class.simplest_mask == mask else problem
