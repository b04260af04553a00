"""Sentences that are formed when somebody reads them: a call chooses its kernel without any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

Text: TypeAlias = "str | Callable[[], str]"  # a sentence, or what forms it


class Reasons:
    """Why something runs, and what was tried before; equal to others that say the same."""

    __slots__ = ("_reason", "_texts")

    def __init__(self, reason: Text, texts: Iterable[Text] = ()) -> None:
        """Keeps sentences, formed or not.

        Args:
            reason: one sentence.
            texts: what was tried before, one sentence each.
        """
        self._reason = reason
        self._texts = tuple(texts)

    @property
    def reason(self) -> str:
        """The reason, formed once."""
        self._reason = formed(self._reason)
        return self._reason

    @property
    def steps(self) -> tuple[str, ...]:
        """What was tried before, formed once."""
        steps = tuple(map(formed, self._texts))
        self._texts = steps
        return steps

    @property
    def texts(self) -> tuple[Text, ...]:
        """What was tried before, formed or not."""
        return self._texts

    def because(self, reason: Text) -> Reasons:
        """Another reason behind the same steps."""
        return Reasons(reason, self._texts)

    def after(self, *texts: Text) -> Reasons:
        """The same reason behind more steps."""
        return Reasons(lambda: self.reason, (*self._texts, *texts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reasons) and (self.reason, self.steps) == (other.reason, other.steps)

    def __hash__(self) -> int:
        return hash((self.reason, self.steps))

    def __repr__(self) -> str:
        return f"Reasons({self.reason!r}, {self.steps!r})"


def formed(text: Text) -> str:
    """The sentence."""
    return text if isinstance(text, str) else text()
