"""Reads which pattern a mask function of Transformers stands for.

transformers.masking_utils composes closures (b, h, q_idx, kv_idx) -> bool from a few building blocks. A block is known
by its module and qualified name, and its parameters are read from its closure. A function with any other part is of an
unknown pattern: it is evaluated for all pairs, and never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

MODULE = "transformers.masking_utils"
FILE = "transformers/masking_utils.py"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskPattern:
    """Which keys a query sees, besides padding: those that every part keeps.

    Positions count from the first token of the row, unless `position_ids` are given.

    Attributes:
        causal: keys up to the query.
        window: (left, right): keys from query - left to query + right; right is -1 where nothing bounds it.
        chunk: keys of the query's own chunk of so many tokens; 0 for no chunks.
        left_padding: [batch] tokens before the first chunk; None without chunks.
        sequence_ids: [batch, seq] number of the packed sequence of each token; None where nothing is packed.
        position_ids: [batch, seq] positions within these sequences; None where positions count through the row, as
            those of packed sequences do in some releases.
        may_be_packed: tokens are packed, or the caller wants a tensor: a traced graph cannot tell.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    chunk: int = 0
    left_padding: Tensor | None = None
    sequence_ids: Tensor | None = None
    position_ids: Tensor | None = None
    may_be_packed: bool = False


def read(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """The pattern of a mask function; None where a part of it is unknown."""
    if getattr(mask_function, "__module__", "") != MODULE:
        return None
    name: str = getattr(mask_function, "__qualname__", "")
    if name == "causal_mask_function":
        return MaskPattern(causal=True)
    if name == "bidirectional_mask_function":
        return MaskPattern()
    values = _captured(mask_function)
    if name == "and_masks.<locals>.and_mask":
        return _of_all(values["mask_functions"])
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return MaskPattern(window=(values["sliding_window"] - 1, -1))
    if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        return MaskPattern(window=(values["sliding_window"], values["sliding_window"]))
    if name == "chunked_overlay.<locals>.inner_mask":
        return MaskPattern(chunk=values["chunk_size"], left_padding=values["left_padding"])
    if name == "packed_sequence_mask_function.<locals>.inner_mask":
        return MaskPattern(sequence_ids=values["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        pattern = read(values["mask_function"])
        return None if pattern is None else replace(pattern, position_ids=values["position_ids"])
    return None


def infer(
    mask_function: Callable[..., Any], local_size: int | None, chunk_size: int | None, causal: bool, skip: bool
) -> MaskPattern | None:
    """The pattern of a mask function in a graph that Dynamo traces, where closures cannot be read.

    Args:
        local_size: width of the window or chunk that the caller composed; None for neither.
        chunk_size: the model's, which may be the same number.
        causal: whether the caller composes causal masks.
        skip: whether the caller takes None for a mask that hides nothing else. It does not where it packed sequences,
            whose ids are then unknown here.
    """
    name = getattr(mask_function, "__name__", "")  # Dynamo takes no qualified name for equal to its text
    if name not in ("causal_mask_function", "bidirectional_mask_function", "and_mask"):
        return None
    if not mask_function.__code__.co_filename.endswith(FILE):  # Dynamo of torch 2.11 reads no module of a closure
        return None
    if name == "causal_mask_function":
        return MaskPattern(causal=True)
    if name == "bidirectional_mask_function":
        return MaskPattern()
    known_size = local_size is None or local_size != chunk_size
    if not known_size or (skip and local_size is None):
        return None
    window = None
    if local_size is not None:
        window = (local_size - 1, 0) if causal else (local_size, local_size)
    return MaskPattern(causal=causal, window=window, may_be_packed=not skip)


def _captured(function: Any) -> dict[str, Any]:
    """The variables that a closure captures."""
    if function.__closure__ is None:
        return {}
    cells = [cell.cell_contents for cell in function.__closure__]
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _of_all(functions: tuple[Callable[..., Any], ...]) -> MaskPattern | None:
    """The pattern of keys that every function keeps; None where two bound the same thing, or one is unknown."""
    causal, window, chunk = False, None, 0
    left_padding, sequence_ids, position_ids = None, None, None
    for function in functions:
        pattern = read(function)
        if pattern is None:
            return None
        causal = causal or pattern.causal
        if pattern.window is not None:
            if window is not None:
                return None
            window = pattern.window
        if pattern.chunk:
            if chunk:
                return None
            chunk, left_padding = pattern.chunk, pattern.left_padding
        if pattern.sequence_ids is not None:
            if sequence_ids is not None:
                return None
            sequence_ids = pattern.sequence_ids
        if pattern.position_ids is not None:
            position_ids = pattern.position_ids
    if position_ids is not None and sequence_ids is None:  # positions of sequences that nothing keeps apart
        return None
    return MaskPattern(
        causal=causal, window=window, chunk=chunk, left_padding=left_padding, sequence_ids=sequence_ids,
        position_ids=position_ids,
    )  # fmt: skip
