"""Tunes problems for a device: searches each, and merges its entry into the cache."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import triton

from autoattn.cache import store
from autoattn.core import kernel_kind
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Evidence, Outcome, Trial
from autoattn.errors import HostError, UsageError
from autoattn.hardware import nvidia
from autoattn.search import multi_template, storage
from autoattn.search.kind_search import KindSearch, cost_of, kinds_of
from autoattn.search.multi_template import Contest
from autoattn.search.problem_run import ProblemRun
from autoattn.search.search_options import Effort, Listener, Objective, Options, Progress, Summary
from autoattn.search.storage import Storage
from autoattn.search.trial_pipeline import Steps, Workshop
from autoattn.search.work import Work

# Without the card, once this share of the planned kernels is begun, each that makes a problem so many times faster is
# followed by so many more, up to a multiple of the plan.
EXPLORED = 2 / 3
GAIN, PATIENCE, MOST = 1.05, 4, 1.5
RANKING = 900.0  # of a kind without the card: its rehearsals take as long as 14 kernels that `cost_of` gives 64
SEARCHING = 0.8  # share of a problem's work that its search is; the rest is rehearsals or finals
LISTEN_SECONDS = 0.2  # between two looks at what other processes are still trying


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
    searches: dict[int, KindSearch] = field(default_factory=dict)  # by the place of their group
    work: Work = field(default_factory=Work)

    def run(self) -> None:
        """Takes the problems in order, on the card as many at once as keep the compilers busy.

        What helps a problem are the earlier ones that must have ended before it begins: so a seed gives the same
        searches, however long each of them takes. Without the card the problems of a kind are one search. The next kind
        begins once nothing is left to propose in the one before, whose ranking leaves the compilers idle.
        """
        groups = [[number] for number in range(len(self.problems))] if self.measured else kinds_of(self.problems)
        for place, group in enumerate(groups):
            compiling = self._kernels(group) * cost_of(self.problems[group[0]])
            self.work.expect(place, 1.0 if self.measured else compiling + RANKING)
        active: dict[int, Steps[None]] = {}
        begun = 0
        with contextlib.ExitStack() as stack:
            while active or begun < len(groups):
                while begun < len(groups):
                    first = self._first_beside(groups, active, begun)
                    if any(place < first for place in active):
                        break
                    related = (
                        self.problems[:first] if self.measured else [self.problems[number] for number in groups[begun]]
                    )
                    active[begun] = self._steps(begun, groups[begun], related)
                    stack.callback(active[begun].close)
                    begun += 1
                ended = [place for place, work in sorted(active.items()) if _ended(work)]
                for place in ended:
                    del active[place]
                if not ended:
                    self.shop.wait()

    def _first_beside(self, groups: Sequence[Sequence[int]], active: Iterable[int], begun: int) -> int:
        """The first group that may still be at work when another one begins."""
        if not self.measured:
            ends = all(place in self.searches and self.searches[place].ended for place in active)
            return max(0, begun - 1) if ends else begun
        many = min(self.shop.at_once(self.problems[groups[place][0]]) for place in (*active, begun))
        return max(0, begun - many + 1)

    def _steps(self, place: int, numbers: Sequence[int], related: Sequence[Problem]) -> Steps[None]:
        """The way of the problems of a group; they may learn from the related ones."""
        runs: dict[int, ProblemRun] = {}
        for number in numbers:
            problem = self.problems[number]
            old = self.known.get(problem.key)
            if old is not None and is_up_to_date(old, self.device, self.measured, self.options):
                self.entries[problem.key] = old
                self.kept += 1
                self._tell(number, "kept", 0, 0, old.time_us)
                continue
            run = ProblemRun(problem, self.shop, self.options, self.shared, old)
            if run.spaces:
                runs[number] = run
            else:
                self._end(number, multi_template.why_no_space(problem, self.device))
        if not runs:
            self.work.drop(place)
            return
        siblings = [self.entries[problem.key] for problem in related if problem.key in self.entries]
        with contextlib.ExitStack() as stack:
            contests = {number: run.contest(siblings) for number, run in runs.items()}
            for contest in contests.values():
                stack.callback(contest.close)
            yield from self._search(place, runs, contests, siblings)
            for ended, (number, run) in enumerate(runs.items(), start=1):
                search = run.search(contests[number])
                if self.measured and search.working:
                    self._tell(number, "final", len(search.study.trials), self.options.budget, search.best_us)
                result = yield from run.entry(search)
                self.work.note(place, SEARCHING + (1.0 - SEARCHING) * ended / len(runs))
                self._end(number, result)

    def _search(
        self, place: int, runs: Mapping[int, ProblemRun], contests: Mapping[int, Contest],
        siblings: Sequence[CacheEntry],
    ) -> Steps[None]:  # fmt: skip
        """Searches the problems of a group together."""
        begin: float | None = None  # the first result: starting the workers is no search
        options, shop, budget = self.options, self.shop, self.options.budget
        numbers = {contest.problem: number for number, contest in contests.items()}
        search = self.searches[place] = KindSearch(
            list(contests.values()), shop.carried, budget=budget, seeds_only=options.profile.seeds_only
        )
        # Without a GPU only compiling costs time: each kernel is a trial of all problems, and few are added.
        cheap = not self.measured and options.trials is None
        relatives = any(kernel_kind.shares_kernels(search.problem, entry.problem) for entry in siblings)
        planned = self._kernels(list(contests), known=relatives) if cheap else budget * len(contests)
        begun, heard_of, kernels = shop.begun, 0, planned

        def more() -> bool:
            wanted = search.more() and (not cheap or shop.begun - begun < kernels)
            search.ended = not wanted
            return wanted

        def now() -> float:
            return time.monotonic() - shop.finals_seconds

        def overdue() -> bool:
            return begin is not None and now() - begin > options.search_seconds * len(contests)

        def late() -> bool:
            if not overdue():
                return False
            # What is predicted stands beside what calls run by themselves, however busy the compilers are.
            return self.measured or not any(runs[number].awaits_default(each) for number, each in contests.items())

        def heard(trial: Trial) -> None:
            nonlocal begin, heard_of, kernels
            begin = now() if begin is None else begin
            heard_of += 1
            if search.gain > GAIN and shop.begun - begun > EXPLORED * planned:
                kernels = max(kernels, min(math.ceil(MOST * planned), shop.begun - begun + PATIENCE))
            self.work.note(place, SEARCHING * min(1.0, heard_of / max(1, planned)))
            number, trials = numbers[search.recorded], search.contests[search.recorded].trials
            best = min((t.time_us for t in trials.values() if t.time_us is not None), default=None)
            self._tell(number, "search", len(trials), budget, best, str(trial.detail))

        yield from shop.search(search, budget=budget, more=more, late=late, heard=heard)
        while search.elsewhere and not overdue():  # what others are trying counts; what they give up is tried here
            if shop.idle:
                time.sleep(LISTEN_SECONDS)
            else:  # another problem's search goes on
                yield
            search.hear()
            yield from shop.search(search, budget=budget, more=more, late=late, heard=heard)
        search.ended = True
        for contest in contests.values():
            shop.count_left_out(contest.too_slow.values())

    def _kernels(self, numbers: Sequence[int], *, known: bool = False) -> int:
        """New kernels for problems of one kind without the card, of which another one may be known already."""
        profile = self.options.profile
        siblings = math.ceil(profile.sibling_kernels * (len(numbers) - (not known)))
        return siblings + (1 if known else profile.kernels)  # the known winner

    def _end(self, number: int, result: CacheEntry | str) -> None:
        """Keeps what came of a problem: its entry, or in words why there is none."""
        problem = self.problems[number]
        if isinstance(result, str):
            self.failed[problem.key] = result
            self._tell(number, "done", 0, 0, None, result)
            return
        self.entries[problem.key] = result
        store.merge(self.options.cache, self.device, problem.op, [result])
        self._tell(number, "done", result.search.trials, result.search.trials, result.time_us)

    def _tell(self, number: int, phase: str, tried: int, planned: int, best_us: float | None, detail: str = "") -> None:
        problem = self.problems[number]
        report = Progress(
            problem=problem,
            index=number,
            total=len(self.problems),
            phase=phase,
            tried=tried,
            planned=planned,
            best_us=best_us,
            best_tflops=problem.flops() / best_us / 1e6 if best_us is not None else None,
            detail=detail,
            share=self.work.share,
        )
        self.listen(report)


def _ended(work: Steps[None]) -> bool:
    """Goes on with some work until it must wait for a worker again, or ends."""
    try:
        next(work)
    except StopIteration:
        return True
    return False


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
