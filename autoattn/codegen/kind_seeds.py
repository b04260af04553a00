"""The seeds of a search space for one kind of problem: which of them speak of a problem and can run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autoattn.codegen.feasibility import DerivedFacts, Judgement, SharedRules
from autoattn.core.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KindSeeds:
    """The seeds of a space that some sizes of a kind make feasible."""

    why_unavailable: Callable[[Variant], str | None]  # why the installed Triton cannot compile a variant's template
    # Number, which equal variants share; variant; whether it speaks of a problem; whether it can run
    judged: tuple[tuple[int, Variant, Judgement, Judgement], ...]
    rules: SharedRules  # of these judgements
    # Place of a seed -> names of the rules that say whether it speaks of a problem, and of those that say whether it
    # can run, once they are needed
    spoken: dict[int, tuple[str, ...]] = field(default_factory=dict)
    runnable: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def sharing(self, rules: SharedRules) -> KindSeeds:
        """The same seeds, whose rules are worked out together with others."""
        return replace(self, rules=rules, spoken={}, runnable={})

    def feasible(self, facts: DerivedFacts) -> Iterator[Variant]:
        """Those that speak of a problem and are feasible, in the file's order.

        Args:
            facts: the sizes of the problem, made by `rules`.
        """
        given: set[int] = set()
        for place, (number, variant, speaks, judgement) in enumerate(self.judged):
            if (
                number not in given
                and self._hold(self.spoken, place, speaks, facts)
                and self._hold(self.runnable, place, judgement, facts)
            ):
                if self.why_unavailable(variant):
                    continue
                given.add(number)
                yield variant

    def _hold(
        self, names_of: dict[int, tuple[str, ...]], place: int, judgement: Judgement, facts: DerivedFacts
    ) -> bool:
        """Whether all rules of a judgement hold; their names are found out once."""
        names = names_of.get(place)
        if names is None:
            names = names_of[place] = self.rules.names(judgement)
        return all(map(facts.__getitem__, names))
