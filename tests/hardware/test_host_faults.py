"""Failures of the machine: each has a word of its own, and a sentence that says what, where and the way out."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import kernels
import pytest
import samples
from cache_files import FORWARD_FILE
from planted_jobs import Refused

from autoattn.codegen import resources
from autoattn.core.trial import Outcome
from autoattn.errors import CompileError, HostError
from autoattn.hardware import host_faults
from autoattn.kernels import compiler
from autoattn.search import search_options, tuner
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Failure


def refused(number: int, path: object = None) -> OSError:
    return OSError(number, os.strerror(number), None if path is None else str(path))


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/c/triton")
    monkeypatch.setenv("AUTOATTN_CACHE", "/c/autoattn")
    monkeypatch.setenv("TMPDIR", "/c/tmp")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT])
@pytest.mark.parametrize(
    ("path", "words", "way"),
    [
        ("/c/triton/ABC", "Triton's cache /c/triton must be writable", "set TRITON_CACHE_DIR"),
        ("/c", "Triton's cache /c/triton must be writable", "set TRITON_CACHE_DIR"),
        ("/c/autoattn/x", "the cache /c/autoattn must be writable", "--cache DIR, or set AUTOATTN_CACHE"),
        ("/c/tmp/tmpx", "the folder for temporary files /c/tmp must be writable", "set TMPDIR"),
        ("/elsewhere", "/elsewhere must be writable", "correct that"),
    ],
)
def test_a_place_that_cannot_be_written_is_named_with_the_way_out(number: int, path: str, words: str, way: str) -> None:
    fault = host_faults.fault_of(refused(number, path))
    assert fault is not None
    assert fault.outcome is Outcome.READ_ONLY
    assert fault.sentence.startswith(words)
    assert os.strerror(number) in fault.sentence
    assert way in fault.sentence


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("path", [None, "/c/triton/ABC"])
def test_a_full_disk_names_what_stands_on_it(number: int, path: str | None) -> None:
    fault = host_faults.fault_of(refused(number, path))
    assert fault is not None
    assert fault.outcome is Outcome.DISK_FULL
    assert "Triton's cache /c/triton" in fault.sentence
    assert "TRITON_CACHE_DIR" in fault.sentence


def test_what_a_compiler_says_of_a_full_disk_is_one() -> None:
    fault = host_faults.fault_of(RuntimeError("ptxas fatal: write failed: No space left on device"))
    assert fault is not None
    assert fault.outcome is Outcome.DISK_FULL


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Cannot find ptxas-blackwell"),
        refused(errno.ENOENT, "/x/ptxas"),
        refused(errno.EACCES, "/x/nvdisasm"),
    ],
)
def test_a_program_that_is_missing_is_named(error: Exception) -> None:
    fault = host_faults.fault_of(error)
    assert fault is not None
    assert fault.outcome is Outcome.MISSING_PROGRAM
    assert "reinstall triton" in fault.sentence


@pytest.mark.parametrize("error", [MemoryError(), refused(errno.ENOMEM)])
def test_short_memory_blames_nobody_and_ends_no_run(error: Exception) -> None:
    fault = host_faults.fault_of(error)
    assert fault is not None
    assert fault.outcome is Outcome.OUT_OF_MEMORY
    assert "--jobs" in fault.sentence
    assert fault.outcome.of_environment
    assert not fault.outcome.ends_run


def test_the_cause_below_other_exceptions_counts() -> None:
    try:
        try:
            raise refused(errno.EROFS, "/c/triton")
        except OSError as cause:
            raise CompileError("Triton cannot compile this variant") from cause
    except CompileError as error:
        fault = host_faults.fault_of(error)
    assert fault is not None
    assert fault.outcome is Outcome.READ_ONLY


@pytest.mark.parametrize(
    "error", [CompileError("ptxas said no"), ValueError("x"), OSError("could not get source code"), AssertionError()]
)
def test_a_kernels_own_failures_are_none_of_the_machine(error: Exception) -> None:
    assert host_faults.fault_of(error) is None


@pytest.mark.skipif(sys.platform != "linux", reason="a file of Linux")
def test_processes_that_were_killed_for_memory_are_counted() -> None:
    assert host_faults.processes_killed_for_memory() >= 0


# --- in a compiler and in a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.EROFS, Outcome.READ_ONLY), (errno.ENOSPC, Outcome.DISK_FULL), (errno.EIO, Outcome.HOST_ERROR)],
)
def test_a_compiler_tells_the_machines_failures_from_the_variants(
    monkeypatch: pytest.MonkeyPatch, number: int, outcome: Outcome
) -> None:
    def inspect(*_: object) -> None:
        try:
            Refused(number, "/c/triton").run({})
        except OSError as error:
            raise CompileError("Triton cannot compile this variant") from error

    monkeypatch.setattr(compiler, "inspect", inspect)
    failure = Inspect(source=kernels.source(kernels.problem()), arch=80).run({})
    assert isinstance(failure, Failure)
    assert failure.outcome is outcome


def run(folder: Path, **changes: Any) -> search_options.Summary:
    options = search_options.Options(effort=search_options.Effort.QUICK, trials=2, cache=folder, jobs=1)
    problem = kernels.problem(batch=1, heads_q=2, heads_kv=2, seq_q=64, seq_kv=64, head_dim=16, mask="causal")
    return tuner.tune([problem], samples.A30, measured=False, options=options, **changes)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_cannot_write_stops_in_a_sentence_and_the_next_one_searches_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "nothing shipped")
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.delenv("AUTOATTN_CACHE")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.delenv("TMPDIR")
    summary = run(tmp_path / "cache")
    assert isinstance(summary.stopped, HostError)
    assert str(summary.stopped) == (
        "read-only: Triton's cache /dev/null/.triton/cache must be writable, but Not a directory; set TRITON_CACHE_DIR "
        "to a folder that can be written"
    )
    assert (summary.entries, summary.failed, summary.outcomes, summary.written) == ({}, {}, {}, ())
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    again = run(tmp_path / "cache")
    assert again.stopped is None
    assert again.outcomes == {"ok": 2}, "nothing was written of the first run's failures"
    assert again.rehearsals == {"ok": 2}
    assert again.written == (tmp_path / "cache" / "a30" / FORWARD_FILE,)
    assert [path.name for path in home.iterdir()] == [".triton"], "a run writes into its cache and Triton's alone"
