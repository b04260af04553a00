"""Small structures of variants for Triton's interpreter."""

from __future__ import annotations

import kernels

from autoattn.codegen import render
from autoattn.search import rehearsal


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
