"""Records the outcome of every variant of a search space, so that a search can be replayed without a GPU.

JSON Lines. The first line says of what, where and with which versions; each other line is one variant. A recording
holds measured times or predicted ones, never both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from autoattn.codegen.search_space import SearchSpace
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Evidence, Measurement, Outcome, Prediction, StaticReport, Trial
from autoattn.core.variant import Value, Variant
from autoattn.errors import UsageError

FORMAT = 1
NOT_RECORDED = "nobody recorded this variant"


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One variant. Its time is in microseconds, and null unless the outcome is ok."""

    params: dict[str, int | str]
    outcome: Outcome
    time_us: float | None
    report: StaticReport | None = None


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a recording is of: its first line."""

    recording: int  # the format
    template: str  # names the parameters' origin; a recording of an older kernel has a name of its own
    problem: Problem
    device: str  # the name of a profile
    evidence: Evidence  # what all times rest on
    versions: dict[str, str]  # package -> version that made the kernels
    source: str  # where the times are from, in words


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Each variant of one template that was tried for a problem on a device, and what became of it."""

    header: Header
    trials: dict[Variant, Trial]

    def __post_init__(self) -> None:
        if not any(trial.time_us is not None for trial in self.trials.values()):
            raise UsageError(
                f"a recording must hold a variant that worked, got none among {len(self.trials)}; record more"
            )

    @property
    def best_us(self) -> float:
        """The shortest recorded time, in microseconds."""
        return min(trial.time_us for trial in self.trials.values() if trial.time_us is not None)

    @cached_property
    def space(self) -> RecordedSpace:
        """The search space that is the recorded variants."""
        choices: dict[str, set[Value]] = {}
        for variant in self.trials:
            for name, value in variant.params:
                choices.setdefault(name, set()).add(value)
        return RecordedSpace(
            template=self.header.template,
            interpreted=False,
            triton=(),
            digest="",
            # Numbers in their order and words in theirs: a neighbour of a value means something.
            choices={
                name: tuple(sorted(values, key=lambda v: (isinstance(v, str), v))) for name, values in choices.items()
            },
            about={},
            let={},
            require=(),
            seeds=(),
            fixed={},
            recorded=tuple(self.trials),
            known=frozenset(self.trials),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedSpace(SearchSpace):
    """A search space whose feasible points are those that were recorded."""

    recorded: tuple[Variant, ...]
    known: frozenset[Variant]

    def why_infeasible(self, variant: Variant, problem: Problem, device: Device) -> str | None:
        """That it was not recorded; None when it was."""
        return None if variant in self.known else NOT_RECORDED

    def feasible(self, problem: Problem, device: Device, rng: random.Random | None = None) -> Iterator[Variant]:
        """Every recorded variant, in the recording's order or, with `rng`, in a random one."""
        if rng is None:
            yield from self.recorded
            return
        left = list(self.recorded)
        while left:
            place = rng.randrange(len(left))
            left[place], left[-1] = left[-1], left[place]
            yield left.pop()


def trial_of(
    problem: Problem,
    evidence: Evidence,
    variant: Variant,
    outcome: Outcome,
    time_us: float | None,
    report: StaticReport | None = None,
) -> Trial:
    """A trial that says what a recording knows: outcome, time in microseconds, and what the machine code says."""
    trial = Trial(variant=variant, outcome=outcome, digest=variant.digest, report=report)
    if time_us is None:
        return trial
    if evidence is Evidence.PREDICTED:
        return replace(trial, prediction=Prediction(time_us=time_us, bound="", parts_us={}, occupancy=0, waves=0.0))
    tflops = problem.flops() / time_us / 1e6
    looked = Measurement(median_us=time_us, p20_us=time_us, p80_us=time_us, samples=1, tflops=tflops)
    return replace(trial, measurement=looked)


def of_trials(
    trials: Iterable[Trial],
    *,
    problem: Problem,
    device: str,
    evidence: Evidence,
    versions: dict[str, str],
    source: str,
    reports: bool = False,
) -> Recording:
    """The recording of a study's trials, all of one template; with what their machine code says, if `reports`.

    Raises:
        UsageError: the trials are of several templates, none worked, or one's time does not rest on `evidence`.
    """
    records: dict[Variant, Trial] = {}
    for trial in trials:
        time_us = trial.time_us
        if trial.outcome is Outcome.OK and (trial.measurement is not None) != (evidence is Evidence.MEASURED):
            raise UsageError(
                f"a recording must hold {evidence.value} times alone, got another one of {trial.variant}; "
                "keep the two apart"
            )
        report = trial.report if reports else None
        records[trial.variant] = trial_of(problem, evidence, trial.variant, trial.outcome, time_us, report)
    templates = sorted({variant.template for variant in records})
    if len(templates) > 1:
        raise UsageError(f"a recording must be of one template, got {', '.join(templates)}; record each by itself")
    header = Header(
        recording=FORMAT,
        template=templates[0] if templates else "",
        problem=problem,
        device=device,
        evidence=evidence,
        versions=versions,
        source=source,
    )
    return Recording(header=header, trials=records)


def write(recording: Recording, path: Path) -> None:
    """Writes the file, a variant a line."""
    lines = [
        _Line(params=variant.as_dict(), outcome=trial.outcome, time_us=trial.time_us, report=trial.report)
        for variant, trial in recording.trials.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (recording.header, *lines)))


def read(path: Path) -> Recording:
    """Reads a file that `write` wrote.

    Raises:
        UsageError: the file cannot be read or is no recording; the sentence names the line.
    """
    number = 0
    try:
        lines = path.read_bytes().splitlines()
        number = 1
        header = msgspec.json.decode(lines[0] if lines else b"", type=Header)
        if header.recording != FORMAT:
            raise ValueError(f"its format is {header.recording}")
        trials: dict[Variant, Trial] = {}
        for text in lines[1:]:
            number += 1
            line = msgspec.json.decode(text, type=_Line)
            variant = Variant.of(header.template, dict(line.params))
            _check(line, variant, trials)
            trials[variant] = trial_of(
                header.problem, header.evidence, variant, line.outcome, line.time_us, line.report
            )
    except (OSError, ValueError, UsageError) as error:  # msgspec's errors are ValueErrors
        words = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path} must be a recording of format {FORMAT}, but in line {number} {words}; record it again"
        ) from None
    return Recording(header=header, trials=trials)


def _check(line: _Line, variant: Variant, before: dict[Variant, Trial]) -> None:
    timed = line.time_us is not None and math.isfinite(line.time_us) and line.time_us > 0
    if timed != (line.outcome is Outcome.OK):
        raise ValueError(f"the outcome is {line.outcome.value} and the time {line.time_us}")
    if variant in before:
        raise ValueError(f"{variant} stands a second time")
    if before and {name for name, _ in variant.params} != {name for name, _ in next(iter(before)).params}:
        raise ValueError(f"{variant} has other parameters than the variants before it")
