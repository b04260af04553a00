"""What ranks measure together: calls of `autoattn tune --ranks`, rows of `autoattn bench ranks`, calls on cards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from context_calls import METHODS
from torch import Tensor

import autoattn
from autoattn import distributed
from autoattn.core.mask import Mask
from autoattn.core.problem import DType
from autoattn.core.rank_choice import RankCall
from autoattn.distributed.communication import ranks_of


def _rank_call(**changes: Any) -> RankCall:
    facts: dict[str, Any] = {"dtype": DType.FLOAT32, "heads_q": 2, "heads_kv": 1, "head_dim": 8, "head_dim_v": 8}
    facts |= {"mask": Mask.parse("causal"), "packed": False, "learns": False, "batch": 1, "tokens": 48}
    return RankCall(**{**facts, **changes})


MEASURED = [_rank_call(batch=2), _rank_call(learns=True, packed=True), _rank_call(heads_q=3, mask=Mask.window(5, 0))]


def measured(group: dist.ProcessGroup) -> Any:
    """What `autoattn tune --ranks` finds of these calls."""
    from autoattn.search import rank_processes, rank_tuning  # which bring optuna and more

    timer = rank_processes.RankTimer(ranks=ranks_of(group), device=torch.device("cpu"))
    return rank_tuning.found_by(timer, MEASURED)


def bench_rows(group: dist.ProcessGroup) -> Any:
    """The rows of `autoattn bench ranks`."""
    from autoattn.bench import rank_bench
    from autoattn.search import rank_processes

    return rank_bench.measured(rank_processes.RankTimer(ranks=ranks_of(group), device=torch.device("cpu")))


def assert_measured(found: Any) -> None:
    """That it is the link, and every method that takes a call."""
    assert found.link.bytes_per_second > 0.0
    assert [each.call for each in found.choices] == MEASURED
    names = [set(each.times_us) for each in found.choices]
    assert names == [{"ring", "allgather", "ulysses"}, {"ring", "allgather", "ulysses"}, {"ring", "allgather"}]
    assert all(each.times_us[each.method] == min(each.times_us.values()) for each in found.choices)
    assert list(found.refused) == [f"{MEASURED[2]} by ulysses"]
    assert found.communication_sms is None


# --- On cards --------------------------------------------------------------------------------------------------------

CARD_CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window with sinks": {"window": (300, 0), "sinks": "of heads"},
    "packed": {"causal": True, "cu_seqlens": [0, 300, 310, 1900, 2048]},
}


def errors_on_cards(timer: Any) -> dict[str, float]:
    """The largest error of outputs and gradients in bfloat16, relative to the largest number, of each call and method.

    Each call is made twice: the second time by what the first prepared.
    """
    errors = {}
    for name, words in CARD_CALLS.items():
        for method in METHODS[:3]:
            for _ in range(2):
                errors[f"{name} by {method}"] = timer.largest(_error_on_cards(timer, method, words))
    return errors


def _error_on_cards(timer: Any, method: str, words: dict[str, Any]) -> float:
    group, device = timer.ranks.group, timer.device
    generator = torch.Generator().manual_seed(0)
    offsets = words.get("cu_seqlens")
    given = {name: word for name, word in words.items() if name != "cu_seqlens"}
    if "sinks" in given:
        given["sinks"] = torch.zeros(8, device=device)
    axis, front = (0, ()) if offsets else (1, (1,))
    whole = [torch.randn(*front, 2048, heads, 64, generator=generator).bfloat16().to(device) for heads in (8, 2, 2, 8)]
    leaves = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    if offsets:
        ends = torch.tensor(offsets, dtype=torch.int32, device=device)
        expected = autoattn.packed_attention(*leaves, ends, ends, 2048, 2048, **given)
    else:
        expected = autoattn.attention(*leaves, layout="bshd", **given)
    divided = {"cu_seqlens": offsets} if offsets else {"seq_len": 2048, "layout": "bshd"}
    shared = {"cu_seqlens": offsets} if offsets else {}

    def own(tensor: Tensor) -> Tensor:
        return distributed.shard(tensor.detach(), axis, group, **shared)

    three = [own(tensor).requires_grad_() for tensor in whole[:3]]
    output = distributed.context_attention(*three, group=group, method=method, **divided, **given)
    found = output, *torch.autograd.grad(output, three, own(whole[3]))
    right = expected, *torch.autograd.grad(expected, leaves, whole[3])
    pairs = [(ours.detach().float(), own(theirs).float()) for ours, theirs in zip(found, right, strict=True)]
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
