"""Kernels with a fault planted in their text: what the gate and the workers are there to catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import interpreted
import kernels

from autoattn.codegen import render
from autoattn.core.problem import Problem
from autoattn.core.trial import Outcome
from autoattn.core.variant import Source, Traits, Variant

CAUSAL = kernels.problem(mask="causal", head_dim=16)
FULL = kernels.problem(head_dim=16)
WINDOW = kernels.problem(mask="window:9,3", head_dim=16)
PACKED = interpreted.packed(head_dim=16)
STORED = "m_o = (o_m < seq_q)[:, None]"
BEGUN = "    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A part of a kernel's text and what stands there instead."""

    right: str
    wrong: str
    problem: Problem = FULL
    outcome: Outcome = Outcome.WRONG_RESULT
    says: str = ""  # part of what the verdict says
    lse: bool = False

    def source(self) -> Source:
        """The smallest variant, with the fault."""
        traits = render.natural_traits(self.problem, lse=self.lse)
        return self.planted_in(kernels.source(self.problem, traits))

    def planted_in(self, source: Source) -> Source:
        """A rendered kernel with the fault."""
        assert self.right in source.text
        return replace(source, text=source.text.replace(self.right, self.wrong, 1))

    def renderer(self, plant: Callable[[Variant], bool]) -> Callable[..., Source]:
        """A render.render that plants the fault in some variants."""
        original = render.render

        def rendered(
            problem: Problem, variant: Variant, traits: Traits | None = None, *, release: str | None = None
        ) -> Source:
            source = original(problem, variant, traits, release=release)
            return self.planted_in(source) if plant(variant) else source

        return rendered


FAULTS = {
    "is wrong at whole blocks of keys only": Fault(
        right="    end_n = seq_kv\n",
        wrong="    end_n = seq_kv - (seq_kv % BLOCK_N == 0).to(tl.int32)\n    seq_kv = end_n\n",
    ),
    "leaves a row unwritten": Fault(
        right=STORED, wrong="m_o = ((o_m < seq_q) & (o_m != 16))[:, None]", says="never written"
    ),
    "writes behind the last row": Fault(right=STORED, wrong="m_o = (o_m <= seq_q)[:, None]", says="outside"),
    "reads behind the last key": Fault(right="o_n[None, :] < seq_kv", wrong="o_n[None, :] < seq_kv + 1"),
    "gives NaN where a row sees no key": Fault(
        right="tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)", wrong="1.0 / row_sum", problem=CAUSAL, says="NaN"
    ),
    "is right for zeros only": Fault(right="tl.dot(query, key)", wrong="tl.dot(query, key) * 0.0"),
    "is right without grouped heads only": Fault(right="(i_h // group_size)", wrong="(i_h % (heads_q // group_size))"),
    "is right for one layout only": Fault(
        right="i_h.to(tl.int64) * stride_qh", wrong="i_h.to(tl.int64) * tl.maximum(stride_qh, stride_qs.to(tl.int64))"
    ),
    "sees one key too many at the diagonal": Fault(
        right="    last = shift", wrong="    last = 1 + shift", problem=CAUSAL
    ),
    "sees one key too many at a window's left edge": Fault(
        right="first = shift - window_left", wrong="first = shift - window_left - 1", problem=WINDOW
    ),
    "sees one key too many at a window's right edge": Fault(
        right="last = shift + window_right", wrong="last = shift + window_right + 1", problem=WINDOW
    ),
    "gives the LSE in powers of two": Fault(right=" * 0.6931471805599453", wrong="", lse=True, says="LSE"),
    "leaves the tail of packed tokens": Fault(
        right=STORED, wrong="m_o = ((o_m < seq_q) & (sequence < batch))[:, None]", problem=PACKED, says="never written"
    ),
    "lets all heads write the first one's rows": Fault(
        right="i_h.to(tl.int64) * stride_oh", wrong="0 * stride_oh", says="never written"
    ),
    "drops the rescaling": Fault(right="row_sum = row_sum * shrink", wrong="row_sum = row_sum"),
    "hangs": Fault(
        right=BEGUN,
        wrong="    while tl.load(query_ptr, volatile=True) != 12345.0:\n        seq_kv += 0\n" + BEGUN,
        outcome=Outcome.TIMEOUT,
        says="no answer within",
    ),
    "touches illegal memory": Fault(right=BEGUN, wrong="    key_ptrs += 1 << 44\n" + BEGUN, outcome=Outcome.CRASH),
}
