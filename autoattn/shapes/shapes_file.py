"""Shapes files: YAML that names the problems to tune. docs/shapes.md describes the format to its writers."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autoattn.codegen.resources import read_yaml
from autoattn.core.key_cache import KeyCache
from autoattn.core.mask import Mask
from autoattn.core.modifiers import SWITCHES, Bias, Modifiers
from autoattn.core.problem import MAX_SIZE, DType, Layout, Numerics, Op, Precision, Problem
from autoattn.core.sequence_lengths import KeyLengths
from autoattn.errors import ProblemError, ShapesError
from autoattn.expressions import language
from autoattn.expressions.language import SCORE_NAMES
from autoattn.shapes import ranks

VERSION = 1
MAX_PROBLEMS = 10_000  # weeks of tuning; more is a slip of the pen in a grid

_DTYPES = {
    **{dtype.value: dtype for dtype in DType},
    "fp16": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
    "fp32": DType.FLOAT32,
    "fp8": DType.FLOAT8,
}
# Two ways to say one thing
_SPELLINGS = (("seq", {"seq_q", "seq_kv"}), ("tokens", {"tokens_q", "tokens_kv"}), ("mask", {"causal"}))
_PAIR = re.compile(r"([0-9]{1,10})x([0-9]{1,10})")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedProblem:
    """A problem and the groups that list it, in file order."""

    problem: Problem
    groups: tuple[str, ...]


def load(path: Path) -> list[NamedProblem]:
    """The problems of a shapes file, in file order, each once.

    Raises:
        ShapesError: the file cannot be read, or does not follow the format; one sentence says where.
    """
    return parse(read_yaml(path, ShapesError), str(path))


def parse(document: object, name: str) -> list[NamedProblem]:
    """The problems of a shapes file that YAML has read already; `name` stands in the messages.

    Raises:
        ShapesError: the document does not follow the format.
    """
    if document is None:
        raise ShapesError(f"{name} must hold version and groups, but it is empty; see docs/shapes.md for an example")
    # `published` holds tables of measurements that belong to the shapes; it is not read.
    file = _mapping(document, name, {"version", "defaults", "groups", "published"})
    version = file.get("version")
    if type(version) is not int or version != VERSION:
        raise ShapesError(
            f"{name} must say version: {VERSION}, all that this autoattn reads, got {_show(version)}; correct it"
        )
    defaults = _values(file.get("defaults", {}), f"{name}: defaults")
    groups = _mapping(file.get("groups"), f"{name}: groups")
    if not groups:
        raise ShapesError(f"{name}: groups must name at least one group, got none; add one")
    groups_of: dict[Problem, list[str]] = {}
    budget = MAX_PROBLEMS
    for group, body in groups.items():
        for position, values in _entries(group, body, defaults, name):
            where = f"{name}: group {_show(group)}, problem {position}"
            budget -= _grid_size(values)
            if budget < 0:
                raise ShapesError(f"{where} takes the file above {MAX_PROBLEMS} problems; shorten its lists")
            for point in _grid(values):
                for problem in _problems(point, where):
                    owners = groups_of.setdefault(problem, [])
                    if group not in owners:
                        owners.append(group)
    return [NamedProblem(problem=problem, groups=tuple(owners)) for problem, owners in groups_of.items()]


def _entries(
    group: object, body: object, defaults: Mapping[str, Any], name: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The problems of a group with the defaults filled in, each with its position, which counts from 1."""
    where = f"{name}: group {_show(group)}"
    if not isinstance(group, str) or not group:
        raise ShapesError(f"{where} must have a text for its name; quote the name")
    fields = _mapping(body, where, {"description", "defaults", "problems"})
    if not isinstance(fields.get("description", ""), str):
        raise ShapesError(f"{where}: description must be text, got {_show(fields['description'])}; quote it")
    ours = _overlay(defaults, _values(fields.get("defaults", {}), f"{where}: defaults"))
    problems = fields.get("problems")
    if not isinstance(problems, list) or not problems:
        raise ShapesError(f"{where} must list at least one problem, got {_show(problems)}; add problems: [...]")
    for position, values in enumerate(problems, start=1):
        yield position, _overlay(ours, _values(values, f"{where}, problem {position}"))


def _mapping(value: object, where: str, known: Iterable[str] | None = None) -> dict[Any, Any]:
    """`value` as a mapping that holds no other keys than the known ones."""
    if not isinstance(value, dict):
        raise ShapesError(f"{where} must be a mapping of names to values, got {_show(value)}; see docs/shapes.md")
    if known is not None:
        for key in value:
            if key not in known:
                raise ShapesError(f"{where} holds the unknown key {_show(key)}; {_instead(key, known)}")
    return value


def _instead(key: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(key), sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"


def _values(value: object, where: str) -> dict[str, Any]:
    """The values of a problem, or of defaults for problems, with each choice parsed; a list stays a list of choices."""
    values = _mapping(value, where, PARSERS)
    for spelling, alternatives in _SPELLINGS:
        if spelling in values and not alternatives.isdisjoint(values):
            raise ShapesError(
                f"{where} gives {spelling} and {' and '.join(sorted(alternatives & set(values)))}; keep one of them"
            )
    return {key: _parsed(key, choice, where) for key, choice in values.items()}


def _parsed(key: str, choice: object, where: str) -> list[Any]:
    """The choices for a key, parsed; a single value is one choice."""
    choices = choice if isinstance(choice, list) else [choice]
    if not choices:
        raise ShapesError(f"{where}: {key} must be a value or a list of them, got an empty list; add a value")
    try:
        return [PARSERS[key](key, value) for value in choices]
    except ProblemError as problem:
        raise ShapesError(f"{where}: {problem}") from None


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`; another spelling of the same fact gives way too."""
    hidden: set[str] = set()
    for spelling, alternatives in _SPELLINGS:
        if spelling in above:
            hidden |= alternatives
        if not alternatives.isdisjoint(above):
            hidden.add(spelling)
    return {**{key: value for key, value in below.items() if key not in hidden}, **above}


def _grid_size(values: Mapping[str, list[Any]]) -> int:
    return math.prod(len(choices) for choices in values.values())


def _grid(values: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination, as nested loops would go: the last key changes fastest."""
    for point in itertools.product(*values.values()):
        yield dict(zip(values, point, strict=True))


def _problems(point: Mapping[str, Any], where: str) -> list[Problem]:
    """The problem that a point says, or those of one of the ranks that share its sequence."""
    whole = _problem(point, where)
    if "ranks" not in point:
        return [whole]
    try:
        return ranks.problems(whole, point["ranks"])
    except ProblemError as problem:
        raise ShapesError(f"{where}: {problem}") from None


def _problem(point: Mapping[str, Any], where: str) -> Problem:
    point = dict(point)
    for pair in ("seq", "tokens"):
        if pair in point:
            point[f"{pair}_q"], point[f"{pair}_kv"] = point.pop(pair)
    missing = [key for key in ("dtype", "batch", "heads", *_lengths_of(point), "head_dim") if key not in point]
    if missing:
        raise ShapesError(f"{where} must say {', '.join(missing)}, but does not; add it here or under defaults")
    dtype, precision = _dtype_and_precision(point, where)
    try:
        return Problem(
            dtype=dtype,
            batch=point["batch"],
            heads_q=point["heads"],
            heads_kv=point.get("heads_kv", point["heads"]),
            seq_q=point["seq_q"],
            seq_kv=point["seq_kv"],
            head_dim=point["head_dim"],
            head_dim_v=point.get("head_dim_v", 0),
            mask=point.get("mask", point.get("causal", Mask())),
            modifiers=Modifiers(**{name: point[name] for name in _MODIFIERS if name in point}),
            layout=point.get("layout", Layout.BHSD),
            tokens_q=point.get("tokens_q", 0),
            tokens_kv=point.get("tokens_kv", 0),
            precision=precision,
            numerics=point.get("numerics", Numerics.ANY),
            op=point.get("operation", Op.FORWARD),
            deterministic=point.get("deterministic", False),
            cache=point.get("cache"),
            key_lengths=point.get("lengths"),
        ).simplified()
    except ProblemError as problem:
        raise ShapesError(f"{where}: {problem}") from None


def _dtype_and_precision(point: Mapping[str, Any], where: str) -> tuple[DType, Precision]:
    """The precision of float32 products stands behind the dtype, as float32:tf32, or in a key of its own."""
    dtype, behind = point["dtype"]
    precision = point.get("precision")
    if precision is None:
        return dtype, behind or Precision.IEEE
    if behind is not None:
        raise ShapesError(
            f"{where}: precision must stand in one place, got dtype: {dtype.value}:{behind.value} and precision: "
            f"{precision.value}; keep one of them"
        )
    if dtype is not DType.FLOAT32:
        raise ShapesError(
            f"{where}: precision is a choice for float32 alone, got precision: {precision.value} with {dtype.value}; "
            "leave it out"
        )
    return dtype, precision


def _lengths_of(point: Mapping[str, Any]) -> list[str]:
    """The lengths that the problem must say, by the spelling that it has begun to use."""
    needed = ["seq", "tokens"] if point.get("layout") is Layout.PACKED else ["seq"]
    sides = {pair: (f"{pair}_q", f"{pair}_kv") for pair in needed}
    return [name for pair in needed for name in (sides[pair] if any(key in point for key in sides[pair]) else (pair,))]


def _size(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise ProblemError(f"{key} must be a whole number from 1 to {MAX_SIZE}, got {_show(value)}; correct it")
    return value


def _lengths(key: str, value: object) -> tuple[int, int]:
    """1024 -> (1024, 1024), "1024x4096" -> (1024, 4096): queries by keys."""
    pair = _PAIR.fullmatch(value) if isinstance(value, str) else None
    if pair is not None:
        return _size(key, int(pair[1])), _size(key, int(pair[2]))
    if isinstance(value, str):
        raise ProblemError(f"{key} must be a number or a text as 1024x4096, got {_show(value)}; correct it")
    return _size(key, value), _size(key, value)


def _dtype(key: str, value: object) -> tuple[DType, Precision | None]:
    """Reads "bf16" as bfloat16; "float32:tf32" as float32 with products formed in tf32; None: it has no precision."""
    name, colon, precision = value.partition(":") if isinstance(value, str) else ("", "", "")
    if name in _DTYPES and not colon:
        return _DTYPES[name], None
    if _DTYPES.get(name) is DType.FLOAT32 and precision in [mode.value for mode in Precision]:
        return DType.FLOAT32, Precision(precision)
    raise ProblemError(
        f"{key} must be float16, bfloat16, float8_e4m3, float32:ieee, float32:tf32 or float32:tf32x3 (also fp16, bf16, "
        f"fp8, fp32, and float32 for float32:ieee), got {_show(value)}; correct it"
    )


def _precision(key: str, value: object) -> Precision:
    return Precision(_choice(key, value, [precision.value for precision in Precision]))


def _mask(key: str, value: object) -> Mask:
    short = isinstance(value, str) and len(value) < 60
    return Mask.parse(str(value) if short else _show(value))


def _causal(key: str, value: object) -> Mask:
    if not isinstance(value, bool):
        raise ProblemError(f"{key} must be true or false, got {_show(value)}; name other masks with mask")
    return Mask.parse(value)


def _layout(key: str, value: object) -> Layout:
    return Layout(_choice(key, value, [layout.value for layout in Layout]))


def _bias(key: str, value: object) -> Bias:
    return Bias(_choice(key, value, [bias.value for bias in Bias]))


def _numerics(key: str, value: object) -> Numerics:
    return Numerics(_choice(key, value, [numerics.value for numerics in Numerics]))


def _operation(key: str, value: object) -> Op:
    return Op(_choice(key, value, [op.value for op in Op]))


def _deterministic(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ProblemError(f"{key} must be true or false, got {_show(value)}; correct it")
    return value


def _choice(key: str, value: object, known: list[str]) -> str:
    if not isinstance(value, str) or value not in known:
        listed = f"{', '.join(known[:-1])} or {known[-1]}"
        raise ProblemError(f"{key} must be {listed}, got {_show(value)}; correct it")
    return value


def _switch(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ProblemError(f"{key} must be true or false, got {_show(value)}; its numbers belong to the call")
    return value


def _cache(key: str, value: object) -> KeyCache:
    """Where keys and values lie."""
    return KeyCache.parse(str(value))


def _key_lengths(key: str, value: object) -> KeyLengths:
    """How long the sequences in a cache are."""
    return KeyLengths.parse(str(value))


def _score_mod(key: str, value: object) -> str:
    """An expression, checked here, so that the file's writer learns of a slip before anything is tuned."""
    if not isinstance(value, str):
        raise ProblemError(f"{key} must be an expression as text, got {_show(value)}; see docs/masks.md")
    language.parse(value.strip(), SCORE_NAMES)
    return value.strip()


# Key of a problem -> what reads its value.
PARSERS: dict[str, Callable[[str, object], Any]] = {
    "dtype": _dtype,
    "batch": _size,
    "heads": _size,
    "heads_kv": _size,
    "seq": _lengths,
    "seq_q": _size,
    "seq_kv": _size,
    "head_dim": _size,
    "head_dim_v": _size,
    "mask": _mask,
    "causal": _causal,
    "layout": _layout,
    "tokens": _lengths,
    "tokens_q": _size,
    "tokens_kv": _size,
    "precision": _precision,
    "numerics": _numerics,
    "operation": _operation,
    "deterministic": _deterministic,
    "cache": _cache,
    "lengths": _key_lengths,
    "ranks": _size,
    "score_mod": _score_mod,
    "bias": _bias,
    **dict.fromkeys(SWITCHES, _switch),
}
_MODIFIERS = tuple(field.name for field in fields(Modifiers))


def _show(value: object) -> str:
    """A value as it may stand in a sentence."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
