"""Cache entries that no GPU ever made, for tests of what shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoattn import profiles, render, space
from autoattn.entry import CacheEntry, Candidate, Rival, SearchRecord
from autoattn.mask import Mask
from autoattn.problem import DType, Problem
from autoattn.trial import Evidence, Measurement, Prediction, StaticReport, Verdict

H200 = profiles.named("h200")
A30 = profiles.named("a30")


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


def measurement(one: Problem, median_us: float) -> Measurement:
    return Measurement(
        median_us=median_us,
        p20_us=median_us * 0.99,
        p80_us=median_us * 1.02,
        samples=60,
        tflops=one.flops() / median_us / 1e6,
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


def measured(one: Problem | None = None, *, time_us: float = 400.0, **changes: Any) -> CacheEntry:
    one = one if one is not None else problem()
    rivals = (
        Rival(name="sdpa-flash", measurement=measurement(one, time_us * 1.42), max_error=3.1e-3),
        Rival(name="sdpa-cudnn", measurement=measurement(one, time_us * 0.91), max_error=3.2e-3),
        Rival(name="template default", measurement=measurement(one, time_us * 1.11)),
    )
    facts: dict[str, Any] = {
        **_common(one, time_us),
        "evidence": Evidence.MEASURED,
        "choice": "sdpa-cudnn",
        "verdict": Verdict(ok=True, checks=14, max_error=2.9e-3, rms_error=2.1e-4, allowed=7.8e-3),
        "measurement": measurement(one, time_us),
        "prediction": prediction(time_us * 1.2),
        "rivals": rivals,
    }
    return CacheEntry(**{**facts, **changes})


def predicted(one: Problem | None = None, *, time_us: float = 500.0, **changes: Any) -> CacheEntry:
    one = one if one is not None else problem()
    facts: dict[str, Any] = {
        **_common(one, time_us),
        "evidence": Evidence.PREDICTED,
        "prediction": prediction(time_us),
    }
    return CacheEntry(**{**facts, **changes})


def current(entry: CacheEntry) -> CacheEntry:
    """The entry with the digest of the text that its variant renders as today."""
    return replace(entry, source_digest=render.render(entry.problem, entry.variant).digest)


def _common(one: Problem, time_us: float) -> dict[str, Any]:
    params = space.load("triton/forward").default(one, H200).as_dict()
    loop = {"HMMA": 64, "MUFU.EX2": 32, "FFMA": 96, "LDSM": 24, "LDGSTS": 8, "BAR": 2}
    return {
        "problem": one,
        "template": "triton/forward",
        "params": params,
        "source_digest": "0123456789abcdef",
        "space_digest": space.load("triton/forward").digest,
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
            spaces={"triton/forward": space.load("triton/forward").digest},
        ),
        "versions": {"autoattn": "0.1.0", "torch": "2.13.0", "triton": "3.6.0"},
    }
