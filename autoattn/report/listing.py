"""The text of kernels: the winner's, and in what it differs from the runner-up's."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace

from autoattn.cache import store
from autoattn.codegen import search_space
from autoattn.core.cache_entry import CacheEntry, Candidate
from autoattn.core.variant import Value, Variant, digest_of
from autoattn.errors import AutoattnError
from autoattn.report import figures
from autoattn.search.importance import params_of

# Characters of kernels and differences in a report of at most HUNDRED problems, and what each further one adds; beyond
# it a command stands in their place. The shipped caches, of 337 problems, need 5,110,000.
HUNDRED, ROOM, ROOM_OF_PROBLEM = 100, 1_300_000, 20_000
CONTEXT = 2  # lines around a difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A text of a kernel, or why it is not here."""

    text: str = ""  # empty when it cannot be rendered, another card shows it, or there is no room
    note: str = ""  # why it is empty, or in what it differs from what the entry holds
    same_as: str = ""  # anchor of the card that shows the same text


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """From the runner-up's text to the winner's."""

    lines: tuple[tuple[str, str], ...] = ()  # (class, line)
    note: str = ""
    same_as: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One parameter of the winner."""

    name: str
    value: Value
    other: str  # the runner-up's where it differs
    about: str  # what it does


@dataclass(slots=True, kw_only=True)
class Shelf:
    """All texts of a report: each is shown once, as long as there is room."""

    room: int = ROOM
    _shown: dict[str, str] = field(default_factory=dict)  # text -> anchor of the card that shows it

    @classmethod
    def among(cls, problems: int) -> Shelf:
        """As much room as a report of so many problems has."""
        return cls(room=ROOM + ROOM_OF_PROBLEM * max(0, problems - HUNDRED))

    def listing(self, entry: CacheEntry, anchor: str) -> Listing:
        """The winner's text for the card `anchor`."""
        text, note = rendered(entry, entry.variant)
        if not text:
            return Listing(note=note)
        if (digest := digest_of(text)) != entry.source_digest:
            note = f"The template has changed since: this is {digest}, the entry rests on {entry.source_digest}."
        if text in self._shown:
            return Listing(same_as=self._shown[text], note=note)
        if len(text) > self.room:
            return Listing(note="The kernel is left out to keep this file small; the command above writes it.")
        self._place(text, anchor)
        return Listing(text=text, note=note)

    def difference(self, entry: CacheEntry, anchor: str) -> Difference | None:
        """From the runner-up's text to the winner's, for the card `anchor`; None without a runner-up."""
        if not entry.candidates:
            return None
        runner_up = entry.candidates[0]
        if runner_up.template != entry.template:
            return Difference(note=f"The runner-up is of another template, {runner_up.template}.")
        (text, note), (runner_up_text, why_not) = (
            rendered(entry, variant) for variant in (entry.variant, runner_up.variant)
        )
        if not text or not runner_up_text:
            return Difference(note=note or why_not)
        lines = tuple(_marked(runner_up_text, text, runner_up))
        whole = "\n".join(line for _, line in lines)
        if whole in self._shown:
            return Difference(same_as=self._shown[whole])
        if len(whole) > self.room:
            return Difference(note="The difference is left out to keep this file small.")
        self._place(whole, anchor)
        return Difference(lines=lines)

    def _place(self, text: str, anchor: str) -> None:
        self._shown[text] = anchor
        self.room -= len(text)


def rendered(entry: CacheEntry, variant: Variant) -> tuple[str, str]:
    """The text of an entry's winner or runner-up as it was tuned, or in words why there is none."""
    try:
        if not search_space.load(variant.template).holds(variant.as_dict()):
            return "", f"The kernel cannot be rendered: it was tuned in another search space of {variant.template}."
        return store.source_of(replace(entry, template=variant.template, params=variant.as_dict())).text, ""
    except (AutoattnError, OSError) as error:
        return "", f"The kernel cannot be rendered: {error}"


def choices(entry: CacheEntry) -> tuple[Choice, ...]:
    """The winner's parameters beside the runner-up's; those that differ first."""
    runner_up = _params(entry.candidates[0], entry) if entry.candidates else {}
    rows = [
        Choice(
            name=name,
            value=value,
            other=str(runner_up[name]) if name in runner_up and runner_up[name] != value else "",
            about=_about(entry.template).get(name, ""),
        )
        for name, value in sorted(params_of(entry.variant).items())
    ]
    return tuple(sorted(rows, key=lambda choice: not choice.other))


def differing(candidate: Candidate, entry: CacheEntry) -> str:
    """The parameters in which a candidate differs from the winner; all of them where it is of another template."""
    own = params_of(entry.variant)
    if candidate.template != entry.template:
        return f"{candidate.template} {figures.settings(candidate.params)}"
    changed = {name: value for name, value in params_of(candidate.variant).items() if own.get(name) != value}
    return figures.settings(changed) or "the same parameters"


def _params(candidate: Candidate, entry: CacheEntry) -> dict[str, Value]:
    return params_of(candidate.variant) if candidate.template == entry.template else {}


def _about(template: str) -> dict[str, str]:
    try:
        return search_space.load(template).about
    except (AutoattnError, OSError):
        return {}


def _marked(before: str, after: str, runner_up: Candidate) -> list[tuple[str, str]]:
    """The lines of a unified difference with the class of each."""
    kinds = {"+": "in", "-": "out", "@": "at"}
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"runner-up {runner_up.source_digest}", "winner", "", "", CONTEXT, ""
    )
    return [(kinds.get(line[:1], "same"), line) for line in lines]
