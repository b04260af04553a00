"""What measured times say of the order of heads."""

from __future__ import annotations

from pathlib import Path

import head_orders
import measured_files
import portfolio_examples
import pytest
import samples
from typer import Typer
from typer.testing import CliRunner

from autoattn.codegen import head_order, search_space
from autoattn.core.mask import Mask
from autoattn.core.variant import Variant

CAUSAL = samples.problem(heads_kv=32, seq_q=4096, seq_kv=4096)  # 2 MB of keys and values a head
VARIANT = search_space.load("gluon/forward").seeds_for(CAUSAL, samples.H200)[0]


def orders(times_us: dict[int, float]) -> dict[Variant, float]:
    return {head_order.in_order(VARIANT, group): time_us for group, time_us in times_us.items()}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return measured_files.written(
        tmp_path / "h200_chosen_7.jsonl",
        {
            CAUSAL: orders({1: 20.0, 4: 12.0, 16: 10.0, 0: 30.0}),
            samples.problem(mask=Mask(), seq_q=4096): orders({1: 1.0, 16: 9.0}),
            samples.problem(seq_q=4000, seq_kv=4096): orders({1: 5.0}),
        },
    )


def test_each_share_is_judged_by_the_order_that_it_chooses(measured: Path) -> None:
    app = Typer()
    app.command()(head_orders.main)
    result = CliRunner().invoke(app, [str(measured)])
    assert result.exit_code == 0, result.output
    assert "1 variants on 1 problems" in result.output, "even rows, and a single order, say nothing"
    cells = {row.split(" | ")[0]: row for row in result.output.splitlines()}
    assert cells["| 0.1"] == "| 0.1 | 1.000 | 1.000 | 2.000 | 2.000 |"  # 6 MB hold no four heads
    assert cells["| 0.2"] == "| 0.2 | 0.600 | 0.600 | 1.200 | 1.200 |"
    assert cells["| 0.6"] == "| 0.6 | 0.500 | 0.500 | 1.000 | 1.000 |"


def test_the_shipped_share_is_as_good_as_any_on_the_measured_problems() -> None:
    judged = list(head_orders.orders_of(portfolio_examples.read(head_orders.MEASURED)))
    means = {
        share: sum(first for first, _ in head_orders.losses(share, judged)) / len(judged)
        for share in head_orders.SHARES
    }
    assert means[head_order.L2_SHARE] <= min(means.values()) + 0.002
    assert means[head_order.L2_SHARE] < 0.94
