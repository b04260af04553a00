"""Portfolios: which variants, of all templates of an operation, suit which problems; a call without an entry runs one.

A portfolio is a data file beside the search spaces, derived from measurements (docs/decisions/portfolios.md). Where it
says nothing of a problem, or nothing that can run, the seeds of the templates are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from autoattn.codegen import feasibility, resources, search_space
from autoattn.codegen.feasibility import Judgement, Requirement, SharedRules
from autoattn.codegen.kind_seeds import KindSeeds
from autoattn.codegen.space_facts import FACTS, kind_facts, size_facts
from autoattn.codegen.space_rules import Rule
from autoattn.core import garbage_collection, kernel_kind
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem
from autoattn.core.variant import Variant
from autoattn.errors import SpaceError

VERSION = 1
MAX_KINDS = 512  # whose variants are kept


class _VariantText(msgspec.Struct, forbid_unknown_fields=True):
    template: str
    params: dict[str, int | str]


class _RuleText(msgspec.Struct, forbid_unknown_fields=True):
    when: str
    variants: list[str]  # their names, best first


class _PortfolioFile(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    operation: Op
    let: dict[str, str]
    variants: dict[str, _VariantText]
    rules: list[_RuleText]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portfolio:
    """The rules of an operation; at most one holds of a problem."""

    let: Mapping[str, Rule]
    rules: tuple[tuple[Rule, tuple[Variant, ...]], ...]


@lru_cache(maxsize=8)
def load(op: Op) -> Portfolio:
    """Reads the portfolio of an operation; an empty one where there is none.

    Raises:
        SpaceError: the file is no portfolio; the sentence says where.
    """
    path = resources.portfolio_path(op)
    if not path.exists():
        return Portfolio(let={}, rules=())
    with garbage_collection.paused():
        try:
            file = resources.read_parsed(path, _PortfolioFile, SpaceError)
        except msgspec.DecodeError as error:
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
        let[name] = search_space.rule_of(text, known)
        known.add(name)
    named = {name: Variant.of(text.template, text.params) for name, text in file.variants.items()}
    for variant in named.values():
        search_space.load(variant.template).check(variant.as_dict())
    rules = []
    for rule in file.rules:
        for name in rule.variants:
            if name not in named:
                raise SpaceError(f"rules name variants of the file, got {name!r}; see docs/search-spaces.md")
        variants = tuple(named[name] for name in rule.variants)
        rules.append((search_space.rule_of(rule.when, known), variants))
    return Portfolio(let=let, rules=tuple(rules))


def of_kind(problem: Problem, device: Device) -> KindSeeds:
    """What the portfolio holds for problems that differ from `problem` in sizes alone, best first, judged once."""
    kind = kernel_kind.of(problem)
    return _judged(load(problem.op), kind, problem, device)


def variants_for(problem: Problem, device: Device) -> list[Variant]:
    """The variants of a problem that can run, best first."""
    facts = size_facts(problem)
    seeds = of_kind(problem, device)
    return list(seeds.feasible(seeds.rules.facts(facts)))


def starters_for(problem: Problem, device: Device) -> list[Variant]:
    """The portfolio's variants of a problem, then the seeds of each template; all can run, each once."""
    seeds = (seed for space in search_space.of(problem.op) for seed in space.seeds_for(problem, device))
    return list(dict.fromkeys([*variants_for(problem, device), *seeds]))


def default(problem: Problem, device: Device) -> Variant:
    """What a call runs that no entry serves: the first variant of the portfolio, else the first template's default.

    Raises:
        SpaceError: no template has a variant for the problem.
    """
    variants = variants_for(problem, device)
    if variants:
        return variants[0]
    refusals = []
    for space in search_space.of(problem.op):
        try:
            return space.default(problem, device)
        except SpaceError as error:
            refusals.append(str(error))
    raise SpaceError("; ".join(refusals))


_JUDGED: dict[tuple[object, ...], KindSeeds] = {}


def _judged(portfolio: Portfolio, kind: kernel_kind.KernelKind, problem: Problem, device: Device) -> KindSeeds:
    key = portfolio, kind, problem.numerics, problem.deterministic, device
    known = _JUDGED.get(key)
    if known is None:
        if len(_JUDGED) >= MAX_KINDS:
            _JUDGED.clear()
        known = _JUDGED[key] = _judge(portfolio, problem, device)
    return known


def _judge(portfolio: Portfolio, problem: Problem, device: Device) -> KindSeeds:
    if problem.cache is not None:  # its rules come from problems whose keys are tensors of their own
        portfolio = Portfolio(let={}, rules=())
    facts = kind_facts(kernel_kind.of(problem), problem.numerics, problem.deterministic, device)
    of_sizes = feasibility.names_of_sizes(portfolio.let)
    judged: list[tuple[int, Variant, Judgement, Judgement]] = []
    judgements: dict[Variant, Judgement] = {}  # rules have variants in common
    for when, variants in portfolio.rules:
        other = Requirement(rule=when, because="it speaks of other problems")
        speaks = feasibility.judge(facts, portfolio.let, of_sizes, [other])
        if speaks.hopeless:
            continue
        for variant in variants:
            if variant not in judgements:
                space = search_space.load(variant.template)
                judgements[variant] = space.judgement_of(variant, problem, device)
            judgement = judgements[variant]
            if not judgement.hopeless:
                judged.append((len(judged), variant, speaks, judgement))
    return KindSeeds(why_unavailable=_why_unavailable, judged=tuple(judged), rules=SharedRules())


def _why_unavailable(variant: Variant) -> str | None:
    return search_space.load(variant.template).why_unavailable()
