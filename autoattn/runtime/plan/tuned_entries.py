"""The tuned entries of a device that one kernel's text serves, gathered once from the cache files.

A call of a new length looks among them and reads no file; what is kept holds until one of the files changes.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoattn.cache import precedence, store
from autoattn.cache.precedence import Placed
from autoattn.codegen.feasibility import Judgement
from autoattn.core import kernel_kind
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.mask import MaskKind
from autoattn.core.problem import Numerics, Op, Problem

MAX_KINDS = 512  # whose entries are kept
Sizes = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TunedEntries:
    """Entries of one operation on one device.

    Of one problem, those of nearer releases of Triton and of earlier folders come first.
    """

    measured: dict[str, tuple[Placed, ...]]  # problem key -> those that were measured on this card
    predicted: dict[str, tuple[Placed, ...]]  # problem key -> those that were predicted for this kind of card
    sizes: dict[str, Sizes]  # problem key -> `sizes_of` of a measured problem
    foreign: tuple[str, ...]  # what is said of files that speak of another card
    entries: frozenset[int]  # the ids of all entries here
    # (id of an entry, numerics, whether gradients must repeat) -> what the rules say of it, once asked
    judgements: dict[tuple[int, Numerics, bool], Judgement] = field(default_factory=dict)
    answers: dict[Problem, Any] = field(default_factory=dict)  # who speaks for a class of sizes -> what it gets
    _held_back: dict[int, str | None] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def name_of(self, entry: CacheEntry) -> str:
        """An entry's problem in words; put together once."""
        if (known := self._names.get(id(entry))) is not None:
            return known
        name = str(entry.problem)
        if id(entry) in self.entries:
            self._names[id(entry)] = name
        return name

    def why_held_back(self, entry: CacheEntry) -> str | None:
        """`store.why_held_back`; each of the entries here is asked once."""
        if id(entry) not in self.entries:
            return store.why_held_back(entry)
        if id(entry) not in self._held_back:
            self._held_back[id(entry)] = store.why_held_back(entry)
        return self._held_back[id(entry)]


def of(problem: Problem, device: Device, folders: tuple[Path, ...]) -> TunedEntries:
    """The entries that share kernels with a problem.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    kind = kernel_kind.of(problem)
    key = kind, device, folders
    known = _kept.get(key)
    if known is not None and known[0] == store.stamps(known[1]):
        return known[2]
    paths = tuple(str(path) for folder in folders for path in store.paths_of(folder, device, problem.op))
    stamps = store.stamps(paths)  # before the files are read: one that changes meanwhile is read again
    entries = read(problem.op, device, folders, kind)
    with _writing:
        while len(_kept) >= MAX_KINDS:
            del _kept[next(iter(_kept))]  # the oldest
        _kept[key] = stamps, paths, entries
    return entries


def read(op: Op, device: Device, folders: tuple[Path, ...], kind: KernelKind | None = None) -> TunedEntries:
    """The entries of a device and an operation; of one kind of kernel where one is given.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    files = [(folder, file) for folder in folders for file in store.files_of(folder, device, op)]
    measured: dict[str, list[Placed]] = {}
    predicted: dict[str, list[Placed]] = {}
    for folder, file in precedence.nearest_release_first(files):
        for key, entry in file.entries.items():
            if kind is not None and kernel_kind.of(entry.problem) != kind:
                continue
            place = Placed(folder=folder, release=file.triton, fingerprint=file.fingerprint, entry=entry)
            if not place.measured:
                predicted.setdefault(key, []).append(place)
            elif file.fingerprint == device.fingerprint:
                measured.setdefault(key, []).append(place)
    return TunedEntries(
        measured={key: tuple(places) for key, places in measured.items()},
        predicted={key: tuple(places) for key, places in predicted.items()},
        sizes={key: sizes_of(places[0].entry.problem) for key, places in measured.items()},
        foreign=tuple(
            f"{store.path_in(folder, file)} speaks of {file.fingerprint}, not of {device.fingerprint}"
            for folder, file in files
            if file.fingerprint != device.fingerprint
        ),
        entries=frozenset(
            id(place.entry) for group in (measured, predicted) for places in group.values() for place in places
        ),
    )


def sizes_of(problem: Problem) -> Sizes:
    """Queries of a mean sequence, its keys, heads of all sequences, and group size.

    Of keys count those that a mean query sees (at least 1), where the lengths do not tell: in a window, in a block
    table and where lengths are mixed.
    """
    queries, keys = float(problem.seq_q), float(problem.seq_kv)
    if problem.packed:
        queries = problem.tokens_q / problem.batch
    if problem.packed or problem.mask.kind in (MaskKind.WINDOW, MaskKind.BLOCKS):
        keys = max(1.0, problem.kept_pairs() / (queries * problem.batch))
    return queries, keys, problem.batch * problem.heads_q, problem.group_size


def distance(sizes: Sizes, others: Sizes) -> float:
    """Octaves between two problems, summed over what `sizes_of` tells of them."""
    queries, keys, heads, group = sizes  # written out, since a new length asks of each entry
    log2 = math.log2
    return (
        abs(log2(others[0] / queries)) + abs(log2(others[1] / keys))
        + abs(log2(others[2] / heads)) + abs(log2(others[3] / group))
    )  # fmt: skip


_kept: dict[tuple[KernelKind, Device, tuple[Path, ...]], tuple[store.Stamps, tuple[str, ...], TunedEntries]] = {}
_writing = threading.Lock()
