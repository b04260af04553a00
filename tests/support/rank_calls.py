"""What ranks measure together: calls of `autoattn tune --ranks`, rows of `autoattn bench ranks`, calls on cards."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autoattn
from autoattn import distributed
from autoattn.core.mask import Mask
from autoattn.core.problem import DType
from autoattn.core.rank_choice import RankCall
from autoattn.distributed.communication import ranks_of
from autoattn.hardware import cuda_graph


def _rank_call(**changes: Any) -> RankCall:
    facts: dict[str, Any] = {"dtype": DType.FLOAT32, "heads_q": 2, "heads_kv": 1, "head_dim": 8, "head_dim_v": 8}
    facts |= {"mask": Mask.parse("causal"), "packed": False, "learns": False, "batch": 1, "tokens": 48}
    return RankCall(**{**facts, **changes})


MEASURED = [_rank_call(batch=2), _rank_call(learns=True, packed=True), _rank_call(heads_q=3, mask=Mask.window(5, 0))]


def measured(group: dist.ProcessGroup) -> Any:
    """What `autoattn tune --ranks` finds of these calls."""
    from autoattn.search import rank_processes, rank_tuning  # which bring optuna and more

    timer = rank_processes.RankTimer(ranks=ranks_of(group), device=torch.device("cpu"))
    return rank_tuning.measured_by(timer, MEASURED)


def bench_rows(group: dist.ProcessGroup) -> Any:
    """The rows of `autoattn bench ranks`."""
    from autoattn.bench import rank_bench
    from autoattn.search import rank_processes

    return rank_bench.measured(rank_processes.RankTimer(ranks=ranks_of(group), device=torch.device("cpu")))


def assert_measured(rank_choices: Any) -> None:
    """That it is the link, and every method that takes a call."""
    assert rank_choices.link.bytes_per_second > 0.0
    assert [each.call for each in rank_choices.choices] == MEASURED
    names = [set(each.times_us) for each in rank_choices.choices]
    assert names == [{"ring", "allgather", "ulysses"}, {"ring", "allgather", "ulysses"}, {"ring", "allgather"}]
    assert all(each.times_us[each.method] == min(each.times_us.values()) for each in rank_choices.choices)
    assert list(rank_choices.refused) == [f"{MEASURED[2]} by ulysses"]
    assert rank_choices.communication_sms is None


# --- On cards --------------------------------------------------------------------------------------------------------

TOKENS, HEAD_DIM = 2048, 64
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window with sinks": {"window": (256, 0), "sinks": torch.zeros(8)},
    "packed": {"causal": True, "cu_seqlens": [0, 300, 310, 1900, TOKENS]},
}
# Each method, and each mask, in both passes, by the fewest kernels: a process compiles those that are not shipped, a
# second or two for each.
CARD_CALLS = (
    ("causal", "ring"), ("causal", "allgather"), ("window with sinks", "allgather"), ("packed", "ring"),
    ("packed", "ulysses"),
)  # fmt: skip
REPLAYED = "replayed"
TURNS = ("at first", "again", REPLAYED)  # the second time by what the first prepared, the third by a CUDA graph


def errors_on_cards(timer: Any, name: str, method: str) -> dict[str, float]:
    """The largest error of outputs and gradients in bfloat16, relative to the largest number, of each turn of a call.

    Args:
        name: of its mask.
    """
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, TOKENS, heads, HEAD_DIM, generator=generator).bfloat16() for heads in (8, 2, 2, 8)]
    expected = _expected(whole, MASKS[name])
    return {
        turn: timer.largest(_error_on_cards(timer, method, MASKS[name], whole, expected, replay=turn == REPLAYED))
        for turn in TURNS
    }


def _expected(whole: list[Tensor], words: dict[str, Any]) -> list[Tensor]:
    """Output and gradients of one process on the CPU, in float32, [1, tokens, heads, head_dim]."""
    leaves = [tensor.float().requires_grad_() for tensor in whole[:3]]
    given = {name: word for name, word in words.items() if name != "cu_seqlens"}
    if "cu_seqlens" in words:
        ends = torch.tensor(words["cu_seqlens"], dtype=torch.int32)
        packed = [leaf[0] for leaf in leaves]
        output = autoattn.packed_attention(*packed, ends, ends, TOKENS, TOKENS, **given)[None]
    else:
        output = autoattn.attention(*leaves, layout="bshd", **given)
    return [output.detach(), *torch.autograd.grad(output, leaves, whole[3].float())]


def _error_on_cards(
    timer: Any, method: str, words: dict[str, Any], whole: list[Tensor], expected: list[Tensor], *, replay: bool
) -> float:
    group, device = timer.ranks.group, timer.device
    given = {name: word.to(device) if isinstance(word, Tensor) else word for name, word in words.items()}
    documents = {"cu_seqlens": words["cu_seqlens"]} if "cu_seqlens" in words else {}
    given |= {} if documents else {"seq_len": TOKENS, "layout": "bshd"}

    def own(tensor: Tensor) -> Tensor:
        part = distributed.shard(tensor, 1, group, **documents).to(device)
        return part[0] if documents else part

    three = [own(tensor).requires_grad_() for tensor in whole[:3]]
    pull = own(whole[3])

    def differentiated() -> tuple[Tensor, ...]:
        output = distributed.context_attention(*three, group=group, method=method, **given)
        return output, *torch.autograd.grad(output, three, pull)

    tensors = _replayed(differentiated, device) if replay else differentiated()
    pairs = [(ours.detach().float(), own(theirs)) for ours, theirs in zip(tensors, expected, strict=True)]
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def _replayed(call: Callable[[], tuple[Tensor, ...]], device: torch.device) -> tuple[Tensor, ...]:
    """What a CUDA graph of the call leaves."""
    captured = cuda_graph.run_and_capture(call, device, runs=1)
    captured.replay()
    torch.cuda.synchronize(device)
    return captured.output


# --- Ranks that do not end -------------------------------------------------------------------------------------------


def sleep_deaf(timer: Any, folder: Path) -> int:
    """Leaves a file, and then hears no signal that Python could handle, as a process whose card waits for another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / str(timer.ranks.rank)).touch()
    time.sleep(60.0)
    return 0
