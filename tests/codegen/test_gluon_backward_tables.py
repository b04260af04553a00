"""Block tables in Hopper's backward template: which it takes, and what its machine code costs; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
from hopper_gradients import H200, TEMPLATE, problem, source
from rarely import rarely

from autoattn.codegen import search_space
from autoattn.core.mask import Mask
from autoattn.core.variant import Traits
from autoattn.kernels.compiler import inspect

pytestmark = [pytest.mark.usefixtures("nothing_compiled_before"), pytest.mark.exhaustive]

DOCUMENTS = "captured0: int32[1]\n(captured0[q_idx] == captured0[kv_idx]) & (q_idx >= kv_idx)"
# Of tables of 128 by 128: bytes that the default spills outside of its loop over whole blocks
SPILLED = {64: 24, 80: 80, 128: 88, 192: 72, 256: 64}


@pytest.mark.parametrize("sizes", [(128, 128), (64, 128), (256, 512)])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 192, 256])
def test_untuned_gradients_under_a_table_take_the_template_unless_they_must_repeat(
    head_dim: int, sizes: tuple[int, int]
) -> None:
    points, mask = search_space.load(TEMPLATE), Mask.blocks(*sizes, 0.5, DOCUMENTS)
    default = points.default(problem(head_dim=head_dim, mask=mask), H200)
    assert default["mask_loop"] == "split"
    assert default.as_dict().get("schedule", "one_tile") == ("dynamic" if head_dim <= 128 else "one_tile")
    must = problem(head_dim=head_dim, mask=mask, deterministic=True)
    assert list(points.seeds_for(must, H200)) == []


@pytest.mark.parametrize(("head_dim", "keys"), [(64, 128), (128, 128), (192, 64), (256, 64)])
def test_a_program_has_keys_of_one_column_of_the_table(head_dim: int, keys: int) -> None:
    points = search_space.load(TEMPLATE)
    for block_kv in (32, 64, 128):
        seeds = points.seeds_for(problem(head_dim=head_dim, mask=Mask.blocks(128, block_kv, 0.5)), H200)
        assert bool(list(seeds)) == (block_kv >= keys)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", rarely(SPILLED, lambda head_dim: head_dim == 128))
def test_the_walk_over_whole_blocks_costs_a_load_and_keeps_its_numbers_in_registers(head_dim: int) -> None:
    facts: dict[str, Any] = {"head_dim": head_dim}
    dense = inspect(source(problem(**facts), Traits(lse=True), schedule="one_tile", mask_loop="split"), 90).loop
    listed = inspect(source(problem(**facts, mask=Mask.blocks(128, 128, 0.5, DOCUMENTS)), Traits(lse=True)), 90)
    assert listed.spilled_bytes <= SPILLED[head_dim]
    assert sum(count for name, count in listed.loop.items() if name.startswith("LDG")) == 1
    assert not [name for name in listed.loop if name.startswith(("LDL", "STL"))]
    products = [sum(count for name, count in loop.items() if name.startswith("HGMMA")) for loop in (dense, listed.loop)]
    assert products[0] == products[1]
