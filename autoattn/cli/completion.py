"""Values that a shell completes for options: devices, groups of a shapes file, cache keys, words with a fixed choice.

Runs at each press of the tab key, so that nothing here imports torch; what cannot be read completes to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import typer

from autoattn.core.problem import DType, Layout, Numerics, Op, Precision
from autoattn.errors import AutoattnError

Candidates = list[tuple[str, str]]  # (value, what it means)


def devices(incomplete: str) -> Candidates:
    """The short names of the known devices, and auto."""
    from autoattn.core import device_profiles

    known = [("auto", "the GPU in this machine")]
    known += [(device.name, device.full_name) for device in device_profiles.all_devices()]
    return _beginning(incomplete, known)


def groups(ctx: typer.Context, incomplete: str) -> Candidates:
    """The groups of the shapes file that the command line names."""
    from autoattn.shapes import shapes_file

    # As an argument the file is still unread when the option in front of the cursor has no value yet.
    file = ctx.params.get("shapes") or next(iter(ctx.args), None)
    if file is None:
        return []
    try:
        named = shapes_file.load(Path(file))
    except (AutoattnError, OSError):
        return []
    counts: dict[str, int] = {}
    for shape in named:
        for group in shape.groups:
            counts[group] = counts.get(group, 0) + 1
    return _beginning(incomplete, [(group, f"{count} problems") for group, count in counts.items()])


def problem_keys(ctx: typer.Context, incomplete: str) -> Candidates:
    """Keys of the problems of the cache that the command line names, else of the user's and the shipped one."""
    from autoattn.cache.store import read_folder
    from autoattn.codegen import resources

    folder = ctx.params.get("cache")
    folders = [Path(folder)] if folder is not None else [resources.user_cache(), resources.shipped_cache()]
    try:
        files = [file for path in folders for file in read_folder(path)]
    except (AutoattnError, OSError):
        return []
    known = {key: str(entry.problem) for file in files for key, entry in file.entries.items()}
    return _beginning(incomplete, [("all", "every entry that holds"), *sorted(known.items())])


def words(*known: str) -> Callable[[str], Candidates]:
    """Completes to words of a fixed choice."""

    def complete(incomplete: str) -> Candidates:
        return _beginning(incomplete, [(word, "") for word in known])

    return complete


dtypes = words(*(dtype.value for dtype in DType))
layouts = words(*(layout.value for layout in Layout))
masks = words("full", "causal", "causal:top-left", "causal:bottom-right")
precisions = words(*(precision.value for precision in Precision))
numerics = words(*(numerics.value for numerics in Numerics))
operations = words(*(op.value for op in Op))


def _beginning(incomplete: str, candidates: Iterable[tuple[str, str]]) -> Candidates:
    return [(value, meaning) for value, meaning in candidates if value.startswith(incomplete)]
