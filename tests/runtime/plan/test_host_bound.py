"""Training calls so short that a step waits for the CPU: PyTorch answers, or kernels while a CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gradient_kernels
import pytest
import samples
import torch
from computed_launches import (
    attend,  # noqa: F401 - a fixture
    card,  # noqa: F401 - a fixture
)
from torch import Tensor
from torch._inductor import config

import autoattn
from autoattn import functional
from autoattn.baselines import pytorch_sdpa
from autoattn.bench import transformer
from autoattn.bench.training_results import Mode, Whose
from autoattn.cache import store
from autoattn.codegen import search_space
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Problem
from autoattn.runtime import call_cache
from autoattn.runtime.plan import explanations, gradient_problem, host_bound
from autoattn.runtime.plan.explanations import Explanation

SHORT = {"heads_kv": 32, "seq_q": 64, "seq_kv": 64, "head_dim": 64}


FACTORS = {"sdpa": 0.9, "sdpa-flash": 1.4, "sdpa-efficient": 2.0}  # of the kernel's time


def timed_pass(
    problem: Problem, time_us: float, measured: Problem | None = None, factors: dict[str, float] = FACTORS
) -> Explanation:
    """A pass whose kernel took so long for a problem."""
    return replace(
        explanations.of_sdpa("", problem),
        entry=samples.beside(samples.measured(measured or problem, time_us=time_us), factors),
    )


def passes(
    problem: Problem, forward: float, backward: float, factors: dict[str, float] = FACTORS
) -> tuple[Explanation, Explanation]:
    return timed_pass(problem, forward, factors=factors), timed_pass(
        gradient_problem.backward_of(problem), backward, factors=factors
    )


def route(*passes: Explanation) -> str | None:
    """Who answers in place of the kernels."""
    explanation = host_bound.answer(*passes)
    return None if explanation is None else explanation.route


@pytest.mark.parametrize(
    ("kernel_us", "factors", "route_of_both"),
    [
        (40.0, FACTORS, "sdpa-efficient"),  # all are done before their launches are
        (60.0, FACTORS, "sdpa-flash"),  # the GPU needs 84 us, and 120 by the memory-efficient one, and the CPU 118
        (59.0, FACTORS, "sdpa-flash"),
        (58.0, FACTORS, "sdpa-efficient"),  # 116
        (104.0, FACTORS, "sdpa-flash"),  # 145.6 us, and SDPA 147
        (106.0, FACTORS, "sdpa"),
        (174.0, FACTORS, "sdpa"),  # 156.6
        (175.0, FACTORS, None),  # the CPU waits for the GPU
        (150.0, {**FACTORS, "sdpa": 1.2}, None),  # PyTorch's GPU time is longer than the CPU's of kernels
        (60.0, {"sdpa": 0.9}, "sdpa"),
        (60.0, {"sdpa-cudnn": 0.9}, None),  # is not what costs the CPU less
        (60.0, {}, None),
    ],
)
def test_who_needs_least_of_the_cpu_and_the_gpu_answers(
    kernel_us: float, factors: dict[str, float], route_of_both: str | None
) -> None:
    problem = samples.problem(**SHORT)
    assert route(*passes(problem, kernel_us / 3, kernel_us * 2 / 3, factors)) == route_of_both


def test_the_reason_says_both_times() -> None:
    explanation = host_bound.answer(*passes(samples.problem(**SHORT), 20.0, 40.0))
    assert explanation is not None
    assert explanation.reason == (
        "both passes of kernels take the GPU about 60 us and the CPU 175, so that a step waits for the CPU, which "
        "PyTorch's FlashAttention-2 needs for 118"
    )


@pytest.mark.parametrize("changes", [{"heads_kv": 8}, {"head_dim_v": 32}, {"head_dim": 60, "head_dim_v": 60}])
def test_what_pytorch_does_more_for_than_call_a_backend_goes_to_pytorch_itself(changes: dict[str, Any]) -> None:
    assert route(*passes(samples.problem(**SHORT | changes), 20.0, 40.0)) == "sdpa"


def test_a_neighbours_times_count_as_its_pairs_do() -> None:
    problem = samples.problem(**SHORT)
    far = samples.problem(**SHORT | {"seq_q": 640, "seq_kv": 640})
    several = (
        timed_pass(problem, 2000.0, far),
        timed_pass(gradient_problem.backward_of(problem), 4000.0, gradient_problem.backward_of(far)),
    )
    explanation = host_bound.answer(*several)
    assert explanation is not None
    assert "the GPU about 6" in explanation.reason  # a hundredth of the pairs, and the diagonal's


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_kv": 128},
        {"modifiers": Modifiers(softcap=True)},
        {"mask": Mask.parse("window:8,0")},
        {"modifiers": Modifiers(sinks=True)},
    ],
)
def test_calls_that_pytorch_does_not_say_in_full_take_kernels(changes: dict[str, Any]) -> None:
    assert route(*passes(samples.problem(**SHORT | changes), 20.0, 40.0)) is None


def test_what_was_not_measured_beside_pytorch_takes_kernels() -> None:
    problem = samples.problem(**SHORT)
    forward, backward = passes(problem, 20.0, 40.0)
    alone = replace(backward, entry=replace(backward.entry, rivals=()))  # type: ignore[type-var]
    assert route(forward, alone) is None
    assert route(replace(forward, entry=None), backward) is None


def three(layout: str = "bhsd") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 33, 4, 16) if layout == "bshd" else (2, 4, 33, 16)
    return [torch.randn(shape, generator=generator).half().requires_grad_() for _ in range(3)]


def enter(
    card: dict[str, Any],
    tensors: list[Tensor],
    time_us: float = 20.0,
    factors: dict[str, float] = FACTORS,
    **given: Any,
) -> None:
    """Entries for both passes of a causal call."""
    with torch.no_grad():
        forward = autoattn.explain(*tensors, causal=True, **given).problem
    assert forward is not None
    backward = gradient_problem.backward_of(forward)
    for each, variant in (
        (forward, search_space.load("triton/forward").default(forward, samples.H200)),
        (backward, gradient_kernels.variant()),
    ):
        entry = samples.beside(samples.tuned(each, variant, time_us=time_us), factors)
        store.merge(card["cache"], samples.H200, each.op, [entry])
    functional.forget()


def assert_right(answers: tuple[Tensor, ...], tensors: list[Tensor], layout: str = "bhsd") -> None:
    leaves = [tensor.detach().float().requires_grad_() for tensor in tensors]
    swapped = [leaf.transpose(1, 2) if layout == "bshd" else leaf for leaf in leaves]
    output = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=True)
    output = output.transpose(1, 2) if layout == "bshd" else output
    expected = output, *torch.autograd.grad(output.square().sum(), leaves)
    for ours, theirs in zip(answers, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.detach(), rtol=2e-2, atol=2e-2)


def stepped(function: Callable[..., Any], tensors: list[Tensor], **given: Any) -> tuple[Tensor, ...]:
    output = function(*tensors, causal=True, **given)
    return output, *torch.autograd.grad(output.float().square().sum(), tensors)


def on_the_cpu(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, learns: bool, scale: float) -> Tensor:
    """The operator of PyTorch's FlashAttention on the CPU."""
    assert learns
    output_and_lse: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return output_and_lse[0]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("backend", ["sdpa", "sdpa-flash"])
def test_a_short_training_call_is_pytorchs(
    card: dict[str, Any], attend: Callable[..., Any], backend: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    monkeypatch.setitem(
        pytorch_sdpa.OPERATORS, "sdpa-flash", lambda *three, **said: called.append(True) or on_the_cpu(*three, **said)
    )
    tensors = three(layout)
    enter(card, tensors, factors={"sdpa": 0.9, backend: 1.4}, layout=layout)
    for _ in range(4):
        assert_right(stepped(attend, tensors, layout=layout), tensors, layout)
    assert (card["forward"], card["backward"]) == (0, 0)
    explanation = autoattn.explain(*tensors, causal=True, layout=layout)
    assert explanation.route == backend
    assert explanation.reason.startswith("both passes of kernels take the GPU about 40 us")
    if attend is autoattn.attention:
        assert len(called) == (3 if backend == "sdpa-flash" else 0), "from the second call on it is the operator alone"


def test_an_operator_alone_knows_only_the_kind_of_calls_it_was_bound_for(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """autocast would make other tensors of these, which an operator of PyTorch's does not see."""
    monkeypatch.setitem(pytorch_sdpa.OPERATORS, "sdpa-flash", on_the_cpu)
    tensors = three()
    enter(card, tensors, factors={"sdpa": 0.9, "sdpa-flash": 1.4})
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        for _ in range(3):
            assert autoattn.attention(*tensors, causal=True).dtype is torch.float16  # type: ignore[union-attr]
        with torch.autocast("cpu", dtype):
            for _ in range(3):
                assert autoattn.attention(*tensors, causal=True).dtype is dtype  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", ["sdpa", "sdpa-flash"])
def test_torch_func_differentiates_a_short_call(
    card: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pytorch_sdpa.OPERATORS, "sdpa-flash", on_the_cpu)
    tensors = three()
    enter(card, tensors, factors={"sdpa": 0.9, backend: 1.4})
    given = [tensor.detach() for tensor in tensors]

    def loss(attend: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *three: attend(*three, causal=True).float().square().sum()

    def theirs(*three: Tensor, causal: bool) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*three, is_causal=causal)

    for _ in range(3):
        stepped(autoattn.attention, tensors)
        ours = torch.func.grad(loss(autoattn.attention), (0, 1, 2))(*given)
        for gradient, expected in zip(ours, torch.func.grad(loss(theirs), (0, 1, 2))(*given), strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)


def test_where_a_backend_does_not_take_the_tensors_pytorch_chooses(
    card: dict[str, Any], attend: Callable[..., Any]
) -> None:
    """The CPU has no memory-efficient attention."""
    tensors = three()
    enter(card, tensors, factors={"sdpa": 0.9, "sdpa-efficient": 1.0})
    for _ in range(3):
        assert_right(stepped(attend, tensors), tensors)
    assert (card["forward"], card["backward"]) == (0, 0)


def test_a_longer_training_call_is_the_kernels(card: dict[str, Any], attend: Callable[..., Any]) -> None:
    tensors = three()
    enter(card, tensors, 200.0)
    assert_right(stepped(attend, tensors), tensors)
    assert (card["forward"], card["backward"]) == (1, 1)


def test_a_short_call_that_wants_something_else_is_the_kernels(card: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors)
    for _ in range(3):
        autoattn.attention(*tensors, causal=True)
    assert card["forward"] == 0
    with torch.no_grad():
        autoattn.attention(*tensors, causal=True)
    assert card["forward"] == 1
    torch.use_deterministic_algorithms(True)
    try:
        autoattn.attention(*tensors, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert card["forward"] == 2
    autoattn.attention(*tensors, causal=True)
    assert card["forward"] == 2


@pytest.mark.parametrize("warm", [False, True])
def test_kernels_answer_while_a_cuda_graph_is_captured(card: dict[str, Any], warm: bool) -> None:
    tensors = three()
    enter(card, tensors)
    autoattn.attention(*tensors, causal=True)  # loads the kernels
    if not warm:
        call_cache.clear()
    card["context"].capturing = True
    for calls in (1, 2):
        assert_right(stepped(autoattn.attention, tensors), tensors)
        assert (card["forward"], card["backward"]) == (calls, calls)
    card["context"].capturing = False
    assert_right(stepped(autoattn.attention, tensors), tensors)
    assert card["forward"] == 2


def test_a_graph_for_cuda_graphs_keeps_the_kernels(card: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors)
    torch._dynamo.reset()
    compiled = torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True)
    with config.patch({"triton.cudagraphs": True}):
        assert_right(stepped(compiled, tensors), tensors)
    assert (card["forward"], card["backward"]) == (1, 1)


def test_a_graph_of_any_length_keeps_the_kernels(card: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors)
    torch._dynamo.reset()
    compiled = torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_right(stepped(compiled, tensors), tensors)
    assert (card["forward"], card["backward"]) == (1, 1)


@pytest.mark.parametrize("given", [{"deterministic": True}, {"return_lse": True}])
def test_what_pytorch_does_not_give_kernels_do(card: dict[str, Any], given: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors)
    assert autoattn.explain(*tensors, causal=True, **given).route == "kernel"


def test_of_a_models_eager_row_it_is_told_which_backend_ran(card: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors)
    assert transformer.ran(Whose.OURS, Mode.EAGER, *tensors) == "sdpa efficient"


def test_of_a_models_compiled_row_it_is_told_that_pytorch_was_traced(card: dict[str, Any]) -> None:
    tensors = three()
    enter(card, tensors, factors={"sdpa": 0.9})
    torch.compiler.reset()
    assert transformer.ran(Whose.OURS, Mode.COMPILED, *tensors) == "sdpa flash, traced"
    enter(card, tensors, 200.0)
    torch.compiler.reset()
    assert transformer.ran(Whose.OURS, Mode.COMPILED, *tensors).startswith("triton/forward")
