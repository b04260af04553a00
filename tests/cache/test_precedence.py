"""Which entry of one problem counts across folders, and which one a merge keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import A30, H200, measured, predicted, problem

from autoattn.cache import precedence
from autoattn.cache.file_format import CacheFile
from autoattn.cache.precedence import Overlay
from autoattn.core import triton_release
from autoattn.core.cache_entry import CacheEntry, Finding, Mark
from autoattn.core.device import Device
from autoattn.core.problem import Op

OWN, SHIPPED = Path("own"), Path("shipped")
SISTER = replace(H200, sm_count=H200.sm_count - 4)  # another card of the same name
UNUSED = "0" * 16  # the digest of entries that no call uses
WRONG = Mark(finding=Finding.WRONG, detail="off by 1.0", versions={"torch": "9"})
SLOWER = replace(WRONG, finding=Finding.SLOWER)


def why_not(entry: CacheEntry) -> str | None:
    if entry.mark is not None and entry.mark.holds_back:
        return "it is wrong"
    return "it is stale" if entry.source_digest == UNUSED else None


def file_of(entries: Iterable[CacheEntry], device: Device = H200) -> CacheFile:
    return CacheFile(
        schema=1,
        op=Op.FORWARD,
        device=device.name,
        triton=triton_release.installed_release(),
        fingerprint=device.fingerprint,
        entries={entry.problem.key: entry for entry in entries},
    )


def over(*files: tuple[Path, CacheFile], card: str | None = None) -> Overlay:
    (overlay,) = precedence.overlay(files, why_not=why_not, card=lambda _: card)
    return overlay


def counting(own: CacheEntry, shipped: CacheEntry) -> str:
    """The folder whose entry counts; the other one is shadowed."""
    overlay = over((OWN, file_of([own])), (SHIPPED, file_of([shipped])))
    (place,) = overlay.counting.values()
    assert [shadow.folder for shadow in overlay.shadowed] == [SHIPPED if place.folder == OWN else OWN]
    assert overlay.files == [(place.folder, file_of([place.entry]))]
    return str(place.folder)


# Folders


def test_the_own_entry_counts_whatever_its_time() -> None:
    assert counting(measured(time_us=500.0), measured(time_us=400.0)) == "own"
    assert counting(predicted(time_us=500.0), predicted(time_us=400.0)) == "own"


def test_a_measured_entry_goes_before_a_predicted_one_of_either_folder() -> None:
    assert counting(predicted(time_us=1.0), measured()) == "shipped"
    assert counting(measured(), predicted(time_us=1.0)) == "own"


@pytest.mark.parametrize("unused", [{"source_digest": UNUSED}, {"params": {}, "mark": WRONG}])
def test_an_entry_that_no_call_uses_gives_way_even_to_a_prediction(unused: dict[str, Any]) -> None:
    assert counting(measured(**unused), measured()) == "shipped"
    assert counting(measured(**unused), predicted()) == "shipped"
    assert counting(predicted(**unused), predicted()) == "shipped"
    assert counting(predicted(), measured(**unused)) == "own"


def test_where_no_entry_is_used_evidence_and_folder_decide() -> None:
    stale: dict[str, Any] = {"source_digest": UNUSED}
    assert counting(measured(**stale), measured(**stale, time_us=1.0)) == "own"
    assert counting(predicted(**stale), measured(**stale)) == "shipped"


def test_a_marked_copy_of_a_shipped_entry_shadows_it_and_no_other_kernel() -> None:
    assert counting(measured(mark=WRONG), measured()) == "own"
    assert counting(measured(mark=WRONG), measured(versions={"triton": "9"})) == "own"
    assert counting(measured(mark=SLOWER), measured()) == "own"
    assert counting(measured(mark=WRONG, params={}), measured()) == "shipped"
    assert counting(measured(mark=WRONG, choice="kernel"), measured()) == "shipped", "it runs something else"


def test_problems_that_one_folder_alone_holds_all_count() -> None:
    own, shipped = measured(), predicted(problem(batch=2))
    overlay = over((OWN, file_of([own])), (SHIPPED, file_of([shipped])))
    assert overlay.file == file_of(sorted([own, shipped], key=lambda entry: entry.problem.key))
    assert overlay.files == [(OWN, file_of([own])), (SHIPPED, file_of([shipped]))]
    assert overlay.shadowed == overlay.foreign == ()


def test_devices_and_operations_stay_apart() -> None:
    backward = replace(file_of([]), op=Op.BACKWARD)
    files = [(OWN, file_of([predicted()])), (SHIPPED, backward), (SHIPPED, file_of([predicted()], A30))]
    overlays = precedence.overlay(files, why_not=why_not, card=lambda _: None)
    assert [(overlay.device, overlay.op, len(overlay.ranked)) for overlay in overlays] == [
        ("a30", Op.FORWARD, 1), ("h200", Op.BACKWARD, 0), ("h200", Op.FORWARD, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("card", "counts"), [(H200.fingerprint, 400.0), (SISTER.fingerprint, 1.0), ("another", 1.0), (None, 1.0)]
)
def test_of_two_cards_that_share_a_name_one_counts(card: str | None, counts: float) -> None:
    guess = predicted(problem(batch=2))
    own, shipped = file_of([measured(time_us=1.0)], SISTER), file_of([measured(), guess])
    overlay = over((OWN, own), (SHIPPED, shipped), card=card)
    assert [place.entry.time_us for place in overlay.counting.values()] == [counts, 500.0]
    assert [place.entry.time_us for place in overlay.foreign] == [401.0 - counts]
    assert overlay.fingerprint == (H200 if counts == 400.0 else SISTER).fingerprint


def test_a_card_that_is_not_there_takes_nothing_from_the_only_one_that_is() -> None:
    overlay = over((OWN, file_of([measured()])), card=SISTER.fingerprint)
    assert (len(overlay.counting), overlay.fingerprint) == (1, H200.fingerprint)


def test_why_an_entry_is_unused_is_asked_of_problems_with_several_alone() -> None:
    entries: list[CacheEntry] = []
    files = [(OWN, file_of([measured()])), (SHIPPED, file_of([measured(problem(batch=2))]))]
    precedence.overlay(files, why_not=lambda entry: entries.append(entry), card=lambda _: None)  # type: ignore[func-returns-value]
    assert entries == []


# Merges


def decided(known: CacheEntry, entry: CacheEntry, **options: Any) -> tuple[bool, str]:
    decision = precedence.merging(known, entry, why_not=why_not, **options)
    return decision.taken, decision.reason


def with_versions(entry: CacheEntry, **versions: str) -> CacheEntry:
    return replace(entry, versions={**entry.versions, **versions})


def other(time_us: float, **changes: Any) -> CacheEntry:
    """A measured entry whose kernel is another one than that of samples.measured()."""
    return measured(time_us=time_us, params={"BLOCK_M": 1}, **changes)


def test_evidence_and_use_decide_before_times() -> None:
    stale: dict[str, Any] = {"source_digest": UNUSED}
    fast = predicted(time_us=1.0)
    assert decided(measured(), fast) == (False, "a prediction never takes a measurement's place")
    taken, reason = decided(measured(**stale), fast)
    assert not taken
    assert reason.endswith("though no call uses the measurement: it is stale")
    assert decided(fast, measured()) == (True, "a measurement takes a prediction's place")
    assert decided(measured(), measured(time_us=1.0, **stale)) == (False, "no call would use it: it is stale")
    assert decided(fast, measured(**stale)) == (False, "no call would use it: it is stale")
    assert decided(measured(time_us=1.0, **stale), measured()) == (True, "no call uses the one there: it is stale")


@pytest.mark.parametrize("any_time", [False, True])
def test_a_mark_is_never_lifted_by_the_entry_it_was_put_on(any_time: bool) -> None:
    kept = (False, "it is the same, and the one there is marked since")
    for mark in (SLOWER, WRONG):
        assert decided(measured(mark=mark), measured(), any_time=any_time) == kept
    assert decided(measured(mark=WRONG), measured(mark=SLOWER), any_time=any_time) == kept
    assert decided(measured(), measured(mark=SLOWER), any_time=any_time) == (True, "it is the same, marked since")
    assert decided(measured(), measured(mark=WRONG), any_time=any_time) == (False, "no call would use it: it is wrong")
    assert decided(measured(mark=WRONG), measured(time_us=401.0)) == (True, "no call uses the one there: it is wrong")


def test_an_entry_that_is_marked_gives_way_to_another_that_is_not() -> None:
    assert decided(measured(mark=SLOWER), other(900.0)) == (True, "the one there is marked: slower")
    assert decided(other(900.0), measured(mark=SLOWER)) == (False, "it is marked: slower")


def test_an_entry_of_another_objective_is_not_taken() -> None:
    frugal = other(1.0)
    frugal = replace(frugal, search=replace(frugal.search, objective="energy"))
    reason = "it was tuned for energy, the one there for time"
    assert decided(measured(), frugal) == decided(measured(), frugal, any_time=True) == (False, reason)


def test_of_two_predictions_by_one_model_the_faster_is_kept() -> None:
    assert decided(predicted(time_us=500.0), predicted(time_us=499.0)) == (
        True, "it is predicted faster: 499 us, 500 us there",
    )  # fmt: skip
    for time_us in (501.0, 500.0):
        seed = replace(predicted().search, seed=7)
        taken, reason = decided(predicted(time_us=500.0), predicted(time_us=time_us, search=seed))
        assert not taken
        assert reason.startswith("it is not predicted faster: ")


@pytest.mark.parametrize(
    ("was", "now", "time_us", "taken", "words"),
    [
        ("0.1.0", "0.2.0", 499.0, True, "predicted faster by a newer model"),
        ("0.1.0", "0.2.0", 501.0, False, "not predicted faster"),
        ("0.10.0", "0.9.0", 499.0, False, "models of two releases do not compare"),
        ("0.1.0", "", 499.0, False, "by the model of autoattn , the one there by that of 0.1.0"),
    ],
)
def test_predictions_by_two_models(was: str, now: str, time_us: float, taken: bool, words: str) -> None:
    known, entry = (
        with_versions(predicted(time_us=500.0), autoattn=was),
        with_versions(predicted(time_us=time_us), autoattn=now),
    )
    decision = decided(known, entry)
    assert decision[0] is taken
    assert words in decision[1]


@pytest.mark.parametrize(
    ("time_us", "driver", "taken", "words"),
    [
        (380.0, "1.0", True, "measured faster: 380 us, 400 us there"),  # older software, but a faster kernel
        (420.0, "999.0", False, "measured slower: 420 us, 400 us there"),
        (410.0, "999.0", True, "as fast within 3%"),
        (390.0, "570.0", True, "no older software"),
        (390.0, "1.0", False, "older software"),
    ],
)
def test_of_two_measurements_more_than_a_day_s_difference_decides_then_software(
    time_us: float, driver: str, taken: bool, words: str
) -> None:
    known = with_versions(measured(choice="kernel"), driver="570.0")
    decision = decided(known, with_versions(other(time_us, choice="kernel"), driver=driver))
    assert decision[0] is taken
    assert words in decision[1]


def test_one_kernel_measured_twice_is_not_judged_by_its_time() -> None:
    known = with_versions(measured(), torch="2.9.0+cu130")
    assert decided(known, with_versions(measured(time_us=900.0), torch="2.13.0+cu130"))[0]
    taken, reason = decided(with_versions(measured(time_us=900.0), torch="2.13.0"), known)
    assert (taken, reason) == (False, "it runs the same, and was measured with older software: 364 us, 819 us there")


def test_the_time_is_that_of_what_a_call_runs() -> None:
    by_rival = measured(time_us=400.0)  # its rival takes 364 us
    assert decided(by_rival, other(380.0, choice="kernel"))[0] is False
    assert decided(by_rival, other(350.0, choice="kernel"))[0] is True


def test_replace_overrides_times_and_nothing_else() -> None:
    assert decided(measured(), other(900.0), any_time=True) == (True, "--replace asks for it")
    assert decided(predicted(), predicted(time_us=900.0), any_time=True)[0]
    assert not decided(measured(), predicted(time_us=1.0), any_time=True)[0]
    assert not decided(measured(), measured(source_digest=UNUSED), any_time=True)[0]
