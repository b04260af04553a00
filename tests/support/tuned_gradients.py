"""A cache in which the gradients of a problem are tuned, for tests on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradient_kernels
import pytest
import samples
import torch

import autoattn
from autoattn import functional
from autoattn.cache import store
from autoattn.codegen import search_space
from autoattn.hardware import nvidia
from autoattn.runtime.plan import gradient_problem
from autoattn.runtime.plan.gradient_problem import Learned


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts a template's default for the gradients of a call into the user's cache, as if it had been measured."""
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path))

    def tune(*tensors: torch.Tensor, template: str = gradient_kernels.TEMPLATE, **given: Any) -> None:
        with torch.no_grad():
            problem = autoattn.explain(*tensors, **given).problem
        assert problem is not None
        bias, slopes = (getattr(given.get(name), "requires_grad", False) for name in ("bias", "alibi_slopes"))
        repeated = given.get("deterministic", False)
        backward_problem = gradient_problem.backward_of(
            problem, deterministic=repeated, learned=Learned(bias=bias, slopes=slopes)
        )
        card = nvidia.present()
        assert card is not None
        variant = search_space.load(template).default(backward_problem, card)
        entry = samples.tuned(backward_problem, variant)
        store.merge(tmp_path, card, backward_problem.op, [entry])
        functional.forget()

    yield tune
    functional.forget()
