"""The report's first screen: where kernels are behind or even, what is fastest, what that rests on, what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autoattn.core.cache_entry import CacheEntry
from autoattn.core.paired_stats import Interval
from autoattn.report import attendance, figures, groups
from autoattn.report.contents import Card, Section
from autoattn.report.groups import Group

SHOWN = 5  # problems that are behind or even which the first screen lists; the others are folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to do next, and the command that does it."""

    words: str
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Facts of all sections together."""

    measured: int  # problems
    predicted: int
    met: int  # measured problems that met a rival
    behind: tuple[Card, ...]  # those behind or even: the most behind first, and small problems after all others
    groups: tuple[Group, ...]
    trust: tuple[str, ...]  # sentences
    steps: tuple[Step, ...]

    @property
    def devices(self) -> int:
        """Devices with measured problems."""
        return len({group.device for group in self.groups})

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of the groups, and what each means."""
        shown = {group.kind for group in self.groups}
        return {kind: words for kind, words in groups.KINDS.items() if kind in shown}


def of(sections: Sequence[Section]) -> Overview:
    """The first screen of a report."""
    cards = [card for section in sections if section.measured for card in section.measured.cards]
    met = [card for card in cards if card.best is not None]
    predicted = sum(len(section.predicted.cards) for section in sections if section.predicted)
    behind = sorted(filter(is_behind, met), key=_most_behind)
    return Overview(
        measured=len(cards),
        predicted=predicted,
        met=len(met),
        behind=tuple(behind),
        groups=tuple(
            group
            for section in sections
            if section.measured
            for group in groups.of(section.device, [card.entry for card in section.measured.cards])
        ),
        trust=tuple(_trust(cards, predicted)),
        steps=tuple(_steps(sections, cards, behind)),
    )


def is_behind(card: Card) -> bool:
    """Whether a rival is as fast as the kernel, or faster."""
    return card.best is not None and figures.standing(card.best[1]) != "good"


def words_of(card: Card) -> str:
    """What a filter of rows finds beside the row's text: the problem's kind, and how the kernel stands."""
    standing = {"good": "ahead", "": "even", "bad": "behind"}
    stands = [standing[figures.standing(card.best[1])]] if card.best is not None else []
    return " ".join([groups.kind_of(card.entry.problem), *stands])


def _most_behind(card: Card) -> tuple[bool, float]:
    assert card.best is not None
    return groups.kind_of(card.entry.problem) == "small", figures.middle(card.best[1])


def _trust(cards: Sequence[Card], predicted: int) -> list[str]:
    entries = [card.entry for card in cards]
    lines = []
    if entries:
        lines.append(
            f"All {len(entries)} measured kernels passed the gate: each agrees with a float64 reference "
            f"in {sum(entry.verdict.checks for entry in entries if entry.verdict is not None):,} checks together."
        )
        leads = [card.best[1] for card in cards if card.best is not None]
        known = sum(isinstance(lead, Interval) for lead in leads)
        lines.append(
            f"{known} of {len(leads)} ratios have a 95% interval from interleaved rounds"
            + ("." if known == len(leads) else "; the others are ratios of two medians.")
        )
        lines += [f"Absent from the finals: {words}." for words in filter(None, [_absences(entries)])]
    lines += [f"{predicted} problems are predicted: no mean, chart or ranking here counts them."] if predicted else []
    doubts = {
        "finals ended undecided": sum(entry.finals is not None and not entry.finals.decided for entry in entries),
        "kernels were timed on a card that was slowed down": sum(
            entry.measurement is not None and entry.measurement.throttled for entry in entries
        ),
        "entries carry a mark of a verification": sum(entry.mark is not None for entry in entries),
    }
    return lines + [f"{count} {words}." for words, count in doubts.items() if count]


def _absences(entries: Sequence[CacheEntry]) -> str:
    """Who was absent, and in how many problems; "" where nobody was."""
    words = [f"{attendance.title(row.name)} in {row.absent.total()}" for row in attendance.of(entries) if row.absent]
    old = sum(entry.absent is None for entry in entries)
    words += [f"not recorded for {old} of {len(entries)}, which met PyTorch's backends or nobody"] if old else []
    return "; ".join(words)


def _steps(sections: Sequence[Section], cards: Sequence[Card], behind: Sequence[Card]) -> list[Step]:
    steps = []
    if behind:
        first = behind[0]
        steps.append(
            Step(
                words=f"Search longer where a rival is not beaten, beginning with {first.entry.problem}:",
                command=first.longer,
            )
        )
    if unrecorded := sum(card.entry.absent is None for card in cards):
        steps.append(
            Step(
                words=f"Tune {unrecorded} problems again with FlashAttention and FlashInfer installed, "
                "so that their finals meet more than PyTorch's backends."
            )
        )
    steps += [Step(words=f"Install {name}: {why}.") for name, why in _not_installed(cards)]
    for section in sections:
        if section.predicted is not None:
            steps.append(
                Step(
                    words=f"Measure {len(section.predicted.cards)} predicted {section.op} problems "
                    f"on the {section.full_name}; the search starts from these candidates:",
                    command="autoattn tune --device auto --shapes shapes.yaml",
                )
            )
    if marked := [card for card in cards if card.entry.mark is not None]:
        steps.append(Step(words=f"Tune {len(marked)} marked problems again, first:", command=marked[0].reproduce))
    return steps or [Step(words="Nothing: every kernel is ahead of all that it met.")]


def _not_installed(cards: Sequence[Card]) -> list[tuple[str, str]]:
    missing = Counter(
        name
        for card in cards
        for name, reason in (card.entry.absent or {}).items()
        if reason.startswith("not installed")
    )
    return [(attendance.title(name), f"{count} problems have not met it") for name, count in sorted(missing.items())]
