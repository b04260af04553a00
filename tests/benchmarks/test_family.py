"""benchmarks/family.py: the command with one family of templates."""

from __future__ import annotations

import sys

import family
import pytest

from autoattn import cli
from autoattn.codegen import search_space
from autoattn.core.problem import Op


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """The templates of gradients that the command sees, and its own words."""
    seen: list[str] = []
    monkeypatch.setattr(sys, "argv", ["family.py", *words])
    monkeypatch.setattr(search_space, "of", search_space.of)  # what it was comes back
    monkeypatch.setattr(
        cli, "main", lambda: seen.extend([*(space.template for space in search_space.of(Op.BACKWARD)), *sys.argv])
    )
    family.main()
    return seen


@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_the_command_sees_one_family_and_not_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert run(monkeypatch, name, "tune", "--device", "auto") == [
        f"{name}/backward", "family.py", "tune", "--device", "auto",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [(), ("tune",)])
def test_another_word_is_a_mistake_that_names_the_families(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    with pytest.raises(
        SystemExit, match=r"needs a family of templates first, got '(tune)?'; it may be gluon, latent or triton"
    ):
        run(monkeypatch, *words)
