"""Cache files of other cards of an architecture, and how a card's times translate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import samples

from autoattn.cache import sister_cards, store
from autoattn.core import device_profiles
from autoattn.core.cache_entry import Finding, Mark
from autoattn.core.problem import Op

H200, A30 = samples.H200, samples.A30
H100, A100 = device_profiles.named("h100"), device_profiles.named("a100")
WRONG = Mark(finding=Finding.WRONG, detail="off by one")


def test_cards_of_one_architecture_are_sisters_and_others_are_not() -> None:
    assert sister_cards.names_of(H200) == ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"]
    assert "NVIDIA A100-SXM4-80GB" in sister_cards.names_of(A30)
    assert sister_cards.sister(H200.fingerprint, H200) is None
    assert sister_cards.sister(H200.fingerprint, A30) is None
    assert sister_cards.sister("no fingerprint", A30) is None


def test_a_card_that_nobody_described_is_a_sister_by_its_fingerprint(tmp_path: Path) -> None:
    unknown = replace(H200, name="nvidia-gh200", full_name="NVIDIA GH200 480GB", sm_count=144)
    store.merge(tmp_path, unknown, Op.FORWARD, [samples.measured()])
    ((card, file),) = sister_cards.files_of(tmp_path, H200, Op.FORWARD)
    assert (card.full_name, card.sm_count, card.device) == ("NVIDIA GH200 480GB", 144, None)
    assert list(file.entries) == [samples.problem().key]
    assert card.time_ratio(samples.problem(), H200) is None


def test_files_of_other_architectures_and_of_the_card_itself_are_left(tmp_path: Path) -> None:
    for device in (H200, A30):
        store.merge(tmp_path, device, Op.FORWARD, [samples.measured()])
    assert sister_cards.files_of(tmp_path, H200, Op.FORWARD) == []
    assert sister_cards.files_of(tmp_path / "missing", H200, Op.FORWARD) == []
    assert [file.device for _, file in sister_cards.files_of(tmp_path, A100, Op.FORWARD)] == ["a30"]


@pytest.mark.parametrize(
    ("facts", "ratio"),
    [({"seq_q": 1, "seq_kv": 60_000}, 4800 / 3350), ({"seq_q": 16_384, "seq_kv": 16_384}, 1770 / 1830)],
    ids=["bound by memory", "bound by products"],
)
def test_times_translate_by_what_bounds_the_problem(facts: dict[str, int], ratio: float) -> None:
    card = sister_cards.of_fingerprint(H200.fingerprint)
    assert card is not None
    assert card.time_ratio(samples.problem(**facts), H100) == pytest.approx(ratio, rel=1e-3)


def test_a_verdict_holds_for_the_architecture_and_its_time_for_no_other_card(tmp_path: Path) -> None:
    measured = samples.measured()
    other = samples.measured(samples.problem(batch=2), source_digest="marked", mark=WRONG, candidates=())
    predicted = samples.predicted(samples.problem(batch=8), source_digest="predicted", candidates=())
    store.merge(tmp_path, H200, Op.FORWARD, [measured, other, predicted])
    verified = sister_cards.verified([tmp_path], H100, Op.FORWARD)
    digests = {measured.source_digest, *(candidate.source_digest for candidate in measured.candidates)}
    assert verified == dict.fromkeys(digests, "NVIDIA H200")
    assert sister_cards.verified([tmp_path], H200, Op.FORWARD) == verified
    assert sister_cards.verified([tmp_path], A30, Op.FORWARD) == {}
