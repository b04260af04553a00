"""Which keys a query may see, as one value."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace
from enum import Enum

from autoattn.errors import ProblemError

_WINDOW = re.compile(r"(-?[0-9]{1,10}),(-?[0-9]{1,10})")
_BLOCKS = re.compile(r"([0-9]{1,5})x([0-9]{1,5}),([01](?:\.[0-9]{1,4})?)")
MIN_BLOCK, MAX_BLOCK = 16, 4096  # rows or keys of one block of a sparse mask; a power of two
DENSITY_STEPS = 64  # shares of kept blocks are told apart in steps of 1/64, so that alike tables share an entry


class MaskKind(str, Enum):
    """The shapes that a mask can have."""

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"  # a band of keys around the query's own position
    BLOCKS = "blocks"  # a table says which blocks of keys each block of queries sees


class Alignment(str, Enum):
    """Which corner of the score matrix a causal mask starts from; they agree when seq_q == seq_kv."""

    TOP_LEFT = "top-left"  # query i sees keys 0..i, as F.scaled_dot_product_attention(is_causal=True)
    BOTTOM_RIGHT = "bottom-right"  # query i sees keys 0..i + seq_kv - seq_q, as FlashAttention since 2.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A mask; what does not belong to its kind keeps its default.

    Query i stands at key position p = i + seq_kv - seq_q (p = i when aligned top-left). Causal keeps the keys up to
    p, a window those from p - left to p + right. Windows are aligned bottom-right, as FlashAttention's.
    """

    kind: MaskKind = MaskKind.FULL
    alignment: Alignment = Alignment.BOTTOM_RIGHT
    left: int | None = None  # keys of a window before p; None: all
    right: int | None = None  # keys of a window behind p; None: all
    block_q: int = 0  # queries of one block of a table
    block_kv: int = 0  # keys of one block of a table
    density: float = 0.0  # share of blocks that a table keeps, in steps of 1 / DENSITY_STEPS
    mod: str = ""  # what a table's partial blocks keep, as an expression of b, h, q_idx and kv_idx; "" keeps all

    @classmethod
    def window(cls, left: int, right: int, *, causal: bool = False) -> Mask:
        """FlashAttention's `window_size` (left, right); -1 is no bound on that side, and causal makes right 0.

        Without a bound on the left, right 0 is the causal mask and right -1 is none.

        Raises:
            ProblemError: a side is no whole number from -1.
        """
        for side in (left, right):
            if isinstance(side, bool) or not isinstance(side, int) or side < -1:
                raise ProblemError(
                    f"a window must be two whole numbers from -1 (no bound), got ({left!r}, {right!r}); correct it"
                )
        right = 0 if causal else right
        if left == -1:
            if right == -1:
                return cls()
            if right == 0:
                return cls(kind=MaskKind.CAUSAL)
        return cls(kind=MaskKind.WINDOW, left=None if left == -1 else left, right=None if right == -1 else right)

    @classmethod
    def blocks(cls, block_q: int, block_kv: int, density: float, mod: str = "") -> Mask:
        """A block table's mask.

        Args:
            block_q, block_kv: queries and keys of a block; powers of two from 16 to 4096.
            density: share of the blocks that are kept, 0 to 1; it is rounded up to steps of 1/64.
            mod: what partial blocks keep; see autoattn.expressions.language.

        Raises:
            ProblemError: one of them is out of range.
        """
        for size in (block_q, block_kv):
            if (
                isinstance(size, bool)
                or not isinstance(size, int)
                or not MIN_BLOCK <= size <= MAX_BLOCK
                or size & size - 1
            ):
                raise ProblemError(
                    f"blocks of a mask must be powers of two from {MIN_BLOCK} to {MAX_BLOCK}, got {block_q!r} by "
                    f"{block_kv!r}; choose others"
                )
        if isinstance(density, bool) or not isinstance(density, int | float) or not 0.0 <= density <= 1.0:
            raise ProblemError(f"the density of a mask must be from 0 to 1, got {density!r}; correct it")
        steps = -int(-density * DENSITY_STEPS // 1)
        return cls(kind=MaskKind.BLOCKS, block_q=block_q, block_kv=block_kv, density=steps / DENSITY_STEPS, mod=mod)

    @classmethod
    def parse(cls, text: str | bool) -> Mask:
        """Reads `full`, `causal`, `causal:top-left`, `causal:bottom-right`, `window:LEFT,RIGHT` (-1 is no bound) or
        `blocks:ROWSxKEYS,DENSITY`; booleans mean causal or full.

        Raises:
            ProblemError: the text is none of them.
        """
        if isinstance(text, bool):
            text = "causal" if text else "full"
        kind, colon, rest = str(text).partition(":")
        if kind == "full" and not colon:
            return cls()
        if kind == "causal" and (not colon or rest in tuple(Alignment)):
            return cls(kind=MaskKind.CAUSAL, alignment=Alignment(rest if colon else "bottom-right"))
        if kind == "window" and (match := _WINDOW.fullmatch(rest)):
            return cls.window(int(match[1]), int(match[2]))
        if kind == "blocks" and (match := _BLOCKS.fullmatch(rest)):
            return cls.blocks(int(match[1]), int(match[2]), float(match[3]))
        raise ProblemError(
            "mask must be full, causal, causal:top-left, causal:bottom-right, window:LEFT,RIGHT (as window:128,0; -1 "
            f"is no bound) or blocks:ROWSxKEYS,DENSITY (as blocks:128x128,0.5), got {text!r}; correct the mask"
        )

    @property
    def causal(self) -> bool:
        """Whether it is the causal mask; a window that ends at the query is none."""
        return self.kind is MaskKind.CAUSAL

    @property
    def sparse(self) -> bool:
        """Whether a table of blocks says what is seen."""
        return self.kind is MaskKind.BLOCKS

    @property
    def bounded_left(self) -> bool:
        """Whether keys far before the query are hidden."""
        return self.left is not None

    @property
    def bounded_right(self) -> bool:
        """Whether keys far behind the query are hidden."""
        return self.causal or self.right is not None

    @property
    def window_size(self) -> tuple[int, int]:
        """(left, right), as `window` takes them; -1 is no bound on that side."""
        return -1 if self.left is None else self.left, -1 if self.right is None else self.right

    @property
    def structure(self) -> Mask:
        """What a kernel's text depends on; the widths of a window and a table's density are numbers of the launch."""
        if self.left is None and self.right is None and not self.density:
            return self
        left = None if self.left is None else 1
        right = None if self.right is None else min(self.right, 1)  # a bound of 0 ends at the last key by itself
        return replace(self, left=left, right=right, density=0.0)

    def __str__(self) -> str:
        if self.causal:
            return f"causal:{self.alignment.value}"
        if self.kind is MaskKind.WINDOW:
            # torch.compile traces widths as symbols, which no text can hold; this makes them numbers of the graph.
            left, right = (operator.index(side) for side in self.window_size)
            return f"window:{left},{right}"
        if self.sparse:
            return f"blocks:{self.block_q}x{self.block_kv},{self.density:.4g}"
        return "full"
