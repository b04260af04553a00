"""Precompiled kernels: files of a cache folder that hold machine code, the text it is of, and what a launch must know.

`<cache folder>/compiled/sm_90/<key>.zip` holds the kernel of one kind of problem, one variant and one set of traits.
The SHA-256 of each part is checked before anything is loaded. It shows damage; who made the file it cannot show.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from autoattn.core.kernel_kind import KernelKind
from autoattn.core.variant import Traits, Variant, digest_of
from autoattn.errors import CacheError

FORMAT = 1
FOLDER = "compiled"  # in a cache folder
SUFFIX = ".zip"
FACTS, TEXT, LAUNCH_TEXT = "facts.json", "kernel.py", "launch.py"
MAX_BYTES = 16 * 1024 * 1024  # of all that a file holds; the largest shipped one is a thirtieth
MAIN, BEFORE, PART = "main", "before", "part"  # roles of functions
_DATE = (1980, 1, 1, 0, 0, 0)  # the first that a zip can hold: the same kernel gives the same bytes
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError,
    OverflowError, msgspec.MsgspecError,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """How the tensor of a TMA descriptor is encoded: the numbers that cuTensorMapEncodeTiled takes."""

    element_type: int  # CUtensorMapDataType
    element_bytes: int
    swizzle: int  # CUtensorMapSwizzle
    box: tuple[int, ...]  # elements of a box, the last axis last


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function of the machine code, and how it is launched."""

    name: str
    role: str  # MAIN, BEFORE or PART
    sha256: str  # of its cubin
    warps: int  # of a program
    shared_bytes: int  # dynamic shared memory of a program
    dependent: bool  # launched while the one before it ends (programmatic dependent launch)
    cooperative: bool  # all of its programs are on the card at once
    arguments: tuple[tuple[str, str], ...]  # (name, Triton's type), in the order of a launch
    tensor_maps: dict[str, TensorMap]  # of the arguments that are TMA descriptors

    @property
    def file_name(self) -> str:
        """Of its cubin in the zip."""
        return f"{self.name}.cubin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a file says of its kernel."""

    format: int
    kind: KernelKind
    variant: Variant
    traits: Traits
    arch: int  # compute capability, as 90
    compiler: str  # Triton's version
    release: str  # of Triton whose names the text has, as "3.6"
    name: str  # of the source's main function
    digest: str  # of the text
    digests: dict[str, str]  # release of Triton -> digest of the text that has its names
    launch_sha256: str  # of the text of the host side
    functions: tuple[Function, ...]

    @property
    def key(self) -> str:
        """Names what the kernel was asked for."""
        return key_of(self.kind, self.variant, self.traits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrecompiledKernel:
    """A kernel with its machine code."""

    facts: Facts
    text: str  # the rendered kernel
    launch_text: str  # Python that defines what the text says of its launches: tables, grids, sizes of buffers
    code: Mapping[str, bytes]  # name of a function -> its cubin

    def __str__(self) -> str:
        return f"precompiled with Triton {self.facts.compiler} for sm_{self.facts.arch}"


def key_of(kind: KernelKind, variant: Variant, traits: Traits) -> str:
    """Names what a kernel was asked for."""
    return digest_of(msgspec.json.encode(_builtins_of([kind, variant, traits])).decode())


def _builtins_of(facts: Any) -> Any:
    """Facts as JSON has them; a kernel names of caches, biases and their options those alone that it has, as older
    files do."""
    builtins = msgspec.to_builtins(facts)
    kind, traits = (builtins[0], builtins[2]) if isinstance(builtins, list) else (builtins["kind"], builtins["traits"])
    if kind["cache"] is None:
        del kind["cache"]
    else:
        for younger in ("float8", "split_length"):
            if not kind["cache"][younger]:
                del kind["cache"][younger]
    for younger in ("bias_alignment", "bias_shared", "merged"):
        if not traits[younger]:
            del traits[younger]
    return builtins


def folder_of(cache: Path, arch: int) -> Path:
    """Where a cache folder has the kernels of an architecture."""
    return cache / FOLDER / f"sm_{arch}"


def path_of(cache: Path, arch: int, key: str) -> Path:
    """Where a cache folder has the kernel of this key."""
    return folder_of(cache, arch) / f"{key}{SUFFIX}"


def paths_in(cache: Path, arch: int | None = None) -> list[Path]:
    """The files of precompiled kernels in a cache folder, sorted.

    Args:
        arch: the only architecture; all when None.

    Raises:
        CacheError: a folder cannot be read.
    """
    try:
        return sorted((cache / FOLDER).glob(f"sm_{'*' if arch is None else arch}/*{SUFFIX}"))
    except OSError as error:
        raise CacheError(f"the cache {cache!s:.500} must be readable, but {error}; correct that") from None


def encode(kernel: PrecompiledKernel) -> bytes:
    """The bytes of a file; the same kernel gives the same bytes."""
    parts = {
        FACTS: msgspec.json.format(msgspec.json.encode(_builtins_of(kernel.facts)), indent=1) + b"\n",
        TEXT: kernel.text.encode(),
        LAUNCH_TEXT: kernel.launch_text.encode(),
        **{function.file_name: kernel.code[function.name] for function in kernel.facts.functions},
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_LZMA) as archive:
        for name, data in parts.items():
            info = zipfile.ZipInfo(name, _DATE)
            info.compress_type, info.external_attr = zipfile.ZIP_LZMA, 0o644 << 16
            archive.writestr(info, data)
    return stream.getvalue()


def decode(data: bytes, path: Path) -> PrecompiledKernel:
    """A kernel from the bytes of a file, once every digest agrees.

    Args:
        path: what an error calls the file; its name and folder say the key and the architecture.

    Raises:
        CacheError: the file is damaged, of a newer format, or is not what its name says.
    """
    try:
        parts = _parts(data)
        facts = msgspec.json.decode(parts[FACTS], type=Facts)
        kernel = PrecompiledKernel(
            facts=facts,
            text=parts[TEXT].decode(),
            launch_text=parts[LAUNCH_TEXT].decode(),
            code={function.name: parts[function.file_name] for function in facts.functions},
        )
        _check(kernel, path)
        return kernel
    except _DAMAGE as error:
        words = " ".join(str(error).split())[:300]
        raise CacheError(f"the precompiled kernel {path!s:.500} is damaged ({words}); get it anew") from None


def _parts(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        if sum(info.file_size for info in infos) > MAX_BYTES:
            raise ValueError(f"it must hold at most {MAX_BYTES} bytes, but says that it holds more")
        return {info.filename: archive.read(info) for info in infos}


def _check(kernel: PrecompiledKernel, path: Path) -> None:
    """Raises a ValueError where the parts are not what the facts say, or the facts not what the name says."""
    facts = kernel.facts
    if facts.format != FORMAT:
        raise ValueError(f"it must have format {FORMAT}, got {facts.format}")
    if (path.parent.name, path.stem) != (f"sm_{facts.arch}", facts.key):
        raise ValueError(f"it holds the kernel {facts.key} for sm_{facts.arch}, which its name does not say")
    if digest_of(kernel.text) != facts.digest or facts.digests.get(facts.release) != facts.digest:
        raise ValueError("its text has another digest than its facts say")
    if hashlib.sha256(kernel.launch_text.encode()).hexdigest() != facts.launch_sha256:
        raise ValueError("the text of its launches has another SHA-256 than its facts say")
    for function in facts.functions:
        code = kernel.code[function.name]
        if hashlib.sha256(code).hexdigest() != function.sha256:
            raise ValueError(f"the machine code of {function.name} has another SHA-256 than its facts say")
        if (arch := arch_of(code)) != facts.arch:
            raise ValueError(f"the machine code of {function.name} is for sm_{arch}, its facts say sm_{facts.arch}")


def arch_of(cubin: bytes) -> int:
    """The compute capability that a cubin is for, as its ELF header says.

    Raises:
        ValueError: it is no cubin.
    """
    # e_machine 190 is EM_CUDA; e_flags has the SM in its second byte since ABI version 8, in its first before.
    if cubin[:4] != b"\x7fELF" or int.from_bytes(cubin[18:20], "little") != 190:
        raise ValueError("its machine code is no cubin")
    flags = int.from_bytes(cubin[48:52], "little")
    return flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF


def read(path: Path) -> PrecompiledKernel | None:
    """The kernel of a file, from memory when it has not changed; None when there is none.

    Raises:
        CacheError: the file cannot be read, is damaged, or is not what its name says.
    """
    try:
        stamp = path.stat()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CacheError(f"the precompiled kernel {path!s:.500} must be readable, but {error}; correct that") from None
    return _read(path, stamp.st_mtime_ns, stamp.st_size, stamp.st_ino)


@lru_cache(maxsize=32)
def _read(path: Path, modified_ns: int, size: int, inode: int) -> PrecompiledKernel:
    if size > MAX_BYTES:
        raise CacheError(f"the precompiled kernel {path!s:.500} must be at most {MAX_BYTES} bytes; get it anew")
    try:
        return decode(path.read_bytes(), path)
    except OSError as error:
        raise CacheError(f"the precompiled kernel {path!s:.500} must be readable, but {error}; correct that") from None


def read_any(cache: Path, key: str) -> Iterator[PrecompiledKernel]:
    """The kernels of this key in a cache folder, for whichever architectures; damaged files are left out."""
    for folder in _arch_folders(cache / FOLDER):
        try:
            kernel = read(folder / f"{key}{SUFFIX}")
        except CacheError:
            continue
        if kernel is not None:
            yield kernel


@lru_cache(maxsize=16)
def _arch_folders(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    return tuple(sorted(path for path in folder.iterdir() if re.fullmatch(r"sm_\d+", path.name)))
