"""Kernels with code that never runs, and calls behind others."""

from __future__ import annotations

from dataclasses import replace

import cold_code
from cold_code import Case

from autoattn.core.trial import StaticReport
from autoattn.hardware.timer import Call
from autoattn.kernels import compiler


class Recorder:
    """Stands in for a stopwatch: calls, and takes 1 us more each time."""

    def __init__(self) -> None:
        self.taken = 0

    def samples(self, call: Call, count: int) -> list[float]:
        for _ in range(count):
            call()
            self.taken += 1
        return [float(self.taken)]


def code_bytes(case: Case) -> int:
    report = compiler.inspect(case.source, 90)
    assert isinstance(report, StaticReport)
    return report.code_bytes


def test_padding_makes_a_kernel_as_much_larger() -> None:
    plain = Case(name="two programs an SM", params=tuple(cold_code.PAIRED.items()))
    for padded in (replace(plain, front=32), replace(plain, back=32)):
        assert 0 <= code_bytes(padded) - code_bytes(plain) - 32 * 1024 < 1024


def test_each_sample_is_taken_behind_the_other_calls() -> None:
    called: list[str] = []
    before = [lambda: called.append("first"), lambda: called.append("second")]
    median = cold_code.median_us(lambda: called.append("call"), before, Recorder())  # type: ignore[arg-type]
    assert called == ["first", "second", "call"] * cold_code.SAMPLES
    assert median == (cold_code.SAMPLES + 1) / 2
