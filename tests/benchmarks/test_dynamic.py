"""The benchmark of lengths that never repeat: what it draws, and what it calls a new length."""

from __future__ import annotations

import dynamic
import pytest


@pytest.mark.parametrize("row", dynamic.ROWS, ids=lambda row: row.name)
def test_no_length_repeats_and_each_run_draws_the_same(row: dynamic.Row) -> None:
    lengths = dynamic.draw_lengths(row, 24 + dynamic.WARM)
    assert len(set(lengths)) == len(lengths) == 24 + dynamic.WARM
    assert all(row.lengths[0] <= length < row.lengths[1] for length in lengths)
    assert dynamic.draw_lengths(row, 24 + dynamic.WARM) == lengths


def test_calls_that_warm_up_are_not_counted_and_the_same_lengths_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[int] = []

    def prepare(length: int) -> dict[str, dynamic.Call]:
        return {"ours": lambda: met.append(length)}

    row = dynamic.Row(name="a row", lengths=(1, 100), prepare=prepare)
    clock = iter(range(1000))
    monkeypatch.setattr(dynamic, "timed", lambda call: (call(), (float(next(clock)), 0.0))[1])
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(dynamic.torch.cuda, name, lambda: 0)
    times = dynamic.measure(row, 5)["ours"]
    new = met[dynamic.WARM : dynamic.WARM + 5]
    assert times.host == [float(dynamic.WARM + place) for place in range(5)]
    assert met[dynamic.WARM + 5 :] == new
    assert times.host_again == [float(dynamic.WARM + 5 + place) for place in range(5)]
