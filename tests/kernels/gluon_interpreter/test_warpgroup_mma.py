"""Products of the Gluon interpreter: exact sums, and results that are there once somebody has waited."""

from __future__ import annotations

import pytest
import torch
from gluon_texts import launch

from autoattn.errors import SynchronizationError

KERNEL = """
    @gluon.jit
    def kernel(source, sums_ptr):
        left = gl.allocate_shared_memory(gl.float16, [64, 16], source.layout)
        arrived = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(arrived, count=1)
        mbarrier.expect(arrived, source.block_type.nbytes)
        tma.async_copy_global_to_shared(source, [0, 0], arrived, left)
        mbarrier.wait(arrived, 0)
        zeros = gl.zeros([64, 64], gl.float32)
        first = warpgroup_mma(left, left.permute((1, 0)), zeros, use_acc=False, is_async=True)
        second = warpgroup_mma(left, left.permute((1, 0)), first, is_async=True)
        {wait}
        gl.store(sums_ptr + gl.arange(0, 4096).reshape([64, 64]), result)
"""


def multiplied(wait: str) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).half()
    sums = torch.zeros(64, 64)
    launch(KERNEL.format(wait=wait), source=source, sums_ptr=sums)
    return source.double() @ source.double().T, sums


def test_sums_are_rounded_once_a_product() -> None:
    exact, sums = multiplied("result = warpgroup_mma_wait(num_outstanding=0, deps=(second,))")
    assert torch.equal(sums, (exact.float().double() + exact).float())


def test_older_products_are_done_first() -> None:
    exact, sums = multiplied(
        "result = warpgroup_mma_wait(num_outstanding=1, deps=(first,)) * 1.0\n"
        "        warpgroup_mma_wait(num_outstanding=0, deps=(second,))"
    )
    assert torch.equal(sums, exact.float())
    with pytest.raises(SynchronizationError, match=r"the result of the product of kernel in line \d+ is used before"):
        multiplied("result = warpgroup_mma_wait(num_outstanding=1, deps=(second,))")
