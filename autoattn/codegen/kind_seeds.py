"""The seeds of a search space for one kind of problem: which of them speak of a problem and can run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autoattn.codegen.feasibility import DerivedFacts, Judgement, SharedRules
from autoattn.core.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KindSeeds:
    """The seeds of a space that some sizes of a kind make feasible."""

    why_unavailable: Callable[[], str | None]  # why the installed Triton cannot compile the template
    # Number, which equal variants share; variant; whether it speaks of a problem; whether it can run
    judged: tuple[tuple[int, Variant, Judgement, Judgement], ...]
    rules: SharedRules  # of these judgements
    # Place of a seed -> names of the rules that say whether it speaks of a problem, and of all its rules, once asked
    spoken: dict[int, tuple[str, ...]] = field(default_factory=dict)
    asked: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def sharing(self, rules: SharedRules) -> KindSeeds:
        """The same seeds, whose rules are worked out together with others."""
        return replace(self, rules=rules, spoken={}, asked={})

    def feasible(self, facts: DerivedFacts) -> Iterator[Variant]:
        """Those that speak of a problem and are feasible, in the file's order.

        Args:
            facts: the sizes of the problem, made by `rules`.
        """
        if self.why_unavailable():
            return
        asked = self.asked
        given: set[int] = set()
        for place, (number, variant, _, _) in enumerate(self.judged):
            if number in given:
                continue
            names = asked.get(place)
            if names is None and (names := self._ask(place, facts)) is None:
                continue
            for name in names:
                if not facts[name]:
                    break
            else:
                given.add(number)
                yield variant

    def _ask(self, place: int, facts: DerivedFacts) -> tuple[str, ...] | None:
        """The names of all rules of a seed, looked into when it first speaks of a problem; None where it does not."""
        _, _, speaks, judgement = self.judged[place]
        names = self.spoken.get(place)
        if names is None:
            names = self.spoken[place] = self.rules.names(speaks)
        for name in names:
            if not facts[name]:
                return None
        names = self.asked[place] = names + self.rules.names(judgement)
        return names
