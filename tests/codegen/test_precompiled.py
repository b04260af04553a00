"""Files of precompiled kernels are read back and refuse damage; those that are shipped are what the templates give."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from precompiled_kernels import PROBLEM, TRAITS, VARIANT, cubin, function, precompiled_kernel, with_facts
from rarely import rarely

from autoattn.cache import store, whole_files
from autoattn.codegen import precompiled, render, resources
from autoattn.codegen.precompiled import PrecompiledKernel
from autoattn.core import device_profiles, kernel_kind
from autoattn.core.cache_entry import KERNEL
from autoattn.core.problem import Op
from autoattn.core.triton_release import SUPPORTED
from autoattn.core.variant import digest_of
from autoattn.errors import CacheError
from autoattn.runtime import warm_up
from autoattn.shapes import shapes_file
from autoattn.tools import compiled

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 15e6  # of all precompiled kernels that a wheel carries
KEY = precompiled.key_of(kernel_kind.of(PROBLEM), VARIANT, TRAITS)


def written(folder: Path, kernel: PrecompiledKernel) -> Path:
    path = precompiled.path_of(folder, kernel.facts.arch, kernel.facts.key)
    whole_files.write_new(path, precompiled.encode(kernel))
    return path


def same(kernel: PrecompiledKernel, other: PrecompiledKernel | None) -> bool:
    assert other is not None
    return all(getattr(kernel, name) == getattr(other, name) for name in ("facts", "text", "launch_text", "code"))


def test_a_kernel_is_read_back(tmp_path: Path) -> None:
    kernel = precompiled_kernel()
    path = written(tmp_path, kernel)
    assert path == tmp_path / "compiled" / "sm_90" / f"{KEY}.zip"
    assert same(kernel, precompiled.read(path))
    assert precompiled.paths_in(tmp_path) == precompiled.paths_in(tmp_path, 90) == [path]
    assert precompiled.paths_in(tmp_path, 80) == []


def test_the_same_kernel_gives_the_same_bytes() -> None:
    assert precompiled.encode(precompiled_kernel()) == precompiled.encode(precompiled_kernel())


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert precompiled.read(tmp_path / "sm_90" / "0.zip") is None


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, precompiled_kernel())
    precompiled.read(path)
    other = precompiled_kernel(code=cubin(content=b"others"))
    written(tmp_path, other)
    os.utime(path, ns=(1, 1))
    assert same(other, precompiled.read(path))


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (replace(precompiled_kernel(), code={"forward": cubin(content=b"changed")}), "code of forward has another"),
        (replace(precompiled_kernel(), text="another"), "its text has another digest"),
        (replace(precompiled_kernel(), launch_text="another"), "text of its launches has another SHA-256"),
        (precompiled_kernel(code=cubin(arch=80)), "machine code of forward is for sm_80, its facts say sm_90"),
        (precompiled_kernel(code=b"no ELF"), "its machine code is no cubin"),
        (with_facts(precompiled_kernel(), format=2), "must have format 1, got 2"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_it_says_is_refused(tmp_path: Path, kernel: PrecompiledKernel, words: str) -> None:
    path = written(tmp_path, kernel)
    with pytest.raises(CacheError, match=rf"the precompiled kernel {path} is damaged \(.*{words}.*\); get it anew"):
        precompiled.read(path)


@pytest.mark.parametrize(("folder", "name"), [("sm_80", KEY), ("sm_90", "0123456789abcdef")])
def test_a_file_under_another_name_is_refused(tmp_path: Path, folder: str, name: str) -> None:
    path = tmp_path / folder / f"{name}.zip"
    whole_files.write_new(path, precompiled.encode(precompiled_kernel()))
    with pytest.raises(CacheError, match="for sm_90, which its name does not say"):
        precompiled.read(path)


def test_each_byte_counts(tmp_path: Path) -> None:
    data = precompiled.encode(precompiled_kernel())
    path = precompiled.path_of(tmp_path, 90, KEY)
    kernel = precompiled.decode(data, path)
    for place in range(0, len(data), 97):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        with contextlib.suppress(CacheError):
            assert same(kernel, precompiled.decode(bytes(changed), path))  # a byte that nobody reads, as of a date


@pytest.mark.parametrize("data", [b"", b"PK", b"no zip at all", precompiled.encode(precompiled_kernel())[:500]])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = precompiled.path_of(tmp_path, 90, KEY)
    whole_files.write_new(path, data)
    with pytest.raises(CacheError, match="is damaged"):
        precompiled.read(path)


def test_a_zip_without_facts_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("kernel.py", "text")
    with pytest.raises(CacheError, match="is damaged"):
        precompiled.decode(stream.getvalue(), tmp_path / "sm_90" / "0.zip")


def test_a_file_that_unfolds_into_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompiled, "MAX_BYTES", 1000)
    with pytest.raises(CacheError, match="must hold at most 1000 bytes"):
        precompiled.decode(precompiled.encode(precompiled_kernel()), precompiled.path_of(tmp_path, 90, KEY))


def test_a_folder_in_the_place_of_a_file_is_a_sentence(tmp_path: Path) -> None:
    path = precompiled.path_of(tmp_path, 90, KEY)
    path.mkdir(parents=True)
    with pytest.raises(CacheError, match="must be readable"):
        precompiled.read(path)


def test_kind_variant_and_traits_each_make_another_key() -> None:
    kind = kernel_kind.of(PROBLEM)
    keys = {
        precompiled.key_of(kind, VARIANT, TRAITS),
        precompiled.key_of(replace(kind, head_dim=80), VARIANT, TRAITS),
        precompiled.key_of(kind, replace(VARIANT, template="gluon/forward"), TRAITS),
        precompiled.key_of(kind, VARIANT, replace(TRAITS, lse=True)),
    }
    assert len(keys) == 4
    assert precompiled.key_of(kernel_kind.of(replace(PROBLEM, batch=7)), VARIANT, TRAITS) in keys


def test_a_function_names_its_file() -> None:
    assert function(name="backward_keys").file_name == "backward_keys.cubin"


# --- What is shipped --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", rarely([1, 6], lambda each: each == 6))
def test_shipped_texts_are_what_the_templates_give(each: int) -> None:
    """An installed autoattn takes them without rendering; after a change of a template, run make precompiled."""
    paths = precompiled.paths_in(resources.shipped_cache())[::each]
    assert paths
    stale = []
    for path in paths:
        kernel = precompiled.read(path)
        assert kernel is not None
        facts = kernel.facts
        texts = {release: render.text_of(facts.kind, facts.variant, facts.traits, release) for release in SUPPORTED}
        digests = {release: digest_of(text) for release, text in texts.items()}
        if kernel.text != texts[facts.release] or facts.digests != digests:
            stale.append(path.name)
    assert stale == []


def test_shipped_winners_have_machine_code() -> None:
    assert [path for path in winners_in(resources.shipped_cache(), "h200") if not path.exists()] == []


@pytest.mark.exhaustive  # compares the texts of all shipped kernels, once for each card
def test_a_shipped_kernel_is_a_winner_or_what_a_shipped_problem_runs(tmp_path: Path) -> None:
    """`make precompiled` adds what new defaults need, and leaves what nothing runs by now: remove those files."""
    shipped = resources.shipped_cache()
    problems = [named.problem for named in shapes_file.load(ROOT / "precompiled.yaml")]
    problems += compiled.problems_of(shipped, 90)
    for name in ("h200", "h100"):
        for _ in warm_up.kernels_of(problems, device_profiles.named(name), cache=shipped, keep=tmp_path):
            pass
    needed = {path.name for path in precompiled.paths_in(tmp_path)}
    there = {path.name for path in precompiled.paths_in(shipped)}
    assert needed - there == set(), "run make precompiled"
    assert there - needed - {path.name for path in winners_in(shipped, "h200", "h100")} == set()


def winners_in(folder: Path, *cards: str) -> list[Path]:
    """Where the kernels of the entries of some cards lie, those of outputs with and without the LSE."""
    entries = [
        entry
        for file in store.read_folder(folder)
        for entry in file.entries.values()
        if file.device in cards and entry.choice == KERNEL
    ]
    keys = [
        precompiled.key_of(kernel_kind.of(entry.problem), entry.variant, render.natural_traits(entry.problem, lse=lse))
        for entry in entries
        for lse in ((False, True) if entry.problem.op is Op.FORWARD else (False,))
    ]
    return [precompiled.path_of(folder, 90, key) for key in keys]


def test_shipped_kernels_fit_a_wheel() -> None:
    assert sum(path.stat().st_size for path in precompiled.paths_in(resources.shipped_cache())) < MOST_BYTES


def test_an_installed_autoattn_takes_digests_of_shipped_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    file = store.read(resources.shipped_cache() / "h200" / "forward.triton-3.9.json")
    entries = [entry for entry in file.entries.values() if entry.choice == KERNEL]
    assert entries

    def fail(*arguments: object) -> str:
        raise AssertionError("a template was rendered")

    render.forget()
    monkeypatch.setattr(render, "text_of", fail)
    monkeypatch.setattr(resources, "is_installed", lambda: False)
    with pytest.raises(AssertionError, match="rendered"):
        store.why_stale(entries[0])
    monkeypatch.setattr(resources, "is_installed", lambda: True)
    assert [store.why_stale(entry) for entry in entries] == [None] * len(entries)
