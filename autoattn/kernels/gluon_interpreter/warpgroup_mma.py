"""Products of a warpgroup: exact sums of exact products, usable once somebody has waited for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoattn.errors import InterpretationError, SynchronizationError
from autoattn.kernels.gluon_interpreter import scheduler
from autoattn.kernels.gluon_interpreter.shared_memory import SharedMemory
from autoattn.kernels.gluon_interpreter.tensors import Product, Tensor


def warpgroup_mma(a: Tensor | SharedMemory, b: SharedMemory, acc: Tensor, *, use_acc: Any = True,
                  precision: object = None, max_num_imprecise_acc: object = None,
                  is_async: bool = False) -> Tensor:  # fmt: skip
    """acc + a x b in float32, each a group of its own; the factors are read until somebody waits."""
    partition = scheduler.current()
    if partition.warps % 4:
        raise SynchronizationError(f"{scheduler.here()} multiplies with {partition.warps} warps; a warpgroup has 4")
    if acc.shape[0] % (16 * partition.warps):
        raise SynchronizationError(
            f"{scheduler.here()} multiplies {acc.shape[0]} rows with {partition.warps} warps; each has 16 of them"
        )
    product = Product(
        event=partition.program.new_event(),
        words=f"the product of {scheduler.here()}",
        before=acc.product if use_acc else None,
    )
    factors = []
    for factor in (a, b):
        if isinstance(factor, SharedMemory):
            # Of a step that is not there a product may read anything: only its use is a fault.
            product.fault = factor.reads("multiplies", product=product, event=product.event) or product.fault
        if factor.dtype not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            raise InterpretationError(f"warpgroup_mma must have factors of 16 or 8 bits here, got {factor.dtype}")
        factors.append(factor.data.to(torch.float64))
    left, right = factors
    result = left @ right
    if result.shape != acc.under_way.shape:
        raise SynchronizationError(f"{scheduler.here()} adds {list(result.shape)} products to {acc.shape} sums")
    if use_acc:
        result += acc.under_way
    partition.products.append(product)
    token = Tensor(result.to(torch.float32), product=product)
    if not is_async:
        warpgroup_mma_wait(0, (token,))
    return token


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Tensor] = ()) -> Any:
    """wgmma.wait_group: until all but the last so many groups are done; gives `deps` as they are then."""
    partition = scheduler.current()
    done = max(len(partition.products) - int(num_outstanding), 0)
    for product in partition.products[:done]:
        product.done = True
        partition.knowledge.seen |= product.event
    partition.products = partition.products[done:]
    return deps[0] if len(deps) == 1 else tuple(deps)
