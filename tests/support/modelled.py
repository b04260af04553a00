"""Cards, a problem and a kernel for tests of the model: machine code as Triton makes it for sm_80."""

from __future__ import annotations

from typing import Any

from autoattn.core import device_profiles
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Problem
from autoattn.core.trial import StaticReport
from autoattn.core.variant import Value, Variant

A30, A100, RTX3090, H200 = (device_profiles.named(name) for name in ("a30", "a100", "rtx3090", "h200"))
PARAMS: dict[str, Value] = {
    "BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 0, "mask_loop": "split",
    "softmax": "online", "barrier": "none", "HEAD_GROUP": 1, "row_order": "descending", "PERSISTENT": 0,
    "HEAD_SPLIT": 0, "products": "as_asked",
}  # fmt: skip
# The loops of templates/triton/forward.py.j2 for sm_80 with the parameters above, head dim 64, bfloat16.
PLAIN = {
    "HMMA.16816.F32.BF16": 128, "LDSM.16.M88.4": 16, "LDSM.16.MT88.4": 16, "MUFU.EX2": 68, "FMUL": 130, "FADD": 130,
    "FFMA": 4, "FMNMX": 72, "F2FP": 32, "SHFL": 16, "LDGSTS.128": 8, "BAR": 2, "IADD3": 20, "LOP3": 20,
}  # fmt: skip
MASKED = PLAIN | {"ISETP": 80, "FSEL": 80}


def plain(params: dict[str, Value]) -> Variant:
    """A variant of the template that is for every card."""
    return Variant.of("triton/forward", params)


def report(**changes: Any) -> StaticReport:
    facts: dict[str, Any] = {
        "digest": "d", "arch": 80, "registers": 240, "spilled_bytes": 0, "shared_bytes": 48 * 1024, "num_warps": 4,
        "code_bytes": 20000, "loop": PLAIN, "masked_loop": MASKED,
    }  # fmt: skip
    return StaticReport(**facts | changes)


def problem(mask: str = "full", **changes: Any) -> Problem:
    facts: dict[str, Any] = {
        "dtype": DType.BFLOAT16,
        "batch": 4,
        "heads_q": 32,
        "heads_kv": 32,
        "seq_q": 4096,
        "seq_kv": 4096,
    }
    return Problem(**facts | {"head_dim": 64} | changes, mask=Mask.parse(mask))
