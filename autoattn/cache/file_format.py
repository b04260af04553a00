"""The text of a cache file: readable JSON, the same bytes for the same entries, and refused where it is damaged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from autoattn.codegen import search_space
from autoattn.core.cache_entry import KERNEL, CacheEntry
from autoattn.core.mask import Mask
from autoattn.core.problem import Op, Problem
from autoattn.errors import CacheError

SCHEMA = 1
# What is left out of a file: a fact that joined later, where an entry does not have it.
_UNTOLD = (
    *(("finals", None), ("worst", None), ("lead", None), ("energy", None), ("rms_error", None)),
    *(("objective", "time"), ("mark", None), ("code", ""), ("deterministic", False), ("learned_slopes", False)),
    *(("checked", ""), ("absent", None), ("cache", None), ("key_lengths", None)),
    *(("float8", False), ("split_length", 0)),  # of a cache of keys
)
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFile:
    """All entries of one device, operation and release of Triton.

    The compiler makes another kernel of the same text, so that a time holds for one release.
    """

    schema: int
    op: Op
    device: str  # the short name, also the folder
    triton: str  # the release, as "3.9"; empty for entries of several, which no file holds
    fingerprint: str  # of the card; a measured entry holds only where it agrees
    entries: Mapping[str, CacheEntry]  # problem key -> entry, sorted

    @property
    def name(self) -> str:
        """The name of the file in the device's folder."""
        return name_of(self.op, self.triton)


class _Problem(msgspec.Struct):
    """The problem of an entry, without the rest."""

    problem: Problem


class _UnreadFile(msgspec.Struct):
    """A cache file whose entries are not read yet."""

    schema: int
    op: Op
    device: str
    triton: str
    fingerprint: str
    entries: dict[str, msgspec.Raw]


class UnreadEntries(Mapping[str, CacheEntry]):
    """Entries that are read when they are asked for: a process uses few of those that autoattn brings."""

    def __init__(self, texts: dict[str, msgspec.Raw]) -> None:
        """Keeps the entries' texts."""
        self._texts = texts
        self._read: dict[str, CacheEntry] = {}

    def __getitem__(self, key: str) -> CacheEntry:
        entry = self._read.get(key)
        if entry is None:
            entry = self._read.setdefault(key, msgspec.json.decode(self._texts[key], type=CacheEntry))
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def problem_of(self, key: str) -> Problem:
        """The problem of an entry, which is not read for it."""
        return msgspec.json.decode(self._texts[key], type=_Problem).problem


def problems_of(file: CacheFile) -> Iterator[tuple[str, Problem]]:
    """The key and the problem of each entry."""
    entries = file.entries
    for key in entries:
        yield key, entries.problem_of(key) if isinstance(entries, UnreadEntries) else entries[key].problem


def name_of(op: Op, release: str) -> str:
    """The name of the cache file of an operation and a release of Triton."""
    return f"{op.value}.triton-{release}.json"


def is_name(name: str) -> bool:
    """Whether a file's name is that of a cache file."""
    return any(re.fullmatch(rf"{op.value}\.triton-[0-9]+\.[0-9]+\.json", name) for op in Op)


def encode(file: CacheFile) -> bytes:
    """The text of a cache file.

    Raises:
        ValueError: it could not be read back.
    """
    # JSON has no NaN and no infinity; such an entry would make the whole file unreadable.
    whole = replace(file, entries=dict(file.entries))
    text = json.dumps(_tidy(msgspec.to_builtins(whole)), indent=1, ensure_ascii=False, allow_nan=False)
    data = text.encode() + b"\n"
    if len(data) > MAX_BYTES:
        raise ValueError(f"it would be larger than {MAX_BYTES} bytes")
    return data


def _tidy(value: Any) -> Any:
    """Floats with 6 significant digits: more would be noise in a diff. Without facts that entries of old have not."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _tidy(part) for name, part in value.items() if (name, part) not in _UNTOLD}
    if isinstance(value, list | tuple):
        return [_tidy(part) for part in value]
    return value


def decode(data: bytes, path: Path, *, checked: bool = False) -> CacheFile:
    """The cache file that `data` is; `path` names it and says which device and operation it must be of.

    Args:
        checked: whether its entries were checked before, as those that an installed autoattn brings. They are read
            when they are asked for, which spares the first call of a process 30 ms.

    Raises:
        CacheError: it is damaged, newer or foreign.
    """
    try:
        if not checked:
            raw = json.loads(data, object_pairs_hook=_once)
            if not isinstance(raw, dict) or "schema" not in raw or "entries" not in raw:
                raise CacheError(f"{path} must be an autoattn cache file, got something else; name another file")
            if raw["schema"] != SCHEMA:
                came = f"{raw['schema']!r:.40}"
                raise CacheError(f"{path} must have schema {SCHEMA}, got {came}; use a matching autoattn")
            file = msgspec.json.decode(data, type=CacheFile)
            for key, entry in file.entries.items():
                check(key, entry, file.triton)
        else:
            unread = msgspec.json.decode(data, type=_UnreadFile)
            facts = {name: getattr(unread, name) for name in ("schema", "op", "device", "triton", "fingerprint")}
            file = CacheFile(**facts, entries=UnreadEntries(unread.entries))
    except (ValueError, RecursionError) as error:  # msgspec's, json's, Unicode's and our own are ValueErrors
        raise CacheError(f"the cache file {path} is damaged ({clipped(error)}); restore it or move it away") from None
    if (file.device, file.name) != (path.parent.name, path.name):
        raise CacheError(
            f"the cache file {path} must hold {path.stem} on {path.parent.name}, "
            f"got {file.name.removesuffix('.json')!r:.60} on {file.device!r:.60}; move it where it belongs"
        )
    return file


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: of two equal ones, which a merge by hand may leave, JSON keeps the last."""
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{double!r:.100} stands twice in one object")
    return members


def check(key: str, entry: CacheEntry, release: str) -> None:
    """Raises ValueError (which SpaceError is) for an entry that no tuner can have written with a release of Triton.

    Parameters of another search space are let pass, so that one old entry does not close the file; `why_stale` finds
    them before anything is rendered.
    """
    if key != entry.problem.key:
        raise ValueError(f"the entry {key!r:.100} holds the problem {entry.problem.key}")
    if entry.triton_release not in ("", release):
        raise ValueError(f"{entry.problem.key} was tuned with Triton {entry.triton_release}, and not with {release}")
    mask = entry.problem.mask
    if replace(Mask.parse(str(mask)), density=mask.density, mod=mask.mod) != mask:
        raise ValueError(f"the mask of {entry.problem.key} has numbers that no mask of its kind has")
    spaces = {**entry.search.spaces, entry.template: entry.space_digest}
    points = [
        (entry.template, entry.params),
        *((candidate.template, candidate.params) for candidate in entry.candidates),
    ]
    for template, params in points:
        if spaces.get(template) == search_space.load(template).digest:
            search_space.load(template).check(params)
    times = [entry.time_us]
    times += [candidate.time_us for candidate in entry.candidates]
    times += [rival.measurement.median_us for rival in entry.rivals]
    if not all(0.0 < time_us < math.inf for time_us in times):
        raise ValueError(f"a time of {entry.problem.key} is not above 0 and finite")
    finalists = entry.finals.finalists if entry.finals is not None else None
    if finalists is not None and entry.source_digest not in [finalist.source_digest for finalist in finalists[:1]]:
        raise ValueError(f"the first finalist of {entry.problem.key} is not its winner")
    if not {rival.name for rival in entry.rivals}.isdisjoint(entry.absent or {}):
        raise ValueError(f"a rival of {entry.problem.key} is recorded as absent")
    if entry.choice != KERNEL and entry.choice not in [rival.name for rival in entry.rivals]:
        raise ValueError(f"the choice {entry.choice!r:.60} of {entry.problem.key} is none of its rivals")


def clipped(error: Exception) -> str:
    """What an error says of a file, as it may stand in a sentence."""
    return " ".join(str(error).split())[:500]
