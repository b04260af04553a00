"""The sdist and the wheel that `make dist` built: their content, their metadata, and that one gives the other."""

from __future__ import annotations

import os
import re
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest
import yaml
from checkout_paths import CHECKOUT

from autoattn import __version__

needs_dist = pytest.mark.skipif("AUTOATTN_DIST" not in os.environ, reason="make dist builds what this test reads")
WHEEL = f"autoattn-{__version__}-py3-none-any.whl"
SDIST = f"autoattn-{__version__}.tar.gz"
DATA = ("templates", "search_spaces", "cache")
LEFT_IN_THE_CHECKOUT = {"__pycache__", "studies"}  # bytecode, and the trials of whoever tuned


def dist() -> Path:
    return Path(os.environ["AUTOATTN_DIST"])


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files_below(*folders: str) -> Iterable[PurePosixPath]:
    """Files of the checkout that a release has, by their path from the root."""
    for folder in folders:
        for path in (CHECKOUT / folder).rglob("*"):
            place = path.relative_to(CHECKOUT)
            if path.is_file() and path.suffix != ".lock" and not LEFT_IN_THE_CHECKOUT & set(place.parts):
                yield PurePosixPath(place)


@needs_dist
def test_the_sdist_gives_the_wheel_of_the_checkout_byte_for_byte() -> None:
    assert sorted(path.name for path in dist().iterdir()) == sorted(["checkout", SDIST, WHEEL])
    from_checkout = content(dist() / "checkout" / WHEEL)
    assert content(dist() / WHEEL) == from_checkout
    assert len(from_checkout) > 700


@needs_dist
def test_the_wheel_holds_the_package_its_data_and_nothing_else() -> None:
    package = {str(path) for path in files_below("autoattn")}
    data = {f"autoattn/_data/{path}" for path in files_below(*DATA)}
    parsed = {name.replace(".yaml", ".json") for name in data if name.endswith(".yaml")}
    facts = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert "autoattn/py.typed" in package
    expected = package | data | parsed | {f"autoattn-{__version__}.dist-info/{name}" for name in facts}
    assert set(content(dist() / WHEEL)) == expected


@needs_dist
def test_the_sdist_holds_the_sources_the_documentation_and_the_tests() -> None:
    with tarfile.open(dist() / SDIST) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("autoattn", *DATA, "tests", "benchmarks", "docs", "examples")
    assert {str(path) for path in files_below(*folders)} <= held
    assert {"hatch_build.py", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff"} <= held
    assert not [name for name in held if LEFT_IN_THE_CHECKOUT & set(PurePosixPath(name).parts)]


@needs_dist
def test_the_metadata_is_valid_and_its_description_links_to_nothing_relative() -> None:
    from packaging.metadata import Metadata

    facts = Metadata.from_email(content(dist() / WHEEL)[f"autoattn-{__version__}.dist-info/METADATA"], validate=True)
    assert (facts.name, str(facts.version), facts.license_expression) == ("autoattn", __version__, "Apache-2.0")
    assert str(facts.requires_python) == ">=3.10"
    assert set(facts.provides_extra or ()) == {"dev", "docs", "frames", "grpc", "integrations", "mysql", "postgresql"}
    assert {"torch>=2.11", "triton<3.10,>=3.6"} <= {
        str(requirement).replace(" ", "") for requirement in facts.requires_dist or ()
    }
    links = re.findall(r"(?:\]\(|src=\")([^)\"]*)", facts.description or "")
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []


def test_the_number_of_the_release_stands_in_one_place_and_heads_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    project = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^(?:version = .*|dynamic = .*"version".*)$', project, re.MULTILINE)[0].startswith("dynamic")
    changelog = (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = [
        version for version in re.findall(r"^## \[([^]]+)\]", changelog, re.MULTILINE) if version != "Unreleased"
    ]
    assert versions[0] == __version__


def test_the_citation_has_what_its_format_requires() -> None:
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == "Apache-2.0"
    assert "version" not in citation  # the number of the release stands in one place
