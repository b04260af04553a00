"""Measures one attention over the cards of a host: the link between them, and how long each method takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoattn import distributed
from autoattn.cache import rank_choices
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.rank_choice import Link, Method, RankCall, RankChoice, RankChoices
from autoattn.distributed.communication import Exchange, Ranks
from autoattn.distributed.schedule import Split
from autoattn.distributed.sharding import Sharding
from autoattn.errors import AutoattnError, UsageError
from autoattn.reference.attention_formula import TORCH_DTYPE
from autoattn.search import rank_processes
from autoattn.search.entry_builder import versions
from autoattn.search.rank_processes import Call, RankTimer

LARGE = 2**26  # bytes of an exchange that the link's speed is read from
SMS = (2, 4, 8, 16, 32)  # that communication may take at most
GAIN = 0.98  # of a time that a limit of the SMs must reach to be kept
DOCUMENT = 4096  # tokens of a packed sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeasurements:
    """What the first rank tells."""

    link: Link
    choices: tuple[RankChoice, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)  # a call and a method -> why it has no time
    communication_sms: int | None = None


def check(ranks: int, card: Device, *, measured: bool) -> None:
    """Refuses what this machine cannot measure.

    Raises:
        UsageError: it has fewer such cards than ranks.
    """
    if ranks < 2:
        raise UsageError(f"--ranks must be 2 or more, got {ranks}; one rank makes the plain call, which tune searches")
    count = torch.cuda.device_count() if measured else 0
    if count < ranks:
        raise UsageError(
            f"--ranks {ranks} measures on as many GPUs of this machine, got {count} that are {card.full_name}; run it "
            "on a host that has them, or give fewer ranks"
        )


def tune(
    calls: Sequence[RankCall], card: Device, ranks: int, cache: Path
) -> tuple[Path, RankChoices, GroupMeasurements]:
    """Measures calls over so many cards of this machine, and keeps the choices in a cache folder.

    Raises:
        GroupError: a rank ended.
        CacheError: the folder cannot be written.
    """
    measurements = measure(calls, ranks, "nccl")
    choices = RankChoices(
        schema=rank_choices.SCHEMA,
        device=card.name,
        fingerprint=card.fingerprint,
        ranks=ranks,
        link=measurements.link,
        communication_sms=measurements.communication_sms,
        versions=versions(on_card=True),
        choices=measurements.choices,
    )
    return rank_choices.merge(cache, card, choices), choices, measurements


def measure(calls: Sequence[RankCall], ranks: int, backend: str) -> GroupMeasurements:
    """What ranks in processes of their own find.

    Args:
        backend: nccl for cards, gloo for the CPU.

    Raises:
        GroupError: a rank ended.
    """
    return rank_processes.run(partial(measured_by, calls=tuple(calls)), ranks, backend, GroupMeasurements)


def measured_by(timer: RankTimer, calls: Sequence[RankCall]) -> GroupMeasurements:
    """What the ranks of a group find together."""
    return Measurement(timer=timer).of(calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """This process among the ranks."""

    timer: RankTimer

    @property
    def ranks(self) -> Ranks:
        """The group."""
        return self.timer.ranks

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.timer.device

    def of(self, calls: Sequence[RankCall]) -> GroupMeasurements:
        """Link, choices, and the SMs that communication does best with, by the call of the most tokens."""
        link = self.link()
        choices: list[RankChoice] = []
        refused: dict[str, str] = {}
        for call in calls:
            times, reasons = self.methods(call)
            refused |= {f"{call} by {method}": why for method, why in reasons.items()}
            if times:
                choices.append(RankChoice(call=call, method=min(times, key=lambda name: times[name]), times_us=times))
        longest = max(choices, key=lambda each: each.call.tokens * each.call.batch, default=None)
        sms = None
        if longest is not None and self.device.type == "cuda":
            try:
                sms = self.communication_sms(longest)
            except (RuntimeError, AttributeError) as error:  # of a PyTorch whose NCCL takes no limit
                refused["limits of NCCL's SMs"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        return GroupMeasurements(link=link, choices=tuple(choices), refused=refused, communication_sms=sms)

    def link(self) -> Link:
        """Each rank sends to the next one while it receives from the one before."""

        def exchange(count: int) -> float:
            sent, received = (torch.zeros(count, dtype=torch.uint8, device=self.device) for _ in range(2))
            ranks = self.ranks
            after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size

            def call() -> None:
                Exchange(ranks, [ranks.sends(sent, after), ranks.receives(received, before)]).wait()

            return self.timer.time(call).seconds

        latency = exchange(1024)
        speed = LARGE / max(exchange(LARGE) - latency, 1e-9)
        return Link(bytes_per_second=_tidy(speed), latency_us=_tidy(latency * 1e6))

    def methods(self, call: RankCall) -> tuple[dict[Method, float], dict[str, str]]:
        """Microseconds of the methods that compute a call, and why the others do not."""
        attempts, refused = {}, {}
        for method in Method:
            attempt = self.attention(call, method, self.ranks.group)
            try:
                attempt()
                attempts[method.value] = attempt
            except (AutoattnError, torch.OutOfMemoryError) as error:  # on all ranks alike
                refused[method.value] = f"{type(error).__name__}: {error}".partition("\n")[0]
        times = self.timer.times(attempts)
        return {Method(name): _tidy(each.seconds * 1e6) for name, each in times.items()}, refused

    def communication_sms(self, choice: RankChoice) -> int | None:
        """The limit of NCCL's SMs with which the call is faster than with NCCL's own choice; None without one."""
        calls = {"": self.attention(choice.call, choice.method, self.ranks.group)}
        for sms in SMS:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = sms
            group = dist.new_group(pg_options=options)
            calls[str(sms)] = self.attention(choice.call, choice.method, group)
        times = {name: each.seconds for name, each in self.timer.times(calls).items()}
        best = min(times, key=lambda name: times[name])
        return int(best) if best and times[best] < GAIN * times[""] else None

    def attention(self, call: RankCall, method: Method, group: dist.ProcessGroup) -> Call:
        """A call over the ranks, of a forward pass or of both."""
        offsets = _offsets(call)
        split = Split(offsets=tuple(offsets), ranks=self.ranks.size, sharding=Sharding.ZIGZAG)
        rows = (split.lengths[self.ranks.rank],) if call.packed else (call.batch, split.lengths[self.ranks.rank])
        shapes = (
            (call.heads_q, call.head_dim), (call.heads_kv, call.head_dim), (call.heads_kv, call.head_dim_v),
            (call.heads_q, call.head_dim_v),
        )  # fmt: skip
        torch.manual_seed(self.ranks.rank)
        dtype = TORCH_DTYPE[call.dtype]
        query, key, value, pull = (torch.randn(*rows, *shape, device=self.device).to(dtype) for shape in shapes)
        three = [tensor.requires_grad_(call.learns) for tensor in (query, key, value)]
        words = _mask_words(call.mask) | (
            {"cu_seqlens": offsets} if call.packed else {"seq_len": offsets[-1], "layout": "bshd"}
        )

        def attend() -> Tensor:
            output = distributed.context_attention(*three, group=group, method=method.value, **words)
            assert isinstance(output, Tensor)
            return output

        if not call.learns:
            return attend
        return lambda: torch.autograd.grad(attend(), three, pull)


def _tidy(number: float) -> float:
    """Six significant digits, as the cache has them."""
    return float(f"{number:.6g}")


def _offsets(call: RankCall) -> list[int]:
    """Where the sequences of a call begin, and the last ends: one, or packed ones of a usual length."""
    if not call.packed:
        return [0, call.tokens]
    whole, rest = divmod(call.tokens, DOCUMENT)
    return list(accumulate([0, *[DOCUMENT] * whole, *[rest] * bool(rest)]))


def _mask_words(mask: Mask) -> dict[str, Any]:
    """The arguments that say a mask."""
    if mask.left is None and mask.right is None:
        return {"causal": mask.causal}
    return {"window": mask.window_size}
