"""YAML -> SearchSpace: which variants there are, and in words why one cannot work."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

import msgspec

from autoattn import resources
from autoattn.arithmetic import Rule
from autoattn.device import Device
from autoattn.errors import SpaceError
from autoattn.problem import Problem
from autoattn.variant import Value, Variant, digest_of

VERSION = 1
_PROBLEM_FACTS = ("batch", "heads_q", "heads_kv", "group_size", "seq_q", "seq_kv", "head_dim", "head_dim_padded")


class _Parameter(msgspec.Struct, forbid_unknown_fields=True):
    choices: list[int | str]
    about: str


class _Requirement(msgspec.Struct, forbid_unknown_fields=True):
    rule: str
    because: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    template: str
    parameters: dict[str, _Parameter]
    let: dict[str, str]
    require: list[_Requirement]
    seeds: list[dict[str, int | str]]
    base: dict[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A rule that every variant meets, and what it means in words."""

    rule: Rule
    because: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchSpace:
    """The variants of one template."""

    template: str
    digest: str  # of the file
    choices: dict[str, tuple[Value, ...]]  # parameter -> values, in the file's order
    about: dict[str, str]  # parameter -> what it does
    let: tuple[tuple[str, Rule], ...]
    require: tuple[Requirement, ...]
    seeds: tuple[tuple[Rule, dict[str, Value]], ...]

    def why_infeasible(self, variant: Variant, problem: Problem, device: Device) -> str | None:
        """The first rule that the variant breaks, in words; None when it breaks none.

        Raises:
            SpaceError: the variant is not a point of this space.
        """
        params = variant.as_dict()
        self.check(params)
        facts = self._with_names({**facts_of(problem, device), **params})
        for requirement in self.require:
            if not requirement.rule(facts):
                return f"{requirement.because} (needs {requirement.rule.text})"
        return None

    def check(self, params: Mapping[str, Value]) -> None:
        """Checks that `params` names every parameter once and takes each value from its choices."""
        if set(params) != set(self.choices):
            wrong = sorted(set(params) ^ set(self.choices))
            raise SpaceError(
                f"a variant of {self.template} sets {', '.join(self.choices)}, got {wrong} amiss; correct it"
            )
        for name, value in params.items():
            if value not in self.choices[name] or isinstance(value, bool):
                options = ", ".join(str(choice) for choice in self.choices[name])
                raise SpaceError(f"{name} of {self.template} must be one of {options}, got {value!r}; correct it")

    def feasible(self, problem: Problem, device: Device, rng: random.Random | None = None) -> Iterator[Variant]:
        """Every feasible variant, in the file's order or, with `rng`, in a random one.

        A rule is tried as soon as all parameters that it speaks of are set, so whole branches fall early.
        """
        order = list(self.choices)
        rules = self._rules_by_depth(order)
        facts = facts_of(problem, device)
        return self._extend(order, rules, facts, {}, rng)

    def seeds_for(self, problem: Problem, device: Device) -> list[Variant]:
        """The seeds that speak of this problem and are feasible, in the file's order."""
        facts = facts_of(problem, device)
        found = []
        for when, params in self.seeds:
            if when(facts):
                variant = Variant.of(self.template, params)
                if variant not in found and self.why_infeasible(variant, problem, device) is None:
                    found.append(variant)
        return found

    def default(self, problem: Problem, device: Device) -> Variant:
        """The template's default: the first feasible seed."""
        return self.seeds_for(problem, device)[0]

    def _with_names(self, facts: dict[str, Value | float]) -> dict[str, Value | float]:
        for name, rule in self.let:
            facts[name] = rule(facts)
        return facts

    def _rules_by_depth(self, order: list[str]) -> list[list[Requirement]]:
        """For each parameter in order, the rules that can be tried once it is set."""
        needs = {name: {name} for name in order}
        for name, rule in self.let:
            needs[name] = set().union(*(needs.get(other, set()) for other in rule.names))
        ready: list[list[Requirement]] = [[] for _ in order]
        for requirement in self.require:
            used = set().union(*(needs.get(name, set()) for name in requirement.rule.names))
            ready[max((order.index(name) for name in used), default=0)].append(requirement)
        return ready

    def _extend(
        self,
        order: list[str],
        rules: list[list[Requirement]],
        facts: dict[str, Value | float],
        chosen: dict[str, Value],
        rng: random.Random | None,
    ) -> Iterator[Variant]:
        depth = len(chosen)
        if depth == len(order):
            yield Variant.of(self.template, chosen)
            return
        name = order[depth]
        values = list(self.choices[name])
        if rng is not None:
            rng.shuffle(values)
        for value in values:
            params = {**chosen, name: value}
            known = {**facts, **params}
            for let, rule in self.let:
                if rule.names <= known.keys():
                    known[let] = rule(known)
            if all(requirement.rule(known) for requirement in rules[depth]):
                yield from self._extend(order, rules, facts, params, rng)


def facts_of(problem: Problem, device: Device) -> dict[str, Value | float]:
    """What rules may ask of a problem and a device."""
    facts: dict[str, Value | float] = {name: getattr(problem, name) for name in _PROBLEM_FACTS}
    facts |= {
        "dtype": problem.dtype.value,
        "precision": problem.precision.value,
        "element_bytes": problem.dtype.bytes,
        "causal": problem.mask.causal,
    }
    facts |= {
        field.name: getattr(device, field.name)
        for field in fields(device)
        if isinstance(getattr(device, field.name), int | float)
    }
    return facts


@lru_cache(maxsize=16)
def load(template: str) -> SearchSpace:
    """Reads the search space of a template.

    Raises:
        SpaceError: the file is not a search space; the sentence says where.
    """
    path = resources.space_path(template)
    try:
        file = msgspec.convert(resources.read_yaml(path, SpaceError), _File)
    except msgspec.ValidationError as error:
        raise SpaceError(f"{path} must be a search space, but {error}; see docs/search-spaces.md") from None
    if file.version != VERSION:
        raise SpaceError(f"{path} must have version {VERSION}, got {file.version}; use a matching autoattn")
    if file.template != template:
        raise SpaceError(f"{path} must speak of the template {template}, got {file.template}; correct it")
    space = SearchSpace(
        template=template,
        digest=digest_of(path.read_text(encoding="utf-8")),
        choices={name: tuple(parameter.choices) for name, parameter in file.parameters.items()},
        about={name: parameter.about for name, parameter in file.parameters.items()},
        let=tuple((name, Rule(text)) for name, text in file.let.items()),
        require=tuple(Requirement(rule=Rule(entry.rule), because=entry.because) for entry in file.require),
        seeds=tuple((Rule(str(seed.pop("when", "1 == 1"))), {**file.base, **seed}) for seed in file.seeds),
    )
    for _, params in space.seeds:
        space.check(params)
    return space
