"""PyTorch's own attention on autoattn: its registry of FlashAttention kernels, and SDPA within a block of code."""

from autoattn.integrations.torch.flash_registry import NAME as NAME
from autoattn.integrations.torch.flash_registry import register as register
from autoattn.integrations.torch.sdpa_block import Replaced as Replaced
from autoattn.integrations.torch.sdpa_block import use as use
