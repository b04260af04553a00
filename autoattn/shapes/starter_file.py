"""Writes a shapes document as YAML text with comments that explain every key: what `autoattn init` writes."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from autoattn.core.modifiers import SWITCHES

WIDTH = 100

STARTER: dict[str, Any] = {
    "version": 1,
    "defaults": {"dtype": "bfloat16", "batch": 1, "heads": 32, "heads_kv": 8, "head_dim": 128, "mask": "causal"},
    "groups": {
        "prefill": {"description": "the output for a whole sequence", "problems": [{"seq": [1024, 4096]}]},
        "training": {
            "description": "add backward to operation for gradients; only the card itself can tune them",
            "problems": [{"batch": 4, "seq": 2048, "operation": ["forward"]}],
        },
        "decode": {
            "description": "one new token on cached keys",
            "problems": [{"batch": [1, 16], "seq": "1x4096"}],
        },
    },
}
HEAD = (
    "The problems that autoattn tunes: autoattn tune --device auto --shapes FILE",
    "",
    "A problem is one attention call. Where a value is a list, the problem stands for every combination. `defaults` "
    "are for all problems that do not give their own value; a group may have `defaults` too. The names of groups are "
    "yours: --group NAME tunes one of them. All keys are listed at the end, and docs/shapes.md explains them in full.",
)
KEYS = f"""\
Keys of the file
  version: 1, required            defaults: for every problem      groups: name -> group
  published: tables of measurements, which autoattn does not read
Keys of a group
  problems: a list, required      description: text                defaults: for its problems
Keys of a problem (required: dtype, batch, heads, seq, head_dim)
  dtype: float16, bfloat16, float32 or float8_e4m3
  precision: of float32 products: ieee, tf32 or tf32x3 (also as dtype: float32:tf32)
  batch: sequences                heads: query heads
  heads_kv: key and value heads, which divide heads; as heads if left out
  seq: tokens, or 1x4096 for 1 query on 4096 keys; also as seq_q and seq_kv
  head_dim: elements of a query and of a key, up to 256
  head_dim_v: elements of a value, up to 512; as head_dim if left out
  mask: full, causal, causal:top-left, "window:LEFT,RIGHT" or "blocks:ROWSxKEYS,DENSITY"
  causal: true or false, in place of mask
  layout: bhsd, bshd, or packed for sequences of several lengths without padding
  tokens: of all packed sequences together; also as tokens_q and tokens_kv
  operation: forward, or backward for the gradients, which only the card itself can tune
  deterministic: true for gradients that repeat to the bit
  cache: "paged:16" or contiguous, where keys lie in a cache (docs/kv-cache.md)
  ranks: of a group that share the sequence (docs/context-parallel.md)
  numerics: any, or online for kernels whose time no growth of the scores changes
  {", ".join(name for name in SWITCHES if name != "learned_slopes")}: true if the call has it
  learned_slopes: true if slopes of alibi have a gradient
  bias: keys, boolean, additive or learned
  score_mod: an expression that changes each score (docs/masks.md)"""

_PLAIN = re.compile(r"[A-Za-z][\w.;-]*(?:[ :][\w.;-]+)*|[1-9][0-9]*x[0-9]+")  # a text that YAML reads as itself
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def write(document: Mapping[str, Any], head: Sequence[str] = HEAD) -> str:
    """YAML with a comment in front and the keys explained behind; `shapes_file.load` reads it as `document`.

    Args:
        document: version, defaults and groups, as `shapes_file.parse` takes them.
        head: paragraphs of the comment in front; "" for an empty line.
    """
    lines = [line for paragraph in head for line in _comment(paragraph)]
    lines += [f"version: {document['version']}", "", "defaults:"]
    lines += [f"  {key}: {_value(value)}" for key, value in document["defaults"].items()]
    lines += ["", "groups:"]
    for name, group in document["groups"].items():
        lines += [f"  {_value(name)}:", f"    description: {_value(group['description'])}", "    problems:"]
        lines += [f"      - {_value(problem)}" for problem in group["problems"]]
        lines.append("")
    return "\n".join([*lines, *(f"# {line}".rstrip() for line in KEYS.splitlines())]) + "\n"


def _comment(paragraph: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(paragraph, WIDTH - 2)] or ["#"]


def _value(value: object) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
