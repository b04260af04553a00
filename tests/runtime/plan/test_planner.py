"""Plans of calls, with a card that is not there: which kernel answers, and when PyTorch does."""

from __future__ import annotations

import logging
from typing import Any

import fake_device
import formula
import kernels
import pytest
import samples
import torch
from computed_launches import card  # noqa: F401 - a fixture
from functional_calls import (
    ARGUMENTS,
    close,
    expected,
    inputs,
    nothing_planned,  # noqa: F401 - a fixture
    packed,
)
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.baselines import pytorch_sdpa
from autoattn.codegen import search_space
from autoattn.core.problem import Problem
from autoattn.core.variant import Source, Traits
from autoattn.errors import CompileError
from autoattn.kernels.compiler import Kernel
from autoattn.runtime.plan import cache_lookup, explanations, planner
from autoattn.runtime.plan.explanations import Level
from autoattn.runtime.plan.reasons import Reasons
from autoattn.tensors.operands import Operands


def test_a_kernel_is_planned_once_and_launched_each_time(card: dict[str, Any]) -> None:
    tensors = inputs(dtype=torch.float16)
    for _ in range(3):
        close(autoattn.attention(*tensors), expected(tensors, False))
    assert (len(card["loaded"]), card["forward"]) == (1, 3)
    assert autoattn.explain(*tensors).level is Level.DEFAULT


def test_problems_that_differ_only_in_sizes_share_a_kernel(card: dict[str, Any]) -> None:
    for length in range(300, 316):
        autoattn.attention(*inputs(seq_q=256, seq_kv=length, dtype=torch.float16))
    assert len(card["loaded"]) == 1


def test_a_call_that_waits_for_a_compiler_says_so_once(card: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="autoattn"):
        for length in (300, 300, 301):
            autoattn.attention(*inputs(seq_kv=length, dtype=torch.float16))
    (source,) = card["loaded"]
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    words = f"s for a kernel of {source.variant.template} ({source.digest}), to be compiled or found in Triton's cache"
    assert words in record.getMessage()


@pytest.mark.parametrize(("head_dim", "alignment"), [(16, 8), (20, 4), (57, 1)])
def test_a_kernel_suits_the_memory_of_the_output_too(card: dict[str, Any], head_dim: int, alignment: int) -> None:
    """Slices of wider rows are aligned where the contiguous output is not."""
    room = [torch.zeros(2, 3, 40, 64, dtype=torch.float16) for _ in range(3)]
    autoattn.attention(*(tensor[..., :head_dim] for tensor in room))
    (source,) = card["loaded"]
    assert source.traits == Traits(alignment=alignment) == card["traits"]


def test_other_strides_get_another_kernel(card: dict[str, Any]) -> None:
    query, key, value = inputs(dtype=torch.float16)
    autoattn.attention(query, key, value)
    autoattn.attention(query.mT.contiguous().mT, key, value)
    assert [source.traits.alignment for source in card["loaded"]] == [8, 1]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_output_stands_in_memory_as_the_layout_says(card: dict[str, Any], layout: str) -> None:
    tensors = inputs(dtype=torch.float16, layout=layout)
    output = autoattn.attention(*tensors, layout=layout)
    assert output.is_contiguous()
    close(output, expected(tensors, False, layout))


def test_what_a_compiler_refuses_goes_to_pytorch_and_is_said(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Source, device: torch.device) -> Kernel:
        raise CompileError("this variant does not fit")

    monkeypatch.setattr(planner.compiler, "load", refuse)
    tensors = inputs(dtype=torch.float16)
    close(autoattn.attention(*tensors), expected(tensors, False))
    assert str(autoattn.explain(*tensors)) == "sdpa (sdpa): this variant does not fit"


@pytest.mark.usefixtures("no_portfolio")
def test_a_default_that_does_not_fit_makes_way_for_the_next_seed(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, refused = planner.compiler.load, []

    def picky(source: Source, device: torch.device) -> Kernel:
        if source.variant.template == "gluon/forward":
            refused.append(source.variant)
            raise CompileError("this variant does not fit")
        return load(source, device)

    monkeypatch.setattr(planner.compiler, "load", picky)
    tensors = inputs(seq_q=300, seq_kv=300, dtype=torch.float16)
    close(autoattn.attention(*tensors), expected(tensors, False))
    explanation = autoattn.explain(*tensors)
    assert explanation.problem is not None
    seeds = [
        seed
        for space in search_space.of(explanation.problem.op)
        for seed in space.seeds_for(explanation.problem, samples.H200)
    ]
    ran = seeds[len(refused)]
    assert (explanation.route, explanation.level, explanation.variant) == ("kernel", Level.DEFAULT, ran)
    assert refused == seeds[: len(refused)]
    assert {variant.template for variant in refused} == {"gluon/forward"}
    assert ran.template == "triton/forward"
    assert ran.template in explanation.reason
    assert [step for step in explanation.steps if "this variant does not fit" in step] == [
        "gluon/forward: this variant does not fit" for _ in refused
    ]


def test_nothing_is_compiled_while_a_graph_is_captured(card: dict[str, Any]) -> None:
    tensors = inputs(dtype=torch.float16)
    card["context"].capturing = True
    close(autoattn.attention(*tensors), expected(tensors, False))
    assert "call once before capturing" in autoattn.explain(*tensors).reason
    assert card["loaded"] == []
    card["context"].capturing = False
    autoattn.attention(*tensors)
    card["context"].capturing = True
    autoattn.attention(*tensors)
    assert card["forward"] == 2, "what was loaded before runs in the graph too"


def test_forgetting_reads_the_cache_anew(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = []
    explain = cache_lookup.explain
    monkeypatch.setattr(cache_lookup, "explain", lambda *facts: lookups.append(facts) or explain(*facts))
    tensors = inputs(dtype=torch.float16)
    for _ in range(2):
        autoattn.attention(*tensors)
    assert len(lookups) == 1
    functional.forget()
    autoattn.attention(*tensors)
    assert len(lookups) == 2


def test_a_backend_that_refuses_the_tensors_gives_way_and_is_not_asked_again(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    sdpa = pytorch_sdpa.sdpa

    def refusing(problem: Problem, operands: Operands, *, backend: str = "sdpa") -> Tensor:
        calls.append(backend)
        if backend == "sdpa-cudnn":
            raise RuntimeError("No available kernel. Aborting execution.")
        return sdpa(problem, operands, backend=backend)

    chosen = explanations.Explanation(
        problem=None, route="sdpa-cudnn", level=Level.EXACT, reasons=Reasons("it was the fastest")
    )
    monkeypatch.setattr(pytorch_sdpa, "sdpa", refusing)
    monkeypatch.setattr(cache_lookup, "explain", lambda problem, device, folder: chosen)
    tensors = inputs(dtype=torch.float16)
    for _ in range(2):
        close(autoattn.attention(*tensors), expected(tensors, False))
    assert calls == ["sdpa-cudnn", "sdpa"], "the second call was prepared by the first"
    assert autoattn.explain(*tensors).reason == "sdpa-cudnn was chosen, but does not take these tensors"


def test_running_out_of_memory_is_not_hidden(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*operands: Any, **facts: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    chosen = explanations.Explanation(
        problem=None, route="sdpa-flash", level=Level.EXACT, reasons=Reasons("it was the fastest")
    )
    monkeypatch.setattr(cache_lookup, "explain", lambda problem, device, folder: chosen)
    monkeypatch.setattr(pytorch_sdpa, "sdpa", full)
    with pytest.raises(torch.OutOfMemoryError):
        autoattn.attention(*inputs(dtype=torch.float16))
    assert autoattn.explain(*inputs(dtype=torch.float16)) is chosen, "the next call may find room"


def test_float32_follows_pytorchs_own_setting(card: dict[str, Any]) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for setting, precision in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(setting)
            explanation = autoattn.explain(*inputs())
            assert explanation.problem is not None
            assert explanation.problem.precision.value == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_precision_overrules_pytorchs_own_setting(card: dict[str, Any]) -> None:
    for precision in ("ieee", "tf32", "tf32x3"):
        autoattn.attention(*inputs(), precision=precision)
        assert card["problem"].precision.value == precision


def test_wanting_the_lse_asks_for_another_kernel_and_gets_it(card: dict[str, Any]) -> None:
    tensors = inputs(dtype=torch.float16)
    output, lse = autoattn.attention(*tensors, return_lse=True)
    close(output, expected(tensors, False))
    close(lse, formula.attention(*tensors)[1])
    autoattn.attention(*tensors)
    assert [source.traits.lse for source in card["loaded"]] == [True, False]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_card_has_a_kernel_for_whatever_is_asked(name: str, card: dict[str, Any]) -> None:
    given, meant = ARGUMENTS[name]
    tensors = inputs(dtype=torch.float16)
    assert autoattn.explain(*tensors, **given).route == "kernel"
    close(autoattn.attention(*tensors, **given), formula.attention(*tensors, **meant)[0])
    assert card["forward"] == 1


def test_packed_calls_get_a_kernel_and_a_packed_output(card: dict[str, Any]) -> None:
    query, key, value, *lengths = packed()
    exact, sums = formula.attention(
        query[None, :3].transpose(1, 2), key[None, :4].transpose(1, 2), value[None, :4].transpose(1, 2)
    )
    output, lse = autoattn.packed_attention(query, key, value, *lengths, return_lse=True)
    assert card["forward"] == 1
    assert output.is_contiguous()
    close(output[:3], exact[0].transpose(0, 1))
    close(lse[:, :3], sums[0])
    assert autoattn.explain_packed(query, key, value, *lengths).route == "kernel"


def test_a_rival_that_was_faster_makes_way_where_the_lse_is_wanted(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = search_space.load("triton/forward").default(kernels.problem(), samples.H200)
    chosen = explanations.Explanation(
        problem=None, route="sdpa-cudnn", level=Level.EXACT, reasons=Reasons("it was the fastest"), variant=variant
    )
    monkeypatch.setattr(cache_lookup, "explain", lambda problem, device, folder: chosen)
    explanation = autoattn.explain(*inputs(dtype=torch.float16), return_lse=True)
    assert (explanation.route, explanation.variant) == ("kernel", variant)
    assert explanation.reason == "it was the fastest; but it gives no LSE, so the kernel runs"
    assert autoattn.explain(*inputs(dtype=torch.float16)).route == "sdpa-cudnn"


def test_an_old_card_has_no_float8(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_device.set_device(monkeypatch, samples.A30)
    tensors = tuple(tensor.to(torch.float8_e4m3fn) for tensor in inputs())
    explanation = autoattn.explain(*tensors)
    assert (explanation.route, card["forward"]) == ("eager", 0)
    assert "float8 kernels need sm_89 or newer" in explanation.reason


def test_a_card_that_is_too_old_for_kernels_takes_the_plain_formula_where_pytorch_has_none(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = explanations.of_sdpa("it is too old")
    monkeypatch.setattr(cache_lookup, "explain", lambda problem, device, folder: old)
    tensors = inputs(dtype=torch.float16)
    assert autoattn.explain(*tensors).route == "sdpa"
    assert autoattn.explain(*tensors, softcap=2.0).route == "eager"
    assert autoattn.explain(*tensors, return_lse=True).route == "eager"


def test_plans_are_bounded(card: dict[str, Any]) -> None:
    assert planner.prepare.cache_info().maxsize == 4096
