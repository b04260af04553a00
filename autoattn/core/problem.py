"""One attention call, or its gradients, as facts: what is computed, never how."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from typing import TypeAlias

from autoattn.core.key_cache import MAX_LATENT_DIM, KeyCache, are_latent_dims
from autoattn.core.mask import Alignment, Mask, MaskKind
from autoattn.core.modifiers import Bias, Modifiers, digest
from autoattn.core.sequence_lengths import KeyLengths, pairs_in_band, ramp
from autoattn.core.tile_widths import padded
from autoattn.errors import ProblemError

MAX_HEAD_DIM = 256  # of query and key, unless a cache holds values as the first elements of keys
MAX_HEAD_DIM_V = 512
MAX_SIZE = 2**31 - 1  # batch, heads and lengths travel to the GPU as int32


class Op(str, Enum):
    """The operation; also the stem of its template, search space, cache file and module."""

    FORWARD = "forward"
    BACKWARD = "backward"  # the gradients of query, key and value, from the output's gradient and what was saved


class DType(str, Enum):
    """Element type of query, key and value; the output has it too, but for float8, whose output is bfloat16."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT8 = "float8_e4m3"  # with one float32 scale for each tensor and key head

    @property
    def bytes(self) -> int:
        """Of one element."""
        return {DType.FLOAT32: 4, DType.FLOAT8: 1}.get(self, 2)

    @property
    def output(self) -> DType:
        """The dtype of the output: float8 is too coarse for one."""
        return DType.BFLOAT16 if self is DType.FLOAT8 else self


class Precision(str, Enum):
    """How float32 products are formed; other types always multiply exactly and sum in float32."""

    IEEE = "ieee"
    TF32 = "tf32"  # operands cut to 10 bits of mantissa
    TF32X3 = "tf32x3"  # three tf32 products a product, which keep about 21 bits


class Numerics(str, Enum):
    """Which ways of keeping the softmax's maximum may compute the answer; each is right for every input."""

    ANY = "any"
    ONLINE = "online"  # those whose time no growth of the scores changes


class Layout(str, Enum):
    """Order of the axes in memory: batch, heads, sequence, head dim."""

    BHSD = "bhsd"
    BSHD = "bshd"
    PACKED = "packed"  # [tokens, heads, head dim]: sequences of their own lengths one behind the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call.

    query is [batch, heads_q, seq_q, head_dim], key [batch, heads_kv, seq_kv, head_dim], value [batch, heads_kv, seq_kv,
    head_dim_v] and the output [batch, heads_q, seq_q, head_dim_v] (axes 1 and 2 swapped in memory when the layout is
    BSHD). When it is PACKED, query is [tokens_q, heads_q, head_dim] and so on, `batch` sequences lie one behind the
    other, and seq_q and seq_kv are the lengths of the longest.

    Where there is a cache, key and value lie in it: seq_kv is the most keys that it holds of a sequence, and the
    lengths are read on the device.

    Raises:
        ProblemError: a size is not a positive integer, the heads do not divide, a head dim is too large, or two facts
            contradict one another.
    """

    dtype: DType
    batch: int  # sequences
    heads_q: int  # query heads
    heads_kv: int  # key and value heads; divides heads_q
    seq_q: int  # query tokens per sequence
    seq_kv: int  # key tokens per sequence
    head_dim: int  # elements of a query and of a key, 1..256, or up to 576 where the cache is latent
    head_dim_v: int = 0  # elements of a value, 1..512; 0 becomes head_dim
    mask: Mask = field(default_factory=Mask)
    modifiers: Modifiers = field(default_factory=Modifiers)
    layout: Layout = Layout.BHSD
    tokens_q: int = 0  # of all sequences together, when packed; else 0
    tokens_kv: int = 0
    precision: Precision = Precision.IEEE
    numerics: Numerics = Numerics.ANY
    op: Op = Op.FORWARD
    deterministic: bool = False  # of gradients: each call on the same inputs gives the same bits; outputs always do
    cache: KeyCache | None = None  # where keys and values lie, when not in tensors of their own
    key_lengths: KeyLengths | None = None  # of the sequences in a cache, when it is tuned; all have seq_kv when None

    def __post_init__(self) -> None:
        if self.head_dim_v == 0 and not isinstance(self.head_dim_v, bool):
            object.__setattr__(self, "head_dim_v", self.head_dim)
        self._check_sizes()
        self._check_combinations()
        if self.op is Op.FORWARD:
            object.__setattr__(self, "modifiers", self.modifiers.forward())
        # The two alignments are one mask when the lengths agree; one name keeps one cache entry.
        if self.mask.causal and self.seq_q == self.seq_kv and self.mask.alignment is Alignment.TOP_LEFT:
            object.__setattr__(self, "mask", Mask(kind=MaskKind.CAUSAL))

    def _check_sizes(self) -> None:
        names = ["batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "head_dim_v"]
        for name in names + ["tokens_q", "tokens_kv"] * self.packed:
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
                raise ProblemError(f"{name} must be a whole number from 1 to {MAX_SIZE}, got {size!r}; correct it")
        if self.heads_q % self.heads_kv:
            raise ProblemError(
                f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}; "
                "repeat key and value heads until it is"
            )
        most_dim = MAX_LATENT_DIM if self.is_latent else MAX_HEAD_DIM
        for name, most in (("head_dim", most_dim), ("head_dim_v", MAX_HEAD_DIM_V)):
            if getattr(self, name) > most:
                way_out = "use F.scaled_dot_product_attention"
                if self.cache is not None and are_latent_dims(self.head_dim, self.head_dim_v):
                    way_out = "say that the cache is latent, if values are the first elements of keys"
                raise ProblemError(f"{name} must be at most {most}, got {getattr(self, name)}; {way_out}")
        if self.is_latent and (self.dtype is DType.FLOAT32 or not are_latent_dims(self.head_dim, self.head_dim_v)):
            raise ProblemError(
                "a latent cache takes queries of 16 bits, values of a power of two and keys that are longer by at most "
                f"half of it, as 512 and 576, got {self.dtype.value}, {self.head_dim_v} and {self.head_dim}; leave "
                "latent out"
            )

    def _check_combinations(self) -> None:
        if self.precision is not Precision.IEEE and self.dtype is not DType.FLOAT32:
            raise ProblemError(
                f"precision {self.precision.value} is a choice for float32 alone, got {self.dtype.value}; leave it out"
            )
        if self.deterministic and self.op is not Op.BACKWARD:
            raise ProblemError(
                f"deterministic is a choice for the operation backward alone, got {self.op.value}; leave it out, since "
                "outputs always agree to the bit"
            )
        if self.modifiers.learned_slopes and not self.modifiers.alibi:
            raise ProblemError("learned_slopes must come with alibi, whose slopes they are, got no alibi; add it")
        for longest, tokens in (("seq_q", "tokens_q"), ("seq_kv", "tokens_kv")):
            most, total = getattr(self, longest), getattr(self, tokens)
            if not self.packed and total:
                raise ProblemError(f"{tokens} belongs to the layout packed, got {self.layout.value}; leave it out")
            if self.packed and total < most:
                raise ProblemError(f"{tokens} must be at least {longest}, {most}, got {total}; correct it")
        if self.packed and (self.mask.sparse or self.modifiers.bias is not Bias.NONE):
            what = "a block table" if self.mask.sparse else "a bias"
            raise ProblemError(
                f"packed sequences take full, causal and window masks, got {what}; pad the sequences to one length, or "
                "say it with score_mod"
            )
        if self.cache is not None:
            self._check_cache()
        if self.key_lengths is not None and (self.cache is None or self.key_lengths.longest > self.seq_kv):
            came = "no cache" if self.cache is None else f"{self.key_lengths} and seq_kv {self.seq_kv}"
            raise ProblemError(
                f"lengths belong to sequences in a cache of at most seq_kv keys, got {came}; correct one of them"
            )
        if self.packed and self.mask.alignment is Alignment.TOP_LEFT:
            raise ProblemError(
                "packed sequences align a causal mask bottom-right, got top-left; use F.scaled_dot_product_attention "
                "on a nested tensor"
            )

    def _check_cache(self) -> None:
        unsupported = {
            "gradients": self.op is not Op.FORWARD,
            "float8": self.dtype is DType.FLOAT8,
            "a block table": self.mask.sparse,
            "float32 under a cache of float8": self.caches_float8 and self.dtype is DType.FLOAT32,
            "a causal mask aligned top-left": self.mask.alignment is Alignment.TOP_LEFT,
            "a bias": self.modifiers.bias is not Bias.NONE,
            "dropout": self.modifiers.dropout,
        }
        if came := next((name for name, there in unsupported.items() if there), None):
            raise ProblemError(
                "attention on a cache takes full masks, windows and causal masks aligned bottom-right, of 16 or 32 "
                f"bits, got {came}; gather the keys and call attention"
            )

    def simplified(self) -> Problem:
        """The same problem under its simplest name: a window that is wider than the sequence has no bound on that side.

        The last query stands at the last key, so `left` binds below seq_kv - 1; the first stands seq_q - 1 before it,
        so `right` binds below seq_q - 1. (FlashAttention-2 compares `right` with seq_kv, which is wrong for
        seq_q > seq_kv: Dao-AILab/flash-attention issue 895.)
        """
        return self if self.mask.kind is not MaskKind.WINDOW else replace(self, mask=self.simplest_mask)

    @property
    def simplest_mask(self) -> Mask:
        """The mask of the problem under its simplest name; see `simplified`."""
        left, right = self.mask.left, self.mask.right
        if self.mask.kind is not MaskKind.WINDOW:
            return self.mask
        left = -1 if left is None or left >= self.seq_kv - 1 else left
        right = -1 if right is None or (right >= self.seq_q - 1 and right > 0) else right
        return _window(left, right)

    def resized(self, batch: int, seq_q: int, seq_kv: int, tokens_q: int = 0, tokens_kv: int = 0) -> Problem:
        """The same problem with other sizes, unchecked: a tenth of what `dataclasses.replace` takes.

        They must be such that the mask keeps its name: see `simplified`, and top-left masks of equal lengths.
        """
        resized = object.__new__(Problem)
        for write, value in zip(_WRITE, (*_unsized_of(self), batch, seq_q, seq_kv, tokens_q, tokens_kv), strict=True):
            write(resized, value)
        return resized

    @property
    def packed(self) -> bool:
        """Whether sequences of their own lengths stand one behind the other."""
        return self.layout is Layout.PACKED

    @property
    def caches_float8(self) -> bool:
        """Whether keys and values lie in a cache of float8, with scales."""
        return self.cache is not None and self.cache.float8

    @property
    def is_latent(self) -> bool:
        """Whether values are the first elements of keys, in a cache that holds them once."""
        return self.cache is not None and self.cache.latent

    @property
    def elements_per_key(self) -> int:
        """Elements in memory of a key and its value together."""
        return self.head_dim + (0 if self.is_latent else self.head_dim_v)

    @property
    def loads_float8(self) -> bool:
        """Whether some tensor is float8."""
        return self.dtype is DType.FLOAT8 or self.caches_float8

    @property
    def key_bytes(self) -> int:
        """Of one element of a key or a value."""
        return DType.FLOAT8.bytes if self.caches_float8 else self.dtype.bytes

    @property
    def bytes_of_keys(self) -> int:
        """Of the keys and values of all sequences together."""
        keys = self.tokens_kv if self.packed else self.batch * self.seq_kv
        if self.key_lengths is not None:
            keys = sum(self.key_lengths.drawn(self.batch))
        return self.heads_kv * keys * self.elements_per_key * self.key_bytes

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // self.heads_kv

    @property
    def head_dim_padded(self) -> int:
        """The head dim that tiles are padded to: a power of two that a tensor core can chew, at least 16."""
        return padded(self.head_dim)

    @property
    def head_dim_v_padded(self) -> int:
        """The same of a value."""
        return padded(self.head_dim_v)

    @property
    def key(self) -> str:
        """A sortable name that holds every fact and can stand in a file name; what few ask for stands last."""
        mask = str(self.mask).replace(":", "-").replace(",", "-").replace("--1", "-all")
        mask += f"-{digest(self.mask.mod)}" if self.mask.mod else ""
        tokens = f"_t{self.tokens_q}-{self.tokens_kv}" if self.packed else ""
        numerics = f"_{self.numerics.value}" if self.numerics is not Numerics.ANY else ""
        numerics += "_deterministic" * self.deterministic
        cache = "" if self.cache is None else "_" + re.sub("[:,=]", "-", str(self.cache))
        cache += "" if self.key_lengths is None else "_" + re.sub("[:,]", "-", str(self.key_lengths))
        return (
            f"{self.op.value}_{self.family}_b{self.batch}_h{self.heads_q}-{self.heads_kv}"
            f"_q{self.seq_q}_k{self.seq_kv}_{mask}_{self.layout.value}{tokens}{numerics}{cache}"
        )

    @property
    def order(self) -> tuple[str | int, ...]:
        """What people expect lists of problems to be sorted by: kind first, then sizes as numbers."""
        dims = (self.head_dim, self.head_dim_v)
        sizes = (self.seq_q, self.seq_kv, self.batch, self.heads_q, self.heads_kv, self.tokens_q, self.tokens_kv)
        kind = (self.op.value, self.dtype.value, self.precision.value, *dims, " ".join(self.modifiers.names))
        return (*kind, *sizes, str(self.mask), self.layout.value, self.key)

    @property
    def family(self) -> str:
        """Dtype, precision, head dims and modifiers: what a kernel is compiled for, whatever the mask and the sizes."""
        precision = f"-{self.precision.value}" if self.dtype is DType.FLOAT32 else ""
        value = f"-{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""
        return "_".join([f"{self.dtype.value}{precision}_d{self.head_dim}{value}", *self.modifiers.names])

    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of each sequence. A packed problem does not say them, so this is a mix that fits: the longest
        comes first, the others rise like a ramp.
        """
        if self.key_lengths is not None:
            queries = ramp(self.batch, self.seq_q, self.tokens_q) if self.packed else (self.seq_q,) * self.batch
            return tuple(zip(queries, self.key_lengths.drawn(self.batch), strict=True))
        if not self.packed:
            return ((self.seq_q, self.seq_kv),) * self.batch
        queries = ramp(self.batch, self.seq_q, self.tokens_q)
        keys = ramp(self.batch, self.seq_kv, self.tokens_kv)
        return tuple(zip(queries, keys, strict=True))

    def kept_pairs(self) -> int:
        """(query, key) pairs that the mask keeps, in one head of all sequences."""
        if self.mask.sparse:
            return self.batch * round(self.seq_q * self.seq_kv * self.mask.density)
        if self.key_lengths is not None:
            return sum(self._kept_pairs(*lengths) for lengths in self.lengths())
        if not self.packed:
            return self.batch * self._kept_pairs(self.seq_q, self.seq_kv)
        return _packed_pairs(self)

    def _kept_pairs(self, seq_q: int, seq_kv: int) -> int:
        return pairs_in_band(*self.band(seq_q, seq_kv), seq_q, seq_kv)

    def band(self, seq_q: int, seq_kv: int) -> tuple[int | None, int | None]:
        """(first, last): query i of a sequence sees the keys i + first..i + last; None is no bound."""
        mask = self.mask
        shift = seq_kv - seq_q if mask.alignment is Alignment.BOTTOM_RIGHT else 0
        first = None if mask.left is None else shift - mask.left
        last = shift if mask.causal else None if mask.right is None else shift + mask.right
        return first, last

    def flops(self) -> int:
        """Floating-point operations of the kept pairs: 2 operations per pair and element of a product.

        Forward has two products; backward has five, of which three sum or give elements of the head dim and two those
        of a value.
        """
        elements = self.head_dim + self.head_dim_v
        if self.op is Op.BACKWARD:
            elements = 3 * self.head_dim + 2 * self.head_dim_v
        return 2 * self.heads_q * self.kept_pairs() * elements

    def bytes(self) -> int:
        """Bytes that must cross device memory: each input read once, each output written once.

        Forward reads query, key and value and writes the output; backward reads all four, the output's gradient and
        the LSE, and writes three gradients. A bias may have any size, and is left out.
        """
        queries = self.heads_q * (self.tokens_q if self.packed else self.batch * self.seq_q)
        read = queries * self.head_dim * self.dtype.bytes + self.bytes_of_keys
        output = queries * self.head_dim_v * self.dtype.output.bytes
        return 2 * read + 2 * output + 4 * queries if self.op is Op.BACKWARD else read + output

    def __str__(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        dtype = re.sub("float", "fp", self.dtype.value).replace("bfp", "bf").replace("fp8_e4m3", "fp8")
        if self.dtype is DType.FLOAT32:
            dtype += f":{self.precision.value}"
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        mask = self.mask.kind.value if self.mask.causal and self.seq_q == self.seq_kv else str(self.mask)
        mask += f"-{digest(self.mask.mod)}" if self.mask.mod else ""
        layout = "" if self.layout is Layout.BHSD else f" {self.layout.value}"
        layout += f" {self.tokens_q}x{self.tokens_kv} tokens" if self.packed else ""
        choices = [self.numerics.value] if self.numerics is not Numerics.ANY else []
        choices += ["deterministic"] * self.deterministic
        choices += [] if self.cache is None else [f"cache {self.cache}"]
        choices += [] if self.key_lengths is None else [f"lengths {self.key_lengths}"]
        name = "" if self.op is Op.FORWARD else f"{self.op.value} "
        name += f"{dtype} B{self.batch} H{heads} {self.seq_q}x{self.seq_kv} {dims} {mask}{layout}"
        return " ".join([name, *self.modifiers.names, *choices])


_window = lru_cache(maxsize=256)(Mask.window)


@lru_cache(maxsize=64)
def _packed_pairs(problem: Problem) -> int:
    """The pairs of all sequences of a packed problem; asked several times while it is planned."""
    if (problem.seq_q, problem.tokens_q) == (problem.seq_kv, problem.tokens_kv):  # one band for all sequences
        band = problem.band(problem.seq_q, problem.seq_kv)
        return sum(pairs_in_band(*band, seq, seq) for seq in ramp(problem.batch, problem.seq_q, problem.tokens_q))
    return sum(problem._kept_pairs(*lengths) for lengths in problem.lengths())


SIZES = ("batch", "seq_q", "seq_kv", "tokens_q", "tokens_kv")  # what may differ from call to call
Sizes: TypeAlias = tuple[int, int, int, int, int]  # in this order
_UNSIZED = tuple(field.name for field in fields(Problem) if field.name not in SIZES)
sizes_of: Callable[[Problem], Sizes] = attrgetter(*SIZES)
_unsized_of = attrgetter(*_UNSIZED)
# What writes each fact into a problem's slots, past the frozen dataclass
_WRITE: tuple[Callable[[Problem, object], None], ...] = tuple(
    getattr(Problem, name).__set__ for name in (*_UNSIZED, *SIZES)
)
