"""Training calls of every kind with nothing tuned, by kernels on a GPU, against the formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from functional_calls_gpu import no_shipped_cache  # noqa: F401 - a fixture
from torch import Tensor

import autoattn
from autoattn import masks

HEADS, HEADS_KV, SEQ_Q, SEQ_KV = 6, 2, 203, 331
QUERIES, KEYS = (0, 100, 100, 190, 203), (0, 130, 137, 137, 331)  # of packed sequences; some are empty on one side
# Of the largest number of each gradient: what rounding weights, their gradients and the output to a dtype leaves.
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 2e-4}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Arguments = Callable[[torch.device], dict[str, Any]]


def drawn(device: torch.device, *shape: int, seed: int = 1) -> Tensor:
    """Normal numbers in float32, the same on each device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def slopes(device: torch.device) -> Tensor:
    return 2.0 ** -torch.arange(1.0, HEADS + 1, device=device)


def table(device: torch.device, block_size: int) -> masks.BlockSparse:
    def keeps(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 100) | (kv_idx < 7)

    return masks.from_mod(keeps, seq_q=SEQ_Q, seq_kv=SEQ_KV, block_size=block_size, device=str(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call on [2, heads, seq, head_dim] tensors, or on packed ones; arguments that are named get gradients too."""

    arguments: Arguments = field(default=lambda device: {})
    learned: tuple[str, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    head_dims: tuple[int, int] = (64, 64)
    packed: bool = False

    def tensors(self, device: torch.device) -> list[Tensor]:
        query, value = self.head_dims
        shapes = [(2, HEADS, SEQ_Q, query), (2, HEADS_KV, SEQ_KV, query), (2, HEADS_KV, SEQ_KV, value)]
        if self.packed:
            shapes = [(shape[2], shape[1], shape[3]) for shape in shapes]
        return [drawn(device, *shape, seed=place).to(self.dtype) for place, shape in enumerate(shapes)]


CASES = {
    "window": Case(arguments=lambda device: {"window": (50, 9)}),
    "window, float32": Case(arguments=lambda device: {"window": (50, 0)}, dtype=torch.float32),
    "causal, more keys, odd head dim": Case(
        arguments=lambda device: {"causal": True}, head_dims=(57, 57), dtype=torch.float16
    ),
    "softcap": Case(
        arguments=lambda device: {"softcap": 2.0, "causal": True}, dtype=torch.float16, head_dims=(128, 128)
    ),
    "ALiBi, LSE": Case(arguments=lambda device: {"alibi_slopes": slopes(device), "return_lse": True}),
    "learned slopes, float32": Case(
        arguments=lambda device: {"alibi_slopes": slopes(device), "causal": True}, learned=("alibi_slopes",),
        dtype=torch.float32,
    ),
    "sinks": Case(
        arguments=lambda device: {"sinks": drawn(device, HEADS), "window": (63, 0)}, learned=("sinks",),
        head_dims=(128, 128),
    ),
    "score_mod": Case(arguments=lambda device: {"score_mod": "where(kv_idx % 3 == 0, score, 4 * tanh(score / 4))"}),
    "dropout": Case(arguments=lambda device: {"dropout": 0.3, "seed": 2**40 + 7, "causal": True}),
    "key padding": Case(arguments=lambda device: {"mask": drawn(device, 2, 1, 1, SEQ_KV) < 0.8}),
    "bias": Case(arguments=lambda device: {"bias": drawn(device, 2, 1, SEQ_Q, SEQ_KV)}, head_dims=(64, 128)),
    "learned bias": Case(
        arguments=lambda device: {"bias": drawn(device, 1, HEADS, SEQ_Q, SEQ_KV), "causal": True}, learned=("bias",),
        dtype=torch.float16,
    ),
    "small blocks": Case(arguments=lambda device: {"mask": table(device, 32)}, head_dims=(128, 128)),
    "block table": Case(arguments=lambda device: {"mask": table(device, 128)}, head_dims=(80, 80)),
    "block table, deterministic": Case(
        arguments=lambda device: {"mask": table(device, 128), "deterministic": True}, dtype=torch.float16
    ),
    "deterministic, wide": Case(
        arguments=lambda device: {"deterministic": True, "window": (40, 40)}, head_dims=(256, 256), dtype=torch.float16
    ),
    "widest": Case(arguments=lambda device: {"causal": True, "return_lse": True}, head_dims=(192, 512)),
    "widest, float32": Case(arguments=lambda device: {"window": (50, 0)}, head_dims=(256, 512), dtype=torch.float32),
    "narrowest": Case(arguments=lambda device: {"softcap": 3.0}, head_dims=(1, 3), dtype=torch.float32),
    "packed, LSE": Case(arguments=lambda device: {"causal": True, "return_lse": True}, packed=True),
    "packed window, softcap": Case(
        arguments=lambda device: {"window": (20, 5), "softcap": 2.0}, packed=True, dtype=torch.float16,
        head_dims=(128, 128),
    ),
}  # fmt: skip


def call(case: Case, tensors: list[Tensor], given: dict[str, Any], *, explains: bool = False) -> Any:
    """The call, or its explanation."""
    if not case.packed:
        return (autoattn.explain if explains else autoattn.attention)(*tensors, **given)
    offsets = [torch.tensor(each, dtype=torch.int32, device=tensors[0].device) for each in (QUERIES, KEYS)]
    longest = [max(after - before for before, after in pairwise(each)) for each in (QUERIES, KEYS)]
    return (autoattn.explain_packed if explains else autoattn.packed_attention)(*tensors, *offsets, *longest, **given)


def gradients(case: Case, tensors: list[Tensor], given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Of query, key, value and what is learned, of a sum that weighs the output, and the LSE where there is one."""
    learners = [*tensors, *(given[name] for name in case.learned)]
    for learner in learners:
        learner.requires_grad_()
    answer = call(case, tensors, given)
    output, lse = answer if isinstance(answer, tuple) else (answer, None)
    total = (output.double() * drawn(output.device, *output.shape, seed=7)).sum()
    if lse is not None:
        seen = lse.isfinite()
        total = total + (lse.masked_fill(~seen, 0.0) * drawn(lse.device, *lse.shape, seed=8)).double().sum()
    return torch.autograd.grad(total, learners)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_untuned_gradients_are_those_of_the_formula(name: str, device: str) -> None:
    case, place = CASES[name], torch.device(device)
    tensors, given = case.tensors(place), case.arguments(place)
    computed_gradients = gradients(case, tensors, given)
    if place.type == "cuda":
        explanation = call(case, tensors, given, explains=True)
        assert explanation.levels == "forward: default, backward: default", str(explanation)
    exact = [tensor.detach().cpu().double() for tensor in tensors]
    expected = gradients(case, exact, case.arguments(torch.device("cpu")))
    for ours, theirs in zip(computed_gradients, expected, strict=True):
        error = float((ours.cpu().double() - theirs).abs().max())
        assert error <= TOLERANCE[case.dtype] * float(theirs.abs().max()), (name, error)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["deterministic, wide", "block table, deterministic"])
def test_untuned_gradients_repeat_where_they_must(name: str) -> None:
    case, place = CASES[name], torch.device("cuda")
    first, *others = (gradients(case, case.tensors(place), case.arguments(place)) for _ in range(5))
    for other in others:
        assert all(torch.equal(*both) for both in zip(first, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "full"])
def test_an_untuned_plain_call_takes_a_kernel_on_hopper_and_a_fused_one_anywhere(kind: str) -> None:
    tensors = [drawn(torch.device("cuda"), 1, 4, 512, 64, seed=place).bfloat16() for place in range(3)]
    case, given = Case(), {"causal": kind == "causal"}
    computed_gradients = gradients(case, tensors, given)
    explanation = autoattn.explain(*tensors, **given)  # type: ignore[arg-type]
    assert explanation.route == ("kernel" if torch.cuda.get_device_capability() == (9, 0) else "sdpa"), str(explanation)
    expected = gradients(case, [tensor.detach().cpu().double() for tensor in tensors], given)
    for ours, theirs in zip(computed_gradients, expected, strict=True):
        assert float((ours.cpu().double() - theirs).abs().max()) <= 6e-2 * float(theirs.abs().max())
