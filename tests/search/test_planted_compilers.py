"""ptxas with planted faults: a stand-in that hangs, crashes or eats memory, below workers that compile for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kernels
import pytest
from checkout_paths import python_path
from child_processes import alive, gone, noted
from rarely import rarely
from triton import knobs

from autoattn.core.trial import Outcome, StaticReport
from autoattn.search.trial_pipeline import COMPILER_MODULE
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.sampled

LIMIT = 5.0  # seconds for a compile that hangs
ENOUGH = 300.0  # for one that does not, on a busy machine
STAND_IN = """#!/bin/sh
case "$*" in *--version*) exec "{real}" --version ;; esac
if [ -e "{healed}" ]; then exec "{real}" "$@"; fi
echo $$ > "{note}.tmp" && mv "{note}.tmp" "{note}"
{fault}
"""
FAULTS = {
    "hangs": ("exec sleep 600", Outcome.TIMEOUT, "no answer within 5 s"),
    "dies of a signal": ("kill -SEGV $$", Outcome.COMPILE_ERROR, "-11"),
    "is killed twice": ("kill -KILL $$", Outcome.OUT_OF_MEMORY, "the compiler was killed (SIGKILL) each time"),
    "has no room": ("echo 'ptxas fatal: No space left on device' >&2; exit 1", Outcome.DISK_FULL, "must be room"),
    "refuses": ("echo 'ptxas fatal: no' >&2; exit 1", Outcome.COMPILE_ERROR, ""),
    "kills its workers": ("kill -KILL $PPID; exec sleep 600", Outcome.CRASH, "the process died (SIGKILL)"),
    "aborts its worker": ("kill -ABRT $PPID; exec sleep 600", Outcome.CRASH, "the process died (SIGABRT)"),
}
ALIKE = ("refuses", "aborts its worker")  # their outcomes are those of "dies of a signal" and "kills its workers"

Plant = Callable[[str], dict[str, str]]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Puts a stand-in in place of ptxas; gives the environment in which it is taken."""

    def planted(fault: str) -> dict[str, str]:
        path = tmp_path / "ptxas"
        facts = {"real": knobs.nvidia.ptxas.path, "healed": tmp_path / "healed", "note": tmp_path / "note"}
        path.write_text(STAND_IN.format(fault=fault, **facts))
        path.chmod(0o755)
        return {
            "TRITON_PTXAS_PATH": str(path),
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),  # where nothing is compiled yet
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": python_path(),
        }

    return planted


@pytest.mark.parametrize("name", rarely(FAULTS, lambda name: name not in (*ALIKE, "hangs")))
def test_a_compile_whose_ptxas(plant: Plant, tmp_path: Path, name: str) -> None:
    fault, outcome, words = FAULTS[name]
    job = Inspect(source=kernels.source(kernels.problem()), arch=80)
    with Pool(size=1, environment=plant(fault), preload=COMPILER_MODULE) as pool:
        result = pool.result(job, LIMIT if outcome is Outcome.TIMEOUT else ENOUGH)
        assert isinstance(result, Failure)
        assert result.outcome is outcome, result.detail
        assert words in result.detail
        assert gone(*noted(tmp_path / "note")), "what the compiler started lives on"
        (tmp_path / "healed").touch()
        assert isinstance(pool.result(job, ENOUGH), StaticReport), "the next compile is whole"


@pytest.mark.parametrize("tool", ["PTXAS", "NVDISASM"])
def test_a_tool_of_the_compiler_that_somebody_killed_once_is_run_again(plant: Plant, tmp_path: Path, tool: str) -> None:
    environment = plant(f"touch {tmp_path / 'healed'}; kill -KILL $$")
    path = tmp_path / "ptxas"
    if tool == "NVDISASM":
        path.write_text(path.read_text().replace(knobs.nvidia.ptxas.path, knobs.nvidia.nvdisasm.path))
        environment["TRITON_NVDISASM_PATH"] = environment.pop("TRITON_PTXAS_PATH")
    with Pool(size=1, environment=environment, preload=COMPILER_MODULE) as pool:
        assert isinstance(pool.result(Inspect(source=kernels.source(kernels.problem()), arch=80), ENOUGH), StaticReport)
    assert (tmp_path / "note").exists()


PARENT = """
import kernels
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Pool
pool = Pool(size=1, preload="autoattn.workers.compile_job")
pool.submit(Inspect(source=kernels.source(kernels.problem()), arch=80), 600.0)
pool.next_results()
"""


def test_a_ptxas_that_hangs_ends_with_the_tuner(plant: Plant, tmp_path: Path) -> None:
    tuner = subprocess.Popen([sys.executable, "-c", PARENT], env={**os.environ, **plant("exec sleep 600")})
    (ptxas,) = noted(tmp_path / "note")
    assert alive(ptxas)
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    assert gone(ptxas)
