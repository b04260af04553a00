"""Measuring many calls: what runs beside compilers, and what waits for idle cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import measured_calls
import pytest
import samples
from measured_calls import Staged, Subject

from autoattn.core.problem import Problem

H200 = samples.H200
LENGTHS = (16, 4096, 17, 4097, 18, 4098)


class Shop:
    """Compiles a problem in two steps; tells what is compiled while a problem is measured."""

    def __init__(self) -> None:
        self.compiling = 0
        self.events: list[tuple[int, int]] = []  # length of a problem that is measured, compiles beside it
        self.waits = 0

    def __enter__(self) -> Shop:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        self.waits += 1
        assert self.waits < 100

    def compiled(self, problem: Problem, variants: Any) -> Iterator[None]:
        self.compiling += 1
        yield
        yield
        self.compiling -= 1
        return []  # type: ignore[return-value]


class Timed(Subject):
    """A problem that is measured in two steps."""

    def steps(self, shop: Any) -> Any:
        shop.events.append((self.problem.seq_q, shop.compiling))
        yield
        return {"problem": self.problem.seq_q}


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    shop = Shop()
    monkeypatch.setattr(measured_calls, "Workshop", lambda device, measured: shop)
    monkeypatch.setattr(measured_calls, "COMPILED_AHEAD", 2)
    return shop


def subjects() -> list[Subject]:
    return [Timed(samples.problem(seq_q=each), H200, [], 4, short=each < 100) for each in LENGTHS]


def test_short_calls_are_measured_when_nothing_is_compiled(shop: Shop) -> None:
    lines = dict(Staged(subjects(), 60.0, H200).lines())
    assert {line["problem"] for line in lines.values() if isinstance(line, dict)} == set(LENGTHS)
    assert [beside for length, beside in shop.events if length < 100] == [0, 0, 0]
    assert any(beside for length, beside in shop.events if length > 100)


def test_after_its_time_no_problem_is_begun(shop: Shop) -> None:
    assert not list(Staged(subjects(), -1.0, H200).lines())
    assert not shop.events


def test_large_operands_wait_for_one_another(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = samples.problem(seq_q=4096), samples.problem(seq_q=512, seq_kv=512)
    monkeypatch.setattr(measured_calls, "MOST_BYTES", 1.5 * large.bytes())
    monkeypatch.setattr(measured_calls, "COMPILED_AHEAD", 3)
    problems = large, replace(large, seq_q=4095), small
    begun: list[int] = []

    class Recorded(Subject):
        def steps(self, shop: Any) -> Any:
            begun.append(self.problem.seq_q)
            yield
            yield
            begun.append(-self.problem.seq_q)
            return {}

    assert len(list(Staged([Recorded(each, H200, [], 4) for each in problems], 60.0, H200).lines())) == 3
    assert begun.index(-4096) < begun.index(4095)
    assert begun.index(512) < begun.index(-4096)


def test_operands_larger_than_all_room_are_measured_alone(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_calls, "MOST_BYTES", 1.0)
    assert len(list(Staged(subjects(), 60.0, H200).lines())) == len(LENGTHS)
