"""Gradients of packed sequences at random: what fuzzing runs. No hypothesis here, so that a bare machine can.

Documents have no token, one, a few around the edges of tiles, or thousands. As in `drawn`, a seed names a call.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import drawn
import gradient_kernels
import torch
from drawn import Call, Drawn, Sizes

from autoattn.codegen import render, search_space
from autoattn.core import device_profiles
from autoattn.core.mask import MaskKind
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Op, Precision, Problem
from autoattn.core.trial import Outcome
from autoattn.core.variant import Source
from autoattn.errors import CompileError
from autoattn.kernels import backward, compiler
from autoattn.validation import gradient_check
from autoattn.workers.worker_pool import Failure

HOPPER = "gluon/backward"
H200 = device_profiles.named("h200")
MOST_TOKENS = 16_000  # of all documents, as the reference is made in float64
TINY = Sizes(
    length=140,
    batch=5,
    heads_kv=1,
    groups=(1, 2),
    head_dims=(64, 16, 40, 80),
    numbers=((DType.FLOAT16, Precision.IEEE),),
    blocks=(),
)
LARGE = Sizes(
    length=6000,
    batch=24,
    heads_kv=3,
    groups=(1, 2, 4, 5),
    head_dims=drawn.LARGE.head_dims,
    numbers=(
        *[(DType.BFLOAT16, Precision.IEEE)] * 4,
        *[(DType.FLOAT16, Precision.IEEE)] * 3,
        *((DType.FLOAT32, precision) for precision in (Precision.IEEE, Precision.TF32)),
    ),
    blocks=(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareGradients:
    """A worker's job: the kernels of one text on several calls, through the gate's own comparison."""

    source: Source
    calls: tuple[Call, ...]
    device: str = "cpu"
    repeats: int = 2  # launches of deterministic gradients that must agree to the bit

    def run(self, memory: dict[Hashable, Any]) -> tuple[str, ...] | Failure:
        """What is wrong with each call's gradients; "" when nothing is."""
        torch.set_num_threads(1)
        try:
            kernel = compiler.load(self.source, torch.device(self.device))
        except CompileError as error:
            return Failure(outcome=Outcome.COMPILE_ERROR, detail=str(error))
        return tuple(fault(kernel, call, self.repeats) for call in self.calls)


def fault(kernel: compiler.Kernel, call: Call, repeats: int) -> str:
    """What is wrong with the gradients of a call, in words; "" when nothing is."""
    lse, guard = kernel.source.traits.lse, drawn.GUARD_ROWS
    generator = torch.Generator().manual_seed(call.seed)
    case = gradient_check.case_of(
        call.problem, call.operands(kernel.device), generator, scores=call.scores, guard=guard, lse=lse
    )
    verdict = gradient_check.judge(kernel, [case])
    if not verdict.ok or not call.problem.deterministic:
        return verdict.reason
    first, again = gradient_check.room_of(case), gradient_check.room_of(case)
    backward.launch(kernel, call.problem, case.operands, case.saved, first)
    for launch in range(3, repeats + 1):  # the gate compared two
        backward.launch(kernel, call.problem, case.operands, case.saved, again)
        if differ := gradient_check.unlike(first, again):
            return f"launch {launch}: {differ}"
    return ""


def drawn_packed(rng: random.Random, sizes: Sizes = TINY) -> Drawn:
    """A call, and kernels of either family for it."""
    call = call_of(rng, sizes)
    traits = replace(render.natural_traits(call.problem), lse=rng.random() < 0.5)
    variant = gradient_kernels.variant(QUERIES_BLOCK_N=rng.choice((16, 32)), KEYS_BLOCK_M=rng.choice((16, 32)))
    many = _many(call.problem)  # the text depends on no length, but some of its parameters need many tiles
    if rng.random() < 0.7:
        variant = next(search_space.load(HOPPER).feasible(many, H200, rng), variant)
    return Drawn(call=call, params=variant.as_dict(), traits=traits, template=variant.template)


def _many(problem: Problem) -> Problem:
    return replace(problem, batch=40, heads_q=32, heads_kv=16, seq_q=800, seq_kv=800, tokens_q=16_384, tokens_kv=16_384)


def call_of(rng: random.Random, sizes: Sizes) -> Call:
    """Packed sequences of any kind, whose gradients are asked for."""
    dtype, precision = rng.choice(sizes.numbers)
    head_dim = rng.choice(sizes.head_dims)
    kind = drawn.smallest(
        op=Op.BACKWARD,
        dtype=dtype,
        precision=precision,
        head_dim=head_dim,
        head_dim_v=rng.choice(sizes.head_dims) if rng.random() < 0.2 else head_dim,
        mask=drawn.mask_of(rng, sizes, packed=True),
        modifiers=modifiers_of(rng),
        layout=Layout.PACKED,
        deterministic=rng.random() < 0.5,
    )
    return resized(rng, kind, sizes)


def modifiers_of(rng: random.Random) -> Modifiers:
    """None mostly, or those whose gradients either family may form."""
    if rng.random() < 0.6:
        return Modifiers()
    return Modifiers(softcap=rng.random() < 0.5, alibi=rng.random() < 0.5, sinks=rng.random() < 0.5)


def resized(rng: random.Random, kind: Problem, sizes: Sizes) -> Call:
    """A call that the kernels of `kind` serve too: other documents, heads and numbers."""
    lengths = documents_of(rng, sizes)
    most = [max(1, *(pair[place] for pair in lengths)) for place in (0, 1)]
    tail = rng.choice((0, 0, 5))  # tokens behind the last document
    tokens = [max(most[place], sum(pair[place] for pair in lengths) + tail) for place in (0, 1)]
    mask = kind.mask
    if mask.kind is MaskKind.WINDOW:
        right = max(1, drawn.width_of(rng, sizes)) if mask.right else mask.right
        mask = replace(mask, left=drawn.width_of(rng, sizes) if mask.left is not None else None, right=right)
    heads_kv = rng.randint(1, sizes.heads_kv)
    problem = replace(
        kind,
        batch=len(lengths),
        mask=mask,
        heads_kv=heads_kv,
        heads_q=heads_kv * rng.choice(sizes.groups),
        seq_q=most[0],
        seq_kv=most[1],
        tokens_q=tokens[0],
        tokens_kv=tokens[1],
    )
    return Call(problem=problem, lengths=lengths, seed=rng.randrange(2**31), apart=rng.random() < 0.5)


def documents_of(rng: random.Random, sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of documents: alike, or of lengths of their own."""
    own = rng.random() < 0.3  # queries and keys
    lengths: list[tuple[int, int]] = []
    left = MOST_TOKENS
    for _ in range(rng.randint(1, sizes.batch)):
        queries = min(_document(rng, sizes), left)
        keys = min(_document(rng, sizes), left) if own else queries
        lengths.append((queries, keys))
        left -= max(queries, keys)
    if not any(queries and keys for queries, keys in lengths):
        lengths.append((1, 1))  # autograd through the reference needs a pair
    return tuple(lengths)


def _document(rng: random.Random, sizes: Sizes) -> int:
    """Nothing, a token, as many as a chat's turn has, an edge of tiles, or a whole book."""
    kind = rng.randrange(5)
    if kind == 4:
        return rng.randint(min(1000, sizes.length), sizes.length)
    turn = rng.randint(2, min(500, sizes.length))
    return (0, 1, turn, drawn.length_of(rng, sizes))[kind]
