"""Releases of Triton: which is installed, which are supported, and what each calls the parts of Gluon that moved.

Gluon is experimental, and its names change between releases. Templates ask here for the names that did, so that one
template renders for every supported release. A text that no name of it moved in is the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

SUPPORTED = ("3.6", "3.7", "3.8", "3.9")
# The PyTorch whose wheels require a release, from their metadata; 2.12 requires 3.7.0.
TORCH = {"3.6": "2.11", "3.7": "2.13", "3.8": "2.14", "3.9": "2.15"}
NONE = "none"  # the version where Triton is not installed


@dataclass(frozen=True, slots=True, kw_only=True)
class GluonNames:
    """What a release calls the functions of Gluon that other releases call otherwise."""

    barrier: str = "gl.barrier"  # of all threads of a partition
    tma_load: str = "tma.async_load"  # global to shared memory
    tma_store: str = "tma.async_store"  # shared to global memory
    reinterpret: str = "reinterpret"  # method of shared memory: the same bytes as another type, shape and layout


# From the sources of the releases, triton/experimental/gluon/language; releases that are not named here have the
# newest names. 3.8 still has the older names of the copies beside the newer ones.
_COPIES = {"tma_load": "tma.async_copy_global_to_shared", "tma_store": "tma.async_copy_shared_to_global"}
_PRIVATE = {"reinterpret": "_reinterpret"}
_MOVED = {
    "3.6": GluonNames(barrier="gl.thread_barrier", **_COPIES, **_PRIVATE),
    "3.7": GluonNames(**_COPIES, **_PRIVATE),
    "3.8": GluonNames(**_PRIVATE),
}


def gluon_names(release: str) -> GluonNames:
    """The names that a release, as "3.9", has for what moved."""
    return _MOVED.get(release, GluonNames())


@lru_cache(maxsize=1)
def installed() -> str:
    """The version of Triton that is installed, as "3.9.0"; "none" where there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return NONE


def release_of(version: str) -> str:
    """The release that a version belongs to: "3.9" of "3.9.0"."""
    return ".".join(version.split(".")[:2])


def installed_release() -> str:
    """The release that is installed, as "3.9"."""
    return release_of(installed())


def nearest_first() -> list[str]:
    """The installed release, then the supported ones, newest first: the order in which their cache entries count."""
    return list(dict.fromkeys((installed_release(), *reversed(SUPPORTED))))
