"""Variant -> Source: the only door to Jinja for kernels."""

from __future__ import annotations

from functools import lru_cache

import jinja2

from autoattn import resources
from autoattn.problem import Alignment, DType, Layout, Problem
from autoattn.variant import Source, Traits, Variant, digest_of

ELEMENT = {DType.FLOAT16: "fp16", DType.BFLOAT16: "bf16", DType.FLOAT32: "fp32"}  # Triton's names


def render(problem: Problem, variant: Variant, traits: Traits | None = None) -> Source:
    """Renders the kernel of `variant` for the kind of call that `problem` is.

    Batch, heads and lengths never reach the text, so problems that differ only in them share one source.
    """
    traits = traits if traits is not None else natural_traits(problem)
    template = _environment().get_template(f"{variant.template}.py.j2")
    text = template.render(_facts(problem, traits), problem=_kind(problem), variant=variant, **variant.as_dict())
    return Source(name=problem.op.value, text=text, variant=variant, traits=traits)


def natural_traits(problem: Problem, *, lse: bool = False) -> Traits:
    """The traits of contiguous tensors: a row of `head_dim` elements decides what divides the strides."""
    alignment = 16 // problem.dtype.bytes  # elements in the widest load of one thread, 16 bytes
    while problem.head_dim % alignment:
        alignment //= 2
    heads = problem.heads_q if problem.layout is Layout.BSHD else 1  # a step in the sequence passes all of them
    reach = max(problem.seq_q, problem.seq_kv) * heads * problem.head_dim
    return Traits(alignment=alignment, wide=reach >= 2**31, lse=lse)


def template_digest(template: str) -> str:
    """Names the text of a template."""
    return digest_of(resources.template_path(template).read_text(encoding="utf-8"))


def _facts(problem: Problem, traits: Traits) -> dict[str, object]:
    """Everything that a template may ask of a problem; numbers of the launch are left out on purpose."""
    bottom_right = problem.mask.alignment is Alignment.BOTTOM_RIGHT
    visible = "o_n[None, :] < end_n"
    if problem.mask.causal:
        visible = "o_n[None, :] <= o_m[:, None] + shift"  # ends at seq_kv by itself when aligned bottom-right
        visible = visible if bottom_right else f"({visible}) & (o_n[None, :] < seq_kv)"
    return {
        "dtype": problem.dtype.value,
        "element": ELEMENT[problem.dtype],
        "element_bytes": problem.dtype.bytes,
        "precision": problem.precision.value,
        "head_dim": problem.head_dim,
        "head_dim_padded": problem.head_dim_padded,
        "padded": problem.head_dim != problem.head_dim_padded,
        "causal": problem.mask.causal,
        "bottom_right": bottom_right,
        "visible": visible,
        "alignment": traits.alignment,
        "strided": traits.alignment == 1,
        "offset": "i64" if traits.wide else "i32",
        "lse": traits.lse,
    }


def _kind(problem: Problem) -> str:
    """What the kernel is compiled for, in words."""
    precision = f" ({problem.precision.value} products)" if problem.dtype is DType.FLOAT32 else ""
    mask = f"causal ({problem.mask.alignment.value})" if problem.mask.causal else "no mask"
    return f"{problem.dtype.value}{precision}, head dim {problem.head_dim}, {mask}"


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.root() / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
