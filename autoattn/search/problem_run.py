"""One problem's way through a tune: what its search tries first, and the entry that comes of it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cache, cached_property

import triton

from autoattn.cache import store
from autoattn.codegen import portfolio, render, resources
from autoattn.codegen.search_space import SearchSpace
from autoattn.core import kernel_kind
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.trial import Evidence
from autoattn.core.variant import Variant
from autoattn.cost_model import accuracy, expected_time, lower_bound
from autoattn.search import entry_builder, multi_template, storage
from autoattn.search.entry_builder import Searched
from autoattn.search.multi_template import Contest
from autoattn.search.search_options import Options
from autoattn.search.shared_trials import Ledger
from autoattn.search.storage import Storage
from autoattn.search.study import Arithmetic, Study
from autoattn.search.trial_pipeline import Steps, Workshop

MOST_ELSEWHERE = 6  # variants that were measured elsewhere, which a search tries


class ProblemRun:
    """One problem's way to its entry."""

    def __init__(
        self, problem: Problem, shop: Workshop, options: Options, shared: Storage | None, old: CacheEntry | None
    ) -> None:
        """Takes where trials are shared, if anywhere but in a journal, and the entry that there is."""
        self.problem, self.device, self.measured = problem, shop.device, shop.measured
        self.shop, self.options, self.shared, self.old = shop, options, shared, old
        spaces = multi_template.spaces(problem, self.device, self.measured)
        self.spaces = {space.template: space for space in spaces}
        self._elsewhere: list[Variant] = []

    def contest(self, relatives: Sequence[CacheEntry]) -> Contest:
        """The studies of the problem, and what they try first.

        Args:
            relatives: entries of problems of the same kind.
        """
        self._elsewhere = self._measured_elsewhere()
        contest = Contest([self._study(space) for space in self.spaces.values()])
        contest.enqueue(self._known_variants(self.old)[:1] if self.old is not None else [])
        theirs = [variant for entry in relatives[-3:] for variant in self._known_variants(entry)[:3]]
        starters = self._starters
        if self._asks_arithmetic:
            contest.enqueue(theirs[:1])
            contest.enqueue_until_working(starters)
            contest.enqueue(self._elsewhere[:1])
            contest.offer([*theirs, *starters, *self._elsewhere])
        else:
            contest.enqueue([*starters, *self._elsewhere, *theirs])
        return contest

    @property
    def _asks_arithmetic(self) -> bool:
        """Whether arithmetic picks what is compiled: without the card, where a variant costs its compiler alone."""
        return not self.measured and not self.options.profile.seeds_only

    def search(self, contest: Contest) -> Searched:
        """The finished search."""
        return Searched(
            problem=self.problem,
            device=self.device,
            options=self.options,
            shop=self.shop,
            study=contest,
            spaces=self.spaces,
        )

    def entry(self, search: Searched) -> Steps[CacheEntry | str]:
        """The entry of a search, or in words why there is none; yields while it waits for workers."""
        if not search.working:
            return search.why_none()
        default = self._default({trial.variant for trial in search.working})
        if not self.measured:
            return entry_builder.predicted(search, set(self._elsewhere), default)
        previous = next(iter(self._known_variants(self.old)), None) if self.old is not None else None
        return (yield from entry_builder.measured(search, default, previous))

    def awaits_default(self, contest: Contest) -> bool:
        """Whether what a call without an entry runs, the first choice that is not known to fail, is to be tried yet."""
        choice = next((variant for variant in self._starters if not contest.fails(variant)), None)
        return choice is not None and choice not in contest.trials

    def _default(self, working: Set[Variant]) -> Variant:
        """What a call without an entry runs: the first choice, or the next one that works where that does not."""
        return next((variant for variant in self._starters if variant in working), self._starters[0])

    @cached_property
    def _starters(self) -> list[Variant]:
        """What a call may run without an entry, in the order of its choice."""
        return portfolio.starters_for(self.problem, self.device)

    def _study(self, space: SearchSpace) -> Study:
        journal = self.options.cache / self.device.name / "studies" / f"{self.problem.key}.journal"
        kept = self.shared if self.shared is not None else storage.journal(journal)
        return Study(
            Ledger(study_name(space, self.problem, self.device, measured=self.measured), kept, space),
            space,
            self.problem,
            self.device,
            seed=self.options.seed,
            budget=self.options.budget,
            arithmetic=self._arithmetic(space) if self._asks_arithmetic else None,
        )

    def _arithmetic(self, space: SearchSpace) -> Arithmetic:
        """What a variant's prediction takes at least, less what the model errs by, and what it may come to."""
        error = accuracy.error_of(space.template, self.device.arch, self.problem.dtype)
        return Arithmetic(
            least_us=cache(lambda variant: lower_bound.least_us(self.problem, self.device, variant) / (1.0 + error)),
            expected_us=cache(lambda variant: expected_time.expected_us(self.problem, self.device, variant)),
        )

    def _known_variants(self, entry: CacheEntry) -> list[Variant]:
        """The winner and the runners-up, as far as the search space still holds them."""
        return [
            variant
            for variant in (entry.variant, *(candidate.variant for candidate in entry.candidates))
            if variant.template in self.spaces and self.spaces[variant.template].holds(variant.as_dict())
        ]

    def _measured_elsewhere(self) -> list[Variant]:
        """Winners of the same problem, then of the same kind, measured elsewhere: best evidence first.

        Elsewhere is on other cards, with other releases of Triton, or by whoever made the shipped cache.
        """
        entries = [
            (entry.problem.key != self.problem.key, file.device != self.device.name, entry.problem.key, place, entry)
            for place, folder in enumerate((self.options.cache, resources.shipped_cache()))
            for file in store.read_folder(folder)
            for entry in file.entries.values()
            if entry.evidence is Evidence.MEASURED and kernel_kind.shares_kernels(self.problem, entry.problem)
        ]
        variants: dict[Variant, None] = {}
        for *_, entry in sorted(entries, key=lambda item: item[:-1]):
            variants.update(dict.fromkeys(self._known_variants(entry)[:2]))
            if len(variants) >= MOST_ELSEWHERE:
                break
        return list(variants)


def study_name(space: SearchSpace, problem: Problem, device: Device, *, measured: bool) -> str:
    """What a search is called in its storage: everything that, when it changes, makes old trials worthless."""
    parts = (
        space.template,
        problem.key,
        "measured" if measured else "predicted",
        device.fingerprint,
        space.digest,
        render.template_digest(space.template),
        f"triton {triton.__version__}",
    )
    return " ".join(parts)
