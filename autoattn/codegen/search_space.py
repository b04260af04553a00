"""Search spaces, read from YAML: which variants there are, and in words why one cannot work."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autoattn.codegen import feasibility, resources, space_file
from autoattn.codegen.feasibility import DerivedFacts, Judgement, Requirement, SharedRules
from autoattn.codegen.kind_seeds import KindSeeds
from autoattn.codegen.space_facts import FACTS, HEADS, facts_of, heads_of, kind_facts, size_facts
from autoattn.codegen.space_rules import Rule
from autoattn.core import garbage_collection, kernel_kind, triton_release
from autoattn.core.device import Device
from autoattn.core.kernel_kind import KernelKind
from autoattn.core.mask import Mask
from autoattn.core.problem import Numerics, Op, Problem
from autoattn.core.variant import Value, Variant, digest_of
from autoattn.errors import SpaceError

MAX_JUDGEMENTS = 4096  # of variants and kinds of problems that are kept
MAX_KINDS = 512  # whose seeds are kept
_BLOCKS = ("block_q", "block_kv")  # of a block table
_PLACES = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchSpace:
    """The variants of one template."""

    template: str
    interpreted: bool  # whether an interpreter runs the template's kernels: Triton's, or Gluon's where `specialised`
    digest: str  # of the file
    choices: dict[str, tuple[Value, ...]]  # parameter -> values, in the file's order
    about: dict[str, str]  # parameter -> what it does
    let: dict[str, Rule]  # name -> what it stands for; each may ask for those before it
    require: tuple[Requirement, ...]
    seeds: tuple[tuple[Rule, dict[str, Value]], ...]
    triton: tuple[str, ...]  # releases that compile the template, as "3.6"; empty when all do that autoattn supports
    step_bytes: int = 1  # divide all steps of the tensors that the template reads, but the one inside a row
    deterministic: Rule = field(default_factory=lambda: Rule("1"))  # of parameters; see `repeats`
    specialised: bool = False  # whether some warps of a program load what others compute with
    heads_together: Rule = field(default_factory=lambda: Rule("1"))  # query heads that one tile has rows of
    tile: str = ""  # what to call a variant by; {names} are parameters
    rehearsal: dict[str, Rule] = field(default_factory=dict)  # parameter or block -> value; see `rehearsed`
    ablation: tuple[str, ...] = ()  # parameters that an ablation changes one at a time, in the order of its table
    barriers: tuple[str, ...] = ()  # parameters that place barriers or choose their kind
    fixed: dict[str, Value]  # what other templates search and this one has: parameter -> value
    # What a variant has that does not state a parameter. It states none at this value, so that kernels that are older
    # than the parameter keep their names and texts.
    implied: dict[str, Value] = field(default_factory=dict)

    def why_infeasible(self, variant: Variant, problem: Problem, device: Device) -> str | None:
        """The first rule that the variant breaks, in words; None when it breaks none.

        Raises:
            SpaceError: the variant is not a point of this space.
        """
        judgement = self.judgement_of(variant, problem, device)
        return self.why_unavailable() or judgement.why_not(size_facts(problem))

    def judgement_of(self, variant: Variant, problem: Problem, device: Device) -> Judgement:
        """What the rules say of a variant for problems of one kind, made once.

        Raises:
            SpaceError: the variant is not a point of this space.
        """
        return _judged(self, variant, *_kind_of(problem), device)

    def why_unavailable(self) -> str | None:
        """Why the Triton that is installed cannot compile the template; None when it can."""
        if not self.triton or triton_release.installed_release() in self.triton:
            return None
        releases = f"{', '.join(self.triton[:-1])} or {self.triton[-1]}" if len(self.triton) > 1 else self.triton[0]
        return (
            f"{self.template} is written for Triton {releases}, whose language moves, and this is "
            f"{triton_release.installed()}"
        )

    def repeats(self, variant: Variant) -> bool:
        """Whether two launches of a variant on the same inputs agree to the bit."""
        return bool(self.deterministic(self.params_of(variant)))

    def heads_of_tile(self, params: Mapping[str, Value], problem: Problem) -> int:
        """Query heads that share a key head and have rows in the same tile."""
        return int(self.heads_together({**heads_of(problem), **self.implied, **params}))

    def tile_of(self, variant: Variant) -> str:
        """The parameters of a variant that say most, as "128x64 4w 3s"; all of them where the file names none."""
        params = self.params_of(variant)
        if not self.tile or not set(_PLACES.findall(self.tile)) <= set(params):
            return str(variant)
        return _PLACES.sub(lambda match: str(params[match[1]]), self.tile)

    def rehearsed(self, variant: Variant, mask: Mask) -> tuple[Variant, Mask]:
        """The variant of the same structure that an interpreter computes soonest, and a mask of small blocks."""
        params = self.params_of(variant)
        facts = params | {name: getattr(mask, name) for name in _BLOCKS}
        small = {name: rule(facts) for name, rule in self.rehearsal.items()}
        block_q, block_kv = (int(small.pop(name, getattr(mask, name))) for name in _BLOCKS)
        return self.variant(params | small), replace(mask, block_q=block_q, block_kv=block_kv) if mask.sparse else mask

    def requirements(self, *, deterministic: bool) -> tuple[Requirement, ...]:
        """The rules of a problem, in the order in which they are asked."""
        if not deterministic:
            return self.require
        because = (
            f"such kernels of {self.template} do not repeat themselves to the bit, and the problem is deterministic"
        )
        return (*self.require, Requirement(rule=self.deterministic, because=because))

    def variant(self, params: Mapping[str, Value]) -> Variant:
        """The variant with these parameters, which states none that is implied."""
        stated = {name: value for name, value in params.items() if self.implied.get(name) != value}
        return Variant.of(self.template, stated)

    def params_of(self, variant: Variant) -> dict[str, Value]:
        """All parameters of a variant, stated or implied."""
        return {**self.implied, **variant.as_dict()}

    def all_params_of(self, variant: Variant) -> dict[str, Value]:
        """The same, and what other templates search and this one has at one value."""
        return {**self.fixed, **self.params_of(variant)}

    def holds(self, params: Mapping[str, Value]) -> bool:
        """Whether `params` is a point of this space; one that was tuned in another may not be."""
        try:
            self.check(params)
        except SpaceError:
            return False
        return True

    def check(self, params: Mapping[str, Value]) -> None:
        """Checks that `params` names every parameter that is not implied, and takes each value from its choices."""
        if set(params) | set(self.implied) != set(self.choices):
            wrong = ", ".join(sorted((set(params) | set(self.implied)) ^ set(self.choices)))
            raise SpaceError(
                f"a variant of {self.template} sets {', '.join(self.choices)}, got {wrong!r:.200} amiss; correct it"
            )
        for name, value in params.items():
            # 1, 1.0 and True are equal, and differ in a kernel's text.
            if not any(value == choice and type(value) is type(choice) for choice in self.choices[name]):
                options = ", ".join(str(choice) for choice in self.choices[name])
                raise SpaceError(f"{name} of {self.template} must be one of {options}, got {value!r:.60}; correct it")

    def feasible(self, problem: Problem, device: Device, rng: random.Random | None = None) -> Iterator[Variant]:
        """Every feasible variant, in the file's order or, with `rng`, in a random one.

        A rule is tried as soon as all parameters that it speaks of are set, so whole branches fall early.
        """
        if self.why_unavailable():
            return iter(())
        order = list(self.choices)
        rules = self._rules_by_depth(order, problem)
        facts = facts_of(problem, device)
        return self.extend(order, rules, facts, {}, rng)

    def seeds_for(self, problem: Problem, device: Device) -> list[Variant]:
        """The seeds that speak of this problem and are feasible, in the file's order."""
        return list(self._seeds(problem, device))

    def _seeds(self, problem: Problem, device: Device) -> Iterator[Variant]:
        """The same, one after the other."""
        seeds = self.seeds_of_kind(problem, device)
        return seeds.feasible(seeds.rules.facts(size_facts(problem)))

    def seeds_of_kind(self, problem: Problem, device: Device) -> KindSeeds:
        """The seeds for problems that differ from `problem` in sizes alone, judged once."""
        return _judged_seeds(self, *_kind_of(problem), device)

    def default(self, problem: Problem, device: Device) -> Variant:
        """The template's default: the first feasible seed.

        Raises:
            SpaceError: no seed is feasible; the last one should be wherever the device can run the problem at all.
        """
        default = next(self._seeds(problem, device), None)
        if default is None:
            raise SpaceError(self.why_no_default(problem, device))
        return default

    def why_no_default(self, problem: Problem, device: Device) -> str:
        """What is said of a problem that no seed is feasible for."""
        last = self.variant(self.seeds[-1][1])
        reason = self.why_infeasible(last, problem, device) or "its last seed does not speak of it"
        return (
            f"{self.template} must have a feasible seed to run {problem} on {device.name}, but {reason}; choose "
            "another problem or device"
        )

    def _rules_by_depth(self, order: list[str], problem: Problem) -> list[list[Requirement]]:
        """For each parameter in order, the rules that can be tried once it is set."""
        needs = {name: {name} for name in order}
        for name, rule in self.let.items():
            needs[name] = set().union(*(needs.get(needed, set()) for needed in rule.names))
        ready: list[list[Requirement]] = [[] for _ in order]
        for requirement in self.requirements(deterministic=problem.deterministic):
            used = set().union(*(needs.get(name, set()) for name in requirement.rule.names))
            ready[max((order.index(name) for name in used), default=0)].append(requirement)
        return ready

    def extend(
        self,
        order: list[str],
        rules: list[list[Requirement]],
        facts: dict[str, Value | float],
        chosen: dict[str, Value],
        rng: random.Random | None,
    ) -> Iterator[Variant]:
        """The feasible variants that have the chosen values: one step of the walk, which chooses one value more."""
        depth = len(chosen)
        if depth == len(order):
            yield self.variant(chosen)
            return
        name = order[depth]
        values = list(self.choices[name])
        if rng is not None:
            rng.shuffle(values)
        for value in values:
            params = {**chosen, name: value}
            known = DerivedFacts(facts | params, self.let)
            if all(requirement.rule(known) for requirement in rules[depth]):
                yield from self.extend(order, rules, facts, params, rng)


def _kind_of(problem: Problem) -> tuple[KernelKind, Numerics, bool]:
    """What rules may ask of a problem beside its sizes."""
    return kernel_kind.of(problem), problem.numerics, problem.deterministic


@lru_cache(maxsize=MAX_JUDGEMENTS)
def _judged(
    space: SearchSpace, variant: Variant, kind: KernelKind, numerics: Numerics, deterministic: bool, device: Device
) -> Judgement:
    """What the rules of a space say of a variant for a kind of problem."""
    facts = {**kind_facts(kind, numerics, deterministic, device), **_params_of(space, variant)}
    return feasibility.judge(facts, space.let, _names_of_sizes(space), _requirements(space, deterministic))


@lru_cache(maxsize=32)
def _requirements(space: SearchSpace, deterministic: bool) -> tuple[Requirement, ...]:
    return space.requirements(deterministic=deterministic)


@lru_cache(maxsize=16)
def _names_of_sizes(space: SearchSpace) -> frozenset[str]:
    return feasibility.names_of_sizes(space.let)


@lru_cache(maxsize=16)
def _seeds_of(space: SearchSpace) -> list[tuple[int, Variant, dict[str, Value], Requirement]]:
    """The seeds: number, which equal variants share; variant; all parameters; when it speaks of a problem."""
    numbers: dict[Variant, int] = {}
    seeds = []
    for when, params in space.seeds:
        variant = space.variant(params)
        speaks = Requirement(rule=when, because="it speaks of other problems")
        seeds.append((numbers.setdefault(variant, len(numbers)), variant, {**space.implied, **params}, speaks))
    return seeds


@lru_cache(maxsize=1024)
def _params_of(space: SearchSpace, variant: Variant) -> Mapping[str, Value]:
    """All parameters of a variant that is a point of the space; to be read alone, since they are kept.

    Raises:
        SpaceError: it is none.
    """
    space.check(variant.as_dict())
    return space.params_of(variant)


@lru_cache(maxsize=MAX_KINDS)
def _judged_seeds(
    space: SearchSpace, kind: KernelKind, numerics: Numerics, deterministic: bool, device: Device
) -> KindSeeds:
    """The seeds of a kind, judged."""
    judged: list[tuple[int, Variant, Judgement, Judgement]] = []
    of_kind = kind_facts(kind, numerics, deterministic, device)
    for number, variant, params, other in _seeds_of(space):
        speaks = feasibility.judge({**of_kind, **params}, space.let, _names_of_sizes(space), [other])
        if not speaks.hopeless:
            judgement = _judged(space, variant, kind, numerics, deterministic, device)
            if not judgement.hopeless:
                judged.append((number, variant, speaks, judgement))
    return KindSeeds(why_unavailable=lambda variant: space.why_unavailable(), judged=tuple(judged), rules=SharedRules())


def of(op: Op) -> tuple[SearchSpace, ...]:
    """The spaces of an operation's templates; the default is taken from the first that has one."""
    return tuple(load(template) for template in resources.template_names(op))


@lru_cache(maxsize=16)
def load(template: str) -> SearchSpace:
    """Reads the search space of a template.

    Raises:
        SpaceError: the file is not a search space; the sentence says where.
        UsageError: the template's name is none.
    """
    with garbage_collection.paused():
        return _read(template)


def _read(template: str) -> SearchSpace:
    path, file = space_file.read(template)
    try:
        return _checked(file, digest_of(path.read_text(encoding="utf-8")))
    except SpaceError as error:
        raise SpaceError(f"in {path}, {error}") from None


def _checked(file: space_file.SpaceFile, digest: str) -> SearchSpace:
    """The search space of a file whose every name is known before the search asks for it."""
    known = set(FACTS)
    for name, parameter in file.parameters.items():
        space_file.define(name, known)
        if len(set(parameter.choices)) != len(parameter.choices):
            raise SpaceError(f"the choices of {name} must differ, got {parameter.choices}; remove the double")
    implied = {name: parameter.implied for name, parameter in file.parameters.items() if parameter.implied is not None}
    let: dict[str, Rule] = {}
    for name, text in file.let.items():
        let[name] = space_file.rule_of(text, known)  # a let builds on those before it
        space_file.define(name, known)
    space = SearchSpace(
        template=file.template,
        interpreted=file.interpreted,
        digest=digest,
        choices={name: tuple(parameter.choices) for name, parameter in file.parameters.items()},
        about={name: parameter.about for name, parameter in file.parameters.items()},
        let=let,
        require=tuple(
            Requirement(rule=space_file.rule_of(entry.rule, known), because=entry.because) for entry in file.require
        ),
        triton=tuple(file.triton),
        step_bytes=file.step_bytes,
        deterministic=space_file.rule_of(file.deterministic, file.parameters),
        specialised=file.specialised,
        heads_together=space_file.rule_of(file.heads_together, {*file.parameters, *HEADS}),
        tile=_tile(file),
        rehearsal={
            name: space_file.rule_of(str(text), {*file.parameters, *_BLOCKS}) for name, text in file.rehearsal.items()
        },
        ablation=tuple(file.ablation),
        barriers=tuple(file.barriers),
        fixed=dict(file.fixed),
        implied=implied,
        seeds=tuple(
            (space_file.rule_of(str(seed.pop("when", 1)), known), {**file.base, **seed})
            for seed in space_file.each_seed(file.seeds)
        ),
    )
    _check_rehearsal(space)
    if unknown := sorted({*space.ablation, *space.barriers} - set(space.choices)):
        raise SpaceError(f"an ablation must change parameters, got {unknown[0]!r}; correct it")
    space.check({**{name: values[0] for name, values in space.choices.items()}, **space.implied})
    for _, params in space.seeds:
        space.check(params)
    return space


def _tile(file: space_file.SpaceFile) -> str:
    if unknown := sorted(set(_PLACES.findall(file.tile)) - set(file.parameters)):
        raise SpaceError(f"a tile must name parameters in braces, got {unknown[0]!r}; correct it")
    return file.tile


def _check_rehearsal(space: SearchSpace) -> None:
    if unknown := sorted(set(space.rehearsal) - {*space.choices, *_BLOCKS}):
        raise SpaceError(f"a rehearsal must set parameters, block_q and block_kv, got {unknown[0]!r}; correct it")
    for name, rule in space.rehearsal.items():
        if name in space.choices and not rule.names and rule({}) not in space.choices[name]:
            options = ", ".join(str(choice) for choice in space.choices[name])
            raise SpaceError(f"the rehearsal of {name} must be one of {options}, got {rule({})!r}; correct it")
