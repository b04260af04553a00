"""docs/troubleshooting.md, docs/environment-variables.md, docs/glossary.md: what they name is in the code."""

from __future__ import annotations

import ast
import re

from checkout_paths import CHECKOUT

from autoattn.core import device_profiles, triton_release

DOCS = CHECKOUT / "docs"
CODE = {path: path.read_text(encoding="utf-8") for path in sorted((CHECKOUT / "autoattn").rglob("*.py"))}


def texts(source: str) -> list[str]:
    """The texts of a module, each with "…" where a value is put in."""
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


def said(text: str) -> bool:
    """Whether the code has a text that holds this one; "…" stands for a value."""
    longest = max(text.split("…"), key=len)
    words = max(re.split(r"['\"]", longest), key=len).split()
    likely = (source for source in CODE.values() if all(word in source for word in words))
    return any(text in literal for source in likely for literal in texts(source))


def test_every_error_text_of_the_page_is_in_the_code() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]*)`", row)]
    assert len(quoted) > 40
    assert [text for text in quoted if not said(text)] == []


def test_a_text_that_the_code_does_not_have_is_seen() -> None:
    assert said("… must be bhsd or bshd, got …") is False  # the code says which argument
    assert said("layout must be bhsd or bshd, got …; correct it")


def test_the_page_of_variables_names_those_that_the_code_reads() -> None:
    page = (DOCS / "environment-variables.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))
    ours = {name for row in named for name in re.findall(r"`(AUTOATTN_\w+)`", row)}
    read = {text for source in CODE.values() for text in re.findall(r'"(AUTOATTN_\w+)"', source)}
    tests = "".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "tests").rglob("*.py"))
    only_tests = ours - read
    assert read - ours == set()
    assert only_tests == {"AUTOATTN_CHROMIUM", "AUTOATTN_WRITE_GOLDEN", "AUTOATTN_DIST"}
    assert all(f'"{name}"' in tests for name in only_tests)
    others = {name for row in named for name in re.findall(r"`([A-Z][A-Z_]+)`", row)} - ours
    code = "".join(CODE.values())
    assert [name for name in sorted(others) if name not in code] == []


def test_every_module_that_the_glossary_names_is_there() -> None:
    modules = re.findall(r"\(`([a-z_/]+\.py)`\)", (DOCS / "glossary.md").read_text(encoding="utf-8"))
    assert len(modules) >= 7
    assert [name for name in modules if not (CHECKOUT / "autoattn" / name).exists()] == []


def test_the_table_of_versions_and_cards_has_what_is_supported() -> None:
    page = (DOCS / "support.md").read_text(encoding="utf-8")
    oldest, *_, newest = triton_release.SUPPORTED
    assert f"| Triton | {oldest} to {newest}," in page
    assert f"| PyTorch | {triton_release.TORCH[oldest]} or newer |" in page
    cards = page.partition("## Cards")[2].replace(" ", "").lower()
    assert [device.name for device in device_profiles.all_devices() if device.name.partition("-")[0] not in cards] == []
