"""Drawn calls of `context_attention` on ranks of a gloo group, compared with one process's call in float64."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoattn
from autoattn import distributed
from autoattn.distributed import merging, shards
from autoattn.distributed.sharding import Sharding
from autoattn.errors import TensorError, UsageError
from autoattn.runtime import merging_call

METHODS = ("ring", "allgather", "ulysses", "auto")
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCall:
    """One call over ranks; tensors follow from the seed."""

    seed: int
    method: str
    sharding: str
    heads: tuple[int, int]  # of queries and of keys
    layout: str = "bhsd"
    batch: int = 1
    tokens: int = 0
    documents: tuple[int, ...] | None = None  # lengths; None where sequences are not packed
    causal: bool = True
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    lse_gradient: bool = False

    @classmethod
    def draw(cls, seed: int, ranks: int) -> ContextCall:
        """A call that its method takes; neighbouring seeds have each method and each sharding in turn."""
        rng = random.Random(f"{seed} on {ranks}")
        method, sharding = METHODS[seed % 4], tuple(Sharding)[seed // 4 % 3].value
        heads_kv = rng.choice([1, ranks]) if method == "ulysses" else rng.choice([1, 2])
        shared = ranks if method == "ulysses" else heads_kv
        causal, window = rng.random() < 0.7, rng.choice([None, None, (rng.choice([0, 2, 5]), rng.choice([0, 3]))])
        ends = causal or (window is not None and window[1] == 0)
        takes_slopes = method == "ulysses" or (method != "ring" and sharding != "stripe" and ends)
        documents = tuple(rng.randint(0, 20) for _ in range(rng.randint(1, 4))) if rng.random() < 0.5 else None
        return cls(
            seed=seed,
            method=method,
            sharding=sharding,
            heads=(shared * rng.choice([1, 2]), heads_kv),
            layout=rng.choice(["bhsd", "bshd"]),
            batch=rng.choice([1, 2]),
            tokens=rng.randint(1, 40),
            documents=documents if documents is None or any(documents) else (5, 0, 9),
            causal=causal,
            window=window,
            softcap=rng.choice([0.0, 2.0]),
            sinks=rng.random() < 0.5,
            alibi=takes_slopes and rng.random() < 0.5,
            lse_gradient=rng.random() < 0.5,
        )

    @property
    def axis(self) -> int:
        """Of the tokens."""
        return 0 if self.documents is not None else 2 if self.layout == "bhsd" else 1

    @property
    def divided(self) -> dict[str, Any]:
        """What `shard` takes beside the sharding."""
        return {} if self.documents is None else {"cu_seqlens": list(accumulate([0, *self.documents]))}

    def tensors(self) -> dict[str, Tensor]:
        """Query, key and value of all tokens; sinks and slopes where there are some."""
        generator = torch.Generator().manual_seed(self.seed)
        heads_q, heads_kv = self.heads

        def normal(heads: int, head_dim: int) -> Tensor:
            if self.documents is not None:
                shape: tuple[int, ...] = (sum(self.documents), heads, head_dim)
            elif self.layout == "bhsd":
                shape = (self.batch, heads, self.tokens, head_dim)
            else:
                shape = (self.batch, self.tokens, heads, head_dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        named = {"query": normal(heads_q, 8), "key": normal(heads_kv, 8), "value": normal(heads_kv, 12)}
        if self.sinks:
            named["sinks"] = torch.randn(heads_q, generator=generator, dtype=torch.float64)
        if self.alibi:
            named["alibi_slopes"] = torch.rand(heads_q, generator=generator, dtype=torch.float64)
        return named

    @property
    def words(self) -> dict[str, Any]:
        """Arguments that are no tensors."""
        packed = self.documents is not None
        words = {"causal": self.causal, "window": self.window, "softcap": self.softcap, "scale": 0.4}
        return words | {"return_lse": True} | ({} if packed else {"layout": self.layout})

    def whole(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Output and LSE of one process."""
        if self.documents is None:
            return autoattn.attention(**tensors, **self.words)
        offsets = torch.tensor(self.divided["cu_seqlens"], dtype=torch.int32)
        total = int(offsets[-1])
        return autoattn.packed_attention(
            **tensors,
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=total,
            max_seqlen_kv=total,
            **self.words,
        )

    def faults(self, group: dist.ProcessGroup) -> list[str]:
        """What of this rank's output, LSE and gradients differs from one process's."""
        tensors = self.tensors()
        output, lse, gradients = self._differentiated(tensors, self.whole, lambda tensor, axis: tensor)

        def own(tensor: Tensor, axis: int) -> Tensor:
            return distributed.shard(tensor, axis, group, self.sharding, **self.divided)

        local = {name: own(tensor, self.axis) if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}

        def attend(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            divided = self.divided or {"seq_len": self.tokens}
            return distributed.context_attention(
                **given, **divided, **self.words, group=group, method=self.method, sharding=self.sharding
            )

        own_output, own_lse, own_gradients = self._differentiated(local, attend, own)
        pairs = {"output": (own_output, own(output, self.axis)), "lse": (own_lse, own(lse, -1))}
        for name, gradient in own_gradients.items():
            if gradient.dim() > 1:
                pairs[name] = gradient, own(gradients[name], self.axis)
            else:  # ranks have shares of it
                dist.all_reduce(gradient, group=group)
                pairs[name] = gradient, gradients[name]
        return [
            f"{name} of {self}"
            for name, (actual, expected) in pairs.items()
            if not torch.allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
        ]

    def _differentiated(self, tensors: dict[str, Tensor], attend: Any, own: Any) -> Any:
        """Output, LSE, and gradients by name for weights that are random functions of the place."""
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
        output, lse = attend(leaves)
        axis, last = self.axis, lse.dim() - 1
        weights = [_weights(self._sizes(each, at), self.seed) for each, at in ((output, axis), (lse, last))]
        loss = (output * own(weights[0], axis)).sum()
        if self.lse_gradient:
            loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * own(weights[1], last)).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return output.detach(), lse.detach(), {n: g.clone() for n, g in zip(leaves, gradients, strict=True)}

    def _sizes(self, tensor: Tensor, axis: int) -> tuple[int, ...]:
        """Of such a tensor of all tokens."""
        sizes = list(tensor.shape)
        sizes[axis] = self.tokens if self.documents is None else sum(self.documents)
        return tuple(sizes)


def _weights(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)


def faults(group: dist.ProcessGroup, calls: list[ContextCall]) -> list[str]:
    """What is wrong on this rank of calls over the group."""
    return [fault for call in calls for fault in call.faults(group)]


def faults_of_merging_kernels(group: dist.ProcessGroup, calls: list[ContextCall]) -> tuple[list[str], int]:
    """The same where calls are merged as kernels do it, and how many were."""
    merges = 0

    def attend(tensors: Any, words: dict[str, Any], output: Tensor, lse: Tensor) -> bool:
        nonlocal merges
        merges += 1
        part_output, sums = torch.ops.autoattn.attention(*tensors, **words | {"return_lse": True})
        seen = (sums != -torch.inf).transpose(-1, -2)[..., None]
        before = output.clone()
        merging.merge(output, lse, part_output, sums)
        output.copy_(torch.where(seen, output, before))
        return True

    with mock.patch.object(merging_call, "attend", attend):
        return faults(group, calls), merges


# --- What a rank refuses ----------------------------------------------------------------------------------------------


def refusal(group: dist.ProcessGroup, shapes: dict[int, tuple[int, ...]], words: dict[str, Any]) -> str:
    """The error of a call of random tensors, with its class; "" where there is none.

    Args:
        shapes: of query, key and value alike on each rank.
    """
    tensors = [torch.randn(shapes[dist.get_rank(group)]) for _ in range(3)]
    slopes = {"of heads": torch.ones(2), "of documents and heads": torch.ones(2, 2)}
    words = {name: slopes[given] if name == "alibi_slopes" else given for name, given in words.items()}
    try:
        distributed.context_attention(*tensors, **{"group": group, **words})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def readings(group: dist.ProcessGroup, calls: list[dict[str, Any]]) -> list[int]:
    """How often it is reckoned how each call's tokens are divided, one after another; each is of other numbers."""
    counts = []
    for words in calls:
        query, key, value = torch.randn(3, 1, 2, 4, 8)
        whole = [distributed.unshard(tensor, 2, group) for tensor in (query, key, value)]
        with mock.patch.object(shards, "split_of", wraps=shards.split_of) as split_of:
            output = distributed.context_attention(query, key, value, group=group, method="ring", **words)
            counts.append(split_of.call_count)
        expected = autoattn.attention(*whole, **words)
        torch.testing.assert_close(output, distributed.shard(expected, 2, group))
    return counts


def plain(group: dist.ProcessGroup) -> bool:
    """Whether a group of one rank gives the plain call's bits, packed and not."""
    query, key, value = torch.randn(3, 1, 2, 9, 8)
    dense = distributed.context_attention(query, key, value, group=group, causal=True)
    packed = distributed.context_attention(
        *(each[0].transpose(0, 1) for each in (query, key, value)),
        group=group,
        cu_seqlens=[0, 4, 9],
        causal=True,
        method="ulysses",
    )
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    alone = autoattn.packed_attention(
        *(each[0].transpose(0, 1) for each in (query, key, value)), offsets, offsets, 5, 5, causal=True
    )
    return torch.equal(dense, autoattn.attention(query, key, value, causal=True)) and torch.equal(packed, alone)


def divided(group: dist.ProcessGroup) -> list[str]:
    """What is wrong of tensors that are divided and put together again."""
    wrong = []
    for sharding in Sharding:
        for words, length in (({}, 13), ({"cu_seqlens": [0, 5, 5, 13]}, 13), ({}, 1), ({}, 0)):
            whole = torch.arange(2.0 * length).view(2, length).requires_grad_()
            part = distributed.shard(whole, 1, group, sharding, **words)
            again = distributed.unshard(part, -1, group, sharding, **words)
            positions = distributed.position_ids(length, group, sharding, **words)
            begins = 0 if not words else 5 * (part[0].long() >= 5)
            (gradient,) = torch.autograd.grad((again * again.detach()).sum(), whole)
            expected = torch.zeros_like(whole).index_fill(1, part[0].long(), float(dist.get_world_size(group)))
            right = torch.equal(again, whole) and torch.equal(positions, part[0].long() - begins)
            if not right or not torch.equal(gradient, expected * whole):
                wrong.append(f"{sharding.value} of {length} tokens with {words}")
    return wrong


def by_mesh(group: dist.ProcessGroup) -> str:
    """The error of a mesh with two axes, where one of a single axis gives what the group gives."""
    size = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "context"))
    query, key, value = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank(group)))
    inner = mesh["context"]
    outputs = [distributed.context_attention(query, key, value, group=each) for each in (inner, inner.get_group())]
    assert torch.equal(*outputs)
    try:
        distributed.context_attention(query, key, value, group=mesh)
    except UsageError as error:
        return str(error)
    return ""


def after_a_death(group: dist.ProcessGroup, dies: int) -> str:
    """The error of a call that was made before, after a rank has ended."""
    assert refusal(group, dict.fromkeys(range(2), (1, 1, 2, 4)), {}) == ""
    if dist.get_rank(group) == dies:
        os._exit(1)
    return refusal(group, dict.fromkeys(range(2), (1, 1, 2, 4)), {})


def of_dtensors(group: dist.ProcessGroup) -> str:
    """The error of tensors that know how they are divided."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group, "cpu")
    tensor = DTensor.from_local(torch.ones(1, 2, 4, 8), mesh, [Shard(2)])
    try:
        distributed.context_attention(tensor, tensor, tensor, group=group)
    except TensorError as error:
        return str(error)
    return ""


def by_pytorchs_ring(group: dist.ProcessGroup) -> float:
    """The largest difference of PyTorch's ring over autoattn's operator to one process's call."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    whole = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0))

    def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, ...]:
        mask = "causal" if is_causal else "full"
        return torch.ops.autoattn.attention(query, key, value, mask=mask, return_lse=True)

    query, key, value = (distributed.shard(tensor, 2, group) for tensor in whole)
    output, *_ = _attention._templated_ring_attention(group, 2, attend, query, key, value, is_causal=True)
    expected = distributed.shard(autoattn.attention(*whole, causal=True), 2, group)
    return (output - expected).abs().max().item()


def execute(group: dist.ProcessGroup, texts: list[str]) -> list[str]:
    """Runs Python texts one after the other on all ranks; the names that they leave."""
    names: dict[str, Any] = {}
    for text in texts:
        exec(text, names)
    return sorted(names)
