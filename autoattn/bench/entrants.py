"""The contestants of one benchmark row: what each calls, and how its outputs and gradients are checked.

Calls are made when they are first run, so that whatever goes wrong with one is its contestant's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from autoattn import functional
from autoattn.baselines import deterministic_sdpa, pytorch_sdpa
from autoattn.baselines.external import Peer
from autoattn.bench.kernel_results import LOOSE, Contestant, Inputs, Options
from autoattn.codegen import render
from autoattn.core.cache_entry import KERNEL
from autoattn.core.device import Device
from autoattn.core.modifiers import Bias
from autoattn.core.problem import DType, Layout, Op, Problem
from autoattn.core.variant import Variant
from autoattn.kernels import backward, compiler, forward
from autoattn.reference.inputs import Scores
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import cache_lookup, gradient_problem, planner
from autoattn.runtime.plan.explanations import Explanation
from autoattn.runtime.run import execute
from autoattn.tensors.operands import Gradients, Operands
from autoattn.validation import gradient_check, output_check

OURS = "autoattn"  # what a call of autoattn.attention runs, or what differentiates one
ROWS = 32  # query rows whose outputs are compared with the reference, of all heads and sequences
Run: TypeAlias = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An answer beside the reference's."""

    max_error: float
    allowed: float  # what the gate allows our kernels
    wrong: str = ""  # why it is, in words


class Answers(Protocol):
    """One problem with its inputs, and what is expected of everybody."""

    problem: Problem

    def ours(self, card: Device | None) -> tuple[Explanation, Contestant, Run]:
        """What dispatch says of the problem, and the first contestant with its call."""

    def by_kernel(self, variant: Variant) -> Run:
        """A call of one kernel of ours."""

    def by_peer(self, peer: Peer) -> Run:
        """A peer's call."""

    def judge(self, answer: Any, again: Run, *, ours: bool) -> Judged:
        """Compares what a call gave with the reference.

        Args:
            again: runs the same call once more.
        """


def of(problem: Problem, device: torch.device, options: Options) -> Answers:
    """Inputs for a problem, with what its operation asks of contestants.

    Raises:
        AutoattnError: there are no such inputs.
        torch.cuda.OutOfMemoryError: they do not fit.
    """
    generator = torch.Generator().manual_seed(options.seed)
    scores = Scores.TRAINED if options.inputs is Inputs.TRAINED else Scores.PLAIN
    if problem.op is Op.BACKWARD:
        return BackwardPasses(gradient_check.full_case(problem, device, generator, scores=scores))
    return Outputs(output_check.make_case(problem, device, generator, scores=scores, rows=ROWS, guard=0))


def of_cache(explanation: Explanation) -> list[Variant]:
    """The backward kernel that was found for a problem, also where a training call takes a rival instead."""
    return [explanation.variant] if explanation.entry is not None and explanation.variant is not None else []


class _Late:
    """A call that is made when it is first run."""

    def __init__(self, make: Callable[[], Run]) -> None:
        self.make = make
        self.call: Run | None = None

    def __call__(self) -> Any:
        if self.call is None:
            self.call = self.make()
        return self.call()


class Outputs:
    """Contestants give the output."""

    def __init__(self, case: output_check.Case) -> None:
        self.case, self.problem = case, case.problem

    def ours(self, card: Device | None) -> tuple[Explanation, Contestant, Run]:
        """A call from the front door on.

        Raises:
            AutoattnError: there is no plan for it.
        """
        problem, operands = self.problem, self.case.operands
        explanation = planner.plan(Call(problem=problem, operands=operands), lse=False).explanation
        variant = explanation.variant
        first = Contestant(name=OURS, ours=True, route=explanation.route, level=explanation.level.value)
        if explanation.route == KERNEL and variant is not None:
            first = replace(first, route=variant.template, variant=variant)
        return explanation, first, front_door(problem, operands)

    def by_kernel(self, variant: Variant) -> Run:
        """A launch that allocates its output."""
        return _Late(partial(self._launch, variant))

    def _launch(self, variant: Variant) -> Run:
        problem, operands = self.problem, self.case.operands
        kernel = compiler.load(render.render(problem, variant), operands.query.device)

        def launch() -> Tensor:
            output = forward.empty_output(problem, operands.query)
            forward.launch(kernel, problem, operands, output, None)
            return output

        return launch

    def by_peer(self, peer: Peer) -> Run:
        """A call on tensors in the peer's own layout."""
        return _Late(partial(output_check.peer_call, peer, self.case))

    def judge(self, output: Tensor, again: Run, *, ours: bool) -> Judged:
        """By the error at some rows."""
        error = output_check.errors(output, self.case)[0]
        limit = self.case.allowed * (1.0 if ours else LOOSE)
        wrong = "" if error <= limit else f"error {error:.3g} where {limit:.3g} is allowed"
        return Judged(max_error=error, allowed=self.case.allowed, wrong=wrong)


class BackwardPasses:
    """Contestants give the gradients of query, key and value; their forward passes are done before."""

    def __init__(self, case: gradient_check.Case) -> None:
        self.case, self.problem = case, case.problem

    def ours(self, card: Device | None) -> tuple[Explanation, Contestant, Run]:
        """The kernel that the cache has; where it has none, what autograd runs behind calls.

        Raises:
            AutoattnError: a cache file is damaged or newer, or there is no plan for a call.
        """
        explanation = cache_lookup.explain(self.problem, card)
        why = gradient_problem.why_not_by(explanation)
        for variant in of_cache(explanation):
            first = Contestant(
                name=OURS, ours=True, route=variant.template, level=explanation.level.value, variant=variant,
                detail=f"a training call is left to PyTorch: {why}" if why else "",
            )  # fmt: skip
            return explanation, first, self.by_kernel(variant)
        operands, modifiers = self.case.operands, self.problem.modifiers
        given = {name: getattr(operands, name) for name in ("query", "key", "value", "sinks")}
        given["bias"] = operands.narrow_bias if modifiers.bias is Bias.LEARNED else None
        given["slopes"] = operands.slopes if modifiers.learned_slopes else None
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items() if tensor is not None}
        output_problem = replace(self.problem, op=Op.FORWARD, deterministic=False)
        call = Call(problem=output_problem, operands=self._traced(leaves), deterministic=self.problem.deterministic)
        plan = planner.plan(call, lse=False)
        first = Contestant(name=OURS, ours=True, route=plan.explanation.route, level=explanation.level.value)
        if plan.gradients is not None:  # launched as by all calls but the first, which leaves its graph to slower ones
            variant = plan.gradients.source.variant
            return explanation, replace(first, route=variant.template, variant=variant), self.by_kernel(variant)
        return explanation, first, _Late(partial(self._behind, call, plan, leaves))

    def _traced(self, leaves: dict[str, Tensor]) -> Operands:
        """The operands of a call of which autograd knows the leaves."""
        operands, bias = self.case.operands, leaves.get("bias")
        traced = replace(operands, **{name: leaf for name, leaf in leaves.items() if name != "bias"})
        if bias is None or operands.bias is None:
            return traced
        return replace(traced, narrow_bias=bias, bias=bias.expand(operands.bias.shape))

    def _behind(self, call: Call, plan: planner.Plan, leaves: dict[str, Tensor]) -> Run:
        repeated = self.problem.deterministic
        with deterministic_sdpa.switched_on(repeated):
            output, _ = execute.run(call, plan, lse=False)
        three = tuple(leaves.values())

        def differentiate() -> Gradients:
            grads = pytorch_sdpa.differentiated(output, three, self.case.saved.output_grad, repeated)
            return Gradients(**dict(zip(leaves, grads, strict=True)))

        return differentiate

    def by_kernel(self, variant: Variant) -> Run:
        """All launches of a backward pass, as autograd runs them: gradients and scratch are allocated anew."""
        return _Late(partial(self._launch, variant))

    def _launch(self, variant: Variant) -> Run:
        operands, saved = self.case.operands, self.case.saved
        kernel = compiler.load(render.render(self.problem, variant), operands.query.device)
        launch = backward.ready(kernel, self.problem, operands, saved)

        def differentiate() -> Gradients:
            gradients = backward.empty_gradients(self.problem, operands)
            launch(gradients)
            return gradients

        return differentiate

    def by_peer(self, peer: Peer) -> Run:
        """A backward pass of autograd's, on tensors in the peer's own layout."""
        return _Late(partial(gradient_check.peer_call, peer, self.case))

    def judge(self, gradients: Gradients, again: Run, *, ours: bool) -> Judged:
        """By the errors at some heads; deterministic gradients must also be the same ones in a second run."""
        by_name = gradient_check.errors_by_name(gradients, self.case)
        max_error, _, allowed = gradient_check.joined(by_name, self.case)
        wrong = ""
        for name, (error, _) in by_name.items():
            limit = self.case.allowed[name] * (1.0 if ours else LOOSE)
            if not error <= limit:
                wrong = f"the {name}'s gradient has error {error:.3g} where {limit:.3g} is allowed"
        if not wrong and self.problem.deterministic and (second := again()) is not None:
            wrong = gradient_check.unlike(gradients, second)
        return Judged(max_error=max_error, allowed=allowed, wrong=wrong)


def front_door(problem: Problem, operands: Operands) -> Callable[[], Tensor]:
    """A call of `autoattn.attention`; from its plan on where other tensors than query, key and value take part."""
    special = problem.packed or problem.mask.sparse or problem.modifiers.names or problem.dtype is DType.FLOAT8
    if special:
        call = Call(problem=problem, operands=operands)
        plan = planner.plan(call, lse=False)
        return lambda: execute.run(call, plan, lse=False)[0]
    swapped = problem.layout is Layout.BSHD
    tensors = (operands.query, operands.key, operands.value)
    query, key, value = (tensor.transpose(1, 2) if swapped else tensor for tensor in tensors)
    facts: dict[str, Any] = {
        "mask": problem.mask,
        "layout": problem.layout.value,
        "precision": problem.precision.value if problem.dtype is DType.FLOAT32 else None,
        "numerics": problem.numerics.value,
    }

    def attend() -> Tensor:
        output = functional.attention(query, key, value, **facts)
        assert isinstance(output, Tensor)
        return output.transpose(1, 2) if swapped else output

    return attend
