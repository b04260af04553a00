"""autoattn.attention on a real GPU: tuned or default kernels against the oracle, in the ways that models call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autoattn
from autoattn import functional, reference
from autoattn.problem import Mask

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def largest_error(output: Tensor, query: Tensor, key: Tensor, value: Tensor, **asked: Any) -> float:
    """Against float64, at the first and the last head of the first and the last sequence."""
    if asked.get("layout") == "bshd":
        output, query, key, value = (tensor.transpose(1, 2) for tensor in (output, query, key, value))
    causal = asked.get("causal", False)
    mask = Mask.parse(causal if isinstance(causal, bool) else f"causal:{causal}")
    scale = asked.get("scale") or query.shape[-1] ** -0.5
    group = query.shape[1] // key.shape[1]
    worst = 0.0
    for batch in {0, query.shape[0] - 1}:
        for head in {0, query.shape[1] - 1}:
            exact, _ = reference.attention(
                query[batch : batch + 1, head : head + 1],
                key[batch : batch + 1, head // group : head // group + 1],
                value[batch : batch + 1, head // group : head // group + 1],
                mask=mask,
                scale=scale,
            )
            worst = max(worst, float((output[batch : batch + 1, head : head + 1].double() - exact).abs().max()))
    return worst


def check_kernel(query: Tensor, key: Tensor, value: Tensor, **asked: Any) -> None:
    """A kernel of ours runs, and it is right; also where the cache says that a rival is faster."""
    explanation = autoattn.explain(query, key, value, **asked)
    assert explanation.level.value != "sdpa", str(explanation)
    output = autoattn.attention(query, key, value, **asked)
    assert output.shape == query.shape
    assert largest_error(output, query, key, value, **asked) <= TOLERANCE[query.dtype]


@pytest.fixture(autouse=True)
def no_shipped_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Without a cache the template's default runs, so that a rival's choice hides no kernel."""
    monkeypatch.setattr("autoattn.resources.shipped_cache", lambda: tmp_path)
    functional.forget()
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (300, 1), (128, 128), (777, 1001), (500, 200)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_mask_length_and_dtype_matches_the_reference(
    causal: bool | str, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    seq_q, seq_kv = lengths
    check_kernel(
        normal(2, 6, seq_q, 64, dtype=dtype),
        normal(2, 2, seq_kv, 64, dtype=dtype),
        normal(2, 2, seq_kv, 64, dtype=dtype),
        causal=causal,
    )


@pytest.mark.parametrize("head_dim", [1, 8, 16, 24, 40, 57, 72, 80, 96, 111, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_head_dim_matches_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    query, key, value = (normal(1, 2, 200, head_dim, dtype=dtype) for _ in range(3))
    check_kernel(query, key, value, causal=True)


def test_the_bshd_layout_matches_the_reference() -> None:
    check_kernel(normal(2, 300, 8, 64), normal(2, 300, 4, 64), normal(2, 300, 4, 64), causal=True, layout="bshd")


def test_transposed_expanded_and_unaligned_tensors_match_the_reference() -> None:
    plain = normal(2, 4, 128, 64)
    check_kernel(normal(2, 64, 128, 4).permute(0, 3, 2, 1), plain, plain, causal=True)
    check_kernel(normal(1, 1, 128, 64).expand(2, 4, 128, 64), plain, plain)
    check_kernel(normal(2 * 4 * 128 * 64 + 1)[1:].view(2, 4, 128, 64), plain, plain)


def test_tf32_is_used_when_torch_allows_it() -> None:
    query, key, value = (normal(1, 4, 512, 64, dtype=torch.float32) for _ in range(3))
    before = torch.get_float32_matmul_precision()
    exact = autoattn.attention(query, key, value)
    try:
        torch.set_float32_matmul_precision("high")
        cut = autoattn.attention(query, key, value)
    finally:
        torch.set_float32_matmul_precision(before)
    assert largest_error(exact, query, key, value) <= TOLERANCE[torch.float32]
    assert 1e-5 < largest_error(cut, query, key, value) < 5e-3


def test_rows_that_see_no_key_give_zero() -> None:
    output = autoattn.attention(normal(1, 2, 300, 64), normal(1, 2, 100, 64), normal(1, 2, 100, 64), causal=True)
    assert not output[:, :, :200].any()
    assert output[:, :, 200:].any()


def test_offsets_beyond_two_to_the_31_inside_one_head_are_right() -> None:
    rows = 300
    step = 2**31 // rows // 8 * 8 + 64
    room = torch.empty(rows * step + 64, dtype=torch.bfloat16, device="cuda")
    far = torch.as_strided(room, (1, 1, rows, 64), (64, 64, step, 1))
    far.copy_(normal(1, 1, rows, 64))
    near = normal(1, 1, rows, 64)
    assert (rows - 1) * step > 2**31
    check_kernel(far, far, near, causal=True)
    check_kernel(near, near, far)


def test_seventy_thousand_heads_fit_into_one_launch() -> None:
    query, key, value = (normal(70_000, 1, 16, 16) for _ in range(3))
    check_kernel(query, key, value)


def test_growing_maxima_and_loud_logits_match_the_reference() -> None:
    query, key, value = (normal(1, 2, 2048, 64, dtype=torch.float16) for _ in range(3))
    key *= torch.linspace(0.1, 20.0, 2048, device="cuda", dtype=torch.float16)[:, None]
    output = autoattn.attention(query, key, value, causal=True)
    assert largest_error(output, query, key, value, causal=True) <= 6e-2


def test_a_captured_graph_follows_its_inputs() -> None:
    query, key, value = (normal(2, 8, 512, 64) for _ in range(3))
    autoattn.attention(query, key, value, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = autoattn.attention(query, key, value, causal=True)
    query.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert largest_error(output, query, key, value, causal=True) <= TOLERANCE[torch.bfloat16]


def test_a_side_stream_orders_the_kernel() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        query, key, value = (normal(2, 8, 512, 64) for _ in range(3))
        torch.cuda._sleep(50_000_000)
        query.normal_()
        output = autoattn.attention(query, key, value)
    stream.synchronize()
    assert largest_error(output, query, key, value) <= TOLERANCE[torch.bfloat16]


def test_inputs_that_need_gradients_go_to_pytorch_and_get_them() -> None:
    query, key, value = (normal(1, 2, 64, 64).requires_grad_() for _ in range(3))
    assert "gradient" in autoattn.explain(query, key, value).reason
    autoattn.attention(query, key, value).sum().backward()
    assert value.grad is not None
    assert value.grad.abs().sum() > 0
    with torch.no_grad():
        assert autoattn.explain(query, key, value).route == "kernel"


def test_a_negative_scale_goes_to_pytorch_and_is_right() -> None:
    query, key, value = (normal(1, 2, 64, 64) for _ in range(3))
    assert autoattn.explain(query, key, value, scale=-0.1).route == "sdpa"
    output = autoattn.attention(query, key, value, scale=-0.1)
    assert largest_error(output, query, key, value, scale=-0.1) <= TOLERANCE[torch.bfloat16]


def test_a_compiled_function_gives_the_same() -> None:
    query, key, value = (normal(1, 2, 256, 64) for _ in range(3))
    twice = torch.compile(lambda *three: 2 * autoattn.attention(*three, causal=True))
    with torch.no_grad():
        output = twice(query, key, value) / 2
    assert largest_error(output, query, key, value, causal=True) <= TOLERANCE[torch.bfloat16]
