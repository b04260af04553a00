"""Launches of kernels that are right, for benchmarks that compare a few kernels on one call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import torch

from autoattn.core.problem import Problem
from autoattn.core.variant import Source
from autoattn.hardware.timer import Call
from autoattn.kernels import compiler, forward
from autoattn.validation import output_check

T = TypeVar("T")


def of(problem: Problem, sources: Mapping[T, Source], device: torch.device) -> dict[T, Call]:
    """What launches each kernel, on the same operands and into the same output; one that fails the gate ends all."""
    case = output_check.full_case(problem, device, torch.Generator().manual_seed(1))
    output = forward.empty_output(problem, case.operands.query)
    gate = output_check.Gate(problem, device)
    calls: dict[T, Call] = {}
    for name, source in sources.items():
        kernel = compiler.load(source, device)
        verdict = gate.judge(kernel)
        assert verdict.ok, f"{name}: {problem}: {verdict.reason}"
        calls[name] = partial(forward.launch, kernel, problem, case.operands, output, None)
    return calls
