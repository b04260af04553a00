"""Fits how much each feature counts for the model of variants' times, by the likelihood of the measured ones.

Each step takes all samples of some problems, drawn anew, as the covariance of all samples takes minutes to factor. A
GPU is done in a minute; two cores take hours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import gaussian_process
import numpy as np
import portfolio_model
import torch
from portfolio_model import Sample

STEPS = 200
SAMPLES = 8000  # of a step, at least
RATE = 0.06  # of the first step; it falls to 0


def fit(samples: Sequence[Sample], seed: int = 0) -> dict[str, float]:
    """The weight of each feature for samples of one size of elements, rounded."""
    known = portfolio_model.targets_of(samples)
    place = gaussian_process.device_of_matrices()
    deviation = known.inputs.std(axis=0) + 1e-9
    inputs = torch.from_numpy((known.inputs - known.inputs.mean(axis=0)) / deviation).to(place)
    targets = torch.from_numpy(known.values - known.values.mean()).to(place)
    noise = torch.from_numpy(known.noise).to(place)
    numbers = known.numbers()
    owners = torch.from_numpy(numbers).to(place)
    problems = [np.flatnonzero(numbers == number) for number in range(numbers.max() + 1)]
    draw = np.random.default_rng(seed)
    start = -math.log(gaussian_process.LENGTH_SCALE)
    weights = torch.full((inputs.shape[1],), start, dtype=torch.float64, device=place)
    size = torch.zeros((), dtype=torch.float64, device=place)
    learners = [weights.requires_grad_(), size.requires_grad_()]
    optimizer = torch.optim.Adam(learners, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        some = _some(problems, draw)
        loss = _loss(inputs[some] * weights.exp(), targets[some, None], noise[some], owners[some], size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    fitted = weights.detach().exp().cpu() * gaussian_process.LENGTH_SCALE
    names = portfolio_model.feature_names(samples)
    return {name: round(float(weight), 2) for name, weight in zip(names, fitted, strict=True)}


def _some(problems: Sequence[np.ndarray], draw: np.random.Generator) -> torch.Tensor:
    """The places of all samples of some problems."""
    places: list[int] = []
    for number in draw.permutation(len(problems)):
        places.extend(problems[number])
        if len(places) >= SAMPLES:
            break
    return torch.tensor(places)


def _loss(
    inputs: torch.Tensor, targets: torch.Tensor, noise: torch.Tensor, owners: torch.Tensor, size: torch.Tensor
) -> torch.Tensor:
    """The negative logarithm of the likelihood of a sample, but for a constant, under the model's covariance."""
    distance = (3.0 * (torch.cdist(inputs, inputs) ** 2 + 1e-12)).sqrt()
    covariance = size.exp() * (1.0 + distance) * torch.exp(-distance) + torch.diag(noise + 1e-5)
    covariance += gaussian_process.IN_COMMON * (owners[:, None] == owners)
    factor = torch.linalg.cholesky(covariance)
    misfit = 0.5 * (targets * torch.cholesky_solve(targets, factor)).sum()
    return (misfit + factor.diagonal().log().sum()) / len(targets)
