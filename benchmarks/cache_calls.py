"""The calls that benchmarks/decode.py times: their rows and tensors, who runs them, and what a right answer is."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import autoattn
from autoattn.core.sequence_lengths import KeyLengths

DEVICE = torch.device("cuda")
BACKENDS = {"SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA, flash": SDPBackend.FLASH_ATTENTION}
OWN, ONE_LEVEL = "autoattn", "autoattn, one level"
KEY_SCALE = 0.5  # of float8 keys; their values have 1, since FlashInfer multiplies by another in a kernel of its own
# The error of an answer is the largest distance of one of its vectors from float32's, as a part of the latter's norm.
# Weights and outputs rounded to bfloat16 make 0.003 of the rows' random numbers, at all lengths. Weights in float8 make
# 0.03, and 64 keys of 131,072 left out 0.014.
ALLOWED = 1e-2
ROOM = 2**28  # bytes of FlashInfer's partial results
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of call, and its goal on an H200."""

    batch: int
    heads: tuple[int, int]  # of queries, and of keys and values
    keys: int  # of a sequence, the most of them
    page: int = 0  # keys of a page; 0: contiguous
    queries: int = 1  # of a sequence
    float8: bool = False  # the cache
    lengths: str = ""  # of unequal sequences, as in a shapes file
    prefix: int = 0  # keys that all sequences share
    latent: bool = False  # values are the first elements of keys
    goal: str

    def __str__(self) -> str:
        cache = f"pages of {self.page}" if self.page else "contiguous"
        dims = f"D{HEAD_DIM}" if not self.latent else "D{}/{}".format(*LATENT)
        text = f"B{self.batch} H{self.heads[0]}/{self.heads[1]} {self.queries}x{self.keys} {dims}, {cache}"
        text += ", latent" * self.latent + ", float8" * self.float8 + (f", {self.lengths}" if self.lengths else "")
        return text + (f", {self.prefix} shared" if self.prefix else "")

    @property
    def even(self) -> bool:
        """Whether peers without lengths can run it: one length, and no mask."""
        return not self.lengths and self.queries == 1

    @property
    def head_dim(self) -> int:
        """Elements of a query and of a key."""
        return LATENT[0] if self.latent else HEAD_DIM

    @property
    def head_dim_v(self) -> int:
        """Elements of a value."""
        return LATENT[1] if self.latent else HEAD_DIM

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by, as these are stored."""
        return self.head_dim**-0.5 * (KEY_SCALE if self.float8 else 1.0)

    def keys_of_each(self) -> tuple[int, ...]:
        """The lengths of the sequences."""
        return KeyLengths.parse(self.lengths).drawn(self.batch) if self.lengths else (self.keys,) * self.batch

    def bytes(self) -> int:
        """That a call must read and write."""
        keys = sum(self.keys_of_each()) - (self.batch - 1) * self.prefix
        elements = self.head_dim if self.latent else self.head_dim + self.head_dim_v
        cached = keys * self.heads[1] * elements * (1 if self.float8 else 2)
        return cached + self.batch * self.queries * self.heads[0] * (self.head_dim + self.head_dim_v) * 2


HEAD_DIM = 128
LATENT = 576, 512  # elements of a key and of a value of multi-head latent attention
LLAMA = Row(batch=32, heads=(32, 8), keys=4096, goal="96%")
DEEPSEEK = Row(batch=32, heads=(16, 1), keys=8192, page=64, latent=True, goal="85%")
ROWS = (
    replace(LLAMA, page=16, goal="95%"),
    LLAMA,
    replace(LLAMA, page=1, goal="85%"),
    replace(LLAMA, page=64),
    replace(LLAMA, page=256),
    Row(batch=1, heads=(32, 8), keys=131072, page=16, goal="92%"),
    Row(batch=1, heads=(32, 8), keys=131072, goal="92%"),
    Row(batch=1, heads=(32, 4), keys=262144, page=16, float8=True, goal="2.6 TB/s"),
    Row(batch=1, heads=(32, 8), keys=1024, page=16, goal="6.5 us"),
    Row(batch=1, heads=(32, 8), keys=1024, goal="6.5 us"),
    Row(batch=64, heads=(32, 4), keys=512, page=16, goal="75%"),
    Row(batch=64, heads=(32, 8), keys=100_000, page=16, lengths="100000,uniform:100-4000", goal="90%"),
    replace(LLAMA, page=16, queries=4, goal="1.15 times 1 query"),
    replace(LLAMA, page=16, queries=8, goal="1.15 times 1 query"),
    replace(LLAMA, page=16, float8=True, goal="none"),
    Row(batch=8, heads=(32, 8), keys=8192, page=16, prefix=7680, goal="faster than one level"),
    Row(batch=64, heads=(32, 8), keys=8192, page=16, prefix=7680, goal="faster than one level"),
    DEEPSEEK,
    replace(DEEPSEEK, float8=True, goal="none"),
    replace(DEEPSEEK, queries=2, goal="none"),
    replace(DEEPSEEK, batch=1, heads=(128, 1), keys=65536, goal="none"),
    replace(DEEPSEEK, keys=16_000, lengths="uniform:1000-16000", goal="none"),
    replace(DEEPSEEK, keys=100_000, lengths="100000,uniform:1000-16000", goal="none"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """One cache and the queries of a call on it."""

    query: Tensor  # [batch, queries, heads_q, head_dim]
    key: Tensor  # [batch, keys, heads_kv, head_dim] or [pages, page, heads_kv, head_dim]
    value: Tensor  # the same with head_dim_v; of a latent, the first elements of the key
    lengths: Tensor  # [batch] int32
    table: Tensor | None  # [batch, pages of a sequence] int32

    @classmethod
    def of(cls, row: Row) -> Tensors:
        """Random numbers on the card; pages lie in random order, and only those that a sequence has."""
        normal = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        query = normal(row.batch, row.queries, row.heads[0], row.head_dim)
        counts, table = row.keys_of_each(), None
        shape = row.batch, row.keys
        if row.page:
            pages = [-(-count // row.page) for count in counts]
            places = torch.randperm(sum(pages), device=DEVICE).int().split(pages)
            table = torch.nn.utils.rnn.pad_sequence(list(places), batch_first=True).contiguous()
            table[:, : row.prefix // row.page] = table[0, : row.prefix // row.page]
            shape = sum(pages), row.page
        stored = torch.float8_e4m3fn if row.float8 else torch.bfloat16
        key = normal(*shape, row.heads[1], row.head_dim).to(stored)
        value = key if row.latent else normal(*shape, row.heads[1], row.head_dim_v).to(stored)
        lengths = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
        return cls(query=query, key=key, value=value[..., : row.head_dim_v], lengths=lengths, table=table)


def own(row: Row, tensors: Tensors) -> Call:
    """autoattn's call."""
    scales = {}
    if row.float8:
        numbers = {"key_scale": KEY_SCALE, "value_scale": 1.0}
        scales = {name: torch.tensor(number, device=DEVICE) for name, number in numbers.items()}
    return partial(
        autoattn.cached_attention, tensors.query, tensors.key, tensors.value, tensors.lengths,
        block_table=tensors.table, causal=True, shared_prefix=row.prefix, **scales,
    )  # fmt: skip


def by_sdpa(backend: SDPBackend, tensors: Tensors) -> Call:
    """One of SDPA's backends, on a contiguous cache that is full."""
    three = [tensor.transpose(1, 2) for tensor in (tensors.query, tensors.key, tensors.value)]

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*three, enable_gqa=True)

    return attend


@lru_cache(maxsize=1)
def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def by_flex(tensors: Tensors) -> Call:
    """FlexAttention's kernel for decoding, on a contiguous cache that is full."""
    three = [tensor.transpose(1, 2) for tensor in (tensors.query, tensors.key, tensors.value)]
    return partial(_flex(), *three, enable_gqa=True)


@lru_cache(maxsize=1)
def _room() -> Tensor:
    """Of all of FlashInfer's wrappers, which run one behind the other; plans lie in room of their own."""
    return torch.empty(ROOM, dtype=torch.uint8, device=DEVICE)


def by_flashinfer(row: Row, tensor_cores: bool, tensors: Tensors) -> Call:
    """FlashInfer's decode on pages, planned before; its two kernels multiply with tensor cores and without."""
    import flashinfer

    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_room(), "NHD", use_tensor_cores=tensor_cores)
    indptr, indices = pages_of(row, tensors)
    last = ((tensors.lengths - 1) % row.page + 1).int()
    wrapper.plan(
        indptr, indices, last, *row.heads, row.head_dim, row.page,
        q_data_type=tensors.query.dtype, kv_data_type=tensors.key.dtype, sm_scale=row.scale,
    )  # fmt: skip
    return partial(wrapper.run, tensors.query[:, 0], (tensors.key, tensors.value))


def by_flashinfer_latent(row: Row, tensors: Tensors) -> Call:
    """FlashInfer's multi-head latent attention on pages, planned before."""
    import flashinfer

    wrapper: Any = flashinfer.mla.BatchMLAPagedAttentionWrapper(_room())
    indptr, indices = pages_of(row, tensors)
    queries = torch.arange(row.batch + 1, device=DEVICE, dtype=torch.int32)
    rest = row.head_dim - row.head_dim_v
    wrapper.plan(
        queries, indptr, indices, tensors.lengths, row.heads[0], row.head_dim_v, rest, row.page, False,
        row.scale, tensors.query.dtype, tensors.key.dtype,
    )  # fmt: skip
    halves = [tensor.split([row.head_dim_v, rest], dim=-1) for tensor in (tensors.query[:, 0], tensors.key[:, :, 0])]
    return partial(wrapper.run, *halves[0], *halves[1])


def pages_of(row: Row, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Where the pages of each sequence begin in a list of all, and the list."""
    assert tensors.table is not None
    pages = -(-tensors.lengths.cpu() // row.page)
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    indices = torch.cat([line[:count] for line, count in zip(tensors.table, pages.tolist(), strict=True)])
    return indptr.to(DEVICE), indices


def contestants(row: Row) -> dict[str, Callable[[Tensors], Call]]:
    """What makes the call of each contestant that may take the row."""
    makers: dict[str, Callable[[Tensors], Call]] = {OWN: partial(own, row)}
    if row.prefix:
        return makers | {ONE_LEVEL: partial(own, replace(row, prefix=0))}
    if row.even and not row.page and not row.float8:
        makers |= {name: partial(by_sdpa, backend) for name, backend in BACKENDS.items()}
        makers["FlexAttention"] = by_flex
    if row.page and row.queries == 1 and importlib.util.find_spec("flashinfer") is not None:
        if row.latent:
            makers["FlashInfer"] = partial(by_flashinfer_latent, row)
        else:
            makers["FlashInfer"] = partial(by_flashinfer, row, True)
            makers["FlashInfer, CUDA cores"] = partial(by_flashinfer, row, False)
    return makers


def expected(row: Row, tensors: Tensors) -> Tensor:
    """[batch, queries, heads_q, head_dim_v] in float32, from the keys and values of one sequence after the other."""
    outputs = []
    for number, length in enumerate(row.keys_of_each()):
        places = [number] if tensors.table is None else tensors.table[number, : -(-length // row.page)].long()
        # [length, heads_kv, head_dim] and [length, heads_kv, head_dim_v]
        key, value = (cached[places].flatten(0, 1)[:length].float() for cached in (tensors.key, tensors.value))
        # [queries, heads_kv, group, head_dim]
        query = tensors.query[number].float().unflatten(1, (row.heads[1], -1))
        # [queries, heads_kv, group, length]; the last query sees all keys, one before it one key less
        scores = torch.einsum("qhgd,khd->qhgk", query, key) * row.scale
        seen = torch.ones(row.queries, length, dtype=torch.bool, device=key.device).tril(length - row.queries)
        weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
        outputs.append(torch.einsum("qhgk,khd->qhgd", weights, value).flatten(1, 2))
    return torch.stack(outputs)


def error_of(output: Tensor, right: Tensor) -> float:
    """The error of an answer, of which ALLOWED is allowed; infinite where a number is not finite.

    Args:
        output: the numbers of `right` in its order; contestants of one query leave out its axis, or have it elsewhere.
        right: [batch, queries, heads_q, head_dim_v] float32
    """
    distance = (output.reshape(right.shape).float() - right).norm(dim=-1)
    error = float((distance / right.norm(dim=-1)).max())
    return error if math.isfinite(error) else math.inf
