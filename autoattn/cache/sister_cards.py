"""Cache files of sister cards: other cards of one architecture, which run the same machine code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autoattn.cache import file_format, store
from autoattn.cache.file_format import CacheFile
from autoattn.core import device_profiles, roofline, triton_release
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Evidence

_FINGERPRINT = re.compile(r"(?P<name>.*)/sm_(?P<arch>\d+)/(?P<sm_count>\d+)sm/\d+l2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SisterCard:
    """What is known of the card that measured a file."""

    full_name: str
    arch: int
    sm_count: int
    device: Device | None  # its profile; None where nobody described it

    def time_ratio(self, problem: Problem, device: Device) -> float | None:
        """How long a problem takes on `device`, over its time on this card, by both rooflines; None where unknown."""
        here, there = roofline.seconds(problem, device), roofline.seconds(problem, self.device)
        return here / there if here and there else None


def of_fingerprint(fingerprint: str) -> SisterCard | None:
    """The card of a fingerprint (`Device.fingerprint`); None where it is none."""
    match = _FINGERPRINT.fullmatch(fingerprint)
    if match is None:
        return None
    described = (device for device in device_profiles.all_devices() if device.fingerprint == fingerprint)
    return SisterCard(
        full_name=match["name"],
        arch=int(match["arch"]),
        sm_count=int(match["sm_count"]),
        device=next(described, None),
    )


def sister(fingerprint: str, device: Device) -> SisterCard | None:
    """The card of a fingerprint where it is another one of a device's architecture."""
    card = of_fingerprint(fingerprint) if fingerprint != device.fingerprint else None
    return card if card is not None and card.arch == device.arch and card.sm_count else None


def names_of(device: Device) -> list[str]:
    """The full names of the sister cards of a device that are described, sorted."""
    return sorted(known.full_name for known in device_profiles.all_devices() if sister(known.fingerprint, device))


def files_of(folder: Path, device: Device, op: Op) -> list[tuple[SisterCard, CacheFile]]:
    """The cache files of an operation in a folder that sister cards of a device measured, or predict for.

    Raises:
        CacheError: a file is damaged, newer, foreign or unreadable.
    """
    files = store.files_at(path for name in _names(folder, device) for path in _paths(folder, name, op))
    cards = ((sister(file.fingerprint, device), file) for file in files)
    return [(card, file) for card, file in cards if card is not None]


def verified(folders: Iterable[Path], device: Device, op: Op) -> dict[str, str]:
    """Digests of texts that passed the gate on a card of a device's architecture -> the full name of the card.

    Raises:
        CacheError: a file is damaged, newer, foreign or unreadable.
    """
    cards: dict[str, str] = {}
    for folder in folders:
        for file in store.files_at(path for name in _names(folder, device) for path in _paths(folder, name, op)):
            card = of_fingerprint(file.fingerprint)
            if card is None or card.arch != device.arch:
                continue
            for entry in file.entries.values():
                if entry.evidence is Evidence.MEASURED and (entry.mark is None or not entry.mark.holds_back):
                    digests = (entry.source_digest, *(candidate.source_digest for candidate in entry.candidates))
                    cards.update(dict.fromkeys(digests, card.full_name))
    return cards


def watched_paths(folder: Path, device: Device, op: Op) -> list[Path]:
    """The files and folders that change when `files_of` gives something else."""
    names = [name for name in _names(folder, device) if name != device.name]
    paths = [path for name in names for path in _paths(folder, name, op)]
    return [folder, *(folder / name for name in names), *(path for path in paths if path.exists())]


def _names(folder: Path, device: Device) -> list[str]:
    """The device's own folder, whose files may be of another such card, and those that may be of sister cards."""
    strangers = {known.name for known in device_profiles.all_devices() if known.arch != device.arch}
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name not in strangers)
    except OSError:  # reading the device's own files says what is wrong
        return []
    return [name for name in names if any(path.exists() for op in Op for path in _paths(folder, name, op))]


def _paths(folder: Path, name: str, op: Op) -> Iterable[Path]:
    return [folder / name / file_format.name_of(op, release) for release in triton_release.nearest_first()]
