"""Measures calls whose lengths never repeat, beside PyTorch's attention and FlashAttention, on the GPU that is here.

python benchmarks/dynamic.py [--lengths 64] [--row TEXT] [--write]

The lengths of a row differ from call to call: they grow, or they are drawn. A call is timed twice: by the host's clock
from the call to its return, and to the end of what it launched. Kernels are compiled before, by calls of other lengths.
Then the same lengths come again, in the same order. A training row is a step: both passes, and the memory of one beside
its inputs.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import triton
from kept import keep, printed

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
    lengths: tuple[int, int]  # the shortest, and one more than the longest
    step: int = 0  # between one length and the next; 0 where they are drawn
    contestants: Callable[[], dict[str, Callable[[int], Call]]]  # allocates what lasts -> a length -> the call of each


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


def flash_attention() -> tuple[str, Attend, Attend] | None:
    """The newest FlashAttention that is installed: its name, and its functions of dense and of packed tensors."""
    for name, module in (("FlashAttention-4", "flash_attn.cute"), ("FlashAttention", "flash_attn")):
        try:
            functions = importlib.import_module(module)
        except ImportError:
            continue
        return name, functions.flash_attn_func, functions.flash_attn_varlen_func
    return None


def first(answer: object) -> object:
    """The output of a function that may give the LSE too."""
    return answer[0] if isinstance(answer, tuple) else answer


def decode(batch: int, heads: int, heads_kv: int, head_dim: int) -> dict[str, Callable[[int], Call]]:
    """One query a sequence on a view of a key and value cache."""
    caches = [tensor(batch, heads_kv, 4096, head_dim) for _ in range(2)]
    query = tensor(batch, heads, 1, head_dim)

    def on(attend: Attend) -> Callable[[int], Call]:
        return lambda length: partial(attend, query, *(cache[:, :, :length] for cache in caches))

    contestants = {
        "autoattn": on(autoattn.attention),
        "torch SDPA": on(partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=heads != heads_kv)),
    }
    if (flash := flash_attention()) is not None:
        name, attend, _ = flash
        contestants[name] = on(lambda *given: attend(*(each.transpose(1, 2) for each in given)))
    return contestants


def chunked_prefill() -> dict[str, Callable[[int], Call]]:
    """512 queries at the end of so many keys."""
    query, caches = tensor(1, 32, 512, 128), [tensor(1, 8, 40960, 128) for _ in range(2)]

    def on(attend: Attend) -> Callable[[int], Call]:
        return lambda length: partial(attend, query, *(cache[:, :, :length] for cache in caches))

    contestants = {"autoattn": on(partial(autoattn.attention, causal="bottom-right"))}
    if (flash := flash_attention()) is not None:
        name, attend, _ = flash
        contestants[name] = on(lambda *given: attend(*(each.transpose(1, 2) for each in given), causal=True))
    return contestants


def ragged(*, learns: bool) -> dict[str, Callable[[int], Call]]:
    """Eight documents of drawn lengths in one packed batch; with gradients or without."""

    def on(attend: Callable[..., object]) -> Callable[[int], Call]:
        def prepare(longest: int) -> Call:
            draw = random.Random(longest)
            lengths = [longest, *(draw.randrange(longest // 4, longest) for _ in range(7))]
            offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
            inputs = [tensor(sum(lengths), heads, 128, learns=learns) for heads in (32, 8, 8)]
            return step(partial(attend, *inputs, offsets, offsets, longest, longest), inputs, learns)

        return prepare

    contestants = {"autoattn": on(partial(autoattn.packed_attention, causal=True))}
    if (flash := flash_attention()) is not None:
        name, _, varlen = flash

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *lengths: object) -> object:
            words = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=True))
            return first(varlen(query, key, value, causal=True, **words))

        contestants[name] = on(attend)
    return contestants


def trained(dtype: torch.dtype, batch: int, **changes: object) -> dict[str, Callable[[int], Call]]:
    """Both passes of 9 heads of 128."""

    def prepare(length: int) -> Call:
        inputs = [tensor(batch, 9, length, 128, dtype=dtype, learns=True) for _ in range(3)]
        return step(partial(autoattn.attention, *inputs, **changes), inputs, True)  # type: ignore[arg-type]

    return {"autoattn": prepare}


def biased(*, learns: bool) -> dict[str, Callable[[int], Call]]:
    """16 heads of 64 beside a bias of each head, which learns nothing; with gradients of the others or without."""

    def on(attend: Attend, name: str) -> Callable[[int], Call]:
        def prepare(length: int) -> Call:
            inputs = [tensor(2, 16, length, 64, learns=learns) for _ in range(3)]
            return step(partial(attend, *inputs, **{name: tensor(1, 16, length, length)}), inputs, learns)

        return prepare

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {"autoattn": on(autoattn.attention, "bias"), "torch SDPA": on(sdpa, "attn_mask")}


def step(attend: Call, inputs: list[torch.Tensor], learns: bool) -> Call:
    """A forward pass, and the backward pass where inputs learn."""
    if not learns:
        return attend
    push = tensor(*inputs[0].shape, dtype=inputs[0].dtype)  # the output is as large as the query
    return lambda: torch.autograd.grad(attend(), inputs, push)  # type: ignore[arg-type]


ROWS = (
    Row(
        name="decode B1 H32/8 D128, growing",
        lengths=(512, 4096), step=1, contestants=partial(decode, 1, 32, 8, 128),
    ),
    Row(
        name="decode B32 H32/8 D128, growing",
        lengths=(512, 4096), step=1, contestants=partial(decode, 32, 32, 8, 128),
    ),
    Row(
        name="decode B8 H16 D64, growing",
        lengths=(512, 4096), step=1, contestants=partial(decode, 8, 16, 16, 64),
    ),
    Row(name="decode B32 H32/8 D128, drawn lengths", lengths=(512, 4096), contestants=partial(decode, 32, 32, 8, 128)),
    Row(
        name="chunked prefill, 512 queries, H32/8 D128",
        lengths=(1024, 40960), step=512, contestants=chunked_prefill,
    ),
    Row(
        name="packed, 8 documents, H32/8 D128 causal",
        lengths=(512, 4096), contestants=partial(ragged, learns=False),
    ),
    Row(name="the same with gradients", lengths=(512, 4096), contestants=partial(ragged, learns=True)),
    Row(
        name="training fp16 B2 H9 D128 softcap",
        lengths=(768, 1024),
        contestants=partial(trained, torch.float16, 2, causal=True, softcap=30.0),
    ),
    Row(name="bias of heads, bf16 B2 H16 D64", lengths=(512, 2048), step=8, contestants=partial(biased, learns=False)),
    Row(
        name="training beside it", lengths=(512, 2048), step=8, contestants=partial(biased, learns=True),
    ),
    Row(
        name="training bf16 B1 H9 D128 window 1023",
        lengths=(3584, 4096),
        contestants=partial(trained, torch.bfloat16, 1, window=(1023, 0)),
    ),
)  # fmt: skip


def draw_lengths(row: Row, count: int) -> list[int]:
    """Lengths that differ, alike in each run."""
    draw = random.Random(row.name)
    if not row.step:
        return draw.sample(range(*row.lengths), count)
    starts = range(row.lengths[0], row.lengths[1] - (count - 1) * row.step)
    begin = starts[0] if row.step > 1 else draw.choice(starts)  # a prompt begins with its first chunk
    return [begin + place * row.step for place in range(count)]


def timed(call: Call) -> tuple[float, float]:
    """Microseconds until a call returns, and until what it launched is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    call()
    returned = time.perf_counter_ns()
    torch.cuda.synchronize()
    return (returned - begin) / 1e3, (time.perf_counter_ns() - begin) / 1e3


def measure(prepare: Callable[[int], Call], lengths: list[int]) -> Times:
    """The times of one contestant, alone on the machine as in a program that uses it: all lengths, then all again."""
    times = Times()
    for number, length in enumerate([*lengths, *lengths[WARM:]]):
        host, total = timed(prepare(length))
        if number >= len(lengths):
            times.host_again.append(host)
            times.total_again.append(total)
        elif number >= WARM:
            times.host.append(host)
            times.total.append(total)
    times.mebibytes = _memory_of(prepare(max(lengths)))
    return times


def _memory_of(call: Call) -> float:
    """MiB that a call takes beside its inputs; asked apart, since the question empties the CPU's caches."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def table(count: int, only: str) -> Iterator[str]:
    """A line of markdown for each contestant of each row."""
    columns = ("new length: host us", "20% to 80%", "total us", "again: host us", "20% to 80%", "total us", "MiB")
    yield f"| a program | who | {' | '.join(columns)} |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|"
    for row in ROWS:
        if only in row.name:
            for name, prepare in row.contestants().items():
                times = measure(prepare, draw_lengths(row, count + WARM))
                cells = [*_spread(times.host), f"{statistics.median(times.total):,.0f}"]
                cells += [*_spread(times.host_again), f"{statistics.median(times.total_again):,.0f}"]
                yield f"| {row.name} | {name} | {' | '.join(cells)} | {times.mebibytes:,.0f} |"


def _spread(samples: list[float]) -> tuple[str, str]:
    """The median, and between which three fifths lie."""
    low, *_, high = statistics.quantiles(samples, n=5)
    return f"{statistics.median(samples):,.0f}", f"{low:,.0f} to {high:,.0f}"


def main() -> None:
    """Prints the table, and keeps it where that is asked for."""
    parser = argparse.ArgumentParser(description="Times calls whose lengths never repeat.")
    parser.add_argument("--lengths", type=int, default=64, help="new lengths of each row")
    parser.add_argument("--row", default="", help="only rows whose name holds this")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    options = parser.parse_args()
    card = nvidia.present()
    assert card is not None, "needs an NVIDIA GPU"
    print(f"# Lengths that never repeat, on an {card.full_name}\n")
    print(f"torch {torch.__version__}, triton {triton.__version__}: `python benchmarks/dynamic.py`\n")
    lines = printed(table(options.lengths, options.row))
    if options.write:
        keep(f"{card.name}_dynamic", "\n".join([f"# Lengths that never repeat, on an {card.full_name}", "", *lines]))


if __name__ == "__main__":
    main()
