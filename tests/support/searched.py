"""Caches with the journals of searches that nobody ran, for tests of what shows them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import samples

from autoattn.cache import store
from autoattn.codegen import render, search_space
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Outcome, Trial
from autoattn.search import storage
from autoattn.search.shared_trials import Ledger
from autoattn.search.study import Study

TEMPLATE = "triton/forward"


def problems(count: int) -> list[Problem]:
    """So many different problems, of several kinds of kernels."""
    masks = [Mask(), Mask.parse("causal"), Mask.parse("window:128,0"), Mask.parse("window:64,64")]
    all_problems = [
        samples.problem(seq_q=seq, seq_kv=seq, batch=batch, head_dim=head_dim, mask=mask)
        for seq in (512, 1024, 2048, 4096, 8192)
        for head_dim in (64, 80, 128)
        for mask in masks
        for batch in (1, 4, 16)
    ]
    return all_problems[:count]


def entry_of(problem: Problem, number: int = 0, *, measured: bool = True) -> CacheEntry:
    """An entry whose winner and runner-up can be rendered, other ones for each number."""
    space = search_space.load(TEMPLATE)
    rng = random.Random(number)
    variants = []
    while len(variants) < 3:
        variants.append(next(space.feasible(problem, samples.H200, rng)))
    base = (samples.certified if measured else samples.predicted)(problem, params=variants[0].as_dict())
    candidates = tuple(
        replace(candidate, params=variant.as_dict())
        for candidate, variant in zip(base.candidates, variants[1:], strict=True)
    )
    return samples.current(replace(base, candidates=candidates))


def search(folder: Path, device: Device, entry: CacheEntry, trials: int, *, seed: int = 0, failed: float = 0.1) -> None:
    """Writes the journal of a search that ended with an entry; every tenth trial or so failed."""
    space = search_space.load(entry.template)
    evidence = entry.evidence.value
    name = (
        f"{space.template} {entry.problem.key} {evidence} {device.fingerprint} {space.digest} "
        "0123456789abcdef triton 3.6.0"
    )
    path = folder / device.name / "studies" / f"{entry.problem.key}.journal"
    study = Study(Ledger(name, storage.journal(path), space), space, entry.problem, device, seed=seed, budget=0)
    rng = random.Random(seed)
    for number in range(trials):
        last = number == trials - 1
        variant = entry.variant if last else next(space.feasible(entry.problem, device, rng))
        trial = Trial(variant=variant, outcome=Outcome.OK, digest=render.render(entry.problem, variant).digest)
        time_us = entry.time_us * (1.0 if last else 1.0 + rng.expovariate(1.0))
        if not last and rng.random() < failed:
            study.record(replace(trial, outcome=Outcome.COMPILE_ERROR, detail=f"ptxas needs {number} registers more"))
        elif evidence == "measured":
            study.record(replace(trial, measurement=samples.measurement(entry.problem, time_us)))
        else:
            study.record(replace(trial, prediction=samples.prediction(time_us)))


def folder_of(folder: Path, entries: Sequence[CacheEntry], device: Device = samples.H200, *, trials: int = 0) -> Path:
    """A cache of these entries, with a journal of so many trials for each."""
    store.merge(folder, device, Op.FORWARD, entries)
    for number, entry in enumerate(entries if trials else ()):
        search(folder, device, entry, trials, seed=number)
    return folder
