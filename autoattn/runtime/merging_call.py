"""Calls whose kernel merges their output and LSE into those of other keys, so that a merge takes no pass of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autoattn.kernels import forward
from autoattn.runtime import call_cache, prepared_call
from autoattn.runtime.plan import planner
from autoattn.runtime.prepared_call import KernelCall
from autoattn.runtime.torch_op import attention_op, attention_schema


def attend(tensors: Sequence[Any], words: dict[str, Any], output: Tensor, lse: Tensor) -> bool:
    """Merges a call of torch.ops.autoattn.attention into the output and the LSE of other keys.

    A query that sees no key leaves them as they are. Autograd does not follow.

    Args:
        tensors, words: what the operator would take.
        output: of the same queries on other keys, as the operator lays out its own, in float32 or in its dtype;
            whatever it is where the LSE is -inf.
        lse: [batch, heads, seq], or [heads, tokens] of packed sequences, float32; queries lie side by side.

    Returns:
        Whether it was done; where no kernel does it, nothing is written.
    """
    if planner.why_not_on(output.device) is not None:
        return False
    lies = *output.stride(), *lse.stride(), output.data_ptr() & forward.ALIGNED
    call_key = attention_op.posed(tensors, words, "merged", str(output.dtype), *lies)
    own = *tensors[:3], *attention_op.others_of(tensors)
    known = call_cache.find(call_key)
    if isinstance(known, KernelCall):
        query, key, value, *others = own
        known.write(query, key, value, tuple(others), output, lse)
        return True
    given = attention_schema.named(tensors, words)
    call = attention_op.read(given)
    view = attention_op.as_read(output, given)
    sums = lse[None] if call.problem.packed else lse
    with attention_op.quiet(given["query"]):
        plan = planner.plan(call, lse=True, learns=False, merged=view)
        if plan.kernel is None or call.empty:
            return False
        forward.launch(plan.kernel, call.problem, call.operands, view, sums)
    if plan.lasting:
        prepared_call.prepare_merging(call_key, own, call, plan.kernel, view, sums)
    return True
