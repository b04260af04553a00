"""The commands that repeat what a report shows."""

from __future__ import annotations

import shlex

from autoattn.core.cache_entry import CacheEntry
from autoattn.core.modifiers import SWITCHES, Bias, Modifiers
from autoattn.core.problem import DType, Numerics, Op, Problem
from autoattn.search.search_options import Effort


def reproduce(entry: CacheEntry, device: str) -> str:
    """The command that searches an entry again."""
    objective = f" --objective {shlex.quote(entry.search.objective)}" if entry.search.objective != "time" else ""
    return f"{_search(entry, device, entry.search.effort)} --seed {entry.search.seed}{objective}"


def longer(entry: CacheEntry, device: str) -> str:
    """The command that searches an entry's problem with the largest effort."""
    return _search(entry, device, Effort.MAX.value)


def _search(entry: CacheEntry, device: str, effort: str) -> str:
    return f"autoattn tune --device {shlex.quote(device)} {arguments(entry.problem)} --effort {shlex.quote(effort)}"


def rendering(entry: CacheEntry, device: str) -> str:
    """The command that writes an entry's kernel."""
    return f"autoattn render --device {shlex.quote(device)} {arguments(entry.problem)} --out kernel.py"


def arguments(problem: Problem) -> str:
    """The problem as options of the command line."""
    words = [f"--dtype {problem.dtype.value} --batch {problem.batch} --heads {problem.heads_q}"]
    if problem.heads_kv != problem.heads_q:
        words.append(f"--heads-kv {problem.heads_kv}")
    words.append(f"--seq-q {problem.seq_q}")
    if problem.seq_kv != problem.seq_q:
        words.append(f"--seq-kv {problem.seq_kv}")
    words.append(f"--head-dim {problem.head_dim}")
    if problem.head_dim_v != problem.head_dim:
        words.append(f"--head-dim-v {problem.head_dim_v}")
    words.append(f"--mask {problem.mask} --layout {problem.layout.value}")
    if problem.packed:
        words.append(f"--tokens {problem.tokens_q}x{problem.tokens_kv}")
    if problem.dtype is DType.FLOAT32:
        words.append(f"--precision {problem.precision.value}")
    if problem.numerics is not Numerics.ANY:
        words.append(f"--numerics {problem.numerics.value}")
    if problem.cache is not None:
        words.append(f"--key-cache {problem.cache}")
    if problem.key_lengths is not None:
        words.append(f"--key-lengths {problem.key_lengths}")
    if problem.op is not Op.FORWARD:
        words.append(f"--operation {problem.op.value}")
    if problem.deterministic:
        words.append("--deterministic")
    words += [f"--modifier {shlex.quote(modifier)}" for modifier in _modifiers(problem.modifiers)]
    return " ".join(words)


def _modifiers(modifiers: Modifiers) -> list[str]:
    names = [name for name in SWITCHES if getattr(modifiers, name)]
    names += [f"bias={modifiers.bias.value}"] if modifiers.bias is not Bias.NONE else []
    return [*names, *([f"score_mod={modifiers.score_mod}"] if modifiers.score_mod else [])]
