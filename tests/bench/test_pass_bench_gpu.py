"""Passes of one attention on a card: times by graphs and by events, and memory that grows with the tokens alone."""

from __future__ import annotations

import pytest

from autoattn.bench import pass_bench
from autoattn.bench.pass_results import Options, Part, Table
from autoattn.bench.training_results import Numbers, State, Whose

pytestmark = pytest.mark.gpu


def test_memory_grows_with_the_tokens_and_the_formula_s_with_their_square() -> None:
    options = Options(
        tables=(Table.FLASH,), contexts=(512, 4096, 16384), head_dims=(64,), numbers=(Numbers.BFLOAT16,), seconds=0.02
    )
    cases = {rows[0].case.context: {row.whose: row for row in rows} for rows in pass_bench.rows(options)}
    for rows in cases.values():
        for row in rows.values():
            assert row.state is State.OK, row.detail
            assert not row.detail
            assert [*row.times] == list(Part)
    assert cases[512][Whose.OURS].times[Part.FORWARD].graph
    growth = {}
    for whose in (Whose.OURS, Whose.NAIVE):
        peaks = [cases[context][whose].peak_bytes for context in (4096, 16384)]
        assert None not in peaks
        growth[whose] = peaks[1] / peaks[0]  # type: ignore[operator]
    assert growth[Whose.OURS] < 5.0
    assert growth[Whose.NAIVE] > 12.0


def test_both_passes_take_about_as_long_as_each_of_them() -> None:
    options = Options(tables=(Table.FLASH,), contexts=(16384,), head_dims=(64,), attention=(Whose.SDPA,), seconds=0.05)
    for (row,) in pass_bench.rows(options):
        assert row.ms(Part.BOTH) == pytest.approx(row.ms(Part.FORWARD) + row.ms(Part.BACKWARD), rel=0.2)
