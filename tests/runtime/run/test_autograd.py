"""Calls whose inputs need gradients: who answers them, and what autograd gets; the card is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import samples
import torch
from computed_launches import (
    assert_gradients,
    attend,  # noqa: F401 - a fixture
    by_pytorch,
    card,  # noqa: F401 - a fixture
    enter,
    inputs,
    tune,
    weighed,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoattn
from autoattn import functional, masks
from autoattn.cache import store
from autoattn.codegen import search_space
from autoattn.core.problem import Op
from autoattn.runtime import call_cache
from autoattn.runtime.plan import decision
from autoattn.runtime.plan.gradient_problem import Learned, backward_of
from autoattn.runtime.torch_op import attention_op_backward

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_tuned_problem_is_differentiated_by_kernels(
    card: dict[str, Any], attend: Callable[..., Any], layout: str
) -> None:
    tensors = inputs(layout)
    tune(card, tensors, causal=True, layout=layout)
    for _ in range(3):  # what the first call prepares serves the others, and forgets no gradients
        output = attend(*tensors, causal=True, layout=layout)
        push = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
        gradients = torch.autograd.grad(output, tensors, push)
        for ours, theirs in zip((output, *gradients), by_pytorch(tensors, push, layout), strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)
        tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    assert (card["forward"], card["backward"]) == (3, 3)
    assert card["prepared"] == (2 + 2 if attend is autoattn.attention else 2 + 3)
    assert call_cache.info().calls == 1
    assert {source.name for source in card["loaded"]} == {"forward", "backward"}
    explanation = autoattn.explain(*tensors, causal=True, layout=layout)
    assert explanation.route == "kernel"
    assert explanation.steps[-1] == "gradients: this problem was measured on this card"


def test_a_prepared_step_of_a_graph_is_answered_before_it_is_recorded(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher would come back to the same Python, and takes as long as the rest of a short call."""
    torch._dynamo.reset()
    tensors = inputs()
    tune(card, tensors, causal=True)
    compiled = torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True)

    def step() -> tuple[Tensor, ...]:
        output = compiled(*tensors, causal=True)
        return output, *torch.autograd.grad(output, tensors, torch.ones_like(output))

    expected = step()
    for name in ("recorded", "recorded_backward"):
        monkeypatch.setattr(attention_op_backward, name, lambda *given, **words: pytest.fail("recorded"))
    for ours, before in zip(step(), expected, strict=True):
        assert torch.equal(ours, before)


def test_a_packed_call_is_differentiated_by_kernels(card: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 20, 60], dtype=torch.int32)
    lengths = (offsets, offsets, 40, 40)
    tensors = [torch.randn(60, 2, 16, generator=generator).half().requires_grad_() for _ in range(3)]
    with torch.no_grad():
        problem = autoattn.explain_packed(*tensors, *lengths, causal=True).problem  # type: ignore[call-arg, arg-type]
    assert problem is not None
    enter(card, problem)
    for _ in range(2):
        output, lse = autoattn.packed_attention(*tensors, *lengths, causal=True, return_lse=True)
        assert (output.shape, lse.shape) == ((60, 2, 16), (2, 60))
        gradients = torch.autograd.grad(output.float().square().sum() + lse.sum(), tensors)
    assert (card["forward"], card["backward"]) == (2, 2)
    leaves = [tensor.detach().float().requires_grad_() for tensor in tensors]
    total = torch.zeros(())
    for begin, end in ((0, 20), (20, 60)):
        query, key, value = (leaf[begin:end].transpose(0, 1) for leaf in leaves)
        hidden = ~torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        scores = (query @ key.mT / 4).masked_fill(hidden, -torch.inf)
        total = total + (scores.softmax(-1) @ value).square().sum() + scores.logsumexp(-1).sum()
    for ours, theirs in zip(gradients, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)


def test_a_call_with_a_block_table_is_differentiated_by_kernels(
    card: dict[str, Any], attend: Callable[..., Any]
) -> None:
    tensors = inputs()
    mask = masks.from_mod(lambda b, h, q, k: k <= q + 17, seq_q=33, seq_kv=50, block_size=16)
    tune(card, tensors, mask=mask)
    output = attend(*tensors, mask=mask)
    push = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).half()
    gradients = torch.autograd.grad(output, tensors, push)
    for ours, theirs in zip((output, *gradients), by_pytorch(tensors, push), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)
    assert (card["forward"], card["backward"]) == (1, 1)


@pytest.mark.parametrize("shape", [(33, 50), (4, 33, 50), (2, 1, 33, 50), (2, 4, 33, 50), (50,), (33, 1), ()])
def test_a_learned_bias_is_differentiated_by_kernels(
    card: dict[str, Any], attend: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    tensors = inputs()
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    tune(card, tensors, bias=bias)
    gradients = torch.autograd.grad(attend(*tensors, bias=bias).float().square().sum(), [*tensors, bias])
    assert (card["forward"], card["backward"]) == (1, 1)
    assert card["room"] == bias.numel(), "the gradient is never as large as the scores where the bias is not"
    assert_gradients(
        gradients, [*tensors, bias], lambda query, key, value, bias: weighed(query @ key.mT / 4 + bias, value)
    )


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_learned_slopes_are_differentiated_by_kernels(
    card: dict[str, Any], attend: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    tensors = inputs()
    slopes = (0.1 * torch.rand(shape, generator=torch.Generator().manual_seed(2))).requires_grad_()
    tune(card, tensors, alibi_slopes=slopes)
    gradients = torch.autograd.grad(attend(*tensors, alibi_slopes=slopes).float().square().sum(), [*tensors, slopes])
    assert (card["forward"], card["backward"]) == (1, 1)
    distance = (torch.arange(33)[:, None] + 17 - torch.arange(50)).abs()

    def formula(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        return weighed(query @ key.mT / 4 - slopes[..., None, None] * distance, value)

    assert_gradients(gradients, [*tensors, slopes], formula)


@pytest.mark.parametrize("compiled", [False, True])
def test_each_packed_sequence_may_learn_slopes_of_its_own(card: dict[str, Any], compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 20, 60], dtype=torch.int32)
    lengths = (offsets, offsets, 40, 40)
    tensors = [torch.randn(60, 2, 16, generator=generator).half() for _ in range(3)]
    slopes = torch.rand(2, 2, generator=generator).requires_grad_()
    given: dict[str, Any] = {"causal": True, "alibi_slopes": slopes.detach()}
    problem = autoattn.explain_packed(*tensors, *lengths, **given).problem  # type: ignore[call-arg, arg-type]
    assert problem is not None
    enter(card, problem, learned=Learned(slopes=True))
    torch._dynamo.reset()
    attend = autoattn.packed_attention
    attend = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    output = attend(*tensors, *lengths, causal=True, alibi_slopes=slopes)
    (gradient,) = torch.autograd.grad(output.float().square().sum(), slopes)
    assert (card["forward"], card["backward"], card["slopes"]) == (1, 1, 1)
    leaf, total = slopes.detach().requires_grad_(), torch.zeros(())
    for number, (begin, end) in enumerate(((0, 20), (20, 60))):
        query, key, value = (tensor[begin:end].transpose(0, 1).float() for tensor in tensors)
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        scores = (query @ key.mT / 4 - leaf[number, :, None, None] * distance).masked_fill(distance < 0, -torch.inf)
        total = total + weighed(scores, value).square().sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(total, leaf)[0], rtol=2e-2, atol=2e-2)


def test_only_learned_slopes_ask_for_their_gradient(card: dict[str, Any], attend: Callable[..., Any]) -> None:
    tensors, slopes = inputs(), torch.zeros(4)
    tune(card, tensors, alibi_slopes=slopes)
    attend(*tensors, alibi_slopes=slopes).float().sum().backward()
    assert (card["forward"], card["backward"], card["slopes"]) == (1, 1, 0)
    slopes.requires_grad_()
    attend(*tensors, alibi_slopes=slopes).float().square().sum().backward()
    assert (card["backward"], card["slopes"]) == (2, 1), (
        "what was tuned gives no gradient of slopes, but a default does"
    )
    assert slopes.grad is not None
    assert slopes.grad.abs().min() > 0
    explanation = autoattn.explain(*tensors, alibi_slopes=slopes)
    assert explanation.levels == "forward: default, backward: default"


def test_slopes_alone_may_learn(card: dict[str, Any], attend: Callable[..., Any]) -> None:
    tensors, slopes = [tensor.detach() for tensor in inputs()], torch.zeros(4, requires_grad=True)
    tune(card, tensors, alibi_slopes=slopes)
    attend(*tensors, alibi_slopes=slopes).float().square().sum().backward()
    assert slopes.grad is not None
    assert (card["backward"], card["slopes"]) == (1, 1)


def test_a_score_mod_is_differentiated_by_kernels(card: dict[str, Any], attend: Callable[..., Any]) -> None:
    tensors = inputs()
    tune(card, tensors, score_mod="2 * tanh(score / 2)")
    gradients = torch.autograd.grad(attend(*tensors, score_mod="2 * tanh(score / 2)").float().square().sum(), tensors)
    assert (card["forward"], card["backward"]) == (1, 1)
    assert_gradients(gradients, tensors, lambda query, key, value: weighed(2 * (query @ key.mT / 8).tanh(), value))


def test_only_a_learned_bias_asks_for_its_gradient(card: dict[str, Any], attend: Callable[..., Any]) -> None:
    tensors = inputs()
    bias = torch.zeros(33, 50)
    tune(card, tensors, bias=bias)
    attend(*tensors, bias=bias).float().sum().backward()
    assert (card["forward"], card["backward"]) == (1, 1)
    bias.requires_grad_()
    attend(*tensors, bias=bias).float().sum().backward()
    assert card["backward"] == 2, "what was tuned gives no gradient of a bias, but a default does"
    assert bias.grad is not None
    assert autoattn.explain(*tensors, bias=bias).levels == "forward: default, backward: default"


def test_a_bias_alone_may_learn(card: dict[str, Any], attend: Callable[..., Any]) -> None:
    tensors = [tensor.detach() for tensor in inputs()]
    bias = torch.zeros(33, 50, requires_grad=True)
    tune(card, tensors, bias=bias)
    attend(*tensors, bias=bias).float().square().sum().backward()
    assert bias.grad is not None
    assert card["backward"] == 1


def test_gradients_that_are_sums_or_expanded_are_made_readable(
    card: dict[str, Any], attend: Callable[..., Any]
) -> None:
    tensors = inputs()
    tune(card, tensors, causal=True)
    attend(*tensors, causal=True).sum().backward()
    output = attend(*tensors, causal=True)
    torch.autograd.grad(output, tensors, torch.randn(2, 33, 24, 4, dtype=torch.float16).permute(0, 3, 1, 2))
    assert card["backward"] == 2
    assert tensors[0].grad is not None


def test_a_gradient_at_an_address_that_kernels_do_not_read_is_copied(card: dict[str, Any]) -> None:
    tensors = inputs()
    tune(card, tensors, causal=True)
    wanted = None
    for _ in range(2):  # an ordinary call, and a prepared one
        output = autoattn.attention(*tensors, causal=True)
        push = torch.ones(output.numel() + 1, dtype=torch.float16)[1:].view(output.shape)
        assert push.data_ptr() % 16
        gradients = torch.autograd.grad(output, tensors, push)  # the fixture looks at what the kernels get
        if wanted is None:
            wanted = gradients
        assert all(torch.equal(*both) for both in zip(gradients, wanted, strict=True))
    assert card["prepared"] == 2


def penalty(
    attend: Callable[..., Any], inputs: list[Tensor], extra: dict[str, Tensor], **given: Any
) -> tuple[Any, ...]:
    """The gradients of a sum of squared gradients, and of the output."""
    answer = attend(*inputs, **extra, **given)
    loss = sum(part.float().square().sum() for part in (answer if isinstance(answer, tuple) else (answer,)))
    learners = [*inputs, *extra.values()]
    first = torch.autograd.grad(loss, learners, create_graph=True)
    return torch.autograd.grad(sum(gradient.float().square().sum() for gradient in first) / 100.0, learners)


@pytest.mark.parametrize("name", ["causal", "bshd", "lse", "bias", "slopes"])
def test_a_second_derivative_is_that_of_the_formula(card: dict[str, Any], name: str) -> None:
    """Of an ordinary call, and of a prepared one."""
    generator = torch.Generator().manual_seed(2)
    given: dict[str, Any] = {"causal": True} | ({"return_lse": True} if name == "lse" else {})
    given |= {"layout": "bshd"} if name == "bshd" else {}
    extra = {
        "bias": {"bias": torch.randn(33, 50, generator=generator).requires_grad_()},
        "slopes": {"alibi_slopes": torch.rand(4, generator=generator).requires_grad_()},
    }.get(name, {})
    tensors = inputs(given.get("layout", "bhsd"), dtype=torch.float32)
    for _ in range(2):
        gradients = penalty(autoattn.attention, tensors, extra, **given)
    assert (card["forward"], card["backward"]) == (2, 4), "the output's gradient depends on the output"
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        expected = penalty(autoattn.attention, exact, extra, **given)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-3, atol=1e-3)


def test_a_second_derivative_by_a_tensor_that_is_query_key_and_value(card: dict[str, Any]) -> None:
    """And by one that they are computed of; a third derivative goes the same way."""

    def third(tensor: Tensor) -> Tensor:
        def attend(tensor: Tensor) -> Any:
            half = tensor / 2
            return autoattn.attention(half, half, half + tensor, causal=True)

        (first,) = torch.autograd.grad(attend(tensor).square().sum(), tensor, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), tensor, create_graph=True)
        return torch.autograd.grad(second.sin().sum(), tensor)[0]

    tensor = torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        exact = third(tensor.detach().double().requires_grad_())
    assert card["backward"] == 0
    derivative = third(tensor)
    torch.testing.assert_close(derivative.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    assert card["backward"] > 0


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("prepared", [True, False])
def test_forward_mode_takes_pytorchs_derivatives(learns: bool, prepared: bool, card: dict[str, Any]) -> None:
    """Of calls that autograd would record too, and of those that kernels answered before; no kernel has a tangent."""
    tensors = [tensor.detach().float().requires_grad_(learns) for tensor in inputs()]
    for _ in range(2 * prepared):
        autoattn.attention(*tensors, causal=True, softcap=2.0)
    before = card["forward"]
    assert before == 2 * prepared
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        output = autoattn.attention(dual, *tensors[1:], causal=True, softcap=2.0)
        assert forward_ad.unpack_dual(output).tangent.abs().sum() > 0
        assert card["forward"] == before
        autoattn.attention(*tensors, causal=True, softcap=2.0)
        assert card["forward"] == before + 1, "where no input has a tangent, a kernel answers"
    assert card["backward"] == 0


def test_a_packed_calls_second_derivative_is_that_of_the_formula(card: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 20, 60], dtype=torch.int32)
    tensors = [torch.randn(60, 2, 16, generator=generator).requires_grad_() for _ in range(3)]

    def attend(*tensors: Tensor, **given: Any) -> Any:
        return autoattn.packed_attention(*tensors, offsets, offsets, 40, 40, return_lse=True, **given)  # type: ignore

    for _ in range(2):
        gradients = penalty(attend, tensors, {}, causal=True)
    assert card["prepared"] == 3, "the second call's output and gradients, and those of its output's gradient"
    exact = penalty(attend, [tensor.detach().double().requires_grad_() for tensor in tensors], {}, causal=True)
    for ours, theirs in zip(gradients, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("used", ["both", "output", "lse"])
def test_an_lse_has_a_gradient_too(card: dict[str, Any], attend: Callable[..., Any], used: str) -> None:
    tensors = inputs()
    tune(card, tensors, causal=True)
    output, lse = attend(*tensors, causal=True, return_lse=True)
    parts = {"output": output.float().square().sum(), "lse": (lse * torch.arange(33)).sum()}
    gradients = torch.autograd.grad(
        sum(parts[name] for name in parts if used in (name, "both")), tensors, allow_unused=True
    )
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    key, value = (leaf.repeat_interleave(2, 1) for leaf in leaves[1:])
    scores = (leaves[0] @ key.mT / 4).masked_fill(~torch.ones(33, 50, dtype=torch.bool).tril(17), -torch.inf)
    exact = {
        "output": (scores.softmax(-1) @ value).square().sum(),
        "lse": (scores.logsumexp(-1) * torch.arange(33)).sum(),
    }
    total = sum(exact[name] for name in exact if used in (name, "both"))
    expected = torch.autograd.grad(total, leaves, allow_unused=True)
    for ours, theirs in zip(gradients, expected, strict=True):
        theirs = torch.zeros_like(ours).double() if theirs is None else theirs
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()) + 1e-3)


def test_only_what_is_asked_for_gets_a_gradient(card: dict[str, Any], attend: Callable[..., Any]) -> None:
    tensors = inputs()
    tune(card, tensors, causal=True)
    tensors[1].requires_grad_(False)
    attend(*tensors, causal=True).float().square().sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [True, False, True]


def test_nothing_quadratic_is_saved(card: dict[str, Any]) -> None:
    tensors = inputs()
    tune(card, tensors, causal=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        autoattn.attention(*tensors, causal=True)
    assert sorted(tuple(tensor.shape) for tensor in kept) == sorted(
        [(2, 4, 33, 16), (2, 2, 50, 16), (2, 2, 50, 24), (2, 4, 33, 24), (2, 4, 33)]
    )


def test_a_compiled_step_computes_the_call_again_where_a_rivals_gradients_were_faster(card: dict[str, Any]) -> None:
    tensors = inputs()
    tune(card, tensors, causal=True, choice="sdpa-cudnn")
    torch._dynamo.reset()  # whether gradients were tuned is asked while it traces
    attend = torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True)
    output = attend(*tensors, causal=True)
    push = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).half()
    gradients = torch.autograd.grad(output, tensors, push)
    for ours, theirs in zip((output, *gradients), by_pytorch(tensors, push), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)
    assert (card["forward"], card["backward"]) == (1, 0)


def test_an_lse_that_was_never_computed_is_no_number(card: dict[str, Any]) -> None:
    """So that whoever read it by mistake would not go on in silence."""
    tensors = [tensor.detach() for tensor in inputs()]
    tune(card, tensors, causal=True, choice="sdpa-cudnn")
    _, lse = torch.ops.autoattn.attention(*tensors, mask="causal", keep_lse=True)
    assert lse.shape == (2, 4, 33)
    assert lse.isnan().all()
    tune(card, tensors, causal=True)
    _, lse = torch.ops.autoattn.attention(*tensors, mask="causal", keep_lse=True)
    assert lse.isfinite().all()


def test_where_a_rival_was_faster_pytorch_differentiates(card: dict[str, Any]) -> None:
    tensors = inputs()
    tune(card, tensors, causal=True, choice="sdpa-cudnn")
    explanation = autoattn.explain(*tensors, causal=True)
    assert explanation.reason == "an input needs a gradient, and sdpa-cudnn was the fastest for the gradients"


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("choice", [None, "kernel", "sdpa-cudnn"])
@pytest.mark.parametrize("output_choice", [None, "sdpa-cudnn"])
def test_a_problem_is_explained_as_the_call_is(
    card: dict[str, Any], output_choice: str | None, choice: str | None, deterministic: bool, lse: bool
) -> None:
    tensors = inputs()
    with torch.no_grad():
        output = autoattn.explain(*tensors, causal=True).problem
    assert output is not None
    if output_choice is not None:
        variant = search_space.load("triton/forward").default(output, samples.H200)
        entry = samples.tuned(output, variant, choice=output_choice)
        store.merge(card["cache"], samples.H200, Op.FORWARD, [entry])
    if choice is not None:
        enter(card, output, choice=choice)
    functional.forget()
    called = autoattn.explain(*tensors, causal=True, deterministic=deterministic, return_lse=lse)
    with torch.no_grad():
        inferred = autoattn.explain(*tensors, causal=True, return_lse=lse)
    assert inferred.problem is not None
    gradients = backward_of(inferred.problem, deterministic=deterministic)
    assert decision.explain(gradients, samples.H200, lse=lse, training=True) == called
    assert decision.explain(inferred.problem, samples.H200, lse=lse) == inferred
    assert (inferred.route == "kernel") is (lse or output_choice is None)


def test_a_learned_bias_is_explained_as_the_call_is(card: dict[str, Any]) -> None:
    tensors, bias = inputs(), torch.zeros(1, 1, 33, 50, dtype=torch.float16, requires_grad=True)
    called = autoattn.explain(*tensors, bias=bias)
    assert called.problem is not None
    gradients = backward_of(called.problem, learned=Learned(bias=True))
    assert decision.explain(gradients, samples.H200, training=True) == called
    assert called.route == "kernel"


def test_no_grad_takes_the_kernel_alone(card: dict[str, Any]) -> None:
    tensors = inputs()
    with torch.no_grad():
        assert not autoattn.attention(*tensors, causal=True).requires_grad
    assert (card["forward"], card["backward"]) == (1, 0)


def test_torch_func_takes_pytorchs_derivatives(card: dict[str, Any]) -> None:
    tensors = [tensor.detach() for tensor in inputs()]
    tune(card, tensors, causal=True)
    torch.func.grad(lambda query: autoattn.attention(query, *tensors[1:], causal=True).float().sum())(tensors[0])
    assert (card["forward"], card["backward"]) == (0, 0)
