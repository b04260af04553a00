"""Two tuners on one study, as two hosts would be: real processes, a real PostgreSQL, predicted times.

Their kernels are compiled, and not rehearsed: test_tune.py and test_planted.py do that.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from checkout_paths import SUPPORT, python_path
from samples import A30
from servers import Postgres, postgres_server  # noqa: F401

from autoattn.cache import store
from autoattn.cli.app import run
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.problem import Op
from autoattn.core.trial import Trial
from autoattn.search import shared_trials, storage

pytestmark = pytest.mark.slow

TUNER = SUPPORT / "unrehearsed.py"
OPTIONS = ("--dtype", "fp16", "--heads", "2", "--seq-q", "64", "--head-dim", "16", "--mask", "causal")
TRIALS = 5

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `autoattn tune`, without rehearsals, with a cache of its own."""
    running: list[subprocess.Popen[str]] = []

    def started(name: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(TUNER), "tune", "--device", "a30", *OPTIONS, "--trials", str(TRIALS)]
        running.append(
            subprocess.Popen(
                [*command, "--jobs", "1", "--cache", str(tmp_path / name), *arguments],
                env={**os.environ, "PYTHONPATH": python_path()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return running[-1]

    yield started
    for process in running:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed, once it has ended well."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def trials(url: str) -> list[Trial]:
    return [trial for study_trials in shared_trials.studies(storage.server(url)).values() for trial in study_trials]


def once(study_trials: list[Trial], wanted: int = TRIALS) -> list[Trial]:
    """As many as were asked for, none of them twice; two that begin at one moment may take one more."""
    assert len(study_trials) == len({trial.variant for trial in study_trials})
    assert wanted <= len(study_trials) <= wanted + 1
    return study_trials


def entry(folder: Path) -> CacheEntry:
    (cache_entry,) = store.lookup(folder, A30, Op.FORWARD).values()
    return cache_entry


@pytest.mark.exhaustive
def test_two_tuners_share_a_study_and_end_with_the_same_entry(
    start: Start,
    postgres_server: Postgres,
    tmp_path: Path,
) -> None:
    url = postgres_server.database()
    outputs = [
        ended(process) for process in [start(name, "--storage", url, "--trials", "24") for name in ("here", "there")]
    ]
    study_trials = once(trials(url), 24)  # so many that a process which begins late takes part
    here, there = entry(tmp_path / "here"), entry(tmp_path / "there")
    assert here == there
    assert here.search.trials == len(study_trials)
    assert list(tmp_path.rglob("*.journal")) == []
    compiled = [re.search(r"(\d+) distinct kernels? compiled", out) for out in outputs]
    assert all(match is not None and int(match[1]) for match in compiled), "one did everything"
    for out in outputs:
        assert f"Sharing trials at postgresql://tuner@127.0.0.1:{postgres_server.port}/" in out
        assert "s3cret" not in out


@pytest.mark.exhaustive
def test_when_one_of_two_is_killed_the_other_does_the_rest_and_one_that_comes_late_finds_it_done(
    start: Start,
    postgres_server: Postgres,
    tmp_path: Path,
) -> None:
    url = postgres_server.database()
    dying, living = start("dying", "--storage", url), start("living", "--storage", url)
    for _ in range(600):
        if len(trials(url)) >= 2:
            break
        time.sleep(0.1)
    before = {trial.variant for trial in trials(url)}
    os.kill(dying.pid, signal.SIGKILL)
    dying.wait()
    ended(living)
    assert before <= {trial.variant for trial in once(trials(url))}
    assert "0 distinct kernels compiled" in ended(start("late", "--storage", url))
    late_entry, living_entry = entry(tmp_path / "late"), entry(tmp_path / "living")
    # What arithmetic leaves out is no trial, and each tuner counts it for itself.
    assert replace(late_entry, search=living_entry.search) == living_entry
    assert late_entry.search.trials == living_entry.search.trials


@pytest.mark.exhaustive
def test_two_tuners_on_one_cache_share_its_journal(start: Start, tmp_path: Path) -> None:
    for process in [start("same", "--trials", "3") for _ in range(2)]:
        ended(process)
    (journal,) = tmp_path.rglob("*.journal")
    (study_trials,) = shared_trials.journalled(journal).values()
    once(study_trials, 3)


def test_a_wrong_password_ends_the_command_in_one_sentence(
    postgres_server: Postgres,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    url = f"postgresql://tuner:s3cret@127.0.0.1:{postgres_server.port}/postgres"
    assert run(["tune", "--device", "a30", *OPTIONS, "--cache", str(tmp_path), "--storage", url]) == 1
    out = "".join(capsys.readouterr())
    (line,) = [line for line in out.splitlines() if line.startswith("autoattn: ")]
    assert "must let its user in" in line
    assert "s3cret" not in out
