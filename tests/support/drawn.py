"""Calls at random over all that a problem can be: what fuzzing runs. No hypothesis here, so that a bare machine can.

Everything comes from one random.Random, so that a seed names a call, and hypothesis can shrink through its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import kernels
import torch

from autoattn.codegen import render
from autoattn.core.mask import Alignment, Mask, MaskKind
from autoattn.core.modifiers import Bias, Modifiers
from autoattn.core.problem import DType, Layout, Precision, Problem
from autoattn.core.trial import Outcome
from autoattn.core.variant import Source, Traits, Value, Variant
from autoattn.errors import CompileError
from autoattn.kernels import compiler
from autoattn.reference import attention_formula, inputs
from autoattn.reference.inputs import Scores
from autoattn.tensors.operands import Operands
from autoattn.validation import output_check
from autoattn.workers.worker_pool import Failure

FEW = 256  # numbers of an answer
GUARD_ROWS = 3  # of NaN behind each sequence
GROUPS = (1, 1, 2, 3, 5, 7, 8)  # query heads a key head
SCORE_MODS = (
    "score * 0.5 + 0.25 * ((q_idx - kv_idx) % 7)",
    "captured0: float32[1]\nfar = q_idx - kv_idx > 3\nwhere(far, score * captured0[h], score)",
    "captured0: int32[2]\nscore + 0.1 * captured0[b, kv_idx]",
    "captured0: bool[1]\ncaptured1: float16[2]\nwhere(captured0[kv_idx], score + captured1[h, q_idx], -inf)",
    "2.0 * tanh(minimum(score, 3.0)) - to_float((q_idx + b) // 5) / 8",
)
MASK_MODS = (
    "q_idx >= kv_idx",
    "captured0: int32[1]\n(captured0[q_idx] == captured0[kv_idx]) | (kv_idx % 3 == h)",
    "captured0: bool[2]\ncaptured0[b, kv_idx] & ((q_idx + kv_idx) % 2 == 0)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large calls may be."""

    length: int  # tokens of a sequence
    batch: int
    heads_kv: int
    groups: tuple[int, ...]
    head_dims: tuple[int, ...]
    numbers: tuple[tuple[DType, Precision], ...]
    blocks: tuple[int, ...]  # of block tables


TINY = Sizes(
    length=40,
    batch=2,
    heads_kv=2,
    groups=(1, 1, 2, 3),
    head_dims=(16, 8, 24, 1, 3, 17, 20, 32, 33, 40, 48, 57, 64),
    numbers=((DType.FLOAT16, Precision.IEEE), (DType.FLOAT32, Precision.IEEE), (DType.FLOAT32, Precision.TF32X3)),
    blocks=(16, 32),
)
LARGE = Sizes(
    length=1500,
    batch=4,
    heads_kv=3,
    groups=GROUPS,
    head_dims=(64, 128, 80, 96, 16, 32, 40, 56, 57, 72, 111, 160, 192, 256),
    numbers=(
        *[(DType.BFLOAT16, Precision.IEEE)] * 3,
        *[(DType.FLOAT16, Precision.IEEE)] * 3,
        (DType.FLOAT8, Precision.IEEE),
        *((DType.FLOAT32, precision) for precision in Precision),
    ),
    blocks=(64, 128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: what is asked, and on which numbers."""

    problem: Problem
    lengths: tuple[tuple[int, int], ...] | None = None  # (queries, keys) of each packed sequence
    seed: int = 0
    scores: Scores = Scores.PLAIN
    apart: bool = False  # biases and slopes differ for each head and sequence
    wild: float = 0.0  # share of the values that are NaN or infinite

    def operands(self, device: torch.device) -> Operands:
        """The same numbers each time, but for the wild ones."""
        generator = torch.Generator().manual_seed(self.seed)
        operands = inputs.make(
            self.problem, device, generator, scores=self.scores, guard=GUARD_ROWS, lengths=self.lengths
        )
        return spread(self.problem, operands, generator) if self.apart else operands


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A kernel's recipe, and the call it was drawn for."""

    call: Call
    params: Mapping[str, Value]
    traits: Traits
    template: str = kernels.TEMPLATE

    @property
    def source(self) -> Source:
        if self.template == kernels.TEMPLATE:
            return kernels.source(self.call.problem, self.traits, **self.params)
        return render.render(self.call.problem, Variant.of(self.template, dict(self.params)), self.traits)


def spread(problem: Problem, operands: Operands, generator: torch.Generator) -> Operands:
    """Operands whose biases and slopes are other ones for each head and sequence, instead of views of one."""
    changes: dict[str, Any] = {}
    if operands.bias is not None:
        own = operands.bias.clone()
        for entry in own.view(-1, *own.shape[2:])[1:]:
            order = torch.randperm(own.shape[3], generator=generator).to(own.device)
            entry.copy_(entry.clone()[:, order])
        changes["bias"] = own
    if operands.slopes is not None:
        slopes = torch.rand(problem.batch, problem.heads_q, generator=generator)
        changes["slopes"] = slopes.to(operands.slopes.device)
    return replace(operands, **changes)


def with_wild_values(operands: Operands, share: float, seed: int) -> Operands:
    """The same, with NaN, inf and -inf among the values: a row that sees none of them must not notice."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(operands.value.shape, generator=generator)
    kind = torch.randint(3, operands.value.shape, generator=generator)
    numbers = torch.tensor([math.nan, math.inf, -math.inf])[kind].to(operands.value.device)
    value = torch.where((chance < share).to(numbers.device), numbers.to(operands.value.dtype), operands.value)
    return replace(operands, value=value)


def drawn(rng: random.Random, sizes: Sizes = TINY) -> Drawn:
    """A call and a kernel for it."""
    call = call_of(rng, sizes)
    problem = call.problem
    natural = render.natural_traits(problem)
    traits = replace(
        natural,
        alignment=1 if rng.random() < 0.2 else natural.alignment,
        wide=rng.random() < 0.2,
        lse=rng.random() < 0.8,
    )
    params = params_of(rng, problem)
    if rng.random() < 0.25 and problem.dtype is not DType.FLOAT8:  # into an output of no key
        merged = rng.choice(
            ("fp32", {DType.FLOAT16: "fp16", DType.BFLOAT16: "bf16", DType.FLOAT32: "fp32"}[problem.dtype])
        )
        traits = replace(traits, lse=True, merged=merged)
    return Drawn(call=call, params=params, traits=traits)


def call_of(rng: random.Random, sizes: Sizes) -> Call:
    """A problem of any kind, and how its numbers are made."""
    dtype, precision = rng.choice(sizes.numbers)
    layout = rng.choice((Layout.BHSD, Layout.BSHD, Layout.PACKED))
    head_dim = rng.choice(sizes.head_dims)
    mask = mask_of(rng, sizes, packed=layout is Layout.PACKED)
    modifiers = modifiers_of(rng, packed=layout is Layout.PACKED)
    kind = smallest(
        dtype=dtype,
        precision=precision,
        head_dim=head_dim,
        head_dim_v=rng.choice(sizes.head_dims) if rng.random() < 0.3 else head_dim,
        mask=mask,
        modifiers=modifiers,
        layout=layout,
    )
    return resized(rng, kind, sizes)


def smallest(*, layout: Layout, **facts: Any) -> Problem:
    """The smallest problem of a kind, which stands for it until sizes are drawn."""
    tokens_q, tokens_kv = (1, 2) if layout is Layout.PACKED else (0, 0)
    return Problem(
        batch=1,
        heads_q=1,
        heads_kv=1,
        seq_q=1,
        seq_kv=2,
        tokens_q=tokens_q,
        tokens_kv=tokens_kv,
        layout=layout,
        **facts,
    )


def resized(rng: random.Random, kind: Problem, sizes: Sizes) -> Call:
    """A call that one kernel's text serves as it serves `kind`: other lengths, heads and numbers."""
    heads_kv = rng.randint(1, sizes.heads_kv)
    heads: dict[str, Any] = {"heads_kv": heads_kv, "heads_q": heads_kv * rng.choice(sizes.groups)}
    batch = rng.randint(1, sizes.batch)
    lengths = None
    mask = kind.mask
    if kind.packed:
        lengths = tuple((length_of(rng, sizes, 0), length_of(rng, sizes, 0)) for _ in range(batch))
        tail = rng.choice((0, 0, 5))
        most = [max(1, *(pair[place] for pair in lengths)) for place in (0, 1)]
        tokens = [max(most[place], sum(pair[place] for pair in lengths) + tail) for place in (0, 1)]
        lots: dict[str, Any] = {"seq_q": most[0], "seq_kv": most[1], "tokens_q": tokens[0], "tokens_kv": tokens[1]}
    else:
        lots = {"seq_q": length_of(rng, sizes), "seq_kv": length_of(rng, sizes)}
        if kind.mask.causal and kind.mask.alignment is Alignment.TOP_LEFT and lots["seq_q"] == lots["seq_kv"]:
            lots["seq_kv"] += 1  # it would be named after the other corner, which is another kernel
    if mask.kind is MaskKind.WINDOW:
        mask = replace(
            mask,
            left=width_of(rng, sizes) if mask.left is not None else None,
            right=max(1, width_of(rng, sizes)) if mask.right else mask.right,
        )
    problem = replace(kind, batch=batch, mask=mask, **heads, **lots)
    scores = (
        Scores.PLAIN if kind.dtype is DType.FLOAT8 else rng.choice((*[Scores.PLAIN] * 4, Scores.LOUD, Scores.STEEP))
    )
    wild = rng.choice((0.0, 0.0, 0.0, 0.02)) if scores is Scores.PLAIN and kind.dtype is not DType.FLOAT8 else 0.0
    return Call(
        problem=problem, lengths=lengths, seed=rng.randrange(2**31), scores=scores, apart=rng.random() < 0.5, wild=wild
    )


def length_of(rng: random.Random, sizes: Sizes, least: int = 1) -> int:
    """Edges of tiles, primes and everything between."""
    if least == 0 and rng.random() < 0.2:
        return 0
    edges = [1, 2, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65, 127, 128, 129, 251, 256, 257, 509, 1021, 1024]
    if rng.random() < 0.4:
        return rng.choice([edge for edge in edges if edge <= sizes.length])
    return rng.randint(least, sizes.length)


def width_of(rng: random.Random, sizes: Sizes) -> int:
    """One side of a window: nothing, little, a tile, or more than there is."""
    return rng.choice((0, 1, 3, 15, 16, 17, rng.randint(0, sizes.length), 2 * sizes.length))


def mask_of(rng: random.Random, sizes: Sizes, *, packed: bool) -> Mask:
    """Any mask."""
    kind = rng.choice(
        ("full", "causal", "window", "window") if packed else ("full", "causal", "top", "window", "blocks")
    )
    if kind == "window":
        bounded_left, right = rng.choice(((True, 1), (True, 0), (True, -1), (False, 1)))
        left = width_of(rng, sizes) if bounded_left else -1
        return Mask.window(left, max(1, width_of(rng, sizes)) if right == 1 else right)
    if kind == "blocks":
        mod = rng.choice(("", *MASK_MODS))
        return Mask.blocks(rng.choice(sizes.blocks), rng.choice(sizes.blocks), rng.choice((0.0, 0.3, 0.6, 1.0)), mod)
    return Mask.parse({"full": "full", "causal": "causal", "top": "causal:top-left"}[kind])


def modifiers_of(rng: random.Random, *, packed: bool) -> Modifiers:
    """Mostly none or one, at times many at once."""
    share = rng.choice((0.0, 0.0, 0.2, 0.5))

    def chosen() -> bool:
        return rng.random() < share

    return Modifiers(
        score_mod=rng.choice(SCORE_MODS) if chosen() else "",
        softcap=chosen(),
        alibi=chosen(),
        bias=rng.choice((Bias.KEYS, Bias.BOOLEAN, Bias.ADDITIVE)) if chosen() and not packed else Bias.NONE,
        sinks=chosen(),
        dropout=chosen(),
    )


def params_of(rng: random.Random, problem: Problem) -> dict[str, Value]:
    """What the interpreter can tell apart: the structure and small tiles."""
    mask = problem.mask
    most_m, most_n = (mask.block_q, mask.block_kv) if mask.sparse else (32, 32)
    return {
        "BLOCK_M": min(rng.choice((16, 16, 32)), most_m),
        "BLOCK_N": min(rng.choice((16, 16, 32)), most_n),
        "mask_loop": rng.choice(("split", "every", "branch")),
        "softmax": rng.choice(("online", "lazy", "first_max")),
        "HEAD_SPLIT": rng.choice((0, 1)),
        "HEAD_GROUP": rng.choice((1, 4, 0)),
        "row_order": rng.choice(("descending", "ascending")),
        "PERSISTENT": rng.choice((0, 0, 1, 2)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """A worker's job: one kernel on several calls, through the gate's own comparison."""

    source: Source
    calls: tuple[Call, ...]
    device: str = "cpu"

    def run(self, memory: dict[Hashable, Any]) -> tuple[str, ...] | Failure:
        """What is wrong with each call's answer; "" when nothing is."""
        torch.set_num_threads(1)
        try:
            kernel = compiler.load(self.source, torch.device(self.device))
        except CompileError as error:
            return Failure(outcome=Outcome.COMPILE_ERROR, detail=str(error))
        return tuple(fault(kernel, call) for call in self.calls)


def fault(kernel: compiler.Kernel, call: Call) -> str:
    """What is wrong with a kernel's answer to a call, in words; "" when nothing is."""
    operands = call.operands(kernel.device)
    case = output_check.case_of(
        call.problem, operands, torch.Generator().manual_seed(0), scores=call.scores, guard=GUARD_ROWS
    )
    if case.expected.numel() <= FEW:  # PyTorch's own error can be next to nothing by luck, so allow for its bound
        eps = torch.finfo(attention_formula.TORCH_DTYPE[call.problem.dtype.output]).eps
        case = replace(case, allowed=case.allowed + eps * float(operands.value.float().abs().max()))
    verdict = output_check.judge(kernel, [case])
    if not verdict.ok or not call.wild:
        return verdict.reason
    wild = with_wild_values(operands, call.wild, call.seed)
    expected, _ = attention_formula.attention(call.problem, wild)
    output, _ = output_check.run(kernel, replace(case, operands=wild))
    return wild_fault(output.double(), expected, case.allowed)


def wild_fault(output: torch.Tensor, expected: torch.Tensor, allowed: float) -> str:
    """What is wrong with an answer that holds numbers that are not finite, in words.

    Whether such a number is NaN or inf is left open: a weight that underflows makes NaN of inf, in PyTorch too.
    """
    finite = expected.isfinite()
    if not torch.equal(output.isfinite(), finite):
        leaked = int((finite & ~output.isfinite()).sum())
        missed = int((~finite & output.isfinite()).sum())
        return f"NaN or inf reached {leaked} outputs that do not see it, and missed {missed} that do"
    error = float((output - expected)[finite].abs().max()) if bool(finite.any()) else 0.0
    return "" if error <= allowed else f"beside inf and NaN, error {error:.3g} where {allowed:.3g} is allowed"
