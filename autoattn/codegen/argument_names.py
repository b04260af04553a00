"""The axes of a launch's tensors: the one list that names strides in signatures, in parameters and in launches.

Also what Triton calls their elements.
"""

from __future__ import annotations

from autoattn.core.problem import DType

ELEMENT = {DType.FLOAT16: "fp16", DType.BFLOAT16: "bf16", DType.FLOAT32: "fp32", DType.FLOAT8: "fp8e4nv"}
# What the strides of a tensor are called, and its axes: b(atch), h(ead), s(equence), d (head dim) and n (keys).
AXES = {
    "q": "bhsd",  # query
    "k": "bhsd",  # key
    "v": "bhsd",  # value
    "o": "bhsd",  # output
    "l": "bh",  # LSE that a kernel merges its own into, whose queries lie side by side
    "do": "bhsd",  # gradient of the output
    "dq": "bhsd",  # gradient of the query
    "dk": "bhsd",  # gradient of the key
    "dv": "bhsd",  # gradient of the value
    "s": "bh",  # slopes
    "b": "bhsn",  # bias
    "g": "bhs",  # gradient of the bias, whose keys lie side by side
    "t": "bh",  # counts of a block table
    "p": "b",  # pages of a cache
    "kf": "bh",  # factors of keys in a cache of float8
    "vf": "bh",  # factors of its values
    "mf": "bhsd",  # the first of two outputs that are merged
    "ms": "bhsd",  # the second
    "mo": "bhsd",  # what they are merged into
    "lf": "bhs",  # LSE of the first
    "ls": "bhs",  # of the second
    "lo": "bhs",  # of both
    "nk": "bhsd",  # new keys of a cache
    "nv": "bhsd",  # new values
}


def strides(tensor: str) -> tuple[str, ...]:
    """The names of a tensor's strides, in the order of its axes: "q" -> stride_qb, stride_qh, stride_qs, stride_qd."""
    return tuple(f"stride_{tensor}{axis}" for axis in AXES[tensor])


def typed_strides(tensor: str, *, offset: str, strided: bool) -> list[tuple[str, str]]:
    """(name, Triton's type) of each stride of a tensor that a kernel takes.

    Args:
        offset: the type of offsets inside one head of one sequence.
        strided: whether the elements of a row lie apart; else a kernel takes no stride of the head dim.
    """
    kinds = dict.fromkeys(AXES[tensor], "i32" if tensor == "t" else "i64")
    if "d" in kinds:
        kinds |= {"s": offset, "d": offset}
    taken = zip(strides(tensor), kinds.items(), strict=True)
    return [(name, kind) for name, (axis, kind) in taken if strided or axis != "d"]
