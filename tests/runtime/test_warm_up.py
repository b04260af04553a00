"""What is compiled ahead: all that calls of a problem need, each text once, into the cache where calls look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradient_kernels
import kernels
import pytest
import samples

import autoattn
from autoattn.cache import store
from autoattn.codegen import render, resources, search_space
from autoattn.core import device_profiles
from autoattn.core.key_cache import KeyCache
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Op, Problem
from autoattn.core.trial import Outcome, StaticReport
from autoattn.core.variant import Source
from autoattn.errors import DeviceError, HostError, ShapesError
from autoattn.hardware import nvidia
from autoattn.runtime import warm_up
from autoattn.runtime.plan import cache_lookup, machine_code, needed_kernels
from autoattn.runtime.plan.needed_kernels import Answer
from autoattn.runtime.warm_up import WarmKernel
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Failure

A30 = samples.A30
SMALL = kernels.problem(seq_q=64, seq_kv=64)
LARGER = replace(SMALL, seq_kv=72)  # which takes the same variant


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "shipped")


class Compilers:
    """In place of the pool: notes what is compiled, and answers what a test says."""

    def __init__(self, answer: Callable[[Source], Any]) -> None:
        self.answer, self.sources, self.size = answer, [], 0
        self._ended: list[tuple[int, Any]] = []

    def __call__(self, size: int) -> Compilers:
        self.size = size
        return self

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, job: Inspect, seconds: float) -> int:
        assert job.arch == A30.arch
        self.sources.append(job.source)
        self._ended.append((len(self.sources), self.answer(job.source)))
        return len(self.sources)

    def next_results(self) -> list[tuple[int, Any]]:
        return [self._ended.pop(0)] if self._ended else []


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Compilers]:
    def install(answer: Callable[[Source], Any] = lambda source: None) -> Compilers:
        pool = Compilers(answer)
        monkeypatch.setattr(warm_up, "Pool", pool)
        return pool

    return install


def warmed(*problems: Problem, **options: Any) -> list[WarmKernel]:
    return list(warm_up.kernels_of(problems, A30, **options))


def test_each_text_is_compiled_once_and_serves_every_problem_of_its_kind(compilers: Any) -> None:
    pool = compilers()
    ready = warmed(SMALL, LARGER, SMALL)
    assert len(pool.sources) == len(set(pool.sources)) == 2, "the output, and the output with the LSE"
    assert {source.traits.lse for source in pool.sources} == {False, True}
    answers = [(kernel.problem, kernel.answer) for kernel in ready]
    assert sorted(answers, key=str) == sorted(
        [(problem, answer) for problem in (SMALL, LARGER) for answer in (Answer.OUTPUT, Answer.OUTPUT_AND_LSE)], key=str
    )
    assert all(kernel.variant is not None and not kernel.reason for kernel in ready)


def test_a_tuned_gradient_is_among_them(compilers: Any, tmp_path: Path) -> None:
    backward = replace(SMALL, op=Op.BACKWARD)
    variant = search_space.load(gradient_kernels.TEMPLATE).default(backward, A30)
    entry = samples.tuned(backward, variant)
    store.merge(tmp_path, A30, Op.BACKWARD, [entry])
    pool = compilers()
    for problem in (SMALL, backward):
        answers = {kernel.answer: kernel for kernel in warmed(problem, cache=tmp_path)}
        assert set(answers) == set(Answer)
        assert answers[Answer.GRADIENTS].problem == backward
        assert answers[Answer.GRADIENTS].variant == variant
    assert render.render(backward, variant) in pool.sources


def test_they_are_the_kernels_that_the_planner_takes(compilers: Any) -> None:
    pool = compilers()
    warmed(SMALL)
    variant = next(cache_lookup.variants(cache_lookup.explain(SMALL, A30), A30))
    for lse in (False, True):
        assert render.render(SMALL, variant, render.natural_traits(SMALL, lse=lse)) in pool.sources


def test_where_the_compiler_refuses_the_next_kernel_is_compiled(compilers: Any) -> None:
    first = next(cache_lookup.variants(cache_lookup.explain(SMALL, A30), A30))
    refusal = Failure(outcome=Outcome.COMPILE_ERROR, detail="too many registers")
    compilers(lambda source: refusal if source.variant == first else None)
    for kernel in warmed(SMALL, LARGER):
        assert kernel.variant not in (None, first)
        assert kernel.reason == "too many registers"
        assert not kernel.refused


def test_where_all_are_refused_it_is_said(compilers: Any) -> None:
    pool = compilers(lambda source: Failure(outcome=Outcome.COMPILE_ERROR, detail=f"no {source.variant.digest}"))
    kernels_of_both = warmed(SMALL, LARGER)
    first = next(cache_lookup.variants(cache_lookup.explain(SMALL, A30), A30))
    assert [(kernel.variant, kernel.reason) for kernel in kernels_of_both] == [(None, f"no {first.digest}")] * 4
    assert all(kernel.refused for kernel in kernels_of_both)
    assert len(pool.sources) == len(set(pool.sources)), "what was refused once is not tried again"


def test_a_fault_of_the_machine_ends_it(compilers: Any) -> None:
    compilers(lambda source: Failure(outcome=Outcome.DISK_FULL, detail="there must be room"))
    with pytest.raises(HostError, match="there must be room"):
        warmed(SMALL)


def test_what_pytorch_answers_is_said_and_not_compiled(compilers: Any) -> None:
    pool = compilers()
    warmed_kernels = warmed(kernels.problem(dtype=DType.FLOAT8, seq_q=64, seq_kv=64))
    assert not pool.sources
    assert [kernel.variant for kernel in warmed_kernels] == [None, None]
    assert all("float8 kernels need sm_89" in kernel.reason and not kernel.refused for kernel in warmed_kernels)
    assert str(warmed_kernels[0]).endswith(
        "output: no kernel, NVIDIA A30 is sm_80, and float8 kernels need sm_89 or newer"
    )


@pytest.mark.parametrize(("jobs", "size"), [(None, 2), (1, 1), (8, 2)])
def test_there_are_no_more_compilers_than_answers(
    jobs: int | None, size: int, compilers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "cores", lambda: 64)
    pool = compilers()
    warmed(SMALL, jobs=jobs)
    assert pool.size == size


def test_the_function_takes_a_shapes_file_or_problems(compilers: Any, tmp_path: Path) -> None:
    compilers()
    file = tmp_path / "shapes.yaml"
    file.write_text("version: 1\ngroups: {a: {problems: [{dtype: fp16, batch: 2, heads: 2, seq: 64, head_dim: 32}]}}\n")
    from_file = autoattn.warm(file, "a30")
    (problem,) = {kernel.problem for kernel in from_file}
    assert from_file == autoattn.warm(str(file), "a30") == autoattn.warm([problem], "a30")
    with pytest.raises(ShapesError):
        autoattn.warm(tmp_path / "none.yaml", "a30")


def test_without_a_device_and_a_card_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "present", lambda index=None: None)
    with pytest.raises(DeviceError, match="give the device to compile for"):
        autoattn.warm([SMALL])


@pytest.mark.slow
def test_a_second_process_finds_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    masked = replace(SMALL, mask=Mask.parse("causal"))
    assert all(kernel.variant is not None for kernel in autoattn.warm([masked], "a30"))
    compiled = {path: path.stat().st_mtime_ns for path in triton_files(tmp_path)}
    assert len(compiled) == 2, "the output, and the output with the LSE"
    assert all(kernel.variant is not None for kernel in autoattn.warm([replace(masked, batch=3)], "a30"))
    assert {path: path.stat().st_mtime_ns for path in triton_files(tmp_path)} == compiled


def triton_files(folder: Path) -> Iterator[Path]:
    return (folder / "triton").rglob("*.cubin")


def test_what_was_precompiled_is_said_to_be_ready_and_not_compiled(
    compilers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lookups: list[Any] = []

    def find(problem: Problem, variant: Any, traits: Any, arch: int, folder: Path | None) -> Any:
        lookups.append((problem, arch, folder))
        return None if traits.lse else "precompiled with Triton 3.6.0 for sm_80"

    monkeypatch.setattr(machine_code, "find", find)
    pool = compilers()
    plain, with_lse = warmed(SMALL, cache=tmp_path)
    assert [source.traits.lse for source in pool.sources] == [True], "the other has machine code"
    assert (plain.answer, with_lse.answer) == (Answer.OUTPUT, Answer.OUTPUT_AND_LSE)
    assert (plain.precompiled, with_lse.precompiled) == ("precompiled with Triton 3.6.0 for sm_80", "")
    assert str(plain).endswith(", precompiled with Triton 3.6.0 for sm_80")
    assert lookups[0] == (SMALL, A30.arch, tmp_path)


def test_a_report_counts_as_compiled(compilers: Any) -> None:
    report = object.__new__(StaticReport)
    compilers(lambda source: report)
    assert all(kernel.variant is not None for kernel in warmed(SMALL))


def test_needs_are_those_of_contiguous_tensors() -> None:
    needs = needed_kernels.of_call(SMALL, A30)
    assert [need.answer for need in needs] == [Answer.OUTPUT, Answer.OUTPUT_AND_LSE]
    assert [need.traits for need in needs] == [render.natural_traits(SMALL, lse=lse) for lse in (False, True)]


@pytest.mark.parametrize("device", ["a30", "h100"])
def test_calls_on_a_cache_need_no_gradients(device: str) -> None:
    problem = replace(samples.problem(seq_q=1, seq_kv=4096, layout=Layout.BSHD), cache=KeyCache(page=16))
    needs = needed_kernels.of_call(problem, device_profiles.named(device))
    assert [need.answer for need in needs] == [Answer.OUTPUT, Answer.OUTPUT_AND_LSE]
