"""What templates may ask of a kind of problem, a variant and the traits of a call, under the names that they use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from autoattn.codegen import argument_names, search_space
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.key_cache import PART_GROUP
from autoattn.core.mask import Alignment, Mask
from autoattn.core.modifiers import SWITCHES, Bias
from autoattn.core.problem import DType, Op
from autoattn.core.tile_widths import depths, filled, halves, padded, pieces
from autoattn.core.variant import Traits, Value, Variant
from autoattn.expressions import derivative, language
from autoattn.expressions.expression import Capture, Expression
from autoattn.expressions.language import MASK_NAMES, SCORE_NAMES

# The parameter `softmax` of a kernel that is not attention: the bound that ablations show. No search space offers it,
# so that no cache entry can hold it and no call runs it.
NO_SOFTMAX = "none"
FIRST_MAX = "first_max"  # the one that keeps its first maximum, and computes a tile twice that outgrows it
AS_ASKED = "as_asked"  # the parameter `products` when float32 products are formed as the problem says


def keeps_first_max(variant: Variant) -> bool:
    """Whether a kernel keeps its first maximum, so that its time depends on how scores grow."""
    return variant.as_dict().get("softmax") == FIRST_MAX


def of_kernel(kind: KernelKind, variant: Variant, traits: Traits) -> dict[str, object]:
    """Everything that a template may ask of a kind; numbers of the launch are left out on purpose."""
    mask, modifiers = kind.mask, kind.modifiers
    params = search_space.load(variant.template).all_params_of(variant)
    products = params["products"]
    offset, strided = "i64" if traits.wide else "i32", traits.alignment == 1
    score = language.parse_optional(modifiers.score_mod, SCORE_NAMES)
    keep = language.parse_optional(mask.mod, MASK_NAMES)
    facts = {
        "dtype": kind.dtype.value,
        "element": argument_names.ELEMENT[kind.dtype],
        "element_bytes": kind.dtype.bytes,
        "key_element": argument_names.ELEMENT[kind.key_dtype],
        "key_bytes": kind.key_dtype.bytes,
        "float8_cache": kind.key_dtype is not kind.dtype,
        "input_precision": products if products != AS_ASKED else kind.precision.value,
        "head_dim": kind.head_dim,
        "head_dim_v": kind.head_dim_v,
        "left": mask.bounded_left,
        "right": bool(mask.right),
        "last": mask.bounded_right,
        "bottom_right": mask.alignment is Alignment.BOTTOM_RIGHT,
        "on_scores": modifiers.on_scores,
        **{name: getattr(modifiers, name) for name in SWITCHES},
        "alignment": traits.alignment,
        "strided": strided,
        "offset": offset,
        "strides": partial(argument_names.typed_strides, offset=offset, strided=strided),
        "packed": kind.packed,
        **_cache_facts(kind),
        "sparse": mask.sparse,
        "block_q": mask.block_q,
        "block_kv": mask.block_kv,
        "bias": modifiers.bias.value,
        "bias_element": traits.bias,
        "bias_alignment": traits.bias_alignment,
        "bias_shared": traits.bias_shared,
        "dropout": modifiers.dropout,
        "lse": traits.lse,
        "score_lines": score.triton() if score else [],
        "mask_lines": keep.triton() if keep else [],
        "score_captures": _captures(score),
        "mask_captures": _captures(keep),
        # What a score_mod reads once a head, the tensors that it reads once a pair, and both as a step is passed them
        "head_lines": score.head_lines() if score else [],
        "head_values": score.head_values if score else [],
        "pair_captures": _arguments(score.pair_captures) if score else [],
        "score_passed": _passed(score) if score else [],
        "captures": [
            (f"{owner}_{name}", element)
            for owner, expression in (("score", score), ("mask", keep))
            for name, element in _captures(expression)
        ],
    }
    if kind.op is Op.BACKWARD:
        return facts | _backward_facts(kind, params, traits)
    return facts | _forward_facts(kind, variant, params, traits)


def _cache_facts(kind: KernelKind) -> dict[str, object]:
    """How keys and values are found in a cache; without one they have tensors of their own."""
    cache = kind.cache
    return {
        "cached": cache is not None,
        "latent": kind.is_latent,
        "page": cache.page if cache is not None else 0,
        "cache_rows": cache is not None and cache.rows,
        "leftpad": cache is not None and cache.leftpad,
        "split_length": cache.split_length if cache is not None else 0,
    }


def _backward_facts(kind: KernelKind, params: Mapping[str, Value], traits: Traits) -> dict[str, object]:
    """What the templates of gradients ask beside."""
    growth = derivative.of(kind.modifiers.score_mod) if kind.modifiers.score_mod else None
    widths = padded(kind.head_dim), padded(kind.head_dim_v)
    # The TMA unit reads rows that begin at multiples of 16 bytes; a call whose tensors do not gets pointers.
    readable = traits.alignment * kind.dtype.bytes >= 16
    return {
        "turned": params.get("copies") == "turned",
        "width_qk": widths[0],
        "width_v": widths[1],
        "depths_qk": depths(kind.head_dim),
        "depths_v": depths(kind.head_dim_v),
        "halves": halves,
        "padded_qk": widths[0] > kind.head_dim,
        "padded_v": widths[1] > kind.head_dim_v,
        "learned": kind.modifiers.bias is Bias.LEARNED,
        "sloped": kind.modifiers.learned_slopes,
        "ends_at_keys": _ends_at_keys(kind.mask),
        "growth_lines": growth.triton() if growth else [],
        # Whether scores change as much as they did before, as where positions alone add to them.
        "unit_growth": growth is not None and growth.answer.act == "number" and growth.answer.number == 1.0,
        "queries_boxes": readable and params["queries_loads"] == "descriptor",
        "keys_boxes": readable and params["keys_loads"] == "descriptor",
    }


def _forward_facts(
    kind: KernelKind, variant: Variant, params: Mapping[str, Value], traits: Traits
) -> dict[str, object]:
    """What the templates of outputs ask beside."""
    mask, modifiers = kind.mask, kind.modifiers
    hides = mask.bounded_right or mask.bounded_left or bool(mask.mod) or bool(modifiers.score_mod)
    hides = hides or modifiers.bias not in (Bias.NONE, Bias.KEYS)
    split = bool(params["HEAD_SPLIT"])
    least = 32 if kind.dtype is DType.FLOAT8 else 16  # elements that a product sums over
    latent = kind.is_latent
    return {
        "output_element": traits.merged or argument_names.ELEMENT[kind.dtype.output],
        "merged": bool(traits.merged),
        "float8": kind.dtype is DType.FLOAT8,
        "parts_qk": _parts(kind.head_dim, split, least, sliced=params.get("queries_in") == "shared"),
        "parts_v": _parts(kind.head_dim_v, params["HEAD_SPLIT"] == 1, least),
        "whole_qk": _parts(kind.head_dim, False, least),
        "whole_v": _parts(kind.head_dim_v, False, least),
        "tiles_n": _key_tiles(int(variant["BLOCK_N"])),
        "visible": _visible(kind),
        "needs_mask": _needs_mask(kind),
        # Whether a tile can hold a pair that is hidden though its key is loaded, or lose count of a maximum.
        # A latent that is no finite number spoils the scores of who sees it, and a masked step clears it for others.
        "redo": params["softmax"] != NO_SOFTMAX and (hides or params["softmax"] == FIRST_MAX) and not latent,
        "clears": hides and latent,
        "group_parts": PART_GROUP,
        "sinks": modifiers.sinks,
        "growth_lines": [],
    }


def _visible(kind: KernelKind) -> str:
    """Triton for: which pairs of a block the mask's shape keeps."""
    mask = kind.mask
    tests = []
    if mask.bounded_right:
        tests.append("o_n[None, :] <= o_m[:, None] + last")
    if mask.bounded_left:
        tests.append("o_n[None, :] >= o_m[:, None] + first")
    if not _ends_at_keys(mask):
        tests.append("o_n[None, :] < seq_kv")
    return tests[0] if len(tests) == 1 else " & ".join(f"({test})" for test in tests)


def _ends_at_keys(mask: Mask) -> bool:
    """Whether the mask ends at seq_kv by itself, as a causal one that is aligned bottom-right does."""
    return (mask.causal and mask.alignment is Alignment.BOTTOM_RIGHT) or mask.right == 0


def _needs_mask(kind: KernelKind) -> str:
    """Triton for: whether a block holds a pair that the mask's shape may hide."""
    mask = kind.mask
    end = "start_n + BLOCK_N > " + ("tl.minimum(seq_kv, tl.min(o_m) + last + 1)" if mask.bounded_right else "seq_kv")
    return f"({end}) | (start_n < tl.max(o_m) + first)" if mask.bounded_left else end


def _parts(head_dim: int, split: bool, least: int, *, sliced: bool = False) -> list[dict[str, object]]:
    """The tiles that hold a head dim: one, or two powers of two that waste less; none narrower than `least`.

    `depths` are the columns of a tile that products sum over, one after the other: all at once, or, where both factors
    can be sliced, those that the head dim fills.
    """
    widths = pieces(head_dim) if split else (padded(head_dim),)
    if min(widths) < least:
        widths = (max(least, padded(head_dim)),)
    suffixes = ("",) if len(widths) == 1 else ("_low", "_high")
    begins = (0, widths[0])
    return [
        {
            "suffix": suffix,
            "begin": begin,
            "width": width,
            "masked": begin + width > head_dim,
            "depths": filled(min(width, head_dim - begin), width, least) if sliced else (width,),
        }
        for suffix, begin, width in zip(suffixes, begins, widths, strict=False)
    ]


def _key_tiles(block_n: int) -> list[dict[str, object]]:
    """The tiles that hold a block of keys: one, or two where the block is no power of two."""
    widths = pieces(block_n)
    if len(widths) == 1:
        return [{"suffix": "", "begin": 0, "width": block_n, "size": "BLOCK_N"}]
    return [
        {"suffix": "", "begin": 0, "width": widths[0], "size": "TILE_N"},
        {"suffix": "_rest", "begin": widths[0], "width": widths[1], "size": "REST_N"},
    ]


def _captures(expression: Expression | None) -> list[tuple[str, str]]:
    """(name, type) of the arguments with which an expression reads its tensors."""
    return _arguments(expression.captures) if expression else []


def _passed(score: Expression) -> list[tuple[str, str]]:
    return _arguments(score.pair_captures) + [(name, "") for name in score.head_values]


def _arguments(captures: Iterable[Capture]) -> list[tuple[str, str]]:
    return [argument for capture in captures for argument in capture.arguments()]
