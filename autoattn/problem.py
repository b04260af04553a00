"""One attention call as facts: what is computed, never how."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from autoattn.errors import ProblemError

MAX_HEAD_DIM = 256
MAX_SIZE = 2**31 - 1  # batch, heads and lengths travel to the GPU as int32


class Op(str, Enum):
    """The operation; also the stem of its template, search space, cache file and module."""

    FORWARD = "forward"


class DType(str, Enum):
    """Element type of query, key, value and output."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


class Precision(str, Enum):
    """How float32 products are formed; 16-bit types always multiply exactly and sum in float32."""

    IEEE = "ieee"
    TF32 = "tf32"


class Layout(str, Enum):
    """Order of the axes in memory: batch, heads, sequence, head dim."""

    BHSD = "bhsd"
    BSHD = "bshd"


class MaskKind(str, Enum):
    """Which keys a query may see."""

    FULL = "full"
    CAUSAL = "causal"


class Alignment(str, Enum):
    """Which corner of the score matrix a causal mask starts from; they agree when seq_q == seq_kv."""

    TOP_LEFT = "top-left"  # query i sees keys 0..i, as F.scaled_dot_product_attention(is_causal=True)
    BOTTOM_RIGHT = "bottom-right"  # query i sees keys 0..i + seq_kv - seq_q, as FlashAttention since 2.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A mask as one value; `alignment` only speaks when the kind is causal."""

    kind: MaskKind = MaskKind.FULL
    alignment: Alignment = Alignment.BOTTOM_RIGHT

    @classmethod
    def parse(cls, text: str | bool) -> Mask:
        """Reads `full`, `causal`, `causal:top-left` or `causal:bottom-right` (booleans mean causal or full)."""
        if isinstance(text, bool):
            text = "causal" if text else "full"
        kind, colon, alignment = str(text).partition(":")
        try:
            if kind == "full" and not colon:
                return cls()
            if kind == "causal":
                return cls(kind=MaskKind.CAUSAL, alignment=Alignment(alignment if colon else "bottom-right"))
        except ValueError:
            pass
        raise ProblemError(
            f"mask must be full, causal, causal:top-left or causal:bottom-right, got {text!r}; correct the mask"
        )

    @property
    def causal(self) -> bool:
        return self.kind is MaskKind.CAUSAL

    def __str__(self) -> str:
        return f"causal:{self.alignment.value}" if self.causal else "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call.

    query is [batch, heads_q, seq_q, head_dim], key and value are [batch, heads_kv, seq_kv, head_dim] and the
    output is shaped like the query (axes 1 and 2 swapped in memory when the layout is BSHD).

    Raises:
        ProblemError: a size is not a positive integer, the heads do not divide, or the head dim is above 256.
    """

    dtype: DType
    batch: int  # sequences
    heads_q: int  # query heads
    heads_kv: int  # key and value heads; divides heads_q
    seq_q: int  # query tokens per sequence
    seq_kv: int  # key tokens per sequence
    head_dim: int  # elements per head, 1..256
    mask: Mask = field(default_factory=Mask)
    layout: Layout = Layout.BHSD
    precision: Precision = Precision.IEEE
    op: Op = Op.FORWARD

    def __post_init__(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
                raise ProblemError(f"{name} must be a whole number from 1 to {MAX_SIZE}, got {size!r}; correct it")
        if self.heads_q % self.heads_kv:
            raise ProblemError(
                f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}; "
                "repeat key and value heads until it is"
            )
        if self.head_dim > MAX_HEAD_DIM:
            raise ProblemError(
                f"head_dim must be at most {MAX_HEAD_DIM}, got {self.head_dim}; use F.scaled_dot_product_attention"
            )
        if self.precision is not Precision.IEEE and self.dtype is not DType.FLOAT32:
            raise ProblemError(
                f"precision {self.precision.value} is a choice for float32 alone, got {self.dtype.value}; leave it out"
            )
        # The two alignments are one mask when the lengths agree; one name keeps one cache entry.
        if self.mask.causal and self.seq_q == self.seq_kv and self.mask.alignment is Alignment.TOP_LEFT:
            object.__setattr__(self, "mask", Mask(kind=MaskKind.CAUSAL))

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // self.heads_kv

    @property
    def head_dim_padded(self) -> int:
        """The head dim that tiles are padded to: a power of two that a tensor core can chew, at least 16."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def key(self) -> str:
        """A sortable name that holds every fact and can stand in a file name."""
        mask = str(self.mask).replace(":", "-")
        return (
            f"{self.op.value}_{self.family}_b{self.batch}_h{self.heads_q}-{self.heads_kv}"
            f"_q{self.seq_q}_k{self.seq_kv}_{mask}_{self.layout.value}"
        )

    @property
    def order(self) -> tuple[str | int, ...]:
        """What people expect lists of problems to be sorted by: kind first, then sizes as numbers."""
        sizes = (self.head_dim, self.seq_q, self.seq_kv, self.batch, self.heads_q, self.heads_kv)
        return (self.op.value, self.dtype.value, self.precision.value, *sizes, str(self.mask), self.layout.value)

    @property
    def family(self) -> str:
        """Dtype, precision and head dim: what a kernel is compiled for, whatever the mask and the sizes."""
        precision = f"-{self.precision.value}" if self.dtype is DType.FLOAT32 else ""
        return f"{self.dtype.value}{precision}_d{self.head_dim}"

    def shares_kernels(self, other: Problem) -> bool:
        """Whether the two differ only in the numbers of a launch, so that one kernel's text serves both."""
        return self.family == other.family and self.mask == other.mask

    def kept_pairs(self) -> int:
        """(query, key) pairs that the mask keeps, in one head of one sequence."""
        if not self.mask.causal:
            return self.seq_q * self.seq_kv
        shift = self.shift
        first = max(0, -shift)  # first row that sees a key
        growing = max(first, min(self.seq_q, self.seq_kv - shift))  # first row that sees all keys
        rows = growing - first
        return rows * (first + 1 + shift) + rows * (rows - 1) // 2 + (self.seq_q - growing) * self.seq_kv

    @property
    def shift(self) -> int:
        """Query i of a causal problem sees the keys 0..i + shift."""
        return self.seq_kv - self.seq_q if self.mask.alignment is Alignment.BOTTOM_RIGHT else 0

    def flops(self) -> int:
        """Floating-point operations of the kept pairs: two products of 2 operations per pair and element."""
        return 4 * self.batch * self.heads_q * self.kept_pairs() * self.head_dim

    def bytes(self) -> int:
        """Bytes that must cross device memory: query, key and value read once, the output written once."""
        rows = 2 * self.heads_q * self.seq_q + 2 * self.heads_kv * self.seq_kv
        return self.batch * rows * self.head_dim * self.dtype.bytes

    def __str__(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        dtype = re.sub("float", "fp", self.dtype.value).replace("bfp", "bf")
        if self.dtype is DType.FLOAT32:
            dtype += f":{self.precision.value}"
        layout = "" if self.layout is Layout.BHSD else f" {self.layout.value}"
        return (
            f"{dtype} B{self.batch} H{heads} {self.seq_q}x{self.seq_kv} D{self.head_dim} "
            f"{self.mask if self.seq_q != self.seq_kv else self.mask.kind.value}{layout}"
        )
