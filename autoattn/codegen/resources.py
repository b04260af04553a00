"""Finds templates, search spaces and the shipped cache; the only module that reads YAML."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Hashable
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs
import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from autoattn.core.problem import Op
from autoattn.errors import UsageError

Parsed = TypeVar("Parsed")
_INSTALLED = "_data"  # the folder in the package
_HOMES = ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "USERPROFILE")  # what platformdirs asks, on any system
MAX_YAML_BYTES = 1024 * 1024  # our largest file is a twentieth of it; a larger one is a mistake

# PyYAML lets these escape from values such as the date 2025-99-99 and from wrong explicit tags.
_ESCAPING = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError)

_TEMPLATE_NAME = re.compile(r"[a-z0-9_]+/[a-z0-9_]+")


@cache
def root() -> Path:
    """The folder that holds templates/, search_spaces/, cache/ and shapes.yaml.

    A wheel carries them inside the package (`autoattn/_data`); in a checkout they stand beside it.
    """
    package = Path(str(files("autoattn")))
    installed = package / _INSTALLED
    return installed if installed.is_dir() else package.parent


def is_installed() -> bool:
    """Whether the files are those of a wheel, which nobody edits, rather than of a checkout."""
    return root().name == _INSTALLED


def template_path(name: str) -> Path:
    """The file of a template: "triton/forward" -> templates/triton/forward.py.j2.

    Raises:
        UsageError: the name is not a family and an operation, so that no name read from a file can leave the folder.
    """
    return root() / "templates" / f"{_checked(name)}.py.j2"


def space_path(name: str) -> Path:
    """The search space of a template: "triton/forward" -> search_spaces/triton/forward.yaml.

    Raises:
        UsageError: the name is not a family and an operation.
    """
    return root() / "search_spaces" / f"{_checked(name)}.yaml"


def portfolio_path(op: Op) -> Path:
    """The portfolio of an operation, which need not be there: search_spaces/forward.portfolio.json."""
    return root() / "search_spaces" / f"{op.value}.portfolio.json"


def template_names(op: Op) -> list[str]:
    """The templates of an operation, sorted, found by looking: a new family adds files and edits no registry."""
    return list(_template_names(root(), op))


@cache
def _template_names(folder: Path, op: Op) -> tuple[str, ...]:
    return tuple(sorted(f"{path.parent.name}/{op.value}" for path in folder.glob(f"templates/*/{op.value}.py.j2")))


def shipped_cache() -> Path:
    """The cache that comes with autoattn; only read."""
    return _cache_in(root())


@lru_cache(maxsize=1)
def _cache_in(folder: Path) -> Path:
    return folder / "cache"


def user_cache() -> Path:
    """The cache of this user: $AUTOATTN_CACHE, else the platform's cache folder for autoattn."""
    chosen = os.environ.get("AUTOATTN_CACHE", "")
    return Path(chosen).expanduser() if chosen else _platform_cache(*map(os.environ.get, _HOMES))


@lru_cache(maxsize=1)
def _platform_cache(*homes: str | None) -> Path:
    """The platform's cache folder where _HOMES have these values."""
    return platformdirs.user_cache_path("autoattn", appauthor=False)


def triton_cache() -> Path:
    """Where Triton keeps what it compiles: $TRITON_CACHE_DIR, else .triton/cache in $TRITON_HOME or the home folder.

    The same answer as `triton.knobs.cache.dir`, without importing Triton.
    """
    if chosen := os.environ.get("TRITON_CACHE_DIR", ""):
        return Path(chosen)
    return Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~/")) / ".triton" / "cache"


def _checked(name: str) -> str:
    if _TEMPLATE_NAME.fullmatch(name):
        return name
    raise UsageError(f"a template is named family/operation, as triton/forward, got {name!r}; correct the name")


def read_parsed(path: Path, kind: type[Parsed], error: type[UsageError]) -> Parsed:
    """A YAML file of ours as an object; in a wheel, from the JSON beside it (hatch_build.py).

    Raises:
        msgspec.DecodeError: it holds another object.
        error: `read_yaml` refuses it.
    """
    parsed = path.with_suffix(".json")
    if is_installed() and parsed.exists():
        return msgspec.json.decode(parsed.read_bytes(), type=kind)
    return msgspec.convert(read_yaml(path, error), kind)


def read_yaml(path: Path, error: type[UsageError] = UsageError) -> object:
    """The value that a YAML file holds; None when it is empty.

    Only plain data is read (PyYAML's safe loader). Duplicate keys are refused, because PyYAML silently keeps the last;
    aliases are refused, because a few lines of them unfold into billions of values.

    Raises:
        error: the file is missing, a folder, unreadable, larger than 1 MiB, not UTF-8 or not such YAML.
    """
    text = _read_text(path, error)
    if _LIBYAML:
        with contextlib.suppress(yaml.YAMLError, RecursionError, *_ESCAPING):
            return _value(_LibyamlLoader(text))
    try:  # again where it failed, for words and marks that do not depend on what is installed
        return _value(_Loader(text))
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise error(f"{path} must be YAML, but{where} {_one_line(problem.problem)}; correct the file") from None
    except yaml.YAMLError as problem:
        raise error(f"{path} must be YAML, but {_one_line(problem)}; correct the file") from None
    except RecursionError:
        raise error(f"{path} must be YAML of a few levels, but it nests too deeply; flatten the file") from None
    except _ESCAPING as problem:
        raise error(f"{path} must be YAML, but a value does not parse ({_one_line(problem)}); quote it") from None


def _read_text(path: Path, error: type[UsageError]) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
    except FileNotFoundError:
        raise error(f"{path} must be a YAML file, but there is none; correct the path") from None
    except IsADirectoryError:
        raise error(f"{path} must be a YAML file, but it is a folder; name a file in it") from None
    except (OSError, ValueError) as problem:  # ValueError: a NUL character in the path
        reason = getattr(problem, "strerror", None) or _one_line(problem)
        raise error(f"{path} must be a readable YAML file, but reading failed ({reason}); correct that") from None
    if len(data) > MAX_YAML_BYTES:
        raise error(f"{path} must be a YAML file of at most {MAX_YAML_BYTES} bytes, but it is larger; split the file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path} must be UTF-8 text, but byte {problem.start} is not; save it as UTF-8") from None


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())


def _value(loader: Any) -> object:
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _PlainData:
    """What makes a loader of PyYAML refuse aliases, merge keys (which need them) and duplicate keys."""

    def compose_node(self: Any, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise _at(event.start_mark, f"the alias *{event.anchor} is not supported, write the value out")
        node: yaml.Node | None = super().compose_node(parent, index)  # type: ignore[misc]
        return node

    def construct_mapping(self: Any, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _at(key_node.start_mark, "the merge key << is not supported, write the keys out")
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in keys:
                fault = "stands twice in one mapping" if isinstance(key, Hashable) else "is a list or a mapping"
                raise _at(key_node.start_mark, f"the key {key!r} {fault}")
            keys.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)  # type: ignore[misc]
        return mapping


class _Loader(_PlainData, yaml.SafeLoader):
    """PyYAML's safe loader of plain data."""


try:
    from yaml.cyaml import CParser  # type: ignore[attr-defined]
except ImportError:  # PyYAML was built without libyaml
    _LIBYAML = False
else:
    _LIBYAML = True

    # PyYAML's composer goes before that of libyaml, whose recursion no limit of Python's stops.
    class _LibyamlLoader(_PlainData, Composer, CParser, SafeConstructor, Resolver):
        """The same with libyaml's parser, which is five times as fast."""

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            for base in (Composer, SafeConstructor, Resolver):
                base.__init__(self)


def _at(mark: yaml.Mark, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
