"""Portfolios: which variants, of all templates of an operation, suit which problems; a call without an entry runs one.

A portfolio is a data file beside the search spaces, derived from measurements (docs/decisions/portfolios.md): a tree
of questions, of which a problem is asked one at each level, down to some trees that vote. Where it says nothing of a
problem, or nothing that can run, the seeds of the templates are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import dropwhile
from typing import TypeAlias

import msgspec

from autoattn.codegen import resources, search_space, space_file
from autoattn.codegen.feasibility import DerivedFacts, FactValues
from autoattn.codegen.space_facts import FACTS, facts_of
from autoattn.codegen.space_rules import Rule
from autoattn.core import garbage_collection, size_class
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Layout, Numerics, Op, Problem
from autoattn.core.variant import Value, Variant
from autoattn.errors import SpaceError

VERSION = 3
_TILE = "BLOCK_M", "BLOCK_N"
_SHARED = "SPLITS", "PACK_GQA"  # parameters of programs that share keys, and of heads that share a tile


class _VariantText(msgspec.Struct, forbid_unknown_fields=True):
    template: str
    params: dict[str, int | str]


class _QuestionText(msgspec.Struct, forbid_unknown_fields=True, rename={"condition": "if", "otherwise": "else"}):
    condition: str  # "rows < 8"
    then: _QuestionText | str | list[_QuestionText | str]
    otherwise: _QuestionText | str | list[_QuestionText | str]


# A question, names of variants with a space between them, best first, or trees that vote
_TreeText: TypeAlias = _QuestionText | str | list[_QuestionText | str]


class _PortfolioFile(msgspec.Struct, forbid_unknown_fields=True):
    about: list[str]
    version: int
    operation: Op
    let: dict[str, str]
    variants: dict[str, _VariantText]
    tree: _TreeText


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Whether a fact of a problem, a device or `let` is below a number."""

    fact: str
    below: float
    then: Tree
    otherwise: Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Trees that differ in what they ask, and that each put some variants first."""

    trees: tuple[Tree, ...]


Tree: TypeAlias = "Question | Vote | tuple[Variant, ...]"  # variants best first, of whatever template


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portfolio:
    """The questions of an operation, and the variants that their answers lead to."""

    let: Mapping[str, Rule]
    tree: Tree

    def suiting(
        self, problem: Problem, device: Device, can_run: Callable[[Variant], bool] | None = None
    ) -> tuple[Variant, ...]:
        """The variants that the answers of a problem lead to, best first, from one on that can run its sizes.

        Facts that no measured problem had, as what changes scores, do not count: `first_of` sees to these.

        Args:
            can_run: whether a variant can run the problem's sizes, where that is known.
        """
        if problem.cache is not None or self.tree == ():  # what was measured are keys in tensors of their own
            return ()
        if can_run is None:
            can_run = partial(_is_able, problem=_plain_twin(problem), device=device)
        return leaf_of(self.tree, DerivedFacts(facts_of(problem, device), self.let), can_run)


def leaf_of(tree: Tree, facts: FactValues, can_run: Callable[[Variant], bool]) -> tuple[Variant, ...]:
    """The variants that the answers of these facts lead to, from one on that can run."""
    return _elected(_lists(tree, facts), cache(can_run))


def _lists(tree: Tree, facts: FactValues) -> Iterator[tuple[Variant, ...]]:
    """The list that the answers lead to, or those of trees that vote."""
    while isinstance(tree, Question):
        tree = tree.then if float(facts[tree.fact]) < tree.below else tree.otherwise
    if isinstance(tree, Vote):
        for each in tree.trees:
            yield from _lists(each, facts)
    else:
        yield tree


def _elected(lists: Iterable[Sequence[Variant]], can_run: Callable[[Variant], bool]) -> tuple[Variant, ...]:
    """The variants of all lists, of which those come first that most lists put first.

    A list counts from the first variant on that can run, and a place in it half of the place before. The last of a list
    counts nothing: it is there to run at all.
    """
    votes: dict[Variant, float] = {}
    for variants in lists:
        for place, variant in enumerate(dropwhile(lambda each: not can_run(each), variants)):
            is_last = len(variants) > 1 and variant == variants[-1]
            votes[variant] = votes.get(variant, 0.0) + (0.0 if is_last else 0.5**place)
    return tuple(sorted(votes, key=lambda variant: -votes[variant]))


@lru_cache(maxsize=8)
def load(op: Op) -> Portfolio:
    """Reads the portfolio of an operation; an empty one where there is none.

    Raises:
        SpaceError: the file is no portfolio; the sentence says where.
    """
    path = resources.portfolio_path(op)
    if not path.exists():
        return Portfolio(let={}, tree=())
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
    named = {name: Variant.of(text.template, text.params) for name, text in file.variants.items()}
    for variant in named.values():
        search_space.load(variant.template).check(variant.as_dict())
    return Portfolio(let=let, tree=_tree(file.tree, known, named))


def _tree(text: _TreeText, known: Collection[str], named: Mapping[str, Variant]) -> Tree:
    if isinstance(text, str):
        names = text.split()
        for name in names:
            if name not in named:
                raise SpaceError(f"a tree names variants of the file, got {name!r}; see docs/search-spaces.md")
        return tuple(named[name] for name in names)
    if isinstance(text, list):
        return Vote(trees=tuple(_tree(each, known, named) for each in text))
    fact, below = _condition(text.condition)
    space_file.check_names([fact], known, text.condition)
    return Question(
        fact=fact, below=below, then=_tree(text.then, known, named), otherwise=_tree(text.otherwise, known, named)
    )


def _condition(text: str) -> tuple[str, float]:
    try:
        fact, sign, number = text.split()
        below = float(number)
    except ValueError:
        sign = ""
    if sign != "<":
        raise SpaceError(f"a condition of a tree must be such as 'rows < 8', got {text!r}; see docs/search-spaces.md")
    return fact, below


def variants_for(problem: Problem, device: Device) -> list[Variant]:
    """The variants of a problem that can run, best first."""
    return list(_able(problem, device, load(problem.op).suiting(problem, device)))


def _able(problem: Problem, device: Device, suiting: Sequence[Variant]) -> Iterator[Variant]:
    """What can run of a list, in its order; judged as far as it is taken."""
    return filter(partial(_is_able, problem=problem, device=device), suiting)


def _is_able(variant: Variant, problem: Problem, device: Device) -> bool:
    """Whether a variant can run here."""
    return is_available(variant) and is_feasible(variant, problem, device)


def is_feasible(variant: Variant, problem: Problem, device: Device) -> bool:
    """Whether the rules of its template let a variant run."""
    return search_space.load(variant.template).why_infeasible(variant, problem, device) is None


def was_measured_for(problem: Problem, device: Device) -> bool:
    """Whether what the portfolio holds for a problem rests on measurements of such problems."""
    return has_measured_facts(problem) and bool(load(problem.op).suiting(problem, device))


def has_measured_facts(problem: Problem) -> bool:
    """Whether a problem has no fact that all problems lacked which were measured for portfolios."""
    plain = not problem.packed and not problem.mask.sparse and problem.modifiers == Modifiers()
    return plain and problem.dtype is not DType.FLOAT8


def is_plain(problem: Problem) -> bool:
    """Whether problems of the same facts but sizes were measured: it has no other, and any numerics will do."""
    return has_measured_facts(problem) and problem.numerics is Numerics.ANY


def first_of(
    problem: Problem, device: Device, suiting: Sequence[Variant], able: Iterator[Variant], seeds: Iterable[Variant]
) -> Variant | None:
    """What a call runs of a list: its first variant that can run, or what stands in for a first one that cannot.

    What stands behind the first is for problems alike of other sizes, so that it runs where such problems were
    measured. It says nothing of facts that no measured problem had, as what changes scores, or online numerics, and the
    last of a list is there to run at all. So there each variant of the list, in turn, has a stand-in: a starter of its
    template and tile that shares keys and heads as it does, and has the fewest other parameters. Where there is none,
    one of the nearest tile runs. What packs heads into a tile, for few rows, has none where the first of the list does
    not.

    Args:
        suiting: the list that the portfolio has for the problem, of which the first could run without those facts.
        able: what can run of it, in its order; taken no further than needed.
        seeds: of the templates, those that can run; not asked for where the first of the list can.
    """
    first = next(able, None)
    if not suiting or first == suiting[0] or is_plain(problem):
        return first
    starters = [starter for starter in (first, *able, *seeds) if starter not in (None, suiting[-1])]
    packed = _packs_heads(suiting[0], problem)
    for wanted in suiting[:-1]:
        if _packs_heads(wanted, problem) and not packed:
            continue
        alike = [starter for starter in starters if _are_alike(wanted, starter)]
        if alike:
            return min(alike, key=lambda starter: _others(wanted, starter))
    return min(starters, key=lambda starter: _distance(suiting[0], starter), default=first)


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
    suiting, seeds = load(problem.op).suiting(problem, device), _seeds(problem, device)
    first = first_of(problem, device, suiting, _able(problem, device, suiting), seeds)
    return first or next(_seeds(problem, device), None)


def _seeds(problem: Problem, device: Device) -> Iterator[Variant]:
    """The templates' seeds that can run."""
    return (seed for space in search_space.of(problem.op) for seed in space.seeds_for(problem, device))
