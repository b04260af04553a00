"""Sentences are formed when somebody reads them, once."""

from __future__ import annotations

from autoattn.runtime.plan.reasons import Reasons


def test_a_sentence_is_formed_once_and_only_if_it_is_read() -> None:
    formed: list[str] = []

    def form(text: str) -> str:
        formed.append(text)
        return text

    words = Reasons(lambda: form("reason"), (lambda: form("first"), "second"))
    longer = words.after(lambda: form("third"))
    other = longer.because(lambda: form("other reason"))
    assert formed == []
    assert (words.steps, words.steps) == (("first", "second"),) * 2
    assert formed == ["first"]
    assert (other.reason, other.reason) == ("other reason",) * 2
    assert formed == ["first", "other reason"]
    assert (longer.reason, longer.steps) == ("reason", ("first", "second", "third"))


def test_words_that_say_the_same_are_equal() -> None:
    words = Reasons(lambda: "reason", (lambda: "step",))
    assert words == Reasons("reason", ("step",))
    assert hash(words) == hash(Reasons("reason", ("step",)))
    assert words != Reasons("reason")
    assert repr(words) == "Reasons('reason', ('step',))"
