"""Measures calls whose lengths never repeat, ours beside PyTorch's own attention, on the GPU that is here.

python benchmarks/dynamic.py [--lengths 24] [--row TEXT] [--write]

Each row draws lengths that differ from call to call. A call is timed twice: by the host's clock from the call to its
return, and to the end of what it launched. Kernels are compiled before, by calls of other lengths. Then the same
lengths come again, in the same order. A training row is a step: both passes, and the memory of one beside its inputs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import triton
from kept import keep

import autoattn
from autoattn.hardware import nvidia

DEVICE = torch.device("cuda")
WARM = 4  # calls of other lengths before the clock starts
Call = Callable[[], object]
Attend = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a program does with lengths that it meets once."""

    name: str
    lengths: tuple[int, int]  # the shortest and the longest
    prepare: Callable[[int], dict[str, Call]]  # a length -> the call of each contestant


@dataclass(slots=True, kw_only=True)
class Times:
    """Microseconds of each call, by lengths that are new and by the same ones again."""

    host: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    host_again: list[float] = field(default_factory=list)
    total_again: list[float] = field(default_factory=list)
    mebibytes: float = 0.0  # that a call takes beside its inputs


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> torch.Tensor:
    """Random numbers on the card."""
    return torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=learns)


def decode(batch: int, heads: int, heads_kv: int, head_dim: int) -> Callable[[int], dict[str, Call]]:
    """One query a sequence on a view of a key and value cache that grows."""
    caches = [tensor(batch, heads_kv, 4096, head_dim) for _ in range(2)]
    query = tensor(batch, heads, 1, head_dim)

    def prepare(length: int) -> dict[str, Call]:
        key, value = (cache[:, :, :length] for cache in caches)
        return contestants(query, key, value, gqa=heads != heads_kv)

    return prepare


def chunked_prefill(length: int) -> dict[str, Call]:
    """512 queries at the end of so many keys."""
    query, key, value = tensor(1, 32, 512, 128), tensor(1, 8, length, 128), tensor(1, 8, length, 128)
    return {"autoattn": lambda: autoattn.attention(query, key, value, causal="bottom-right")}


def contestants(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, gqa: bool) -> dict[str, Call]:
    """Both say the call in full."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "autoattn": lambda: autoattn.attention(query, key, value),
        "torch SDPA": lambda: sdpa(query, key, value, enable_gqa=gqa),
    }


def ragged(learns: bool) -> Callable[[int], dict[str, Call]]:
    """Eight documents of drawn lengths in one packed batch; with gradients or without."""

    def prepare(longest: int) -> dict[str, Call]:
        draw = random.Random(longest)
        lengths = [longest, *(draw.randrange(longest // 4, longest) for _ in range(7))]
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
        tokens = sum(lengths)
        inputs = [tensor(tokens, heads, 128, learns=learns) for heads in (32, 8, 8)]
        return step(
            lambda: autoattn.packed_attention(*inputs, offsets, offsets, longest, longest, causal=True), inputs, learns
        )

    return prepare


def trained(dtype: torch.dtype, batch: int, **changes: object) -> Callable[[int], dict[str, Call]]:
    """Both passes of 9 heads of 128."""

    def prepare(length: int) -> dict[str, Call]:
        inputs = [tensor(batch, 9, length, 128, dtype=dtype, learns=True) for _ in range(3)]
        return step(lambda: autoattn.attention(*inputs, **changes), inputs, True)  # type: ignore[arg-type]

    return prepare


def step(attend: Attend, inputs: list[torch.Tensor], learns: bool) -> dict[str, Call]:
    """A forward pass, and the backward pass where inputs learn."""
    if not learns:
        return {"autoattn": attend}
    push = torch.randn_like(inputs[0])  # the output is as large as the query
    return {"autoattn": lambda: torch.autograd.grad(attend(), inputs, push)}  # type: ignore[arg-type]


ROWS = (
    Row(name="decode B1 H32/8 D128, a view", lengths=(512, 4096), prepare=lambda n: decode(1, 32, 8, 128)(n)),
    Row(name="decode B32 H32/8 D128, a view", lengths=(512, 4096), prepare=lambda n: decode(32, 32, 8, 128)(n)),
    Row(name="decode B8 H16 D64, a view", lengths=(512, 4096), prepare=lambda n: decode(8, 16, 16, 64)(n)),
    Row(name="chunked prefill, 512 queries, H32/8 D128", lengths=(1024, 40960), prepare=chunked_prefill),
    Row(name="packed, 8 documents, H32/8 D128 causal", lengths=(512, 4096), prepare=ragged(False)),
    Row(name="the same with gradients", lengths=(512, 4096), prepare=ragged(True)),
    Row(
        name="training fp16 B2 H9 D128 softcap",
        lengths=(768, 1024),
        prepare=trained(torch.float16, 2, causal=True, softcap=30.0),
    ),
    Row(
        name="training bf16 B1 H9 D128 window 1023",
        lengths=(3584, 4096),
        prepare=trained(torch.bfloat16, 1, window=(1023, 0)),
    ),
)


def draw_lengths(row: Row, count: int) -> list[int]:
    """Lengths that differ, alike in each run."""
    return random.Random(row.name).sample(range(*row.lengths), count)


def timed(call: Call) -> tuple[float, float]:
    """Microseconds until a call returns, and until what it launched is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    call()
    returned = time.perf_counter_ns()
    torch.cuda.synchronize()
    return (returned - begin) / 1e3, (time.perf_counter_ns() - begin) / 1e3


def measure(row: Row, count: int) -> dict[str, Times]:
    """The times of each contestant of a row."""
    times: dict[str, Times] = {}
    lengths = draw_lengths(row, count + WARM)
    for number, length in enumerate([*lengths, *lengths[WARM:]]):
        for name, call in row.prepare(length).items():
            kept = times.setdefault(name, Times())
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            host, total = timed(call)
            kept.mebibytes = max(kept.mebibytes, (torch.cuda.max_memory_allocated() - before) / 2**20)
            if number >= len(lengths):
                kept.host_again.append(host)
                kept.total_again.append(total)
            elif number >= WARM:
                kept.host.append(host)
                kept.total.append(total)
    return times


def table(count: int, only: str) -> Iterator[str]:
    """A line of markdown for each contestant of each row."""
    yield "| a program | who | new length: host us | 20% to 80% | total us | again: host us | total us | MiB |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for row in ROWS:
        if only in row.name:
            for name, times in measure(row, count).items():
                low, *_, high = statistics.quantiles(times.host, n=5)
                medians = [statistics.median(each) for each in (times.total, times.host_again, times.total_again)]
                cells = [f"{statistics.median(times.host):,.0f}", f"{low:,.0f} to {high:,.0f}"]
                cells += [*(f"{median:,.0f}" for median in medians), f"{times.mebibytes:,.0f}"]
                yield f"| {row.name} | {name} | {' | '.join(cells)} |"


def main() -> None:
    """Prints the table, and keeps it where that is asked for."""
    parser = argparse.ArgumentParser(description="Times calls whose lengths never repeat.")
    parser.add_argument("--lengths", type=int, default=24, help="new lengths of each row")
    parser.add_argument("--row", default="", help="only rows whose name holds this")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    asked = parser.parse_args()
    card = nvidia.present()
    assert card is not None, "needs an NVIDIA GPU"
    print(f"# Lengths that never repeat, on an {card.full_name}\n")
    print(f"torch {torch.__version__}, triton {triton.__version__}: `python benchmarks/dynamic.py`\n")
    lines = []
    for line in table(asked.lengths, asked.row):
        print(line, flush=True)
        lines.append(line)
    if asked.write:
        keep(f"{card.name}_dynamic", "\n".join([f"# Lengths that never repeat, on an {card.full_name}", "", *lines]))


if __name__ == "__main__":
    main()
