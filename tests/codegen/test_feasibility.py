"""Rules that are judged once for a kind of problem say what the rules of a search space say, asked one by one."""

from __future__ import annotations

import random
from typing import Any

import drawn
import pytest
import samples
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

from autoattn.codegen import feasibility, search_space
from autoattn.codegen.feasibility import DerivedFacts, Requirement, SharedRules
from autoattn.codegen.search_space import SearchSpace
from autoattn.codegen.space_facts import FACTS, SIZES, facts_of, kind_facts, size_facts
from autoattn.codegen.space_rules import Rule
from autoattn.core import device_profiles, kernel_kind
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem

LET = {"tiles": Rule("batch * BLOCK_M"), "waves": Rule("tiles / sm_count"), "bytes": Rule("BLOCK_M * head_dim")}
FIXED = {"BLOCK_M": 64, "head_dim": 128, "sm_count": 100}
DEVICES = [device_profiles.named(name) for name in ("a30", "h200", "b200")]


def requirement(rule: str) -> Requirement:
    return Requirement(rule=Rule(rule), because=f"because of {rule}")


def refusal_of_each_rule(space: SearchSpace, params: dict[str, Any], problem: Problem, device: Device) -> str:
    """The first rule that breaks, by all facts at once."""
    facts = DerivedFacts(facts_of(problem, device) | params, space.let)
    rules = space.requirements(deterministic=problem.deterministic)
    return next((each.refusal for each in rules if not each.rule(facts)), "")


@settings(max_examples=150)
@given(st.sampled_from(DEVICES), strategies.problems(tiny=False), st.integers())
def test_a_judgement_names_the_rule_that_breaks_first(device: Device, problem: Problem, seed: int) -> None:
    rng = random.Random(seed)
    shared = SharedRules()  # of all templates together
    for space in search_space.of(Op.FORWARD):
        if space.why_unavailable():
            continue
        resized = drawn.resized(rng, problem, drawn.LARGE).problem
        params = {name: rng.choice(choices) for name, choices in space.choices.items()}
        seeds = [{**space.implied, **values} for _, values in space.seeds]
        for values in (params, rng.choice(seeds)):
            judgement = space.judgement_of(space.variant(values), problem, device)
            specialised, rules = judgement.specialised(), shared.rules_of(judgement)
            for call in (problem, resized):  # the second is judged by what was kept of the first
                refusal = space.why_infeasible(space.variant(values), call, device) or ""
                assert refusal == refusal_of_each_rule(space, values, call, device)
                assert (specialised.why_not(size_facts(call)) or "") == refusal
                assert (feasibility.first_broken(rules, shared.facts(size_facts(call))) or "") == refusal


@settings(max_examples=100)
@given(st.sampled_from(DEVICES), strategies.problems(tiny=False))
def test_seeds_are_those_that_speak_of_a_problem_and_can_run(device: Device, problem: Problem) -> None:
    for space in search_space.of(Op.FORWARD):
        expected = []
        for when, params in space.seeds:
            facts = DerivedFacts(facts_of(problem, device) | space.implied | params, space.let)
            variant = space.variant(params)
            if when(facts) and space.why_infeasible(variant, problem, device) is None:
                expected.append(variant)
        assert space.seeds_for(problem, device) == list(dict.fromkeys(expected))


def test_facts_of_a_kind_and_sizes_are_all_facts() -> None:
    problem, device = samples.problem(), DEVICES[1]
    of_kind = kind_facts(kernel_kind.of(problem), problem.numerics, problem.deterministic, device)
    sizes = size_facts(problem)
    assert set(sizes) == SIZES
    assert set(of_kind) == FACTS - SIZES
    assert facts_of(problem, device) == {**of_kind, **sizes}


def test_a_rule_without_sizes_is_asked_once_and_ends_the_list() -> None:
    rules = [requirement("tiles < 1000"), requirement("bytes < 100"), requirement("waves < 2")]
    judgement = feasibility.judge(FIXED, LET, feasibility.names_of_sizes(LET), rules)
    assert judgement.hopeless
    assert judgement.sized == ((rules[0].rule, rules[0].refusal),), "what stands behind the broken rule is never asked"
    assert judgement.why_not({"batch": 1}) == "because of bytes < 100 (needs bytes < 100)"
    assert judgement.why_not({"batch": 99}) == "because of tiles < 1000 (needs tiles < 1000)", "it stands in front"


def test_names_that_rest_on_sizes_are_worked_out_for_each_problem() -> None:
    judgement = feasibility.judge(
        FIXED, LET, feasibility.names_of_sizes(LET), [requirement("bytes > 0"), requirement("waves < 2")]
    )
    assert not judgement.hopeless
    assert judgement.why_not({"batch": 1}) is None
    assert judgement.why_not({"batch": 4}) == "because of waves < 2 (needs waves < 2)"
    assert judgement.why_not({"batch": 1}) is None
    assert not {"tiles", "waves", "batch"} & set(judgement.facts)


def test_a_specialised_judgement_asks_of_sizes_alone() -> None:
    rules = [requirement(rule) for rule in ("BLOCK_M == 64 or tiles > 7", "BLOCK_M < 64 or waves < 2", "batch > 1")]
    rules.append(requirement("BLOCK_M > 64 and tiles > 1"))
    judgement = feasibility.judge(FIXED, LET, feasibility.names_of_sizes(LET), rules).specialised()
    assert [rule.text for rule, _ in judgement.sized] == ["BLOCK_M < 64 or waves < 2", "batch > 1"]
    assert [set(rule.names) for rule, _ in judgement.sized] == [{"waves"}, {"batch"}]
    assert not judgement.facts, "nothing but sizes is asked for"
    assert judgement.refusal == rules[3].refusal, "no sizes meet it"
    assert judgement.why_not({"batch": 4}) == rules[1].refusal
    assert judgement.why_not({"batch": 1}) == rules[2].refusal


@pytest.mark.parametrize("name", ["tiles", "waves", *sorted(SIZES)])
def test_a_name_that_rests_on_a_size_is_one_of_sizes(name: str) -> None:
    assert name in feasibility.names_of_sizes(LET)
    assert "bytes" not in feasibility.names_of_sizes(LET)


def test_judgements_share_a_rule_that_is_the_same_when_all_is_put_in() -> None:
    let = {"rows": Rule("seq_q * BLOCK_M"), "wide": Rule("rows > most")}
    requirements = [requirement("wide"), requirement("seq_kv > 2 * most")]

    def judged(**params: Any) -> feasibility.Judgement:
        return feasibility.judge(params, let, feasibility.names_of_sizes(let), requirements)

    shared = SharedRules()
    first, alike, whole, other = (
        shared.rules_of(judged(BLOCK_M=block_m, most=most))
        for block_m, most in ((64, 128), (64, 128), (64, 128.0), (32, 128))
    )
    assert alike is first, "equal parameters"
    assert first[0][1] == other[0][1], "the second rule asks for no BLOCK_M"
    assert first[0][0] != other[0][0]
    assert not {name for name, _ in whole[0]} & {name for name, _ in first[0]}, "128 and 128.0 are not the same"
    sizes = {"seq_q": 3, "seq_kv": 300}
    broken = [feasibility.first_broken(rules, shared.facts(sizes)) for rules in (first, other)]
    assert broken == [None, requirements[0].refusal]
