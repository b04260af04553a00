"""The kernel that appends to a cache, in Triton's interpreter: compared with the formula bit for bit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from interpreted import CPU, SECONDS

from autoattn.codegen import render
from autoattn.core.kernel_kind import AppendKind
from autoattn.core.problem import DType
from autoattn.kernels import append, compiler
from autoattn.reference import append_formula
from autoattn.tensors.appended import Append, Rotation
from autoattn.tensors.operands import CachedKeys
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.interpreter

CAPACITY = 36
LENGTHS = (0, 7, 33, -1)  # the third sequence has no room for all new keys, and the last none for its first one
LIES = (2**31 - 1, CAPACITY + 1, 10**6, -5)  # with a new key more, the first one is no number of 32 bits
HEADS_Q, HEADS_KV = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Appending:
    """One append by the kernel and by the formula, in the child."""

    page: int = 0
    rows: bool = False
    rotary_dim: int = 0
    interleaved: bool = False
    moving: bool = False
    dtype: torch.dtype = torch.float16
    tables: torch.dtype = torch.float16
    head_dim: int = 24
    head_dim_v: int = 16
    seq_new: int = 5
    seq_q: int = 3
    float8: bool = False
    latent: bool = False
    lengths: tuple[int, ...] = LENGTHS

    def given(self) -> Append:
        """Random tensors, the same at each call."""
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            """A [batch, heads, seq, head_dim] view of [batch, seq, heads, head_dim]."""
            return torch.randn(shape, generator=generator).to(self.dtype).transpose(1, 2)

        def stored(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(torch.float8_e4m3fn) if self.float8 else tensor

        batch = len(self.lengths)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        pages = rows = rotation = None
        count, page = batch, CAPACITY
        if self.page:
            page, columns = self.page, CAPACITY // self.page
            count = batch * columns + 2
            pages = torch.randperm(count, generator=generator)[: batch * columns].view(batch, columns).int()
        elif self.rows:
            count, rows = batch + 2, torch.tensor([4, 1, 2, 0], dtype=torch.int32)
        if self.rotary_dim:
            cos, sin = torch.randn(2, CAPACITY + 4, self.rotary_dim // 2, generator=generator).to(self.tables)
            query = normal(batch, self.seq_q, HEADS_Q, self.head_dim)
            rotation = Rotation(query=query, cos=cos, sin=sin, interleaved=self.interleaved, moving=self.moving)
        new_key = normal(batch, self.seq_new, HEADS_KV, self.head_dim)
        new_value = normal(batch, self.seq_new, HEADS_KV, self.head_dim_v)
        key = stored(normal(count, page, HEADS_KV, self.head_dim))
        value = stored(normal(count, page, HEADS_KV, self.head_dim_v))
        if self.latent:
            new_value, value = new_key[..., : self.head_dim_v], key[..., : self.head_dim_v]
        return Append(
            new_key=new_key,
            new_value=new_value,
            key=key,
            value=value,
            latent=self.latent,
            cache=CachedKeys(lengths=lengths, capacity=CAPACITY, pages=pages, rows=rows),
            # So small that some of the new numbers are more than float8 holds
            key_scale=torch.tensor([0.003, 1.7]).expand(batch, 2) if self.float8 else None,
            value_scale=torch.rand(batch, 2, generator=generator) if self.float8 else None,
            rotation=rotation,
        )

    def run(self, memory: dict[Hashable, Any]) -> dict[str, bool]:
        """What agrees, and whether anything was written."""
        torch.set_num_threads(1)
        before, by_formula, by_kernel = self.given(), self.given(), self.given()
        query, total = append_formula.append(by_formula)
        kernel = compiler.load(render.append_source(append.kind_of(by_kernel)), CPU)
        kernel_query, kernel_total = append.launch(kernel, by_kernel)
        same_query = query is None and kernel_query is None
        if query is not None and kernel_query is not None:
            same_query = torch.equal(query, kernel_query)
        return {
            "key": torch.equal(by_formula.key.float(), by_kernel.key.float()),
            "value": torch.equal(by_formula.value.float(), by_kernel.value.float()),
            "query": same_query,
            "lengths": torch.equal(total, kernel_total),
            "written": not torch.equal(before.key.float(), by_kernel.key.float()),
        }


@pytest.mark.parametrize(
    "appending",
    [
        Appending(),
        Appending(rows=True, rotary_dim=16, interleaved=True, moving=True),
        Appending(page=4, rotary_dim=24),
        Appending(page=1, rotary_dim=8, interleaved=True, dtype=torch.float32, tables=torch.float32),
        Appending(page=3, rotary_dim=16, moving=True, tables=torch.float32, seq_new=1, seq_q=1),
        Appending(page=36, head_dim=64, head_dim_v=80, seq_new=9),
        Appending(page=4, rotary_dim=16, float8=True),
        Appending(page=4, latent=True),
        Appending(rows=True, latent=True, float8=True),
    ],
    ids=str,
)
def test_the_kernel_writes_what_the_formula_writes(child: Pool, appending: Appending) -> None:
    outcome = child.result(appending, SECONDS)
    assert not isinstance(outcome, Failure), f"{outcome.outcome.value}: {outcome.detail}"
    assert all(outcome.values()), outcome


@pytest.mark.parametrize("page", [0, 4])
def test_lengths_that_lie_read_no_table_and_write_no_key_outside(child: Pool, page: int) -> None:
    outcome = child.result(Appending(page=page, rotary_dim=16, moving=True, lengths=LIES), SECONDS)
    assert not isinstance(outcome, Failure), f"{outcome.outcome.value}: {outcome.detail}"
    assert outcome == {"key": True, "value": True, "query": True, "lengths": True, "written": False}


def test_a_length_of_minus_one_leaves_out_the_first_new_key() -> None:
    before, given = Appending(page=4, seq_new=1).given(), Appending(page=4, seq_new=1).given()
    assert given.cache.pages is not None
    given.cache.pages[-1] = -1  # as engines fill the rows of sequences that are not there
    _, total = append_formula.append(given)
    assert total.tolist() == [1, 8, 34, 0]
    assert (given.key != before.key).flatten(1).any(1).sum() == 3  # pages


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_is_a_product_of_complex_numbers(interleaved: bool) -> None:
    given = Appending(rotary_dim=16, interleaved=interleaved, dtype=torch.float32, tables=torch.float32).given()
    assert given.rotation is not None
    angles = torch.randn(1, 40, 8)
    given.rotation.cos.copy_(angles[0].cos())
    given.rotation.sin.copy_(angles[0].sin())
    positions = torch.tensor([[0, 3, 39]])
    key = given.new_key[:1, :, :3]
    rotated = append_formula.rotated(key, positions, given.rotation)
    pairs = key[..., :16].unflatten(-1, (8, 2) if interleaved else (2, 8))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(3, 8), angles[0, positions[0]])
    )
    turned = turned if interleaved else turned.transpose(-1, -2)
    torch.testing.assert_close(rotated[..., :16], turned.flatten(-2))
    assert torch.equal(rotated[..., 16:], key[..., 16:])


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernel_compiles(arch: int) -> None:
    for kind in (
        AppendKind(dtype=DType.BFLOAT16, head_dim=128, head_dim_v=128),
        AppendKind(
            dtype=DType.FLOAT16, head_dim=80, head_dim_v=64, page=16, rotary_dim=32, interleaved=True, wide=True
        ),
        AppendKind(dtype=DType.FLOAT32, head_dim=64, head_dim_v=64, rows=True, rotary_dim=64),
        AppendKind(dtype=DType.BFLOAT16, head_dim=576, head_dim_v=512, page=64, latent=True),
        *[AppendKind(dtype=DType.BFLOAT16, head_dim=128, head_dim_v=128, page=16, float8=True)] * (arch >= 89),
        *[AppendKind(dtype=DType.BFLOAT16, head_dim=576, head_dim_v=512, page=64, float8=True, latent=True)]
        * (arch >= 89),
    ):
        assert compiler.build(render.append_source(kind), arch).asm["cubin"]
