"""`autoattn bench ranks`: the rows of one attention over ranks, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import rank_calls
import samples
import torch
from command_line import Run, autoattn, no_card  # noqa: F401 - fixtures
from fake_device import set_device
from process_groups import Ranks

from autoattn.bench import kernel_bench, rank_bench
from autoattn.bench.rank_bench import Row
from autoattn.errors import GroupError
from autoattn.search import rank_processes

DONE = Row(ranks=1, batch=1, seq=512, heads=8, seconds=0.5e-3, memory_bytes=45 * 2**20)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"), 2)
    yield started
    started.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_have_a_time_for_each_size(ranks: Ranks, size: int) -> None:
    rows = ranks.run(size, rank_calls.bench_rows)[0]
    assert [(row.ranks, row.batch, row.seq, row.heads) for row in rows] == [
        (size, *each) for each in rank_bench.sizes()
    ]
    assert all(row.seconds and not row.detail for row in rows)


def test_a_row_has_the_published_columns() -> None:
    lines = [*rank_bench.table([DONE, replace(DONE, seconds=None, detail="why")])]
    assert lines[2:] == [
        "| ring_v2_collective | 1 | 1 | 512 | 8 | 0.500 | 45.00 | 1024000 | ✓ |",
        "| ring_v2_collective | 1 | 1 | 512 | 8 | N/A | N/A | N/A | ✗ why |",
    ]


def test_ranks_that_fail_or_are_not_there_leave_the_others(
    autoattn: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    set_device(monkeypatch, samples.H200)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(kernel_bench, "machine", lambda peers: {"card": "H200"})

    def run(job: object, number: int, backend: str, kind: object) -> list[Row]:
        if number == 2:
            raise GroupError("a rank ended")
        return [replace(DONE, batch=b, seq=s, heads=h) for b, s, h in rank_bench.sizes()]

    monkeypatch.setattr(rank_processes, "run", run)
    code, _, _ = autoattn("bench", "ranks", "--ranks", "1,2,4", "--out", tmp_path)
    assert code == 0
    lines = (tmp_path / "ranks.md").read_text().splitlines()
    assert [sum(end in line for line in lines) for end in ("✓", "a rank ended", "4 GPUs are needed, there are 2")] == [
        8
    ] * 3
