"""How a cache holds the keys and values of a problem, as one value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from autoattn.core.tile_widths import pieces
from autoattn.errors import ProblemError

MAX_PAGE = 2**20  # keys of a page
MAX_LATENT_DIM = 576  # of a query, where values are the first elements of keys
PART_GROUP = 8  # parts of a tile that are added up before those of other groups
MAX_SPLITS = 2**16  # programs that a caller may name
INVARIANT_SPLITS = 64  # that a call names which asks for the same bits in every batch, and for no number of them
SPLIT_LENGTHS = tuple(2**power for power in range(6, 15))  # 64 to 16,384 keys: whole blocks of keys
_TEXT = re.compile(
    r"(?:contiguous|paged:(?P<page>[0-9]{1,7}))(?P<float8>,float8_e4m3)?(?P<latent>,latent)?"
    r"(?P<rows>,rows)?(?P<leftpad>,leftpad)?"
    r"(?:,splits=(?P<splits>[0-9]{1,5}))?(?:,split_length=(?P<split_length>[0-9]{1,5}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCache:
    """A cache of keys and values that holds more than a call reads; the lengths lie on the device.

    Raises:
        ProblemError: a page has no such size, or pages come with what contiguous caches alone have.
    """

    page: int = 0  # keys of a page, which a table of pages finds; 0 is a contiguous cache
    float8: bool = False  # keys and values are float8_e4m3, with scales, under queries of 16 bits
    latent: bool = False  # values are the first elements of keys, and are not held again (see `are_latent_dims`)
    rows: bool = False  # a tensor says which row of a contiguous cache each sequence has
    leftpad: bool = False  # a tensor says where the keys of each sequence begin in its row
    splits: int = 0  # programs that may share the keys of a sequence; 0 is as many as are fastest
    split_length: int = 0  # keys that each of them has but the last; 0 is as many as are fastest

    def __post_init__(self) -> None:
        if isinstance(self.page, bool) or not isinstance(self.page, int) or not 0 <= self.page <= MAX_PAGE:
            raise ProblemError(
                f"a page of a cache must have from 1 to {MAX_PAGE} keys, got {self.page!r}; use a contiguous cache"
            )
        if isinstance(self.splits, bool) or not isinstance(self.splits, int) or not 0 <= self.splits <= MAX_SPLITS:
            raise ProblemError(
                f"splits must be a whole number from 0 (the fastest) to {MAX_SPLITS}, got {self.splits!r}; correct it"
            )
        if self.split_length and (isinstance(self.split_length, bool) or self.split_length not in SPLIT_LENGTHS):
            raise ProblemError(
                f"split_length must be a power of two from {SPLIT_LENGTHS[0]} to {SPLIT_LENGTHS[-1]}, got "
                f"{self.split_length!r:.60}; correct it"
            )
        if self.page and (self.rows or self.leftpad):
            raise ProblemError(
                "rows and leftpad belong to contiguous caches, got them with pages; say it with the table of pages"
            )

    @classmethod
    def parse(cls, text: str) -> KeyCache:
        """Reads `contiguous` or `paged:KEYS`, and behind commas `float8_e4m3`, `latent`, `rows`, `leftpad`,
        `splits=NUMBER`, `split_length=KEYS`.

        Raises:
            ProblemError: the text is none of them.
        """
        match = _TEXT.fullmatch(str(text))
        if match is None or match["page"] == "0":
            raise ProblemError(
                "cache must be contiguous or paged:KEYS (as paged:16), maybe with ,float8_e4m3 ,latent ,rows "
                f",leftpad or ,splits=NUMBER ,split_length=KEYS behind it in this order, got {text!r}; correct it"
            )
        return cls(
            page=int(match["page"] or 0),
            float8=match["float8"] is not None,
            latent=match["latent"] is not None,
            rows=match["rows"] is not None,
            leftpad=match["leftpad"] is not None,
            splits=int(match["splits"] or 0),
            split_length=int(match["split_length"] or 0),
        )

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a sequence must be the same whatever shares its batch."""
        return bool(self.splits or self.split_length)

    def __str__(self) -> str:
        options = ["float8_e4m3"] if self.float8 else []
        options += [name for name in ("latent", "rows", "leftpad") if getattr(self, name)]
        options += [f"{name}={getattr(self, name)}" for name in ("splits", "split_length") if getattr(self, name)]
        return ",".join([f"paged:{self.page}" if self.page else "contiguous", *options])


@lru_cache(maxsize=256)
def are_latent_dims(head_dim: int, head_dim_v: int) -> bool:
    """Whether a tile of keys can serve as the tile of values, which are its first elements: 576 and 512 of MLA.

    The values fill the first of the two powers of two that hold a key.
    """
    widths = pieces(head_dim)
    return head_dim <= MAX_LATENT_DIM and len(widths) == 2 and widths[0] == head_dim_v
