"""A fake device whose launches, of either pass, PyTorch computes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_device
import gradient_kernels
import pytest
import samples
import torch
from torch import Tensor

import autoattn
from autoattn import functional, torch_private
from autoattn.baselines import pytorch_sdpa
from autoattn.cache import store
from autoattn.codegen.argument_names import ELEMENT
from autoattn.core.cache_entry import KERNEL
from autoattn.core.modifiers import Bias
from autoattn.core.problem import Problem
from autoattn.core.variant import Source
from autoattn.kernels import backward, forward
from autoattn.kernels.compiler import Kernel
from autoattn.reference import attention_formula, merge_formula
from autoattn.reference.attention_formula import TORCH_DTYPE
from autoattn.runtime.plan import gradient_problem
from autoattn.runtime.plan.gradient_problem import NONE_LEARNED, Learned
from autoattn.tensors import score_tensors
from autoattn.tensors.operands import Gradients, Operands, Saved, View
from autoattn.tensors.partial_outputs import PartialOutputs
from autoattn.tensors.score_tensors import UNCHANGED, ScoreViews


def at(address: int, view: View, dtype: torch.dtype) -> Tensor:
    """The tensor that lies at an address."""
    extent = 1 + sum((size - 1) * step for size, step in zip(*view, strict=True))
    room = (ctypes.c_uint8 * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(room, dtype=dtype).as_strided(*view)


RUNNING = {name: TORCH_DTYPE[kind] for kind, name in ELEMENT.items()}


def merge_into(output: Tensor, lse: Tensor, second: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """What a kernel that merges leaves: a row that sees no key is as it was."""
    partials = PartialOutputs(first=output, second=second, first_lse=lse, second_lse=sums)
    total, total_lse = merge_formula.merge(partials)
    return torch.where((sums == -math.inf)[..., None], output, total), total_lse


def with_scores_at(operands: Operands, problem: Problem, addresses: dict[str, int], scores: ScoreViews) -> Operands:
    """The operands with the bias, the slopes and the sinks that lie at these addresses."""
    changes: dict[str, Any] = {}
    batch, heads = problem.batch, problem.heads_q
    if operands.bias is not None:
        rows = 1 if problem.modifiers.bias is Bias.KEYS else problem.seq_q
        whole = View((batch, heads, rows, problem.seq_kv), scores.bias_strides)
        changes["bias"] = at(addresses["bias"], whole, operands.bias.dtype)
        if operands.narrow_bias is not None:
            changes["narrow_bias"] = at(
                addresses["bias"], View(scores.bias_sizes, scores.bias_strides), operands.bias.dtype
            )
    if operands.slopes is not None:
        changes["slopes"] = at(addresses["slopes"], View((batch, heads), scores.slope_strides), torch.float32)
    if operands.sinks is not None and "sinks" in addresses:
        changes["sinks"] = at(addresses["sinks"], View((heads,), (1,)), torch.float32)
    return replace(operands, **changes)


@dataclass(frozen=True)
class Launch:
    """In place of a bound launch: PyTorch computes what lies at the addresses."""

    run: Callable[..., None]
    kernel: Kernel
    problem: Problem
    operands: Operands  # whose numbers count
    views: tuple[View, ...]  # of query, key, value and output
    scores: ScoreViews
    lse: View | None = None  # that a kernel merges its own into

    def __call__(self, addresses: tuple[int, ...]) -> None:
        inputs, out = self.operands.query.dtype, forward.output_dtype(self.operands.query.dtype)
        running = self.kernel.source.traits.merged
        out = RUNNING[running] if running else out
        dtypes = inputs, inputs, inputs, out
        *three, output = (at(*each) for each in zip(addresses, self.views, dtypes, strict=False))
        batch, heads, rows, _ = output.shape
        sums = self.lse or View((batch, heads, rows), (heads * rows, rows, 1))
        lse = at(addresses[4], sums, torch.float32) if addresses[4] else None
        ends = View((self.problem.batch + 1,), (1,))
        names = "query", "key", "value", "cu_seqlens_q", "cu_seqlens_kv"
        offsets = [at(address, ends, torch.int32) for address in addresses[8:10] if address]
        operands = replace(self.operands, **dict(zip(names, (*three, *offsets), strict=False)))
        behind = dict(zip(score_tensors.NAMES, addresses[10:], strict=False))
        operands = with_scores_at(operands, self.problem, behind, self.scores)
        self.run(self.kernel, self.problem, operands, output, lse)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The CPU's tensors are planned as if on an H200; what its kernels would launch, PyTorch computes."""
    seen: dict[str, Any] = {"loaded": [], "cache": tmp_path, "prepared": 0, "resized": 0, "resized_gradients": 0}
    seen |= {"forward": 0, "backward": 0, "slopes": 0, "merged": 0}

    def load(source: Source, device: torch.device) -> Kernel:
        seen["loaded"].append(source)
        return Kernel(source=source, module=None, compiled=object(), device=device, sm_count=132)  # type: ignore[arg-type]

    def run(
        kernel: Kernel,
        problem: Problem,
        operands: Operands,
        output: Tensor,
        lse: Tensor | None,
        *,
        counting: bool = False,
    ) -> None:
        seen["forward"] += 1
        seen["problem"] = problem
        seen["traits"] = forward.traits_of(operands.query, operands.key, operands.value, output)
        assert kernel.source.traits.lse is (lse is not None)
        with torch.autocast("cpu", enabled=False):  # which launches do not see
            computed, sums = pytorch_sdpa.eager(problem, operands)
        if kernel.source.traits.merged:
            assert lse is not None
            seen["merged"] += 1
            computed, sums = merge_into(output, lse, computed, sums)
        output.copy_(computed)
        if lse is not None:
            lse.copy_(sums)

    def differentiate(kernel: Kernel, problem: Problem, operands: Operands, saved: Saved, gradients: Gradients) -> None:
        seen["backward"] += 1
        call_traits, has = forward.traits_of(saved.output_grad), kernel.source.traits
        assert call_traits.alignment % has.alignment == 0
        assert 0 not in saved.output_grad.stride()
        with torch.enable_grad(), torch_private.above_autograd():
            leaves = [t.detach().requires_grad_() for t in (operands.query, operands.key, operands.value)]
            part = replace(operands, query=leaves[0], key=leaves[1], value=leaves[2])
            if gradients.slopes is not None:
                assert problem.modifiers.learned_slopes
                seen["slopes"] += 1
                assert operands.slopes is not None
                leaves.append(operands.slopes.detach().requires_grad_())
                part = replace(part, slopes=leaves[3])
            if gradients.bias is not None:
                assert problem.modifiers.bias is Bias.LEARNED
                seen["room"] = gradients.bias.numel()
                assert operands.narrow_bias is not None
                leaves.append(operands.narrow_bias.detach().requires_grad_())
                part = replace(part, bias=leaves[-1].expand(*operands.query.shape[:3], operands.key.shape[2]))
            if gradients.sinks is not None:
                assert operands.sinks is not None
                leaves.append(operands.sinks.detach().requires_grad_())
                part = replace(part, sinks=leaves[-1])
            output, sums = attention_formula.attention(problem, part, dtype=torch.float32)
            assert kernel.source.traits.lse is (saved.lse_grad is not None)
            outputs = ((output, saved.output_grad.float()), (sums, saved.lse_grad))
            pairs = [(each, pull) for each, pull in outputs if pull is not None]
            leaf_gradients = torch.autograd.grad([each for each, _ in pairs], leaves, [pull for _, pull in pairs])
        torch.testing.assert_close(saved.output.float(), output.detach(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(saved.lse, sums.detach(), rtol=1e-3, atol=1e-3)
        rooms = [room for _, room in gradients.named()] + [gradients.slopes, gradients.bias, gradients.sinks]
        for room, gradient in zip([room for room in rooms if room is not None], leaf_gradients, strict=True):
            room.copy_(gradient)

    def run_prepared(*given: Any) -> None:
        seen["prepared"] += 1
        run(*given)

    def bind(kernel: Kernel, problem: Problem, operands: Operands, output: Tensor, lse: Tensor | None) -> Launch:
        views = tuple(map(View.of, (operands.query, operands.key, operands.value, output)))
        sums = View(lse.shape, lse.stride()) if lse is not None and kernel.source.traits.merged else None
        return Launch(run_prepared, kernel, problem, operands, views, ScoreViews.of(operands), sums)

    def resize(
        bound: Launch, kernel: Kernel, problem: Problem, views: tuple[View, ...], scores: ScoreViews = UNCHANGED
    ) -> Launch:
        seen["resized"] += 1
        return replace(bound, problem=problem, views=views, scores=scores)

    def bind_both(
        kernel: Kernel,
        problem: Problem,
        operands: Operands,
        saved: Saved,
        gradients: Gradients,
        scratch: backward.Scratch,
    ) -> tuple[Callable[..., None]]:
        scores = ScoreViews.of(operands)

        def launch(addresses: tuple[int, ...]) -> None:
            seen["prepared"] += 1
            named = dict(zip(backward.POINTERS, addresses, strict=False))

            def here(owner: Any, *names: str) -> dict[str, Tensor]:
                return {
                    name: at(named[f"{name}{end}_ptr"], View.of(getattr(owner, name)), getattr(owner, name).dtype)
                    for name in names
                    for end in ["_grad" if owner is gradients else ""]
                    if getattr(owner, name) is not None
                }

            given = replace(operands, **here(operands, "query", "key", "value"))
            behind = {"bias": named["bias_ptr"], "slopes": named["slopes_ptr"]}
            given = with_scores_at(given, problem, behind, scores)
            left = replace(saved, **here(saved, "output", "lse", "output_grad", "lse_grad"))
            targets = replace(gradients, **here(gradients, "query", "key", "value"), sinks=None)
            if gradients.bias is not None:
                targets = replace(
                    targets, bias=at(named["bias_grad_ptr"], View.of(gradients.bias), gradients.bias.dtype)
                )
            if gradients.slopes is not None:
                targets = replace(targets, slopes=at(named["slope_grad_ptr"], View.of(gradients.slopes), torch.float32))
            differentiate(kernel, problem, given, left, targets)
            rows = View(left.lse.shape, scratch.rows[0].stride())
            at(named["row_lse_ptr"], rows, torch.float32).copy_(left.lse * math.log2(math.e))
            at(named["delta_ptr"], rows, torch.float32).copy_((left.output.float() * left.output_grad.float()).sum(-1))

        bound_both[launch] = operands, saved, gradients
        return (launch,)

    def resize_both(
        launches: tuple[Callable[..., None]], kernel: Kernel, problem: Problem, views: dict[str, View],
        shapes: backward.ScratchShapes, scores: ScoreViews = UNCHANGED,
    ) -> tuple[Callable[..., None]]:  # fmt: skip
        seen["resized_gradients"] += 1
        operands, saved, gradients = bound_both[launches[0]]
        room = {name: torch.empty_strided(*view, dtype=operands.query.dtype) for name, view in views.items()}
        sums = torch.empty(views["query"].shape[:3])
        resized = {name: room[name] for name in ("query", "key", "value")}
        if operands.bias is not None:
            rows = 1 if problem.modifiers.bias is Bias.KEYS else problem.seq_q
            whole = problem.batch, problem.heads_q, rows, problem.seq_kv
            resized["bias"] = torch.empty_strided(whole, scores.bias_strides, dtype=operands.bias.dtype)
            if operands.narrow_bias is not None:
                resized["narrow_bias"] = torch.empty(scores.bias_sizes, dtype=operands.bias.dtype)
        if operands.slopes is not None:
            resized["slopes"] = torch.empty_strided((problem.batch, problem.heads_q), scores.slope_strides)
        learned = {} if gradients.bias is None else {"bias": torch.empty(scores.bias_sizes, dtype=gradients.bias.dtype)}
        learned |= {} if gradients.slopes is None else {"slopes": torch.empty(problem.batch, problem.heads_q)}
        return bind_both(
            kernel,
            problem,
            replace(operands, **resized),
            replace(
                saved, output=room["output"], lse=sums, output_grad=room["output_grad"],
                lse_grad=None if saved.lse_grad is None else sums,
            ),
            replace(gradients, **{name: room[f"{name}_grad"] for name in ("query", "key", "value")}, **learned),
            backward.empty_scratch(kernel, problem, room["query"], room["key"]),
        )  # fmt: skip

    bound_both: dict[Callable[..., None], tuple[Operands, Saved, Gradients]] = {}
    may_bind = backward.may_bind
    there: Any = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(backward, "may_bind", lambda problem, query: may_bind(problem, there))
    monkeypatch.setattr(forward, "bind", bind)
    monkeypatch.setattr(forward, "resize", resize)
    monkeypatch.setattr(backward, "bind", bind_both)
    monkeypatch.setattr(backward, "resize", resize_both)
    monkeypatch.setattr(backward, "bias_sums_shape", lambda *facts: None)  # PyTorch gives the gradient itself
    monkeypatch.setattr(forward, "zeros", lambda *facts: None)
    for name in ("tiles", "partials"):
        monkeypatch.setattr(forward, name, lambda *facts: 0)
    monkeypatch.setattr(forward, "launch", run)
    monkeypatch.setattr(backward, "launch", differentiate)
    with fake_device.plan_on(monkeypatch, samples.H200, load, tmp_path) as seen["context"]:
        yield seen


@pytest.fixture(params=["eager", "compiled"])
def attend(request: pytest.FixtureRequest) -> Callable[..., Any]:
    torch._dynamo.reset()
    if request.param == "eager":
        return autoattn.attention
    compiled: Callable[..., Any] = torch.compile(autoattn.attention, backend="aot_eager", fullgraph=True)
    return compiled


def inputs(layout: str = "bhsd", **changes: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 33, 16), (2, 2, 50, 16), (2, 2, 50, 24)]
    if layout == "bshd":
        shapes = [(batch, seq, heads, dim) for batch, heads, seq, dim in shapes]
    facts = {"dtype": torch.float16, **changes}
    return [torch.randn(shape, generator=generator).to(**facts).requires_grad_() for shape in shapes]


def tune(card: dict[str, Any], tensors: list[Tensor], *, choice: str = KERNEL, **given: Any) -> None:
    """Puts a measured entry for the gradients of a call into the cache."""
    with torch.no_grad():
        problem = autoattn.explain(*tensors, **given).problem
    assert problem is not None
    bias, slopes = (getattr(given.get(name), "requires_grad", False) for name in ("bias", "alibi_slopes"))
    enter(card, problem, choice=choice, learned=Learned(bias=bias, slopes=slopes))


def enter(card: dict[str, Any], problem: Problem, *, choice: str = KERNEL, learned: Learned = NONE_LEARNED) -> None:
    """The same for a forward problem."""
    backward_problem = gradient_problem.backward_of(problem, learned=learned)
    variant = gradient_kernels.variant()
    entry = samples.tuned(backward_problem, variant, choice=choice)
    store.merge(card["cache"], samples.H200, backward_problem.op, [entry])
    functional.forget()


def assert_gradients(gradients: tuple[Tensor, ...], inputs: list[Tensor], formula: Callable[..., Tensor]) -> None:
    """That these are the gradients of the sum of squares of a formula, which has a key head for each query head."""
    leaves = [tensor.detach().float().requires_grad_() for tensor in inputs]
    key, value = (leaf.repeat_interleave(2, 1) for leaf in leaves[1:3])
    expected = torch.autograd.grad(formula(leaves[0], key, value, *leaves[3:]).square().sum(), leaves)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)


def weighed(scores: Tensor, value: Tensor) -> Tensor:
    return scores.softmax(-1) @ value


def by_pytorch(tensors: list[Tensor], push: Tensor, layout: str = "bhsd") -> tuple[Tensor, ...]:
    """Output and gradients in float32; causal, aligned bottom-right."""
    leaves = [tensor.detach().float().requires_grad_() for tensor in tensors]
    three = [leaf.transpose(1, 2) if layout == "bshd" else leaf for leaf in leaves]
    seen = torch.ones(33, 50, dtype=torch.bool).tril(17)
    output = torch.nn.functional.scaled_dot_product_attention(*three, attn_mask=seen, enable_gqa=True)
    output = output.transpose(1, 2) if layout == "bshd" else output
    return output.detach(), *torch.autograd.grad(output, leaves, push.float())
