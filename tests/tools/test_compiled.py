"""Machine code of a cache is compiled, added, pruned and verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import kernels
import pytest
import samples
from precompiled_kernels import cubin, precompiled_kernel, with_facts

from autoattn.cache import store, whole_files
from autoattn.codegen import precompiled, render
from autoattn.codegen.precompiled import PrecompiledKernel
from autoattn.core import kernel_kind
from autoattn.core.problem import Op
from autoattn.kernels import precompiler
from autoattn.runtime import warm_up
from autoattn.tools import bundle, compiled
from autoattn.tools.compiled import CodeFinding

PROBLEM = kernels.problem(head_dim=16)
VARIANT = kernels.variant()


@pytest.fixture(scope="module")
def kernel() -> PrecompiledKernel:
    source = render.render(PROBLEM, VARIANT)
    return precompiler.precompile(source, kernel_kind.of(PROBLEM), 90)


def write(folder: Path, kernel: PrecompiledKernel) -> Path:
    path = precompiled.path_of(folder, kernel.facts.arch, kernel.facts.key)
    whole_files.write_new(path, precompiled.encode(kernel))
    return path


def spoilt(kernel: PrecompiledKernel) -> PrecompiledKernel:
    """The kernel with another byte of machine code, and the SHA-256 that belongs to it."""
    (function,) = kernel.facts.functions
    code = kernel.code["forward"][:-1] + bytes([kernel.code["forward"][-1] ^ 1])
    other = replace(function, sha256=hashlib.sha256(code).hexdigest())
    return replace(with_facts(kernel, functions=(other,)), code={"forward": code})


def findings(folder: Path) -> Iterator[tuple[CodeFinding, bool]]:
    return ((check.finding, check.ok) for check in compiled.verify(folder, 90, jobs=1))


def test_what_compiles_to_the_same_bytes_is_the_same(kernel: PrecompiledKernel, tmp_path: Path) -> None:
    write(tmp_path, kernel)
    assert list(findings(tmp_path)) == [(CodeFinding.SAME, True)]


def test_other_bytes_are_noticed(kernel: PrecompiledKernel, tmp_path: Path) -> None:
    write(tmp_path, spoilt(kernel))
    assert list(findings(tmp_path)) == [(CodeFinding.DIFFERENT, False)]


def test_code_of_another_compiler_is_not_compared(kernel: PrecompiledKernel, tmp_path: Path) -> None:
    write(tmp_path, with_facts(kernel, compiler="3.5.9"))
    assert list(findings(tmp_path)) == [(CodeFinding.UNCHECKED, True)]


def test_code_of_another_text_is_stale_and_pruned(tmp_path: Path) -> None:
    path = write(tmp_path, precompiled_kernel(PROBLEM, VARIANT, text="another text"))
    assert list(findings(tmp_path)) == [(CodeFinding.STALE, False)]
    assert compiled.prune(tmp_path, 80) == 0
    assert compiled.prune(tmp_path, 90) == 1
    assert not path.exists()


def test_a_damaged_file_is_found_and_pruned(tmp_path: Path) -> None:
    path = write(tmp_path, precompiled_kernel(PROBLEM, VARIANT))
    path.write_bytes(path.read_bytes()[:-40])
    ((finding, ok),) = findings(tmp_path)
    assert (finding, ok) == (CodeFinding.DAMAGED, False)
    assert compiled.prune(tmp_path, 90) == 1


def test_a_folder_without_machine_code_has_nothing_to_verify(tmp_path: Path) -> None:
    assert list(findings(tmp_path)) == []


def test_kernels_are_added_once(tmp_path: Path) -> None:
    first = precompiled_kernel(PROBLEM, VARIANT)
    assert compiled.add(tmp_path, [first]) == 1
    assert compiled.add(tmp_path, [first, precompiled_kernel(PROBLEM, VARIANT, code=cubin(content=b"x"))]) == 0
    assert compiled.add(tmp_path, [precompiled_kernel(PROBLEM, VARIANT, text="another text")]) == 1
    path = precompiled.path_of(tmp_path, 90, first.facts.key)
    path.write_bytes(b"damaged")
    assert compiled.add(tmp_path, [first]) == 1


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with one tuned problem of an H200."""
    entry = samples.tuned(PROBLEM, VARIANT)
    store.merge(tmp_path / "cache", samples.H200, Op.FORWARD, [entry])
    return tmp_path / "cache"


def test_the_kernels_of_entries_are_compiled_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_kernels = list(warm_up.kernels_of([PROBLEM], samples.H200, cache=cache, jobs=2, keep=cache))
    assert not any(kernel.refused for kernel in compiled_kernels)
    paths = precompiled.paths_in(cache, 90)
    assert precompiled.path_of(
        cache, 90, precompiled.key_of(kernel_kind.of(PROBLEM), VARIANT, render.natural_traits(PROBLEM))
    ) in paths  # fmt: skip
    stamps = [path.stat().st_mtime_ns for path in paths]

    class NoPool:
        def __init__(self, size: int) -> None:
            self.size = size

        def __enter__(self) -> NoPool:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def next_results(self) -> list[object]:
            return []

        def submit(self, *job: object) -> int:
            raise AssertionError("a kernel was compiled again")

    monkeypatch.setattr(warm_up, "Pool", NoPool)
    list(warm_up.kernels_of([PROBLEM], samples.H200, cache=cache, keep=cache))
    assert [path.stat().st_mtime_ns for path in paths] == stamps
    files = [file for file in store.read_folder(cache) if file.device == "h200"]
    kernels_of_entries = compiled.of_entries(files, cache)
    assert len(kernels_of_entries) == len(paths)
    packed = cache.parent / "bundle.zip"
    packed.write_bytes(bundle.pack(files, compiled=kernels_of_entries))
    content = bundle.load_content(packed)
    assert [kernel.facts for kernel in content.compiled] == [kernel.facts for kernel in kernels_of_entries]
    assert bundle.load_content(cache).files == content.files
