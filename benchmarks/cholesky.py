"""The Cholesky factor of a symmetric matrix that barely fits the memory: half of it is kept, 2 bytes times the square.

The rows of the matrix come a panel at a time, and each panel is factored against those before it. Nearly all of that
are products of matrices: two cores take a fifth longer than LAPACK does for a whole matrix of 20,000 rows.
"""

from __future__ import annotations

import torch


class CholeskyFactor:
    """The lower triangular factor, as panels of some rows each: [rows, all rows until then], in single precision."""

    def __init__(self) -> None:
        self._panels: list[torch.Tensor] = []

    @property
    def elements(self) -> int:
        """How many are kept."""
        return sum(panel.numel() for panel in self._panels)

    def append(self, panel: torch.Tensor) -> None:
        """Factors the next rows of the matrix, in their memory: [rows, all rows until then].

        Raises:
            torch.linalg.LinAlgError: the matrix is not positive definite.
        """
        before, own = _halves(panel)
        self._solve_lower(before.mT)
        own.addmm_(before, before.mT, alpha=-1)
        own.copy_(torch.linalg.cholesky(own))
        self._panels.append(panel)

    def solve(self, right: torch.Tensor) -> torch.Tensor:
        """What the matrix takes to `right`: [rows of the matrix, columns], in single precision."""
        solution = right.clone()
        self._solve_lower(solution)
        for panel in reversed(self._panels):
            before, own = _halves(panel)
            rows = solution[before.shape[1] : panel.shape[1]]
            rows.copy_(torch.linalg.solve_triangular(own.mT, rows, upper=True))
            solution[: before.shape[1]].addmm_(before.mT, rows, alpha=-1)
        return solution

    def _solve_lower(self, right: torch.Tensor) -> None:
        """Puts what the factor takes to `right` in its place: [rows until now, columns]."""
        for panel in self._panels:
            before, own = _halves(panel)
            rows = right[before.shape[1] : panel.shape[1]]
            rows.addmm_(before, right[: before.shape[1]], alpha=-1)
            rows.copy_(torch.linalg.solve_triangular(own, rows, upper=False))


def _halves(panel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A panel's columns of the rows before it, and its own triangle."""
    begin = panel.shape[1] - panel.shape[0]
    return panel[:, :begin], panel[:, begin:]
