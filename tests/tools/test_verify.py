"""What a verification finds of an entry, what it writes, and what calls and the tuner make of that."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import samples

from autoattn.cache import store
from autoattn.codegen import resources
from autoattn.core.cache_entry import KERNEL, CacheEntry, Finding, Mark, Rival
from autoattn.core.paired_stats import Round
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Outcome, Verdict
from autoattn.core.variant import Variant
from autoattn.errors import CacheError
from autoattn.runtime.plan import cache_lookup
from autoattn.search import search_options, tuner
from autoattn.search.gpu_jobs import Finished, Screened, finalist_name
from autoattn.search.trial_pipeline import Steps
from autoattn.tools import verify
from autoattn.tools.verify import Verification, met
from autoattn.workers.worker_pool import Failure

GOOD = Verdict(ok=True, checks=13, max_error=1e-3, rms_error=1e-4, allowed=4e-3)
BAD = replace(GOOD, ok=False, reason="error 1 where 0.004 is allowed")
NOW = {"autoattn": "0.1.0", "torch": "2.14.0", "triton": "3.6.0", "driver": "600.1"}
ENTRY = samples.current(samples.measured(choice=KERNEL))
WRONG = Mark(finding=Finding.WRONG, detail="error 1", versions=NOW)


def contest(
    ours: Sequence[float],
    rivals: Mapping[str, float] | None = None,
    *,
    verdicts: Sequence[Verdict] = (),
    count: int = 64,
    spread: float = 0.004,
) -> Finished:
    """Rounds around such times in microseconds; the first is the entry's kernel."""
    rng = random.Random(0)
    rivals = rivals if rivals is not None else {"sdpa-cudnn": 600.0}
    times = {finalist_name(place): time_us for place, time_us in enumerate(ours)} | dict(rivals)
    taken = [
        Round(times_us={name: time_us * rng.gauss(1.0, spread) for name, time_us in times.items()})
        for _ in range(count)
    ]
    problem = samples.problem()
    return Finished(
        verdicts=tuple(verdicts) or (GOOD,) * len(ours),
        measurements=tuple(samples.measurement(problem, time_us) for time_us in ours),
        rivals=tuple(
            Rival(name=name, measurement=samples.measurement(problem, time_us), max_error=1e-3)
            for name, time_us in rivals.items()
        ),
        rounds=tuple(taken),
    )


OTHERS = [candidate.variant for candidate in ENTRY.candidates]  # at 400 us before, as the rounds below have it


# --- what the rounds say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time_us", "finding", "words"),
    [
        (400.0, Finding.SAME, "right and the fastest"),
        (410.0, Finding.SAME, "right and the fastest"),
        (424.0, Finding.SLOWER, "by 6."),
        (376.0, Finding.FASTER, "by 5."),
    ],
)
def test_the_time_of_old_is_compared_with_room_for_another_day(time_us: float, finding: Finding, words: str) -> None:
    verification = met(ENTRY, contest([time_us]), [])
    assert (verification.finding, words in verification.detail) == (finding, True), verification
    assert "400.0 us before" in verification.detail


def test_a_share_comes_with_its_interval() -> None:
    verification = met(ENTRY, contest([424.0]), [])
    share, low, high = map(float, re.findall(r"[\d.]+", verification.detail.partition(":")[0]))
    assert low < share < high
    assert high - low < 1.0


def test_a_faster_rival_is_named_and_taken() -> None:
    verification = met(ENTRY, contest([400.0], {"sdpa-flash": 390.0, "sdpa-cudnn": 380.0}), [])
    assert verification.finding is Finding.OVERTAKEN
    assert verification.detail.startswith("sdpa-cudnn is faster by 5.")
    assert verification.choice == "sdpa-cudnn"


def test_a_faster_runner_up_is_named_and_no_rival_is_taken() -> None:
    verification = met(ENTRY, contest([400.0, 380.0, 420.0]), OTHERS)
    assert verification.finding is Finding.OVERTAKEN
    assert verification.detail.startswith(f"the runner-up {OTHERS[0]} is faster by 5.")
    assert verification.choice == ""


@pytest.mark.parametrize(
    ("ours", "rivals", "verdicts", "why"),
    [
        ([400.0, 397.5], {}, (), "by less than two tunes differ"),
        ([400.0, 200.0], {}, (GOOD, BAD), "it is wrong by now"),
        ([400.0], {"template default": 300.0}, (), "no call can take it"),
    ],
)
def test_what_is_no_better_choice_overtakes_nobody(
    ours: list[float], rivals: dict[str, float], verdicts: tuple[Verdict, ...], why: str
) -> None:
    assert met(ENTRY, contest(ours, rivals, verdicts=verdicts), OTHERS[: len(ours) - 1]).finding is Finding.SAME, why


def test_an_inaccurate_rival_overtakes_nobody() -> None:
    result = contest([400.0], {"sdpa-cudnn": 300.0})
    rough = replace(result, rivals=tuple(replace(rival, max_error=1.0) for rival in result.rivals))
    assert met(ENTRY, rough, []).finding is Finding.SAME


def test_an_entry_that_runs_on_a_rival_is_judged_by_that_rival() -> None:
    entry = samples.current(samples.measured())  # sdpa-cudnn, 0.91 of the kernel's 400 us
    before = next(rival for rival in entry.rivals if rival.name == entry.choice).measurement.median_us
    assert met(entry, contest([400.0], {"sdpa-cudnn": before}), []).finding is Finding.SAME
    overtaken = met(entry, contest([340.0], {"sdpa-cudnn": before}), [])
    assert (overtaken.finding, overtaken.choice) == (Finding.OVERTAKEN, "")
    assert overtaken.detail.startswith("the kernel is faster by")
    gone = met(entry, contest([400.0], {"sdpa-flash": 500.0}), [])
    assert gone.finding is Finding.BROKEN
    assert "sdpa-cudnn" in gone.detail


def test_too_few_rounds_claim_nothing_of_the_time() -> None:
    verification = met(ENTRY, contest([800.0], {}, count=3), [])
    assert verification.finding is Finding.SAME
    assert "too few rounds" in verification.detail


# --- an entry's way ---------------------------------------------------------------------------------------------------


CRASHED = Failure(outcome=Outcome.INTERPRETER_CRASH, detail="TypeError: only 0-dimensional arrays")
NO_MEMORY = Failure(outcome=Outcome.OUT_OF_MEMORY, detail="none")


@dataclass
class Shop:
    """A workshop that answers as it is told."""

    checked: Any = field(default_factory=lambda: Screened(verdict=GOOD, median_us=400.0, samples=9))
    finished: Any = field(default_factory=lambda: contest([400.0, 404.0, 420.0]))
    met: list[list[Variant]] = field(default_factory=list)
    refused: Sequence[Variant] = ()  # by the compiler
    worst: Any = None
    measured: bool = True
    order: list[str] = field(default_factory=list)

    def check(self, problem: Problem, variant: Variant) -> Any:
        self.order.append("check")
        return self.checked

    def compiled(self, problem: Problem, variants: Sequence[Variant]) -> Steps[list[Variant]]:
        yield
        self.order.append("compiled")
        return [variant for variant in variants if variant not in self.refused]

    def final(self, problem: Problem, variants: list[Variant], **_: Any) -> Steps[Any]:
        self.met.append(variants)
        yield
        return self.finished

    def outgrow(self, problem: Problem, variant: Variant, *, seed: int) -> Steps[Any]:
        yield
        return self.worst

    @staticmethod
    def alone(steps: Any) -> Any:
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value


def entry_with_runners_up() -> CacheEntry:
    """Whose candidates are kernels of today."""
    params = [{**ENTRY.params, "BLOCK_N": 32}, {**ENTRY.params, "num_stages": 2}]
    digests = [samples.current(replace(ENTRY, params=kernel_params)).source_digest for kernel_params in params]
    pairs = zip(ENTRY.candidates, params, digests, strict=True)
    candidates = (replace(candidate, params=its, source_digest=digest) for candidate, its, digest in pairs)
    return replace(ENTRY, candidates=tuple(candidates))


def verified(entry: CacheEntry, shop: Shop, versions: dict[str, str] = NOW) -> Verification:
    verifier: Any = verify.Verifier(samples.H200, shop, versions)  # type: ignore[arg-type]
    return verifier.verified(entry)  # type: ignore[no-any-return]


def test_the_runners_up_that_there_still_are_meet_the_winner() -> None:
    entry, shop = entry_with_runners_up(), Shop()
    verification = verified(entry, shop)
    assert verification.ok
    assert shop.order == ["compiled", "check"], "else the GPU's worker would compile"
    assert shop.met == [[entry.variant, *(candidate.variant for candidate in entry.candidates)]]
    gone = replace(entry, candidates=(replace(entry.candidates[0], source_digest="0" * 16), entry.candidates[1]))
    shop = Shop(finished=contest([400.0, 420.0]), refused=[])
    verified(gone, shop)
    assert shop.met == [[entry.variant, entry.candidates[1].variant]]
    shop = Shop(finished=contest([400.0, 420.0]), refused=[entry.candidates[0].variant])
    verified(entry, shop)
    assert shop.met == [[entry.variant, entry.candidates[1].variant]]


@pytest.mark.parametrize(
    ("shop", "finding", "words"),
    [
        (Shop(checked=Failure(outcome=Outcome.WRONG_RESULT, detail="error 1")), Finding.WRONG, "error 1"),
        (Shop(checked=Failure(outcome=Outcome.COMPILE_ERROR, detail="ptxas")), Finding.BROKEN, "compile error: ptxas"),
        (Shop(checked=Failure(outcome=Outcome.CRASH, detail="it died")), Finding.BROKEN, "crash: it died"),
        (Shop(finished=contest([400.0], verdicts=(BAD,))), Finding.WRONG, "at full size: error 1"),
        (Shop(finished=Failure(outcome=Outcome.TIMEOUT, detail="no answer")), Finding.BROKEN, "timeout at full size"),
        (Shop(checked=BAD), Finding.WRONG, "error 1"),
        (Shop(checked=CRASHED), Finding.UNCHECKED, "interpreter crash: TypeError"),
        (Shop(checked=NO_MEMORY), Finding.UNCHECKED, "out of memory: none"),
        (Shop(finished=NO_MEMORY), Finding.UNCHECKED, "out of memory at full size: none"),
        (Shop(checked=GOOD), Finding.SAME, "13 checks of its structure in the interpreter"),
    ],
)
def test_what_fails_is_found_and_said(shop: Shop, finding: Finding, words: str) -> None:
    verification = verified(ENTRY, shop)
    assert (verification.finding, words in verification.detail) == (finding, True), verification
    assert verification.ok is (finding is Finding.SAME)


@pytest.mark.parametrize(
    ("outcome", "finding"), [(Outcome.WRONG_RESULT, Finding.WRONG), (Outcome.TIMEOUT, Finding.BROKEN)]
)
def test_a_kernel_that_keeps_its_first_maximum_is_checked_where_that_is_outgrown(
    outcome: Outcome, finding: Finding
) -> None:
    keeps = samples.current(replace(ENTRY, params={**ENTRY.params, "softmax": "first_max"}))
    shop = Shop(worst=Failure(outcome=outcome, detail="error 1"))
    verification = verified(keeps, shop)
    assert (verification.finding, "in its worst case" in verification.detail) == (finding, True), verification
    assert verified(ENTRY, shop).ok, "others have no such case"


@pytest.mark.parametrize("failure", [CRASHED, NO_MEMORY], ids=["interpreter", "memory"])
def test_what_was_not_checked_keeps_its_mark_and_gets_none(failure: Failure) -> None:
    verification = verified(ENTRY, Shop(checked=failure))
    assert not verification.ok
    assert verification.mark is None
    old = Mark(finding=Finding.WRONG, detail="error 1")
    assert verified(replace(ENTRY, mark=old), Shop(checked=failure)).mark == old
    with pytest.raises(ValueError, match="needs no mark"):
        Mark(finding=Finding.UNCHECKED, detail="x")


def test_a_stale_entry_is_not_run() -> None:
    shop = Shop(checked=None, finished=None)
    verification = verified(replace(ENTRY, source_digest="0" * 16), shop)
    assert (verification.finding, shop.met, verification.mark) == (Finding.STALE, [], None)
    assert "another text" in verification.detail


def test_changed_versions_are_told() -> None:
    assert "torch 2.13.0 -> 2.14.0" in verified(ENTRY, Shop()).detail
    assert "->" not in verified(ENTRY, Shop(), dict(ENTRY.versions)).detail


def test_only_the_card_lifts_a_mark() -> None:
    marked = replace(ENTRY, mark=WRONG)
    without = {name: version for name, version in NOW.items() if name != "driver"}
    assert verified(marked, Shop(checked=GOOD), without).mark == WRONG
    assert verified(marked, Shop()).mark is None
    bad = verified(ENTRY, Shop(checked=BAD), without)
    assert bad.mark == Mark(finding=Finding.WRONG, detail=bad.detail, versions=without)


# --- marks in the cache, and what they change -------------------------------------------------------------------------


def written(folder: Path, *entries: CacheEntry) -> None:
    store.merge(folder, samples.H200, Op.FORWARD, entries)


def kept(folder: Path) -> dict[str, CacheEntry]:
    return store.lookup(folder, samples.H200, Op.FORWARD)


def test_a_mark_is_written_and_lifted_and_an_entry_without_one_reads_as_ever(tmp_path: Path) -> None:
    written(tmp_path, ENTRY)
    path = store.path_of(tmp_path, samples.H200, Op.FORWARD)
    before = path.read_bytes()
    assert b'"mark"' not in before
    (entry,) = kept(tmp_path).values()
    (changed,) = store.mark(tmp_path, samples.H200, Op.FORWARD, [(entry, WRONG)])
    assert changed.mark == kept(tmp_path)[entry.problem.key].mark == WRONG
    assert store.mark(tmp_path, samples.H200, Op.FORWARD, [(changed, WRONG)]) == []
    store.mark(tmp_path, samples.H200, Op.FORWARD, [(changed, None)])
    assert path.read_bytes() == before


def test_an_entry_that_was_tuned_anew_meanwhile_is_not_marked(tmp_path: Path) -> None:
    written(tmp_path, ENTRY)
    (old,) = kept(tmp_path).values()
    written(tmp_path, replace(ENTRY, measurement=samples.measurement(ENTRY.problem, 300.0)))
    assert store.mark(tmp_path, samples.H200, Op.FORWARD, [(old, WRONG)]) == []
    assert kept(tmp_path)[ENTRY.problem.key].mark is None


def test_an_entry_of_another_folder_is_added_only_with_a_mark(tmp_path: Path) -> None:
    assert store.mark(tmp_path, samples.H200, Op.FORWARD, [(ENTRY, None)]) == []
    assert kept(tmp_path) == {}
    store.mark(tmp_path, samples.H200, Op.FORWARD, [(ENTRY, WRONG)])
    assert kept(tmp_path)[ENTRY.problem.key].mark == WRONG


def test_a_finding_that_is_none_against_an_entry_is_no_mark() -> None:
    for finding in (Finding.SAME, Finding.FASTER, Finding.STALE):
        with pytest.raises(ValueError, match="needs no mark"):
            Mark(finding=finding, detail="")


@pytest.mark.parametrize("finding", [Finding.WRONG, Finding.BROKEN])
def test_a_call_never_runs_on_an_entry_that_is_held_back_and_says_why(tmp_path: Path, finding: Finding) -> None:
    written(tmp_path, replace(ENTRY, mark=replace(WRONG, finding=finding)))
    explanation = cache_lookup.explain(ENTRY.problem, samples.H200, tmp_path)
    assert (explanation.route, explanation.level) == ("sdpa-cudnn", cache_lookup.Level.EXACT), (
        "the fastest rival beside it"
    )
    (step,) = [line for line in explanation.steps if finding.value in line]
    assert "autoattn verify found with autoattn 0.1.0, driver 600.1, torch 2.14.0, triton 3.6.0" in step
    assert "run autoattn tune again" in step


def test_a_slower_entry_serves_and_says_so(tmp_path: Path) -> None:
    written(tmp_path, replace(ENTRY, mark=replace(WRONG, finding=Finding.SLOWER, detail="by 6.0%")))
    explanation = cache_lookup.explain(ENTRY.problem, samples.H200, tmp_path)
    assert (explanation.route, explanation.level) == (KERNEL, cache_lookup.Level.EXACT)
    assert any("slower, by 6.0%" in step for step in explanation.steps)


def test_a_call_runs_on_the_rival_that_was_found_faster(tmp_path: Path) -> None:
    mark = replace(WRONG, finding=Finding.OVERTAKEN, detail="sdpa-cudnn is faster by 5%", choice="sdpa-cudnn")
    written(tmp_path, replace(ENTRY, mark=mark))
    explanation = cache_lookup.explain(ENTRY.problem, samples.H200, tmp_path)
    assert (explanation.route, explanation.level) == ("sdpa-cudnn", cache_lookup.Level.EXACT)
    assert "fastest when it was verified" in explanation.reason
    assert any("no longer the fastest" in step for step in explanation.steps)
    written(tmp_path, replace(ENTRY, mark=replace(mark, choice="rm -rf")))
    assert cache_lookup.explain(ENTRY.problem, samples.H200, tmp_path).route == KERNEL, (
        "what no call can take is not taken"
    )


def test_a_marked_copy_of_a_shipped_entry_shadows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    monkeypatch.setattr(resources, "user_cache", lambda: user)
    monkeypatch.setattr(resources, "shipped_cache", lambda: shipped)
    written(shipped, ENTRY)
    written(user, replace(ENTRY, mark=WRONG))
    assert cache_lookup.explain(ENTRY.problem, samples.H200).route == "sdpa-cudnn"
    other = {**ENTRY.params, "num_stages": 1}
    written(user, samples.current(replace(ENTRY, params=other, mark=WRONG)))
    assert cache_lookup.explain(ENTRY.problem, samples.H200).route == KERNEL, "another kernel was wrong"


@pytest.mark.parametrize("finding", [Finding.WRONG, Finding.SLOWER, Finding.OVERTAKEN])
def test_a_marked_problem_is_tuned_again(finding: Finding) -> None:
    entry = replace(
        ENTRY,
        search=replace(
            ENTRY.search,
            spaces=tuner.multi_template.digests(tuner.multi_template.spaces(ENTRY.problem, samples.H200, True)),
        ),
        versions={**ENTRY.versions, "triton": tuner.triton.__version__},
    )
    options = search_options.Options(effort=search_options.Effort.QUICK)
    assert tuner.is_up_to_date(entry, samples.H200, True, options)
    marked = replace(entry, mark=replace(WRONG, finding=finding))
    assert not tuner.is_up_to_date(marked, samples.H200, True, options)


def test_a_marked_entry_takes_no_place_and_leaves_in_no_bundle(tmp_path: Path) -> None:
    from autoattn.tools import bundle

    written(tmp_path, ENTRY)
    file = store.read(store.path_of(tmp_path, samples.H200, Op.FORWARD))
    (entry,) = file.entries.values()
    marked = replace(file, entries={entry.problem.key: replace(entry, mark=WRONG)})
    (merged,) = store.combine(tmp_path, [marked])
    assert list(merged.refused) == [entry.problem]
    with pytest.raises(CacheError, match="must hold"):
        bundle.pack([marked])
