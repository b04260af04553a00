"""Decides which kernel, or which backend of PyTorch, answers a call, and why: rules in order, each with a name.

One pass goes down the rules of `cache_lookup`: device_supported, exact_entry, near_entry, sister_entry,
predicted_entry, default_variant. Then come the rules here, which know of the whole call:

- float8_supported: the card multiplies float8.
- pytorch_can_say_it: where PyTorch's attention was the fastest, it must be able to say the call; else the kernel runs,
  or the formula.
- gradients_need_kernel: where PyTorch's gradients were the fastest, it must be able to say the call, and without a mask
  of all pairs unless this very problem was measured; else the kernel runs.
- pytorch_believed_faster: PyTorch's attention runs plain training calls that nobody tuned, where its gradients are
  believed faster than a template's default.
- both_passes_agree: kernels run both passes of a call that somebody differentiates, or PyTorch does.
- launch_bound: PyTorch's attention runs training steps that wait for the CPU.

Nothing is compiled. `planner` compiles what is decided, and falls back where that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autoattn.baselines import pytorch_sdpa
from autoattn.codegen import render
from autoattn.core.cache_entry import KERNEL
from autoattn.core.device import Device
from autoattn.core.modifiers import Bias
from autoattn.core.problem import Op, Problem
from autoattn.runtime.plan import (
    cache_lookup,
    default_gradients,
    explanations,
    gradient_problem,
    host_bound,
    machine_code,
)
from autoattn.runtime.plan.explanations import Explanation, Level
from autoattn.runtime.plan.gradient_problem import NONE_LEARNED, Learned
from autoattn.runtime.plan.reasons import Text
from autoattn.runtime.plan.tuned_entries import TunedEntries


def explain(
    problem: Problem, card: Device | None, folder: Path | None = None, *, lse: bool = False, training: bool = False
) -> Explanation:
    """What a call of a problem gets on a card, and why.

    There are no tensors, so that a kernel that does not compile, or does not take a memory layout, is not seen.

    Args:
        problem: of the output, or of the gradients.
        card: None is the CPU.
        folder: the only cache to read; the user's over the shipped one when None.
        lse: whether the call returns the LSE too.
        training: whether inputs need gradients; both passes are then decided together, and `problem` may be either.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    explanation = _explain(problem, card, folder, lse=lse, training=training)
    gradients = explanation.gradients
    if gradients is not None:
        explanation = replace(explanation, gradients=_with_machine_code(gradients, card, folder, lse=lse))
    wants_lse = problem.op is Op.FORWARD and (lse or training)
    return _with_machine_code(explanation, card, folder, lse=wants_lse or gradients is not None)


def _with_machine_code(explanation: Explanation, card: Device | None, folder: Path | None, *, lse: bool) -> Explanation:
    """The explanation of a kernel; with the compiler that made its machine code where a cache folder has it."""
    problem, variant = explanation.problem, explanation.variant
    if explanation.route != KERNEL or card is None or problem is None or variant is None:
        return explanation
    kernel = machine_code.find(problem, variant, render.natural_traits(problem, lse=lse), card.arch, folder)
    return explanation if kernel is None else replace(explanation, precompiled=str(kernel))


def _explain(problem: Problem, card: Device | None, folder: Path | None, *, lse: bool, training: bool) -> Explanation:
    """Who answers, whatever machine code there is."""
    if problem.op is Op.BACKWARD and not training:
        return cache_lookup.explain(problem, card, folder)
    output = replace(problem, op=Op.FORWARD, deterministic=False)
    explanation = of_output(output, card, folder, lse=lse or training)
    if not training:
        return explanation
    backward = problem if problem.op is Op.BACKWARD else gradient_problem.backward_of(problem)
    learned = Learned(bias=backward.modifiers.bias is Bias.LEARNED, slopes=backward.modifiers.learned_slopes)
    gradients = of_gradients(backward, card, folder, lse=lse)
    refused = why_not_both(explanation, gradients)
    if card is None:
        without = without_kernel(explanation.reason, output, lse=lse, learned=learned)
    elif (believed := pytorch_believed_faster(output, gradients, card, lse=lse)) is not None:
        return believed
    elif refused is not None:
        without = without_gradients(refused, output, gradients, lse=lse, learned=learned)
    else:
        both = with_gradients(explanation, gradients)
        return launch_bound(both, gradients, deterministic=backward.deterministic, lse=lse) or both
    return repeated(without) if backward.deterministic else without


def of_output(
    problem: Problem, card: Device | None, folder: Path | None = None, *, lse: bool, tuned: TunedEntries | None = None
) -> Explanation:
    """Who computes an output, and the LSE where it is wanted.

    Args:
        tuned: the entries of the problem's kind on the card, where they are known; no folder is read then.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    explanation = _looked_up(problem, card, folder, tuned)
    return _float8_supported(problem, card, lse=lse) or _pytorch_can_say_it(problem, explanation, lse=lse)


def of_gradients(
    problem: Problem, card: Device | None, folder: Path | None = None, *, lse: bool, tuned: TunedEntries | None = None
) -> Explanation:
    """Who computes the gradients of a call.

    Args:
        problem: backward.
        lse: whether the call returns the LSE, which then has a gradient too.
        tuned: as of `of_output`.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    explanation = _looked_up(problem, card, folder, tuned)
    if explanation.route == KERNEL or explanation.variant is None:
        return explanation
    why_not = _why_not_differentiated(problem, lse=lse, learns_bias=problem.modifiers.bias is Bias.LEARNED)
    if why_not is None and explanation.level is not Level.EXACT and pytorch_sdpa.is_mask_written_out(problem):
        why_not = "it takes a mask of all pairs, which was not measured at these sizes"
    if why_not is None:
        return explanation
    reasons = explanation.reasons.because(lambda: f"{explanation.reason}; but {why_not}, so the kernel runs")
    return replace(explanation, route=KERNEL, reasons=reasons)


def _looked_up(problem: Problem, card: Device | None, folder: Path | None, tuned: TunedEntries | None) -> Explanation:
    if tuned is not None:
        return cache_lookup.explain_among(problem, tuned)
    return cache_lookup.explain(problem, card, folder)


def _why_not_differentiated(problem: Problem, *, lse: bool, learns_bias: bool) -> str | None:
    """Why PyTorch's attention does not answer a call that somebody may differentiate; None where it does."""
    if learns_bias:  # seen with torch 2.11: "LSE is not correctly aligned (strideH)", from the backward pass alone
        return "its backward pass refuses some biases that need a gradient"
    return pytorch_sdpa.why_not_call(problem, lse=lse)


def pytorch_believed_faster(
    problem: Problem, gradients: Explanation, card: Device | None, *, lse: bool
) -> Explanation | None:
    """PyTorch's attention for a plain call that nobody tuned; None where kernels differentiate it.

    Args:
        problem: forward.
        lse: whether the LSE has a gradient, which PyTorch's attention does not give.
    """
    backward = gradients.problem
    if lse or card is None or backward is None or backward.deterministic:
        return None
    return default_gradients.answer(problem, gradients, card)


def _float8_supported(problem: Problem, card: Device | None, *, lse: bool) -> Explanation | None:
    if not problem.loads_float8 or card is None or card.capabilities.float8_products:
        return None
    reason = f"{card.full_name} is sm_{card.arch}, and float8 kernels need sm_89 or newer"
    return without_kernel(reason, problem, lse=lse)


def _pytorch_can_say_it(problem: Problem, explanation: Explanation, *, lse: bool) -> Explanation:
    if explanation.route == KERNEL or pytorch_sdpa.why_not_call(problem, lse=lse) is None:
        return explanation
    if explanation.variant is None:
        return without_kernel(explanation.reason, problem, lse=lse, steps=explanation.reasons.texts)
    reasons = explanation.reasons.because(lambda: f"{explanation.reason}; but it gives no LSE, so the kernel runs")
    return replace(explanation, route=KERNEL, reasons=reasons)


def why_not_both(output: Explanation, gradients: Explanation) -> str | None:
    """Why no kernels compute both passes; None when they do."""
    refused = gradient_problem.why_not_by(gradients)
    if refused is None and output.route != KERNEL:
        return f"no kernel computes the output: {output.reason}"
    return refused


def with_gradients(output: Explanation, gradients: Explanation) -> Explanation:
    """The explanation of a call whose gradients are computed by a kernel too."""
    of_class = output.chosen_for if gradients.chosen_for is not None else None
    reasons = output.reasons.after(lambda: f"gradients: {gradients.reason}")
    return replace(output, reasons=reasons, gradients=gradients, chosen_for=of_class)


def launch_bound(output: Explanation, gradients: Explanation, *, deterministic: bool, lse: bool) -> Explanation | None:
    """PyTorch's attention for a call whose kernels wait for the CPU; None where the kernels run.

    Args:
        deterministic, lse: whether gradients repeat to the bit, and whether the LSE has one: PyTorch's attention does
            neither.
    """
    return None if deterministic or lse else host_bound.answer(output, gradients)


def in_place_of_kernels(problem: Problem, card: Device | None) -> Explanation | None:
    """PyTorch's attention for a call that may be differentiated, where it is chosen in place of kernels that there are.

    Args:
        problem: forward, of a call that wants neither an LSE nor gradients that repeat to the bit.
    """
    output = cache_lookup.explain(problem, card)
    gradients = cache_lookup.explain(gradient_problem.backward_of(problem), card)
    believed = pytorch_believed_faster(problem, gradients, card, lse=False)
    return believed or launch_bound(output, gradients, deterministic=False, lse=False)


def without_gradients(
    refused: str | None, problem: Problem, gradients: Explanation, *, lse: bool, learned: Learned
) -> Explanation:
    """PyTorch answers a call whose gradients no kernel computes."""
    reason = f"an input needs a gradient, and {refused}"
    return without_kernel(reason, problem, lse=lse, steps=gradients.reasons.texts, learned=learned)


def without_kernel(
    reason: str, problem: Problem, *, lse: bool, steps: Sequence[Text] = (), learned: Learned = NONE_LEARNED
) -> Explanation:
    """PyTorch's own attention where it means the same, and else the formula in plain PyTorch."""
    explanation = explanations.of_sdpa(reason, problem, steps)
    why_not = _why_not_differentiated(problem, lse=lse, learns_bias=learned.bias)
    if why_not is None:
        return explanation
    return replace(explanation, route=pytorch_sdpa.EAGER, reasons=explanation.reasons.after(f"sdpa: {why_not}"))


def repeated(explanation: Explanation) -> Explanation:
    """PyTorch's answer with gradients that repeat to the bit."""
    step = "deterministic: both passes run with torch.use_deterministic_algorithms(True)"
    return replace(explanation, reasons=explanation.reasons.after(step))
