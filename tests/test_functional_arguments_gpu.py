"""What else a call of attention may ask for, on a real GPU: against the formula."""

from __future__ import annotations

import math
from typing import Any

import formula
import pytest
import torch
from functional_calls_gpu import (
    TOLERANCE,
    band,
    largest_error,
    no_shipped_cache,  # noqa: F401 - a fixture
    normal,
)
from torch import Tensor

import autoattn
from autoattn import functional, masks
from autoattn.errors import TensorError
from autoattn.kernels import forward

pytestmark = pytest.mark.gpu


SEQ_Q, SEQ_KV = 203, 331


def biases() -> tuple[Tensor, Tensor, Tensor]:
    """Which keys are no padding, which pairs count, and numbers to add; the same at each call."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    keys = torch.rand(2, 1, 1, SEQ_KV, generator=generator, device="cuda") < 0.8
    pairs = torch.rand(1, 6, SEQ_Q, SEQ_KV, generator=generator, device="cuda") < 0.7
    added = 2.0 * torch.randn(2, 1, SEQ_Q, SEQ_KV, generator=generator, device="cuda")
    return keys, pairs, torch.where(pairs[:, :1], added, -math.inf)


def far() -> Tensor:
    return formula.distance(SEQ_Q, SEQ_KV).cuda()


def slopes() -> Tensor:
    return 2.0 ** -torch.arange(1.0, 7.0, device="cuda")


def sinks() -> Tensor:
    return torch.linspace(-2.0, 3.0, 6, device="cuda")


def cap(limit: float) -> Any:
    return lambda scores: limit * torch.tanh(scores / limit)


AXES: dict[str, Any] = {  # a name -> the arguments of a call, and the same of the formula
    "window": lambda: ({"window": (50, 20)}, {"keep": band(SEQ_Q, SEQ_KV, window=(50, 20))}),
    "left window": lambda: ({"window": (50, -1)}, {"keep": band(SEQ_Q, SEQ_KV, window=(50, -1))}),
    "right window": lambda: ({"window": (-1, 20)}, {"keep": band(SEQ_Q, SEQ_KV, window=(-1, 20))}),
    "causal window": lambda: (
        {"window": (50, 9), "causal": True}, {"keep": band(SEQ_Q, SEQ_KV, True, window=(50, 0))}
    ),
    "padding": lambda: ({"mask": biases()[0]}, {"keep": biases()[0]}),
    "causal padding": lambda: (
        {"mask": biases()[0], "causal": True}, {"keep": biases()[0] & band(SEQ_Q, SEQ_KV, True)}
    ),
    "pairs": lambda: ({"mask": biases()[1]}, {"keep": biases()[1]}),
    "bias": lambda: ({"bias": biases()[2]}, {"add": biases()[2]}),
    "low bias": lambda: ({"bias": biases()[2].bfloat16()}, {"add": biases()[2].bfloat16()}),
    "softcap": lambda: ({"softcap": 2.0}, {"change": cap(2.0)}),
    "alibi": lambda: (
        {"alibi_slopes": slopes(), "causal": True},
        {"add": -slopes()[:, None, None] * far(), "keep": band(SEQ_Q, SEQ_KV, True)},
    ),
    "sinks": lambda: ({"sinks": sinks()}, {"sinks": sinks()}),
    "score_mod": lambda: (
        {"score_mod": "where(kv_idx % 3 == 0, score - 1.0, score)"},
        {"add": -(torch.arange(SEQ_KV, device="cuda") % 3 == 0).double()},
    ),
    "function": lambda: (
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 0.01 * (h - kv_idx)},
        {"add": 0.01 * (torch.arange(6, device="cuda")[:, None, None] - torch.arange(SEQ_KV, device="cuda"))},
    ),
    "all": lambda: (
        {"window": (90, 20), "softcap": 3.0, "bias": biases()[2], "sinks": sinks(), "alibi_slopes": slopes()},
        {
            "keep": band(SEQ_Q, SEQ_KV, window=(90, 20)),
            "change": lambda scores: cap(3.0)(scores) - slopes()[:, None, None] * far(),
            "add": biases()[2],
            "sinks": sinks(),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_each_axis_runs_a_kernel_that_matches_the_formula(name: str, layout: str) -> None:
    given, meant = AXES[name]()
    tensors = normal(2, 6, SEQ_Q, 64), normal(2, 2, SEQ_KV, 64), normal(2, 2, SEQ_KV, 64)
    placed = tensors if layout == "bhsd" else tuple(tensor.transpose(1, 2).contiguous() for tensor in tensors)
    explanation = autoattn.explain(*placed, layout=layout, **given)
    assert explanation.route == "kernel", str(explanation)
    exact, sums = formula.attention(*tensors, **meant)
    output = autoattn.attention(*placed, layout=layout, **given)
    both, lse = autoattn.attention(*placed, layout=layout, return_lse=True, **given)
    for answer in (output, both):
        answer = answer if layout == "bhsd" else answer.transpose(1, 2)
        assert float((answer.double() - exact).abs().max()) <= TOLERANCE[torch.bfloat16]
    assert torch.allclose(lse.double(), sums, atol=1e-2)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 128), (192, 128), (80, 40), (57, 33), (128, 512)])
def test_values_with_a_head_dim_of_their_own_match_the_formula(head_dim: int, head_dim_v: int) -> None:
    tensors = normal(1, 4, 200, head_dim), normal(1, 2, 300, head_dim), normal(1, 2, 300, head_dim_v)
    assert autoattn.explain(*tensors, causal=True).route == "kernel"
    output = autoattn.attention(*tensors, causal=True)
    exact, _ = formula.attention(*tensors, keep=band(200, 300, True))
    assert float((output.double() - exact).abs().max()) <= TOLERANCE[torch.bfloat16]


def test_three_tf32_products_are_nearly_float32() -> None:
    tensors = tuple(normal(1, 4, 300, 64, dtype=torch.float32) for _ in range(3))
    assert autoattn.explain(*tensors, precision="tf32x3").route == "kernel"
    near, far_off = (
        largest_error(autoattn.attention(*tensors, precision=name), *tensors) for name in ("tf32x3", "tf32")
    )
    assert near <= 2e-5
    assert far_off > near


def test_float8_tensors_match_the_formula() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with float8")
    tensors = [normal(2, heads, 300, 128).to(torch.float8_e4m3fn) for heads in (4, 2, 2)]
    scales = [torch.rand(2, 2, device="cuda") + 0.5 for _ in range(3)]
    given = dict(zip(("query_scale", "key_scale", "value_scale"), scales, strict=True))
    assert autoattn.explain(*tensors, causal=True, **given).route == "kernel"
    output = autoattn.attention(*tensors, causal=True, **given)
    query, key, value = (
        tensor.double() * scale.repeat_interleave(tensor.shape[1] // 2, 1)[..., None, None]
        for tensor, scale in zip(tensors, scales, strict=True)
    )
    exact, _ = formula.attention(query, key, value, keep=band(300, 300, True))
    assert output.dtype is torch.bfloat16
    assert float((output.double() - exact).abs().max()) <= 0.1 * float(exact.abs().max())


def test_dropout_drops_the_same_weights_as_the_plain_formula() -> None:
    tensors = tuple(normal(1, 4, 200, 64, dtype=torch.float32) for _ in range(3))
    given: dict[str, Any] = {"dropout": 0.3, "seed": 2**40 + 7, "causal": True}
    assert autoattn.explain(*tensors, **given).route == "kernel"
    output = autoattn.attention(*tensors, **given)
    there = autoattn.attention(*(tensor.cpu() for tensor in tensors), **given)
    torch.testing.assert_close(output.cpu(), there, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 10)])
def test_packed_sequences_match_the_formula_one_by_one(window: tuple[int, int]) -> None:
    lengths = ((100, 130), (0, 7), (257, 257), (5, 0), (64, 300))
    offsets = [torch.tensor([0, *(pair[place] for pair in lengths)]).cumsum(0).int().cuda() for place in (0, 1)]
    tokens_q, tokens_kv = int(offsets[0][-1]) + 9, int(offsets[1][-1]) + 9
    query, key, value = normal(tokens_q, 6, 64), normal(tokens_kv, 2, 64), normal(tokens_kv, 2, 96)
    call = (query, key, value, *offsets, 257, 300)
    assert autoattn.explain_packed(*call, window=window).route == "kernel"
    output, lse = autoattn.packed_attention(*call, window=window, return_lse=True)
    for place, (seq_q, seq_kv) in enumerate(lengths):
        rows = slice(int(offsets[0][place]), int(offsets[0][place]) + seq_q)
        columns = slice(int(offsets[1][place]), int(offsets[1][place]) + seq_kv)
        if seq_q == 0 or seq_kv == 0:
            assert not output[rows].any()
            continue
        parts = [
            tensor[part][None].transpose(1, 2) for tensor, part in ((query, rows), (key, columns), (value, columns))
        ]
        exact, sums = formula.attention(*parts, keep=band(seq_q, seq_kv, window=window))
        assert float((output[rows].transpose(0, 1).double() - exact[0]).abs().max()) <= TOLERANCE[torch.bfloat16]
        assert torch.allclose(lse[:, rows].double(), sums[0], atol=1e-2)
    assert not output[-9:].any()
    assert (lse[:, -9:] == -math.inf).all()


def test_a_block_table_and_flexattentions_own_match_the_formula() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def keeps(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 100) | (kv_idx < 7)

    tensors = normal(2, 6, 300, 64), normal(2, 2, 300, 64), normal(2, 2, 300, 64)
    ours = masks.from_mod(keeps, seq_q=300, seq_kv=300, device="cuda")
    theirs = create_block_mask(keeps, None, None, 300, 300, device="cuda")
    rows, keys = torch.arange(300, device="cuda")[:, None], torch.arange(300, device="cuda")[None, :]
    exact, _ = formula.attention(*tensors, keep=keeps(rows, rows, rows, keys))
    for mask in (ours, theirs):
        assert autoattn.explain(*tensors, mask=mask).route == "kernel"
        output = autoattn.attention(*tensors, mask=mask)
        assert float((output.double() - exact).abs().max()) <= TOLERANCE[torch.bfloat16]


def test_the_other_front_doors_run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = forward.launch
    monkeypatch.setattr(forward, "launch", lambda *facts, **more: launched.append(1) or launch(*facts, **more))
    query, key, value = normal(2, 4, 100, 64), normal(2, 4, 160, 64), normal(2, 4, 160, 64)
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert largest_error(output, query, key, value, causal="top-left") <= TOLERANCE[torch.bfloat16]
    placed = [tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)]
    output, lse, _ = functional.flash_attn_func(*placed, causal=True, return_attn_probs=True)
    assert largest_error(output, *placed, causal=True, layout="bshd") <= TOLERANCE[torch.bfloat16]
    assert lse.shape == (2, 4, 100)
    offsets = [torch.tensor([0, seq, 2 * seq], dtype=torch.int32, device="cuda") for seq in (100, 160)]
    tokens = [tensor.flatten(0, 1) for tensor in placed]
    packed = functional.flash_attn_varlen_func(*tokens, *offsets, 100, 160, causal=True)  # type: ignore[call-arg]
    assert torch.allclose(packed.unflatten(0, (2, 100)), output, atol=TOLERANCE[torch.bfloat16])
    assert len(launched) == 3


def test_learned_sinks_and_biases_get_their_gradients_from_untuned_kernels() -> None:
    tensors = normal(1, 4, 64, 64), normal(1, 4, 64, 64), normal(1, 4, 64, 64)
    learned = {"sinks": torch.zeros(4, device="cuda"), "bias": torch.zeros(64, 64, device="cuda")}
    for name, tensor in learned.items():
        tensor.requires_grad_()
        assert autoattn.explain(*tensors, **{name: tensor}).route == "kernel"
        autoattn.attention(*tensors, **{name: tensor}).square().sum().backward()
        exact = tensor.detach().double().requires_grad_()
        scores = tensors[0].double() @ tensors[1].double().mT / 8
        if name == "bias":
            weights = (scores + exact).softmax(-1)
        else:
            sinks = exact[None, :, None, None].expand(1, 4, 64, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :64]
        (weights @ tensors[2].double()).square().sum().backward()
        assert tensor.grad is not None
        assert exact.grad is not None
        assert (tensor.grad - exact.grad).abs().max() <= 0.02 * exact.grad.abs().max()


def test_a_captured_graph_of_packed_sequences_follows_its_offsets() -> None:
    tokens = [normal(300, 4, 64) for _ in range(3)]
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    call = (*tokens, offsets, offsets, 300, 300)
    autoattn.packed_attention(*call, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = autoattn.packed_attention(*call, causal=True)
    offsets[1] = 170
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, autoattn.packed_attention(*call, causal=True))


def test_a_captured_graph_keeps_its_seed_and_asks_for_one() -> None:
    tensors = [normal(1, 4, 128, 64) for _ in range(3)]
    eager = autoattn.attention(*tensors, dropout=0.5, seed=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = autoattn.attention(*tensors, dropout=0.5, seed=3)
        with pytest.raises(TensorError, match="dropout in a CUDA graph must have a seed"):
            autoattn.attention(*tensors, dropout=0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, eager)


def test_a_capture_of_what_only_a_kernel_can_answer_says_to_call_once_before() -> None:
    tensors = [normal(1, 4, 192, 64) for _ in range(3)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(TensorError, match="call it once before capturing"):
        autoattn.attention(*tensors, softcap=5.0, sinks=torch.zeros(4, device="cuda"))


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_a_call_without_queries_or_keys_launches_nothing(sizes: tuple[int, int, int]) -> None:
    batch, seq_q, seq_kv = sizes
    tensors = normal(batch, 4, seq_q, 64), normal(batch, 2, seq_kv, 64), normal(batch, 2, seq_kv, 64)
    output, lse = autoattn.attention(*tensors, causal=True, return_lse=True)
    assert output.shape == (batch, 4, seq_q, 64)
    assert not output.any()
    assert (lse == -math.inf).all()
