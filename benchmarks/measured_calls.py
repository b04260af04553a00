"""Measures variants of many problems in one process: each variant passes the gate, the best meet in rounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.search import finals, multi_template
from autoattn.search.gpu_jobs import Finished
from autoattn.search.multi_template import Contest
from autoattn.search.search_options import Objective
from autoattn.search.study import Study
from autoattn.search.trial_pipeline import Steps, Workshop
from autoattn.workers.worker_pool import Failure

AT_ONCE = 8  # problems whose variants are measured together, so that compilers and the GPU both have work
# Of their operands, unless one problem alone has more: as much as a worker keeps (`gpu_jobs.KEPT_SHARE`) of the 80 GB
# of an H100. What it does not keep it makes again for each variant.
MOST_BYTES = 8e9
FINAL_SECONDS = 0.35
COMPILED_AHEAD = 16  # problems whose variants are compiled together
COMPILE_SHARE = 0.6  # of the time, after which no compile is begun: short calls are measured in what is left
T = TypeVar("T")


class Subject:
    """One problem on its way."""

    def __init__(
        self, problem: Problem, device: Device, variants: Sequence[Variant], finalists: int, *, short: bool = False
    ) -> None:
        """Of the variants, `finalists` at most meet in rounds; `short` says that looks need idle cores."""
        self.problem, self.device, self.variants, self.finalists = problem, device, variants, finalists
        self.short = short
        self.trials: list[Trial] = []

    def steps(self, shop: Workshop) -> Steps[dict[str, Any] | str]:
        """Its line of the file, or in words why there is none."""
        spaces = multi_template.spaces(self.problem, self.device, True)
        study = Contest([Study(None, space, self.problem, self.device, seed=0, budget=0) for space in spaces])
        study.enqueue(self.variants)
        yield from shop.search(study, more=lambda: study.waiting, late=lambda: False, heard=self.trials.append)
        working = [trial for trial in self.trials if trial.outcome is Outcome.OK]
        if not working:
            return "no variant worked"
        best = [trial.variant for trial in finals.shortlist(working, self.finalists, Objective.TIME)]
        result = yield from shop.final(self.problem, best, seconds=FINAL_SECONDS, seed=0, energy_seconds=0.0)
        if isinstance(result, Failure):
            return f"the finals ended with a {result.outcome.value}: {result.detail}"
        return line(self.problem, best, result)


def line(problem: Problem, best: Sequence[Variant], result: Finished) -> dict[str, Any]:
    """What a file keeps of a problem: the times of its finalists and of its rivals."""
    times: dict[Variant, float] = {}
    for variant, measurement in zip(best, result.measurements, strict=True):
        if measurement is not None:
            times[variant] = measurement.median_us
    return {
        "problem": msgspec.to_builtins(problem),
        "times_us": [[variant.template, variant.as_dict(), round(time_us, 2)] for variant, time_us in times.items()],
        "rivals_us": {rival.name: round(rival.measurement.median_us, 2) for rival in result.rivals},
    }


def lines(subjects: Iterator[Subject], end: float, device: Device) -> Iterator[tuple[Problem, dict[str, Any] | str]]:
    """Measures several problems at a time until all is done; after `end` none is begun."""
    with Workshop(device, measured=True) as shop:
        active: list[tuple[Subject, Steps[dict[str, Any] | str]]] = []
        while True:
            while len(active) < AT_ONCE and time.monotonic() < end:
                subject = next(subjects, None)
                if subject is None:
                    break
                active.append((subject, subject.steps(shop)))
            if not active:
                return
            finished, active = _stepped(active)
            for subject, result in finished:
                yield subject.problem, result
            if not finished:
                shop.wait()


class Staged:
    """Measures long calls while compilers are at work, and short ones on idle cores once they are done.

    While compilers take all cores, first looks at kernels of some 10 us are wrong by factors.
    """

    def __init__(self, subjects: Sequence[Subject], seconds: float, device: Device) -> None:
        """After `seconds` no problem is begun."""
        self._coming = deque(subjects)
        self._seconds, self._device, self._begun = seconds, device, time.monotonic()
        self._compiling: list[tuple[Subject, Steps[list[Variant]]]] = []
        self._active: list[tuple[Subject, Steps[dict[str, Any] | str]]] = []
        self._long: deque[Subject] = deque()
        self._short: deque[Subject] = deque()

    def lines(self) -> Iterator[tuple[Problem, dict[str, Any] | str]]:
        """Each problem with its line of the file, or with the reason why it has none."""
        with Workshop(self._device, measured=True) as shop:
            while True:
                self._begin(shop)
                if not (self._active or self._compiling):
                    return
                compiled, self._compiling = _stepped(self._compiling)
                for subject, _ in compiled:
                    (self._short if subject.short else self._long).append(subject)
                finished, self._active = _stepped(self._active)
                for subject, result in finished:
                    yield subject.problem, result
                if not (compiled or finished):
                    shop.wait()

    def _begin(self, shop: Workshop) -> None:
        passed = time.monotonic() - self._begun
        if passed > COMPILE_SHARE * self._seconds:
            self._coming.clear()
        while self._coming and len(self._compiling) < COMPILED_AHEAD:
            subject = self._coming.popleft()
            self._compiling.append((subject, shop.compiled(subject.problem, subject.variants)))
        while len(self._active) < AT_ONCE and passed < self._seconds:
            idle = not (self._compiling or self._coming)
            ready = self._long or (self._short if idle else None)
            first = self._take_first(ready) if ready else None
            if first is None:
                return
            self._active.append((first, first.steps(shop)))

    def _take_first(self, ready: deque[Subject]) -> Subject | None:
        """Takes the first that has room beside those that are measured; anything has room alone."""
        room = MOST_BYTES - sum(subject.problem.bytes() for subject, _ in self._active)
        for subject in ready:
            if not self._active or subject.problem.bytes() <= room:
                ready.remove(subject)
                return subject
        return None


def _stepped(
    running: Sequence[tuple[Subject, Steps[T]]],
) -> tuple[list[tuple[Subject, T]], list[tuple[Subject, Steps[T]]]]:
    """Those of which a step more was the last, with their results, and the others."""
    finished, going = [], []
    for subject, steps in running:
        try:
            next(steps)
        except StopIteration as end:
            finished.append((subject, end.value))
        else:
            going.append((subject, steps))
    return finished, going
