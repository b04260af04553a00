"""Cache entries that no GPU ever made, for tests of what shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoattn.codegen import render, search_space
from autoattn.core import device_profiles, triton_release
from autoattn.core.cache_entry import CacheEntry, Candidate, Finalist, Finals, Rival, SearchRecord, WorstCase
from autoattn.core.mask import Mask
from autoattn.core.paired_stats import Interval
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import Energy, Evidence, Measurement, Prediction, StaticReport, Verdict
from autoattn.core.variant import Variant

H200 = device_profiles.named("h200")
A30 = device_profiles.named("a30")


def problem(**changes: Any) -> Problem:
    facts = {
        "dtype": DType.BFLOAT16,
        "batch": 4,
        "heads_q": 32,
        "heads_kv": 8,
        "seq_q": 1024,
        "seq_kv": 4096,
        "head_dim": 128,
        "mask": Mask.parse("causal"),
    }
    return Problem(**{**facts, **changes})


def measurement(problem: Problem, median_us: float) -> Measurement:
    return Measurement(
        median_us=median_us,
        p20_us=median_us * 0.99,
        p80_us=median_us * 1.02,
        samples=60,
        tflops=problem.flops() / median_us / 1e6,
        clock_mhz=1755,
    )


def prediction(time_us: float = 500.0) -> Prediction:
    parts = {
        "tensor": time_us * 0.9,
        "exp": time_us * 0.4,
        "issue": time_us * 0.6,
        "shared": time_us * 0.5,
        "dram": 20.0,
    }
    return Prediction(time_us=time_us, bound="tensor", parts_us=parts, occupancy=1, waves=7.76)


def measured(tuned_problem: Problem | None = None, *, time_us: float = 400.0, **changes: Any) -> CacheEntry:
    tuned_problem = tuned_problem if tuned_problem is not None else problem()
    rivals = (
        Rival(name="sdpa-flash", measurement=measurement(tuned_problem, time_us * 1.42), max_error=3.1e-3),
        Rival(name="sdpa-cudnn", measurement=measurement(tuned_problem, time_us * 0.91), max_error=3.2e-3),
        Rival(name="template default", measurement=measurement(tuned_problem, time_us * 1.11)),
    )
    facts: dict[str, Any] = {
        **_common(tuned_problem, time_us),
        "evidence": Evidence.MEASURED,
        "choice": "sdpa-cudnn",
        "verdict": Verdict(ok=True, checks=14, max_error=2.9e-3, rms_error=2.1e-4, allowed=7.8e-3),
        "measurement": measurement(tuned_problem, time_us),
        "prediction": prediction(time_us * 1.2),
        "rivals": rivals,
    }
    return CacheEntry(**{**facts, **changes})


def beside(entry: CacheEntry, factors: dict[str, float]) -> CacheEntry:
    """An entry whose rivals took so many times as long as its kernel."""
    rivals = [
        Rival(name=name, measurement=measurement(entry.problem, factor * entry.time_us))
        for name, factor in factors.items()
    ]
    return replace(entry, rivals=tuple(rivals))


def certified(problem: Problem | None = None, *, time_us: float = 400.0, **changes: Any) -> CacheEntry:
    """A measured entry that also tells of its finals: the first candidate is as good, the second is slower."""
    entry = measured(problem, time_us=time_us)
    leads = {"sdpa-flash": (1.42, 1.404, 1.44), "sdpa-cudnn": (0.91, 0.9, 0.92), "template default": (1.11, 1.1, 1.12)}
    rivals = tuple(
        replace(
            rival,
            rms_error=2e-4,
            lead=interval(*leads[rival.name]),
            energy=Energy(joules=0.3 * leads[rival.name][0], watts=650.0),
        )
        for rival in entry.rivals
    )
    digests = (entry.source_digest, *(candidate.source_digest for candidate in entry.candidates))
    facts = (
        (1.0, None, True, 2.0e-4, 0.27),
        (1.002, interval(1.002, 0.998, 1.006), True, 1.6e-4, 0.26),
        (1.05, interval(1.05, 1.043, 1.057), False, 2.4e-4, 0.29),
    )
    finalists = tuple(
        Finalist(
            source_digest=digest,
            median_us=time_us * ratio,
            lead=lead,
            tied=tied,
            max_error=3e-3,
            rms_error=error,
            energy=Energy(joules=joules, watts=640.0),
            registers=168,
            spilled_bytes=0,
            shared_bytes=98304,
            num_warps=8,
        )
        for digest, (ratio, lead, tied, error, joules) in zip(digests, facts, strict=True)
    )
    finals = Finals(rounds=128, discarded=3, decided=True, finalists=finalists)
    return replace(entry, **{"rivals": rivals, "finals": finals, **changes})


def worst(**changes: Any) -> WorstCase:
    """What a kernel that counts has for its worst case."""
    facts = {"median_us": 928.4, "slowdown": 2.321, "rounds": 11, "max_error": 3.4e-3, "tiles": 2048, "redone": 1920}
    return WorstCase(**{**facts, **changes})


def interval(ratio: float, low: float, high: float) -> Interval:
    return Interval(ratio=ratio, low=low, high=high)


def predicted(tuned_problem: Problem | None = None, *, time_us: float = 500.0, **changes: Any) -> CacheEntry:
    tuned_problem = tuned_problem if tuned_problem is not None else problem()
    facts: dict[str, Any] = {
        **_common(tuned_problem, time_us),
        "evidence": Evidence.PREDICTED,
        "prediction": prediction(time_us),
    }
    return CacheEntry(**{**facts, **changes})


def current(entry: CacheEntry) -> CacheEntry:
    """The entry with the digest of the text that its variant renders as today."""
    digest = render.render(entry.problem, entry.variant).digest
    finals = entry.finals
    if finals is not None:
        first = replace(finals.finalists[0], source_digest=digest)
        finals = replace(finals, finalists=(first, *finals.finalists[1:]))
    return replace(entry, source_digest=digest, finals=finals)


def tuned(problem: Problem, variant: Variant, *, choice: str = "kernel", **changes: Any) -> CacheEntry:
    """A measured entry that a call finds today: one variant was tried, and `choice` was the fastest."""
    facts = {"template": variant.template, "params": variant.as_dict(), "choice": choice, "candidates": ()}
    return current(measured(problem, **facts | changes))


def candidate(params: dict[str, Any], digit: str, time_us: float) -> Candidate:
    return Candidate(template="triton/forward", params=params, source_digest=digit * 8, time_us=time_us)


def _common(problem: Problem, time_us: float) -> dict[str, Any]:
    params = search_space.load("triton/forward").default(problem, H200).as_dict()
    loop = {"HMMA": 64, "MUFU.EX2": 32, "FFMA": 96, "LDSM": 24, "LDGSTS": 8, "BAR": 2}
    return {
        "problem": problem,
        "template": "triton/forward",
        "params": params,
        "source_digest": "0123456789abcdef",
        "space_digest": search_space.load("triton/forward").digest,
        "report": StaticReport(
            digest="0123456789abcdef",
            arch=90,
            registers=255,
            spilled_bytes=0,
            shared_bytes=98304,
            num_warps=8,
            code_bytes=10752,
            loop=loop,
        ),
        "candidates": (
            Candidate(
                template="triton/forward",
                params={**params, "BLOCK_N": 16},
                source_digest="aa" * 8,
                time_us=time_us * 1.01,
            ),
            Candidate(
                template="triton/forward",
                params={**params, "num_warps": 2},
                source_digest="bb" * 8,
                time_us=time_us * 1.05,
            ),
        ),
        "search": SearchRecord(
            effort="standard",
            seed=0,
            trials=96,
            outcomes={"ok": 71, "infeasible": 20, "compile error": 5},
            spaces={"triton/forward": search_space.load("triton/forward").digest},
        ),
        "versions": {"autoattn": "0.1.0", "torch": "2.13.0", "triton": triton_release.installed()},
    }
