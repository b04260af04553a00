"""How a cache holds the keys and values of a problem, as one value."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoattn.errors import ProblemError

MAX_PAGE = 2**20  # keys of a page
_PAGED = re.compile(r"paged:([0-9]{1,7})")
_OPTIONS = ("rows", "leftpad")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCache:
    """A cache of keys and values that holds more than a call reads; the lengths lie on the device.

    Raises:
        ProblemError: a page has no such size, or pages come with what contiguous caches alone have.
    """

    page: int = 0  # keys of a page, which a table of pages finds; 0 is a contiguous cache
    rows: bool = False  # a tensor says which row of a contiguous cache each sequence has
    leftpad: bool = False  # a tensor says where the keys of each sequence begin in its row

    def __post_init__(self) -> None:
        if isinstance(self.page, bool) or not isinstance(self.page, int) or not 0 <= self.page <= MAX_PAGE:
            raise ProblemError(
                f"a page of a cache must have from 1 to {MAX_PAGE} keys, got {self.page!r}; use a contiguous cache"
            )
        if self.page and (self.rows or self.leftpad):
            raise ProblemError(
                "rows and leftpad belong to contiguous caches, got them with pages; say it with the table of pages"
            )

    @classmethod
    def parse(cls, text: str) -> KeyCache:
        """Reads `contiguous`, `contiguous:rows`, `contiguous:leftpad`, `contiguous:rows,leftpad` or `paged:KEYS`.

        Raises:
            ProblemError: the text is none of them.
        """
        if match := _PAGED.fullmatch(str(text)):
            if int(match[1]):
                return cls(page=int(match[1]))
        else:
            kind, colon, rest = str(text).partition(":")
            options = rest.split(",") if colon else []
            if kind == "contiguous" and options == [name for name in _OPTIONS if name in options]:
                return cls(rows="rows" in options, leftpad="leftpad" in options)
        raise ProblemError(
            "cache must be contiguous, contiguous:rows, contiguous:leftpad, contiguous:rows,leftpad or paged:KEYS (as "
            f"paged:16), got {text!r}; correct it"
        )

    def __str__(self) -> str:
        if self.page:
            return f"paged:{self.page}"
        options = ",".join(name for name in _OPTIONS if getattr(self, name))
        return f"contiguous:{options}" if options else "contiguous"
