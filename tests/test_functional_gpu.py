"""autoattn.attention on a real GPU: tuned or default kernels against the oracle, in the ways that models call them."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import formula
import kernels
import pytest
import samples
import torch
import triton
from functional_calls_gpu import (
    TOLERANCE,
    band,
    check_kernel,
    largest_error,
    no_shipped_cache,  # noqa: F401 - a fixture
    normal,
)
from torch import Tensor

import autoattn
from autoattn.baselines import pytorch_sdpa
from autoattn.cache import store
from autoattn.core.cache_entry import Rival
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Op, Problem
from autoattn.core.variant import Traits
from autoattn.hardware import nvidia
from autoattn.reference import inputs
from autoattn.runtime.plan.explanations import Level

pytestmark = pytest.mark.gpu


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


def test_views_that_stand_for_the_negatives_in_memory_match_the_reference() -> None:
    query, key, value = (normal(2, 4, 128, 64) for _ in range(3))
    for _ in range(2):  # the second would be a prepared call
        check_kernel(query, key, value)
        check_kernel(torch._neg_view(query), key, torch._neg_view(value))


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
    step = 2**31 // (rows - 10) // 8 * 8
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


def test_inputs_that_need_gradients_get_them_from_untuned_kernels() -> None:
    tensors = [normal(1, 2, 64, 64).requires_grad_() for _ in range(3)]
    assert autoattn.explain(*tensors).route == "kernel"
    autoattn.attention(*tensors).square().sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    torch.nn.functional.scaled_dot_product_attention(*exact).square().sum().backward()
    for tensor, other in zip(tensors, exact, strict=True):
        assert tensor.grad is not None
        assert other.grad is not None
        assert (tensor.grad - other.grad).abs().max() <= 0.03 * other.grad.abs().max()


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


# --- tuned kernels, and rivals that were faster -----------------------------------------------------------------------

TUNED = [
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, "softmax": "first_max"},
    {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3, "softmax": "lazy", "mask_loop": "every"},
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2, "mask_loop": "branch", "HEAD_GROUP": 4},
    {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 1, "num_stages": 4, "PERSISTENT": 1, "HEAD_GROUP": 0},
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "PERSISTENT": 2, "row_order": "ascending", "HEAD_GROUP": 16},
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "barrier": "after_qk", "maxnreg": 168},
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "barrier": "before_pv"},
    {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 2, "barrier": "loop_end"},
]


RIVALS = (pytorch_sdpa.SDPA, *pytorch_sdpa.BACKENDS)


def remember(folder: Path, problem: Problem, **changes: Any) -> None:
    """Writes a measured entry of this very card."""
    card = nvidia.present()
    assert card is not None
    facts: dict[str, Any] = {
        "choice": "kernel",
        "versions": {"triton": triton.__version__},
        "rivals": tuple(Rival(name=name, measurement=samples.measurement(problem, 300.0)) for name in RIVALS),
    }
    entry = samples.current(replace(samples.measured(problem), **{**facts, **changes}))
    store.merge(folder, card, Op.FORWARD, [entry])


@pytest.mark.parametrize("params", TUNED, ids=lambda params: "-".join(str(value) for value in params.values()))
@pytest.mark.parametrize("lengths", [(1000, 1500), (700, 500)])
def test_a_tuned_kernel_runs_and_matches_the_reference(
    params: dict[str, Any], lengths: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path / "user"))
    seq_q, seq_kv = lengths
    sizes = {"batch": 6, "heads_q": 48, "heads_kv": 6, "seq_q": seq_q, "seq_kv": seq_kv, "head_dim": 64}
    problem = kernels.problem(dtype=DType.FLOAT16, mask="causal", **sizes)
    variant = kernels.variant(**params)
    remember(tmp_path / "user", problem, params=variant.as_dict())
    query = normal(6, 48, seq_q, 64, dtype=torch.float16)
    key, value = (normal(6, 6, seq_kv, 64, dtype=torch.float16) for _ in range(2))
    explanation = autoattn.explain(query, key, value, causal=True)
    assert (explanation.level, explanation.route, explanation.variant) == (Level.EXACT, "kernel", variant), (
        explanation.steps
    )
    check_kernel(query, key, value, causal=True)
    loud = query * 20.0  # rows whose maxima move far, and weights that overflow float16
    output = autoattn.attention(loud, key, value, causal=True)
    assert largest_error(output, loud, key, value, causal=True) <= 6e-2


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_a_rival_that_was_faster_runs(
    name: str, causal: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path / "user"))
    mask = Mask.parse(causal if isinstance(causal, bool) else f"causal:{causal}")
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 4, "seq_q": 300, "seq_kv": 500, "head_dim": 64}
    remember(tmp_path / "user", kernels.problem(dtype=DType.BFLOAT16, mask=mask, **sizes), choice=name)
    query, key, value = normal(2, 8, 300, 64), normal(2, 4, 500, 64), normal(2, 4, 500, 64)
    assert autoattn.explain(query, key, value, causal=causal).route == name
    output = autoattn.attention(query, key, value, causal=causal)  # where it refuses, PyTorch's own choice answers
    assert largest_error(output, query, key, value, causal=causal) <= TOLERANCE[torch.bfloat16]


def test_a_rival_that_does_not_take_the_tensors_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path / "user"))
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 4, "seq_q": 64, "seq_kv": 64, "head_dim": 64}
    remember(tmp_path / "user", kernels.problem(dtype=DType.FLOAT32, **sizes), choice="sdpa-flash")
    query, key, value = (normal(1, 4, 64, 64, dtype=torch.float32) for _ in range(3))
    output = autoattn.attention(query, key, value)
    assert largest_error(output, query, key, value) <= 1e-2  # PyTorch's own choice may use tf32
    assert "does not take these tensors" in autoattn.explain(query, key, value).reason


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [20, 57, 60])
def test_aligned_slices_of_wider_rows_match_the_reference(head_dim: int) -> None:
    """The inputs are aligned, the new output is not."""
    query, key, value = (normal(2, 4, 200, 64)[..., :head_dim] for _ in range(3))
    check_kernel(query, key, value, causal=True)


@pytest.mark.parametrize("layout", [Layout.BHSD, Layout.BSHD])
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32])
def test_nan_around_the_inputs_never_leaks(layout: Layout, dtype: DType) -> None:
    problem = kernels.problem(dtype=dtype, seq_q=203, seq_kv=331, head_dim=72, mask="causal", layout=layout)
    operands = inputs.make(problem, torch.device("cuda"), torch.Generator().manual_seed(0), guard=8)
    views = operands.query, operands.key, operands.value
    query, key, value = views if layout is Layout.BHSD else tuple(tensor.transpose(1, 2) for tensor in views)
    check_kernel(query, key, value, causal=True, layout=layout.value)


@pytest.mark.usefixtures("poisoned_memory")
def test_every_element_of_the_output_is_written() -> None:
    for head_dim in (57, 64):
        query, key, value = (torch.randn(3, 5, 333, head_dim, device="cuda").bfloat16() for _ in range(3))
        assert autoattn.attention(query, key, value, causal=True).isfinite().all()


def gigabytes_free() -> float:
    return float(torch.cuda.mem_get_info()[0]) / 2**30


def test_more_than_two_to_the_31_elements_over_all_sequences_are_right() -> None:
    if gigabytes_free() < 24:
        pytest.skip("needs 24 GiB of GPU memory")
    query, key, value = (torch.empty(1030, 128, 128, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    for tensor in (query, key, value):
        tensor.normal_()
    assert query.numel() > 2**31
    check_kernel(query, key, value, causal=True)


def test_more_than_two_to_the_31_elements_in_one_head_of_a_bshd_call_are_right() -> None:
    """A step in the sequence passes all heads."""
    if gigabytes_free() < 16:
        pytest.skip("needs 16 GiB of GPU memory")
    length = 2**18 + 64
    query = normal(1, 16, 64, 128)
    key, value = (torch.empty(1, length, 64, 128, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    assert length * 64 * 128 > 2**31
    check_kernel(query, key, value, layout="bshd")
    check_kernel(query, key, value, layout="bshd", causal=True)


def test_tensors_on_another_card_than_the_current_one_are_right() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    query, key, value = (torch.randn(1, 4, 300, 64, device="cuda:1").bfloat16() for _ in range(3))
    assert torch.cuda.current_device() == 0
    output = autoattn.attention(query, key, value, causal=True)
    assert output.device == query.device
    assert largest_error(output, query, key, value, causal=True) <= TOLERANCE[torch.bfloat16]
    assert torch.cuda.current_device() == 0


# --- the ways that models call ----------------------------------------------------------------------------------------


def test_two_calls_agree_to_the_bit() -> None:
    query, key, value = (normal(2, 8, 1000, 64) for _ in range(3))
    first = autoattn.attention(query, key, value, causal=True)
    for _ in range(10):
        assert torch.equal(autoattn.attention(query, key, value, causal=True), first)


def test_inference_mode_runs_the_kernel() -> None:
    query, key, value = (normal(1, 2, 64, 64).requires_grad_() for _ in range(3))
    with torch.inference_mode():
        check_kernel(query, key, value)


def test_autocast_runs_the_kernel_in_the_low_precision() -> None:
    query, key, value = (normal(1, 4, 300, 64, dtype=torch.float32) for _ in range(3))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert autoattn.explain(query, key, value).route == "kernel"
        output = autoattn.attention(query, key, value)
    assert output.dtype is torch.bfloat16
    assert largest_error(output, query, key, value) <= TOLERANCE[torch.bfloat16]


def test_a_capture_of_what_was_never_called_goes_to_pytorch_and_is_right() -> None:
    query, key, value = (normal(2, 8, 320, 64) for _ in range(3))
    torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        explanation = autoattn.explain(query, key, value)
        output = autoattn.attention(query, key, value)
    assert "captured" in explanation.reason
    query.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert largest_error(output, query, key, value) <= TOLERANCE[torch.bfloat16]
    assert autoattn.explain(query, key, value).route == "kernel"


def test_one_graph_may_hold_several_calls() -> None:
    query, key, value = (normal(2, 4, 256, 64) for _ in range(3))

    def twice() -> Tensor:
        return autoattn.attention(autoattn.attention(query, key, value), key, value, causal=True)

    eager = twice()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = twice()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, eager)


@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_torch_compile_traces_it_whole(causal: bool | str) -> None:
    def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 2.0 * autoattn.attention(query, key, value, causal=causal)

    torch._dynamo.reset()
    traced = torch.compile(twice, backend="aot_eager", fullgraph=True)
    for seq_q, seq_kv in ((100, 300), (300, 100), (200, 200)):
        query, key, value = normal(1, 4, seq_q, 64), normal(1, 2, seq_kv, 64), normal(1, 2, seq_kv, 64)
        with torch.no_grad():
            output = traced(query, key, value) / 2.0
        assert largest_error(output, query, key, value, causal=causal) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(64, 200), (200, 64), (128, 128)])
def test_gradients_are_those_of_the_reference(causal: bool | str, seq_q: int, seq_kv: int) -> None:
    query, key, value = (
        normal(1, heads, seq, 64, dtype=torch.float32) for heads, seq in ((4, seq_q), (2, seq_kv), (2, seq_kv))
    )
    ours = [tensor.bfloat16().requires_grad_() for tensor in (query, key, value)]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    push = normal(1, 4, seq_q, 64)
    autoattn.attention(*ours, causal=causal).backward(push)
    exact, _ = formula.attention(theirs[0], theirs[1], theirs[2], keep=band(seq_q, seq_kv, causal))
    exact.backward(push.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert float((mine.grad.double() - other.grad).abs().max()) <= 0.03 * max(1.0, float(other.grad.abs().max()))


@pytest.mark.parametrize("scale", [-2.0, 0.0, 1e-50])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_a_scale_that_the_kernels_do_not_take_is_right_all_the_same(scale: float, causal: bool | str) -> None:
    query, key, value = normal(1, 4, 100, 64), normal(1, 4, 160, 64), normal(1, 4, 160, 64)
    assert "scale" in autoattn.explain(query, key, value, scale=scale, causal=causal).reason
    output = autoattn.attention(query, key, value, scale=scale, causal=causal)
    exact, _ = formula.attention(query, key, value, keep=band(100, 160, causal), scale=scale)
    assert float((output.double() - exact).abs().max()) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("batch", "heads", "seq_q", "seq_kv"), [(2, 4, 300, 500), (1, 1, 1, 1), (1, 16, 16, 16)])
@pytest.mark.parametrize("persistent", [0, 2])
def test_an_exported_file_launches_as_its_docstring_says(
    batch: int, heads: int, seq_q: int, seq_kv: int, persistent: int, tmp_path: Path
) -> None:
    """Triton's own launcher takes sizes of one as constants and looks for what 16 divides."""
    problem = kernels.problem(dtype=DType.BFLOAT16, head_dim=64, mask="causal")
    path = tmp_path / "exported.py"
    path.write_text(
        kernels.source(problem, Traits(lse=True), BLOCK_M=64, BLOCK_N=64, num_warps=4, PERSISTENT=persistent).text
    )
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None
    assert spec.loader is not None
    exported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exported)
    query, key, value = (normal(batch, heads, seq, 64) for seq in (seq_q, seq_kv, seq_kv))
    output, lse = torch.full_like(query, math.nan), torch.full((batch, heads, seq_q), math.nan, device="cuda")
    values: dict[str, Any] = {
        "query_ptr": query, "key_ptr": key, "value_ptr": value, "output_ptr": output, "lse_ptr": lse,
        "batch_heads": batch * heads, "heads_q": heads, "group_size": 1, "seq_q": seq_q, "seq_kv": seq_kv,
        "scale_log2": 0.125 * math.log2(math.e),
    }  # fmt: skip
    for name, tensor in (("q", query), ("k", key), ("v", value), ("o", output)):
        values |= {f"stride_{name}{axis}": step for axis, step in zip("bhsd", tensor.stride(), strict=True)}
    grid = exported.grid(batch, heads, seq_q, torch.cuda.get_device_properties(0).multi_processor_count)
    exported.forward[grid](*[values[name] for name in exported.SIGNATURE], **exported.OPTIONS)
    assert largest_error(output, query, key, value, causal=True) <= TOLERANCE[torch.bfloat16]
    _, exact = formula.attention(query, key, value, keep=band(seq_q, seq_kv, True), scale=0.125)
    assert torch.allclose(lse.double(), exact, atol=1e-3)
