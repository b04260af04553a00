"""Notes the calls of autoattn's F.scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from autoattn import functional


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries that autoattn was given, in order."""
    shapes: list[tuple[int, ...]] = []
    sdpa = functional.scaled_dot_product_attention

    def noting(query: Tensor, *rest: Any, **words: Any) -> Tensor:
        shapes.append(tuple(query.shape))
        return sdpa(query, *rest, **words)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noting)
    return shapes
