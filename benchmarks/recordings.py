"""Makes the recordings that samplers are compared on: `python benchmarks/recordings.py measured|predicted`.

`measured` turns benchmarks/data/h200_triton_variants.json into two recordings, one a head dim, with that kernel's own
five parameters. `predicted` compiles a whole grid of triton/forward for sm_90 and asks the cost model for times: no GPU
made them, they lie in a folder of their own, and no table mixes the two.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import triton

from autoattn.cache import search_recording
from autoattn.cache.search_recording import Recording
from autoattn.codegen import render, search_space
from autoattn.core import device_profiles
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import Evidence, Outcome, StaticReport, Trial
from autoattn.core.variant import Value, Variant
from autoattn.cost_model import occupancy, predictor
from autoattn.workers.compile_job import Inspect
from autoattn.workers.worker_pool import Failure, Pool, cores

DATA = Path(__file__).parent / "data"
RECORDINGS = DATA / "recordings"
VARIANTS = DATA / "h200_triton_variants.json"
# That kernel is none of our templates: one loop, every block masked, the online softmax.
OLDER = "h200_triton_variants"
BARRIERS = {0: "none", 1: "after_qk", 2: "before_pv"}
TEMPLATE = "triton/forward"
DEVICE = device_profiles.named("h200")
COMPILE_SECONDS = 60.0
# Whole, so that a sampler finds each point that it can think of, but for those that the space's rules refuse.
GRID: dict[str, tuple[Value, ...]] = {
    "BLOCK_M": (64, 128, 256),
    "BLOCK_N": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4),
    "softmax": ("online", "lazy", "first_max"),
    "mask_loop": ("split", "every", "branch"),
}
BASE: dict[str, Value] = {
    "maxnreg": 0, "barrier": "none", "HEAD_GROUP": 1, "row_order": "descending", "PERSISTENT": 0, "HEAD_SPLIT": 0,
    "products": "as_asked",
}  # fmt: skip
SIZES = ((4, 16, 4096), (1, 16, 2048), (16, 32, 1024))  # batch, heads, tokens; they share the compiled kernels


def causal(batch: int, heads: int, tokens: int, head_dim: int) -> Problem:
    return Problem(
        dtype=DType.BFLOAT16, batch=batch, heads_q=heads, heads_kv=heads, seq_q=tokens, seq_kv=tokens,
        head_dim=head_dim, mask=Mask.parse("causal"),
    )  # fmt: skip


def measured() -> list[Recording]:
    """The two halves of the measured file, each with its own head dim."""
    rows = json.loads(VARIANTS.read_text())["trials"]
    recordings = []
    for head_dim in (64, 128):
        problem = causal(4, 16, 4096, head_dim)
        trials = []
        for row in rows:
            own, block_m, block_n, num_warps, num_stages, barrier = row["variant"]
            params = {
                "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages,
                "barrier": BARRIERS[barrier],
            }  # fmt: skip
            if own == head_dim:
                time_us = round(1e3 * row["median_ms"], 3)
                variant = Variant.of(OLDER, params)
                trials.append(search_recording.trial_of(problem, Evidence.MEASURED, variant, Outcome.OK, time_us))
        recording = search_recording.of_trials(
            trials,
            problem=problem,
            device=DEVICE.name,
            evidence=Evidence.MEASURED,
            versions={"triton": "3.6.0"},
            source=f"benchmarks/data/{VARIANTS.name}: medians of triton.testing.do_bench on an NVIDIA H200",
        )
        recordings.append(recording)
    return recordings


def predicted(jobs: int) -> list[Recording]:
    """Compiles the grid once for head dim 64, and asks the model for each size."""
    problems = [causal(*size, 64) for size in SIZES]
    shipped = search_space.load(TEMPLATE)
    points = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    variants = [Variant.of(TEMPLATE, {**BASE, **point}) for point in points]
    variants = [
        variant for variant in variants if not any(shipped.why_infeasible(variant, each, DEVICE) for each in problems)
    ]
    with Pool(size=jobs, environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}) as pool:
        reports = _compiled(pool, problems[0], variants)
    return [_predictions(problem, reports) for problem in problems]


def _compiled(pool: Pool, problem: Problem, variants: list[Variant]) -> dict[Variant, StaticReport | Failure]:
    jobs = {variant: Inspect(source=render.render(problem, variant), arch=DEVICE.arch) for variant in variants}
    reports: dict[Variant, StaticReport | Failure] = {}
    for variant, report in pool.results(jobs, COMPILE_SECONDS):
        reports[variant] = report
        print(f"\r{problem}: {len(reports)} of {len(variants)} compiled", end="", flush=True)
    print()
    return {variant: reports[variant] for variant in variants}


def _predictions(problem: Problem, reports: dict[Variant, StaticReport | Failure]) -> Recording:
    trials = []
    for variant, report in reports.items():
        trial = Trial(variant=variant, outcome=Outcome.OK)
        if isinstance(report, Failure):
            trial = replace(trial, outcome=report.outcome)
        elif occupancy.why_unlaunchable(DEVICE, report) is not None:
            trial = replace(trial, outcome=Outcome.INFEASIBLE)
        else:
            guess = predictor.predict(problem, DEVICE, variant, report)
            trial = replace(trial, prediction=replace(guess, time_us=round(guess.time_us, 3)))
        trials.append(trial)
    return search_recording.of_trials(
        trials, problem=problem, device=DEVICE.name, evidence=Evidence.PREDICTED,
        versions={"triton": triton.__version__},
        source=f"the cost model, from the machine code of {TEMPLATE} for sm_90; no GPU was asked",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("evidence", choices=[kind.value for kind in Evidence])
    evidence = Evidence(parser.parse_args().evidence)
    recordings = measured() if evidence is Evidence.MEASURED else predicted(cores())
    for recording in recordings:
        path = RECORDINGS / evidence.value / f"{recording.header.device}_{recording.header.problem.key}.jsonl"
        search_recording.write(recording, path)
        print(f"{len(recording.trials)} variants, the best takes {recording.best_us:.1f} us: {path}")


if __name__ == "__main__":
    main()
