"""From a variant to a trial: render, compile ahead in workers, then predict or, on the GPU, validate and time."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autoattn.codegen import render
from autoattn.core.cache_entry import WorstCase
from autoattn.core.device import Device
from autoattn.core.paired_stats import PATIENCE
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome, StaticReport, Trial, Verdict
from autoattn.core.variant import Source, Variant
from autoattn.search import job_results, rehearsal
from autoattn.search.gpu_assignment import GpuAssignment
from autoattn.search.gpu_jobs import Admit, Final, Finished, Outgrow, Prepare, Rehearse, Screen, Screened, kind_of
from autoattn.search.kind_search import Proposer
from autoattn.workers.compile_job import ALLOCATOR, Inspect
from autoattn.workers.worker_pool import Failure, Job, Pool, cores, next_results

COMPILE_SECONDS = 60.0  # the slowest variant of the space takes a tenth of it
GPU_SECONDS = 30.0  # validation and a first look; a hanging kernel costs this much
FINAL_SECONDS = 180.0  # beside the rounds and the energy
ENERGY_SHARE = 40.0  # times the energy of one contestant: all of them, and what each warms up
PEER_SECONDS = 120.0  # for a peer to be imported, compiled and looked at; one that hangs costs this much
PEER_LOSSES = 2  # workers that one peer may hang or crash in a run; then it is asked for no more
PREPARE_SECONDS = 120.0  # random operands and their reference, at most
MEASURED_WINDOW = 8  # variants in flight in one search: a sampler that waits for fewer results proposes worse
BUSY = 4  # compilers that such a search keeps at work: results are heard in order, so all wait for the slowest
WINDOW_SHARE = 8  # one in so many of a search's variants may be in flight where that is more
LARGE_BYTES = 2**32  # operands of a problem that is searched alone: the card would hold no other's beside them
COMPILER_NICENESS = 10  # below whoever times kernels: there is a compiler for each core
REHEARSAL_SECONDS = 120.0
# One thread: more would wait for the compilers' cores at every small product.
INTERPRETER = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# What workers import before their first job, by name, so that this process does not.
COMPILER_MODULE = "autoattn.workers.compile_job"
GPU_MODULE = "autoattn.search.gpu_jobs"
# torch.compile, which some peers need, starts no processes that would run beside what is timed.
TIMING = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
COMPILER = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **ALLOCATOR}


_RUNS = object()
T = TypeVar("T")
Steps = Generator[None, None, T]  # work that yields whenever it must wait for a worker


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """A variant on its way."""

    problem: Problem
    variant: Variant
    source: Source
    inspected: Trial | None = None  # that awaits its look on a GPU
    place: int = 0  # of the GPU that looks at it
    trial: Trial | None = None  # what became of it


class Workshop:
    """Worker pools, and what they found out, shared by all problems of a run."""

    def __init__(self, device: Device, *, measured: bool, jobs: int | None = None, cards: Sequence[str] = ()) -> None:
        """Takes `cards` as CUDA_VISIBLE_DEVICES calls them, a worker for each; none means the current one."""
        self.device, self.measured = device, measured
        self._jobs = jobs if jobs is not None else cores()
        self.compilers = Pool(
            size=self._jobs, environment=COMPILER, niceness=COMPILER_NICENESS, preload=COMPILER_MODULE
        )
        # One worker a GPU, so that nothing else runs while it times; without one, interpreters that time nothing.
        apart = [{"CUDA_VISIBLE_DEVICES": card} for card in cards]
        self._cards = max(1, len(cards))
        if measured:
            self.bench = Pool(size=self._cards, environment=TIMING, apart=apart, preload=GPU_MODULE)
        else:
            self.bench = Pool(size=self._jobs, environment=INTERPRETER, preload=GPU_MODULE)
        self._reports: dict[str, StaticReport | Failure] = {}  # by source digest
        self._tickets: dict[int, str] = {}
        self._gpus = GpuAssignment(self._cards)
        self._prepared: set[tuple[Problem, int]] = set()  # whose looks a GPU has made ready
        self._looks: dict[int, _Slot] = {}  # on a GPU now, or next there, by ticket
        self._looked_at: dict[tuple[Problem, str], Screened] = {}  # by problem and machine code
        self._finals: dict[int, Any] = {}  # what came of the finals, by ticket; _RUNS for those that still run
        self._finals_begun: dict[int, float] = {}  # those that still run
        self._finals_seconds = 0.0
        self._rehearsed: dict[int, Any] = {}  # what came of rehearsals, by ticket; _RUNS for those that still run
        self._lost_peers: Counter[str] = Counter()  # peer -> jobs of it that gave no result
        self._passed: dict[tuple[Problem, str], Verdict] = {}  # by kind of problem and machine code
        self._verdicts: dict[str, Verdict] = {}  # of the interpreter, by the digest of a structure
        self.outcomes: Counter[Outcome] = Counter()  # of trials
        self.rehearsals: Counter[Outcome] = Counter()  # of variants that the interpreter was asked about
        self.reasons: Counter[str] = Counter()  # why variants failed, in words

    @property
    def kernels(self) -> int:
        """Distinct kernels whose machine code was read in this run."""
        return sum(isinstance(report, StaticReport) for report in self._reports.values())

    @property
    def begun(self) -> int:
        """Distinct kernels whose compile was begun in this run."""
        return len(self._reports) + len(self._tickets)

    @property
    def busy_seconds(self) -> tuple[float, float]:
        """Seconds that compilers and GPUs had work, each kind's workers added up."""
        return self.compilers.busy_seconds, self.bench.busy_seconds

    def close(self) -> None:
        """Ends all workers."""
        self.compilers.close()
        self.bench.close()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at_once(self, problem: Problem) -> int:
        """How many problems may be searched together, so that all compilers have work while this one is searched."""
        if not self.measured or problem.bytes() > LARGE_BYTES:
            return 1
        return max(1, self._jobs // BUSY)

    @property
    def idle(self) -> bool:
        """Whether no worker has anything to do."""
        return not (self._tickets or self._looks or self._finals_begun)

    @property
    def finals_seconds(self) -> float:
        """Seconds in which finals had the GPUs to themselves: no time of other problems' searches."""
        now = time.monotonic()
        running = sum(now - begun for begun in self._finals_begun.values())
        return (self._finals_seconds + running) / self._cards

    def wait(self) -> None:
        """Waits until some worker is done with something.

        Raises:
            HostError: the machine lacks what every variant needs.
        """
        for pool, ticket, result in next_results(self.compilers, self.bench):
            job_results.stop_if_hopeless(result)
            if pool is self.compilers:
                self._reports[self._tickets.pop(ticket)] = result
            elif ticket in self._looks:
                slot = self._looks.pop(ticket)
                slot.trial = self._looked(slot, result)
            elif ticket in self._finals:
                self._finals[ticket] = result
                self._finals_seconds += time.monotonic() - self._finals_begun.pop(ticket)
            elif ticket in self._rehearsed:
                self._rehearsed[ticket] = result

    def search(
        self,
        study: Proposer,
        *,
        budget: int = 0,
        more: Callable[[], bool],
        late: Callable[[], bool],
        heard: Callable[[Trial], None],
    ) -> Steps[None]:
        """Tries what the study proposes while `more()` holds; once late, leaves what is begun.

        Variants are compiled ahead, but reported to the study in the order in which it proposed them, so that a seed
        gives the same search whatever the compiler's timing.

        Args:
            budget: variants that the search will try: the more, the more of them may be in flight.
        """
        pending: deque[_Slot] = deque()
        best_us: float | None = min((t.time_us for t in study.trials.values() if t.time_us is not None), default=None)
        self._prepare(study.problem, self._gpus.home_of(study.problem))
        with self._gpus.searching(study.problem):
            while True:
                if late():  # what is on a GPU by now is waited for, the rest is not
                    pending = deque(slot for slot in pending if slot.trial is not None or slot.inspected is not None)
                else:
                    self._look_ahead(pending, best_us)  # before the sampler thinks: the GPU need not wait for it
                    self._begin_ahead(pending, study, budget, more)
                    self._look_ahead(pending, best_us)
                if not pending:
                    return
                trial = pending[0].trial
                if trial is None:
                    yield
                    continue
                pending.popleft()
                self._count(self.outcomes, trial.outcome, trial.detail)
                if trial.time_us is not None and (best_us is None or trial.time_us < best_us):
                    best_us = trial.time_us
                study.record(trial)
                heard(trial)

    def alone(self, steps: Steps[T]) -> T:
        """Does some work and nothing beside it."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            self.wait()

    def compiled(self, problem: Problem, variants: Sequence[Variant]) -> Steps[list[Variant]]:
        """Compiles variants ahead of their finals; gives those that the compiler takes."""
        slots = [self._begin(problem, variant) for variant in variants]
        while any(slot.source.digest not in self._reports for slot in slots):
            yield
        return [slot.variant for slot in slots if isinstance(self._reports[slot.source.digest], StaticReport)]

    def rehearse(self, problem: Problem, *variants: Variant) -> list[Verdict | Failure]:
        """Checks the structures of variants in interpreters, each structure once; counts what became of the variants.

        Raises:
            HostError: the machine lacks what every variant needs.
        """
        structures = [rehearsal.structure(problem, variant) for variant in variants]
        new = {
            source.digest: Rehearse(problem=kind, source=source)
            for kind, source in structures
            if source.digest not in self._verdicts
        }
        tickets = {digest: self.bench.submit(job, REHEARSAL_SECONDS) for digest, job in new.items()}
        self._rehearsed |= dict.fromkeys(tickets.values(), _RUNS)
        while any(self._rehearsed[ticket] is _RUNS for ticket in tickets.values()):
            self.wait()  # the compilers go on meanwhile
        by_digest = {digest: self._rehearsed.pop(ticket) for digest, ticket in tickets.items()}
        self._verdicts |= {digest: verdict for digest, verdict in by_digest.items() if isinstance(verdict, Verdict)}
        results = [by_digest.get(source.digest) or self._verdicts[source.digest] for _, source in structures]
        for result in results:
            self._count(self.rehearsals, rehearsal.outcome_of(result), rehearsal.reason_of(result))
        return results

    def knows_structure(self, problem: Problem, variant: Variant) -> bool:
        """Whether an interpreter has judged the structure of a variant in this run."""
        return rehearsal.structure(problem, variant)[1].digest in self._verdicts

    def _count(self, counts: Counter[Outcome], outcome: Outcome, detail: str) -> None:
        counts[outcome] += 1
        if outcome is not Outcome.OK:
            self.reasons[f"{outcome.value}: {detail}"] += 1

    def count_left_out(self, trials: Iterable[Trial]) -> None:
        """Counts variants that nothing was tried of."""
        for trial in trials:
            self._count(self.outcomes, trial.outcome, trial.detail)

    def check(self, problem: Problem, variant: Variant) -> Screened | Verdict | Failure:
        """Checks one variant's numbers: at work on the GPU, or its structure in the interpreter.

        Raises:
            HostError: the machine lacks what every variant needs.
        """
        if not self.measured:
            return self.rehearse(problem, variant)[0]
        job = Screen(problem=problem, source=render.render(problem, variant), verdict=None, best_us=None)
        result: Screened | Failure = self.bench.result(job, GPU_SECONDS)
        job_results.stop_if_hopeless(result)
        return result

    def final(
        self,
        problem: Problem,
        variants: list[Variant],
        *,
        seconds: float,
        seed: int,
        energy_seconds: float = 0.0,
        peers: Sequence[str] = (),
        best_us: float | None = None,
    ) -> Steps[Finished | Failure]:
        """Times the finalists of a problem against one another and the rivals, all on one GPU: two of a kind differ.

        Asks what each costs, if `energy_seconds`. A peer that fails costs the finals nothing but its time.

        Args:
            peers: names of peers that take part if they can; `Finished.absent` says why others do not.
            best_us: the fastest finalist's time at a first look; peers much slower take no part.
        """
        absent = yield from self._refused(problem, peers, best_us)
        admitted = tuple(name for name in peers if name not in absent)
        job = Final(
            problem=problem,
            finalists=tuple(render.render(problem, variant) for variant in variants),
            seconds=seconds,
            seed=seed,
            energy_seconds=energy_seconds,
            peers=admitted,
        )
        limit = FINAL_SECONDS + 2 * PATIENCE * seconds + ENERGY_SHARE * energy_seconds
        result: Finished | Failure = yield from self._ended(problem, job, limit + PEER_SECONDS * len(admitted))
        if isinstance(result, Failure) and admitted:  # perhaps a peer's fault
            absent |= dict.fromkeys(admitted, f"finals with it {job_results.words(result)}")
            result = yield from self._ended(problem, replace(job, peers=()), limit)
        if isinstance(result, Failure):
            return result
        return replace(result, absent={**absent, **result.absent})

    def _refused(self, problem: Problem, peers: Sequence[str], best_us: float | None) -> Steps[dict[str, str]]:
        """Has the finals' GPU prepare each peer; gives those that do not take part, and why."""
        absent: dict[str, str] = {}
        for name in peers:
            if self._lost_peers[name] >= PEER_LOSSES:
                absent[name] = f"left out after it hung or crashed {PEER_LOSSES} times in this run"
                continue
            reason = yield from self._ended(problem, Admit(problem=problem, peer=name, best_us=best_us), PEER_SECONDS)
            if isinstance(reason, Failure):
                self._lost_peers[name] += 1
            if reason is not None:
                absent[name] = job_results.words(reason)
        return absent

    def _ended(self, problem: Problem, job: Job, seconds: float) -> Steps[Any]:
        """Has the problem's own GPU do a job of its finals, and yields until it is done."""
        ticket = self.bench.submit(job, seconds, place=self._gpus.home_of(problem))
        self._finals[ticket], self._finals_begun[ticket] = _RUNS, time.monotonic()
        while self._finals[ticket] is _RUNS:
            yield
        return self._finals.pop(ticket)

    def outgrow(self, problem: Problem, variant: Variant, *, seed: int) -> Steps[WorstCase | Failure]:
        """Times a finalist that keeps its first maximum where it computes its tiles twice, on the finals' GPU."""
        job = Outgrow(problem=problem, source=render.render(problem, variant), seed=seed)
        result: WorstCase | Failure = yield from self._ended(problem, job, FINAL_SECONDS)
        return result

    def _window(self, study: Proposer, budget: int) -> int:
        """Variants begun before the results of those ahead of them are known: enough that nobody waits, and no more."""
        if not self.measured:
            return 4 * self._jobs
        if study.waiting:  # they are tried whatever comes of the others
            return sys.maxsize
        return max(min(2 * self._jobs, max(MEASURED_WINDOW, budget // WINDOW_SHARE)), 2 * self._cards)

    def _begin_ahead(self, pending: deque[_Slot], study: Proposer, budget: int, more: Callable[[], bool]) -> None:
        """Begins what the study proposes, as far as it may be in flight."""
        while len(pending) < self._window(study, budget) and more():
            if (variant := study.propose(more)) is None:
                return
            pending.append(self._begin(study.problem, variant))

    def _begin(self, problem: Problem, variant: Variant) -> _Slot:
        source = render.render(problem, variant)
        if source.digest not in self._reports and source.digest not in self._tickets.values():
            ticket = self.compilers.submit(Inspect(source=source, arch=self.device.arch), COMPILE_SECONDS)
            self._tickets[ticket] = source.digest
        return _Slot(problem=problem, variant=variant, source=source)

    def _look_ahead(self, pending: deque[_Slot], best_us: float | None) -> None:
        """Settles what can be settled, and gives each free GPU a variant, in the order of the proposals."""
        if not pending:
            return
        ahead = 2 * len(self._gpus.places_for(pending[0].problem)) - 1
        for slot in list(pending)[:ahead]:
            report = self._reports.get(slot.source.digest)
            if report is None:
                return
            looks = [(look.problem, look.place) for look in self._looks.values()]
            if not (free := self._gpus.free_for(slot.problem, looks)):
                return
            if slot.trial is not None or slot.inspected is not None:
                continue
            trial = job_results.inspected(slot.problem, self.device, slot.variant, slot.source.digest, report)
            if not self.measured or isinstance(report, Failure) or trial.outcome is not Outcome.OK:
                slot.trial = trial
                continue
            slot.inspected = trial
            code = job_results.code_of(report, slot.source)
            same = self._looked_at.get((slot.problem, code))  # another text with the same machine code
            if same is not None:
                slot.trial = self._looked(slot, same)
                continue
            verdict = self._passed.get((kind_of(slot.problem), code))
            job = Screen(problem=slot.problem, source=slot.source, verdict=verdict, best_us=best_us)
            slot.place = free[0]
            self._prepare(slot.problem, slot.place)
            self._looks[self.bench.submit(job, GPU_SECONDS, place=slot.place)] = slot

    def _prepare(self, problem: Problem, place: int) -> None:
        """Has a GPU make what looks at a problem's variants need, once."""
        if self.measured and (problem, place) not in self._prepared:
            self._prepared.add((problem, place))
            self.bench.submit(Prepare(problem=problem), PREPARE_SECONDS, place=place)

    def carried(self, problem: Problem, trial: Trial) -> Trial:
        """What a trial without the card says of another problem of the same kind."""
        if trial.report is None:
            return trial
        return job_results.inspected(problem, self.device, trial.variant, trial.digest, trial.report)

    def _looked(self, slot: _Slot, result: Screened | Failure) -> Trial:
        """What a first look on a GPU says of a variant; one that passed speaks for all with its machine code."""
        assert slot.inspected is not None
        if isinstance(result, Screened):
            report = self._reports[slot.source.digest]
            assert isinstance(report, StaticReport)
            code = job_results.code_of(report, slot.source)
            self._passed[kind_of(slot.problem), code] = result.verdict
            self._looked_at[slot.problem, code] = result
        return job_results.looked(slot.problem, slot.inspected, result)
