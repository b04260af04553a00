"""Kernels without softmax in Triton's interpreter: a job of its own, since a child imports it by this name."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from autoattn.bench import ablation_bench
from autoattn.core.problem import Problem
from autoattn.core.trial import Verdict
from autoattn.core.variant import Source
from autoattn.kernels.compiler import load
from autoattn.validation import output_check

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Compares a kernel with the two products alone."""

    problem: Problem
    source: Source

    def run(self, memory: dict[Hashable, Any]) -> Verdict:
        """Runs in the child."""
        torch.set_num_threads(1)
        case = output_check.make_case(self.problem, CPU, torch.Generator().manual_seed(0), guard=0)
        return ablation_bench.judge_products(load(self.source, CPU), case)
