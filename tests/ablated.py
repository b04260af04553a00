"""Kernels without softmax in Triton's interpreter: a job of its own, since a child imports it by this name."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from autoattn import ablate, validate
from autoattn.compile import load
from autoattn.problem import Problem
from autoattn.trial import Verdict
from autoattn.variant import Source

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Compares a kernel with the two products alone."""

    problem: Problem
    source: Source

    def run(self, memory: dict[Hashable, Any]) -> Verdict:
        """Runs in the child."""
        torch.set_num_threads(1)
        case = validate.make_case(self.problem, CPU, torch.Generator().manual_seed(0), guard=0)
        return ablate.judge_products(load(self.source, CPU), case)
