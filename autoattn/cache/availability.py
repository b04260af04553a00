"""Tuned kernels that the installed Triton cannot compile: which they are, why, and the way out.

A call that would run one of them runs something else, so its user is told: once by a warning, and in a line of
`autoattn show`, `explain` and `cache list`.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable

from autoattn.codegen import search_space
from autoattn.core import triton_release
from autoattn.core.cache_entry import KERNEL, CacheEntry

_logger = logging.getLogger("autoattn")
warned: list[str] = []  # what this process was warned of


def why_unavailable(entry: CacheEntry) -> str | None:
    """Why the installed Triton cannot compile the kernel that an entry chose, with the way out; None where it can."""
    if entry.choice != KERNEL:
        return None
    points = search_space.load(entry.template)
    reason = points.why_unavailable()
    return f"{reason}; {_way_out(points.triton)}" if reason is not None else None


def _way_out(releases: Iterable[str]) -> str:
    """The newest of these releases, and the PyTorch whose wheels require it."""
    release = max(releases, key=lambda version: tuple(map(int, version.split("."))))
    torch = triton_release.TORCH.get(release)
    wanted = f'"torch=={torch}.*", which brings' if torch is not None else f'"triton=={release}.*":'
    return f"pip install {wanted} Triton {release}"


def sentences(entries: Iterable[CacheEntry]) -> list[str]:
    """What users of these entries should hear of the installed Triton: a sentence for each reason.

    Args:
        entries: those that calls take.
    """
    entries = list(entries)
    reasons = Counter(reason for entry in entries if (reason := why_unavailable(entry)) is not None)
    said = [f"{_problems(count)} cannot run the tuned kernel here: {reason}" for reason, count in reasons.items()]
    installed = triton_release.installed_release()
    releases = Counter(
        entry.triton_release
        for entry in entries
        if entry.triton_release not in ("", installed) and why_unavailable(entry) is None
    )
    said += [
        f"{_problems(count)} tuned with Triton {release}, and {triton_release.installed()} is installed: the kernels "
        "run, and the times may be others; autoattn tune measures anew"
        for release, count in sorted(releases.items())
    ]
    return said


def _problems(count: int) -> str:
    return f"{count} problem{'' if count == 1 else 's'}"


def warn_once(reason: str) -> None:
    """Warns, once in a process, that tuned kernels do not run: by `warnings`, and by logging where it is set up."""
    if warned:
        return
    warned.append(reason)
    message = (
        f"tuned kernels cannot run here, so that calls may be slower: {reason}. autoattn.explain and autoattn show say "
        "which; this is said once"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    if logging.root.handlers or _logger.handlers:
        _logger.warning(message)
