"""Order of precedence among cache entries of one problem: across cache folders, and in a merge of two caches.

Both rules are stated for users in docs/cache.md. Nothing here reads or writes a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from autoattn.cache import file_format
from autoattn.cache.file_format import CacheFile
from autoattn.core import triton_release
from autoattn.core.cache_entry import KERNEL, CacheEntry
from autoattn.core.problem import Op
from autoattn.core.trial import Evidence

DAY = 0.03  # by which times of one kernel on one card differ between two days
SOFTWARE = ("autoattn", "driver", "torch", "triton")

Source = TypeVar("Source", bound=Hashable)
WhyNot = Callable[[CacheEntry], str | None]  # why an entry is not used, in words; None where it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An entry and the cache folder that holds it."""

    folder: Path
    release: str  # of Triton, of its file
    fingerprint: str  # of the card of its file
    entry: CacheEntry

    @property
    def measured(self) -> bool:
        """Whether the entry rests on a measurement."""
        return self.entry.evidence is Evidence.MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """What several cache folders hold together of one device and operation."""

    device: str
    op: Op
    fingerprint: str  # of the card whose measurements count
    ranked: dict[str, tuple[Placed, ...]]  # problem key -> its entries; the first one counts
    foreign: tuple[Placed, ...]  # measured on another card of the same name

    @property
    def counting(self) -> dict[str, Placed]:
        """The entry of each problem that counts, by the problem's key."""
        return {key: places[0] for key, places in self.ranked.items()}

    @property
    def shadowed(self) -> tuple[Placed, ...]:
        """Entries that give way to another one of the same problem."""
        return tuple(place for places in self.ranked.values() for place in places[1:])

    @property
    def file(self) -> CacheFile:
        """The entries that count, as one that no file holds where they are of several releases of Triton."""
        releases = {place.release for place in self.counting.values()}
        return self._holding(releases.pop() if len(releases) == 1 else "", self.counting)

    @property
    def files(self) -> list[tuple[Path, CacheFile]]:
        """The entries that count, as a cache file for each folder and release of Triton that has some of them."""
        groups = self._grouped(lambda place: (place.folder, place.release))
        return [(folder, self._holding(release, places)) for (folder, release), places in groups.items()]

    @property
    def by_release(self) -> list[CacheFile]:
        """The entries that count, as a cache file for each release of Triton that has some of them."""
        groups = self._grouped(lambda place: place.release)
        return [self._holding(release, places) for release, places in sorted(groups.items())]

    def _grouped(self, source: Callable[[Placed], Source]) -> dict[Source, dict[str, Placed]]:
        """The entries that count, apart by what `source` tells of each."""
        groups: dict[Source, dict[str, Placed]] = {}
        for key, place in self.counting.items():
            groups.setdefault(source(place), {})[key] = place
        return groups

    def _holding(self, release: str, places: dict[str, Placed]) -> CacheFile:
        return CacheFile(
            schema=file_format.SCHEMA,
            op=self.op,
            device=self.device,
            triton=release,
            fingerprint=self.fingerprint,
            entries={key: place.entry for key, place in sorted(places.items())},
        )


def overlay(
    files: Iterable[tuple[Path, CacheFile]], *, why_not: WhyNot, card: Callable[[str], str | None]
) -> list[Overlay]:
    """Combines cache files: of each problem, the entry that counts comes first. This is the only place that does so.

    1. Where the files of one device were measured on several cards, those of the card that `card` names count, else
       those of the first such file.
    2. An entry that is used goes before one that is not. An entry is not used either where an earlier folder holds the
       same kernel with a mark.
    3. A measured entry goes before a predicted one.
    4. An entry of the installed release of Triton goes before one of another, and then one of a newer release.
    5. An earlier folder goes before a later one.

    Args:
        files: cache files and the folder of each; the user's own folder comes first.
        why_not: says why an entry is not used. It is asked only about entries whose problem has several.
        card: the fingerprint of the card that a device's name stands for here, None where nobody knows.

    Returns:
        One overlay for each device and operation, sorted.
    """
    groups: dict[tuple[str, str], list[tuple[Path, CacheFile]]] = {}
    for folder, file in nearest_release_first(files):
        groups.setdefault((file.device, file.op.value), []).append((folder, file))
    return [_overlay(group, why_not, card) for _, group in sorted(groups.items(), key=lambda item: item[0])]


def _overlay(files: list[tuple[Path, CacheFile]], why_not: WhyNot, card: Callable[[str], str | None]) -> Overlay:
    first = files[0][1]
    groups: dict[str, list[Placed]] = {}
    for folder, file in files:
        for key, entry in file.entries.items():
            groups.setdefault(key, []).append(
                Placed(folder=folder, release=file.triton, fingerprint=file.fingerprint, entry=entry)
            )
    places = [place for group in groups.values() for place in group]
    order = dict.fromkeys(file.fingerprint for _, file in files)
    measured_on = {place.fingerprint for place in places if place.measured}
    cards = [fingerprint for fingerprint in order if fingerprint in measured_on] or [first.fingerprint]
    wanted = card(first.device) if len(cards) > 1 else None
    fingerprint = wanted if wanted in cards else cards[0]
    foreign = [place for place in places if place.measured and place.fingerprint != fingerprint]
    if foreign:
        groups = {key: [place for place in group if place not in foreign] for key, group in groups.items()}
    return Overlay(
        device=first.device,
        op=first.op,
        fingerprint=fingerprint,
        ranked={key: tuple(_ranked(group, why_not)) for key, group in groups.items() if group},
        foreign=tuple(foreign),
    )


def nearest_release_first(files: Iterable[tuple[Path, CacheFile]]) -> list[tuple[Path, CacheFile]]:
    """Cache files of the installed release of Triton, then those of others; each in the order of their folders."""
    releases = triton_release.nearest_first()
    return sorted(files, key=lambda item: _rank(releases, item[1].triton))


def _rank(releases: list[str], release: str) -> int:
    """The place of a release among `releases`; behind them all where it is none of them."""
    return releases.index(release) if release in releases else len(releases)


def _ranked(places: list[Placed], why_not: WhyNot) -> list[Placed]:
    """The entries of one problem in the order in which they count; `places` are in the order of the folders."""
    if len(places) == 1:
        return places
    measured = used_first([place for place in places if place.measured], why_not)
    predicted = used_first([place for place in places if not place.measured], why_not)
    prediction_counts = (
        bool(measured and predicted) and why_not(measured[0].entry) is not None and why_not(predicted[0].entry) is None
    )
    return predicted + measured if prediction_counts else measured + predicted


def used_first(places: Sequence[Placed], why_not: WhyNot) -> list[Placed]:
    """Entries of one problem and one kind of evidence, with the first one that is used in front."""
    if len(places) < 2:
        return list(places)
    first = next((place for place in worth_asking(places) if why_not(place.entry) is None), places[0])
    return [first, *(place for place in places if place is not first)]


def worth_asking(places: Sequence[Placed]) -> Iterator[Placed]:
    """Entries of one problem, without those that are as little used as one before them."""
    for number, place in enumerate(places):
        if not any(_is_known_from(place.entry, earlier.entry) for earlier in places[:number]):
            yield place


def _is_known_from(entry: CacheEntry, earlier: CacheEntry) -> bool:
    """Whether an entry is as little used as an earlier one: that has its kernel and carries a mark, or is its copy."""
    return _same_kernel(entry, earlier) and (earlier.mark is not None or earlier.versions == entry.versions)


def _same_kernel(entry: CacheEntry, other: CacheEntry) -> bool:
    """Whether two entries of one problem run the same."""
    facts = [(side.template, side.source_digest, side.params, side.choice) for side in (entry, other)]
    return facts[0] == facts[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether an entry of FROM takes the place of the entry of INTO in a merge."""

    taken: bool
    reason: str  # in words, about the entry of FROM


def merging(known: CacheEntry, entry: CacheEntry, *, why_not: WhyNot, any_time: bool = False) -> Decision:
    """Decides a merge: whether `entry` takes the place of `known`, which is another entry of the same problem.

    Evidence, marks and objectives decide first, then times (`docs/cache.md`).

    Args:
        why_not: says why an entry is not used.
        any_time: the times do not decide: `entry` is taken where nothing else speaks against it.
    """
    same = replace(known, mark=entry.mark) == entry
    if same and known.mark is not None:  # else a merge of the bundle it came from would lift a verification's mark
        return _kept("it is the same, and the one there is marked since")
    decision = _by_evidence(known, entry, why_not) or _by_mark(known, entry, same)
    if decision is not None:
        return decision
    ours, theirs = known.search.objective, entry.search.objective
    if ours != theirs:
        return _kept(f"it was tuned for {theirs}, the one there for {ours}")
    if any_time:
        return _taken("--replace asks for it")
    return _by_prediction(known, entry) if entry.evidence is Evidence.PREDICTED else _by_measurement(known, entry)


def _kept(reason: str) -> Decision:
    return Decision(taken=False, reason=reason)


def _taken(reason: str) -> Decision:
    return Decision(taken=True, reason=reason)


def _by_evidence(known: CacheEntry, entry: CacheEntry, why_not: WhyNot) -> Decision | None:
    was, now = known.evidence is Evidence.MEASURED, entry.evidence is Evidence.MEASURED
    against_known, against_entry = why_not(known), why_not(entry)
    if was and not now:
        unused = f", though no call uses the measurement: {against_known}" if against_known is not None else ""
        return _kept(f"a prediction never takes a measurement's place{unused}")
    if against_entry is not None and against_known is None:
        return _kept(f"no call would use it: {against_entry}")
    if against_known is not None and against_entry is None:
        return _taken(f"no call uses the one there: {against_known}")
    return _taken("a measurement takes a prediction's place") if now and not was else None


def _by_mark(known: CacheEntry, entry: CacheEntry, same: bool) -> Decision | None:
    if same:
        return _taken("it is the same, marked since")
    if entry.mark is not None and known.mark is None:
        return _kept(f"it is marked: {entry.mark.finding.value}")
    if known.mark is not None and entry.mark is None:
        return _taken(f"the one there is marked: {known.mark.finding.value}")
    return None


def _by_prediction(known: CacheEntry, entry: CacheEntry) -> Decision:
    times = f"{entry.time_us:.6g} us, {known.time_us:.6g} us there"
    faster = entry.time_us < known.time_us
    ours, theirs = (_release(side, "autoattn") for side in (known, entry))
    if ours == theirs:
        return _taken(f"it is predicted faster: {times}") if faster else _kept(f"it is not predicted faster: {times}")
    names = [side.versions.get("autoattn", "unknown") for side in (entry, known)]
    models = f"by the model of autoattn {names[0]}, the one there by that of {names[1]}"
    if faster and theirs > ours:
        return _taken(f"it is predicted faster by a newer model: {times}")
    why = "models of two releases do not compare" if faster else "it is not predicted faster"
    return _kept(f"{why}: {times}; it is predicted {models}")


def _by_measurement(known: CacheEntry, entry: CacheEntry) -> Decision:
    old_us, new_us = _call_us(known), _call_us(entry)
    times = f"{new_us:.6g} us, {old_us:.6g} us there"
    same = _same_kernel(known, entry)
    if not same and new_us * (1.0 + DAY) < old_us:
        return _taken(f"it was measured faster: {times}")
    if not same and new_us > old_us * (1.0 + DAY):
        return _kept(f"it was measured slower: {times}")
    alike = "it runs the same" if same else f"it is as fast within {DAY:.0%}, by which two days differ"
    if _is_newer(known, entry):
        return _kept(f"{alike}, and was measured with older software: {times}")
    return _taken(f"{alike}, and was measured with no older software: {times}")


def _call_us(entry: CacheEntry) -> float:
    """What a call takes, in microseconds: by the kernel, or by the rival that is the entry's choice."""
    rival = next((rival for rival in entry.rivals if rival.name == entry.choice), None)
    return entry.time_us if rival is None or entry.choice == KERNEL else rival.measurement.median_us


def _is_newer(entry: CacheEntry, known: CacheEntry) -> bool:
    """Whether some of an entry's software is newer, and none of it older."""
    pairs = [(_release(entry, name), _release(known, name)) for name in SOFTWARE]
    return all(new >= old for new, old in pairs) and any(new > old for new, old in pairs)


def _release(entry: CacheEntry, name: str) -> tuple[int, ...]:
    """The numbers of a version: 2.13.0+cpu -> (2, 13, 0); none where it is unknown."""
    numbers = re.match(r"\d+(\.\d+)*", entry.versions.get(name, ""))
    return tuple(map(int, numbers[0].split("."))) if numbers is not None else ()
