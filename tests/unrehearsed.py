"""The command line with a tuner that takes every kernel for right, so that nothing waits for the interpreter."""

from __future__ import annotations

from autoattn import cli
from autoattn.problem import Problem
from autoattn.trial import Verdict
from autoattn.variant import Variant
from autoattn.workers import Failure
from autoattn.workshop import Workshop

GOOD = Verdict(ok=True, checks=10, max_error=1e-3, rms_error=1e-4, allowed=4e-3)


def rehearse(self: Workshop, problem: Problem, *variants: Variant) -> list[Verdict | Failure]:
    return [GOOD for _ in variants]


if __name__ == "__main__":
    Workshop.rehearse = rehearse  # type: ignore[method-assign]
    cli.main()
