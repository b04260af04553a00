"""What the rules of a search space may ask of a problem and a device, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter

from autoattn.core import kernel_kind
from autoattn.core.device import Capabilities, Device, MatrixUnit
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Problem
from autoattn.core.tile_widths import padded, pieces
from autoattn.core.variant import Value
from autoattn.expressions import language
from autoattn.expressions.language import SCORE_NAMES

_COUNTS = ("batch", "heads_q", "heads_kv", "group_size", "seq_q", "seq_kv")
# What problems of one kind differ in
SIZES = frozenset((*_COUNTS, "queries", "keys_per_row", "window_left", "token_major"))
HEADS = ("heads_q", "heads_kv", "group_size")
_DIMS = ("head_dim", "head_dim_v", "head_dim_padded", "head_dim_v_padded")
_PROBLEM_FACTS = (
    *("dtype", "precision", "numerics", "deterministic", "element_bytes", "key_bytes", "float8", "float8_cache"),
    *("cached", "latent", "page", "max_splits", "split_length", "batch_invariant"),
    *("packed", "split", "head_dim_split", "head_dim_v_split"),
    *("causal", "bounded_left", "bounded_right", "sparse", "block_q", "block_kv"),
    *("on_scores", "scores_by_key", "score_mod", "reads_pairs", "reads_key_slopes"),
    *("trigonometric", "alibi", "learned_slopes"),
    *("biased", "bias_of_pairs", "learned_bias", "sinks", "dropout"),
)
MAX_KINDS = 512  # whose facts are kept
# Not `arch`: what a newer architecture shares with an older one, its number does not say.
_DEVICE_FACTS = tuple(field.name for field in fields(Device) if field.type in ("int", "float") and field.name != "arch")
_CAPABILITIES = (*(unit.value for unit in MatrixUnit), "tma", "float8_products", "warp_size")
# What rules may ask of a problem and a device
FACTS = frozenset((*SIZES, *_DIMS, *_PROBLEM_FACTS, *_DEVICE_FACTS, *_CAPABILITIES))


def facts_of(problem: Problem, device: Device) -> dict[str, Value | float]:
    """What rules may ask of a problem and a device; what holds or does not is 1 or 0."""
    kind = kernel_kind.of(problem)
    return {**kind_facts(kind, problem.numerics, problem.deterministic, device), **size_facts(problem)}


def size_facts(problem: Problem, names: Iterable[str] = SIZES) -> dict[str, Value | float]:
    """SIZES of a problem, or those of them that are named."""
    return {name: _SIZE_FACTS[name](problem) for name in names}


def _queries(problem: Problem) -> int:
    return problem.tokens_q if problem.packed else problem.batch * problem.seq_q


_SIZE_FACTS: Mapping[str, Callable[[Problem], Value | float]] = {
    **{name: attrgetter(name) for name in _COUNTS},
    "queries": _queries,
    "keys_per_row": lambda problem: max(1.0, problem.kept_pairs() / _queries(problem)),
    "window_left": lambda problem: problem.mask.left or 0,
    "token_major": lambda problem: int(problem.layout is not Layout.BHSD),
}


@lru_cache(maxsize=MAX_KINDS)
def kind_facts(
    kind: KernelKind, numerics: Numerics, deterministic: bool, device: Device
) -> Mapping[str, Value | float]:
    """All but SIZES: what rules may ask of a kind of problem and a device; to be read alone, since it is kept."""
    modifiers = kind.modifiers
    return {
        "head_dim": kind.head_dim,
        "head_dim_v": kind.head_dim_v,
        "head_dim_padded": padded(kind.head_dim),
        "head_dim_v_padded": padded(kind.head_dim_v),
        "dtype": kind.dtype.value,
        "precision": kind.precision.value,
        "numerics": numerics.value,
        "deterministic": int(deterministic),
        "element_bytes": kind.dtype.bytes,
        "key_bytes": kind.key_dtype.bytes,
        "float8": int(kind.dtype is DType.FLOAT8),
        "float8_cache": int(kind.key_dtype is not kind.dtype),
        "packed": int(kind.packed),
        "cached": int(kind.cache is not None),
        "latent": int(kind.is_latent),
        "page": kind.cache.page if kind.cache is not None else 0,
        "max_splits": kind.cache.splits if kind.cache is not None else 0,
        "split_length": kind.cache.split_length if kind.cache is not None else 0,
        "batch_invariant": int(kind.cache is not None and kind.cache.batch_invariant),
        **_split_facts(kind),
        **_mask_facts(kind.mask),
        "on_scores": int(modifiers.on_scores),
        **_score_mod_facts(modifiers),
        "alibi": int(modifiers.alibi),
        "learned_slopes": int(modifiers.learned_slopes),
        "biased": int(modifiers.bias is not Bias.NONE),
        "bias_of_pairs": int(modifiers.bias not in (Bias.NONE, Bias.KEYS)),
        "learned_bias": int(modifiers.bias is Bias.LEARNED),
        "sinks": int(modifiers.sinks),
        "dropout": int(modifiers.dropout),
        **{name: getattr(device, name) for name in _DEVICE_FACTS},
        **_capability_facts(device.capabilities),
    }


def _capability_facts(capabilities: Capabilities) -> dict[str, Value | float]:
    return {
        **{unit.value: int(unit is capabilities.matrix_unit) for unit in MatrixUnit},
        "tma": int(capabilities.tma),
        "float8_products": int(capabilities.float8_products),
        "warp_size": capabilities.warp_size,
    }


def heads_of(problem: Problem) -> dict[str, Value]:
    """HEADS of a problem."""
    return {name: getattr(problem, name) for name in HEADS}


def _split_facts(kind: KernelKind) -> dict[str, Value | float]:
    """What becomes of the head dims when they are held in two powers of two."""
    low_waste = [pieces(head_dim) for head_dim in (kind.head_dim, kind.head_dim_v)]
    return {
        "split": int(any(len(widths) == 2 for widths in low_waste)),
        "head_dim_split": sum(low_waste[0]),
        "head_dim_v_split": sum(low_waste[1]),
    }


def _score_mod_facts(modifiers: Modifiers) -> dict[str, Value | float]:
    """What a score_mod asks for."""
    expression = language.parse_optional(modifiers.score_mod, SCORE_NAMES)
    return {
        "score_mod": int(expression is not None),
        "reads_pairs": int(expression is not None and expression.reads_pairs),
        "reads_key_slopes": int(expression is not None and expression.reads_key_slopes),
        "trigonometric": int(expression is not None and expression.calls("sin", "cos")),
        "scores_by_key": int(modifiers.alibi or (expression is not None and "kv_idx" in expression.answer.asks)),
    }


def _mask_facts(mask: Mask) -> dict[str, Value | float]:
    return {
        "causal": int(mask.causal),
        "bounded_left": int(mask.bounded_left),
        "bounded_right": int(mask.bounded_right),
        "sparse": int(mask.sparse),
        "block_q": mask.block_q,
        "block_kv": mask.block_kv,
    }
