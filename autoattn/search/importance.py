"""Importance of parameters by Optuna's PED-ANOVA over the trials of a search."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial

from autoattn.codegen import search_space
from autoattn.core.trial import Trial
from autoattn.core.variant import Value, Variant
from autoattn.errors import AutoattnError

FEWEST = 12  # trials; of fewer, nothing can be said
MOST = 4000  # that are looked at


def of(studies: Iterable[Iterable[Trial]]) -> tuple[dict[str, float], int]:
    """Parameter -> share of the difference between the fastest tenth and the rest that it explains, largest first.

    Problems differ in time, so each trial counts by its time over the best of its own study. PED-ANOVA (Watanabe et al.
    2023, arXiv:2304.10255) needs no model of the times. Failed trials are left out, and so are parameters that no study
    varied.

    Args:
        studies: trials of one template, a list for each problem.

    Returns:
        The shares, which add up to 1, and how many trials they rest on; no shares where these are fewer than FEWEST.
    """
    points = [point for trials in studies for point in _relative(trials)][:MOST]
    choices = _choices(params for params, _ in points)
    if len(points) < FEWEST or not choices:
        return {}, len(points)
    distributions = {name: CategoricalDistribution(values) for name, values in choices.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        study.add_trials(
            [
                create_trial(
                    params={name: params[name] for name in choices}, distributions=dict(distributions), value=value
                )
                for params, value in points
            ]
        )
        shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0]))), len(points)


def params_of(variant: Variant) -> dict[str, Value]:
    """All parameters of a variant, those that its search space implies too, as far as it can be read."""
    try:
        return search_space.load(variant.template).params_of(variant)
    except AutoattnError:  # a template that is no more
        return variant.as_dict()


def _relative(trials: Iterable[Trial]) -> list[tuple[dict[str, Value], float]]:
    timed = [(params_of(trial.variant), trial.time_us) for trial in trials if trial.time_us is not None]
    best = min((time_us for _, time_us in timed), default=1.0)
    return [(params, time_us / best) for params, time_us in timed]


def _choices(points: Iterable[dict[str, Value]]) -> dict[str, tuple[Value, ...]]:
    """The values that each parameter took, where it took more than one."""
    known = list(points)
    seen: dict[str, dict[Value, None]] = {}
    for params in known:
        for name, value in params.items():
            seen.setdefault(name, {})[value] = None
    everywhere = {name for name in seen if all(name in params for params in known)}
    return {name: tuple(values) for name, values in seen.items() if len(values) > 1 and name in everywhere}
