"""Portfolios: which variants, of all templates of an operation, suit which problems; a call without an entry runs one.

A portfolio is a data file beside the search spaces, derived from measurements (docs/decisions/portfolios.md): some
variants, and a network that estimates what each costs on a problem. Where it says nothing of a problem, or nothing that
can run, the seeds of the templates are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, islice

import msgspec

from autoattn.codegen import resources, search_space, space_file
from autoattn.codegen.cost_network import CostNetwork
from autoattn.codegen.feasibility import DerivedFacts
from autoattn.codegen.head_order import HeadOrders
from autoattn.codegen.space_facts import FACTS, facts_of
from autoattn.codegen.space_rules import Rule
from autoattn.core import garbage_collection, size_class
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Op, Problem
from autoattn.core.variant import Value, Variant
from autoattn.errors import SpaceError

VERSION = 4
STARTERS = 12  # variants of a problem that a search tries first, and that others may stand in for
_TILE = "BLOCK_M", "BLOCK_N"
_SHARED = "SPLITS", "PACK_GQA"  # parameters of programs that share keys, and of heads that share a tile


class _VariantText(msgspec.Struct, forbid_unknown_fields=True):
    template: str
    params: dict[str, int | str]


class _NetworkText(msgspec.Struct, forbid_unknown_fields=True):
    inputs: dict[str, tuple[float, float]]  # facts, and the range of each
    layers: list[list[list[float]]]


class _PortfolioFile(msgspec.Struct, forbid_unknown_fields=True):
    about: list[str]
    version: int
    operation: Op
    let: dict[str, str]
    left_out: str  # a rule
    variants: dict[str, _VariantText]  # in the order of the network's outputs
    network: _NetworkText


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portfolio:
    """The variants of an operation, and what they are expected to cost."""

    let: Mapping[str, Rule]
    left_out: Rule  # whether a problem is left to the seeds
    variants: tuple[Variant, ...]
    network: CostNetwork
    orders: HeadOrders = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", HeadOrders(self.variants))

    def ranked(self, problem: Problem, device: Device) -> tuple[Variant, ...]:
        """All variants, whether they can run or not, those that are expected to be the fastest first.

        Their heads stand in the order that suits the problem (`head_order`), whichever they were measured in. Facts
        that no measured problem had, as what changes scores, do not count: `first_of` sees to these. Nothing where the
        seeds are to run.
        """
        if problem.cache is not None or not self.variants:  # what was measured are keys in tensors of their own
            return ()
        facts = DerivedFacts(facts_of(problem, device), self.let)
        if self.left_out(facts):
            return ()
        costs = self.network.costs([float(facts[name]) for name in self.network.inputs])
        return self.orders.at(costs.argsort(kind="stable").tolist(), problem, device)


EMPTY = Portfolio(let={}, left_out=Rule("sm_count < 0"), variants=(), network=CostNetwork.of({}, [[[]]]))


@lru_cache(maxsize=8)
def load(op: Op) -> Portfolio:
    """Reads the portfolio of an operation; an empty one where there is none.

    Raises:
        SpaceError: the file is no portfolio; the sentence says where.
    """
    path = resources.portfolio_path(op)
    if not path.exists():
        return EMPTY
    with garbage_collection.paused():
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_PortfolioFile)
        except (OSError, msgspec.DecodeError) as error:
            raise SpaceError(f"{path} must be a portfolio, but {error}; see docs/search-spaces.md") from None
        if file.version != VERSION or file.operation is not op:
            raise SpaceError(
                f"{path} must be a portfolio of {op.value} of version {VERSION}, got {file.operation.value} of version "
                f"{file.version}; use a matching autoattn"
            )
        try:
            return _checked(file)
        except SpaceError as error:
            raise SpaceError(f"in {path}, {error}") from None


def _checked(file: _PortfolioFile) -> Portfolio:
    known = set(FACTS)
    let: dict[str, Rule] = {}
    for name, text in file.let.items():
        let[name] = space_file.rule_of(text, known)
        known.add(name)
    variants = tuple(Variant.of(text.template, text.params) for text in file.variants.values())
    for variant in variants:
        search_space.load(variant.template).check(variant.as_dict())
    space_file.check_names(file.network.inputs, known, "inputs of the network")
    network = CostNetwork.of(file.network.inputs, file.network.layers)
    if network.outputs != len(variants):
        raise SpaceError(
            f"the last layer must have a column for each of {len(variants)} variants, got {network.outputs}; see "
            "docs/search-spaces.md"
        )
    return Portfolio(let=let, left_out=space_file.rule_of(file.left_out, known), variants=variants, network=network)


def variants_for(problem: Problem, device: Device) -> list[Variant]:
    """The variants of a problem that are expected to be the fastest of those that can run, best first."""
    return list(islice(_ranked_able(problem, device), STARTERS))


def _ranked_able(problem: Problem, device: Device) -> Iterator[Variant]:
    """The portfolio's variants that can run a problem, best first; judged as far as they are taken."""
    return _able(problem, device, load(problem.op).ranked(problem, device))


def _able(problem: Problem, device: Device, variants: Sequence[Variant]) -> Iterator[Variant]:
    """What can run of some variants, in their order; judged as far as it is taken."""
    return filter(partial(_is_able, problem=problem, device=device), variants)


def _is_able(variant: Variant, problem: Problem, device: Device) -> bool:
    """Whether a variant can run here."""
    return is_available(variant) and is_feasible(variant, problem, device)


def is_feasible(variant: Variant, problem: Problem, device: Device) -> bool:
    """Whether the rules of its template let a variant run."""
    return search_space.load(variant.template).why_infeasible(variant, problem, device) is None


def was_measured_for(problem: Problem, device: Device) -> bool:
    """Whether what the portfolio holds for a problem rests on measurements of such problems."""
    return has_measured_facts(problem) and next(_ranked_able(problem, device), None) is not None


def has_measured_facts(problem: Problem) -> bool:
    """Whether a problem has no fact that all problems lacked which were measured for portfolios."""
    plain = not problem.packed and not problem.mask.sparse and problem.modifiers == Modifiers()
    return plain and problem.dtype is not DType.FLOAT8


def is_plain(problem: Problem) -> bool:
    """Whether problems of the same facts but sizes were measured: it has no other, and any numerics will do."""
    return has_measured_facts(problem) and problem.numerics is Numerics.ANY


def first_of(
    problem: Problem, device: Device, ranked: Sequence[Variant], able: Iterator[Variant], seeds: Iterable[Variant]
) -> Variant | None:
    """What a call runs of the portfolio: the first variant that can run, or what stands in for one that cannot.

    Where problems of the same facts were measured, that is all. The ranking says nothing of facts that no measured
    problem had, as what changes scores, or online numerics. So there each variant that could run without those facts,
    in turn, has a stand-in: a starter of its template and tile that shares keys and heads as it does, and has the
    fewest other parameters. Where there is none, one of the nearest tile runs. What packs heads into a tile, for few
    rows, has none where the first of them does not.

    Args:
        ranked: all that the portfolio has for the problem, best first.
        able: what can run of it, in its order; taken no further than needed.
        seeds: of the templates, those that can run; not asked for where the first variant can.
    """
    first = next(able, None)
    if not ranked or is_plain(problem):
        return first
    suiting = islice(_able(_plain_twin(problem), device, ranked), STARTERS)
    best = next(suiting, None)
    if best is None or best == first:
        return first
    starters = [starter for starter in (first, *islice(able, STARTERS), *seeds) if starter is not None]
    packed = _packs_heads(best, problem)
    for wanted in chain([best], suiting):
        if _packs_heads(wanted, problem) and not packed:
            continue
        alike = [starter for starter in starters if _are_alike(wanted, starter)]
        if alike:
            return min(alike, key=lambda starter: _others(wanted, starter))
    return min(starters, key=lambda starter: _distance(best, starter), default=first)


def _plain_twin(problem: Problem) -> Problem:
    """The problem of the same sizes that has no fact which all measured problems lacked."""
    if is_plain(problem):
        return problem
    return replace(
        problem,
        modifiers=Modifiers(),
        numerics=Numerics.ANY,
        dtype=DType.FLOAT16 if problem.dtype is DType.FLOAT8 else problem.dtype,
        mask=Mask() if problem.mask.sparse else problem.mask,
        layout=Layout.BSHD if problem.packed else problem.layout,
        tokens_q=0,
        tokens_kv=0,
    )


def _packs_heads(variant: Variant, problem: Problem) -> bool:
    """Whether the rows of a tile are of several heads, which few rows of each ask for."""
    return search_space.load(variant.template).heads_of_tile(variant.as_dict(), problem) > 1


def _are_alike(wanted: Variant, starter: Variant) -> bool:
    """Whether two variants of a template have the same tile, and share keys and heads alike."""
    left, right = wanted.as_dict(), starter.as_dict()
    return starter.template == wanted.template and all(left.get(name) == right.get(name) for name in (*_TILE, *_SHARED))


def _others(wanted: Variant, starter: Variant) -> int:
    """How many parameters differ."""
    theirs = starter.as_dict()
    return sum(theirs.get(name) != value for name, value in wanted.as_dict().items())


def _distance(wanted: Variant, starter: Variant) -> tuple[bool, int, float, int]:
    """How far two variants are apart: in their templates, in what they share, in their tiles, and in the rest."""
    left, right = wanted.as_dict(), starter.as_dict()
    shared = sum(left.get(name) != right.get(name) for name in _SHARED)
    return starter.template != wanted.template, shared, _octaves(left, right), _others(wanted, starter)


def _octaves(left: Mapping[str, Value], right: Mapping[str, Value]) -> float:
    """How far apart two tiles are."""
    return sum(abs(math.log2(float(left[name]) / float(right[name]))) for name in _TILE)


def is_available(variant: Variant) -> bool:
    """Whether the installed Triton compiles a variant's template."""
    return search_space.load(variant.template).why_unavailable() is None


def starters_for(problem: Problem, device: Device) -> list[Variant]:
    """What a call runs, the portfolio's variants of a problem, then each template's seeds; all can run, each once."""
    variants, seeds = variants_for(problem, device), list(_seeds(problem, device))
    of_class, of_sizes = _of_class(problem, device), _first(problem, device)
    first = [variant for variant in (of_class, of_sizes) if variant is not None]
    return list(dict.fromkeys([*first, *variants, *seeds]))


def default(problem: Problem, device: Device) -> Variant:
    """What a call runs that no entry serves: the choice for its class of sizes, or for the sizes if that cannot run.

    The choice is the first variant of the portfolio, else the first template's default. `first_of` says what runs in
    place of a first variant that cannot.

    Raises:
        SpaceError: no template has a variant for the problem.
    """
    variant = _of_class(problem, device) or _first(problem, device)
    if variant is None:
        raise SpaceError("; ".join(space.why_no_default(problem, device) for space in search_space.of(problem.op)))
    return variant


def _of_class(problem: Problem, device: Device) -> Variant | None:
    """The choice for the class of a problem's sizes; None where it cannot run at the problem's own."""
    variant = _first(size_class.representative(problem, device.sm_count), device)
    return variant if variant is not None and is_feasible(variant, problem, device) else None


def _first(problem: Problem, device: Device) -> Variant | None:
    """The choice for the sizes of a problem alone; None where no template has a variant."""
    ranked = load(problem.op).ranked(problem, device)
    first = first_of(problem, device, ranked, _able(problem, device, ranked), _seeds(problem, device))
    return first or next(_seeds(problem, device), None)


def _seeds(problem: Problem, device: Device) -> Iterator[Variant]:
    """The templates' seeds that can run."""
    return (seed for space in search_space.of(problem.op) for seed in space.seeds_for(problem, device))
