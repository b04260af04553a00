"""Where data lives, and what the door to YAML lets through."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout_paths import CHECKOUT, INSTALLED

from autoattn.codegen import resources
from autoattn.core.problem import Op
from autoattn.errors import ShapesError, SpaceError, UsageError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for the folder of the package, in an empty checkout."""
    folder = tmp_path / "autoattn"
    folder.mkdir()
    monkeypatch.setattr(resources, "files", lambda name: tmp_path / name)
    resources.root.cache_clear()
    yield folder
    resources.root.cache_clear()


@pytest.mark.skipif(INSTALLED != CHECKOUT, reason="the package is a wheel's")
def test_a_checkout_serves_its_own_files() -> None:
    assert resources.root() == CHECKOUT
    assert resources.shipped_cache() == CHECKOUT / "cache"


def test_a_wheel_serves_what_it_carries(package: Path) -> None:
    assert resources.root() == package.parent
    (package / "_data").mkdir()
    resources.root.cache_clear()
    assert resources.root() == package / "_data"
    assert resources.template_path("triton/forward") == package / "_data/templates/triton/forward.py.j2"
    assert resources.space_path("triton/forward") == package / "_data/search_spaces/triton/forward.yaml"


@pytest.mark.parametrize(
    "environment", [{}, {"TRITON_HOME": "/somewhere"}, {"TRITON_CACHE_DIR": "/there"}, {"HOME": "/home/of/x"}]
)
def test_tritons_cache_is_where_triton_says(environment: dict[str, str]) -> None:
    imports = "import triton; from autoattn.codegen import resources"
    script = f"{imports}; print(triton.knobs.cache.dir); print(resources.triton_cache())"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run([sys.executable, "-c", script], env={**kept, **environment}, capture_output=True, text=True)
    theirs, ours = done.stdout.splitlines()
    assert Path(theirs) == Path(ours)


def test_templates_are_found_by_looking(package: Path) -> None:
    for name in ("triton/forward.py.j2", "gluon/forward.py.j2", "gluon/decode.py.j2", "triton/forward.txt"):
        path = package.parent / "templates" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert resources.template_names(Op.FORWARD) == ["gluon/forward", "triton/forward"]


@pytest.mark.parametrize(
    "name", ["forward", "../forward", "triton/../../etc", "/etc/passwd", "triton/forward.py", "", "a/b/c"]
)
def test_no_name_leaves_the_folder(name: str) -> None:
    for path_of in (resources.template_path, resources.space_path):
        with pytest.raises(UsageError, match="family/operation"):
            path_of(name)


def test_the_user_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("AUTOATTN_CACHE", "~/mine")
    assert resources.user_cache() == Path("/home/someone/mine")
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("AUTOATTN_CACHE")
        else:
            monkeypatch.setenv("AUTOATTN_CACHE", unset)
        assert resources.user_cache().name == "autoattn"
        assert resources.user_cache().is_relative_to("/home/someone")


def written(tmp_path: Path, content: bytes | str) -> Path:
    path = tmp_path / "file.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("a: 1\nb: [x, 2.5, true, null]\n", {"a": 1, "b": ["x", 2.5, True, None]}),
        ("\ufeffa: 1\n", {"a": 1}),
        ("a: {b: {c: 1}}\nd: {b: {c: 1}}\n", {"a": {"b": {"c": 1}}, "d": {"b": {"c": 1}}}),
        ("a: &anchor 1\n", {"a": 1}),
        ("", None),
        ("# nothing\n", None),
    ],
)
def test_plain_yaml_is_read(tmp_path: Path, content: str, value: object) -> None:
    assert resources.read_yaml(written(tmp_path, content)) == value


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("a: [1\n", "at line 2, column 1 expected"),
        ("a: 1\n  b: 2\n", "at line 2, column 4 mapping values are not allowed"),
        ("a:\n\t- 1\n", "at line 2, column 1 found character"),
        ("a: 1\nb: 2\na: 3\n", "at line 3, column 1 the key 'a' stands twice"),
        ("x:\n  - {a: 1, a: 1}\n", "at line 2, column 12 the key 'a' stands twice"),
        ("1: a\n0x1: b\n", "at line 2, column 1 the key 1 stands twice"),
        ("? [1]\n: 2\n", r"at line 1, column 3 the key \[1\] is a list"),
        (BOMB, r"at line 2, column 8 the alias \*a is not supported"),
        ("a: &a [*a]\n", r"the alias \*a is not supported"),
        ("<<: {a: 1}\n", "the merge key << is not supported"),
        ("--- 1\n--- 2\n", "at line 2, column 1 but found another document"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("a: 2025-99-99\n", "a value does not parse"),
        ("a: !!bool x\n", "a value does not parse"),
        ("a: !!int ''\n", "a value does not parse"),
        ("a\x00b", "not allowed"),
        ("[" * 100_000, "nests too deeply"),
        (b"a: \xff\n", "must be UTF-8 text, but byte 3 is not"),
        ("a: 1".encode("utf-16"), "must be UTF-8 text"),
        (b"# " + b"x" * resources.MAX_YAML_BYTES, "at most 1048576 bytes"),
    ],
)
@pytest.mark.parametrize("error", [ShapesError, SpaceError])
def test_other_content_is_refused_in_one_sentence(
    tmp_path: Path, content: bytes | str, fault: str, error: type[UsageError]
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(error, match=fault) as caught:
        resources.read_yaml(path, error)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_that_is_not_there_or_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapesError, match="there is none"):
        resources.read_yaml(tmp_path / "none.yaml", ShapesError)
    with pytest.raises(ShapesError, match="it is a folder"):
        resources.read_yaml(tmp_path, ShapesError)
    with pytest.raises(ShapesError, match="null byte"):
        resources.read_yaml(Path("a\0b"), ShapesError)


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ShapesError, match=r"reading failed \(Permission denied\)"):
        resources.read_yaml(tmp_path / "file.yaml", ShapesError)
