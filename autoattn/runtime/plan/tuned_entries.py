"""The tuned entries of a device that one kernel's text serves, gathered once from the cache files.

A call of a new length looks among them and reads no file; what is kept holds until one of the files changes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from autoattn.cache import file_format, file_stamps, inventory, precedence, sister_cards, store
from autoattn.cache.file_format import CacheFile
from autoattn.cache.precedence import Placed
from autoattn.cache.sister_cards import SisterCard
from autoattn.core import kernel_kind
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.mask import MaskKind
from autoattn.core.problem import Numerics, Op, Problem, Sizes, sizes_of
from autoattn.runtime.plan.kind_rules import KindRules

MAX_KINDS = 512  # whose entries are kept
CHECK_SECONDS = 0.5  # for which a program that meets ever new classes of sizes takes cache files as unchanged
Extents: TypeAlias = tuple[float, float, float, float]  # `extents_of` a problem
Octaves: TypeAlias = tuple[float, float, float, float]  # `octaves_of` these
Bucket: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Neighbour:
    """A problem that was measured on this card, or on a sister card."""

    key: str
    octaves: Octaves  # where a sister card measured it, of the heads that give this card's SMs as much work each
    bucket: Bucket
    deterministic: bool
    numerics: Numerics
    places: tuple[Placed, ...]
    card: SisterCard | None = None  # which measured it; None is this card


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TunedEntries:
    """Entries of one operation on one device.

    Of one problem, those of nearer releases of Triton and of earlier folders come first.
    """

    device: Device
    measured: dict[str, tuple[Placed, ...]]  # problem key -> those that were measured on this card
    predicted: dict[str, tuple[Placed, ...]]  # problem key -> those that were predicted for this kind of card
    neighbours: tuple[Neighbour, ...]  # the problems of `measured`
    sisters: tuple[Neighbour, ...]  # problems that sister cards measured
    of_sisters: frozenset[str]  # the keys of these
    sizes: frozenset[Sizes]  # of all problems here
    foreign: tuple[str, ...]  # what is said of files that speak of another card
    buckets: dict[int, Bucket]  # ids of all entries here -> `bucket` of their problems
    answers: dict[Problem, Any] = field(default_factory=dict)  # who speaks for a class of sizes -> what it gets
    _rules: dict[tuple[Numerics, bool], KindRules] = field(default_factory=dict)
    _candidates: dict[int, tuple[CacheEntry, ...]] = field(default_factory=dict)
    _held_back: dict[int, str | None] = field(default_factory=dict)

    def rules_for(self, problem: Problem) -> KindRules:
        """What search spaces say of kernels for problems that differ from `problem` in sizes alone."""
        key = problem.numerics, problem.deterministic
        rules = self._rules.get(key)
        if rules is None:
            rules = self._rules[key] = KindRules(problem, self.device, self.why_held_back)
        return rules

    def candidates(self, places: tuple[Placed, ...]) -> tuple[CacheEntry, ...]:
        """Those of `places`, a value of `measured` or `predicted`, that may count: the first that can serve does."""
        candidates = self._candidates.get(id(places))
        if candidates is None:
            candidates = tuple(place.entry for place in precedence.worth_asking(places))
            self._candidates[id(places)] = candidates
        return candidates

    def why_held_back(self, entry: CacheEntry) -> str | None:
        """`store.why_held_back`; each of the entries here is asked once."""
        if id(entry) not in self.buckets:
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
    if known is not None and file_stamps.are_unchanged(known[1], known[0]):
        return known[2]
    paths = tuple(
        str(path)
        for folder in folders
        for path in (
            *store.paths_of(folder, device, problem.op),
            *sister_cards.watched_paths(folder, device, problem.op),
        )
    )
    stamps = file_stamps.of(paths)  # before the files are read: one that changes meanwhile is read again
    entries = read(problem.op, device, folders, kind)
    with _writing:
        while len(_kept) >= MAX_KINDS:
            del _kept[next(iter(_kept))]  # the oldest
        _kept[key] = stamps, paths, entries
    return entries


class WatchedEntries:
    """The entries that share kernels with a problem, for who asks time and again, with each new class of sizes.

    Whether a cache file changed is looked at once in CHECK_SECONDS: it takes as long as all else of a look-up.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        """Of the folders that calls read, which are looked at when the entries are first asked for."""
        self._problem, self._device = problem, device
        self._entries: TunedEntries | None = None
        self._until = 0.0  # of the clock, in seconds

    def now(self) -> TunedEntries:
        """The entries.

        Raises:
            CacheError: a cache file is damaged or newer.
        """
        now = time.monotonic()
        if self._entries is None or now >= self._until:
            self._entries = of(self._problem, self._device, inventory.folders(None))
            self._until = now + CHECK_SECONDS
        return self._entries


def read(op: Op, device: Device, folders: tuple[Path, ...], kind: KernelKind | None = None) -> TunedEntries:
    """The entries of a device and an operation; of one kind of kernel where one is given.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    files = [(folder, file) for folder in folders for file in store.files_of(folder, device, op)]
    measured: dict[str, list[Placed]] = {}
    predicted: dict[str, list[Placed]] = {}
    for key, place in _places(files, kind):
        if not place.measured:
            predicted.setdefault(key, []).append(place)
        elif place.fingerprint == device.fingerprint:
            measured.setdefault(key, []).append(place)
    sisters = _sisters(op, device, folders, kind)
    groups = [*measured.values(), *predicted.values(), *(neighbour.places for neighbour in sisters)]
    of_card = {key: tuple(places) for key, places in measured.items()}
    return TunedEntries(
        device=device,
        measured=of_card,
        predicted={key: tuple(places) for key, places in predicted.items()},
        neighbours=tuple(_neighbour(key, places) for key, places in of_card.items()),
        sisters=sisters,
        of_sisters=frozenset(neighbour.key for neighbour in sisters),
        sizes=frozenset(sizes_of(places[0].entry.problem) for places in groups),
        foreign=tuple(
            f"{store.path_in(folder, file)} speaks of {file.fingerprint}, not of {device.fingerprint}"
            for folder, file in files
            if file.fingerprint != device.fingerprint
        ),
        buckets={id(place.entry): bucket(place.entry.problem) for places in groups for place in places},
    )


def _places(files: Iterable[tuple[Path, CacheFile]], kind: KernelKind | None) -> Iterator[tuple[str, Placed]]:
    """The entries of cache files with their keys; of one kind of kernel where one is given."""
    for folder, file in precedence.nearest_release_first(files):
        for key, problem in file_format.problems_of(file):
            if kind is None or kernel_kind.of(problem) == kind:
                entry = file.entries[key]
                yield key, Placed(folder=folder, release=file.triton, fingerprint=file.fingerprint, entry=entry)


def _sisters(op: Op, device: Device, folders: tuple[Path, ...], kind: KernelKind | None) -> tuple[Neighbour, ...]:
    """The problems that sister cards measured, each card's apart."""
    cards: dict[str, SisterCard] = {}
    files: list[tuple[Path, CacheFile]] = []
    for folder in folders:
        for card, file in sister_cards.files_of(folder, device, op):
            cards[file.fingerprint] = card
            files.append((folder, file))
    measured: dict[tuple[str, str], list[Placed]] = {}
    for key, place in _places(files, kind):
        if place.measured:
            measured.setdefault((place.fingerprint, key), []).append(place)
    return tuple(
        _of_sister(_neighbour(key, tuple(places)), cards[fingerprint], device)
        for (fingerprint, key), places in measured.items()
    )


def _of_sister(neighbour: Neighbour, card: SisterCard, device: Device) -> Neighbour:
    """A sister card's problem, as far from problems of this card as the work of one SM is."""
    queries, keys, heads, group = extents_of(neighbour.places[0].entry.problem)
    octaves = octaves_of((queries, keys, heads * device.sm_count / card.sm_count, group))
    return replace(neighbour, octaves=octaves, card=card)


def _neighbour(key: str, places: tuple[Placed, ...]) -> Neighbour:
    problem = places[0].entry.problem
    return Neighbour(
        key=key,
        octaves=octaves_of(extents_of(problem)),
        bucket=bucket(problem),
        deterministic=problem.deterministic,
        numerics=problem.numerics,
        places=places,
    )


def bucket(problem: Problem, extents: Extents | None = None) -> Bucket:
    """Lengths, keys that a query sees, and heads, rounded up to powers of two.

    Args:
        extents: `extents_of` the problem, where they are known.
    """
    queries, keys, heads, group = map(int, extents or extents_of(problem))  # written out: a new length asks for it
    return (
        max(0, queries - 1).bit_length(),
        max(0, keys - 1).bit_length(),
        (heads - 1).bit_length(),
        (group - 1).bit_length(),
        (problem.seq_kv - 1).bit_length(),
    )


def extents_of(problem: Problem) -> Extents:
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


def octaves_of(extents: Extents) -> Octaves:
    """Logarithms of `extents_of`, of which neighbours keep theirs."""
    queries, keys, heads, group = extents
    log2 = math.log2
    return log2(queries), log2(keys), log2(heads), log2(group)


def fills_multiprocessors(octaves: Octaves, device: Device) -> bool:
    """Whether heads of keys alone have a program for each SM, of few queries, so that no programs need share a tile."""
    _, _, heads, group = octaves
    return heads - group >= math.log2(device.sm_count)


def distance_between(problem: Problem, other: Problem) -> float:
    """Octaves between two problems, summed over queries of a sequence, keys, heads and group size."""
    return distance(octaves_of(extents_of(problem)), octaves_of(extents_of(other)))


def distance(octaves: Octaves, others: Octaves) -> float:
    """The same of their `octaves_of`."""
    queries, keys, heads, group = octaves  # written out, since a new class of sizes asks of each entry
    other_queries, other_keys, other_heads, other_group = others
    return abs(queries - other_queries) + abs(keys - other_keys) + abs(heads - other_heads) + abs(group - other_group)


_kept: dict[tuple[KernelKind, Device, tuple[Path, ...]], tuple[file_stamps.Stamps, tuple[str, ...], TunedEntries]] = {}
_writing = threading.Lock()
