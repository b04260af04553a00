"""Rules of data files: they compute as Python does, and can do nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoattn.codegen.space_rules import MAX_BITS, MAX_DEPTH, MAX_LENGTH, Rule
from autoattn.errors import SpaceError

FACTS = {"a": 3, "b": -2, "zero": 0, "half": 0.5, "yes": True, "word": "ieee"}


def refusal(text: object) -> str:
    with pytest.raises(SpaceError) as caught:
        Rule(text)  # type: ignore[arg-type]
    return one_sentence(caught.value)


def failure(text: str) -> str:
    rule = Rule(text)
    with pytest.raises(SpaceError) as caught:
        rule(FACTS)
    return one_sentence(caught.value)


def one_sentence(error: Exception) -> str:
    message = str(error)
    assert "\n" not in message
    assert len(message) < 3 * MAX_LENGTH
    return message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        (" a ", 3),
        ("-a", -3),
        ("a + b * 2", -1),
        ("(a + b) * 2", 2),
        ("a / 2", 1.5),
        ("b // 3", -1),
        ("b % 3", 1),
        ("a - half", 2.5),
        ("a < 4", True),
        ("a <= 2", False),
        ("a > 2", True),
        ("a >= 4", False),
        ("a == 3", True),
        ("a != 3", False),
        ("word == 'ieee'", True),
        ("word != 'ieee'", False),
        ("word == a", False),
        ("min(a, b, 1)", -2),
        ("max(a, b)", 3),
        ("not zero", True),
        ("a and b", -2),
        ("zero or a", 3),
        ("zero or word == 'tf32' and a", False),
        ("32 * yes", 32),
        ("True", True),
    ],
)
def test_the_language_is_pythons_arithmetic(text: str, value: object) -> None:
    answer = Rule(text)(FACTS)
    assert answer == value
    assert type(answer) is type(value)


def test_a_rule_knows_the_names_that_it_asks_for() -> None:
    assert Rule("min(a, 2) <= b or not word == 'c' and 1 < max(a, -d)").names == {"a", "b", "word", "d"}
    assert Rule("min(1, 2)").names == frozenset()


def test_and_and_or_look_no_further_than_they_must() -> None:
    assert Rule("zero and 1 / zero")(FACTS) == 0
    assert Rule("a or 1 / zero")(FACTS) == 3


@pytest.mark.parametrize(
    "text",
    [
        "a.real",
        "().__class__",
        "'a'.join",
        "__import__('os')",
        "open('f')",
        "eval('1')",
        "abs(a)",
        "a()",
        "min(1, 2)(3)",
        "a.min(1, 2)",
        "lambda: 1",
        "[1]",
        "(1, 2)",
        "{1}",
        "{1: 2}",
        "[x for x in a]",
        "min(x for x in a)",
        "a[0]",
        "'abc'[0]",
        "a if b else 1",
        "(x := 1)",
        "*a",
        "min(*a)",
        "min(*a, 1)",
        "min(**a)",
        "min(a, b, key=a)",
        "min(a, b, default=1)",
        "f'{a}'",
        "'a' f'{a:999999999}'",
        "b'a'",
        "1j",
        "None",
        "...",
        "2 ** 3",
        "9 ** 9 ** 9 ** 9",
        "1 << 9",
        "1 >> 9",
        "1 | 2",
        "1 & 2",
        "1 ^ 2",
        "~1",
        "+1",
        "a @ b",
        "a is b",
        "a in b",
        "a not in b",
        "1 < 2 < 3",
        "a == b == 1",
        "await a",
        "yield a",
    ],
)
def test_nothing_else_is_a_rule(text: str) -> None:
    assert repr(text) in refusal(text)


@pytest.mark.parametrize(
    "text", ["", " ", "1 +", "(", "a b", "1; 2", "a = 1", "import os", "1\n2", "`a`", "\0", "\ud800"]
)
def test_what_does_not_parse_is_refused(text: str) -> None:
    assert "must be arithmetic such as" in refusal(text)


@pytest.mark.parametrize("text", [None, 5, True, 1.5, ["1"], b"1"])
def test_what_is_no_text_is_refused(text: object) -> None:
    assert "must be text" in refusal(text)


@pytest.mark.parametrize("text", ["min()", "max(1)", "min('abc')", "min + 1", "min(max, 1)", "min"])
def test_min_and_max_compare_two_values_or_more_and_are_no_names(text: str) -> None:
    assert "min and max of two or more" in refusal(text)


def test_a_rule_is_short() -> None:
    assert Rule("1".ljust(MAX_LENGTH))({}) == 1
    assert f"at most {MAX_LENGTH} characters" in refusal("1".ljust(MAX_LENGTH + 1))
    assert f"at most {MAX_LENGTH} characters" in refusal("1" * 10**7)


@pytest.mark.parametrize(
    "nested",
    [
        lambda levels: "-" * levels + "1",
        lambda levels: "1" + " + 1" * levels,
        lambda levels: "not " * levels + "1",
        lambda levels: "min(1, " * levels + "1" + ")" * levels,
    ],
)
def test_a_rule_is_flat(nested: object) -> None:
    assert callable(nested)
    Rule(nested(MAX_DEPTH - 1))({})
    assert f"at most {MAX_DEPTH} levels" in refusal(nested(MAX_DEPTH))
    refusal(nested(MAX_LENGTH)[:MAX_LENGTH])


@pytest.mark.parametrize("text", ["(" * 250 + ")" * 250, "[" * 199 + "]" * 199, "(" * 190 + "[]" + ")" * 190])
def test_brackets_without_end_are_refused(text: str) -> None:
    refusal(text)


def test_parentheses_are_no_levels() -> None:
    assert Rule("(" * 100 + "1" + ")" * 100)({}) == 1


@pytest.mark.parametrize("text", ["1 / zero", "1 // zero", "1 % zero", "a / (b + 2)", "half % 0"])
def test_division_by_zero_names_the_rule(text: str) -> None:
    assert repr(text) in failure(text)


@pytest.mark.parametrize(
    "text",
    [
        "'a' * 1000000000000",
        "word * a",
        "word + word",
        "'%999999999999d' % 1",
        "'%s' % word",
        "-word",
        "word / 2",
        "word < a",
        "max(word, 1)",
    ],
)
def test_words_are_only_compared(text: str) -> None:
    assert "mixes numbers and words" in failure(text)


def test_numbers_stay_small() -> None:
    largest = 2**MAX_BITS - 1
    assert Rule("x + 0")({"x": largest}) == largest
    facts = {"x": largest}
    rule = Rule("x * x")
    with pytest.raises(SpaceError, match=f"more than {MAX_BITS} bits"):
        rule(facts)
    assert "fails" in failure("1" + "0" * 400 + " / 3")  # no float is so large


# Any rule


numbers = st.integers(-1000, 1000).map(str) | st.sampled_from(["0.5", "1e3", "a", "b", "zero", "half", "yes"])
words = st.sampled_from(["word", "'ieee'", "'tf32'"])


def pairs(parts: st.SearchStrategy[str], signs: list[str]) -> st.SearchStrategy[str]:
    return st.tuples(parts, st.sampled_from(signs), parts).map(lambda three: f"({' '.join(three)})")


def larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    calls = st.tuples(st.sampled_from(["min", "max"]), st.lists(parts, min_size=2, max_size=4))
    return st.one_of(
        pairs(parts, ["+", "-", "*", "/", "//", "%"]),
        pairs(parts, ["<", "<=", ">", ">=", "==", "!="]),
        pairs(words, ["==", "!=", "<"]),
        pairs(parts, ["and", "or"]),
        parts.map(lambda part: f"(not {part})"),
        parts.map(lambda part: f"-{part}"),
        calls.map(lambda call: f"{call[0]}({', '.join(call[1])})"),
    )


@given(st.recursive(numbers, larger, max_leaves=12))
def test_every_rule_agrees_with_python(text: str) -> None:
    rule = Rule(text)
    try:
        expected = eval(text, {"__builtins__": {"min": min, "max": max}}, FACTS)
    except (ArithmeticError, TypeError):
        with pytest.raises(SpaceError):
            rule(FACTS)
    else:
        assert repr(rule(FACTS)) == repr(expected)


@given(st.text(max_size=40) | st.text(alphabet="ab01+-*/%()<=>.,[]{}'\"fnotrandmi \n\\", max_size=40))
def test_any_text_is_a_rule_or_refused_in_one_sentence(text: str) -> None:
    try:
        rule = Rule(text)
    except SpaceError as error:
        one_sentence(error)
        return
    try:
        value = rule(dict.fromkeys(rule.names, 1))
    except SpaceError as error:
        one_sentence(error)
    else:
        assert isinstance(value, int | float | str)


@pytest.mark.parametrize(
    ("text", "missing", "folded"),
    [
        ("a + x * b", {"x"}, False),
        ("a == 3 or x > 5", set(), True),
        ("a == 4 or x > 5", {"x"}, False),
        ("x > 5 or a == 3 or x > 9", {"x"}, False),
        ("a == 3 and x > 5", {"x"}, False),
        ("a == 4 and x > 5", set(), True),
        ("min(a, b) + half", set(), True),
        ("word == 'ieee' and x > 1", {"x"}, False),
        ("word == 'tf32' or word != 'x' and x > 1", {"x"}, False),
        ("not yes or x", {"x"}, False),
        ("x > 5 and 1 / zero > 0", {"x"}, False),
    ],
)
def test_a_rule_that_is_given_facts_asks_for_the_others_and_has_the_same_value(
    text: str, missing: set[str], folded: bool
) -> None:
    rule = Rule(text)
    given_facts = rule.given(FACTS, frozenset({"x"}))
    assert given_facts.text == text
    assert set(given_facts.names) - {"zero"} == missing
    for x in (0, 1, 4, 6, 9.5):
        try:
            value = rule({**FACTS, "x": x})
        except SpaceError as error:
            with pytest.raises(SpaceError, match=str(error)[:20].replace("(", ".")):
                given_facts({**FACTS, "x": x})
        else:
            assert given_facts({} if folded else {**FACTS, "x": x}) == value
