"""Variant -> Trial: renders, compiles ahead in worker processes, then predicts or, on the GPU, validates and times."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoattn import model, occupancy, render
from autoattn.contest import Contest
from autoattn.device import Device
from autoattn.entry import WorstCase
from autoattn.jobs import Final, Finished, Inspect, Outgrow, Rehearse, Screen, Screened, kind_of
from autoattn.mask import Mask
from autoattn.problem import DType, Precision, Problem, padded, pieces
from autoattn.rounds import PATIENCE
from autoattn.trial import Measurement, Outcome, StaticReport, Trial, Verdict
from autoattn.variant import Source, Variant
from autoattn.workers import Failure, Pool, next_results

COMPILE_SECONDS = 60.0  # the slowest variant of the space takes a tenth of it
GPU_SECONDS = 30.0  # validation and a first look; a hanging kernel costs this much
FINAL_SECONDS = 180.0  # beside the rounds and the energy
ENERGY_SHARE = 40.0  # times the energy of one contestant: all of them, and what each warms up
MEASURED_WINDOW = 8
REHEARSAL_SECONDS = 120.0
REHEARSAL_TILE = 16  # the smallest tile: the structure is the same and the interpreter is slow
# One thread: more would wait for the compilers' cores at every small product.
INTERPRETER = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
COMPILER = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """A variant on its way."""

    variant: Variant
    source: Source
    inspected: Trial | None = None  # that awaits its look on a GPU
    trial: Trial | None = None  # what became of it


class Workshop:
    """Worker pools, and what they found out, shared by all problems of a run."""

    def __init__(self, device: Device, *, measured: bool, jobs: int | None = None, cards: Sequence[str] = ()) -> None:
        """Takes `cards` as CUDA_VISIBLE_DEVICES calls them, a worker for each; none means the current one."""
        self.device, self.measured = device, measured
        jobs = jobs if jobs is not None else len(os.sched_getaffinity(0))
        self._compilers = Pool(size=jobs, environment=COMPILER)
        # One worker a GPU, so that nothing else runs while it times; without a GPU, the interpreter takes its place.
        apart = [{"CUDA_VISIBLE_DEVICES": card} for card in cards]
        self._cards = max(1, len(cards))
        self._bench = Pool(size=self._cards, environment={} if measured else INTERPRETER, apart=apart)
        # Variants begun before the results of those ahead of them are known: enough that nobody waits, and no more.
        self._window = max(min(2 * jobs, MEASURED_WINDOW), 2 * self._cards) if measured else 4 * jobs
        self._reports: dict[str, StaticReport | Failure] = {}  # by source digest
        self._tickets: dict[int, str] = {}
        self._looks: dict[int, _Slot] = {}  # on a GPU now, by ticket
        self._verdicts: dict[str, Verdict] = {}  # by source digest, or by the digest of a structure
        self.outcomes: Counter[Outcome] = Counter()

    @property
    def kernels(self) -> int:
        """Distinct kernels whose machine code was read in this run."""
        return sum(isinstance(report, StaticReport) for report in self._reports.values())

    @property
    def begun(self) -> int:
        """Distinct kernels whose compile was begun in this run."""
        return len(self._reports) + len(self._tickets)

    def close(self) -> None:
        """Ends all workers."""
        self._compilers.close()
        self._bench.close()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def search(
        self,
        study: Contest,
        *,
        more: Callable[[int], bool],
        late: Callable[[], bool],
        heard: Callable[[Trial], None],
    ) -> None:
        """Tries what the study proposes while `more(variants begun)` holds; once it is late, leaves what is begun.

        Variants are compiled ahead, but reported to the study in the order in which it proposed them, so that a seed
        gives the same search whatever the compiler's timing.
        """
        pending: deque[_Slot] = deque()
        begun = 0
        best_us: float | None = min((t.time_us for t in study.trials.values() if t.time_us is not None), default=None)
        while True:
            if late():  # what is on a GPU by now is waited for, the rest is not
                pending = deque(slot for slot in pending if slot.trial is not None or slot.inspected is not None)
            else:
                while len(pending) < self._window and more(begun) and (variant := study.propose()) is not None:
                    begun += 1
                    pending.append(_Slot(variant=variant, source=self._begin(study.problem, variant)))
                self._look_ahead(study.problem, pending, best_us)
            if not pending:
                return
            trial = pending[0].trial
            if trial is None:
                self._collect(study.problem)
                continue
            pending.popleft()
            self.outcomes[trial.outcome] += 1
            if trial.time_us is not None and (best_us is None or trial.time_us < best_us):
                best_us = trial.time_us
            study.record(trial)
            heard(trial)

    def rehearse(self, problem: Problem, variant: Variant) -> Verdict | Failure:
        """Checks the structure of a variant in the interpreter, once per structure."""
        kind, source = self._structure(problem, variant)
        if source.digest not in self._verdicts:
            result = self._bench.result(Rehearse(problem=kind, source=source), REHEARSAL_SECONDS)
            if isinstance(result, Failure):
                return result
            self._verdicts[source.digest] = result
        return self._verdicts[source.digest]

    def check(self, problem: Problem, variant: Variant) -> Screened | Verdict | Failure:
        """Checks one variant's numbers: at work on the GPU, or its structure in the interpreter."""
        if not self.measured:
            return self.rehearse(problem, variant)
        job = Screen(problem=problem, source=render.render(problem, variant), verdict=None, best_us=None)
        result: Screened | Failure = self._bench.result(job, GPU_SECONDS)
        return result

    def final(
        self, problem: Problem, variants: list[Variant], *, seconds: float, seed: int, energy_seconds: float = 0.0
    ) -> Finished | Failure:
        """Times the finalists against one another and the rivals, all on one GPU: two of a kind differ.

        Asks what each costs, if `energy_seconds`.
        """
        job = Final(
            problem=problem,
            finalists=tuple(render.render(problem, variant) for variant in variants),
            seconds=seconds,
            seed=seed,
            energy_seconds=energy_seconds,
        )
        result: Finished | Failure = self._bench.result(
            job, FINAL_SECONDS + 2 * PATIENCE * seconds + ENERGY_SHARE * energy_seconds, place=0
        )
        return result

    def outgrow(self, problem: Problem, variant: Variant, *, seed: int) -> WorstCase | Failure:
        """Times a finalist that keeps its first maximum where it computes its tiles twice, on the finals' GPU."""
        job = Outgrow(problem=problem, source=render.render(problem, variant), seed=seed)
        result: WorstCase | Failure = self._bench.result(job, FINAL_SECONDS, place=0)
        return result

    def _begin(self, problem: Problem, variant: Variant) -> Source:
        source = render.render(problem, variant)
        if source.digest not in self._reports and source.digest not in self._tickets.values():
            ticket = self._compilers.submit(Inspect(source=source, arch=self.device.arch), COMPILE_SECONDS)
            self._tickets[ticket] = source.digest
        return source

    def _look_ahead(self, problem: Problem, pending: deque[_Slot], best_us: float | None) -> None:
        """Settles what can be settled, and gives each free GPU a variant, in the order of the proposals."""
        for slot in list(pending)[: 2 * self._cards - 1]:
            report = self._reports.get(slot.source.digest)
            if report is None or len(self._looks) == self._cards:
                return
            if slot.trial is None and slot.inspected is None:
                trial = self._inspected(problem, slot, report)
                if self.measured and trial.outcome is Outcome.OK:
                    slot.inspected = trial
                    verdict = self._verdicts.get(slot.source.digest)
                    job = Screen(problem=problem, source=slot.source, verdict=verdict, best_us=best_us)
                    self._looks[self._bench.submit(job, GPU_SECONDS)] = slot
                else:
                    slot.trial = trial

    def _collect(self, problem: Problem) -> None:
        for pool, ticket, result in next_results(self._compilers, self._bench):
            if pool is self._compilers:
                self._reports[self._tickets.pop(ticket)] = result
            else:
                slot = self._looks.pop(ticket)
                slot.trial = self._looked(problem, slot, result)

    def _inspected(self, problem: Problem, slot: _Slot, report: StaticReport | Failure) -> Trial:
        """What the machine code says of a variant."""
        trial = Trial(variant=slot.variant, outcome=Outcome.OK, digest=slot.source.digest)
        if isinstance(report, Failure):
            return replace(trial, outcome=report.outcome, detail=report.detail)
        trial = replace(trial, report=report)
        reason = occupancy.why_unlaunchable(self.device, report)
        if reason is not None:
            return replace(trial, outcome=Outcome.INFEASIBLE, detail=reason)
        if self.device.peak_flops:
            prediction = model.predict(problem, self.device, slot.variant.as_dict(), report)
            trial = replace(trial, prediction=prediction)
        return trial

    def _looked(self, problem: Problem, slot: _Slot, result: Screened | Failure) -> Trial:
        """What a first look on a GPU says of a variant."""
        assert slot.inspected is not None
        if isinstance(result, Failure):
            return replace(slot.inspected, outcome=result.outcome, detail=result.detail)
        self._verdicts[slot.source.digest] = result.verdict
        looked = Measurement(
            median_us=result.median_us,
            p20_us=result.median_us,
            p80_us=result.median_us,
            samples=result.samples,
            tflops=problem.flops() / result.median_us / 1e6,
        )
        return replace(slot.inspected, verdict=result.verdict, measurement=looked)

    def _structure(self, problem: Problem, variant: Variant) -> tuple[Problem, Source]:
        """The same Jinja branches with the smallest numbers, in a dtype that the interpreter computes rightly.

        Barriers are left out, since the interpreter runs one program's threads as one.
        """
        dtype = DType.FLOAT32 if problem.dtype is DType.FLOAT32 else DType.FLOAT16
        split = bool(variant["HEAD_SPLIT"])
        odd = render.natural_traits(problem).alignment == 1  # nothing divides the strides: a branch of its own
        head_dim = head_dim_v = _small_head_dim(problem.head_dim, split=split, odd=odd)
        if problem.head_dim_v != problem.head_dim:
            head_dim_v = _small_head_dim(problem.head_dim_v, split=split, odd=odd)
            # Two head dims stay two, also where one number would have the branches of both.
            if head_dim_v == head_dim:
                head_dim_v += 16 if head_dim == 16 else 32
        mask = problem.mask
        if mask.sparse:  # one step a block where it was one, else two
            steps = [2 if block > int(variant[tile]) else 1 for tile, block in _tiles(mask).items()]
            mask = replace(mask, block_q=REHEARSAL_TILE * steps[0], block_kv=REHEARSAL_TILE * steps[1])
        # The interpreter knows no bfloat16 products, and tf32 ones take their factors in another order.
        products = variant["products"] != render.AS_ASKED
        kind = replace(
            kind_of(replace(problem, mask=mask)),
            dtype=dtype,
            precision=Precision.IEEE if products else problem.precision,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
        )
        small = {"BLOCK_M": REHEARSAL_TILE, "BLOCK_N": REHEARSAL_TILE, "num_warps": 1, "num_stages": 1, "maxnreg": 0}
        # As constants, not as branches
        numbers = {"HEAD_GROUP": 4, "PERSISTENT": min(1, int(variant["PERSISTENT"]))}
        numbers |= {"SPLITS": 2} if "SPLITS" in variant.as_dict() else {}
        params = variant.as_dict() | small | numbers | {"barrier": "none", "products": render.AS_ASKED}
        return kind, render.render(kind, Variant.of(variant.template, params))


def _tiles(mask: Mask) -> dict[str, int]:
    return {"BLOCK_M": mask.block_q, "BLOCK_N": mask.block_kv}


def _small_head_dim(head_dim: int, *, split: bool, odd: bool) -> int:
    """A small head dim that is held in as many tiles, and fills the last one just when `head_dim` does."""
    widths = pieces(head_dim) if split else (padded(head_dim),)
    if sum(widths) == head_dim:
        return 16 if len(widths) == 1 else 48  # 32 + 16
    small = 24 if len(widths) == 1 else 40
    return small + odd
