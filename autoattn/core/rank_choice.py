"""What was measured of one attention over the ranks of a group: the link, and how long each method takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from autoattn.core.mask import Mask, MaskKind
from autoattn.core.problem import DType, Op, Problem
from autoattn.errors import ProblemError


class Method(str, Enum):
    """How keys and values come to the queries, or queries to them."""

    RING = "ring"  # a rank's keys after another's, beside computation
    ALLGATHER = "allgather"  # all keys that a rank needs, then one call for each piece of its queries
    ULYSSES = "ulysses"  # every rank has all tokens of some heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """What decides which method is the fastest: a call on whole sequences, whose tokens ranks share as a zigzag."""

    dtype: DType
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    packed: bool  # whether sequences of their own lengths stand one behind the other
    learns: bool  # whether both passes run, or the forward pass alone
    batch: int  # sequences; 1 when packed
    tokens: int  # of a whole sequence, or of all packed ones together

    def __post_init__(self) -> None:
        if self.mask.causal:  # queries and keys are of the same tokens, so that both alignments are one
            object.__setattr__(self, "mask", Mask(kind=MaskKind.CAUSAL))

    @classmethod
    def of(cls, problem: Problem) -> RankCall:
        """The call whose output, or whose gradients, a problem is.

        Raises:
            ProblemError: ranks share no such call.
        """
        masked = problem.mask.sparse or bool(problem.mask.mod)
        if problem.cache is not None or masked or problem.modifiers.names or problem.seq_q != problem.seq_kv:
            raise ProblemError(
                "a method is measured for as many queries as keys, without a cache, a table, a score_mod and whatever "
                f"else changes scores, got {problem}; leave it out"
            )
        return cls(
            dtype=problem.dtype,
            heads_q=problem.heads_q,
            heads_kv=problem.heads_kv,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            mask=problem.mask,
            packed=problem.packed,
            learns=problem.op is Op.BACKWARD,
            batch=1 if problem.packed else problem.batch,
            tokens=problem.tokens_q if problem.packed else problem.seq_q,
        )

    def __str__(self) -> str:
        passes = "both passes" if self.learns else "forward"
        packed = " packed" if self.packed else ""
        heads = f"{self.heads_q}/{self.heads_kv} heads D{self.head_dim}"
        mask = self.mask.kind.value if self.mask.causal else str(self.mask)
        return f"{self.dtype.value} B{self.batch} {heads} {mask}{packed}, {self.tokens:,} tokens, {passes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a rank's link to the next one does."""

    bytes_per_second: float  # that it sends and receives at once
    latency_us: float  # of an exchange of 1 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChoice:
    """The fastest method of a call."""

    call: RankCall
    method: Method
    times_us: dict[Method, float]  # method -> microseconds of the slowest rank, the median of the rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChoices:
    """What was measured on so many cards of one host."""

    schema: int
    device: str  # the short name, also the folder
    fingerprint: str  # of the card
    ranks: int
    link: Link
    # SMs that communication may take (NCCL's CTAs) where that beat its own choice; None where nothing did.
    communication_sms: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    choices: tuple[RankChoice, ...] = ()

    def nearest(self, call: RankCall) -> RankChoice | None:
        """The choice for the call of this kind with the nearest length, then batch, by their ratios."""

        def distance(each: RankChoice) -> tuple[float, float]:
            return abs(math.log(each.call.tokens / call.tokens)), abs(math.log(each.call.batch / call.batch))

        alike = (each for each in self.choices if replace(each.call, batch=call.batch, tokens=call.tokens) == call)
        return min(alike, key=distance, default=None)

    def with_those_of(self, before: Iterable[RankChoice]) -> RankChoices:
        """The same with choices for other calls that were there before."""
        own = {each.call for each in self.choices}
        choices = [*self.choices, *(each for each in before if each.call not in own)]
        return replace(self, choices=tuple(sorted(choices, key=lambda each: str(each.call))))
