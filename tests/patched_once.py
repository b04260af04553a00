"""Triton's interpreter in less time: it patches its language once a launch, not again at each call of a function.

Triton 3.6 looks through its whole language whenever a kernel calls another function, and finds all of it patched. That
took a third of the time of our kernels. Children import this file in place of `autoattn.jobs`.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from triton.runtime import interpreter

from autoattn import jobs  # noqa: F401 - what workers import before their first job

_patch, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
_patched: set[int] = set()  # globals whose language was patched since the launch began


def _patch_once(fn: FunctionType) -> Any:
    if id(fn.__globals__) in _patched:
        return interpreter._LangPatchScope()  # nothing to restore
    _patched.add(id(fn.__globals__))
    return _patch(fn)


def _launch_anew(self: Any, *arguments: Any, **named: Any) -> Any:
    _patched.clear()  # the end of the launch before restored what it had patched
    return _launch(self, *arguments, **named)


interpreter._patch_lang = _patch_once
interpreter.GridExecutor.__call__ = _launch_anew
