"""The reference of a merge of two partial outputs, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoattn.tensors.partial_outputs import PartialOutputs


def merge(parts: PartialOutputs) -> tuple[Tensor, Tensor]:
    """The output of all keys [batch, heads, seq, head_dim], in the dtype of the parts, and its LSE."""
    lse = torch.logaddexp(parts.first_lse, parts.second_lse)
    total = torch.zeros((), dtype=parts.first_lse.dtype, device=parts.first.device)
    for output, part in ((parts.first, parts.first_lse), (parts.second, parts.second_lse)):
        weight = torch.where(part == -math.inf, 0.0, torch.exp(part - lse))[..., None]
        total = total + torch.where(weight == 0.0, 0.0, output.to(weight.dtype) * weight)
    return total.to(parts.first.dtype), lse
