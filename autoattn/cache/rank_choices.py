"""Files of what was measured over ranks: readable JSON, one for each device and number of ranks, reviewed like code."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from autoattn.cache import whole_files
from autoattn.core.device import Device
from autoattn.core.rank_choice import RankChoices
from autoattn.errors import CacheError

SCHEMA = 1


def path_of(folder: Path, device: Device, ranks: int) -> Path:
    """Where the choices for so many cards of a device stand in a cache folder."""
    return folder / device.name / f"ranks-{ranks}.json"


def read(path: Path) -> RankChoices | None:
    """The choices of a file; None where there is none.

    Raises:
        CacheError: it is unreadable, damaged or newer.
    """
    try:
        choices = msgspec.json.decode(path.read_bytes(), type=RankChoices)
        if choices.schema != SCHEMA:
            raise ValueError(f"it has schema {choices.schema} where {SCHEMA} is known")
        measured = choices.choices
        if any(each.method not in each.times_us or min(each.call.tokens, each.call.batch) < 1 for each in measured):
            raise ValueError("a choice was not measured")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        words = " ".join(str(error).split())[:300]
        raise CacheError(
            f"the choices {path!s:.500} must be as autoattn tune --ranks writes them, got others ({words}); correct "
            "them or tune again"
        ) from None
    return choices


def merge(folder: Path, device: Device, choices: RankChoices) -> Path:
    """Puts choices into their file, in place of those for the same calls; others of the same card stay.

    Raises:
        CacheError: the folder cannot be written, or the file that is there cannot be read.
    """
    path = path_of(folder, device, choices.ranks)
    before = read(path)
    if before is not None and before.fingerprint == choices.fingerprint:
        choices = choices.with_those_of(before.choices)
    text = json.dumps(msgspec.to_builtins(choices), indent=1, ensure_ascii=False, allow_nan=False)
    whole_files.write_new(path, text.encode() + b"\n")
    return path
