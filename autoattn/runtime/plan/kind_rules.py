"""What is known of entries and seeds for problems of one kind on one device: for new sizes there is arithmetic left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoattn.baselines.pytorch_sdpa import BACKENDS, SDPA
from autoattn.cache import availability, store
from autoattn.codegen import feasibility, search_space
from autoattn.codegen.feasibility import DerivedFacts, FactValues, SharedRules, SizeRules
from autoattn.codegen.kind_seeds import KindSeeds
from autoattn.codegen.search_space import SearchSpace
from autoattn.core.cache_entry import KERNEL, CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant
from autoattn.errors import UsageError

ROUTES = (SDPA, *BACKENDS)  # of rivals that a call can take


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contender:
    """An entry, and what is known of it whatever the sizes of a call."""

    entry: CacheEntry
    variant: Variant
    unavailable: str  # why the installed Triton cannot compile its kernel, with the way out; else empty
    excluded: str | None  # why its kernel must not run here though its times hold; a default may be the same, or slower
    ordinary: bool  # neither of the two: where it cannot serve, it is as if it were not there
    rules: SizeRules  # what its kernel asks of sizes


class KindRules:
    """The rules for one kind of problem, one choice of numerics, and gradients that must or need not repeat.

    An entry is looked into when it is first asked about, and kept; so whoever asks keeps it too.
    """

    def __init__(self, problem: Problem, device: Device, why_held_back: Callable[[CacheEntry], str | None]) -> None:
        """Rules for all problems that differ from `problem` in sizes alone."""
        self._problem, self._device, self._why_held_back = problem, device, why_held_back
        self._shared = SharedRules()
        self._contenders: dict[int, Contender] = {}  # by the id of an entry
        self._worthless: dict[int, str | None] = {}  # likewise
        self._runners_up: dict[int, tuple[Contender, ...]] = {}  # likewise
        self._of_variants: dict[Variant, SizeRules] = {}
        self._seeds: tuple[tuple[SearchSpace, KindSeeds], ...] | None = None  # once asked

    @property
    def seeds(self) -> tuple[tuple[SearchSpace, KindSeeds], ...]:
        """The seeds of the operation's templates."""
        if self._seeds is None:
            spaces = search_space.of(self._problem.op)
            of_kind = ((space, space.seeds_of_kind(self._problem, self._device)) for space in spaces)
            self._seeds = tuple((space, seeds.sharing(self._shared)) for space, seeds in of_kind)
        return self._seeds

    def facts(self, sizes: FactValues) -> DerivedFacts:
        """The sizes of one problem, as the methods below ask for them."""
        return self._shared.facts(sizes)

    def contender(self, entry: CacheEntry) -> Contender:
        """What is known of an entry; found out once."""
        return self._contenders.get(id(entry)) or self._add(entry)

    def runners_up(self, entry: CacheEntry) -> tuple[Contender, ...]:
        """The entries that there would be if a candidate of an entry had won, in the order of its candidates."""
        runners_up = self._runners_up.get(id(entry))
        if runners_up is None:
            runners_up = self._runners_up[id(entry)] = tuple(
                self.contender(
                    replace(entry, template=other.template, params=other.params, source_digest=other.source_digest)
                )
                for other in entry.candidates
            )
        return runners_up

    def why_worthless(self, contender: Contender) -> str | None:
        """Why nothing may rest on an entry, in words; found out once, since it takes a rendered text.

        Whoever only needs to know whether an entry serves asks `why_infeasible` first, which takes none.
        """
        key = id(contender.entry)
        if key not in self._worthless:
            reason = self._why_held_back(contender.entry)
            if reason is None and contender.entry.choice not in (KERNEL, *ROUTES):
                reason = f"its choice {contender.entry.choice} is none of PyTorch's backends"
            self._worthless[key] = reason
        return self._worthless[key]

    def why_infeasible(self, contender: Contender, facts: DerivedFacts) -> str | None:
        """Why an entry's kernel cannot run a problem of these sizes, in words; None when it can."""
        try:
            return feasibility.first_broken(contender.rules, facts)
        except UsageError as error:  # the arithmetic of a rule has no result
            return str(error)

    def is_feasible(self, variant: Variant, facts: DerivedFacts) -> bool:
        """Whether a kernel can run a problem of these sizes."""
        rules = self._of_variants.get(variant)
        if rules is None:
            space = search_space.load(variant.template)
            rules = self._shared.rules_of(space.judgement_of(variant, self._problem, self._device))
            self._of_variants[variant] = rules
        return feasibility.first_broken(rules, facts) is None

    def _add(self, entry: CacheEntry) -> Contender:
        unavailable = availability.why_unavailable(entry)
        excluded = None
        if entry.mark is not None and entry.mark.holds_back:
            excluded = "its kernel is marked"
        elif unavailable is not None and store.why_stale(entry) is None:
            excluded = "its kernel cannot run here"
        contender = self._contenders[id(entry)] = Contender(
            entry=entry,
            variant=entry.variant,
            unavailable=unavailable or "",
            excluded=excluded,
            ordinary=not unavailable and excluded is None,
            rules=self._rules_of(entry),
        )
        return contender

    def _rules_of(self, entry: CacheEntry) -> SizeRules:
        """What an entry's kernel asks of sizes; nothing where it cannot run at all."""
        problem = self._problem
        if entry.problem.deterministic and not problem.deterministic:  # gradients that repeat are as good as any
            problem = replace(problem, deterministic=True)
        try:
            space = search_space.load(entry.template)
            judgement = space.judgement_of(entry.variant, problem, self._device)
        except UsageError as error:  # there is no such template by now, or its parameters are others
            return (), str(error)
        reason = space.why_unavailable()
        return self._shared.rules_of(judgement) if reason is None else ((), reason)
