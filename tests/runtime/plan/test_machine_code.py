"""Calls run precompiled kernels where a cache folder has them, and compile where it cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fake_device
import kernels
import pytest
import samples
import torch
from precompiled_kernels import cubin, precompiled_kernel, with_facts

from autoattn.cache import whole_files
from autoattn.codegen import precompiled, render, resources
from autoattn.codegen.precompiled import PrecompiledKernel
from autoattn.core.problem import DType
from autoattn.core.variant import Source, Traits
from autoattn.errors import CompileError
from autoattn.kernels import precompiled_kernel as loading
from autoattn.kernels.compiler import Kernel
from autoattn.runtime.plan import decision, machine_code, planner

PROBLEM = kernels.problem(head_dim=64)
VARIANT = kernels.variant()
TRAITS = Traits()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache; none is shipped."""
    monkeypatch.setattr(resources, "user_cache", lambda: tmp_path / "own")
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "shipped")
    machine_code.forget()
    yield tmp_path / "own"
    machine_code.forget()


def write(folder: Path, kernel: PrecompiledKernel) -> Path:
    path = precompiled.path_of(folder, kernel.facts.arch, kernel.facts.key)
    whole_files.write_new(path, precompiled.encode(kernel))
    machine_code.forget()
    return path


def find(arch: int = 90) -> PrecompiledKernel | None:
    return machine_code.find(PROBLEM, VARIANT, TRAITS, arch)


def test_a_kernel_of_the_users_cache_serves_its_kind_variant_and_traits(folder: Path) -> None:
    assert find() is None
    write(folder, precompiled_kernel(PROBLEM, VARIANT))
    assert find() is not None
    assert machine_code.find(replace(PROBLEM, batch=7), VARIANT, TRAITS, 90) is not None
    assert machine_code.find(replace(PROBLEM, head_dim=80), VARIANT, TRAITS, 90) is None
    assert machine_code.find(PROBLEM, VARIANT, replace(TRAITS, lse=True), 90) is None
    assert find(arch=80) is None


def test_one_that_was_not_there_is_seen_after_forget(folder: Path) -> None:
    assert find() is None
    whole_files.write_new(
        precompiled.path_of(folder, 90, precompiled_kernel(PROBLEM, VARIANT).facts.key),
        precompiled.encode(precompiled_kernel(PROBLEM, VARIANT)),
    )
    assert find() is None
    machine_code.forget()
    assert find() is not None


def test_no_python_of_a_file_is_run(folder: Path) -> None:
    """Whoever made the file: the host side comes from the text that the templates give here."""
    write(folder, precompiled_kernel(PROBLEM, VARIANT, launch_text="raise SystemExit('run')\n"))
    kernel = find()
    assert kernel is not None
    assert callable(loading.host_side(kernel).grid)


def test_a_kernel_of_another_text_does_not_serve(folder: Path) -> None:
    write(folder, precompiled_kernel(PROBLEM, VARIANT, text="another text"))
    assert find() is None


def test_the_text_of_a_shipped_kernel_counts_where_autoattn_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("a template was rendered")

    write(resources.shipped_cache(), precompiled_kernel(PROBLEM, VARIANT))
    monkeypatch.setattr(resources, "is_installed", lambda: True)
    monkeypatch.setattr(render, "render", fail)
    assert find() is not None


def test_the_users_cache_goes_before_the_shipped_one(folder: Path) -> None:
    write(resources.shipped_cache(), precompiled_kernel(PROBLEM, VARIANT))
    write(folder, precompiled_kernel(PROBLEM, VARIANT, compiler="3.6.1"))
    kernel = find()
    assert kernel is not None
    assert kernel.facts.compiler == "3.6.1"


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (replace(precompiled_kernel(PROBLEM, VARIANT), code={"forward": cubin(content=b"other")}), "another SHA-256"),
        (precompiled_kernel(PROBLEM, VARIANT, code=cubin(arch=80)), "is for sm_80, its facts say sm_90"),
        (with_facts(precompiled_kernel(PROBLEM, VARIANT), format=2), "must have format 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_and_the_next_folder_asked(
    folder: Path, kernel: PrecompiledKernel, words: str
) -> None:
    write(folder, kernel)
    with pytest.warns(RuntimeWarning, match=rf"{words}.*get it anew; the kernel is compiled in its place"):
        assert find() is None
    write(resources.shipped_cache(), precompiled_kernel(PROBLEM, VARIANT))
    with pytest.warns(RuntimeWarning, match=words):
        assert find() is not None


def test_code_that_the_driver_refuses_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> Kernel:
        raise CompileError("the driver must load the machine code of forward, got CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(loading, "load", refuse)
    with (
        caplog.at_level(logging.WARNING, "autoattn"),
        pytest.warns(RuntimeWarning, match="NO_BINARY_FOR_GPU; the kernel is compiled in its place"),
    ):
        assert machine_code.load(precompiled_kernel(PROBLEM, VARIANT), VARIANT, TRAITS, 0) is None


def test_explain_says_precompiled(folder: Path) -> None:
    problem = kernels.problem(head_dim=64, dtype=DType.FLOAT16)
    before = decision.explain(problem, samples.H200)
    assert before.variant is not None
    assert not before.precompiled
    assert str(before).startswith("kernel (default): ")
    write(folder, precompiled_kernel(problem, before.variant, render.natural_traits(problem)))
    after = decision.explain(problem, samples.H200)
    assert after.precompiled == "precompiled with Triton 3.6.0 for sm_90"
    assert str(after).startswith("kernel (default, precompiled): ")


# --- Calls ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Source]]:
    """An H200, and what is compiled for it."""
    compiled: list[Source] = []
    real_find = machine_code.find

    def load(source: Source, device: torch.device) -> Kernel:
        compiled.append(source)
        return Kernel(source=source, module=torch, compiled=None, device=device, sm_count=132)

    def load_precompiled(kernel: PrecompiledKernel, source: Source, device: torch.device) -> Kernel:
        return Kernel(
            source=source, module=torch, compiled=None, device=device, sm_count=132, precompiled=str(kernel)
        )  # fmt: skip

    with fake_device.plan_on(monkeypatch, samples.H200, load):
        monkeypatch.setattr(machine_code, "find", real_find)
        monkeypatch.setattr(loading, "load", load_precompiled)
        yield compiled


def test_a_call_with_machine_code_compiles_nothing(card: list[Source], folder: Path) -> None:
    problem = kernels.problem(head_dim=64, dtype=DType.FLOAT16)
    plan = planner.prepare(problem, TRAITS, 0)
    assert len(card) == 1
    assert not plan.explanation.precompiled
    write(folder, precompiled_kernel(problem, card[0].variant))
    planner.forget()
    plan = planner.prepare(problem, TRAITS, 0)
    assert len(card) == 1
    assert plan.kernel is not None
    assert plan.kernel.source.digest == card[0].digest
    assert plan.explanation.precompiled == "precompiled with Triton 3.6.0 for sm_90"


def test_a_call_whose_machine_code_is_damaged_compiles(card: list[Source], folder: Path) -> None:
    problem = kernels.problem(head_dim=64, dtype=DType.FLOAT16)
    planner.prepare(problem, TRAITS, 0)
    kernel = replace(precompiled_kernel(problem, card[0].variant), code={"forward": cubin(content=b"other")})
    write(folder, kernel)
    planner.forget()
    planner.load_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="is damaged .* the kernel is compiled in its place"):
        plan = planner.prepare(problem, TRAITS, 0)
    assert len(card) == 2
    assert not plan.explanation.precompiled
