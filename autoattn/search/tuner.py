"""Tunes problems for a device: searches each, and merges its entry into the cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import triton

from autoattn.cache import store
from autoattn.codegen import portfolio, render, resources
from autoattn.codegen.search_space import SearchSpace
from autoattn.core import kernel_kind
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Evidence, Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.errors import HostError, UsageError
from autoattn.hardware import nvidia
from autoattn.search import entry_builder, multi_template, storage
from autoattn.search.entry_builder import Searched
from autoattn.search.multi_template import Contest
from autoattn.search.search_options import Effort, Listener, Objective, Options, Progress, Summary
from autoattn.search.shared_trials import Ledger
from autoattn.search.storage import Storage
from autoattn.search.study import Study
from autoattn.search.trial_pipeline import Steps, Workshop

LISTEN_SECONDS = 0.2  # between two looks at what other processes are still trying
MOST_ELSEWHERE = 6  # variants that were measured elsewhere, which a search tries


def tune(
    problems: Sequence[Problem], device: Device, *, measured: bool, options: Options, listen: Listener = lambda _: None
) -> Summary:
    """Tunes each problem and merges its entry into the cache as soon as it is there.

    Ctrl-C ends the run cleanly: what was finished is kept, and the same call goes on where it stopped. So does a
    machine that lacks what every variant needs, as a folder that can be written: `Summary.stopped` says what.

    Raises:
        CacheError: the cache or a journal cannot be read or written.
        StorageError: the storage cannot be reached, read or written.
        SpaceError: a search space cannot be read.
        UsageError: no such storage, fewer GPUs than workers, or an objective that must be measured without the card.
    """
    if options.objective is not Objective.TIME and not measured:
        raise UsageError(
            f"the objective {options.objective.value} must be measured, and {device.full_name} is not in this machine; "
            "tune there, or for time"
        )
    begin = time.monotonic()
    ops = {problem.op for problem in problems}
    interrupted, stopped = False, None
    known = {key: entry for op in ops for key, entry in _known(options.cache, device, measured, op).items()}
    cards = _cards(device, measured, options)
    shared = storage.server(options.storage) if options.storage is not None else None
    with Workshop(device, measured=measured, jobs=options.jobs, cards=cards) as shop:
        every = _All(problems, device, measured, options, shop, listen, shared, known)
        try:
            every.run()
        except KeyboardInterrupt:
            interrupted = True
        except HostError as error:
            stopped = error
        outcomes = {outcome.value: count for outcome, count in sorted(shop.outcomes.items())}
        rehearsals = {outcome.value: count for outcome, count in sorted(shop.rehearsals.items())}
        reasons = dict(shop.reasons.most_common())
        kernels = shop.kernels
        compiling, looking = shop.busy_seconds
    return Summary(
        entries={problem.key: every.entries[problem.key] for problem in problems if problem.key in every.entries},
        kept=every.kept,
        failed=every.failed,
        interrupted=interrupted,
        outcomes=outcomes,
        rehearsals=rehearsals,
        reasons=reasons,
        stopped=stopped,
        kernels=kernels,
        compiling_seconds=compiling,
        card_seconds=looking,
        seconds=time.monotonic() - begin,
        written=tuple(
            sorted({store.path_of(options.cache, device, entry.problem.op) for entry in every.entries.values()})
        ),
    )


@dataclass(slots=True, eq=False)
class _All:
    """All problems on their way into the cache."""

    problems: Sequence[Problem]
    device: Device
    measured: bool
    options: Options
    shop: Workshop
    listen: Listener
    shared: Storage | None
    known: dict[str, CacheEntry]  # before the run, by problem key
    entries: dict[str, CacheEntry] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    kept: int = 0

    def run(self) -> None:
        """Takes the problems in order, as many at once as keep the compilers busy.

        What helps a problem are the earlier ones that must have ended before it begins: so a seed gives the same
        searches, however long each of them takes.
        """
        active: dict[int, Steps[None]] = {}
        begun = 0
        with contextlib.ExitStack() as stack:
            while active or begun < len(self.problems):
                while begun < len(self.problems):
                    many = min(self.shop.at_once(self.problems[index]) for index in (*active, begun))
                    first = max(0, begun - many + 1)  # what is before it must have ended
                    if any(index < first for index in active):
                        break
                    active[begun] = self._steps(begun, self.problems[:first])
                    stack.callback(active[begun].close)
                    begun += 1
                ended = [index for index, work in sorted(active.items()) if _ended(work)]
                for index in ended:
                    del active[index]
                if not ended:
                    self.shop.wait()

    def _steps(self, index: int, earlier: Sequence[Problem]) -> Steps[None]:
        """One problem's way; it may learn from the earlier ones."""
        problem, total = self.problems[index], len(self.problems)
        old = self.known.get(problem.key)
        if old is not None and is_up_to_date(old, self.device, self.measured, self.options):
            self.entries[problem.key] = old
            self.kept += 1
            self.listen(_progress(problem, index, total, "kept", 0, 0, old.time_us))
            return
        siblings = [self.entries[sibling.key] for sibling in earlier if sibling.key in self.entries]
        result = yield from ProblemRun(self, index).entry(siblings, old)
        if isinstance(result, str):
            self.failed[problem.key] = result
        else:
            self.entries[problem.key] = result
            store.merge(self.options.cache, self.device, problem.op, [result])
        self.listen(_done(problem, index, total, result))


def _ended(work: Steps[None]) -> bool:
    """Goes on with some work until it must wait for a worker again, or ends."""
    try:
        next(work)
    except StopIteration:
        return True
    return False


class ProblemRun:
    """One problem's way to its entry."""

    def __init__(self, every: _All, index: int) -> None:
        self.index, self.total, self.shared = index, len(every.problems), every.shared
        self.problem, self.device, self.measured = every.problems[index], every.device, every.measured
        self.options, self.shop, self.listen = every.options, every.shop, every.listen
        spaces = multi_template.spaces(self.problem, self.device, self.measured)
        self.spaces = {space.template: space for space in spaces}

    def entry(self, siblings: Sequence[CacheEntry], old: CacheEntry | None) -> Steps[CacheEntry | str]:
        """The entry, or in words why there is none; yields while it waits for workers."""
        if not self.spaces:
            return multi_template.why_no_space(self.problem, self.device)
        with contextlib.closing(Contest([self._study(space) for space in self.spaces.values()])) as study:
            return (yield from self._entry_of(study, siblings, old))

    def _entry_of(
        self, study: Contest, siblings: Sequence[CacheEntry], old: CacheEntry | None
    ) -> Steps[CacheEntry | str]:
        default = portfolio.default(self.problem, self.device)
        relatives = [entry for entry in siblings if kernel_kind.shares_kernels(self.problem, entry.problem)]
        elsewhere = self._measured_elsewhere()
        study.enqueue(self._known_variants(old)[:1] if old is not None else [])
        theirs = [variant for entry in relatives[-3:] for variant in self._known_variants(entry)[:3]]
        study.enqueue(theirs if not self.measured else [])
        study.enqueue(portfolio.starters_for(self.problem, self.device))
        study.enqueue([*elsewhere, *theirs])
        yield from self._search(study, sibling=bool(relatives))
        search = Searched(
            problem=self.problem,
            device=self.device,
            options=self.options,
            shop=self.shop,
            study=study,
            spaces=self.spaces,
        )
        if not search.working:
            return search.why_none()
        if not self.measured:
            return entry_builder.predicted(search, set(elsewhere), default)
        best = min(trial.time_us for trial in search.working if trial.time_us is not None)
        self.listen(
            _progress(self.problem, self.index, self.total, "final", len(study.trials), self.options.budget, best)
        )
        previous = next(iter(self._known_variants(old)), None) if old is not None else None
        return (yield from entry_builder.measured(search, default, previous))

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
        )

    def _search(self, study: Contest, *, sibling: bool) -> Steps[None]:
        begin: float | None = None  # the first result: starting the workers is no search
        budget = self.options.budget
        # Without a GPU only compiling costs time: siblings' kernels, which come first, are there already, and few new
        # ones are added.
        cheap = sibling and not self.measured and self.options.trials is None
        most = self.shop.begun + self.options.profile.sibling_trials

        def more() -> bool:
            if study.taken < budget:
                study.hear()  # what others began since counts too, or each tuner would try one variant too many
            wanted = study.waiting or not self.options.profile.seeds_only
            return wanted and study.taken < budget and (not cheap or self.shop.begun < most)

        def now() -> float:
            return time.monotonic() - self.shop.finals_seconds

        def late() -> bool:
            return begin is not None and now() - begin > self.options.search_seconds

        def heard(trial: Trial) -> None:
            nonlocal begin
            begin = now() if begin is None else begin
            best = min((t.time_us for t in study.trials.values() if t.time_us is not None), default=None)
            tried = len(study.trials)
            self.listen(
                _progress(self.problem, self.index, self.total, "search", tried, budget, best, str(trial.detail))
            )

        yield from self.shop.search(study, budget=budget, more=more, late=late, heard=heard)
        while study.elsewhere and not late():  # what others are trying counts; what they give up is tried here
            if self.shop.idle:
                time.sleep(LISTEN_SECONDS)
            else:  # another problem's search goes on
                yield
            study.hear()
            yield from self.shop.search(study, budget=budget, more=more, late=late, heard=heard)

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


def _cards(device: Device, measured: bool, options: Options) -> tuple[str, ...]:
    """The GPUs that measure, as CUDA_VISIBLE_DEVICES calls them."""
    cards = nvidia.alike(device) if measured else ()
    if options.workers is not None and options.workers > len(cards):
        raise UsageError(
            f"--workers must be at most the visible GPUs that are {device.full_name} ({len(cards)}), "
            f"got {options.workers}; leave it out to take all of them"
        )
    return cards[: options.workers]


def _known(folder: Path, device: Device, measured: bool, op: Op) -> dict[str, CacheEntry]:
    """The entries that there are of an operation, less those that another card measured."""
    path = store.path_of(folder, device, op)
    if measured and path.exists() and store.read(path).fingerprint != device.fingerprint:
        return {}
    return store.lookup(folder, device, op)


def is_up_to_date(entry: CacheEntry, device: Device, measured: bool, options: Options) -> bool:
    """Whether a search with these options would find nothing new."""
    if measured and entry.evidence is Evidence.PREDICTED:
        return False
    efforts = [effort.value for effort in Effort]
    if entry.search.objective != options.objective.value or _left_unknown(entry):
        return False
    enough = entry.search.effort in efforts[efforts.index(options.effort.value) :]
    if options.trials is not None:
        enough = entry.search.trials >= options.trials
    return (
        enough
        and entry.mark is None
        and store.why_stale(entry) is None
        and entry.search.spaces == multi_template.digests(multi_template.spaces(entry.problem, device, measured))
        and entry.versions.get("triton") == triton.__version__
    )


def _left_unknown(entry: CacheEntry) -> bool:
    """Whether variants were left out for no fault of theirs, which may be mended by now."""
    blameless = {outcome.value for outcome in Outcome if outcome.of_environment} | {Outcome.INTERPRETER_CRASH.value}
    return not blameless.isdisjoint(entry.search.outcomes)


def _progress(
    problem: Problem,
    index: int,
    total: int,
    phase: str,
    tried: int,
    planned: int,
    best_us: float | None,
    detail: str = "",
) -> Progress:
    return Progress(
        problem=problem,
        index=index,
        total=total,
        phase=phase,
        tried=tried,
        planned=planned,
        best_us=best_us,
        best_tflops=problem.flops() / best_us / 1e6 if best_us is not None else None,
        detail=detail,
    )


def _done(problem: Problem, index: int, total: int, result: CacheEntry | str) -> Progress:
    if isinstance(result, str):
        return _progress(problem, index, total, "done", 0, 0, None, result)
    return _progress(problem, index, total, "done", result.search.trials, result.search.trials, result.time_us)
