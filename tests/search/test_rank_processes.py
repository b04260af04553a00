"""Processes that are the ranks of a group: how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import rank_calls

from autoattn.search import rank_processes


@pytest.mark.exhaustive  # starting two processes takes seconds
def test_ctrl_c_ends_ranks_that_hear_no_signal(tmp_path: Path) -> None:
    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest-xdist ignore it
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            rank_processes.run(partial(rank_calls.sleep_deaf, folder=tmp_path), 2, "gloo", int)
    finally:
        signal.signal(signal.SIGINT, before)
    for process in multiprocessing.active_children():
        process.join(5.0)
    assert multiprocessing.active_children() == []
