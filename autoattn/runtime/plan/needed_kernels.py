"""The kernels that calls of a problem need: the output, the output with the LSE, and the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from autoattn.codegen import render
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem
from autoattn.core.variant import Source, Traits
from autoattn.errors import CompileError
from autoattn.runtime.plan import cache_lookup, decision, gradient_problem
from autoattn.runtime.plan.explanations import Explanation


class Answer(str, Enum):
    """What a kernel gives."""

    OUTPUT = "output"
    OUTPUT_AND_LSE = "output and LSE"
    GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One answer of a call on contiguous tensors, and who gives it."""

    problem: Problem
    answer: Answer
    traits: Traits
    explanation: Explanation

    def sources(self, card: Device) -> Iterator[Source]:
        """The kernels in the order in which a call tries them; none where PyTorch's attention answers."""
        for variant in cache_lookup.variants(self.explanation, card):
            try:
                yield render.render(self.problem, variant, self.traits)
            except CompileError:  # the next one takes such tensors
                continue


def of_call(problem: Problem, card: Device, folder: Path | None = None) -> list[Need]:
    """What calls of a problem need, with gradients where kernels compute both passes.

    Args:
        problem: of the output, or of the gradients of such a call.
        folder: the only cache to read; the user's over the shipped one when None.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    output = replace(problem, op=Op.FORWARD, deterministic=False)
    needs = [
        Need(
            problem=output,
            answer=Answer.OUTPUT_AND_LSE if lse else Answer.OUTPUT,
            traits=render.natural_traits(output, lse=lse),
            explanation=decision.of_output(output, card, folder, lse=lse),
        )
        for lse in (False, True)
    ]
    if output.cache is not None:  # whose attention gives no gradients
        return needs
    backward = problem if problem.op is Op.BACKWARD else gradient_problem.backward_of(output)
    gradients = decision.of_gradients(backward, card, folder, lse=False)
    believed = decision.pytorch_believed_faster(output, gradients, card, lse=False)
    if believed is None and decision.why_not_both(needs[1].explanation, gradients) is None:
        traits = render.natural_traits(backward)
        needs.append(Need(problem=backward, answer=Answer.GRADIENTS, traits=traits, explanation=gradients))
    return needs
