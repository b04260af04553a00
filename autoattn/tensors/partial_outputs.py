"""Two partial outputs of attention and their LSE, which are merged into one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialOutputs:
    """Outputs of the same queries, each of some of their keys.

    LSE is in natural logarithms, and -inf where there is no key.
    """

    first: Tensor  # [batch, heads, seq, head_dim] view
    second: Tensor  # the same
    first_lse: Tensor  # [batch, heads, seq] float32 view
    second_lse: Tensor  # the same
