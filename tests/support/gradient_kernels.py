"""Problems and variants of the backward template, and what becomes of its kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import interpreted
import kernels
import torch

from autoattn.codegen import render, search_space
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Verdict
from autoattn.core.variant import Source, Traits, Value, Variant
from autoattn.kernels.compiler import load
from autoattn.reference import attention_formula, inputs
from autoattn.reference.inputs import Scores
from autoattn.runtime.plan import gradient_problem
from autoattn.runtime.plan.gradient_problem import NONE_LEARNED, Learned
from autoattn.runtime.run import autograd
from autoattn.tensors.operands import Operands
from autoattn.validation import gradient_check, output_check
from autoattn.workers.worker_pool import Failure, Pool

TEMPLATE = "triton/backward"
BASE: dict[str, Value] = {
    "queries_loads": "pointer",
    "keys_loads": "pointer",
    "products": "as_asked",
    "QUERIES_BLOCK_M": 16,
    "QUERIES_BLOCK_N": 16,
    "queries_num_warps": 1,
    "queries_num_stages": 1,
    "KEYS_BLOCK_N": 16,
    "KEYS_BLOCK_M": 16,
    "keys_num_warps": 1,
    "keys_num_stages": 1,
    "HEAD_GROUP": 1,
}


def problem(**changes: Any) -> Problem:
    """A small backward problem; `mask` may be words."""
    return kernels.problem(op=Op.BACKWARD, **changes)


def variant(**changes: Value) -> Variant:
    """The smallest variant, changed."""
    return search_space.load(TEMPLATE).variant(BASE | changes)


def source(problem: Problem, traits: Traits | None = None, **changes: Value) -> Source:
    """The rendered kernels of the smallest variant, changed."""
    return render.render(problem, variant(**changes), traits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A kernel, and a problem on which the gate for gradients judges it."""

    source: Source
    problem: Problem
    scores: Scores = Scores.PLAIN
    small: tuple[int, int] | None = None  # the lengths of a case of the gate's, in place of the problem itself
    number: int = 1  # of that case
    make: Callable[[Problem], Operands] | None = None  # a function of a module, in place of the gate's own operands

    def run(self, memory: dict[Hashable, Any]) -> Verdict:
        """Runs in the child."""
        torch.set_num_threads(1)
        facts: tuple[Any, ...] = interpreted.CPU, torch.Generator().manual_seed(0)
        if self.small is not None:
            case = gradient_check.make_small_case(self.problem, *self.small, self.number, *facts, scores=self.scores)
        elif self.make is not None:
            guard = interpreted.GUARD_ROWS
            case = gradient_check.case_of(self.problem, self.make(self.problem), facts[1], guard=guard)
        else:
            case = gradient_check.make_case(
                self.problem, *facts, scores=self.scores, guard=output_check.GUARD_ROWS, lse=self.source.traits.lse
            )
        return gradient_check.judge(load(self.source, interpreted.CPU), [case])


@dataclass(frozen=True, slots=True, kw_only=True)
class Differentiated:
    """Both passes by kernels, as autograd runs them: the largest errors of the output and of the gradients."""

    forward: Source
    backward: Source
    problem: Problem  # forward
    learned: Learned = NONE_LEARNED

    def run(self, memory: dict[Hashable, Any]) -> dict[str, float]:
        """Runs in the child; the output is summed, so that its gradient has strides of 0."""
        torch.set_num_threads(1)
        operands = inputs.make(self.problem, interpreted.CPU, torch.Generator().manual_seed(0))
        names = ["query", "key", "value"]
        names += ["narrow_bias"] * self.learned.bias + ["slopes"] * self.learned.slopes
        computed: dict[str, list[torch.Tensor]] = {}
        for name in ("ours", "theirs"):
            leaves = [getattr(operands, each).detach().clone().requires_grad_() for each in names]
            part = replace(operands, **dict(zip(names, leaves, strict=True)))
            if self.learned.bias and operands.bias is not None:
                part = replace(part, bias=leaves[3].expand(operands.bias.shape))
            if name == "ours":
                kernels_ = [load(source, interpreted.CPU) for source in (self.forward, self.backward)]
                backward_problem = gradient_problem.backward_of(self.problem, learned=self.learned)
                both = gradient_problem.Pass(
                    problem=self.problem, forward=kernels_[0], backward=kernels_[1], backward_problem=backward_problem
                )
                output, _ = autograd.attend(both, part)
            else:
                output = attention_formula.attention(self.problem, part)[0]
            computed[name] = [output.detach(), *torch.autograd.grad(output.sum(), leaves)]
        pairs = zip(("output", *names), computed["ours"], computed["theirs"], strict=True)
        return {name: float((ours.double() - theirs).abs().max()) for name, ours, theirs in pairs}


def judged(
    child: Pool, problem: Problem, traits: Traits | None = None, scores: Scores = Scores.PLAIN, *,
    source_: Source | None = None, small: tuple[int, int] | None = None,
    number: int = 1, make: Callable[[Problem], Operands] | None = None, **changes: Value,
) -> Verdict:  # fmt: skip
    """The gate's verdict on the smallest variant, changed, for one problem."""
    rendered = source_ if source_ is not None else source(problem, traits, **changes)
    verdict = child.result(
        Judged(source=rendered, problem=problem, scores=scores, small=small, number=number, make=make),
        interpreted.SECONDS,
    )
    assert not isinstance(verdict, Failure), f"{verdict.outcome.value}: {verdict.detail}"
    assert isinstance(verdict, Verdict)
    return verdict
