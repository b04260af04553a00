"""Variables, arguments and functions carry the name of what they hold, as CONTRIBUTING.md asks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from checkout_paths import CHECKOUT

PRONOUNS = {"asked", "found", "got", "it", "made", "one", "thing", "told"}
FOLDERS = ("autoattn", "benchmarks", "examples", "tests")
# Kernels are text of templates: another name would be another kernel, which nobody measured.
GENERATED = ("tests/golden", "autoattn/_data")


def bindings(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of all that a module binds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name:
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def pronouns(source: str) -> list[tuple[int, str]]:
    return [(line, name) for line, name in bindings(source) if name.strip("_").lower() in PRONOUNS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_binding_is_named_by_a_pronoun(folder: str) -> None:
    paths = [path.relative_to(CHECKOUT) for path in sorted((CHECKOUT / folder).rglob("*.py"))]
    written = [path for path in paths if not path.as_posix().startswith(GENERATED)]
    assert written
    named = {str(path): pronouns((CHECKOUT / path).read_text(encoding="utf-8")) for path in written}
    assert {path: names for path, names in named.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "for one in (1, 2): pass",
        "[one for one in (1, 2)]",
        "def told(): pass",
        "def f(*, asked=0): pass",
        "self.made = 1",
        "import json as _it",
        "with open('a') as thing: pass",
        "class Found: pass",
    ],
)
def test_a_pronoun_is_seen_wherever_it_is_bound(source: str) -> None:
    assert len(pronouns(source)) == 1


def test_names_that_hold_a_pronoun_among_other_words_may_stay() -> None:
    assert pronouns("founder = one_head = fast_made = 0\nprint(found)") == []
