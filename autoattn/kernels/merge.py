"""The host side of the kernel that merges outputs of the same queries on different keys."""

from __future__ import annotations

from torch import Tensor

from autoattn.core.kernel_kind import MergeKind
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.forward import DTYPE


def kind_of(total: Tensor, output: Tensor) -> MergeKind | None:
    """The kind of kernel that merges an output into a total; None where none does."""
    dense = total.stride(-1) == output.stride(-1) == 1
    if not dense or total.dtype not in DTYPE or output.dtype not in DTYPE:
        return None
    return MergeKind(total=DTYPE[total.dtype], dtype=DTYPE[output.dtype], head_dim=total.shape[-1])


def launch(kernel: Kernel, total: Tensor, total_lse: Tensor, output: Tensor, lse: Tensor) -> None:
    """Writes output and LSE on all keys over the total, on the current stream.

    Args:
        total, output: [batch, seq, heads, head_dim], the last axis without gaps.
        total_lse, lse: [batch, heads, seq] float32, in natural logarithms; -inf where a query saw no key.
    """
    batch, seq, heads, _ = total.shape
    arguments: dict[str, object] = {
        "total_ptr": total, "total_lse_ptr": total_lse, "output_ptr": output, "lse_ptr": lse, "seq": seq,
        "heads": heads,
    }  # fmt: skip
    for name, tensor, axes in (("t", total, "bsh"), ("o", output, "bsh"), ("m", total_lse, "bhs"), ("l", lse, "bhs")):
        arguments |= {f"stride_{name}{axis}": step for axis, step in zip(axes, tensor.stride(), strict=False)}
    assert kernel.manifest.grid is not None
    kernel.launch(kernel.manifest.grid(batch, seq, heads), arguments)
