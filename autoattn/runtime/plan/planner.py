"""Plans a call: the tuned kernel where there is one, PyTorch otherwise, and the reason."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from autoattn import torch_private
from autoattn.baselines import pytorch_sdpa
from autoattn.cache import availability
from autoattn.codegen import render
from autoattn.core import size_class
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem
from autoattn.core.variant import Source, Traits, Variant
from autoattn.errors import CompileError
from autoattn.hardware import nvidia
from autoattn.kernels import compiler, forward
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import (
    background_compile,
    cache_lookup,
    decision,
    explanations,
    gradient_problem,
    machine_code,
)
from autoattn.runtime.plan.explanations import Explanation
from autoattn.runtime.plan.gradient_problem import NONE_LEARNED, Learned
from autoattn.runtime.plan.tuned_entries import WatchedEntries
from autoattn.tensors.operands import Operands

_logger = logging.getLogger("autoattn")
MAX_SCALE = 1e38  # times log2(e) it is still a float32
CAPTURED = "a CUDA graph is being captured and the kernel is not loaded; call once before capturing"
MAX_PLANS = 4096  # a growing key cache poses a new problem at every step
_ruled_out: set[tuple[Problem, str]] = set()  # routes that did not take a problem's tensors


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What was decided for a problem, traits and card."""

    explanation: Explanation
    kernel: compiler.Kernel | None = None
    gradients: compiler.Kernel | None = None  # what differentiates the kernel's answer, where somebody may
    backward_problem: Problem | None = None  # what they compute
    repeats: bool = False  # PyTorch answers, and its gradients must repeat to the bit
    lasting: bool = True  # the same call will be answered like this until `forget`
    captured: Plan | None = None  # who answers while a CUDA graph is captured, where it is somebody else

    def passes(self, problem: Problem) -> gradient_problem.Pass | None:
        """The kernels of both passes of a call, where there are two."""
        if self.kernel is None or self.gradients is None or self.backward_problem is None:
            return None
        return gradient_problem.Pass(
            problem=problem, forward=self.kernel, backward=self.gradients, backward_problem=self.backward_problem
        )


class _NotLoadedError(Exception):
    """The kernel is not loaded, and cannot be by now; the words say why."""


def plan(
    call: Call, *, lse: bool, learns: bool | None = None, learned: Learned | None = None, merged: Tensor | None = None
) -> Plan:
    """Who answers a call, and why; a kernel is compiled, and nothing runs.

    Args:
        learns: whether an input needs a gradient; when None, the tensors say it.
        learned: whether bias and slopes are among them; likewise.
        merged: the output of other keys into which the kernel of a call that nobody differentiates merges its own, as
            a [batch, heads, seq, head_dim_v] view. Only a kernel can; what else the plan names does not.
    """
    problem, operands = call.problem, call.operands
    if call.empty:
        reason = "there is no query or no key, so that the answer is 0 and nothing is launched"
        return Plan(replace(explanations.of_sdpa(reason), route=pytorch_sdpa.EAGER))
    if learns is None:
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(problem, operands))
    if learned is None:
        learned = Learned.of(operands)
    refusal = call.no_kernel or why_no_kernel(problem, operands)
    if refusal is None and learns and (why_not := gradient_problem.why_not(operands)) is not None:
        refusal = f"an input needs a gradient, and {why_not}"
    if refusal is not None:
        without = decision.without_kernel(refusal, problem, lse=lse, learned=learned)
        return _of_call(call, _by_pytorch(without, repeats=learns and call.deterministic))
    try:
        if learns:
            given = (gradient_problem.traits_of(problem, operands, lse=wants_lse) for wants_lse in (True, lse))
            both = _prepare_both(problem, *given, operands.query.device.index, call.deterministic, learned)
            return settled(both, problem)
        traits = gradient_problem.traits_of(problem, operands, lse=lse)
        if merged is not None:
            traits = forward.merging(traits, merged, operands.query.element_size())
        spoken = size_class.regardless_of_batch(problem)
        prepared_plan = settled(prepare(spoken, traits, operands.query.device.index), problem)
        if spoken is problem:
            return prepared_plan
        return replace(prepared_plan, explanation=replace(prepared_plan.explanation, problem=problem))
    except _NotLoadedError as error:
        without = decision.without_kernel(str(error), problem, lse=lse, learned=learned)
        return replace(_by_pytorch(without, repeats=learns and call.deterministic), lasting=False)


def plan_without_kernel(call: Call, reason: str, *, lse: bool) -> Plan:
    """PyTorch answers a call, whatever was tuned."""
    learned = Learned.of(call.operands)
    return _of_call(call, Plan(decision.without_kernel(reason, call.problem, lse=lse, learned=learned)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownCalls:
    """What calls share that kernels answer and that differ in sizes alone."""

    card: Device
    index: int
    kernel: compiler.Kernel  # of one of them
    output: WatchedEntries
    gradient_kernel: compiler.Kernel | None = None  # None where nobody differentiates them, as the next
    gradients: WatchedEntries | None = None
    kernels: list[tuple[Op, compiler.Kernel]] = field(default_factory=list)  # that answer some of them

    def note(self, plan: Plan) -> None:
        """Keeps the kernels of a plan at hand."""
        for op, kernel in ((Op.FORWARD, plan.kernel), (Op.BACKWARD, plan.gradients)):
            if kernel is not None and (op, kernel) not in self.kernels:
                self.kernels.append((op, kernel))

    def kernel_of(self, op: Op, variant: Variant) -> compiler.Kernel | None:
        """The kernel of a variant; None where none of them has answered."""
        kernels = (kernel for of, kernel in self.kernels if of is op and kernel.source.variant == variant)
        return next(kernels, None)

    @classmethod
    def of(cls, plan: Plan, problem: Problem, index: int) -> KnownCalls | None:
        """Those like a call; None where no kernels answer it.

        Args:
            plan, problem: of the call.
            index: of the device.
        """
        card = nvidia.present(index)
        if plan.kernel is None or card is None:
            return None
        output = WatchedEntries(problem, card)
        if plan.gradients is None or plan.backward_problem is None:
            return cls(card=card, index=index, kernel=plan.kernel, output=output)
        gradients = WatchedEntries(plan.backward_problem, card)
        return cls(
            card=card,
            index=index,
            kernel=plan.kernel,
            output=output,
            gradient_kernel=plan.gradients,
            gradients=gradients,
        )


def replan(known: KnownCalls, problem: Problem, backward_problem: Problem | None) -> Plan | None:
    """The plan of a call of other sizes than known ones; None where it takes the call.

    Args:
        backward_problem: of the gradients, where somebody differentiates the call.
    """
    traits = known.kernel.source.traits
    try:
        if backward_problem is None or known.gradient_kernel is None:
            return _plan_output(problem, traits, known.index, known.card, known)
        gradient_traits = known.gradient_kernel.source.traits
        return _plan_both(problem, backward_problem, traits, gradient_traits, known.index, NONE_LEARNED, known)
    except _NotLoadedError:
        return None


def _of_call(call: Call, plan: Plan) -> Plan:
    """The plan; without the problem where that is not the caller's."""
    return replace(plan, explanation=replace(plan.explanation, problem=None)) if call.no_kernel else plan


def rule_out(problem: Problem, route: str) -> None:
    """Leaves a problem to any of PyTorch's backends from now on: the one that was chosen does not take its tensors."""
    if len(_ruled_out) >= MAX_PLANS:
        _ruled_out.clear()
    _ruled_out.add((problem, route))


def settled(plan: Plan, problem: Problem) -> Plan:
    """The plan; with PyTorch's own choice of a backend where the planned one was ruled out, maybe by this very call."""
    route = plan.explanation.route
    if not _ruled_out or (problem, route) not in _ruled_out:  # the first spares a hash of the problem
        return plan
    reason = f"{route} was chosen, but does not take these tensors"
    return replace(plan, explanation=explanations.of_sdpa(reason, problem, plan.explanation.reasons.texts))


def forget() -> None:
    """Drops what this process decided, so that a cache written since is read anew."""
    prepare.cache_clear()
    _prepare_both.cache_clear()
    _ruled_out.clear()
    machine_code.forget()


@lru_cache(maxsize=MAX_PLANS)
def prepare(problem: Problem, traits: Traits, index: int) -> Plan:
    """Decides and, when the answer is a kernel, compiles it: once per problem, traits and card."""
    return _plan_output(problem, traits, index, nvidia.present(index))


@lru_cache(maxsize=MAX_PLANS)
def _prepare_both(
    problem: Problem, traits: Traits, gradient_traits: Traits, index: int, deterministic: bool, learned: Learned
) -> Plan:
    """The same for a call that somebody may differentiate: both passes by kernels, or both by PyTorch."""
    backward_problem = gradient_problem.backward_of(problem, deterministic=deterministic, learned=learned)
    return _plan_both(problem, backward_problem, traits, gradient_traits, index, learned)


def _plan_output(
    problem: Problem, traits: Traits, index: int, card: Device | None, known: KnownCalls | None = None
) -> Plan:
    """Who answers a problem.

    Args:
        known: calls of other sizes, whose kernels and entries are at hand.
    """
    if torch.cuda.is_current_stream_capturing():
        # An exception is not kept, so that the next call asks again.
        raise _NotLoadedError(CAPTURED)
    tuned = None if known is None else known.output.now()
    explanation = decision.of_output(problem, card, lse=traits.lse, tuned=tuned)
    _warn_where_unavailable(explanation)
    explanation, kernel, refused = _first_compiled(explanation, problem, traits, index, card, known)
    if kernel is None and refused:
        return Plan(decision.without_kernel(refused, problem, lse=traits.lse, steps=explanation.reasons.texts))
    return Plan(explanation, kernel)


def _plan_both(
    problem: Problem, backward_problem: Problem, traits: Traits, gradient_traits: Traits, index: int, learned: Learned,
    known: KnownCalls | None = None,
) -> Plan:  # fmt: skip
    """The same of both passes."""
    if torch.cuda.is_current_stream_capturing():
        raise _NotLoadedError(CAPTURED)
    card, lse = nvidia.present(index) if known is None else known.card, gradient_traits.lse
    deterministic = backward_problem.deterministic
    tuned = None if known is None or known.gradients is None else known.gradients.now()
    gradient_answer = decision.of_gradients(backward_problem, card, lse=lse, tuned=tuned)
    _warn_where_unavailable(gradient_answer)
    if (believed := decision.pytorch_believed_faster(problem, gradient_answer, card, lse=lse)) is not None:
        return Plan(believed)
    refused = gradient_problem.why_not_by(gradient_answer)
    if refused is None:
        if known is None:
            forward_plan = prepare(problem, traits, index)
        else:
            forward_plan = _plan_output(problem, traits, index, card, known)
        refused = decision.why_not_both(forward_plan.explanation, gradient_answer)
    if refused is None:
        gradient_answer, kernel, refused = _first_compiled(
            gradient_answer, backward_problem, gradient_traits, index, card, known
        )
        if kernel is not None:
            explanation = decision.with_gradients(forward_plan.explanation, gradient_answer)
            both = Plan(explanation, forward_plan.kernel, kernel, backward_problem)
            sdpa = decision.launch_bound(explanation, gradient_answer, deterministic=deterministic, lse=lse)
            return both if sdpa is None else Plan(sdpa, captured=both)
    without = decision.without_gradients(refused, problem, gradient_answer, lse=lse, learned=learned)
    return _by_pytorch(without, repeats=deterministic)


def _first_compiled(
    explanation: Explanation, problem: Problem, traits: Traits, index: int, card: Device | None,
    known: KnownCalls | None,
) -> tuple[Explanation, compiler.Kernel | None, str]:  # fmt: skip
    """The first kernel of an explanation that the compiler takes, as what runs; else why it refused the last one."""
    refused = ""
    for variant in cache_lookup.variants(explanation, card):
        kernel = None if known is None else known.kernel_of(problem.op, variant)
        try:
            kernel = kernel or _kernel_of(problem, variant, traits, index, card)
        except CompileError as error:
            refused = str(error)
            if explanation.entry is not None and render.why_not(variant, problem, traits) is None:
                availability.warn_once(f"the kernel tuned for {explanation.entry.problem} is refused, {refused}")
            explanation = cache_lookup.without(explanation, variant, refused)
        else:
            explanation = cache_lookup.by(explanation, variant)
            if kernel.precompiled:
                explanation = replace(explanation, precompiled=kernel.precompiled)
            return explanation, kernel, ""
    return explanation, None, refused


def _by_pytorch(explanation: Explanation, *, repeats: bool) -> Plan:
    """PyTorch answers; where they must, its gradients repeat to the bit."""
    return Plan(decision.repeated(explanation), repeats=True) if repeats else Plan(explanation)


def _warn_where_unavailable(explanation: Explanation) -> None:
    """Tells the user, once, of tuned kernels that the installed Triton cannot compile."""
    if explanation.unavailable:
        availability.warn_once(explanation.unavailable)


def _kernel_of(problem: Problem, variant: Variant, traits: Traits, index: int, card: Device | None) -> compiler.Kernel:
    """A variant's kernel on a card: precompiled where its machine code is there, else compiled."""
    if card is not None and (stored := machine_code.find(problem, variant, traits, card.arch)) is not None:
        kernel = machine_code.load(stored, variant, traits, index)
        if kernel is not None:
            return kernel
    return _load(render.render(problem, variant, traits), index)


def _load(source: Source, index: int) -> compiler.Kernel:
    """A kernel on a card, unless it is compiled in the background and not there yet."""
    if background_compile.is_asked():
        card = nvidia.present(index)
        if card is not None and not background_compile.is_done(source, card.arch):
            raise _NotLoadedError(background_compile.REASON)
    return load_once(source, index)


@cache
def load_once(source: Source, index: int) -> compiler.Kernel:
    """A kernel on a card, compiled when it is first asked for.

    Problems that differ only in sizes share a kernel; a growing key cache poses a new one at every step.
    """
    begin = time.monotonic()
    kernel = compiler.load(source, torch.device("cuda", index))
    seconds = time.monotonic() - begin
    _logger.info(
        "a call waited %.1f s for a kernel of %s (%s), to be compiled or found in Triton's cache; autoattn warm "
        "compiles ahead", seconds, source.variant.template, source.digest,
    )  # fmt: skip
    return kernel


def why_no_kernel(problem: Problem, operands: Operands) -> str | None:
    """Why no kernel of ours may run, whatever was tuned; None when one may."""
    reason = why_not_on(operands.query.device)
    if reason is not None:
        return reason
    tensors = _tensors(problem, operands)
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return "a tensor subclass has rules of its own"
    if torch_private.has_dual_level() and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        return "forward-mode differentiates it, which takes PyTorch's own derivatives"
    if not torch.finfo(torch.float32).tiny <= operands.scale <= MAX_SCALE:
        return f"the kernels need a positive scale that float32 can hold, got {operands.scale}"
    return why_too_many_programs(problem)


def why_too_many_programs(problem: Problem) -> str | None:
    """Why no launch can hold the programs of a problem; None where one can."""
    tiles = problem.tokens_q // 16 + problem.batch + 1 if problem.packed else problem.batch * -(-problem.seq_q // 16)
    if problem.heads_q * tiles > forward.MAX_TILES:
        return "the launch would need more than 2**31 - 1 programs"
    return None


def why_not_on(device: torch.device) -> str | None:
    """Why no kernel of ours runs on a device; None where one may."""
    if device.type != "cuda":
        return f"the tensors are on the {device.type}, and the kernels run on NVIDIA GPUs"
    if torch.version.hip is not None:
        return "this is a ROCm build of PyTorch, and the kernels are made for NVIDIA GPUs"
    return None


def _tensors(problem: Problem, operands: Operands) -> tuple[Tensor, ...]:
    """What a call computes on and could need a gradient of."""
    three = operands.query, operands.key, operands.value
    if not problem.modifiers.names and not problem.mask.mod and operands.query_scale is None:
        return three
    maybe = (
        operands.bias,
        operands.slopes,
        operands.sinks,
        operands.query_scale,
        operands.key_scale,
        operands.value_scale,
        *operands.mask_captures,
        *operands.score_captures,
    )
    return (*three, *(tensor for tensor in maybe if tensor is not None))
