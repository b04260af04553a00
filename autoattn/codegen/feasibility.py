"""Judges the rules of a search space once for a variant and a kind of problem, but for what they ask of sizes."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from autoattn.codegen.space_facts import SIZES
from autoattn.codegen.space_rules import Rule
from autoattn.core.variant import Value

FactValues = Mapping[str, "Value | float"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A rule that every variant meets, and what it means in words."""

    rule: Rule
    because: str

    @property
    def refusal(self) -> str:
        """What is said of a variant that does not meet it."""
        return f"{self.because} (needs {self.rule.text})"


class DerivedFacts(dict[str, "Value | float"]):
    """Facts and parameters, and what a space's `let` makes of them: worked out when a rule first asks for it."""

    __slots__ = ("let",)

    def __init__(self, facts: FactValues, let: Mapping[str, Rule]) -> None:
        super().__init__(facts)
        self.let = let

    def __missing__(self, name: str) -> Value | float:
        value: Value | float = self.let[name](self)
        self[name] = value
        return value

    def with_sizes(self, sizes: FactValues) -> DerivedFacts:
        """The same with the sizes of one problem; nothing that rests on sizes may be worked out here."""
        facts = DerivedFacts(self, self.let)
        facts.update(sizes)
        return facts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """What rules say of one set of parameters, whatever the sizes, and what is left to ask of sizes."""

    facts: DerivedFacts  # all but sizes and what rests on them
    of_sizes: frozenset[str]  # names of these
    # Rules that ask for sizes, with what is said where they break; in order, before the one that breaks in any case.
    sized: tuple[tuple[Rule, str], ...]
    refusal: str | None  # of the first rule that breaks in any case

    @property
    def hopeless(self) -> bool:
        """Whether no sizes make it feasible."""
        return self.refusal is not None

    def specialised(self) -> Judgement:
        """The same, with all that needs no sizes worked out: for kernels that are asked about ever new sizes."""
        sized, refusal = [], self.refusal
        for rule, broken in self.sized:
            rule = rule.given(self.facts, self.of_sizes)
            if rule.names:
                sized.append((rule, broken))
            elif not rule({}):
                refusal = broken
                break
        let: dict[str, Rule] = {}
        facts: dict[str, Value | float] = {}
        pending = [name for rule, _ in sized for name in rule.names]
        while pending:
            name = pending.pop()
            if name in self.facts:  # of a part that has no result
                facts[name] = self.facts[name]
            elif name in self.facts.let and name not in let:
                let[name] = self.facts.let[name].given(self.facts, self.of_sizes)
                pending += let[name].names
        return replace(self, facts=DerivedFacts(facts, let), sized=tuple(sized), refusal=refusal)

    @property
    def sizes_read(self) -> frozenset[str]:
        """The SIZES that its rules, and what these rest on, ask for."""
        names = [rule.names for rule in (*(rule for rule, _ in self.sized), *self.facts.let.values())]
        return SIZES & frozenset().union(*names)

    def why_not(self, sizes: FactValues) -> str | None:
        """The first rule that breaks with these sizes, in words; None when none does.

        Args:
            sizes: `sizes_read`; others do not matter.
        """
        if self.sized:
            facts = self.facts.with_sizes(sizes)
            for rule, refusal in self.sized:
                if not rule(facts):
                    return refusal
        return self.refusal


@lru_cache(maxsize=4096)
def specialised(judgement: Judgement) -> Judgement:
    """`Judgement.specialised`, worked out once for a judgement."""
    return judgement.specialised()


# Names of rules with what is said where they break, in order; and what is said behind them all where no sizes will do.
SizeRules: TypeAlias = tuple[tuple[tuple[str, str], ...], str | None]


class SharedRules:
    """What many judgements ask of sizes, so that a rule which several ask is worked out once for each problem."""

    def __init__(self) -> None:
        self._let: dict[str, Rule] = {}  # every rule under a name of its own
        self._names: dict[Hashable, str] = {}  # identity of a rule -> its name
        self._rules: dict[Judgement, SizeRules] = {}
        self._distinct: dict[SizeRules, SizeRules] = {}

    def facts(self, sizes: FactValues) -> DerivedFacts:
        """The sizes of one problem, of which `first_broken` asks."""
        return DerivedFacts(sizes, self._let)

    def rules_of(self, judgement: Judgement) -> SizeRules:
        """What a judgement asks of sizes, found out once; one object for all that ask the same."""
        return self._rules.get(judgement) or self._add(judgement)

    def names(self, judgement: Judgement) -> tuple[str, ...]:
        """The names of the rules that a judgement asks; all hold where it says nothing against a kernel."""
        rules, refusal = self.rules_of(judgement)
        names = tuple(name for name, _ in rules)
        return names if refusal is None else (*names, self._name_of(_NEVER, judgement.facts))

    def _add(self, judgement: Judgement) -> SizeRules:
        special = specialised(judgement)
        rules = tuple((self._name_of(rule, special.facts), broken) for rule, broken in special.sized), special.refusal
        rules = self._rules[judgement] = self._distinct.setdefault(rules, rules)
        return rules

    def _name_of(self, rule: Rule, facts: DerivedFacts) -> str:
        """The name of a rule that asks for nothing but sizes and other rules here."""
        names = {name: self._name_of(facts.let[name], facts) for name in sorted(rule.names) if name in facts.let}
        identity = rule.identity(names, facts)
        name = self._names.get(identity)
        if name is None:
            rule = rule.renamed(names, facts)
            with _writing:
                name = self._names.get(identity, f"rule {len(self._names)}")
                self._let.setdefault(name, rule)
                self._names[identity] = name
        return name


def first_broken(size_rules: SizeRules, facts: DerivedFacts) -> str | None:
    """`Judgement.why_not` of what `SharedRules.rules_of` gives, with the facts of the same SharedRules.

    Raises:
        SpaceError: the arithmetic of a rule has no result.
    """
    rules, refusal = size_rules
    for name, broken in rules:
        if not facts[name]:
            return broken
    return refusal


_NEVER = Rule("0")
_writing = threading.Lock()


def judge(
    facts: FactValues, let: Mapping[str, Rule], of_sizes: frozenset[str], requirements: Sequence[Requirement]
) -> Judgement:
    """Asks all rules that need no sizes.

    Args:
        facts: all facts but SIZES, and the parameters.
        let: what names stand for; each may ask for those before it.
        of_sizes: `names_of_sizes` of these.
        requirements: in the order in which they are asked.
    """
    derived = DerivedFacts(facts, let)
    sized: list[tuple[Rule, str]] = []
    for requirement in requirements:
        if not requirement.rule.names.isdisjoint(of_sizes):
            sized.append((requirement.rule, requirement.refusal))
        elif not requirement.rule(derived):
            return Judgement(facts=derived, of_sizes=of_sizes, sized=tuple(sized), refusal=requirement.refusal)
    return Judgement(facts=derived, of_sizes=of_sizes, sized=tuple(sized), refusal=None)


def names_of_sizes(let: Mapping[str, Rule]) -> frozenset[str]:
    """SIZES, and the names that rest on them."""
    names = set(SIZES)
    for name, rule in let.items():
        if rule.names & names:
            names.add(name)
    return frozenset(names)
