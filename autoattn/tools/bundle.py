"""Cached kernels as one file that somebody else can check and replay: a zip of a cache, its kernels and a manifest.

The manifest has the SHA-256 of every other file. It shows damage; who made the bundle it cannot show, so that whoever
must know asks the maker for the digest of the bundle itself.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from autoattn import __version__
from autoattn.cache import file_format, finals_samples, store
from autoattn.cache.file_format import CacheFile
from autoattn.cache.finals_samples import Samples
from autoattn.codegen import precompiled
from autoattn.codegen.precompiled import PrecompiledKernel
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.variant import digest_of
from autoattn.errors import CacheError
from autoattn.report import commands, figures

SCHEMA = 1
MANIFEST = "manifest.json"
MAX_BYTES = 256 * 1024 * 1024  # of all that a bundle holds: the shipped cache is a hundredth
MAX_FILES = 100_000

_DATE = (1980, 1, 1, 0, 0, 0)  # the first that a zip can hold: the same entries give the same bytes
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError, OverflowError,
)  # fmt: skip


def pack(
    files: Iterable[CacheFile],
    samples: Mapping[tuple[str, str], Samples] | None = None,
    compiled: Iterable[PrecompiledKernel] = (),
) -> bytes:
    """The bundle of cache files: their text, each kernel's source, how to replay them, and the manifest.

    Args:
        samples: raw samples of finals, by device and the problem's key; those of another winner are left out.
        compiled: kernels with their machine code.

    Raises:
        CacheError: an entry's kernel no longer renders as the text that was tuned, or there is nothing to pack.
    """
    known = samples or {}
    files = [file for file in files if file.entries]
    if not files:
        raise CacheError("a bundle must hold an entry, got none; tune first, or name another --cache")
    held: dict[str, bytes] = {"README.md": _readme(files).encode()}
    held |= {_compiled_path(kernel): precompiled.encode(kernel) for kernel in compiled}
    for file in files:
        held[f"{file.device}/{file.name}"] = file_format.encode(file)
        for entry in file.entries.values():
            if (reason := store.why_held_back(entry)) is not None:
                raise CacheError(f"an entry of a bundle must hold, but that of {entry.problem} is stale: {reason}")
            held[_kernel_path(file, entry)] = store.source_of(entry).text.encode()
            taken = known.get((file.device, entry.problem.key))
            if taken is not None and _same_finals(entry, taken):
                held[_samples_path(file, entry)] = finals_samples.encode(taken)
    manifest = {
        "bundle": SCHEMA,
        "autoattn": __version__,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(held.items())},
    }
    text = json.dumps(manifest, indent=1).encode() + b"\n"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [(MANIFEST, text), *sorted(held.items())]:
            info = zipfile.ZipInfo(name, _DATE)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(info, data)
    return stream.getvalue()


def digest(data: bytes) -> str:
    """The SHA-256 of a bundle, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a cache folder, a cache file or a bundle holds."""

    files: list[CacheFile]
    compiled: list[PrecompiledKernel]


def unpack(path: Path) -> Content:
    """What a bundle holds, once every digest agrees; nothing is written.

    Raises:
        CacheError: the file is no bundle, is damaged, was changed, or comes from a newer autoattn.
    """
    try:
        held = _held(path)
        manifest = json.loads(held.pop(MANIFEST, b"null"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or "bundle" not in manifest:
            raise CacheError(f"{path} must be a bundle of autoattn cache export, got another zip; name another file")
        if manifest["bundle"] != SCHEMA or isinstance(manifest["bundle"], bool):
            came = f"{manifest['bundle']!r:.40}"
            raise CacheError(f"the bundle {path} must have version {SCHEMA}, got {came}; use a matching autoattn")
        if held.keys() != manifest["files"].keys():
            odd = min(held.keys() ^ manifest["files"].keys())
            raise ValueError(f"{odd!r:.100} is in the manifest or in the bundle, but not in both")
        for name, data in held.items():
            if hashlib.sha256(data).hexdigest() != manifest["files"][name]:
                raise ValueError(f"{name!r:.100} is not what the manifest says")
        return Content(files=_checked(path, held), compiled=_compiled(path, held))
    except OSError as error:
        words = error.strerror or error
        raise CacheError(f"the bundle {path!s:.500} must be readable, but {words}; correct that") from None
    except CacheError:
        raise
    except (*_DAMAGE, RecursionError) as error:
        words = " ".join(str(error).split())[:300]
        raise CacheError(f"the bundle {path!s:.500} is damaged ({words}); get it anew") from None


def load(path: Path) -> list[CacheFile]:
    """The cache files of a cache folder, of one cache file or of a bundle, sorted by device and operation.

    Raises:
        CacheError: there is nothing, or it is damaged, newer or foreign.
    """
    return load_content(path).files


def load_content(path: Path) -> Content:
    """The same with the precompiled kernels; a cache file has none.

    Raises:
        CacheError: there is nothing, or it is damaged, newer or foreign.
    """
    path = Path(os.path.abspath(path))  # a cache file's folder names its device, also where the path does not
    try:
        folder, there = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise CacheError(f"{path!s:.500} must be readable, but {error}; correct the path") from None
    if not there:
        raise CacheError(
            f"{path} must be a cache folder, a cache file or a bundle, but there is none; correct the path"
        )
    if folder:
        kernels = [precompiled.read(kernel_path) for kernel_path in precompiled.paths_in(path)]
        return Content(files=store.read_folder(path), compiled=[kernel for kernel in kernels if kernel is not None])
    return Content(files=[store.read(path)], compiled=[]) if path.suffix == ".json" else unpack(path)


def _held(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        size = sum(info.file_size for info in infos)
        if size > MAX_BYTES or len(infos) > MAX_FILES:
            raise ValueError(
                f"it must hold at most {MAX_BYTES} bytes in {MAX_FILES} files, but says that it holds more"
            )
        if len({info.filename for info in infos}) != len(infos):
            raise ValueError("two files have one name")
        return {info.filename: archive.read(info) for info in infos}


def samples_of(files: Iterable[tuple[Path, CacheFile]]) -> dict[tuple[str, str], Samples]:
    """The raw samples of the entries of cache files, by device and the problem's key.

    Args:
        files: cache files and the cache folder of each.

    Raises:
        CacheError: some of them are damaged or cannot be read.
    """
    by_problem = {}
    for folder, file in files:
        for key in file.entries:
            samples = finals_samples.read(finals_samples.path_of(folder, file.device, key))
            if samples is not None:
                by_problem[(file.device, key)] = samples
    return by_problem


def _same_finals(entry: CacheEntry, samples: Samples) -> bool:
    """Whether samples are those of the finals that an entry came from."""
    known = entry.finals
    count = known.rounds + known.discarded if known is not None else -1
    return samples.winner == entry.source_digest and len(samples.rounds) == count


def _checked(path: Path, held: dict[str, bytes]) -> list[CacheFile]:
    files = []
    for name, data in sorted(held.items()):
        place = PurePosixPath(name)
        if len(place.parts) == 2 and file_format.is_name(place.name):
            # The device becomes a folder's name, so it must not lead out of the cache.
            if place.parts[0] in (".", "..") or "\\" in name or str(place) != name:
                raise ValueError(f"{name!r:.100} is no place in a cache")
            files.append(file_format.decode(data, path / name))
    for file in files:
        for entry in file.entries.values():
            text = held.get(_kernel_path(file, entry))
            if text is None or digest_of(text.decode()) != entry.source_digest:
                raise ValueError(f"it lacks the kernel {entry.source_digest!r:.40} of {entry.problem}")
            taken = held.get(_samples_path(file, entry))
            if taken is not None and not _same_finals(
                entry, finals_samples.decode(taken, path / _samples_path(file, entry))
            ):
                raise ValueError(f"its samples of {entry.problem} are those of other finals")
    if not files:
        raise ValueError("it holds no cache file")
    return files


def _compiled(path: Path, held: dict[str, bytes]) -> list[PrecompiledKernel]:
    """The precompiled kernels among the files of a bundle."""
    names = (name for name in sorted(held) if PurePosixPath(name).parts[0] == precompiled.FOLDER)
    return [precompiled.decode(held[name], path / name) for name in names]


def only(file: CacheFile, entries: Iterable[CacheEntry]) -> CacheFile:
    """A cache file with these of its entries."""
    return replace(file, entries={entry.problem.key: entry for entry in entries})


def _kernel_path(file: CacheFile, entry: CacheEntry) -> str:
    return f"{file.device}/kernels/{entry.source_digest}.py"


def _compiled_path(kernel: PrecompiledKernel) -> str:
    return str(PurePosixPath(precompiled.FOLDER, f"sm_{kernel.facts.arch}", f"{kernel.facts.key}{precompiled.SUFFIX}"))


def _samples_path(file: CacheFile, entry: CacheEntry) -> str:
    return f"{file.device}/finals/{entry.problem.key}.json"


def _readme(files: list[CacheFile]) -> str:
    lines = [
        "# Tuned attention kernels",
        f"Written by autoattn {__version__}. `{MANIFEST}` has the SHA-256 of each file; these commands check them, "
        "take the entries into a cache, and check the kernels again:",
        "\n".join(
            [
                "```sh",
                "autoattn cache merge BUNDLE.zip CACHE",
                *dict.fromkeys(f"autoattn verify --device {shlex.quote(file.device)} --cache CACHE" for file in files),
                "```",
            ]
        ),
        f"`{precompiled.FOLDER}/`, where it is there, has the machine code of kernels, which calls run without a "
        "compiler.",
        "`finals/` has the raw samples of the finals, a line a round: each contestant's microseconds in the order in "
        "which they ran, and the card's clock, temperature and reasons to slow down.",
    ]
    for file in files:
        lines.append(f"## {file.device}, {file.op.value}")
        lines.append(f"Card: {file.fingerprint}")
        for entry in sorted(file.entries.values(), key=lambda entry: entry.problem.order):
            lines.append(f"### {entry.problem}")
            lines.append(
                f"{entry.evidence.value}, {entry.time_us:.6g} us, kernel `kernels/{entry.source_digest}.py`; made with "
                f"{figures.versions(entry) or 'unknown versions'}. Searched by"
            )
            lines.append(f"```sh\n{commands.reproduce(entry, file.device)}\n```")
    return "\n\n".join(lines) + "\n"
