"""context_attention over two cards: every method and mask, in both passes, beside one process on the CPU.

Each test starts processes of its own and compiles in them: -n 5 runs all at once.
"""

from __future__ import annotations

from functools import partial

import pytest
import rank_calls
import torch

from autoattn.search import rank_processes

pytestmark = pytest.mark.gpu
SECONDS = 60.0  # that a card waits for the other, which may compile


@pytest.mark.parametrize(("mask", "method"), rank_calls.CARD_CALLS)
def test_two_cards_compute_what_one_process_does(mask: str, method: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    job = partial(rank_calls.errors_on_cards, name=mask, method=method)
    errors = rank_processes.run(job, 2, "nccl", dict[str, float], seconds=SECONDS)
    assert list(errors) == list(rank_calls.TURNS)
    assert {turn: error for turn, error in errors.items() if not error < 3e-2} == {}
