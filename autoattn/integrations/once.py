"""Warnings that a process shows once."""

from __future__ import annotations

import warnings

import torch

_SHOWN: set[str] = set()


def warn_once(sentence: str) -> None:
    """Shows a RuntimeWarning unless this process has shown the same sentence; graphs that are traced show none."""
    if torch.compiler.is_compiling() or sentence in _SHOWN:
        return
    _SHOWN.add(sentence)
    warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def forget() -> None:
    """Lets each sentence be shown once more."""
    _SHOWN.clear()
