"""How many heads stand side by side in the order of tiles, where rows differ in length.

Tiles start in program order, and whichever SM is free takes the next. Under a causal mask the last rows of a head walk
all keys and its first rows few. One head after another leaves long tiles of the last heads for the end, where most SMs
wait for them. All heads side by side start the longest tiles first, which is never more than a third behind the best
order (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969). But heads that run side by side are read at the
same time, and are read again from memory where the L2 does not hold their keys and values.

Measured: docs/decisions/hopper-tile-order.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoattn.codegen import search_space
from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.core.variant import Variant

GROUP = "HEAD_GROUP"  # the parameter: heads, or teams of heads that share tiles, that stand side by side
PACKING = "PACK_GQA"  # the parameter that says which heads share tiles
ALL = 0
CHOICES = (ALL, 16, 4)  # beside 1, those first that start more of the long tiles first
L2_SHARE = 0.5  # of the L2, that keys and values of heads side by side may fill
EVEN = 0.9  # share of the keys that a row sees, on average, from which on rows count as equally long


class HeadOrders:
    """Variants, each in all orders of heads."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        """Prepares all orders, so that a call which waits for one only looks it up."""
        self._variants = tuple(variants)
        self._in_order = {group: tuple(in_order(variant, group) for variant in variants) for group in (*CHOICES, 1)}
        # For each variant the first place of one that differs in GROUP alone, and of one that packs heads alike
        self._alike = _first_places(self._in_order[1])
        self._packings = _first_places([(variant.template, variant.as_dict().get(PACKING)) for variant in variants])
        self._distinct_packings = tuple(dict.fromkeys(self._packings))

    def at(self, places: Sequence[int], problem: Problem, device: Device) -> tuple[Variant, ...]:
        """The variants at some places, in the order of heads that suits a problem.

        Where rows are equally long, each has the order that it came with. Elsewhere variants that differ in their order
        alone become one.
        """
        if not is_uneven(problem):
            return tuple(self._variants[place] for place in places)
        running = {
            packing: self._in_order[_group_of(self._variants[packing], problem, device)]
            for packing in self._distinct_packings
        }
        alike = dict.fromkeys(map(self._alike.__getitem__, places))
        return tuple([running[self._packings[place]][place] for place in alike])


def suiting(variant: Variant, problem: Problem, device: Device, share: float = L2_SHARE) -> Variant:
    """A variant in the order of heads that suits a problem; where rows are equally long, in its own."""
    if not is_uneven(problem):
        return variant
    return in_order(variant, _group_of(variant, problem, device, share))


def is_uneven(problem: Problem) -> bool:
    """Whether the last rows of a head see more keys than the first.

    Packed sequences and block tables have tiles in an order of their own, and count as even.
    """
    mask = problem.mask
    if problem.packed or mask.sparse or mask.bounded_left or not mask.bounded_right:
        return False
    return problem.kept_pairs() < EVEN * problem.batch * problem.seq_q * problem.seq_kv


def heads_side_by_side(problem: Problem, device: Device, heads_of_tile: int, share: float = L2_SHARE) -> int:
    """A value of GROUP: the most heads whose keys and values together take no more than a share of the L2.

    Args:
        heads_of_tile: query heads that share a key head and have rows in the same tile.
        share: of the L2; benchmarks/head_orders.py compares several.
    """
    teams_of_key_head = -(-problem.group_size // heads_of_tile)
    key_heads = problem.batch * problem.heads_kv
    teams = key_heads * teams_of_key_head
    if teams == 1:
        return 1
    fitting = int(share * device.l2_bytes * key_heads / problem.bytes_of_keys) * teams_of_key_head
    return next((group for group in CHOICES if group < teams and (group or teams) <= fitting), 1)


def in_order(variant: Variant, group: int) -> Variant:
    """The variant with so many heads side by side; a template without such a parameter keeps its own order."""
    params = variant.as_dict()
    return Variant.of(variant.template, {**params, GROUP: group}) if GROUP in params else variant


def _group_of(variant: Variant, problem: Problem, device: Device, share: float = L2_SHARE) -> int:
    """The value of GROUP that suits a problem, for a variant and for all that pack heads alike."""
    heads_of_tile = search_space.load(variant.template).heads_of_tile(variant.as_dict(), problem)
    return heads_side_by_side(problem, device, heads_of_tile, share)


def _first_places(values: Iterable[object]) -> list[int]:
    """For each value, the first place of an equal one."""
    places: dict[object, int] = {}
    return [places.setdefault(value, place) for place, value in enumerate(values)]
