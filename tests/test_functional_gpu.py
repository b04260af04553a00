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
from torch import Tensor

import autoattn
from autoattn import cache, functional, gpu, inputs, masks, rivals
from autoattn.dispatch import Level
from autoattn.entry import Rival
from autoattn.errors import TensorError
from autoattn.mask import Mask
from autoattn.problem import DType, Layout, Op, Problem
from autoattn.variant import Traits

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def band(seq_q: int, seq_kv: int, causal: bool | str = False, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """[seq_q, seq_kv] booleans: what the arguments of a call keep."""
    left, right = window
    right = 0 if causal else right
    shift = 0 if causal == "top-left" else seq_kv - seq_q
    place = torch.arange(seq_q, device="cuda")[:, None] + shift
    keys = torch.arange(seq_kv, device="cuda")[None, :]
    return ((keys >= place - left) | (left < 0)) & ((keys <= place + right) | (right < 0))


def largest_error(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bhsd",
) -> float:
    """Against float64, at the first and the last head of the first and the last sequence."""
    if layout == "bshd":
        output, query, key, value = (tensor.transpose(1, 2) for tensor in (output, query, key, value))
    group = query.shape[1] // key.shape[1]
    keep = band(query.shape[2], key.shape[2], causal)
    worst = 0.0
    for batch in {0, query.shape[0] - 1}:
        for head in {0, query.shape[1] - 1}:
            part = slice(batch, batch + 1), slice(head // group, head // group + 1)
            one = query[part[0], head : head + 1]
            exact, _ = formula.attention(one, key[part], value[part], keep=keep, scale=scale)
            worst = max(worst, float((output[part[0], head : head + 1].double() - exact).abs().max()))
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


RIVALS = (rivals.SDPA, *rivals.BACKENDS)


def remember(folder: Path, one: Problem, **changes: Any) -> None:
    """Writes a measured entry of this very card."""
    card = gpu.present()
    assert card is not None
    facts: dict[str, Any] = {
        "choice": "kernel",
        "versions": {"triton": triton.__version__},
        "rivals": tuple(Rival(name=name, measurement=samples.measurement(one, 300.0)) for name in RIVALS),
    }
    entry = samples.current(replace(samples.measured(one), **{**facts, **changes}))
    cache.merge(folder, card, Op.FORWARD, [entry])


@pytest.mark.parametrize("params", TUNED, ids=lambda params: "-".join(str(value) for value in params.values()))
@pytest.mark.parametrize("lengths", [(1000, 1500), (700, 500)])
def test_a_tuned_kernel_runs_and_matches_the_reference(
    params: dict[str, Any], lengths: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path / "user"))
    seq_q, seq_kv = lengths
    sizes = {"batch": 6, "heads_q": 48, "heads_kv": 6, "seq_q": seq_q, "seq_kv": seq_kv, "head_dim": 64}
    one = kernels.problem(dtype=DType.FLOAT16, mask="causal", **sizes)
    variant = kernels.variant(**params)
    remember(tmp_path / "user", one, params=variant.as_dict())
    query = normal(6, 48, seq_q, 64, dtype=torch.float16)
    key, value = (normal(6, 6, seq_kv, 64, dtype=torch.float16) for _ in range(2))
    found = autoattn.explain(query, key, value, causal=True)
    assert (found.level, found.route, found.variant) == (Level.EXACT, "kernel", variant), found.steps
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
    one = kernels.problem(dtype=dtype, seq_q=203, seq_kv=331, head_dim=72, mask="causal", layout=layout)
    operands = inputs.make(one, torch.device("cuda"), torch.Generator().manual_seed(0), guard=8)
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
        found = autoattn.explain(query, key, value)
        output = autoattn.attention(query, key, value)
    assert "captured" in found.reason
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
    one = kernels.problem(dtype=DType.BFLOAT16, head_dim=64, mask="causal")
    path = tmp_path / "exported.py"
    path.write_text(
        kernels.source(one, Traits(lse=True), BLOCK_M=64, BLOCK_N=64, num_warps=4, PERSISTENT=persistent).text
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


# --- what else a call may ask for -------------------------------------------------------------------------------------

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
    found = autoattn.explain(*placed, layout=layout, **given)
    assert found.route == "kernel", str(found)
    exact, sums = formula.attention(*tensors, **meant)
    output = autoattn.attention(*placed, layout=layout, **given)
    both, lse = autoattn.attention(*placed, layout=layout, return_lse=True, **given)
    for one in (output, both):
        one = one if layout == "bhsd" else one.transpose(1, 2)
        assert float((one.double() - exact).abs().max()) <= TOLERANCE[torch.bfloat16]
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
    launch = functional.answer.forward.launch
    monkeypatch.setattr(functional.answer.forward, "launch", lambda *facts: launched.append(1) or launch(*facts))
    query, key, value = normal(2, 4, 100, 64), normal(2, 4, 160, 64), normal(2, 4, 160, 64)
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert largest_error(output, query, key, value, causal="top-left") <= TOLERANCE[torch.bfloat16]
    placed = [tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)]
    output, lse, _ = functional.flash_attn_func(*placed, causal=True, return_attn_probs=True)
    assert largest_error(output, *placed, causal=True, layout="bshd") <= TOLERANCE[torch.bfloat16]
    assert lse.shape == (2, 4, 100)
    offsets = [torch.tensor([0, seq, 2 * seq], dtype=torch.int32, device="cuda") for seq in (100, 160)]
    tokens = [tensor.flatten(0, 1) for tensor in placed]
    packed = functional.flash_attn_varlen_func(*tokens, *offsets, 100, 160, causal=True)
    assert torch.allclose(packed.unflatten(0, (2, 100)), output, atol=TOLERANCE[torch.bfloat16])
    assert len(launched) == 3


def test_learned_sinks_and_biases_go_to_the_plain_formula_and_get_their_gradients() -> None:
    tensors = normal(1, 4, 64, 64), normal(1, 4, 64, 64), normal(1, 4, 64, 64)
    learned = {"sinks": torch.zeros(4, device="cuda"), "bias": torch.zeros(64, 64, device="cuda")}
    for name, tensor in learned.items():
        tensor.requires_grad_()
        found = autoattn.explain(*tensors, **{name: tensor})
        assert "gradient" in found.reason
        autoattn.attention(*tensors, **{name: tensor}).square().sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() > 0
        with torch.no_grad():
            assert autoattn.explain(*tensors, **{name: tensor}).route == "kernel"


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
