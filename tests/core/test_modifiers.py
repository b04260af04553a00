"""Modifiers: their names in words, and which of them change scores."""

from __future__ import annotations

import pytest

from autoattn.core.modifiers import SWITCHES, Bias, Modifiers, digest


def test_names_are_those_that_are_there_and_learned_slopes_stand_with_alibi() -> None:
    assert Modifiers().names == ()
    every = Modifiers(bias=Bias.LEARNED, **dict.fromkeys(SWITCHES, True))  # type: ignore[arg-type]
    assert every.names == ("softcap", "alibi-learned", "sinks", "dropout", "bias-learned")


def test_expressions_have_names_of_their_own() -> None:
    first, second = (Modifiers(score_mod=text).names for text in ("score + 1.0", "score + 2.0"))
    assert first == (f"mod-{digest('score + 1.0')}",)
    assert first != second


@pytest.mark.parametrize(
    ("modifiers", "changed"),
    [
        (Modifiers(), False),
        (Modifiers(sinks=True, dropout=True), False),
        (Modifiers(score_mod="score + 1.0"), True),
        (Modifiers(softcap=True), True),
        (Modifiers(alibi=True), True),
        (Modifiers(bias=Bias.KEYS), True),
    ],
    ids=lambda case: " ".join(case.names) or "none" if isinstance(case, Modifiers) else None,
)
def test_scores_are_changed_by_all_but_sinks_and_dropout(modifiers: Modifiers, changed: bool) -> None:
    assert modifiers.on_scores is changed
