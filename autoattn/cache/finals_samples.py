"""Raw samples of a problem's finals, in a file beside its journal, so that a ranking can be computed again.

The cache itself keeps what came of them and no sample, so that it stays small enough to be reviewed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from autoattn.cache import whole_files
from autoattn.core.paired_stats import Round
from autoattn.core.problem import Problem
from autoattn.errors import CacheError

SCHEMA = 1
SUFFIX = ".finals.json"
MAX_BYTES = 64 * 1024 * 1024  # 384 rounds of 14 contestants take a 150th


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """All rounds of one contest, those that do not count too."""

    schema: int = SCHEMA
    problem: Problem
    fingerprint: str  # of the card
    winner: str  # digest of its source
    seed: int  # of the order within the rounds
    kernels: dict[str, str]  # contestant -> digest of its source; the others are rivals by their names
    rounds: tuple[Round, ...]
    versions: dict[str, str] = field(default_factory=dict)


def path_of(folder: Path, device: str, key: str) -> Path:
    """Where the samples of a problem stand in a cache folder."""
    return folder / device / "studies" / f"{key}{SUFFIX}"


def encode(samples: Samples) -> bytes:
    """The text of such a file: one round a line."""
    whole = msgspec.to_builtins(samples)
    lines = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in whole.pop("rounds"))
    head = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "rounds": [\n{lines}\n ]\n}}\n'.encode()


def decode(data: bytes, path: Path) -> Samples:
    """The samples that `data` is; `path` names it.

    Raises:
        CacheError: it is damaged or newer.
    """
    try:
        samples = msgspec.json.decode(data, type=Samples)
        if samples.schema != SCHEMA:
            raise ValueError(f"it has schema {samples.schema} where {SCHEMA} is known")
        names = {frozenset(round_.times_us) for round_ in samples.rounds}
        if len(names) != 1 or not samples.kernels.keys() <= next(iter(names)):
            raise ValueError("its rounds do not hold the same contestants, and every kernel")
        if not all(time_us > 0.0 for round_ in samples.rounds for time_us in round_.times_us.values()):
            raise ValueError("a time is not above 0")
    except (ValueError, RecursionError) as error:
        words = " ".join(str(error).split())[:300]
        raise CacheError(f"the samples {path!s:.500} are damaged ({words}); tune that problem again") from None
    return samples


def read(path: Path) -> Samples | None:
    """The samples of a file; None where there is none.

    Raises:
        CacheError: it is unreadable, damaged or newer.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise CacheError(f"the samples {path!s:.500} must be readable, but {error}; correct that") from None
    return decode(data, path)


def write(path: Path, samples: Samples) -> None:
    """Keeps samples in place of older ones of the same problem.

    Raises:
        CacheError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole_files.write(path, encode(samples))
    except OSError as error:
        words = error.strerror or error
        raise CacheError(f"the samples {path} must be writable, but {words}; use another --cache DIR") from None
