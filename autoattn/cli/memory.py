"""Warns of problems whose tensors do not fit into the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoattn.core.device import Device
    from autoattn.core.problem import Problem

GIB = 2**30
LISTED = 3  # problems that a warning names


def warning(problems: Sequence[Problem], device: Device) -> str | None:
    """One sentence about the problems that need more memory than the device has; None where all fit.

    A problem needs at least query, key, value and output, backward also their gradients and the LSE. A bias, other
    people's kernels and what a process of CUDA takes come on top, so that a problem without a warning may fail too.
    Nothing is said of a device whose memory is unknown (0 bytes).
    """
    if not device.memory_bytes:
        return None
    beyond = [problem for problem in problems if problem.bytes() > device.memory_bytes]
    if not beyond:
        return None
    listed = [f"{problem} needs {problem.bytes() / GIB:.1f} GiB" for problem in beyond[:LISTED]]
    if len(beyond) > LISTED:
        listed.append(f"{len(beyond) - LISTED} more")
    count = "1 problem does" if len(beyond) == 1 else f"{len(beyond)} problems do"
    memory = f"{device.memory_bytes / GIB:.1f} GiB"
    return (
        f"Warning: {count} not fit into the {memory} of {device.full_name}: {', '.join(listed)}; "
        "make batch or lengths smaller"
    )
