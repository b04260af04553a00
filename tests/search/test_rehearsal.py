"""Small structures of variants for the interpreters, and what becomes of rehearsals."""

from __future__ import annotations

from collections.abc import Callable

import gluon_kernels
import kernels

from autoattn.codegen import render, search_space
from autoattn.core.trial import Outcome, Verdict
from autoattn.core.variant import Source
from autoattn.search import rehearsal
from autoattn.search.gpu_jobs import Rehearse
from autoattn.workers.worker_pool import Failure


def test_a_structure_keeps_the_branches_of_the_variant() -> None:
    for problem, source in kernels.every_text():
        kind, small = rehearsal.structure(problem, source.variant)
        for name in ("softmax", "mask_loop", "row_order"):
            assert small.variant[name] == source.variant[name]
        assert bool(small.variant["PERSISTENT"]) == bool(source.variant["PERSISTENT"])
        least = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 1, "num_stages": 1, "maxnreg": 0, "barrier": "none"}
        assert {name: small.variant[name] for name in least} == least
        assert kind.mask.structure == problem.mask.structure
        assert ("stride_qd" in small.text) == (render.natural_traits(problem).alignment == 1)
        assert ("m_d = " in small.text) == (problem.head_dim != problem.head_dim_padded)


def test_a_structure_in_gluon_keeps_dtype_head_dims_consumers_and_barriers() -> None:
    for facts in ({"head_dim": 128}, {"head_dim": 80}, {"head_dim": 64, "mask": "blocks:128x128,0.5"}):
        problem = gluon_kernels.problem(**facts)
        space = search_space.load("gluon/forward")
        for variant in space.seeds_for(problem, gluon_kernels.H200):
            kind, small = rehearsal.structure(problem, variant)
            assert (kind.dtype, kind.head_dim, kind.head_dim_v) == (problem.dtype, problem.head_dim, problem.head_dim_v)
            for name in ("BLOCK_M", "num_stages", "softmax", "schedule", "ping_pong", "slot_release", "overlap"):
                assert small.variant[name] == variant[name]
            assert ("REST" in small.text) == ("REST" in render.render(problem, variant).text)


def rehearsed(text: Callable[[str], str]) -> Verdict | Failure:
    """What becomes of a structure whose text is changed."""
    problem = gluon_kernels.problem(head_dim=64)
    kind, small = rehearsal.structure(problem, gluon_kernels.variant(problem, BLOCK_M=128, num_stages=2))
    changed = Source(name=small.name, text=text(small.text), variant=small.variant, traits=small.traits)
    return Rehearse(problem=kind, source=changed).run({})


def test_a_rehearsal_in_gluon_ends_as_a_value() -> None:
    right = rehearsed(lambda text: text)
    assert isinstance(right, Verdict)
    assert right.ok, right.reason
    assert rehearsal.outcome_of(right) is Outcome.OK
    stuck = rehearsed(lambda text: text.replace("    free_key(key_free, slot)\n", "", 1))
    assert rehearsal.outcome_of(stuck) is Outcome.WRONG_RESULT
    assert rehearsal.reason_of(stuck).startswith("deadlock: consume(0) waits for ")
    strange = rehearsed(lambda text: text.replace("gl.exp2(", "gl.exp3("))
    assert rehearsal.outcome_of(strange) is Outcome.INTERPRETER_CRASH
    assert "has no exp3" in rehearsal.reason_of(strange)
