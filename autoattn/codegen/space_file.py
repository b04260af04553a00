"""The file of a search space: its keys, and the rules that it may write."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from autoattn.codegen import resources
from autoattn.codegen.space_rules import Rule
from autoattn.errors import SpaceError

VERSION = 1


class _Parameter(msgspec.Struct, forbid_unknown_fields=True):
    choices: Annotated[list[int | str], msgspec.Meta(min_length=1)]
    about: Annotated[str, msgspec.Meta(min_length=1)]
    implied: int | str | None = None


class _Requirement(msgspec.Struct, forbid_unknown_fields=True):
    rule: str
    because: Annotated[str, msgspec.Meta(min_length=1)]


class SpaceFile(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of a search space's file; docs/search-spaces.md explains each."""

    version: int
    template: str
    interpreted: bool
    parameters: Annotated[dict[str, _Parameter], msgspec.Meta(min_length=1)]
    let: dict[str, str]
    require: list[_Requirement]
    seeds: Annotated[list[dict[str, int | str | list[int | str]]], msgspec.Meta(min_length=1)]
    base: dict[str, int | str]
    fixed: dict[str, int | str] = {}
    triton: list[str] = []
    step_bytes: int = 1
    deterministic: str = "1"
    specialised: bool = False
    heads_together: str = "1"
    tile: str = ""
    rehearsal: dict[str, int | str] = {}
    ablation: list[str] = []
    barriers: list[str] = []


def each_seed(seeds: Iterable[Mapping[str, int | str | list[int | str]]]) -> Iterator[dict[str, int | str]]:
    """The seeds that entries of the file stand for: one for each crossing of the values that they list."""
    for seed in seeds:
        values = [value if isinstance(value, list) else [value] for value in seed.values()]
        for crossing in itertools.product(*values):
            yield dict(zip(seed, crossing, strict=True))


def read(template: str) -> tuple[Path, SpaceFile]:
    """The file of a template's search space, and where it is; its rules are not read yet.

    Raises:
        SpaceError: the file has other keys, another version or another template; the sentence says where.
        UsageError: the template's name is none.
    """
    path = resources.space_path(template)
    try:
        file = resources.read_parsed(path, SpaceFile, SpaceError)
    except msgspec.DecodeError as error:
        raise SpaceError(f"{path} must be a search space, but {error}; see docs/search-spaces.md") from None
    if file.version != VERSION:
        raise SpaceError(f"{path} must have version {VERSION}, got {file.version}; use a matching autoattn")
    if file.template != template:
        raise SpaceError(f"{path} must speak of the template {template}, got {file.template!r}; correct it")
    return path, file


def define(name: str, known: set[str]) -> None:
    """Adds the name of a parameter or a let to those that rules may ask for.

    Raises:
        SpaceError: rules cannot hold such a name, or it means something already.
    """
    if not name.isidentifier() or Rule(name).names != {name}:
        raise SpaceError(f"a parameter or let must be named by a word that rules can hold, got {name!r}; rename it")
    if name in known:
        raise SpaceError(f"each name must mean one thing, got {name!r} a second time; rename it")
    known.add(name)


def rule_of(text: str, known: Collection[str]) -> Rule:
    """A rule that speaks of known names alone.

    Raises:
        SpaceError: it is no rule, or speaks of something else.
    """
    rule = Rule(text)
    check_names(rule.names, known, text)
    return rule


def check_names(names: Iterable[str], known: Collection[str], text: str) -> None:
    """Refuses a text that speaks of a name that is not known.

    Raises:
        SpaceError: it does; the sentence says which name was meant, where one is near.
    """
    unknown = sorted(name for name in names if name not in known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise SpaceError(f"the rule {text!r} must speak of what is known to it, got {unknown[0]}; {hint}correct it")
