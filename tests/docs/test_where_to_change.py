"""docs/where-to-change.md: the changes that a newcomer asks for, and that every file it names is there."""

from __future__ import annotations

import re

import pytest
from checkout_paths import CHECKOUT

PAGE = (CHECKOUT / "docs" / "where-to-change.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
FILES = ("CONTRIBUTING.md", "pyproject.toml")  # of the paths on the page, those without a folder


def paths(text: str) -> list[str]:
    """What stands in backticks and is a path: it has a folder, or is a file of the checkout's root."""
    return [name for name in re.findall(r"`([^`\s]+)`", text) if "/" in name or name in FILES]


def missing(text: str) -> list[str]:
    return [name for name in paths(text) if not (CHECKOUT / name).exists()]


def test_the_page_has_at_least_twelve_changes() -> None:
    assert len(SECTIONS) >= 12


@pytest.mark.parametrize("change", SECTIONS)
def test_a_change_names_files_and_tests_that_exist(change: str) -> None:
    assert missing(SECTIONS[change]) == []
    files, _, tests = SECTIONS[change].partition("\nTests: ")
    assert paths(files)
    assert all(name.startswith("tests/") for name in paths(tests.partition(". ")[0]))
    assert paths(tests)


def test_a_file_that_does_not_exist_is_seen() -> None:
    assert missing("Change `autoattn/core/mask.py`, then `autoattn/core/masc.py`.") == ["autoattn/core/masc.py"]
