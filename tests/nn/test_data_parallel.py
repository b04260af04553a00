"""Training under DDP and FSDP, eager and compiled, in a group of one process on the CPU: gradients stay the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rarely import rarely
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoattn

pytestmark = pytest.mark.sampled

TOKENS = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tokens(torch.nn.Module):
    """Self-attention that takes and gives one tensor."""

    def __init__(self, attention: autoattn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens, need_weights=False)[0]


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        Tokens(autoattn.MultiheadAttention(32, 4, batch_first=True, num_kv_heads=2, causal=True)),
        Tokens(autoattn.MultiheadAttention(32, 4, batch_first=True, causal=True, window=(3, 0))),
    )


def gradients(module: torch.nn.Module) -> list[Tensor]:
    for parameter in module.parameters():
        parameter.grad = None
    module(TOKENS).sin().sum().backward()
    grads = [parameter.grad for parameter in module.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "compiled"),
    rarely([*itertools.product(["DDP", "FSDP"], [False, True])], lambda case: case in (("DDP", True), ("FSDP", False))),
)
def test_gradients_are_those_of_one_process(kind: str, compiled: bool) -> None:
    plain = model()
    expected = gradients(copy.deepcopy(plain))
    module: torch.nn.Module = DistributedDataParallel(plain) if kind == "DDP" else sharded(plain)
    if compiled:
        module = torch.compile(module, backend="aot_eager")
    for mine, other in zip(gradients(module), expected, strict=True):
        torch.testing.assert_close(mine, other)


def sharded(module: torch.nn.Sequential) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for part in (*module, module):
        fully_shard(part, mesh=mesh)
    return module
