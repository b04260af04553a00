"""Several GPUs and several tuners on one study, for real: skipped where there are fewer than two GPUs of a kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels
import planted_jobs
import pytest
import samples
from checkout_paths import python_path
from fake_pool import Studied
from planted_kernels import FAULTS
from planted_variants import BAD, GONE, GOOD, large

from autoattn.cache import store
from autoattn.codegen import render
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Evidence, Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.hardware import nvidia
from autoattn.search import search_options, shared_trials, storage, tuner
from autoattn.search.trial_pipeline import Workshop
from autoattn.workers.worker_pool import Pool

pytestmark = pytest.mark.gpu

OPTIONS = (
    "--dtype",
    "bf16",
    "--batch",
    "4",
    "--heads",
    "16",
    "--seq-q",
    "1024",
    "--head-dim",
    "64",
    "--mask",
    "causal",
)
PROBLEM = replace(kernels.problem(mask="causal"), dtype=samples.problem().dtype)


@pytest.fixture
def cards() -> tuple[str, ...]:
    """Two cards of one kind."""
    card = nvidia.present()
    card_names = nvidia.alike(card) if card is not None else ()
    if len(card_names) < 2:
        pytest.skip(f"needs two GPUs of one kind, found {len(card_names)}")
    return card_names[:2]


@pytest.fixture
def shop(cards: tuple[str, ...]) -> Any:
    card = nvidia.present()
    assert card is not None
    with Workshop(card, measured=True, jobs=4, cards=cards) as workshop:
        yield workshop


def searched(shop: Workshop, problem: Problem, variants: list[Variant]) -> list[Trial]:
    heard: list[Trial] = []
    study: Any = Studied(list(variants), problem)
    shop.alone(shop.search(study, more=lambda: True, late=lambda: False, heard=heard.append))
    return heard


def many(count: int) -> list[Variant]:
    tiles = [(m, n, warps, stages) for m in (64, 128) for n in (32, 64) for warps in (4, 8) for stages in (2, 3)]
    return [kernels.variant(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s) for m, n, w, s in tiles[:count]]


def test_each_worker_has_a_card_of_its_own_and_its_successor_the_same(
    cards: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    with Pool(size=2, apart=[{"CUDA_VISIBLE_DEVICES": card} for card in cards], preload="planted_jobs") as pool:
        seen = [pool.result(planted_jobs.Card(), 60.0, place=place) for place in (0, 1)]
        assert seen[0] != seen[1]
        assert pool.result(planted_jobs.Exit("segfault"), 60.0, place=1).outcome is Outcome.CRASH
        assert [pool.result(planted_jobs.Card(), 60.0, place=place) for place in (0, 1)] == seen


def test_a_search_is_spread_over_the_cards_and_heard_in_order(shop: Workshop) -> None:
    variants = many(10)
    trials = searched(shop, large(PROBLEM), variants)
    assert [trial.variant for trial in trials] == variants
    assert {trial.outcome for trial in trials} == {Outcome.OK}, [trial.detail for trial in trials]
    workers = {worker.place: worker.jobs for worker in shop.bench.workers}
    assert min(workers[0], workers[1]) >= 3, workers  # each is made ready first


def test_a_kernel_that_ruins_one_card_costs_its_trial_alone(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS["touches illegal memory"]
    monkeypatch.setattr(render, "render", fault.renderer(lambda variant: variant == BAD))
    trials = searched(shop, large(fault.problem), [GOOD, BAD, *many(6)])
    assert [trial.outcome for trial in trials if trial.variant != BAD] == [Outcome.OK] * 7
    assert trials[1].outcome in GONE


def test_a_killed_gpu_worker_costs_no_trial(shop: Workshop) -> None:
    def kill() -> None:
        for _ in range(600):
            busy = [worker for worker in list(shop.bench.workers) if worker.begun]
            if busy:
                os.kill(busy[-1].process.pid, signal.SIGKILL)
                return
            time.sleep(0.1)

    killer = threading.Thread(target=kill)
    killer.start()
    trials = searched(shop, large(PROBLEM), many(8))
    killer.join()
    assert [trial.outcome for trial in trials] == [Outcome.OK] * 8, [trial.detail for trial in trials]


def test_tune_takes_all_cards_and_no_more_than_there_are(cards: tuple[str, ...], tmp_path: Path) -> None:
    card = nvidia.present()
    assert card is not None
    options = search_options.Options(effort=search_options.Effort.QUICK, trials=8, cache=tmp_path, workers=2)
    summary = tuner.tune([large(PROBLEM)], card, measured=True, options=options)
    (entry,) = summary.entries.values()
    assert (entry.evidence, entry.search.trials) == (Evidence.MEASURED, 8)
    with pytest.raises(ValueError, match="--workers must be at most the visible GPUs"):
        tuner.tune([large(PROBLEM)], card, measured=True, options=replace(options, workers=99))


def test_two_tuners_with_a_card_each_share_a_study(cards: tuple[str, ...], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    commands = []
    for place, card in enumerate(cards):
        arguments = ["tune", "--device", "auto", *OPTIONS, "--trials", "12", "--storage", url]
        commands.append(
            subprocess.Popen(
                [sys.executable, "-m", "autoattn", *arguments, "--cache", str(tmp_path / str(place))],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": card, "PYTHONPATH": python_path()},
            )
        )
    assert [command.wait(timeout=300) for command in commands] == [0, 0]
    device = nvidia.present()
    assert device is not None
    trials = [trial for study_trials in shared_trials.studies(storage.server(url)).values() for trial in study_trials]
    assert len({trial.variant for trial in trials}) == len(trials)
    assert len(trials) in (12, 13), "both may take the last one within the same milliseconds"
    for place in range(2):
        (entry,) = store.lookup(tmp_path / str(place), device, Op.FORWARD).values()
        assert (entry.evidence, entry.search.trials) == (Evidence.MEASURED, len(trials))
