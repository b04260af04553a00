"""How much of a run's work is done."""

from __future__ import annotations

from autoattn.search.work import Work


def test_parts_count_by_their_size() -> None:
    work = Work()
    work.expect(0, 3.0)
    work.expect(1, 1.0)
    assert work.share == 0.0
    work.note(1, 1.0)
    assert work.share == 0.25
    work.note(0, 0.5)
    assert work.share == 0.625


def test_a_part_that_turned_out_to_be_none_is_no_work() -> None:
    work = Work()
    work.expect(0, 3.0)
    work.expect(1, 1.0)
    work.drop(0)
    assert work.share == 0.0
    work.drop(1)
    assert work.share == 1.0
