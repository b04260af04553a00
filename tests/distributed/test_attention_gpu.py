"""context_attention over two cards: every method and mask, in both passes, beside one process on the CPU."""

from __future__ import annotations

import pytest
import rank_calls
import torch

from autoattn.search import rank_processes

pytestmark = pytest.mark.gpu
SECONDS = 30.0  # that a card waits for the other, which may compile


def test_two_cards_compute_what_one_process_does() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    errors = rank_processes.run(rank_calls.errors_on_cards, 2, "nccl", dict[str, float], seconds=SECONDS)
    assert {name: error for name, error in errors.items() if not error < 3e-2} == {}
    assert len(errors) == len(rank_calls.TURNS) * len(rank_calls.CARD_CALLS)
