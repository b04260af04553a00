"""What the results of workers' jobs say: the trial of a variant, the end of a run, why a peer takes no part."""

from __future__ import annotations

from dataclasses import replace

from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Measurement, Outcome, StaticReport, Trial
from autoattn.core.variant import Source, Variant
from autoattn.cost_model import occupancy, predictor
from autoattn.errors import HostError
from autoattn.search.gpu_jobs import Screened
from autoattn.workers.worker_pool import Failure


def inspected(problem: Problem, device: Device, variant: Variant, digest: str, report: StaticReport | Failure) -> Trial:
    """What the machine code says of a variant, before any look on a GPU.

    Args:
        digest: names the variant's source.
    """
    trial = Trial(variant=variant, outcome=Outcome.OK, digest=digest)
    if isinstance(report, Failure):
        return replace(trial, outcome=report.outcome, detail=report.detail)
    trial = replace(trial, report=report)
    reason = occupancy.why_unlaunchable(device, report)
    if reason is not None:
        return replace(trial, outcome=Outcome.INFEASIBLE, detail=reason)
    if predictor.why_unknown(problem, device) is None:
        trial = replace(trial, prediction=predictor.predict(problem, device, variant, report))
    return trial


def looked(problem: Problem, trial: Trial, result: Screened | Failure) -> Trial:
    """The inspected trial with what a first look on a GPU says of it."""
    if isinstance(result, Failure):
        return replace(trial, outcome=result.outcome, detail=result.detail)
    measurement = Measurement(
        median_us=result.median_us,
        p20_us=result.median_us,
        p80_us=result.median_us,
        samples=result.samples,
        tflops=problem.flops() / result.median_us / 1e6,
    )
    return replace(trial, verdict=result.verdict, measurement=measurement)


def code_of(report: StaticReport, source: Source) -> str:
    """Names the kernel that a variant's text became."""
    return report.code or source.digest


def words(reason: str | Failure) -> str:
    """Why a job gave nothing, or a peer takes no part, in one clause."""
    return reason if isinstance(reason, str) else f"ended with a {reason.outcome.value}: {reason.detail}"


def stop_if_hopeless(result: object) -> None:
    """Does nothing unless a job failed of what would fail every other one, too.

    Raises:
        HostError: it did, and the run must stop.
    """
    if isinstance(result, Failure) and result.outcome.ends_run:
        raise HostError(f"{result.outcome.value}: {result.detail}")
