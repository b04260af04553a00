"""Builds the cache entry of a finished search: by finals on the card, else by the cost model's ranking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import triton

from autoattn import __version__
from autoattn.cache import finals_samples, sister_cards
from autoattn.codegen import portfolio, resources, template_facts
from autoattn.codegen.search_space import SearchSpace
from autoattn.core.cache_entry import KERNEL, CacheEntry, Candidate, SearchRecord, WorstCase
from autoattn.core.device import Device
from autoattn.core.paired_stats import Round
from autoattn.core.problem import Problem
from autoattn.core.trial import Evidence, Outcome, Trial, Verdict
from autoattn.core.variant import Variant
from autoattn.hardware import nvidia
from autoattn.search import finals, job_results, multi_template, peer_calls, predicted_ranking
from autoattn.search.gpu_jobs import finalist_name
from autoattn.search.multi_template import Contest
from autoattn.search.predicted_ranking import CANDIDATES
from autoattn.search.search_options import Options
from autoattn.search.trial_pipeline import Steps, Workshop
from autoattn.workers.worker_pool import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """One problem's finished search, and the workshop in which the rest is done."""

    problem: Problem
    device: Device
    options: Options
    shop: Workshop
    study: Contest
    spaces: Mapping[str, SearchSpace]  # by template

    @property
    def working(self) -> list[Trial]:
        """The trials that may win."""
        return [trial for trial in self.study.trials.values() if trial.outcome is Outcome.OK]

    @property
    def best_us(self) -> float:
        """The shortest time of a trial, in microseconds, where there is one."""
        return min(trial.time_us for trial in self.working if trial.time_us is not None)

    def why_none(self) -> str:
        """In words, why no trial works."""
        if not self.study.trials:
            return "the search was given no time or no trials; allow more with --trials or --timeout"
        failed = Counter(f"{trial.outcome.value}: {trial.detail}" for trial in self.study.trials.values())
        return f"none of {len(self.study.trials)} variants worked; {_most_common(failed)}"


def _most_common(failed: Counter[str]) -> str:
    """The reason that ended the most variants, in words."""
    ((reason, count),) = failed.most_common(1)
    return f"{count} ended with {reason}"


def predicted(search: Searched, elsewhere: Set[Variant], default: Variant) -> CacheEntry | str:
    """The predicted entry, or in words why there is none.

    By the model, leaning on `elsewhere`, what was measured on other cards (`predicted_ranking`).
    """
    folders = tuple(dict.fromkeys((search.options.cache, resources.shipped_cache())))
    ranking = predicted_ranking.rank(
        search.working,
        arch=search.device.arch,
        dtype=search.problem.dtype,
        default=default,
        default_is_measured=portfolio.was_measured_for(search.problem, search.device),
        elsewhere=elsewhere,
        verified=sister_cards.verified(folders, search.device, search.problem.op),
        rehearse=lambda variants: search.shop.rehearse(search.problem, *variants),
        known=lambda variant: search.shop.knows_structure(search.problem, variant),
    )
    if isinstance(ranking, str):
        return ranking
    winner, *others = ranking.trials
    runners_up = [(trial, trial.prediction.time_us) for trial in others if trial.prediction is not None]
    rejected = {variant: outcome for variant, (outcome, _) in ranking.rejected.items()}
    return _entry(search, winner, runners_up, rejected=rejected, checked=ranking.checks[winner.variant])


def measured(search: Searched, default: Variant, previous: Variant | None) -> Steps[CacheEntry | str]:
    """The measured entry, or in words why there is none; yields while the finals run.

    The best few of the search, the template's default and the previous winner meet the rivals in the finals, and peers
    that no call is dispatched to. A winner that keeps its first maximum is timed once more where that does it no good;
    one that is wrong there gives way to the best of the others.
    """
    trials = {trial.variant: trial for trial in search.working}
    objective, profile = search.options.objective, search.options.profile
    chosen = [trial.variant for trial in finals.shortlist(search.working, profile.finalists, objective)]
    variants = list(dict.fromkeys([*chosen, *(variant for variant in (default, previous) if variant in trials)]))
    peers, uninvited = peer_calls.invited(search.problem, search.options.effort)
    result = yield from search.shop.final(
        search.problem,
        variants,
        seconds=profile.final_seconds,
        seed=search.options.seed,
        energy_seconds=search.options.energy_seconds,
        peers=peers,
        best_us=min((trial.time_us for trial in trials.values() if trial.time_us is not None), default=None),
    )
    if isinstance(result, Failure):
        return f"the finals {job_results.words(result)}"
    result = replace(result, absent={**uninvited, **result.absent})
    finalists = [trials[variant] for variant in variants]
    rejected: dict[Variant, Outcome] = {}
    while True:
        decision = finals.decide(finalists, result, objective=objective, default=default, previous=previous)
        if isinstance(decision, str):
            return decision
        worst = yield from _worst_case(search, decision.winner.variant)
        if not isinstance(worst, Failure):
            break
        rejected[decision.winner.variant] = worst.outcome
        result = finals.without(result, finalists.index(decision.winner), worst)
    _keep(search, finalists, result.rounds, decision.winner)
    return _entry(search, decision.winner, decision.others, decision, worst, rejected)


def _worst_case(search: Searched, winner: Variant) -> Steps[WorstCase | Failure | None]:
    """The worst case of a winner that keeps its first maximum; others have none."""
    if not template_facts.keeps_first_max(winner):
        return None
    return (yield from search.shop.outgrow(search.problem, winner, seed=search.options.seed))


def _keep(search: Searched, finalists: list[Trial], taken: tuple[Round, ...], winner: Trial) -> None:
    """Keeps the raw samples beside the journal."""
    if not taken:
        return
    names = {finalist_name(place): trial.digest for place, trial in enumerate(finalists)}
    samples = finals_samples.Samples(
        problem=search.problem,
        fingerprint=search.device.fingerprint,
        winner=winner.digest,
        seed=search.options.seed,
        kernels={name: digest for name, digest in names.items() if name in taken[0].times_us},
        rounds=taken,
        versions=versions(on_card=True),
    )
    finals_samples.write(finals_samples.path_of(search.options.cache, search.device.name, search.problem.key), samples)


def _entry(
    search: Searched,
    winner: Trial,
    candidates: Sequence[tuple[Trial, float]],
    decision: finals.Decision | None = None,
    worst: WorstCase | None = None,
    rejected: Mapping[Variant, Outcome] = MappingProxyType({}),
    checked: str = "",
) -> CacheEntry:
    """The entry of the winner; measured where the finals decided, and else predicted.

    Args:
        rejected: what became of variants that worked in the search, in the interpreter or in their worst case.
        checked: what the numbers of a predicted winner stand on.
    """
    trials = search.study.trials
    outcomes = Counter(rejected.get(variant, trial.outcome).value for variant, trial in trials.items())
    outcomes.update(trial.outcome.value for trial in search.study.too_slow.values())
    return CacheEntry(
        problem=search.problem,
        evidence=Evidence.MEASURED if decision is not None else Evidence.PREDICTED,
        choice=decision.choice if decision is not None else KERNEL,
        template=winner.variant.template,
        params=winner.variant.as_dict(),
        source_digest=winner.digest,
        space_digest=search.spaces[winner.variant.template].digest,
        verdict=_both(winner.verdict, decision.verdict) if decision is not None else None,
        measurement=decision.measurement if decision is not None else None,
        prediction=winner.prediction,
        checked=checked,
        report=winner.report,
        rivals=decision.rivals if decision is not None else (),
        absent=decision.absent if decision is not None else None,
        candidates=tuple(
            Candidate(
                template=trial.variant.template,
                params=trial.variant.as_dict(),
                source_digest=trial.digest,
                time_us=time_us,
            )
            for trial, time_us in candidates[:CANDIDATES]
        ),
        finals=decision.finals if decision is not None else None,
        worst=worst,
        search=SearchRecord(
            effort=search.options.effort.value,
            seed=search.options.seed,
            trials=len(search.study.trials),
            objective=search.options.objective.value,
            outcomes=dict(sorted(outcomes.items())),
            spaces=multi_template.digests(search.spaces.values()),
        ),
        versions=versions(on_card=decision is not None),
    )


def _both(small: Verdict | None, full: Verdict) -> Verdict:
    """One verdict over the small cases and the full size: the closer call speaks."""
    if small is None:
        return full
    closer = max((small, full), key=lambda verdict: verdict.max_error / verdict.allowed)
    return Verdict(
        ok=True,
        checks=small.checks + full.checks,
        max_error=closer.max_error,
        rms_error=max(small.rms_error, full.rms_error),
        allowed=closer.allowed,
    )


def versions(*, on_card: bool) -> dict[str, str]:
    """What an entry is made with: autoattn, torch, triton and, on the card, its driver."""
    releases = {"autoattn": __version__, "torch": str(torch.__version__), "triton": triton.__version__}
    driver = nvidia.driver_version() if on_card else None
    return releases | ({"driver": driver} if driver is not None else {})
