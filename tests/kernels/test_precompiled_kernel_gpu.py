"""Shipped machine code gives what the same kernels give when they are compiled here, without any compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from checkout_paths import CHECKOUT
from functional_calls_gpu import normal
from threads import together
from torch import Tensor

import autoattn
from autoattn import functional
from autoattn.runtime.plan import machine_code

pytestmark = pytest.mark.gpu
HALF, BFLOAT = torch.float16, torch.bfloat16
Call = Callable[..., Any]


def dense(**words: Any) -> Call:
    return lambda *three: autoattn.attention(*three, **words)


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Eight sequences, one of them empty, as many as `documents` of precompiled.yaml has."""
    tokens = len(query)
    ends = [0, 1, 1, 2, 4, 5, 8, 12, 16]
    offsets = torch.tensor([tokens * end // 16 for end in ends], dtype=torch.int32, device="cuda")
    return autoattn.packed_attention(query, key, value, offsets, offsets, tokens, tokens, causal=True)


def three(batch: int, heads: tuple[int, int], seqs: tuple[int, int], head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((heads[0], seqs[0]), (heads[1], seqs[1]), (heads[1], seqs[1]))
    return [normal(batch, count, seq, head_dim).to(dtype) for count, seq in shapes]


CALLS: dict[str, tuple[Call, Callable[[], list[Tensor]], bool]] = {  # call, tensors, whether it has gradients
    "causal": (dense(causal=True), lambda: three(2, (16, 16), (2048, 2048), 128, BFLOAT), True),
    "full D64": (dense(), lambda: three(2, (16, 16), (2048, 2048), 64, BFLOAT), True),
    "float16": (dense(causal=True), lambda: three(2, (32, 8), (2048, 2048), 64, HALF), True),
    "D256": (dense(causal=True), lambda: three(1, (16, 16), (2048, 2048), 256, BFLOAT), True),
    "window": (dense(window=(1023, 0)), lambda: three(1, (32, 8), (4096, 4096), 128, BFLOAT), True),
    "decode": (dense(), lambda: three(8, (32, 8), (1, 8192), 128, BFLOAT), False),
    "packed": (packed, lambda: [normal(16384, heads, 128).to(BFLOAT) for heads in (32, 8, 8)], True),
}


@pytest.fixture(autouse=True)
def nothing_planned() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("machine code is shipped for sm_90")
    functional.forget()


def results(call: Call, tensors: list[Tensor], gradients: bool) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_(gradients) for tensor in tensors]
    output = call(*leaves)
    if not gradients:
        return [output]
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CALLS)
def test_shipped_code_gives_what_the_compiler_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, make, gradients = CALLS[name]
    tensors = make()
    monkeypatch.setenv("AUTOATTN_CACHE", "/nonexistent")
    shipped = results(call, tensors, gradients)
    taken = [kernel for kernel in machine_code.known() if kernel is not None]
    assert taken, "no machine code was found"
    functional.forget()
    monkeypatch.setattr(machine_code, "find", lambda *arguments: None)
    compiled = results(call, tensors, gradients)
    if all(kernel.facts.compiler == triton.__version__ for kernel in taken):
        assert torch.equal(shipped[0], compiled[0])
    for ours, theirs in zip(shipped, compiled, strict=True):  # sums of gradients may be added in another order
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_a_captured_graph_replays_shipped_code() -> None:
    call, make, _ = CALLS["causal"]
    tensors = make()
    expected = call(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(*tensors)
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


def test_threads_and_streams_launch_shipped_code_at_once() -> None:
    call, make, _ = CALLS["causal"]
    inputs = [make() for _ in range(4)]
    expected = [call(*tensors) for tensors in inputs]
    torch.cuda.synchronize()

    right: list[bool] = []

    def work(place: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outputs = [call(*inputs[place]) for _ in range(100)]
        stream.synchronize()
        right.append(all(torch.equal(output, expected[place]) for output in outputs))

    together(work)
    assert right == [True] * 4


WITHOUT_COMPILER = """
import shutil, torch, autoattn
assert shutil.which("gcc") is None and shutil.which("cc") is None
tensors = [torch.randn(2, 16, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
output = autoattn.attention(*tensors, causal=True)
output.backward(torch.ones_like(output))
explanation = autoattn.explain(*tensors, causal=True)
assert explanation.precompiled and explanation.gradients.precompiled, explanation
floats = [tensor.detach().float() for tensor in tensors]
expected = torch.nn.functional.scaled_dot_product_attention(*floats, is_causal=True)
assert (output.float() - expected).abs().max() < 0.02
"""


def test_nothing_is_compiled_where_there_is_no_compiler(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name not in ("CC", "CXX", "CUDA_HOME")}
    environment |= {
        "PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton"), "AUTOATTN_CACHE": str(tmp_path / "own"),
    }  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], env=environment, cwd=CHECKOUT, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert not (tmp_path / "triton").exists()
