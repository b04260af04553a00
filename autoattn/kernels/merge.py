"""The host side of the kernel that merges two partial outputs of attention."""

from __future__ import annotations

from torch import Tensor

from autoattn.codegen.argument_names import strides
from autoattn.core.kernel_kind import MergeKind
from autoattn.kernels import bound_launch
from autoattn.kernels.bound_launch import Bound
from autoattn.kernels.compiler import Kernel
from autoattn.kernels.forward import DTYPE
from autoattn.tensors.operands import empty_as
from autoattn.tensors.partial_outputs import PartialOutputs

DIVISOR = 16  # elements of strides and head dims, and bytes of addresses, of rows that are read 16 bytes at a time
# The addresses that a bound launch takes, in its order
POINTERS = "first_ptr", "second_ptr", "output_ptr", "first_lse_ptr", "second_lse_ptr", "lse_ptr"


def kind_of(parts: PartialOutputs) -> MergeKind:
    """The kind of kernel that merges two outputs."""
    first, second = parts.first, parts.second
    rows = all(
        output.stride(3) == 1 and not any(step % DIVISOR for step in output.stride()[:3]) for output in (first, second)
    )
    dense = rows and first.shape[3] % DIVISOR == 0 and (first.data_ptr() | second.data_ptr()) % DIVISOR == 0
    return MergeKind(first=DTYPE[first.dtype], second=DTYPE[second.dtype], head_dim=first.shape[3], dense=dense)


def launch(kernel: Kernel, parts: PartialOutputs) -> tuple[Tensor, Tensor]:
    """Merges on the current stream; the same result as `reference.merge_formula.merge`, but for rounding."""
    output, lse = outputs(parts)
    kernel.launch(_grid(kernel, parts), _arguments(parts, output, lse))
    return output, lse


def launch_in_place(kernel: Kernel, parts: PartialOutputs) -> None:
    """The same, over the first output and its LSE."""
    kernel.launch(_grid(kernel, parts), _arguments(parts, parts.first, parts.first_lse))


def bind(kernel: Kernel, parts: PartialOutputs) -> Bound:
    """The same launch, for outputs that differ from these in addresses alone."""
    return bound_launch.bind(kernel, _grid(kernel, parts), _arguments(parts, *outputs(parts)), POINTERS, None)


def outputs(parts: PartialOutputs) -> tuple[Tensor, Tensor]:
    """Room for the output of all keys, and for its LSE, without gaps."""
    return empty_as(parts.first, parts.first.shape[3]), parts.first_lse.new_empty(parts.first_lse.shape)


def _grid(kernel: Kernel, parts: PartialOutputs) -> tuple[int]:
    assert kernel.manifest.grid is not None
    batch, heads, seq, _ = parts.first.shape
    return kernel.manifest.grid(batch * heads * seq)


def _arguments(parts: PartialOutputs, output: Tensor, lse: Tensor) -> dict[str, object]:
    """All that a signature names."""
    batch, heads, seq, _ = parts.first.shape
    named = {
        "first": ("mf", parts.first),
        "second": ("ms", parts.second),
        "output": ("mo", output),
        "first_lse": ("lf", parts.first_lse),
        "second_lse": ("ls", parts.second_lse),
        "lse": ("lo", lse),
    }
    arguments: dict[str, object] = {"rows": batch * heads * seq, "seq": seq, "heads": heads}
    for name, (axes, tensor) in named.items():
        arguments |= {f"{name}_ptr": tensor, **dict(zip(strides(axes), tensor.stride(), strict=True))}
    return arguments
