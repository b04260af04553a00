"""The Cholesky factor of which half is kept."""

from __future__ import annotations

import pytest
import torch
from cholesky import CholeskyFactor

SIZE, PANEL = 250, 60  # the last panel is a part of one


def covariance() -> torch.Tensor:
    """A symmetric positive definite matrix: [SIZE, SIZE]."""
    places = torch.linspace(0.0, 9.0, SIZE, dtype=torch.float64)[:, None]
    return torch.exp(-torch.cdist(places, places)) + 0.1 * torch.eye(SIZE, dtype=torch.float64)


def factor_of(matrix: torch.Tensor) -> CholeskyFactor:
    factor = CholeskyFactor()
    for begin in range(0, len(matrix), PANEL):
        factor.append(matrix[begin : begin + PANEL, : begin + PANEL].float())
    return factor


def test_it_solves_as_the_whole_matrix_does() -> None:
    right = torch.arange(3.0 * SIZE).reshape(SIZE, 3) % 7
    solution = factor_of(covariance()).solve(right)
    torch.testing.assert_close(solution.double(), torch.linalg.solve(covariance(), right.double()), rtol=0, atol=1e-3)


def test_it_keeps_little_more_than_half_of_the_matrix() -> None:
    assert factor_of(covariance()).elements <= (SIZE + PANEL) * SIZE / 2


def test_a_matrix_that_is_not_positive_definite_has_none() -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        factor_of(covariance() - 0.5 * torch.eye(SIZE))
