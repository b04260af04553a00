"""Looks up which cache entry serves a problem on a device, and why: exact, bucket, nearest, predicted, default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path

import torch
import triton

from autoattn.baselines.pytorch_sdpa import BACKENDS, SDPA
from autoattn.cache import availability, inventory, precedence, store
from autoattn.codegen import feasibility, search_space
from autoattn.codegen.feasibility import Judgement
from autoattn.codegen.space_facts import size_facts
from autoattn.core import size_class
from autoattn.core.cache_entry import KERNEL, CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Numerics, Op, Problem
from autoattn.core.variant import Variant
from autoattn.errors import SpaceError, UsageError
from autoattn.runtime.plan import tuned_entries

MIN_ARCH = 80  # Triton's tensor core path needs Ampere
ROUTES = (SDPA, *BACKENDS)  # of rivals that a call can take
NEVER_ALIKE = (SDPA, "sdpa-cudnn")  # rivals whose gradients may be cuDNN's, which never repeat to the bit
MAX_CLASSES = 4096  # of sizes, of one kind, whose answers are kept
FARTHEST = 8.0  # octaves, summed over lengths and heads, that a neighbour may be away


class Level(str, Enum):
    """How close what was found is to what was asked."""

    EXACT = "exact"  # this problem was measured on this card
    BUCKET = "bucket"  # a problem whose lengths and heads round to the same powers of two was
    NEAREST = "nearest"  # some problem with the same kernels was
    PREDICTED = "predicted"  # this problem was tuned for this kind of card without having one
    DEFAULT = "default"  # nothing was; the template's default runs
    SDPA = "sdpa"  # no kernel of ours can run


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What runs for a problem, and why."""

    problem: Problem | None
    route: str  # "kernel", or the name of the rival that runs: "sdpa", "sdpa-cudnn", ...
    level: Level
    reason: str  # one sentence
    steps: tuple[str, ...] = ()  # what was tried before, one sentence each
    entry: CacheEntry | None = None
    variant: Variant | None = None
    unavailable: str = ""  # why a tuned kernel that would serve cannot run with the installed Triton, and the way out
    chosen_for: Problem | None = None  # the problem that the choice was made for, where it holds for a class of sizes
    precompiled: str = ""  # which compiler made the kernel's machine code, where a cache folder has it
    gradients: Explanation | None = None  # of the backward pass, where a kernel computes it behind this one

    def __str__(self) -> str:
        ready = ", precompiled" if self.precompiled else ""
        return f"{self.route} ({self.levels}{ready}): {self.reason}"

    @property
    def levels(self) -> str:
        """The level; of a call whose gradients are a kernel's, that of each pass."""
        if self.gradients is None:
            return self.level.value
        return f"forward: {self.level.value}, backward: {self.gradients.level.value}"


def sdpa(reason: str, problem: Problem | None = None, steps: Sequence[str] = ()) -> Explanation:
    """The explanation of a call that PyTorch answers."""
    return Explanation(problem=problem, route=SDPA, level=Level.SDPA, reason=reason, steps=tuple(steps))


def explain(problem: Problem, device: Device | None, folder: Path | None = None) -> Explanation:
    """What would run for `problem` on `device`; None is the CPU.

    Reads the cache in `folder`, or the user's cache over the shipped one. Never tunes and never compiles.

    Raises:
        CacheError: a cache file is damaged or newer, or `folder` is no folder.
    """
    folders = inventory.folders(folder)
    if device is None:
        return sdpa("the tensors are on the CPU, where PyTorch's own attention runs", problem)
    return device_supported(device, problem) or _Lookup(problem, device, folders).answer()


def device_supported(device: Device, problem: Problem | None = None) -> Explanation | None:
    """The answer on cards that are too old for any kernel; None on others."""
    if device.arch >= MIN_ARCH:
        return None
    return sdpa(f"{device.full_name} is sm_{device.arch}, and the kernels need sm_{MIN_ARCH} or newer", problem)


def differentiates(device: Device | None) -> bool:
    """Whether any gradients were measured to be the fastest by a kernel on a device.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    if device is None:
        return False
    tuned = tuned_entries.read(Op.BACKWARD, device, inventory.folders(None))
    counting = (precedence.used_first(places, store.why_held_back)[0] for places in tuned.measured.values())
    return any(place.entry.choice == KERNEL for place in counting)


def variants(explanation: Explanation, device: Device | None) -> Iterator[Variant]:
    """What to compile for an explanation, best first; nothing when a rival runs.

    Whether a variant fits the card and how the tensors lie, only compiling tells; one that does not makes way for the
    seeds of the operation's templates.
    """
    if explanation.route != KERNEL or explanation.variant is None:
        return
    yield explanation.variant
    if explanation.problem is None or device is None:
        return
    for space in search_space.of(explanation.problem.op):
        for seed in space.seeds_for(explanation.problem, device):
            if seed != explanation.variant:
                yield seed


def without(explanation: Explanation, variant: Variant, reason: str) -> Explanation:
    """The explanation, once `variant` was refused."""
    return replace(explanation, steps=(*explanation.steps, f"{variant.template}: {reason}"))


def by(explanation: Explanation, variant: Variant) -> Explanation:
    """The explanation, once `variant` is what runs."""
    planned = explanation.variant
    if planned is None or variant == planned:
        return explanation
    if explanation.level is not Level.DEFAULT:
        reason = f"{explanation.reason}, but its kernel cannot run here, so a default of {variant.template} does"
        return replace(explanation, level=Level.DEFAULT, reason=reason, variant=variant)
    return replace(explanation, reason=_default_reason(variant.template), variant=variant)


def _default_reason(template: str) -> str:
    return f"no tuned entry can serve it, so a default of {template} runs; autoattn tune finds a better one"


class _Lookup:
    """One walk down the rules; what fails on the way is kept as steps."""

    def __init__(
        self, problem: Problem, device: Device, folders: tuple[Path, ...], *, represents: bool = False
    ) -> None:
        self.problem, self.device, self.folders = problem, device, folders
        # What was tuned for the problem itself says nothing of others in its class.
        self.keys = () if represents else _keys_of(problem)
        self.tuned = tuned_entries.of(problem, device, folders)
        self.sizes = size_facts(problem)
        self.infeasible: dict[int, str | None] = {}  # id of one of the tuned entries -> why, once asked
        self.steps: list[str] = list(self.tuned.foreign)
        self.unavailable = ""
        self._bucket: tuple[int, ...] | None = None  # once asked

    def answer(self) -> Explanation:
        """What was tuned for the problem itself, or else the answer of its class of sizes, which is worked out once.

        A kernel that cannot run at these sizes gives way to what their own walk finds.
        """
        if not any(key in self.tuned.measured or key in self.tuned.predicted for key in self.keys):
            smallest = size_class.representative(self.problem)
            answers = self.tuned.answers
            if (shared := answers.get(smallest)) is None:
                shared = _Lookup(smallest, self.device, self.folders, represents=True).run()
                if len(answers) >= MAX_CLASSES:
                    answers.clear()
                answers[smallest] = shared
            if shared.variant is None or self._may_run(shared.variant):
                level = shared.level if shared.entry is None else self._level_of(shared.entry)
                return replace(shared, problem=self.problem, level=level, chosen_for=smallest)
        return self.run()

    def _may_run(self, variant: Variant) -> bool:
        """Whether a kernel of the problem's class is feasible at its own sizes too."""
        judgement = search_space.load(variant.template).judgement_of(variant, self.problem, self.device)
        return judgement.why_not(self.sizes) is None

    def run(self) -> Explanation:
        """The answer of the first rule that has one; the last has one always."""
        rules = (self.exact_entry, self.near_entry, self.predicted_entry)
        explanation = next((answer for rule in rules if (answer := rule()) is not None), None)
        return replace(explanation or self.default_variant(), unavailable=self.unavailable)

    def exact_entry(self) -> Explanation | None:
        """The problem itself was measured on this card."""
        entries = [self._measurement(key) for key in self.keys if key in self.tuned.measured]
        if not entries:
            self.steps.append("exact: this problem was not measured on this card")
        return self._first(entries, Level.EXACT, "this problem was measured on this card")

    def near_entry(self) -> Explanation | None:
        """The closest measured problem that runs the same kernels; the same bucket is just a close one."""
        sizes = tuned_entries.sizes_of(self.problem)
        related = [
            (self._is_tuned_otherwise(key), octaves, key)
            for key, others in self.tuned.sizes.items()
            if key not in self.keys and (octaves := tuned_entries.distance(others, sizes)) <= FARTHEST
        ]
        excluded: Explanation | None = None
        # Those whose gradients were tuned as these are asked for come first, however far the others are.
        for _, octaves, key in sorted(related):
            entry = self._measurement(key)
            level = self._level_of(entry)
            reason = f"{self.tuned.name_of(entry)} is {octaves:.1f} octaves away and was measured on this card"
            answer = self._use(entry, level, reason)
            if answer is not None:
                return answer
            if excluded is None and (why := self._why_excluded(entry)) is not None:
                excluded = self._instead(entry, level, f"{reason}, but {why}")
        if excluded is not None:  # what was measured beside it, before a default that nobody measured
            return excluded
        self.steps.append("bucket, nearest: no measured problem on this card is close enough and shares these kernels")
        return None

    def _level_of(self, entry: CacheEntry) -> Level:
        """How close the entry of another problem is."""
        if self._bucket is None:
            self._bucket = bucket(self.problem)
        return Level.BUCKET if bucket(entry.problem) == self._bucket else Level.NEAREST

    def predicted_entry(self) -> Explanation | None:
        """The problem itself was predicted for this kind of card."""
        keys = [key for key in self.keys if key in self.tuned.predicted]
        entries = [precedence.used_first(self.tuned.predicted[key], self._why_not)[0].entry for key in keys]
        if not entries:
            self.steps.append("predicted: nobody predicted this problem for this kind of card")
        return self._first(entries, Level.PREDICTED, f"predicted for {self.device.name}, not measured")

    def default_variant(self) -> Explanation:
        """The default of the first template that has one."""
        for space in search_space.of(self.problem.op):
            try:
                variant = space.default(self.problem, self.device)
            except SpaceError as error:
                self.steps.append(f"default: {error}")
            else:
                return self._answer(KERNEL, Level.DEFAULT, _default_reason(space.template), variant=variant)
        return sdpa(self.steps.pop().removeprefix("default: "), self.problem, self.steps)

    def _measurement(self, key: str) -> CacheEntry:
        """The measured entry of a problem that counts; one that cannot serve this problem gives way to one that can."""
        return precedence.used_first(self.tuned.measured[key], self._why_not)[0].entry

    def _is_tuned_otherwise(self, key: str) -> bool:
        """Whether gradients were tuned to repeat to the bit where these need not, or need not where these must."""
        return self.tuned.measured[key][0].entry.problem.deterministic is not self.problem.deterministic

    def _answer(
        self, route: str, level: Level, reason: str, *, variant: Variant | None, entry: CacheEntry | None = None
    ) -> Explanation:
        """An explanation with the steps so far."""
        return Explanation(
            problem=self.problem,
            route=route,
            level=level,
            reason=reason,
            steps=tuple(self.steps),
            entry=entry,
            variant=variant,
        )

    def _first(self, entries: list[CacheEntry], level: Level, reason: str) -> Explanation | None:
        """The first that can serve."""
        return next((answer for entry in entries if (answer := self._use(entry, level, reason)) is not None), None)

    def _use(self, entry: CacheEntry, level: Level, reason: str) -> Explanation | None:
        """The entry as an answer, or a step that says why it is none."""
        worthless = self._why_worthless(entry)
        infeasible = None if worthless is not None else self._why_infeasible(entry)
        why_not = worthless or infeasible or self._why_unrepeated(entry)
        if why_not is not None:
            self.steps.append(f"{level.value}: {self.tuned.name_of(entry)} cannot serve, {why_not}")
            self.unavailable = self.unavailable or availability.why_unavailable(entry) or ""
            words = "its kernel cannot run here" if infeasible else why_not
            served = level is Level.EXACT and (not worthless or self._why_excluded(entry) is not None)
            return self._instead(entry, level, f"{reason}, but {words}") if served else None
        tuned_with = entry.versions.get("triton")
        if tuned_with != triton.__version__:
            self.steps.append(f"{entry.problem} was tuned with Triton {tuned_with}, this is {triton.__version__}")
        if entry.mark is not None:
            self.steps.append(f"{entry.problem} is marked, {entry.mark}; run autoattn tune again")
            if entry.mark.choice in ROUTES:
                reason += f", and {entry.mark.choice} was the fastest when it was verified"
                return self._answer(entry.mark.choice, level, reason, variant=entry.variant, entry=entry)
        if entry.choice != KERNEL:
            if (release := entry.versions.get("torch")) != str(torch.__version__):
                self.steps.append(f"{entry.choice} was the fastest with torch {release}, this is {torch.__version__}")
            rival = next((rival for rival in entry.rivals if rival.name == entry.choice), None)
            gain = f", {entry.time_us / rival.measurement.median_us:.2f}x faster than the kernel" if rival else ""
            reason += f", and {entry.choice} was the fastest{gain}"
        return self._answer(entry.choice, level, reason, variant=entry.variant, entry=entry)

    def _why_excluded(self, entry: CacheEntry) -> str | None:
        """Why an entry's kernel must not run here though its times hold; a default may be the same one, or slower."""
        if entry.mark is not None and entry.mark.holds_back:
            return "its kernel is marked"
        if availability.why_unavailable(entry) is None or store.why_stale(entry) is not None:
            return None
        return "its kernel cannot run here"

    def _instead(self, entry: CacheEntry, level: Level, reason: str) -> Explanation | None:
        """The fastest of what was measured beside a choice that cannot serve here: kernels and rivals."""
        seeds = (
            seed for space in search_space.of(self.problem.op) for seed in space.seeds_for(self.problem, self.device)
        )
        seed = next(seeds, None)  # for calls that ask for more than a rival gives
        # A rival that may repeat itself takes at least the time that it takes when it need not.
        routes = [name for name in ROUTES if not self._is_looser(entry) or name not in NEVER_ALIKE]
        choices = [(rival.measurement.median_us, rival.name, seed) for rival in entry.rivals if rival.name in routes]
        if self._why_not(entry) is None:
            choices.append((entry.time_us, KERNEL, entry.variant))
        for candidate in entry.candidates:
            alike = replace(
                entry, template=candidate.template, params=candidate.params, source_digest=candidate.source_digest
            )
            if self._why_not(alike) is None:
                choices.append((candidate.time_us, KERNEL, candidate.variant))
        if not choices:
            return None
        _, route, variant = min(choices, key=lambda choice: choice[0])
        words = route
        if route == KERNEL and variant is not None:
            words = f"{'its kernel' if variant == entry.variant else 'a runner-up'} of {variant.template}"
        return self._answer(route, level, f"{reason}; {words} was the fastest beside it", variant=variant, entry=entry)

    def _why_not(self, entry: CacheEntry) -> str | None:
        return self._why_worthless(entry) or self._why_infeasible(entry)

    def _why_worthless(self, entry: CacheEntry) -> str | None:
        """Why nothing may rest on an entry."""
        if (reason := self.tuned.why_held_back(entry)) is not None:
            return reason
        if entry.choice not in (KERNEL, *ROUTES):
            return f"its choice {entry.choice} is none of PyTorch's backends"
        return None

    def _is_looser(self, entry: CacheEntry) -> bool:
        """Whether gradients must repeat to the bit here, and needed not where the entry was tuned."""
        return self.problem.deterministic and not entry.problem.deterministic

    def _why_unrepeated(self, entry: CacheEntry) -> str | None:
        """Why an entry's choice says nothing of gradients that must repeat to the bit."""
        chosen = entry.mark.choice if entry.mark is not None and entry.mark.choice in ROUTES else entry.choice
        if not self._is_looser(entry) or chosen == KERNEL:
            return None
        return f"{chosen} was timed there with gradients that may differ from run to run"

    def _why_infeasible(self, entry: CacheEntry) -> str | None:
        if id(entry) in self.infeasible:
            return self.infeasible[id(entry)]
        try:
            reason = self._judgement_of(entry).why_not(self.sizes)
        except UsageError as error:
            return str(error)
        if id(entry) in self.tuned.entries:
            self.infeasible[id(entry)] = reason
        return reason

    def _judgement_of(self, entry: CacheEntry) -> Judgement:
        """What the rules say of an entry's kernel for problems of this kind; made once for each of the tuned entries.

        Raises:
            UsageError: there is no such template by now, or its parameters are others.
        """
        key = id(entry), self.problem.numerics, self.problem.deterministic
        if (known := self.tuned.judgements.get(key)) is not None:
            return known
        problem = self.problem
        if entry.problem.deterministic and not problem.deterministic:  # gradients that repeat are as good as any
            problem = replace(problem, deterministic=True)
        space = search_space.load(entry.template)
        judgement = space.judgement_of(entry.variant, problem, self.device)
        if (reason := space.why_unavailable()) is not None:
            judgement = replace(judgement, sized=(), refusal=reason)
        if id(entry) in self.tuned.entries:
            judgement = self.tuned.judgements[key] = feasibility.specialised(judgement)
        return judgement


@lru_cache(maxsize=4096)
def bucket(problem: Problem) -> tuple[int, ...]:
    """Lengths, keys that a query sees, and heads, rounded up to powers of two."""
    sizes = (*tuned_entries.sizes_of(problem), problem.seq_kv)
    return tuple((max(1, int(size)) - 1).bit_length() for size in sizes)


def distance(problem: Problem, other: Problem) -> float:
    """Octaves between two problems, summed over queries of a sequence, keys, heads and group size."""
    return tuned_entries.distance(tuned_entries.sizes_of(problem), tuned_entries.sizes_of(other))


def _keys_of(problem: Problem) -> tuple[str, ...]:
    """The keys of entries that speak of a problem itself, the problem's own first.

    What was tuned for any numerics serves online ones too, unless its kernel is one that they exclude; what was tuned
    for any gradients serves deterministic ones likewise.
    """
    if problem.numerics is Numerics.ANY and not problem.deterministic:
        return (problem.key,)
    problems = [problem, replace(problem, numerics=Numerics.ANY)]
    problems += [replace(tuned, deterministic=False) for tuned in problems]
    return tuple(dict.fromkeys(tuned.key for tuned in problems))
