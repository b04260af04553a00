"""What the text of a rendered kernel says of its launches, read once from the loaded module into a frozen value.

A text has only the tables and functions that its kernels need; this is the one place that asks which are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple

Sizes = Callable[..., int]  # numbers of a buffer, from batch, heads and lengths
TMA = "tensordesc"  # how the type of an argument begins that is a TMA descriptor


class Language(str, Enum):
    """The language of Triton's that a file's kernels are written in; a file in Gluon may hold both."""

    TRITON = "triton"  # Triton's interpreter runs it
    GLUON = "gluon"


class DealtSizes(NamedTuple):
    """How a forward kernel deals out a batch, its heads and their rows."""

    grid: tuple[int] | None
    zeros: tuple[str, int] | None  # the argument for int32 zeros, and how many
    tiles: int
    partials: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """Which buffers, grids and descriptors the launches of a rendered file take; None or empty is none."""

    language: Language = Language.TRITON
    # Arguments
    signature: Mapping[str, str] = field(default_factory=dict)  # argument -> Triton's type, of all kernels together
    descriptors: Mapping[str, str] = field(default_factory=dict)  # those of them that are TMA descriptors
    described: tuple[str, ...] = ()  # the tensors that these are of, each once
    ragged: bool = False  # their boxes of packed tensors end where a sequence does
    # Kernels
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # kernels that share the work -> their options
    programs_an_sm: Mapping[str, int] = field(default_factory=dict)  # kernel -> programs of an SM that walk all tiles
    grid: Callable[..., tuple[int]] | None = None  # of the one kernel
    grids: Callable[..., dict[str, tuple[int]]] | None = None  # of the parts
    grid_before: Callable[..., tuple[int]] | None = None  # of the kernel that makes input ready before the main one
    # Rows of a tile
    packs_all_heads: bool = False  # the query heads that share a key head are the rows of one head
    packed_heads: int = 0  # so many of them are the rows of a tile; 0 where the rows are of one head
    bias_tile: tuple[int, int] | None = None  # (queries, keys) of a tile that sums the gradient of a bias
    # Buffers of forward kernels
    turned: Callable[..., tuple[int, ...]] | None = None  # shape of the values that the kernel before turns
    scratch: Sizes | None = None  # int32 zeros: two counters, then what the tiles say of themselves
    arrivals: Sizes | None = None  # int32 zeros: programs of each shared tile that are done
    tiles: Sizes | None = None  # tiles of which the scratch says whether they were computed again
    partials: Sizes | None = None  # float32 that programs which share a tile leave for one another
    # Buffers of backward kernels
    rows: Sizes | None = None  # of a head, for which there is room where packed sequences begin at rows of their own
    sums: Sizes | None = None  # float32 in which the gradients of queries are added up
    turns: Sizes | None = None  # int32: programs that have added
    key_sums: Sizes | None = None  # float32 that programs leave of the gradients of keys and values that they share
    copies: Callable[..., dict[str, tuple[int, ...]]] | None = None  # tensor -> shape of its turned copy

    def dealt(self, batch: int, heads: int, rows: int, sm_count: int) -> DealtSizes:
        """What a forward kernel's functions say of a launch; 0 and None where it has no such function."""
        sizes, zeros = (batch, heads, rows), None
        for name, numbers in (("arrivals_ptr", self.arrivals), ("scratch_ptr", self.scratch)):
            if numbers is not None:  # no kernel has both
                zeros = name, int(numbers(*sizes))
        return DealtSizes(
            grid=None if self.grid is None else self.grid(*sizes, sm_count),
            zeros=zeros,
            tiles=0 if self.tiles is None else int(self.tiles(*sizes)),
            partials=0 if self.partials is None else int(self.partials(*sizes)),
        )


def described(name: str) -> str:
    """The tensor that a descriptor's argument is of: one that is read in several boxes has one for each, as key_low."""
    for suffix in ("_low", "_high", "_rest", "_tile", "_step"):
        name = name.removesuffix(suffix)
    return name


_FUNCTIONS = (
    *("grid", "grids", "grid_before", "turned"),
    *("scratch", "arrivals", "tiles", "partials", "rows", "sums", "turns", "key_sums", "copies"),
)


def _number(constant: Any) -> int:
    """A constant of a text: Triton's constexpr, or in Gluon's interpreter the number itself."""
    return int(getattr(constant, "value", constant))


def of(module: object) -> Manifest:
    """The manifest of a loaded module; a name that the module lacks leaves its field empty."""
    held = vars(module) if module is not None else {}
    signature = held.get("SIGNATURE", {})
    descriptors = {name: kind for name, kind in signature.items() if kind.startswith(TMA)}
    bias_tile = [held.get(name) for name in ("QUERIES_BLOCK_M", "QUERIES_BLOCK_N")]
    return Manifest(
        # Layouts of boxes are Gluon's to say, so only its files have this table; Triton's name boxes by their type.
        language=Language.GLUON if "DESCRIPTORS" in held else Language.TRITON,
        signature=signature,
        descriptors=descriptors,
        described=tuple(dict.fromkeys(map(described, descriptors))),
        ragged=bool(held.get("RAGGED", False)),
        parts=held.get("PARTS", {}),
        programs_an_sm=held.get("PERSISTENT", {}),
        packs_all_heads="PACK_GQA" in held,
        packed_heads=_number(held.get("HEADS", 0)),
        bias_tile=None if None in bias_tile else (_number(bias_tile[0]), _number(bias_tile[1])),
        **{name: _of_host(held.get(name)) for name in _FUNCTIONS},
    )


class _Host:
    """What functions of a rendered file that run on the host take for `triton`.

    Triton's own `cdiv` looks for constants of its language in what it is given. That takes 1 us, and up to 3 between
    other work, of the 9 times that a training step divides.
    """

    @staticmethod
    def cdiv(x: Any, y: Any) -> int:
        """`triton.cdiv` of numbers, the second of which may be a constant of Triton's language."""
        y = getattr(y, "value", y)
        return -(-x // y)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        import triton

        return getattr(triton, name)


def _of_host(function: Any) -> Any:
    """A function of a rendered file, on plain numbers."""
    if not isinstance(function, FunctionType) or "triton" not in function.__globals__:
        return function
    held = {**function.__globals__, "triton": _Host()}
    return FunctionType(function.__code__, held, function.__name__, function.__defaults__, function.__closure__)
