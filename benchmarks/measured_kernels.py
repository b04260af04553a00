"""Measured variants with their machine code, on which the cost model is fitted and by which it is judged.

Recordings are of random variants: what benchmarks/variants.py measured on an H200 (benchmarks/data/variants/), one for
each family of kernels and problem, and 284 variants of an older kernel (benchmarks/data/h200_triton_variants.json).
Finalists are the fastest variants of drawn problems, on an H100 and an H200 (finalists.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path as File

import finalists

from autoattn.cache import search_recording
from autoattn.core import device_profiles
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Value, Variant
from autoattn.cost_model import predictor
from autoattn.cost_model.constants import CONSTANTS, Constants
from autoattn.cost_model.kernel_kind import Path, path_of

DATA = File(__file__).parent / "data"
OLDER = DATA / "h200_triton_variants.json"
VARIANTS = DATA / "variants"
# The older file counts opcodes by their first word. These are 128 bits wide, or exp2, in every one of its loops.
SPELT_OUT = {"MUFU": "MUFU.EX2", "STS": "STS.128", "LDG": "LDG.128", "LDGSTS": "LDGSTS.128"}
# Code 2 stood before P V, below the load of the values: the machine code is that without a barrier, register for
# register. In the templates the load comes after the barrier, so that "before_pv" would say something else.
BARRIERS = {0: "none", 1: "after_qk", 2: "none"}
DEVICE = device_profiles.named("h200")  # that measured the recordings


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A variant that was measured."""

    problem: Problem
    variant: Variant
    report: StaticReport
    median_ms: float
    device: Device = DEVICE

    @property
    def path(self) -> Path:
        """Whose constants hold for it."""
        return path_of(self.report, self.variant.template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Measured variants for one problem: of one family, or finalists of any."""

    name: str
    problem: Problem
    cases: tuple[Case, ...]


def older() -> list[Case]:
    """The 284 variants."""
    cases = []
    for number, trial in enumerate(json.loads(OLDER.read_text())["trials"]):
        head_dim, block_m, block_n, num_warps, num_stages, barrier = trial["variant"]
        counts = {SPELT_OUT.get(opcode, opcode): n for opcode, n in trial["loop_counts"].items()}
        params: dict[str, Value] = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages, "maxnreg": 0,
            "mask_loop": "every", "softmax": "online", "barrier": BARRIERS[barrier], "HEAD_GROUP": 1,
            "row_order": "ascending", "PERSISTENT": 0, "HEAD_SPLIT": 0, "products": "as_asked",
        }  # fmt: skip
        problem = Problem(
            dtype=DType.BFLOAT16, batch=4, heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096, head_dim=head_dim,
            mask=Mask.parse("causal"),
        )  # fmt: skip
        report = StaticReport(
            digest=str(number), arch=90, registers=trial["registers"], spilled_bytes=trial["stack_bytes"],
            shared_bytes=trial["shared_bytes"], num_warps=num_warps, code_bytes=0, loop=counts,
        )  # fmt: skip
        cases.append(
            Case(
                problem=problem,
                variant=Variant.of("triton/forward", params),
                report=report,
                median_ms=trial["median_ms"],
            )
        )
    return cases


@cache
def recorded_rows() -> tuple[Row, ...]:
    """The random variants."""
    measured_rows = []
    for path in sorted(VARIANTS.glob("*.jsonl")):
        recorded = search_recording.read(path)
        family = path.name.removeprefix(f"{DEVICE.name}_").partition("_forward")[0]
        compiled_for = int(family.removeprefix("sm_")) if family.startswith("sm_") else DEVICE.arch
        cases = tuple(
            Case(
                problem=recorded.header.problem,
                variant=v,
                report=replace(trial.report, arch=compiled_for),
                median_ms=trial.time_us / 1e3,
            )
            for v, trial in recorded.trials.items()
            if trial.time_us is not None and trial.report is not None
        )
        measured_rows.append(Row(name=family, problem=recorded.header.problem, cases=cases))
    for head_dim in (64, 128):
        own = tuple(case for case in older() if case.problem.head_dim == head_dim)
        measured_rows.append(Row(name="older", problem=own[0].problem, cases=own))
    return tuple(measured_rows)


@cache
def finalist_rows() -> tuple[Row, ...]:
    """The finalists, named by their numbers and the templates' families."""
    return tuple(_of_finalists(of_problem) for of_problem in finalists.read())


def _of_finalists(of_problem: finalists.Finalists) -> Row:
    cases = tuple(
        Case(
            problem=of_problem.problem,
            variant=variant,
            report=of_problem.reports[variant],
            median_ms=time_us / 1e3,
            device=of_problem.device,
        )
        for variant, time_us in of_problem.times_us.items()
    )
    families = {variant.template.partition("/")[0] for variant in of_problem.times_us}
    name = f"{finalists.numbers_of(of_problem.problem)}, {' and '.join(sorted(families))}"
    return Row(name=name, problem=of_problem.problem, cases=cases)


def milliseconds(case: Case, constants: Mapping[Path, Constants] = CONSTANTS) -> float:
    """What the model says of a case."""
    return predictor.predict(case.problem, case.device, case.variant, case.report, constants).time_us / 1e3
