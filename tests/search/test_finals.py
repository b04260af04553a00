"""Who enters the finals, who wins them, and what a call then runs on."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import kernels
import pytest
import samples

from autoattn.core.cache_entry import KERNEL, Rival
from autoattn.core.paired_stats import Pulse, Round
from autoattn.core.trial import Energy, Outcome, StaticReport, Trial, Verdict
from autoattn.core.variant import Variant
from autoattn.search import finals
from autoattn.search.finals import Decision, decide, shortlist
from autoattn.search.gpu_jobs import Finished, finalist_name
from autoattn.search.search_options import Objective

PROBLEM = samples.problem()
GOOD = Verdict(ok=True, checks=1, max_error=1e-3, rms_error=1e-4, allowed=4e-3)
TILES = ((128, 128), (128, 64), (64, 64), (64, 32))
ELSEWHERE = kernels.variant(BLOCK_M=16, BLOCK_N=16)


def trial(place: int, *, shared: int = 65536, spilled: int = 8, registers: int = 128, **facts: Any) -> Trial:
    m, n = TILES[place]
    digest = f"{place:x}" * 16
    report = StaticReport(
        digest=digest, arch=90, registers=registers, spilled_bytes=spilled, shared_bytes=shared, num_warps=4,
        code_bytes=8192,
    )  # fmt: skip
    known = {"digest": digest, "report": report, "verdict": GOOD, **facts}
    return Trial(variant=kernels.variant(BLOCK_M=m, BLOCK_N=n), outcome=Outcome.OK, **known)


def finished(
    times: list[float],
    rivals: dict[str, float] | None = None,
    *,
    count: int = 128,
    spread: float = 0.003,
    slow: int = 0,
    joules: list[float] | None = None,
    errors: list[float] | None = None,
) -> Finished:
    """Finals whose rounds are drawn; the first `slow` of them while the card was slowed down."""
    rng = random.Random(0)
    named = {finalist_name(place): time_us for place, time_us in enumerate(times)} | (rivals or {})
    taken = []
    for number in range(count):
        hot = number < slow
        times_us = {
            name: time_us * (9.0 if hot else 1.0) * (1 + rng.gauss(0, spread)) for name, time_us in named.items()
        }
        taken.append(Round(times_us=times_us, pulse=Pulse(clock_mhz=1980, slowed=hot)))
    energies = tuple(Energy(joules=energy, watts=600.0) for energy in joules) if joules else ()
    return Finished(
        verdicts=tuple(replace(GOOD, rms_error=error) for error in errors or [1e-4] * len(times)),
        measurements=tuple(samples.measurement(PROBLEM, time_us) for time_us in times),
        rivals=tuple(
            Rival(name=name, measurement=samples.measurement(PROBLEM, time_us), max_error=1e-3, rms_error=1e-4)
            for name, time_us in (rivals or {}).items()
        ),
        rounds=tuple(taken),
        energies=energies,
    )


def decided(trials: list[Trial], result: Finished, **facts: Any) -> Decision:
    known = {"objective": Objective.TIME, "default": ELSEWHERE, "previous": None, **facts}
    decision = decide(trials, result, **known)
    assert isinstance(decision, Decision), decision
    return decision


def tied(decision: Decision) -> set[str]:
    return {finalist.source_digest for finalist in decision.finals.finalists if finalist.tied}


def test_a_clearly_faster_finalist_wins_with_an_interval_over_each_other() -> None:
    trials = [trial(0), trial(1), trial(2)]
    decision = decided(trials, finished([110.0, 100.0, 140.0], {"sdpa": 107.0}))
    assert decision.winner is trials[1]
    assert tied(decision) == {trials[1].digest}
    first, second, third = decision.finals.finalists
    assert [first.lead, first.source_digest] == [None, trials[1].digest]
    assert second.lead is not None
    assert 1.09 < second.lead.low < 1.1 < second.lead.high < 1.11
    assert third.lead is not None
    assert third.lead.low > 1.39
    (rival,) = decision.rivals
    assert rival.lead is not None
    assert 1.06 < rival.lead.low < rival.lead.ratio < rival.lead.high < 1.08
    assert decision.finals.decided
    assert decision.choice == KERNEL


def test_of_equals_the_previous_winner_stays() -> None:
    trials = [trial(0, shared=1000), trial(1), trial(2, shared=10)]
    result = finished([100.0, 100.1, 100.05])
    assert decided(trials, result, previous=trials[1].variant).winner is trials[1]
    assert decided(trials, result).winner is trials[2]
    assert tied(decided(trials, result)) == {trial.digest for trial in trials}


@pytest.mark.parametrize("facts", [{"shared": 1000}, {"registers": 64}, {"spilled": 0}])
def test_of_equals_the_one_that_needs_less_wins(facts: dict[str, int]) -> None:
    trials = [trial(0), trial(1, **facts), trial(2)]
    assert decided(trials, finished([100.0, 100.1, 100.1])).winner is trials[1]


def test_spills_count_more_than_shared_memory_and_that_more_than_registers() -> None:
    trials = [trial(0, shared=10), trial(1, spilled=0, shared=20, registers=255), trial(2, spilled=0, shared=30)]
    assert decided(trials, finished([100.0, 100.1, 100.0])).winner is trials[1]


def test_of_equals_that_need_the_same_the_digest_decides_whatever_the_noise() -> None:
    trials = [trial(1), trial(0), trial(2)]
    for times in ([100.0, 100.2, 100.1], [100.2, 100.0, 100.1], [100.1, 100.2, 100.0]):
        assert decided(trials, finished(times)).winner is trials[1]


def test_the_previous_winner_goes_when_it_is_told_apart() -> None:
    trials = [trial(0), trial(1)]
    assert decided(trials, finished([100.0, 102.0]), previous=trials[1].variant).winner is trials[0]


def test_without_enough_rounds_only_who_seems_as_fast_may_win() -> None:
    trials = [trial(0), trial(1, shared=10), trial(2, shared=1)]
    decision = decided(trials, finished([100.0, 100.5, 105.0], {"sdpa": 90.0}, count=4, spread=1e-4))
    assert decision.winner is trials[1]
    assert not decision.finals.decided
    assert [finalist.lead for finalist in decision.finals.finalists] == [None] * 3
    assert decision.rivals[0].lead is None
    assert decision.choice == "sdpa"


def test_rounds_of_a_slowed_card_are_counted_out() -> None:
    trials = [trial(0), trial(1)]
    decision = decided(trials, finished([100.0, 110.0], count=100, slow=30))
    assert (decision.finals.rounds, decision.finals.discarded) == (70, 30)


def test_a_rival_is_chosen_only_when_the_rounds_say_that_it_is_faster() -> None:
    trials = [trial(0)]
    assert decided(trials, finished([100.0], {"sdpa": 97.0})).choice == "sdpa"
    assert decided(trials, finished([100.0], {"sdpa": 97.0}, spread=0.3)).choice == KERNEL
    assert decided(trials, finished([100.0], {"sdpa": 99.5})).choice == KERNEL
    assert decided(trials, finished([100.0], {"sdpa": 96.5, "sdpa-cudnn": 96.0})).choice == "sdpa"
    assert decided(trials, finished([100.0], {"sdpa": 96.5, "sdpa-cudnn": 90.0})).choice == "sdpa-cudnn"
    assert decided(trials, finished([100.0], {"varlen-flash": 50.0})).choice == KERNEL


def test_the_default_is_a_rival_with_its_interval_unless_it_wins() -> None:
    trials = [trial(0), trial(1)]
    decision = decided(trials, finished([100.0, 120.0]), default=trials[1].variant)
    (rival,) = decision.rivals
    assert rival.name == finals.TEMPLATE_DEFAULT
    assert rival.lead is not None
    assert rival.lead.ratio == pytest.approx(1.2, abs=0.01)
    assert decided(trials, finished([100.0, 120.0]), default=trials[0].variant).rivals == ()


def test_a_peer_that_is_the_fastest_is_recorded_and_never_chosen() -> None:
    decision = decided([trial(0)], finished([100.0], {"sdpa": 97.0, "fa4": 50.0}))
    assert decision.choice == "sdpa"
    assert decided([trial(0)], finished([100.0], {"sdpa": 120.0, "fa4": 50.0})).choice == KERNEL
    peer = next(rival for rival in decision.rivals if rival.name == "fa4")
    assert peer.lead is not None
    assert 0.49 < peer.lead.low < peer.lead.high < 0.51
    assert decision.absent == {}


def test_a_rival_with_wrong_numbers_is_left_out_with_its_reason() -> None:
    result = finished([100.0], {"sdpa": 120.0, "fa4": 50.0})
    allowed = GOOD.allowed * finals.RIVAL_ERROR
    rivals = tuple(
        replace(rival, max_error=allowed * 1.01) if rival.name == "fa4" else rival for rival in result.rivals
    )
    decision = decided([trial(0)], replace(result, rivals=rivals, absent={"flex": "not installed"}))
    assert [rival.name for rival in decision.rivals] == ["sdpa"]
    assert decision.absent == {"flex": "not installed", "fa4": "wrong: error 0.0162 where 0.016 is allowed"}


# --- objectives -------------------------------------------------------------------------------------------------------


def test_for_energy_the_fewest_joules_win_and_time_decides_between_equals() -> None:
    trials = [trial(0), trial(1), trial(2)]
    result = finished([100.0, 110.0, 120.0], joules=[0.080, 0.060, 0.0605])
    assert decided(trials, result, objective=Objective.ENERGY).winner is trials[1]
    result = finished([100.0, 120.0, 110.0], joules=[0.080, 0.060, 0.0605])
    decision = decided(trials, result, objective=Objective.ENERGY)
    assert decision.winner is trials[2]
    assert [
        finalist.energy for finalist in decision.finals.finalists if finalist.source_digest == trials[2].digest
    ] == [Energy(joules=0.0605, watts=600.0)]


def test_for_energy_the_counter_must_be_there() -> None:
    reason = decide([trial(0)], finished([100.0]), objective=Objective.ENERGY, default=ELSEWHERE, previous=None)
    assert isinstance(reason, str)
    assert "NVML" in reason


def test_for_error_the_smallest_wins_and_time_decides_between_equals() -> None:
    trials = [trial(0), trial(1), trial(2)]
    result = finished([100.0, 120.0, 110.0], errors=[2e-4, 1e-4, 1.005e-4])
    assert decided(trials, result, objective=Objective.ERROR).winner is trials[2]


def test_a_rival_is_chosen_by_the_objective() -> None:
    result = finished([100.0], {"sdpa": 300.0}, joules=[0.06], errors=[2e-4])
    assert decided([trial(0)], result, objective=Objective.ERROR).choice == "sdpa"
    assert decided([trial(0)], result, objective=Objective.TIME).choice == KERNEL
    cool = replace(result, rivals=(replace(result.rivals[0], energy=Energy(joules=0.05, watts=300.0)),))
    assert decided([trial(0)], cool, objective=Objective.ENERGY).choice == "sdpa"
    assert decided([trial(0)], result, objective=Objective.ENERGY).choice == KERNEL


def measured(place: int, time_us: float, error: float) -> Trial:
    return trial(place, measurement=samples.measurement(PROBLEM, time_us), verdict=replace(GOOD, rms_error=error))


def test_the_shortlist_is_of_the_fastest_or_of_the_most_accurate() -> None:
    trials = [measured(0, 100.0, 3e-4), measured(1, 200.0, 1e-4), measured(2, 90.0, 2e-4), measured(3, 150.0, 1.001e-4)]
    assert shortlist(trials, 2, Objective.TIME) == shortlist(trials, 2, Objective.ENERGY) == [trials[2], trials[0]]
    assert shortlist(trials, 2, Objective.ERROR) == [trials[3], trials[1]]
    assert shortlist(trials, 9, Objective.TIME) == [trials[2], trials[0], trials[3], trials[1]]


def test_a_variant_of_nobody_is_no_winner() -> None:
    bad = replace(GOOD, ok=False, reason="error 1")
    result = Finished(verdicts=(bad,), measurements=(None,), rivals=())
    reason = decide([trial(0)], result, objective=Objective.TIME, default=ELSEWHERE, previous=None)
    assert reason == "no finalist was right at full size: error 1"
    assert isinstance(ELSEWHERE, Variant)
