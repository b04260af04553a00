"""From a variant to a trial: what is compiled once, in which order the study hears of it, what becomes of failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels
import pytest
import samples
from fake_pool import (
    BROKEN,
    FINISHED,
    GOOD,
    LARGE,
    Bench,
    FakePool,
    Studied,
    benched,
    compile_jobs,
    report_of,
    searched,
    set_pool,
    variants,
)

from autoattn.codegen import search_space
from autoattn.core.problem import DType, Layout, Numerics, Op, Precision
from autoattn.core.trial import Outcome, StaticReport, Trial
from autoattn.errors import HostError
from autoattn.search import storage, trial_pipeline
from autoattn.search.gpu_jobs import Final, Prepare, Screen, Screened, kind_of
from autoattn.search.shared_trials import Ledger
from autoattn.search.study import Study
from autoattn.search.trial_pipeline import Workshop
from autoattn.workers.worker_pool import Failure


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return set_pool(monkeypatch)


# --- search -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2, 5])
@pytest.mark.parametrize("measured", [False, True])
def test_the_study_hears_in_the_order_of_its_proposals(bench: Bench, measured: bool, jobs: int) -> None:
    proposals = variants(10)
    shop = Workshop(samples.A30, measured=measured, jobs=jobs)
    study = Studied(list(proposals))
    heard = searched(shop, study)
    assert [trial.variant for trial in heard] == proposals == list(study.trials)
    assert all(trial.outcome is Outcome.OK for trial in heard)
    assert shop.kernels == 10
    assert shop.outcomes == {Outcome.OK: 10}


def test_a_search_begins_no_more_than_it_may(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=4)
    study = Studied(variants(10))
    assert len(searched(shop, study, more=lambda: len(study.proposals) > 7)) == 3
    assert len(compile_jobs(shop)) == 3


def test_a_late_search_leaves_what_it_began(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    study = Studied(variants(10))
    heard = searched(shop, study, late=lambda: len(study.trials) >= 2)
    assert len(heard) == 2
    rest = [variant for variant in variants(10) if variant not in study.trials]
    again = searched(shop, Studied(list(rest)))
    assert [trial.variant for trial in again] == rest, "what was left is still compiled, once"
    assert len(compile_jobs(shop)) == 10


def test_a_kernel_that_two_problems_share_is_compiled_once(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    first = searched(shop, Studied(variants(4)))
    other = replace(LARGE, batch=2, seq_q=512, layout=Layout.BSHD)
    second = searched(shop, Studied(variants(4), other))
    assert len(compile_jobs(shop)) == shop.kernels == 4
    assert [trial.digest for trial in first] == [trial.digest for trial in second]
    assert [trial.time_us for trial in first] != [trial.time_us for trial in second]


def test_kernels_are_compiled_for_the_device(bench: Bench) -> None:
    shop = Workshop(samples.H200, measured=False, jobs=2)
    searched(shop, Studied(variants(2)))
    assert {job.arch for job in compile_jobs(shop)} == {90}


def test_what_the_compiler_refuses_is_a_trial_with_its_words(bench: Bench) -> None:
    bench.inspect = lambda job: BROKEN if job.source.variant["BLOCK_M"] == 128 else report_of(job)
    shop = Workshop(samples.A30, measured=False, jobs=2)
    heard = searched(shop, Studied(variants(4)))
    broken = [trial for trial in heard if trial.variant["BLOCK_M"] == 128]
    assert [(trial.outcome, trial.detail, trial.time_us) for trial in broken] == [
        (Outcome.COMPILE_ERROR, "ptxas said no", None)
    ]
    assert shop.kernels == 3
    assert shop.outcomes == {Outcome.OK: 3, Outcome.COMPILE_ERROR: 1}


def test_what_the_report_proves_unlaunchable_is_infeasible_and_never_run(bench: Bench) -> None:
    bench.inspect = lambda job: report_of(job, shared_bytes=200_000)
    shop = Workshop(samples.A30, measured=True, jobs=2)
    (trial,) = searched(shop, Studied(variants(1)))
    assert trial.outcome is Outcome.INFEASIBLE
    assert "200,000 bytes of shared memory" in trial.detail
    assert trial.report is not None
    assert benched(shop) == []


def test_without_the_card_a_trial_is_predicted_and_claims_no_measurement(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    (trial,) = searched(shop, Studied(variants(1)))
    assert trial.prediction is not None
    assert trial.time_us == trial.prediction.time_us
    assert (trial.verdict, trial.measurement) == (None, None)
    assert benched(shop) == []


def test_a_card_without_a_profile_is_measured_without_a_prediction(bench: Bench) -> None:
    shop = Workshop(replace(samples.A30, peak_flops={}), measured=True, jobs=2)
    (trial,) = searched(shop, Studied(variants(1)))
    assert trial.prediction is None
    assert trial.time_us == 100.0


# --- on the card ------------------------------------------------------------------------------------------------------


def test_on_the_card_a_trial_carries_its_verdict_and_its_time(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=True, jobs=2)
    (trial,) = searched(shop, Studied(variants(1)))
    assert trial.verdict == GOOD
    assert trial.measurement is not None
    assert (trial.measurement.median_us, trial.measurement.samples) == (100.0, 9)
    assert trial.measurement.tflops == pytest.approx(LARGE.flops() / 100.0 / 1e6)


def test_the_best_time_so_far_is_told_so_that_losers_are_short(bench: Bench) -> None:
    times = iter([300.0, 200.0, 250.0, 100.0])
    bench.screen = lambda job: Screened(verdict=GOOD, median_us=next(times), samples=3)
    shop = Workshop(samples.A30, measured=True, jobs=2)
    searched(shop, Studied(variants(4)))
    assert [job.best_us for job in benched(shop)] == [None, 300.0, 200.0, 200.0]


def test_a_resumed_search_knows_the_best_time_of_the_last(bench: Bench) -> None:
    first, second = variants(2)
    known = Trial(variant=first, outcome=Outcome.OK, measurement=samples.measurement(LARGE, 40.0))
    shop = Workshop(samples.A30, measured=True, jobs=2)
    searched(shop, Studied([second], trials={first: known}))
    assert [job.best_us for job in benched(shop)] == [40.0]


def test_a_kernel_that_passed_the_gate_need_not_pass_it_for_the_next_problem(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=True, jobs=2)
    searched(shop, Studied(variants(2)))
    searched(shop, Studied(variants(2), replace(LARGE, batch=2)))
    assert [job.verdict for job in benched(shop)] == [None, None, GOOD, GOOD]


@pytest.mark.parametrize("outcome", [Outcome.WRONG_RESULT, Outcome.TIMEOUT, Outcome.CRASH, Outcome.LAUNCH_ERROR])
def test_a_kernel_that_fails_on_the_card_is_a_trial_and_the_search_goes_on(bench: Bench, outcome: Outcome) -> None:
    def screen(job: Screen) -> Any:
        if job.source.variant["BLOCK_M"] == 128:
            return Failure(outcome=outcome, detail="so it was")
        return Screened(verdict=GOOD, median_us=100.0, samples=9)

    bench.screen = screen
    shop = Workshop(samples.A30, measured=True, jobs=2)
    heard = searched(shop, Studied(variants(4)))
    assert [trial.outcome for trial in heard] == [Outcome.OK, Outcome.OK, outcome, Outcome.OK]
    assert (heard[2].detail, heard[2].time_us, heard[2].verdict) == ("so it was", None, None)
    searched(shop, Studied(variants(4), replace(LARGE, batch=2)))
    assert benched(shop)[-2].verdict is None, "what failed is judged again"


# --- failures of the machine ------------------------------------------------------------------------------------------

HOPELESS = [outcome for outcome in Outcome if outcome.ends_run]


@pytest.mark.parametrize("outcome", HOPELESS)
def test_what_every_variant_lacks_ends_the_search_and_is_no_trial(bench: Bench, outcome: Outcome) -> None:
    bench.inspect = lambda job: Failure(outcome=outcome, detail="x must be, but is not; mend it")
    shop, study = Workshop(samples.A30, measured=False, jobs=1), Studied(variants(3))
    with pytest.raises(HostError, match=f"^{outcome.value}: x must be, but is not; mend it$"):
        searched(shop, study)
    assert study.trials == {}
    assert shop.outcomes == {}


def test_the_card_and_the_interpreter_end_it_too(bench: Bench) -> None:
    full = Failure(outcome=Outcome.DISK_FULL, detail="no room")
    bench.screen, bench.rehearse = lambda job: full, lambda job: full
    shop = Workshop(samples.A30, measured=True, jobs=1)
    with pytest.raises(HostError, match="no room"):
        searched(shop, Studied(variants(1)))
    with pytest.raises(HostError, match="no room"):
        shop.check(LARGE, variants(1)[0])
    with pytest.raises(HostError, match="no room"):
        Workshop(samples.A30, measured=False, jobs=1).rehearse(LARGE, variants(1)[0])


def test_short_memory_costs_one_variant_which_is_counted_and_not_journalled(bench: Bench, tmp_path: Path) -> None:
    few = Failure(outcome=Outcome.OUT_OF_MEMORY, detail="too little")
    shop = Workshop(samples.A30, measured=False, jobs=1)
    bench.inspect = lambda job: few if job is compile_jobs(shop)[1] else report_of(job)
    points = search_space.load("triton/forward")

    def study() -> Study:
        ledger = Ledger("one", storage.journal(tmp_path / "one.journal"), points)
        return Study(ledger, points, LARGE, samples.A30, seed=0, budget=4)

    first = study()
    searched(shop, first, more=lambda: first.taken < 4)
    assert shop.outcomes == {Outcome.OK: 3, Outcome.OUT_OF_MEMORY: 1}
    assert shop.reasons == {"out of memory: too little": 1}
    first.close()
    assert len(study().trials) == 3, "the next run tries that variant anew"


# --- rehearsals -------------------------------------------------------------------------------------------------------


def test_numerics_share_a_gate() -> None:
    assert kind_of(replace(LARGE, numerics=Numerics.ONLINE)) == kind_of(LARGE)


def test_a_structure_is_rehearsed_once_whatever_its_numbers(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    for problem in (
        LARGE,
        replace(LARGE, batch=1, seq_q=17, head_dim=128, head_dim_v=128),
        replace(LARGE, dtype=DType.BFLOAT16),
        replace(LARGE, numerics=Numerics.ONLINE),
    ):
        for variant in (*variants(4), kernels.variant(barrier="after_qk"), kernels.variant(maxnreg=128, HEAD_GROUP=0)):
            assert shop.rehearse(problem, variant) == [GOOD]
    assert len(benched(shop)) == 1


def test_what_became_of_rehearsals_is_counted_with_the_reason(bench: Bench) -> None:
    answers = {
        "online": GOOD,
        "lazy": replace(GOOD, ok=False, reason="by 1"),
        "first_max": Failure(outcome=Outcome.INTERPRETER_CRASH, detail="TypeError: no"),
    }
    bench.rehearse = lambda job: answers[str(job.source.variant["softmax"])]
    shop = Workshop(samples.A30, measured=False, jobs=2)
    shop.rehearse(LARGE, *(kernels.variant(softmax=softmax) for softmax in ("online", "lazy", "first_max", "lazy")))
    assert shop.rehearsals == {Outcome.OK: 1, Outcome.WRONG_RESULT: 2, Outcome.INTERPRETER_CRASH: 1}
    assert shop.reasons == {"wrong result: by 1": 2, "interpreter crash: TypeError: no": 1}
    assert shop.outcomes == {}, "a trial is what was compiled"


def test_structures_are_rehearsed_together_and_answered_in_order(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=3)
    assert shop.bench.size == 3
    lazy, plain = kernels.variant(softmax="lazy"), kernels.variant()
    bad = replace(GOOD, ok=False, reason="it is wrong")
    bench.rehearse = lambda job: bad if job.source.variant["softmax"] == "lazy" else GOOD
    assert shop.rehearse(LARGE, plain, lazy, *variants(2), lazy) == [GOOD, bad, GOOD, GOOD, bad]
    assert len(benched(shop)) == 2


@pytest.mark.parametrize(
    "change", [{"softmax": "lazy"}, {"mask_loop": "every"}, {"row_order": "ascending"}, {"PERSISTENT": 2}], ids=str
)
def test_every_other_structure_is_rehearsed(bench: Bench, change: dict[str, Any]) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    shop.rehearse(LARGE, kernels.variant())
    shop.rehearse(LARGE, kernels.variant(**change))
    assert len(benched(shop)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"mask": kernels.problem(mask="full").mask},
        {"mask": kernels.problem(mask="causal:top-left").mask},
        {"dtype": DType.FLOAT32},
        {"head_dim": 56},
        {"head_dim": 57},  # strides that nothing divides
    ],
    ids=str,
)
def test_every_other_kind_of_problem_is_rehearsed(bench: Bench, change: dict[str, Any]) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    shop.rehearse(LARGE, kernels.variant())
    shop.rehearse(replace(LARGE, **change), kernels.variant())
    shop.rehearse(replace(LARGE, head_dim=56), kernels.variant())
    digests = [job.source.digest for job in benched(shop)]
    assert len(digests) == len(set(digests)) == (2 if change == {"head_dim": 56} else 3)


def test_a_rehearsal_counts_in_a_precision_that_the_interpreter_has(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    for numbers in kernels.NUMBERS:
        dtype, precision = numbers
        shop.rehearse(replace(LARGE, dtype=dtype, precision=precision), kernels.variant())
    kinds = [(job.problem.dtype, job.problem.precision) for job in benched(shop)]
    # A tf32 product takes its factors in another order, and the others are the same to the interpreter.
    assert set(kinds) == {
        (DType.FLOAT16, Precision.IEEE),
        *((DType.FLOAT32, float32_precision) for float32_precision in Precision),
    }
    assert shop.bench.environment["TRITON_INTERPRET"] == "1"


def test_a_wrong_structure_is_remembered_and_a_lost_worker_is_not(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    lost = Failure(outcome=Outcome.TIMEOUT, detail="no answer within 120 s")
    bench.rehearse = lambda job: lost
    assert shop.rehearse(LARGE, kernels.variant()) == [lost]
    bad = replace(GOOD, ok=False, reason="it is wrong")
    bench.rehearse = lambda job: bad
    assert shop.rehearse(LARGE, kernels.variant()) == [bad]
    bench.rehearse = lambda job: GOOD
    assert shop.rehearse(LARGE, kernels.variant()) == [bad]


def test_the_compilers_go_on_while_structures_are_rehearsed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def compilers_first(*pools: Any) -> Any:
        return FakePool.next_results(*reversed(pools))

    monkeypatch.setattr(trial_pipeline, "next_results", compilers_first)
    shop = Workshop(samples.A30, measured=False, jobs=2)
    heard: list[Trial] = []
    steps = shop.search(Studied(variants(2)), more=lambda: True, late=lambda: False, heard=heard.append)
    next(steps)
    compiled: list[int] = []
    bench.rehearse = lambda job: compiled.append(shop.kernels) or GOOD
    assert shop.rehearse(LARGE, kernels.variant()) == [GOOD]
    assert compiled == [2]
    shop.alone(steps)
    assert len(heard) == 2


def test_a_trial_of_one_problem_tells_what_the_kernel_takes_for_another(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    (known,) = searched(shop, Studied(variants(1)))
    other = replace(LARGE, batch=2)
    (itself,) = searched(shop, Studied(variants(1), other))
    assert shop.carried(other, known) == itself
    assert itself.time_us != known.time_us
    bench.inspect = lambda job: BROKEN
    (refused,) = searched(Workshop(samples.A30, measured=False, jobs=2), Studied(variants(1)))
    assert shop.carried(other, refused) == refused


def test_what_was_left_out_is_counted_with_its_reason(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    shop.count_left_out(
        [Trial(variant=variant, outcome=Outcome.TOO_SLOW, detail="so it is") for variant in variants(3)]
    )
    assert shop.outcomes == {Outcome.TOO_SLOW: 3}
    assert shop.reasons == {"too slow: so it is": 3}
    assert shop.kernels == 0


def test_a_structure_is_known_once_an_interpreter_judged_it(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=False, jobs=2)
    assert not shop.knows_structure(LARGE, kernels.variant())
    shop.rehearse(LARGE, kernels.variant())
    assert shop.knows_structure(replace(LARGE, batch=2), kernels.variant())
    assert not shop.knows_structure(LARGE, kernels.variant(softmax="lazy"))


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_finals_render_each_finalist_for_the_problem(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=True, jobs=2)
    finalists = variants(3)
    assert shop.alone(shop.final(LARGE, finalists, seconds=0.5, seed=7, energy_seconds=0.25)) == FINISHED
    (job,) = benched(shop)
    assert isinstance(job, Final)
    assert [source.variant for source in job.finalists] == finalists
    assert (job.problem, job.seconds, job.seed, job.energy_seconds) == (LARGE, 0.5, 7, 0.25)


def test_one_variant_can_be_checked_with_and_without_the_card(bench: Bench) -> None:
    with Workshop(samples.A30, measured=True, jobs=2) as shop:
        assert shop.check(LARGE, kernels.variant()) == Screened(verdict=GOOD, median_us=100.0, samples=9)
        (job,) = benched(shop)
        assert job.verdict is None
    with Workshop(samples.A30, measured=False, jobs=2) as shop:
        assert shop.check(LARGE, kernels.variant()) == GOOD


def test_leaving_ends_all_workers(bench: Bench) -> None:
    with Workshop(samples.A30, measured=True, jobs=2) as shop:
        pass
    assert shop.compilers.closed  # type: ignore[attr-defined]
    assert shop.bench.closed  # type: ignore[attr-defined]


def test_compilers_never_touch_the_card_and_one_worker_alone_measures(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=True, jobs=6)
    assert shop.compilers.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert shop.compilers.size == 6
    assert shop.bench.size == 1
    assert "CUDA_VISIBLE_DEVICES" not in shop.bench.environment
    assert shop.bench.environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1", "no compiler runs beside what is timed"


def waiting_looks(shop: Workshop) -> int:
    """Looks that no card has answered yet."""
    pool: Any = shop.bench
    return sum(isinstance(job, Screen) for _, job, _ in pool.waiting)


@pytest.mark.parametrize("cards", [1, 2, 3])
def test_each_card_looks_at_one_variant_at_a_time_in_the_order_of_the_proposals(bench: Bench, cards: int) -> None:
    proposals = variants(10)
    shop = Workshop(samples.A30, measured=True, jobs=6, cards=[str(number) for number in range(cards)])
    most: list[int] = []

    def screen(job: Screen) -> Screened:
        most.append(1 + waiting_looks(shop))  # and the one that is answered now
        return Screened(verdict=GOOD, median_us=100.0, samples=9)

    bench.screen = screen
    heard = searched(shop, Studied(list(proposals)))
    assert [trial.variant for trial in heard] == proposals
    assert [job.source.variant for job in benched(shop)] == proposals
    assert max(most) == cards
    assert shop.bench.size == cards
    assert [place["CUDA_VISIBLE_DEVICES"] for place in shop.bench.apart] == [str(number) for number in range(cards)]


def go_on(shop: Workshop, works: list[Any], left: int = 0) -> list[Any]:
    """Goes on with searches beside one another until at most so many are left, which it gives."""
    while len(works) > left:
        works = [work for work in works if next(work, "ended") != "ended"]
        if len(works) > left:
            shop.wait()
    return works


def test_what_is_on_a_card_when_time_is_up_is_waited_for_and_no_more_is_begun(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=True, jobs=6, cards=["0", "1"])
    done: list[Screen] = []

    def screen(job: Screen) -> Screened:
        done.append(job)
        return Screened(verdict=GOOD, median_us=100.0, samples=9)

    bench.screen = screen
    heard = searched(shop, Studied(variants(10)), late=lambda: len(done) >= 3)
    assert len(heard) == len(done) == len(benched(shop))
    assert 3 <= len(done) <= 4
    assert waiting_looks(shop) == 0
    assert shop.idle


def test_finals_run_on_the_card_of_their_problem(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=True, jobs=2, cards=["4", "5"])
    for problem in (LARGE, replace(LARGE, batch=2), replace(LARGE, batch=4), LARGE):
        shop.alone(shop.final(problem, variants(2), seconds=0.5, seed=7))
    assert shop.bench.places == [0, 1, 0, 0]  # type: ignore[attr-defined]


def test_a_problem_has_its_looks_and_its_finals_on_one_card_while_others_have_theirs(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=True, jobs=6, cards=["4", "5"])
    problems = [LARGE, replace(LARGE, batch=2)]
    works = [
        shop.search(Studied(variants(6), problem), more=lambda: True, late=lambda: False, heard=lambda _: None)
        for problem in problems
    ]
    go_on(shop, go_on(shop, works, left=1))  # the one that is left may have both cards
    for problem in problems:
        shop.alone(shop.final(problem, variants(2), seconds=0.5, seed=7))
    jobs, places = shop.bench.jobs, shop.bench.places  # type: ignore[attr-defined]
    both = [(problems.index(job.problem), place) for job, place in zip(jobs, places, strict=True)]
    assert {(0, 0), (1, 1)} <= set(both[:8]) <= {(0, 0), (1, 1)}
    assert both[-2:] == [(0, 0), (1, 1)], "the finals"


def test_a_card_has_the_next_look_of_another_problem_before_the_last_one_ends(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=True, jobs=6)
    most: list[int] = []

    def screen(job: Screen) -> Screened:
        most.append(1 + waiting_looks(shop))
        return Screened(verdict=GOOD, median_us=100.0, samples=9)

    bench.screen = screen
    problems = [replace(LARGE, batch=batch) for batch in (1, 2, 4)]
    works = [
        shop.search(Studied(variants(6), problem), more=lambda: True, late=lambda: False, heard=lambda _: None)
        for problem in problems
    ]
    go_on(shop, works)
    assert max(most) == 2


# --- peers in the finals ----------------------------------------------------------------------------------------------


CRASH = Failure(outcome=Outcome.CRASH, detail="the process died (SIGSEGV)")


def finished(shop: Workshop, *peers: str) -> Any:
    return shop.alone(shop.final(LARGE, variants(2), seconds=0.5, seed=7, peers=peers, best_us=90.0))


def test_peers_are_admitted_one_by_one_on_the_finals_card_before_the_finals(bench: Bench) -> None:
    shop = Workshop(samples.A30, measured=True, jobs=2, cards=["4", "5"])
    assert finished(shop, "flex", "fa4").absent == {}
    first, second, final = benched(shop)
    assert [(job.problem, job.peer, job.best_us) for job in (first, second)] == [
        (LARGE, "flex", 90.0), (LARGE, "fa4", 90.0),
    ]  # fmt: skip
    assert final.peers == ("flex", "fa4")
    assert shop.bench.places == [0, 0, 0]  # type: ignore[attr-defined]


def test_a_peer_that_is_not_admitted_is_named_with_its_reason_and_the_others_take_part(bench: Bench) -> None:
    answers = {"flex": "it raised ValueError: no", "fa2": CRASH, "fa4": None}
    bench.admit = lambda job: answers[job.peer]
    bench.final = lambda job: replace(FINISHED, absent={"sdpa-flash": "wrong"})
    shop = Workshop(samples.A30, measured=True, jobs=2)
    assert finished(shop, *answers).absent == {
        "flex": "it raised ValueError: no",
        "fa2": "ended with a crash: the process died (SIGSEGV)",
        "sdpa-flash": "wrong",
    }
    assert benched(shop)[-1].peers == ("fa4",)


def test_a_peer_that_hangs_again_and_again_is_asked_for_no_more(bench: Bench) -> None:
    bench.admit = lambda job: Failure(outcome=Outcome.TIMEOUT, detail="no answer within 120 s")
    shop = Workshop(samples.A30, measured=True, jobs=2)
    reasons = [finished(shop, "fa4").absent["fa4"] for _ in range(4)]
    assert reasons == 2 * ["ended with a timeout: no answer within 120 s"] + 2 * [
        "left out after it hung or crashed 2 times in this run"
    ]
    assert sum(hasattr(job, "peer") for job in benched(shop)) == 2


def test_finals_that_are_lost_with_a_peer_are_held_again_without(bench: Bench) -> None:
    bench.final = lambda job: CRASH if job.peers else FINISHED
    shop = Workshop(samples.A30, measured=True, jobs=2)
    assert finished(shop, "fa4").absent == {"fa4": "finals with it ended with a crash: the process died (SIGSEGV)"}
    assert [job.peers for job in benched(shop)[1:]] == [("fa4",), ()]


def test_finals_that_are_lost_without_a_peer_are_not_held_again(bench: Bench) -> None:
    bench.final = lambda job: CRASH
    bench.admit = lambda job: "not installed"
    shop = Workshop(samples.A30, measured=True, jobs=2)
    assert finished(shop, "fa4") == CRASH
    assert len(benched(shop)) == 2


def test_the_time_of_peers_is_that_of_finals(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(trial_pipeline.time, "monotonic", lambda: now[0])
    shop = Workshop(samples.A30, measured=True, jobs=2)
    steps = shop.final(LARGE, variants(2), seconds=0.5, seed=7, peers=("flex",))
    next(steps)
    now[0] = 130.0
    shop.wait()
    assert shop.finals_seconds == 30.0


# --- several searches, and what is not done twice ---------------------------------------------------------------------


def test_two_texts_with_one_machine_code_are_measured_once(bench: Bench) -> None:
    """In the same problem; another one asks for its time anew, and not for the gate."""
    bench.code = lambda job: "same" if job.source.variant["BLOCK_M"] == 64 else job.source.digest
    times = iter([300.0, 200.0, 100.0])
    bench.screen = lambda job: Screened(verdict=GOOD, median_us=next(times), samples=3)
    shop = Workshop(samples.A30, measured=True, jobs=2)
    heard = searched(shop, Studied(variants(3)))
    assert [trial.variant["BLOCK_M"] for trial in heard] == [64, 64, 128]
    assert [trial.time_us for trial in heard] == [300.0, 300.0, 200.0]
    assert len({trial.digest for trial in heard}) == 3
    assert len(benched(shop)) == 2
    searched(shop, Studied(variants(1), replace(LARGE, batch=2)))
    assert [job.verdict for job in benched(shop)] == [None, None, GOOD]


def test_two_searches_go_on_together_and_each_hears_its_own_in_order(bench: Bench) -> None:
    proposals = variants(8)
    shop = Workshop(samples.A30, measured=True, jobs=2)
    studies: list[Any] = [Studied(list(proposals)), Studied(list(reversed(proposals)), replace(LARGE, seq_kv=8192))]
    heard: list[tuple[int, Trial]] = []
    works = [
        shop.search(
            study,
            more=lambda: True,
            late=lambda: False,
            heard=lambda trial, number=number: heard.append((number, trial)),
        )
        for number, study in enumerate(studies)
    ]
    go_on(shop, works)
    assert [trial.variant for number, trial in heard if number == 0] == proposals
    assert [trial.variant for number, trial in heard if number == 1] == list(reversed(proposals))
    assert len({number for number, _ in heard[:8]}) == 2, "neither waits for the other"
    assert len(compile_jobs(shop)) == 8, "both have the same kernels"
    assert shop.idle


@pytest.mark.parametrize(("jobs", "measured", "many"), [(2, True, 1), (8, True, 2), (16, True, 4), (16, False, 1)])
def test_as_many_problems_are_searched_at_once_as_the_compilers_need(
    bench: Bench, jobs: int, measured: bool, many: int
) -> None:
    shop = Workshop(samples.H200, measured=measured, jobs=jobs)
    assert shop.at_once(LARGE) == many
    assert shop.at_once(replace(LARGE, batch=4096)) == 1, "the card holds no other beside it"


def most_in_flight(shop: Workshop, study: Any, budget: int) -> int:
    """Variants that were begun before the first result."""
    counts: list[int] = []
    steps = shop.search(
        study,
        budget=budget,
        more=lambda: True,
        late=lambda: False,
        heard=lambda _: counts.append(len(compile_jobs(shop))),
    )
    shop.alone(steps)
    return counts[0]


@pytest.mark.parametrize(("budget", "waiting", "many"), [(24, False, 8), (24, True, 10), (72, False, 9)])
def test_more_is_in_flight_where_no_result_would_help(bench: Bench, budget: int, waiting: bool, many: int) -> None:
    """Variants that are tried in any case, and a small share of a long search."""
    shop = Workshop(samples.H200, measured=True, jobs=16)
    assert most_in_flight(shop, Studied(variants(10), waiting=waiting), budget) == many


def test_each_card_is_made_ready_for_a_problem_before_its_first_look(bench: Bench) -> None:
    shop = Workshop(samples.H200, measured=True, jobs=2, cards=["4", "5"])
    searched(shop, Studied(variants(3)))
    jobs, places = shop.bench.jobs, shop.bench.places  # type: ignore[attr-defined]
    for place in (0, 1):
        there = [job for job, where in zip(jobs, places, strict=True) if where == place]
        assert [isinstance(job, Prepare) for job in there] == [True] + [False] * (len(there) - 1)
        assert len(there) > 1
    assert {job.problem for job in jobs} == {LARGE}


def test_a_real_study_and_real_arithmetic_fit_together(bench: Bench, tmp_path: Path) -> None:
    points = search_space.load(kernels.TEMPLATE)
    ledger = Ledger("one", storage.journal(tmp_path / "journal"), points)
    study = Study(ledger, points, LARGE, samples.A30, seed=0, budget=20)
    study.enqueue(points.seeds_for(LARGE, samples.A30))
    heard = searched(Workshop(samples.A30, measured=False, jobs=2), study, more=lambda: study.taken < 20)
    assert len(heard) == len(study.trials) == 20
    assert all(points.why_infeasible(trial.variant, LARGE, samples.A30) is None for trial in heard)


def test_finals_take_no_time_of_other_searches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while they run nor when they have ended."""
    now = [100.0]
    monkeypatch.setattr(trial_pipeline.time, "monotonic", lambda: now[0])
    shop = Workshop(samples.A30, measured=True, jobs=2)
    steps = shop.final(LARGE, variants(2), seconds=0.5, seed=7)
    next(steps)
    now[0] = 103.0
    assert shop.finals_seconds == 3.0
    shop.wait()
    now[0] = 200.0
    assert shop.finals_seconds == 3.0


@pytest.mark.parametrize(("op", "predicted"), [(Op.FORWARD, True), (Op.BACKWARD, False)])
def test_the_seeds_of_every_template_are_inspected_and_those_that_the_model_knows_are_predicted(bench, op, predicted):
    of = kernels.problem(op=op, dtype=DType.BFLOAT16, batch=4, seq_q=1024, seq_kv=1024, head_dim=64)
    report = StaticReport(
        digest="d", arch=90, registers=128, spilled_bytes=0, shared_bytes=1024, num_warps=4, code_bytes=64,
        loop={"HGMMA.64x64x16.F32.BF16.SS": 8, "MUFU.EX2": 32},
    )  # fmt: skip
    bench.inspect = lambda job: report
    for points in search_space.of(op):
        seeds = points.seeds_for(of, samples.H200)
        heard = searched(Workshop(samples.H200, measured=False, jobs=1), Studied(list(seeds), of))
        assert [trial.variant for trial in heard] == seeds
        for trial in heard:
            assert trial.outcome is Outcome.OK
            assert (trial.prediction is not None) == predicted
