"""What changes the scores and weights of a problem beside its mask."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from enum import Enum


class Bias(str, Enum):
    """What a tensor adds to the scores."""

    NONE = "none"
    KEYS = "keys"  # booleans for each key, alike for all queries: key padding; False hides
    BOOLEAN = "boolean"  # booleans for each pair; False hides
    ADDITIVE = "additive"  # numbers for each pair, added to the scaled score
    LEARNED = "learned"  # the same of a backward problem that gives their gradient too


@dataclass(frozen=True, slots=True, kw_only=True)
class Modifiers:
    """What changes scores and weights beside the mask. In the order in which it acts: scale, score_mod, softcap, ALiBi,
    bias, mask, softmax with sinks, dropout.
    """

    score_mod: str = ""  # an expression of score, b, h, q_idx and kv_idx; see autoattn.expressions.language
    softcap: bool = False  # scores become cap * tanh(score / cap)
    alibi: bool = False  # minus slope * distance, a slope for each head
    learned_slopes: bool = False  # of alibi, in a backward problem that gives their gradient too
    bias: Bias = Bias.NONE
    sinks: bool = False  # a learned score for each head that takes its share of the softmax and gives nothing
    dropout: bool = False  # weights are dropped at random and the others grow in return

    @property
    def names(self) -> tuple[str, ...]:
        """The modifiers that are there, in words; the text of a score_mod as a digest."""
        words = [f"mod-{digest(self.score_mod)}"] if self.score_mod else []
        words += [name for name in SWITCHES if getattr(self, name) and name != "learned_slopes"]
        words = [f"{name}-learned" if name == "alibi" and self.learned_slopes else name for name in words]
        return (*words, *([f"bias-{self.bias.value}"] if self.bias is not Bias.NONE else []))

    def forward(self) -> Modifiers:
        """The same in a forward problem: who learns a bias or slopes adds them like any others."""
        bias = Bias.ADDITIVE if self.bias is Bias.LEARNED else self.bias
        return replace(self, bias=bias, learned_slopes=False)

    @property
    def on_scores(self) -> bool:
        """Whether scores are more than scaled products."""
        return bool(self.score_mod) or self.softcap or self.alibi or self.bias is not Bias.NONE


SWITCHES = tuple(field.name for field in fields(Modifiers) if field.type == "bool")  # those that are there or not


def digest(text: str) -> str:
    """Eight hexadecimal digits that name an expression."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
