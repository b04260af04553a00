"""Plans a call: the tuned kernel where there is one, PyTorch otherwise, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from autoattn.baselines import pytorch_sdpa
from autoattn.cache import availability
from autoattn.codegen import render
from autoattn.core.cache_entry import KERNEL
from autoattn.core.device import Device
from autoattn.core.problem import Bias, DType, Op, Problem
from autoattn.core.variant import Source, Traits
from autoattn.errors import CompileError
from autoattn.hardware import nvidia
from autoattn.kernels import compiler, forward
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import cache_lookup, gradient_problem, launch_bound
from autoattn.runtime.plan.cache_lookup import Explanation
from autoattn.runtime.plan.gradient_problem import NONE_LEARNED, Learned
from autoattn.tensors.operands import Operands

MAX_SCALE = 1e38  # times log2(e) it is still a float32
MAX_PLANS = 4096  # a growing key cache poses a new problem at every step
FLOAT8_ARCH = 89  # Ada is the first to multiply float8
_ruled_out: set[tuple[Problem, str]] = set()  # routes that did not take a problem's tensors


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What was decided for a problem, traits and card."""

    explanation: Explanation
    kernel: compiler.Kernel | None = None
    gradients: compiler.Kernel | None = None  # what differentiates the kernel's answer, where somebody may
    asked: Problem | None = None  # what that one computes
    repeats: bool = False  # PyTorch answers, and its gradients must repeat to the bit
    lasting: bool = True  # the same call will be answered like this until `forget`
    captured: Plan | None = None  # who answers while a CUDA graph is captured, where it is somebody else

    def passes(self, problem: Problem) -> gradient_problem.Pass | None:
        """The kernels of both passes of a call, where there are two."""
        if self.kernel is None or self.gradients is None or self.asked is None:
            return None
        return gradient_problem.Pass(problem=problem, forward=self.kernel, backward=self.gradients, asked=self.asked)


class _NotLoadedError(Exception):
    """The kernel is not loaded, and cannot be while a CUDA graph is captured."""


def plan(call: Call, *, lse: bool, learns: bool | None = None, learned: Learned | None = None) -> Plan:
    """Who answers a call, and why; a kernel is compiled, and nothing runs.

    Args:
        learns: whether an input needs a gradient; when None, the tensors say it.
        learned: whether bias and slopes are among them; likewise.
    """
    problem, operands = call.problem, call.operands
    if call.empty:
        reason = "there is no query or no key, so that the answer is 0 and nothing is launched"
        return Plan(replace(cache_lookup.sdpa(reason), route=pytorch_sdpa.EAGER))
    if learns is None:
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(problem, operands))
    if learned is None:
        learned = Learned.of(operands)
    refusal = call.no_kernel or _why_no_kernel(problem, operands)
    if refusal is None and learns and (why_not := gradient_problem.why_not(operands)) is not None:
        refusal = f"an input needs a gradient, and {why_not}"
    if refusal is not None:
        without = _of_call(call, _without_kernel(refusal, problem, lse, learned=learned))
        return _repeating(without) if learns and call.deterministic else without
    try:
        if learns:
            given = (gradient_problem.traits_of(problem, operands, lse=each) for each in (True, lse))
            both = _prepare_both(problem, *given, operands.query.device.index, call.deterministic, learned)
            return settled(both, problem)
        traits = gradient_problem.traits_of(problem, operands, lse=lse)
        return settled(_prepare(problem, traits, operands.query.device.index), problem)
    except _NotLoadedError:
        reason = "a CUDA graph is being captured and the kernel is not loaded; call once before capturing"
        return replace(_without_kernel(reason, problem, lse, learned=learned), lasting=False)


def plan_without_kernel(call: Call, reason: str, *, lse: bool) -> Plan:
    """PyTorch answers a call, whatever was tuned."""
    return _of_call(call, _without_kernel(reason, call.problem, lse, learned=Learned.of(call.operands)))


def _of_call(call: Call, plan: Plan) -> Plan:
    """The plan; without the problem where that is not the caller's."""
    return replace(plan, explanation=replace(plan.explanation, problem=None)) if call.no_kernel else plan


def explain(
    problem: Problem, card: Device | None, folder: Path | None = None, *, lse: bool = False, training: bool = False
) -> Explanation:
    """What a call of a problem gets on a card, and why, by the rules of `plan`: nothing is compiled and there are no
    tensors, so that a kernel that does not compile, or does not take a memory layout, is not seen.

    Args:
        problem: of the output, or of the gradients.
        card: None is the CPU.
        folder: the only cache to read; the user's over the shipped one when None.
        lse: whether the call returns the LSE too.
        training: whether inputs need gradients; both passes are then decided together, and `problem` may be either.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    if problem.op is Op.BACKWARD and not training:
        return cache_lookup.explain(problem, card, folder)
    output = replace(problem, op=Op.FORWARD, deterministic=False)
    found = _followed(output, cache_lookup.explain(output, card, folder), card, lse=lse or training)
    if not training:
        return found
    asked = problem if problem.op is Op.BACKWARD else gradient_problem.backward_of(problem)
    learned = Learned(bias=asked.modifiers.bias is Bias.LEARNED, slopes=asked.modifiers.learned_slopes)
    gradients = cache_lookup.explain(asked, card, folder)
    refused = _why_not_both(found, gradients)
    if card is None:
        without = _without_kernel(found.reason, output, lse, learned=learned)
    elif refused is not None:
        without = _without_gradients(refused, output, lse, gradients, learned)
    else:
        found = _with_gradients(found, gradients)
        return (None if asked.deterministic or lse else launch_bound.answer(found, gradients)) or found
    return (_repeating(without) if asked.deterministic else without).explanation


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
    return replace(plan, explanation=cache_lookup.sdpa(reason, problem, plan.explanation.steps))


def forget() -> None:
    """Drops what this process decided, so that a cache written since is read anew."""
    _prepare.cache_clear()
    _prepare_both.cache_clear()
    _ruled_out.clear()


@lru_cache(maxsize=MAX_PLANS)
def _prepare(problem: Problem, traits: Traits, index: int) -> Plan:
    """Decides and, when the answer is a kernel, compiles it: once per problem, traits and card."""
    if torch.cuda.is_current_stream_capturing():
        raise _NotLoadedError  # an exception is not kept, so that the next call asks again
    card = nvidia.present(index)
    explanation = _followed(problem, cache_lookup.explain(problem, card), card, lse=traits.lse)
    _warn_where_unavailable(explanation)
    refused = ""
    for variant in cache_lookup.variants(explanation, card):
        try:
            kernel = _loaded(render.render(problem, variant, traits), index)
        except CompileError as error:
            refused = str(error)
            if explanation.entry is not None and render.why_not(variant, problem, traits) is None:
                availability.warn_once(f"the kernel tuned for {explanation.entry.problem} is refused, {refused}")
            explanation = cache_lookup.without(explanation, variant, refused)
        else:
            return Plan(cache_lookup.by(explanation, variant), kernel)
    if refused:
        return _without_kernel(refused, problem, traits.lse, explanation.steps)
    return Plan(explanation)


@lru_cache(maxsize=MAX_PLANS)
def _prepare_both(
    problem: Problem, traits: Traits, gradient_traits: Traits, index: int, deterministic: bool, learned: Learned
) -> Plan:
    """The same for a call that somebody may differentiate: both passes by kernels, or both by PyTorch."""
    card = None if torch.cuda.is_current_stream_capturing() else nvidia.present(index)
    forward_plan = _prepare(problem, traits, index)
    asked = gradient_problem.backward_of(problem, deterministic=deterministic, learned=learned)
    found = cache_lookup.explain(asked, card)
    _warn_where_unavailable(found)
    refused = _why_not_both(forward_plan.explanation, found)
    if refused is None and found.variant is not None:
        try:
            gradients = _loaded(render.render(asked, found.variant, gradient_traits), index)
        except CompileError as error:
            refused = str(error)
        else:
            explanation = _with_gradients(forward_plan.explanation, found)
            both = Plan(explanation, forward_plan.kernel, gradients, asked)
            told = deterministic or gradient_traits.lse  # what PyTorch's attention does not do
            theirs = None if told else launch_bound.answer(explanation, found)
            return both if theirs is None else Plan(theirs, captured=both)
    without = _without_gradients(refused, problem, gradient_traits.lse, found, learned)
    return _repeating(without) if deterministic else without


def _warn_where_unavailable(explanation: Explanation) -> None:
    """Tells the user, once, of tuned kernels that the installed Triton cannot compile."""
    if explanation.unavailable:
        availability.warn_once(explanation.unavailable)


def _followed(problem: Problem, found: Explanation, card: Device | None, *, lse: bool) -> Explanation:
    """What dispatch found for an output, where PyTorch's attention can follow it."""
    if problem.dtype is DType.FLOAT8 and card is not None and card.arch < FLOAT8_ARCH:
        reason = f"{card.full_name} is sm_{card.arch}, and float8 kernels need sm_{FLOAT8_ARCH} or newer"
        return _without_kernel(reason, problem, lse).explanation
    if found.route == KERNEL or (not lse and pytorch_sdpa.why_not_sdpa(problem) is None):
        return found
    if found.variant is None:
        return _without_kernel(found.reason, problem, lse, found.steps).explanation
    return replace(found, route=KERNEL, reason=f"{found.reason}; but it gives no LSE, so the kernel runs")


def _why_not_both(output: Explanation, gradients: Explanation) -> str | None:
    """Why no kernels compute both passes; None when they do."""
    refused = gradient_problem.why_not_by(gradients)
    if refused is None and output.route != KERNEL:
        return f"no kernel computes the output: {output.reason}"
    return refused


def _with_gradients(output: Explanation, gradients: Explanation) -> Explanation:
    """The explanation of a call whose gradients are computed by a kernel too."""
    return replace(output, steps=(*output.steps, f"gradients: {gradients.reason}"))


def _without_gradients(
    refused: str | None, problem: Problem, lse: bool, gradients: Explanation, learned: Learned
) -> Plan:
    """PyTorch answers a call whose gradients no kernel computes."""
    reason = f"an input needs a gradient, and {refused}"
    return _without_kernel(reason, problem, lse, gradients.steps, learned=learned)


@cache
def _loaded(source: Source, index: int) -> compiler.Kernel:
    """Problems that differ only in sizes share a kernel; a growing key cache poses a new one at every step."""
    return compiler.load(source, torch.device("cuda", index))


def _without_kernel(
    reason: str, problem: Problem, lse: bool, steps: Sequence[str] = (), *, learned: Learned = NONE_LEARNED
) -> Plan:
    """PyTorch's own attention where it means the same, and else the formula in plain PyTorch."""
    found = cache_lookup.sdpa(reason, problem, steps)
    why_not = "it gives no LSE" if lse else pytorch_sdpa.why_not_sdpa(problem)
    if learned.bias:  # seen with torch 2.11: "LSE is not correctly aligned (strideH)", from the backward pass alone
        why_not = "its backward pass refuses some biases that need a gradient"
    if why_not is None:
        return Plan(found)
    return Plan(replace(found, route=pytorch_sdpa.EAGER, steps=(*found.steps, f"sdpa: {why_not}")))


def _repeating(plan: Plan) -> Plan:
    """PyTorch's answer with gradients that repeat to the bit."""
    step = "deterministic: both passes run with torch.use_deterministic_algorithms(True)"
    explanation = replace(plan.explanation, steps=(*plan.explanation.steps, step))
    return replace(plan, explanation=explanation, repeats=True)


def _why_no_kernel(problem: Problem, operands: Operands) -> str | None:
    """Why no kernel of ours may run, whatever was tuned; None when one may."""
    reason = _why_not_on(operands.query.device)
    if reason is not None:
        return reason
    tensors = _tensors(problem, operands)
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return "a tensor subclass has rules of its own"
    if not torch.finfo(torch.float32).tiny <= operands.scale <= MAX_SCALE:
        return f"the kernels need a positive scale that float32 can hold, got {operands.scale}"
    tiles = problem.tokens_q // 16 + problem.batch + 1 if problem.packed else problem.batch * -(-problem.seq_q // 16)
    if problem.heads_q * tiles > forward.MAX_TILES:
        return "the launch would need more than 2**31 - 1 programs"
    return None


def _why_not_on(device: torch.device) -> str | None:
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
