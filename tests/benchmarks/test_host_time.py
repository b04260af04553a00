"""The benchmark of the host's part of a new length: what it times runs the ordinary way, and no GPU is needed."""

from __future__ import annotations

import dynamic
import host_time

from autoattn.runtime.prepared_call import KernelCall


def test_each_program_is_timed_with_its_phases() -> None:
    with host_time.fake_card():
        heading, _, row, *phases = host_time.table(2, "decode B8 H16 D64", warm=True)
    assert heading.startswith("| a program | new length: host us |")
    assert row.startswith("| decode B8 H16 D64, growing | ")
    assert [words for words in ("take apart", "resize", "launch") if not any(words in phase for phase in phases)] == []


def test_calls_are_prepared_as_on_the_card() -> None:
    row = next(row for row in dynamic.ROWS if row.name.startswith("decode B8 H16 D64"))
    with host_time.fake_card():
        host_time.Program(row, 3, warm=True).times({})
        (*_, known) = host_time.call.call_cache.prepared_calls()
        assert isinstance(known, KernelCall)
        host_time.fake_device.forget()
