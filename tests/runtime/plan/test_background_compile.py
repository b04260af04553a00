"""AUTOATTN_COLD=background: PyTorch answers until a kernel is there, and nobody waits for a compiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from computed_launches import card  # noqa: F401 - a fixture
from functional_calls import close, expected, inputs

import autoattn
from autoattn.errors import CompileError, UsageError
from autoattn.kernels.compiler import Kernel
from autoattn.runtime.plan import background_compile, planner
from autoattn.runtime.plan.explanations import Level
from autoattn.workers.compile_job import Inspect

# Each test has a head dim of its own: what one began is done in the next.


class Compiler:
    """In place of the pool: each job waits until a test lets it end."""

    def __init__(self) -> None:
        self.may_end, self.jobs = threading.Event(), []

    def __call__(self, size: int) -> Compiler:
        assert size == 1
        return self

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def result(self, job: Inspect, seconds: float) -> None:
        self.jobs.append(job)
        assert self.may_end.wait(60.0)

    def end(self) -> None:
        self.may_end.set()
        background_compile.wait()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    pool = Compiler()
    monkeypatch.setenv(background_compile.COLD, background_compile.BACKGROUND)
    monkeypatch.setattr(background_compile, "Pool", pool)
    yield pool
    pool.end()


def test_pytorch_answers_until_the_kernel_is_there(card: dict[str, Any], compiler: Compiler) -> None:
    tensors = inputs(dtype=torch.float16, head_dim=24)
    for _ in range(3):
        close(autoattn.attention(*tensors), expected(tensors, False))
        explanation = autoattn.explain(*tensors)
        assert (explanation.level, explanation.reason) == (Level.SDPA, background_compile.REASON)
    assert (len(compiler.jobs), card["loaded"], card["forward"]) == (1, [], 0)
    compiler.end()
    close(autoattn.attention(*tensors), expected(tensors, False))
    assert autoattn.explain(*tensors).route == "kernel"
    assert [job.source for job in compiler.jobs] == card["loaded"]
    assert card["forward"] == 1


def test_a_kernel_that_was_loaded_serves_new_lengths_at_once(card: dict[str, Any], compiler: Compiler) -> None:
    autoattn.attention(*inputs(dtype=torch.float16, seq_kv=300, head_dim=64))
    compiler.end()
    for length in (300, 301, 302):
        autoattn.attention(*inputs(dtype=torch.float16, seq_kv=length, head_dim=64))
    assert (len(compiler.jobs), len(card["loaded"]), card["forward"]) == (1, 1, 3)


def test_what_the_compiler_refuses_makes_way_as_it_does_for_those_who_wait(
    card: dict[str, Any], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Any, device: torch.device) -> Kernel:
        raise CompileError("this variant does not fit")

    monkeypatch.setattr(planner.compiler, "load", refuse)
    tensors = inputs(dtype=torch.float16, head_dim=32)
    compiler.may_end.set()
    while background_compile.REASON in str(autoattn.explain(*tensors)):  # each seed in turn
        background_compile.wait()
    assert str(autoattn.explain(*tensors)) == "sdpa (sdpa): this variant does not fit"
    close(autoattn.attention(*tensors), expected(tensors, False))


def test_gradients_that_must_repeat_do_so_meanwhile(card: dict[str, Any], compiler: Compiler) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(dtype=torch.float16, head_dim=40)]
    explanation = autoattn.explain(*tensors, deterministic=True)
    assert explanation.reason == background_compile.REASON
    assert explanation.steps[-1].startswith("deterministic: both passes run with")


@pytest.mark.parametrize("setting", [None, "", background_compile.WAIT])
def test_the_default_waits(
    setting: str | None, card: dict[str, Any], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is None:
        monkeypatch.delenv(background_compile.COLD)
    else:
        monkeypatch.setenv(background_compile.COLD, setting)
    autoattn.attention(*inputs(dtype=torch.float16, head_dim=48))
    assert (len(compiler.jobs), len(card["loaded"]), card["forward"]) == (0, 1, 1)


def test_another_setting_is_an_error_in_a_sentence(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(background_compile.COLD, "backround")
    with pytest.raises(UsageError, match="AUTOATTN_COLD must be wait or background, got 'backround'; correct or unset"):
        autoattn.attention(*inputs(dtype=torch.float16, head_dim=56))
