"""Looks up which cache entry serves a problem on a device, and why: rules in order, a level each (`Level`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
import triton

from autoattn.baselines.pytorch_sdpa import SDPA
from autoattn.cache import inventory, precedence, store
from autoattn.cache.precedence import Placed
from autoattn.codegen import portfolio, search_space
from autoattn.codegen.space_facts import size_facts
from autoattn.core import size_class
from autoattn.core.cache_entry import KERNEL, CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Numerics, Op, Problem, sizes_of
from autoattn.core.variant import Variant
from autoattn.runtime.plan import explanations, lookup_sentences, tuned_entries
from autoattn.runtime.plan.explanations import Explanation, Level
from autoattn.runtime.plan.kind_rules import ROUTES, Contender, KindRules
from autoattn.runtime.plan.reasons import Reasons, Text
from autoattn.runtime.plan.tuned_entries import Neighbour, TunedEntries

MIN_ARCH = 80  # Triton's tensor core path needs Ampere
NEVER_ALIKE = (SDPA, "sdpa-cudnn")  # rivals whose gradients may be cuDNN's, which never repeat to the bit
MAX_CLASSES = 4096  # of sizes, of one kind, whose answers are kept
FARTHEST = 8.0  # octaves, summed over lengths and heads, that a neighbour may be away
# The same where the portfolio was measured. Farther away, a neighbour's winner takes more time than the portfolio's
# variant, in the mean of measured pairs (benchmarks/near_limit.py, decisions/near-limit.md).
NEAR = 0.25
SISTER_OCTAVES = 1.0  # that a sister card's problem counts as farther away than one of this card
# Octaves on caches, whose winners share tiles among as many programs as their sizes ask for (decisions/key-caches.md).
NEAR_CACHE = 0.5
# Octaves of gradients of keys that query heads share: how many heads a program should walk differs from size to size,
# and seeds that were measured tell it (decisions/shared-key-gradients.md).
NEAR_SHARED_KEYS = 1.0


def explain(problem: Problem, device: Device | None, folder: Path | None = None) -> Explanation:
    """What would run for `problem` on `device`; None is the CPU.

    Reads the cache in `folder`, or the user's cache over the shipped one. Never tunes and never compiles.

    Raises:
        CacheError: a cache file is damaged or newer, or `folder` is no folder.
    """
    folders = inventory.folders(folder)
    if device is None:
        return explanations.of_sdpa("the tensors are on the CPU, where PyTorch's own attention runs", problem)
    return device_supported(device, problem) or explain_among(problem, tuned_entries.of(problem, device, folders))


def explain_among(problem: Problem, tuned: TunedEntries) -> Explanation:
    """The same among entries that share kernels with the problem, on a card that has kernels.

    What was tuned for the problem itself, or else the answer of its class of sizes, which is worked out once.

    A kernel that cannot run at these sizes gives way to what their own walk finds.
    """
    keys = _keys_of(problem) if sizes_of(problem) in tuned.sizes else ()
    if any(key in tuned.measured or key in tuned.predicted or key in tuned.of_sisters for key in keys):
        return _Lookup(problem, tuned, keys).run()
    smallest = size_class.representative(problem, tuned.device.sm_count)
    shared = tuned.answers.get(smallest)
    if shared is None:
        # What was tuned for the smallest problem itself says nothing of others in its class.
        shared = _Lookup(smallest, tuned, ()).run()
        if len(tuned.answers) >= MAX_CLASSES:
            tuned.answers.clear()
        tuned.answers[smallest] = shared
    if shared.variant is not None:
        rules = tuned.rules_for(problem)
        if not rules.is_feasible(shared.variant, rules.facts(size_facts(problem))):
            return _Lookup(problem, tuned, keys).run()
    level = shared.level
    if shared.entry is not None and level is not Level.SISTER:
        level = _level(tuned.buckets[id(shared.entry)], tuned_entries.bucket(problem))
    return Explanation(
        problem=problem,
        route=shared.route,
        level=level,
        reasons=shared.reasons,
        entry=shared.entry,
        variant=shared.variant,
        unavailable=shared.unavailable,
        chosen_for=smallest,
    )


def device_supported(device: Device, problem: Problem | None = None) -> Explanation | None:
    """The answer on cards that are too old for any kernel; None on others."""
    if device.arch >= MIN_ARCH:
        return None
    return explanations.of_sdpa(
        f"{device.full_name} is sm_{device.arch}, and the kernels need sm_{MIN_ARCH} or newer", problem
    )


def differentiates(device: Device | None) -> bool:
    """Whether any gradients were measured to be the fastest by a kernel, on a device or a sister card.

    Raises:
        CacheError: a cache file is damaged or newer.
    """
    if device is None:
        return False
    tuned = tuned_entries.read(Op.BACKWARD, device, inventory.folders(None))
    measured = [*tuned.measured.values(), *(neighbour.places for neighbour in tuned.sisters)]
    counting = (precedence.used_first(places, store.why_held_back)[0] for places in measured)
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
    for variant in portfolio.starters_for(explanation.problem, device):
        if variant != explanation.variant:
            yield variant


def without(explanation: Explanation, variant: Variant, reason: str) -> Explanation:
    """The explanation, once `variant` was refused."""
    return replace(explanation, reasons=explanation.reasons.after(f"{variant.template}: {reason}"))


def by(explanation: Explanation, variant: Variant) -> Explanation:
    """The explanation, once `variant` is what runs."""
    planned = explanation.variant
    if planned is None or variant == planned:
        return explanation
    if explanation.level is not Level.DEFAULT:
        reason = f"{explanation.reason}, but its kernel cannot run here, so a default of {variant.template} does"
        return replace(explanation, level=Level.DEFAULT, reasons=explanation.reasons.because(reason), variant=variant)
    return replace(
        explanation,
        reasons=explanation.reasons.because(lookup_sentences.default_reason(variant.template)),
        variant=variant,
    )


class _Lookup:
    """One walk down the rules; what fails on the way is kept as steps, which are put in words when they are read."""

    def __init__(self, problem: Problem, tuned: TunedEntries, keys: tuple[str, ...]) -> None:
        """Prepares a walk.

        Args:
            keys: of entries that speak of the problem itself.
        """
        self.problem, self.tuned, self.keys = problem, tuned, keys
        self.rules = tuned.rules_for(problem)
        self.facts = self.rules.facts(size_facts(problem))
        self.verdicts: dict[int, str | None] = {}  # id of what entries ask of sizes -> why these are not such
        self.steps: list[Text] = list(tuned.foreign)
        self.unavailable = ""
        extents = tuned_entries.extents_of(problem)
        self.octaves = tuned_entries.octaves_of(extents)
        self.bucket = tuned_entries.bucket(problem, extents)

    @cached_property
    def portfolio_choice(self) -> Variant | None:
        """What the portfolio has a call run; near entries ask for it too."""
        ranked = portfolio.load(self.problem.op).ranked(self.problem, self.tuned.device)
        able = filter(self._can_run, ranked)
        return portfolio.first_of(self.problem, self.tuned.device, ranked, able, self._seeds())

    def run(self) -> Explanation:
        """The answer of the first rule that has one; the last has one always."""
        explanation = self.exact_entry() or self.near_entry() or self.predicted_entry() or self.default_variant()
        return replace(explanation, unavailable=self.unavailable) if self.unavailable else explanation

    def exact_entry(self) -> Explanation | None:
        """The problem itself was measured on this card."""
        contenders = [self._counting(self.tuned.measured[key]) for key in self.keys if key in self.tuned.measured]
        if not contenders:
            self.steps.append("exact: this problem was not measured on this card")
        return self._first(contenders, Level.EXACT, "this problem was measured on this card")

    def near_entry(self) -> Explanation | None:
        """The closest measured problem that runs the same kernels, of this card or of another of its architecture."""
        own = (neighbour for neighbour in self.tuned.neighbours if neighbour.key not in self.keys)
        answer = self._nearest([*own, *self.tuned.sisters])
        if answer is None:
            self.steps.append(
                "bucket, nearest: no measured problem on this card is close enough and shares these kernels"
            )
        return answer

    def _nearest(self, neighbours: Iterable[Neighbour]) -> Explanation | None:
        """The closest of these problems that can serve."""
        here, distance = self.octaves, tuned_entries.distance
        deterministic = self.problem.deterministic
        # A winner among online kernels alone says nothing of a problem that may run others.
        numerics = Numerics.ANY, self.problem.numerics
        # Those whose gradients were tuned as these are asked for come first, however far the others are.
        is_near = self._nearness()
        related = [
            (
                neighbour.deterministic is not deterministic,
                octaves + (SISTER_OCTAVES if neighbour.card is not None else 0.0),
                neighbour.card is not None,
                neighbour.key,
                place,  # of its own each, so that nothing behind it is compared
                neighbour,
                octaves,
            )
            for place, neighbour in enumerate(neighbours)
            if neighbour.numerics in numerics
            and (octaves := distance(neighbour.octaves, here)) <= FARTHEST
            and is_near(neighbour, octaves)
        ]
        related.sort()
        excluded: Explanation | None = None
        for *_, neighbour, octaves in related:
            contender = self._counting(neighbour.places)
            level = Level.SISTER if neighbour.card is not None else _level(neighbour.bucket, self.bucket)
            if contender.ordinary and (infeasible := self._why_infeasible(contender)) is not None:
                # As `_use` would have it, which takes three times as long and asks whether the entry is worthless.
                self.steps.append(partial(_refusal, self.rules, contender, level, infeasible))
                continue
            reason = partial(lookup_sentences.distance_reason, contender.entry, octaves)
            if neighbour.card is not None:
                reason = partial(
                    lookup_sentences.sister_reason, contender.entry, octaves, neighbour.card, self.tuned.device
                )
            answer = self._use(contender, level, reason)
            if answer is not None:
                return answer
            if excluded is None and (why := contender.excluded) is not None:
                excluded = self._instead(contender, level, partial(lookup_sentences.but, reason, why))
        return excluded  # what was measured beside it, before a default that nobody measured

    def _nearness(self) -> Callable[[Neighbour, float], bool]:
        """Whether a neighbour so many octaves away may serve: its winner is believed faster than what nobody tuned."""
        if self.problem.cache is not None:
            fills = partial(tuned_entries.fills_multiprocessors, device=self.tuned.device)
            full = fills(self.octaves)
            return lambda neighbour, octaves: octaves <= NEAR_CACHE or (full and fills(neighbour.octaves))
        if portfolio.has_measured_facts(self.problem) and self.portfolio_choice is not None:
            return lambda neighbour, octaves: octaves <= NEAR
        if self._default_walks_measured_heads():
            group = self.octaves[3]
            return lambda neighbour, octaves: octaves <= NEAR_SHARED_KEYS and neighbour.octaves[3] == group
        return lambda neighbour, octaves: True

    def _default_walks_measured_heads(self) -> bool:
        """Whether query heads share keys, and the default is of a template that chooses how many a program walks."""
        if self.problem.op is not Op.BACKWARD or self.problem.group_size == 1:
            return False
        default = next(self._seeds(), None)
        return default is not None and "WALKED_HEADS" in search_space.load(default.template).choices

    def predicted_entry(self) -> Explanation | None:
        """The problem itself was predicted for this kind of card."""
        contenders = [self._counting(self.tuned.predicted[key]) for key in self.keys if key in self.tuned.predicted]
        if not contenders:
            self.steps.append("predicted: nobody predicted this problem for this kind of card")
        return self._first(contenders, Level.PREDICTED, partial(lookup_sentences.predicted, self.tuned.device))

    def default_variant(self) -> Explanation:
        """The portfolio's first variant that can run, else the default of the first template that has one."""
        variant = self.portfolio_choice
        if variant is not None:
            reason = partial(lookup_sentences.portfolio_reason, variant.template)
            return self._answer(KERNEL, Level.DEFAULT, reason, variant=variant)
        refusals: list[Text] = []
        for space, seeds in self.rules.seeds:
            variant = next(seeds.feasible(self.facts), None)
            if variant is not None:
                self.steps += [partial(lookup_sentences.without_default, refusal) for refusal in refusals]
                reason = partial(lookup_sentences.default_reason, space.template)
                return self._answer(KERNEL, Level.DEFAULT, reason, variant=variant)
            refusals.append(partial(space.why_no_default, self.problem, self.tuned.device))
        *others, last = refusals
        return explanations.of_sdpa(
            last,
            self.problem,
            [*self.steps, *(partial(lookup_sentences.without_default, refusal) for refusal in others)],
        )

    def _counting(self, places: tuple[Placed, ...]) -> Contender:
        """The entry of a problem that counts; one that cannot serve this problem gives way to one that can."""
        if len(places) > 1:
            for entry in self.tuned.candidates(places):
                contender = self.rules.contender(entry)
                if self._why_not(contender) is None:
                    return contender
        return self.rules.contender(places[0].entry)

    def _answer(
        self, route: str, level: Level, reason: Text, *, variant: Variant | None, entry: CacheEntry | None = None
    ) -> Explanation:
        """An explanation with the steps so far."""
        return Explanation(
            problem=self.problem,
            route=route,
            level=level,
            reasons=Reasons(reason, self.steps),
            entry=entry,
            variant=variant,
        )

    def _first(self, contenders: list[Contender], level: Level, reason: Text) -> Explanation | None:
        """The first that can serve."""
        return next((answer for each in contenders if (answer := self._use(each, level, reason)) is not None), None)

    def _use(self, contender: Contender, level: Level, reason: Text) -> Explanation | None:
        """The entry as an answer, or a step that says why it is none."""
        entry, worthless = contender.entry, self.rules.why_worthless(contender)
        infeasible = None if worthless is not None else self._why_infeasible(contender)
        why_not = worthless or infeasible or self._why_unrepeated(entry)
        if why_not is not None:
            self.steps.append(partial(lookup_sentences.refusal, level, entry, why_not))
            self.unavailable = self.unavailable or contender.unavailable
            reasons = "its kernel cannot run here" if infeasible else why_not
            served = level is Level.EXACT and (not worthless or contender.excluded is not None)
            return self._instead(contender, level, partial(lookup_sentences.but, reason, reasons)) if served else None
        if entry.versions.get("triton") != triton.__version__:
            self.steps.append(partial(lookup_sentences.other_triton, entry))
        if entry.mark is not None:
            self.steps.append(partial(lookup_sentences.marked, entry))
            if entry.mark.choice in ROUTES:
                reason = partial(lookup_sentences.fastest_since, reason, entry.mark.choice)
                return self._answer(entry.mark.choice, level, reason, variant=contender.variant, entry=entry)
        if entry.choice != KERNEL:
            if entry.versions.get("torch") != str(torch.__version__):
                self.steps.append(partial(lookup_sentences.other_torch, entry))
            reason = partial(lookup_sentences.fastest, reason, entry)
        return self._answer(entry.choice, level, reason, variant=contender.variant, entry=entry)

    def _instead(self, contender: Contender, level: Level, reason: Text) -> Explanation | None:
        """The fastest of what was measured beside a choice that cannot serve here: kernels and rivals."""
        entry = contender.entry
        # A rival that may repeat itself takes at least the time that it takes when it need not.
        routes = [name for name in ROUTES if not self._is_looser(entry) or name not in NEVER_ALIKE]
        choices = [
            (rival.measurement.median_us, rival.name, contender) for rival in entry.rivals if rival.name in routes
        ]
        times = (entry.time_us, *(candidate.time_us for candidate in entry.candidates))
        kernels = zip(times, (contender, *self.rules.runners_up(entry)), strict=True)
        for time_us, kernel in kernels:
            if self._why_not(kernel) is None:
                choices.append((time_us, KERNEL, kernel))
        if not choices:
            return None
        _, route, chosen = min(choices, key=lambda choice: choice[0])
        variant = chosen.variant if route == KERNEL else self._first_seed()
        reason = partial(lookup_sentences.fastest_beside, reason, route, variant, entry)
        return self._answer(route, level, reason, variant=variant, entry=entry)

    def _first_seed(self) -> Variant | None:
        """A kernel for calls that ask for more than a rival gives."""
        return self.portfolio_choice or next(self._seeds(), None)

    def _can_run(self, variant: Variant) -> bool:
        """Whether a variant of the portfolio can run the problem."""
        return portfolio.is_available(variant) and self.rules.is_feasible(variant, self.facts)

    def _seeds(self) -> Iterator[Variant]:
        """The templates' seeds that can run."""
        return (variant for _, seeds in self.rules.seeds for variant in seeds.feasible(self.facts))

    def _why_not(self, contender: Contender) -> str | None:
        """Why an entry's kernel does not count here."""
        return self._why_infeasible(contender) or self.rules.why_worthless(contender)

    def _why_infeasible(self, contender: Contender) -> str | None:
        """Why an entry's kernel cannot run here; most entries ask the same of sizes."""
        key = id(contender.rules)
        if key not in self.verdicts:
            self.verdicts[key] = self.rules.why_infeasible(contender, self.facts)
        return self.verdicts[key]

    def _is_looser(self, entry: CacheEntry) -> bool:
        """Whether gradients must repeat to the bit here, and needed not where the entry was tuned."""
        return self.problem.deterministic and not entry.problem.deterministic

    def _why_unrepeated(self, entry: CacheEntry) -> str | None:
        """Why an entry's choice says nothing of gradients that must repeat to the bit."""
        if not self._is_looser(entry):
            return None
        chosen = entry.mark.choice if entry.mark is not None and entry.mark.choice in ROUTES else entry.choice
        return None if chosen == KERNEL else f"{chosen} was timed there with gradients that may differ from run to run"


def _refusal(rules: KindRules, contender: Contender, level: Level, infeasible: str) -> str:
    """Why an infeasible entry does not serve."""
    return lookup_sentences.refusal(level, contender.entry, rules.why_worthless(contender) or infeasible)


def _level(measured: tuple[int, ...], wanted: tuple[int, ...]) -> Level:
    """How close the entry of another problem is, by the buckets of both."""
    return Level.BUCKET if measured == wanted else Level.NEAREST


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
