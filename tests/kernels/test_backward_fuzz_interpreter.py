"""Gradients of packed sequences that `benchmarks/fuzz.py --gradients` draws."""

from __future__ import annotations

import random
from typing import Any

import drawn_gradients
import pytest
from drawn_gradients import LARGE, TINY

from autoattn.codegen import search_space
from autoattn.core.device_profiles import named
from autoattn.kernels import backward, compiler
from autoattn.tensors.operands import Gradients


def test_a_seed_names_a_call_and_its_kernels() -> None:
    for number in range(6):
        first, again = (drawn_gradients.drawn_packed(random.Random(number)) for _ in range(2))
        assert first == again
        assert first.source.digest == again.source.digest


def test_documents_have_no_token_one_and_thousands() -> None:
    calls = [drawn_gradients.call_of(random.Random(number), LARGE) for number in range(200)]
    lengths = [pair for call in calls for pair in call.lengths or ()]
    for place in (0, 1):
        held = [pair[place] for pair in lengths]
        assert {0, 1} <= {*held}
        assert sum(length > 2000 for length in held) > 100
    assert any(queries != keys for queries, keys in lengths)
    assert {call.problem.deterministic for call in calls} == {False, True}
    assert all(call.problem.tokens_q <= drawn_gradients.MOST_TOKENS + 6 for call in calls)


def test_a_launch_that_differs_in_a_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(
        call
        for call in (drawn_gradients.call_of(random.Random(number), TINY) for number in range(99))
        if call.problem.deterministic and not call.problem.modifiers.names and call.problem.tokens_q < 40
    )
    points = search_space.load(drawn_gradients.HOPPER)
    variant = points.default(call.problem, named("h200"))
    source = drawn_gradients.render.render(call.problem, variant)
    launch, launches = backward.launch, []

    def launch_and_spoil(kernel: Any, problem: Any, operands: Any, saved: Any, gradients: Gradients) -> None:
        launch(kernel, problem, operands, saved, gradients)
        launches.append(gradients)
        if len(launches) == 5:
            gradients.key[0, 0, 0, 0] += 1

    monkeypatch.setattr(backward, "launch", launch_and_spoil)
    kernel = compiler.load(source, drawn_gradients.torch.device("cpu"))
    assert drawn_gradients.fault(kernel, call, 3) == ""
    launches.clear()
    assert "two runs on the same inputs differ in the key's gradient" in drawn_gradients.fault(kernel, call, 6)
