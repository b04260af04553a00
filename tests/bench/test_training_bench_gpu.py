"""Timed training steps on a card: all attentions, eager and compiled."""

from __future__ import annotations

import pytest
import torch

from autoattn.bench import training_bench
from autoattn.bench.training_results import Mode, Numbers, Options, State, Whose
from autoattn.bench.transformer import Size

pytestmark = pytest.mark.gpu
SMALL = Size(name="small", width=256, hidden=512, layers=2, heads=4, vocabulary=500)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("numbers", list(Numbers))
def test_every_attention_is_timed_and_gives_the_same_loss(numbers: Numbers, mode: Mode) -> None:
    options = Options(models=("small",), contexts=(512,), numbers=(numbers,), modes=(mode,), steps=5)
    rows = list(training_bench.rows([SMALL], options))
    assert {row.whose: (row.state, row.detail) for row in rows} == dict.fromkeys(Whose, (State.OK, ""))
    for row in rows:
        assert all(step.total_ms >= step.forward_ms + step.backward_ms > 0 for step in row.times)
        assert row.share > 0
        assert row.ran
        assert row.peak_bytes is not None
        assert row.peak_bytes > 8 * SMALL.parameters, "weights and gradients"


def test_a_model_that_is_too_large_says_so_and_leaves_its_memory() -> None:
    huge = Size(name="huge", width=16384, hidden=65536, layers=64, heads=64)
    before = torch.cuda.memory_allocated()
    rows = list(training_bench.rows([huge], Options(models=("huge",), contexts=(256,), modes=(Mode.EAGER,))))
    assert {row.state for row in rows} == {State.MEMORY}
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_naive_attention_runs_out_of_memory_where_the_others_do_not() -> None:
    free, _ = torch.cuda.mem_get_info()
    context = 256 * round((free / (4 * 4 * 8)) ** 0.5 * 2 / 256)  # its scores of 4 heads, in several copies
    options = Options(
        models=("small",), contexts=(context,), numbers=(Numbers.BFLOAT16,), modes=(Mode.EAGER,), batch=1,
        attention=(Whose.NAIVE, Whose.SDPA), warmup=1, steps=3,
    )  # fmt: skip
    naive, sdpa = training_bench.rows([SMALL], options)
    assert (naive.state, sdpa.state) == (State.MEMORY, State.OK)
