"""What search spaces say of kernels for problems of one kind on one device: for new sizes there is arithmetic left."""

from __future__ import annotations

from dataclasses import replace

from autoattn.codegen import search_space
from autoattn.codegen.feasibility import DerivedFacts, FactValues, Judgement, SharedRules
from autoattn.codegen.search_space import KindSeeds, SearchSpace
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant
from autoattn.errors import UsageError


class KindRules:
    """The rules for one kind of problem, one choice of numerics, and gradients that must or need not repeat.

    A kernel is judged when it is first asked about. Entries are kept, so that what is asked about must be kept anyway.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        """Rules for all problems that differ from `problem` in sizes alone."""
        self._problem, self._device = problem, device
        self._shared = SharedRules()
        self._of_entries: dict[int, tuple[CacheEntry, Judgement]] = {}  # by id
        self._of_variants: dict[Variant, Judgement] = {}
        self._seeds: tuple[tuple[SearchSpace, KindSeeds], ...] | None = None  # once asked

    @property
    def seeds(self) -> tuple[tuple[SearchSpace, KindSeeds], ...]:
        """The seeds of the operation's templates."""
        if self._seeds is None:
            spaces = search_space.of(self._problem.op)
            self._seeds = tuple((space, space.seeds_of_kind(self._problem, self._device)) for space in spaces)
        return self._seeds

    def facts(self, sizes: FactValues) -> DerivedFacts:
        """The sizes of one problem, as the methods below ask for them."""
        return self._shared.facts(sizes)

    def why_infeasible(self, entry: CacheEntry, facts: DerivedFacts) -> str | None:
        """Why an entry's kernel cannot run a problem of these sizes, in words; None when it can."""
        try:
            known = self._of_entries.get(id(entry))
            judgement = self._judge(entry) if known is None else known[1]
            return self._shared.why_not(judgement, facts)
        except UsageError as error:  # there is no such template by now, or its parameters are others
            return str(error)

    def is_feasible(self, variant: Variant, facts: DerivedFacts) -> bool:
        """Whether a kernel can run a problem of these sizes."""
        judgement = self._of_variants.get(variant)
        if judgement is None:
            space = search_space.load(variant.template)
            judgement = self._of_variants[variant] = space.judgement_of(variant, self._problem, self._device)
        return self._shared.why_not(judgement, facts) is None

    def _judge(self, entry: CacheEntry) -> Judgement:
        problem = self._problem
        if entry.problem.deterministic and not problem.deterministic:  # gradients that repeat are as good as any
            problem = replace(problem, deterministic=True)
        space = search_space.load(entry.template)
        judgement = space.judgement_of(entry.variant, problem, self._device)
        if (reason := space.why_unavailable()) is not None:
            judgement = replace(judgement, sized=(), refusal=reason)
        self._of_entries[id(entry)] = entry, judgement
        return judgement
