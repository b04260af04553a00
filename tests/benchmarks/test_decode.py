"""The benchmark of generation on caches: which contestants it times, and what its table and its summary say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import cache_calls
import decode
import pytest
import torch
from cache_calls import Call, Row, Tensors
from torch import Tensor

from autoattn.hardware.cuda_graph import CapturedCall

ROW = Row(batch=2, heads=(4, 2), keys=40, page=16, goal="none")


@dataclass(frozen=True, slots=True)
class Graph:
    """In place of a CUDA graph: replays calls on the CPU."""

    calls: list[Call]
    outputs: list[Tensor]

    def replay(self) -> None:
        for call, output in zip(self.calls, self.outputs, strict=True):
            output.copy_(call())


def captured(calls: list[Call]) -> decode.CapturedCalls:
    outputs = [call().clone() for call in calls]
    return CapturedCall(graph=Graph(calls, outputs), call=list, output=outputs)


def unwritten(calls: list[Call]) -> decode.CapturedCalls:
    """What a graph is whose kernels write elsewhere: the answers of the calls before it stay."""
    return CapturedCall(graph=Graph([], []), call=list, output=captured(calls).output)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_calls, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(cache_calls, "HEAD_DIM", 16)
    monkeypatch.setattr(decode, "copies_of", lambda row: 2)
    monkeypatch.setattr(decode, "captured", captured)
    monkeypatch.setattr(decode, "timed", lambda run: 7.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def without_the_last_page(tensors: Tensors) -> Call:
    """A call that misses it in the last sequence."""
    shorter = tensors.lengths.clone()
    shorter[-1] -= ROW.page
    return cache_calls.own(ROW, replace(tensors, lengths=shorter))


def refusing(tensors: Tensors) -> Call:
    raise ValueError("no pages of 16")


def plant(monkeypatch: pytest.MonkeyPatch, **makers: Callable[[Tensors], Call]) -> None:
    """Adds contestants beside autoattn."""
    monkeypatch.setattr(decode, "contestants", lambda row: {decode.OWN: partial(cache_calls.own, row), **makers})


def test_a_contestant_whose_answer_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, right=partial(cache_calls.own, ROW), short=without_the_last_page, picky=refusing)
    times, reasons = decode.contest(ROW, 3)
    assert times == {decode.OWN: [7.0] * 3, "right": [7.0] * 3}
    assert reasons["picky"] == "refused: no pages of 16"
    what, error = reasons["short"].rsplit(" ", 1)
    assert what == "wrong: error"
    assert 0.1 < float(error) < 3
    lines = list(decode.lines_of(ROW, times, reasons, 1e12))
    assert f"| {ROW} | short | {reasons['short']} | | | |" in lines


def test_a_graph_that_writes_no_answer_is_wrong_whatever_its_first_calls_gave() -> None:
    tensors = [Tensors.of(ROW) for _ in range(2)]
    right = [cache_calls.expected(ROW, each) for each in tensors]
    calls = [cache_calls.own(ROW, each) for each in tensors]
    runs = {"written": captured(calls), "unwritten": unwritten(calls)}
    assert decode.wrong(runs, right) == {"unwritten": "wrong: error inf"}


def test_a_wrong_answer_of_autoattn_leaves_the_row_out_of_the_summary() -> None:
    rows = [str(decode.ROWS[0]), next(str(row) for row in decode.ROWS if row.queries == 4)]
    medians = {rows[0]: {"SDPA, flash": 110.0, "FlashInfer": 120.0}, rows[1]: {decode.OWN: 105.0}}
    assert not list(decode.summary(medians))


def test_the_summary_names_the_worst_row_and_the_ratio_of_several_queries() -> None:
    single, several = str(decode.ROWS[0]), next(str(row) for row in decode.ROWS if row.queries == 4)
    medians = {single: {decode.OWN: 100.0, "FlashInfer": 110.0}, several: {decode.OWN: 105.0, "FlashInfer": 105.0}}
    lines = list(decode.summary(medians))
    assert "1.049 times as long, at least 1.000" in lines[0]
    assert lines[1] == "4 queries take 1.050 times one query."
