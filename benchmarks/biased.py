"""Measures calls with an additive bias, beside PyTorch's attention and each of its backends, on the GPU that is here.

python benchmarks/biased.py [--rounds 12] [--row TEXT] [--write]

All contestants of a row run in turn in one process, in random order in each round. A row is a forward pass, and both
passes. Per contestant: the host's time of a call to its return, the wall time to the end of what it launched, and the
GPU's time, by events around a call that waits behind a filled queue. The error is the largest difference of the output
and the gradients from float32 math, of the largest value.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import triton
from kept import keep, printed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import autoattn
from autoattn.hardware import nvidia

DEVICE = torch.device("cuda")
AHEAD = 4_000_000  # cycles that the card sleeps, so that the host is ahead of it
WARM = 3  # calls before the clock starts
BACKENDS = {
    "SDPA": None,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of call."""

    dtype: torch.dtype = torch.bfloat16
    batch: int
    heads: tuple[int, int]  # of queries, and of keys and values
    lengths: tuple[int, int]  # queries and keys
    head_dim: int
    sharing: str  # of the bias: a 1 for each of batch, heads and queries that shares it, else B, H or S
    learns: bool = False  # whether the bias has a gradient
    bias_dtype: torch.dtype | None = None  # None: that of the query

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """[batch, heads, queries, keys], 1 where an axis shares the bias."""
        batch, heads, queries = (
            1 if letter == "1" else size
            for letter, size in zip(self.sharing, (self.batch, self.heads[0], self.lengths[0]), strict=True)
        )
        return batch, heads, queries, self.lengths[1]

    def __str__(self) -> str:
        heads = "/".join(map(str, dict.fromkeys(self.heads)))
        text = f"{_short(self.dtype)} B{self.batch} H{heads} {self.lengths[0]}x{self.lengths[1]} D{self.head_dim}"
        kind = f"{_short(self.bias_dtype)} " if self.bias_dtype else ""
        return f"{text}, {kind}bias {list(self.bias_shape)}{' that learns' if self.learns else ''}"


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


HALF = torch.float16
ROWS = (
    Row(batch=2, heads=(16, 16), lengths=(1024, 1024), head_dim=64, sharing="1HS"),
    Row(batch=1, heads=(16, 16), lengths=(2048, 2048), head_dim=128, sharing="1HS"),
    Row(dtype=HALF, batch=4, heads=(8, 8), lengths=(512, 512), head_dim=64, sharing="1HS"),
    Row(batch=2, heads=(16, 16), lengths=(1024, 1024), head_dim=64, sharing="11S"),
    Row(batch=4, heads=(16, 16), lengths=(2048, 2048), head_dim=128, sharing="11S"),
    Row(dtype=HALF, batch=4, heads=(16, 16), lengths=(1024, 1024), head_dim=128, sharing="B1S"),
    Row(batch=8, heads=(16, 16), lengths=(512, 512), head_dim=64, sharing="1H1"),
    Row(batch=2, heads=(16, 16), lengths=(1024, 1024), head_dim=64, sharing="1HS", learns=True),
    Row(batch=1, heads=(16, 16), lengths=(2048, 2048), head_dim=128, sharing="11S", learns=True),
    Row(dtype=HALF, batch=4, heads=(8, 8), lengths=(512, 512), head_dim=64, sharing="1H1", learns=True),
    Row(batch=2, heads=(32, 8), lengths=(1024, 1024), head_dim=128, sharing="1HS"),
    Row(dtype=HALF, batch=2, heads=(32, 8), lengths=(2048, 2048), head_dim=64, sharing="B1S"),
    Row(batch=2, heads=(16, 16), lengths=(1000, 1001), head_dim=64, sharing="1HS"),
    Row(batch=2, heads=(16, 16), lengths=(1024, 1024), head_dim=64, sharing="1HS", bias_dtype=torch.float32),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """What the contestants of a row compute on."""

    query: Tensor  # [batch, heads_q, seq_q, head_dim]
    key: Tensor  # [batch, heads_kv, seq_kv, head_dim]
    value: Tensor  # the same
    bias: Tensor  # broadcastable to [batch, heads_q, seq_q, seq_kv]
    push: Tensor  # the output's gradient, like the query

    @property
    def leaves(self) -> list[Tensor]:
        """Those that learn."""
        return [tensor for tensor in (self.query, self.key, self.value, self.bias) if tensor.requires_grad]


@dataclass(slots=True, kw_only=True)
class Times:
    """Microseconds of each round."""

    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    gpu: list[float] = field(default_factory=list)


def tensors_of(row: Row, training: bool) -> Tensors:
    """Random numbers on the card, the same for both kinds of calls."""
    torch.manual_seed(0)
    queries, keys = row.lengths
    make = partial(torch.randn, device=DEVICE, dtype=row.dtype)
    query = make(row.batch, row.heads[0], queries, row.head_dim, requires_grad=training)
    key, value = (make(row.batch, row.heads[1], keys, row.head_dim, requires_grad=training) for _ in range(2))
    bias = torch.randn(row.bias_shape, device=DEVICE, dtype=row.bias_dtype or row.dtype)
    bias.requires_grad_(training and row.learns)
    return Tensors(query=query, key=key, value=value, bias=bias, push=make(query.shape))


def step(attend: Callable[[], Tensor], tensors: Tensors) -> tuple[Tensor, ...]:
    """The output, and the gradients where tensors learn."""
    output, leaves = attend(), tensors.leaves
    return (output, *torch.autograd.grad(output, leaves, tensors.push.to(output.dtype))) if leaves else (output,)


def contestants(row: Row, tensors: Tensors) -> dict[str, Call]:
    """The steps of autoattn, of PyTorch's own choice and of each backend of it."""
    query, key, value, bias = tensors.query, tensors.key, tensors.value, tensors.bias

    def theirs(backend: SDPBackend | None) -> Tensor:
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            mask = bias.to(query.dtype)
            grouped = row.heads[0] != row.heads[1]
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)

    calls: dict[str, Call] = {
        "autoattn": partial(step, partial(autoattn.attention, query, key, value, bias=bias), tensors)
    }
    return calls | {name: partial(step, partial(theirs, backend), tensors) for name, backend in BACKENDS.items()}


def expected(row: Row, tensors: Tensors) -> tuple[Tensor, ...]:
    """What float32 math gives for the same step."""
    given = (tensors.query, tensors.key, tensors.value, tensors.bias)
    query, key, value, bias = (each.detach().float().requires_grad_(each.requires_grad) for each in given)
    wide = Tensors(query=query, key=key, value=value, bias=bias, push=tensors.push)

    def attend() -> Tensor:
        keys, values = (each.repeat_interleave(row.heads[0] // row.heads[1], 1) for each in (key, value))
        return torch.softmax(query @ keys.mT * row.head_dim**-0.5 + bias, -1) @ values

    return step(attend, wide)


def error_of(answer: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> float:
    """The largest difference of any tensor, of its largest value."""
    pairs = ((ours.detach().float(), theirs.detach()) for ours, theirs in zip(answer, right, strict=True))
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def timed(call: Call) -> tuple[float, float, float]:
    """Microseconds until a call returns, until what it launched is done, and of the GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    call()
    returned = time.perf_counter_ns()
    torch.cuda.synchronize()
    done = time.perf_counter_ns()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return (returned - begin) / 1e3, (done - begin) / 1e3, first.elapsed_time(last) * 1e3


def contest(row: Row, training: bool, rounds: int) -> Iterator[str]:
    """A line of markdown for each contestant that takes the row."""
    tensors = tensors_of(row, training)
    right, errors, calls = expected(row, tensors), {}, {}
    for name, call in contestants(row, tensors).items():
        try:
            for _ in range(WARM):
                answer = call()
        except RuntimeError as refusal:  # no backend, or none that the build has
            if name == "autoattn" or "No available kernel" not in str(refusal):
                raise
            continue
        calls[name], errors[name] = call, error_of(answer, right)
    del right, answer
    torch.cuda.empty_cache()
    times = {name: Times() for name in calls}
    for _ in range(rounds):
        for name in random.sample([*calls], len(calls)):
            host, wall, gpu = timed(calls[name])
            times[name].host.append(host)
            times[name].wall.append(wall)
            times[name].gpu.append(gpu)
    given = tensors.query, tensors.key, tensors.value
    route = autoattn.explain(*given, bias=tensors.bias).route
    for name, each in times.items():
        cells = " | ".join(_spread(samples) for samples in (each.wall, each.host, each.gpu))
        who = f"autoattn ({route})" if name == "autoattn" else name
        yield f"| {row} | {'both' if training else 'forward'} | {who} | {cells} | {errors[name]:.4f} |"


def _spread(samples: list[float]) -> str:
    return f"{statistics.median(samples):,.0f} ({min(samples):,.0f} to {max(samples):,.0f})"


def table(rounds: int, only: str) -> Iterator[str]:
    """The lines of all rows whose text holds `only`."""
    yield "| problem | passes | who | wall us | host us | GPU us | error |"
    yield "|---|---|---|--:|--:|--:|--:|"
    for row in ROWS:
        if only in str(row):
            for training in (True,) if row.learns else (False, True):
                yield from contest(row, training, rounds)


def main() -> None:
    """Prints the table, and keeps it where that is asked for."""
    parser = argparse.ArgumentParser(description="Times calls with an additive bias beside PyTorch's attention.")
    parser.add_argument("--rounds", type=int, default=12, help="of each row, in which all contestants run")
    parser.add_argument("--row", default="", help="only rows whose text holds this")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    options = parser.parse_args()
    card = nvidia.present()
    assert card is not None, "needs an NVIDIA GPU"
    versions = f"torch {torch.__version__}, triton {triton.__version__}: `python benchmarks/biased.py`"
    lines = printed([f"# Calls beside a bias, on an {card.full_name}", "", f"{versions}, {options.rounds} rounds", ""])
    lines += printed(table(options.rounds, options.row))
    if options.write:
        keep(f"{card.name}_bias", "\n".join(lines))


if __name__ == "__main__":
    main()
