"""What calls on key caches read and write where lengths on the GPU lie, as compute-sanitizer sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "support" / "lying_lengths.py"
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
REPORTED = 86  # the exit code of a run with errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer of the CUDA toolkit is not installed"),
]


def sanitized(case: str) -> subprocess.CompletedProcess[str]:
    """A run under memcheck, in which each tensor is an allocation of its own."""
    words = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(REPORTED)]
    return subprocess.run(
        [str(SANITIZER), *words, sys.executable, str(PROGRAM), case],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_lengths_that_lie_read_and_write_nothing_outside() -> None:
    run = sanitized("honoured")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "done" in run.stdout


def test_a_planted_read_behind_a_tensor_is_reported() -> None:
    run = sanitized("planted")
    assert run.returncode == REPORTED, run.stdout[-4000:] + run.stderr[-2000:]
    assert "Invalid __global__ read" in run.stdout
