"""A look-up by shared rules chooses what the rules say, asked one by one of each entry and of each seed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import drawn
import samples
from hypothesis import given, settings
from hypothesis import strategies as st

from autoattn.cache import inventory, precedence, store
from autoattn.codegen import portfolio, search_space
from autoattn.core import kernel_kind, size_class
from autoattn.core.cache_entry import KERNEL, CacheEntry
from autoattn.core.problem import Numerics, Op, Problem
from autoattn.core.variant import Variant
from autoattn.runtime.plan import cache_lookup, tuned_entries
from autoattn.runtime.plan.cache_lookup import FARTHEST, NEAR, NEAR_CACHE, NEAR_SHARED_KEYS, SISTER_OCTAVES
from autoattn.runtime.plan.explanations import Level

H200 = samples.H200
FOLDERS = inventory.folders(None)
TUNED = {op: tuned_entries.read(op, H200, FOLDERS) for op in Op}
SHIPPED = [places[0].entry.problem for tuned in TUNED.values() for places in tuned.measured.values()]
HELD_BACK: dict[int, str | None] = {}  # to find out takes a rendered text


def why_not(entry: CacheEntry, problem: Problem) -> str | None:
    if id(entry) not in HELD_BACK:
        HELD_BACK[id(entry)] = store.why_held_back(entry)
    space = search_space.load(entry.template)
    as_tuned = replace(problem, deterministic=entry.problem.deterministic or problem.deterministic)
    return HELD_BACK[id(entry)] or space.why_infeasible(entry.variant, as_tuned, H200)


def is_close(problem: Problem, tuned: Problem, octaves: float) -> bool:
    """Whether the winner of a problem so far away may serve."""
    if tuned.numerics not in (Numerics.ANY, problem.numerics):
        return False
    if problem.cache is not None:
        full = min(decoding.batch * decoding.heads_kv for decoding in (problem, tuned)) >= H200.sm_count
        return octaves <= (FARTHEST if full else NEAR_CACHE)
    if portfolio.was_measured_for(problem, H200):
        return octaves <= NEAR
    shared = problem.op is Op.BACKWARD and problem.group_size > 1
    if shared and search_space.load("gluon/backward").seeds_for(problem, H200):
        return octaves <= NEAR_SHARED_KEYS and tuned.group_size == problem.group_size
    return octaves <= FARTHEST


def chosen_one_by_one(problem: Problem) -> tuple[str, CacheEntry | None, Variant]:
    """What answers a problem that was not tuned itself: route, entry and variant."""
    near: list[tuple[bool, float, bool, str, CacheEntry]] = []
    own = ((key, places, False) for key, places in TUNED[problem.op].measured.items())
    sisters = ((neighbour.key, neighbour.places, True) for neighbour in TUNED[problem.op].sisters)
    for key, places, is_sister in (*own, *sisters):
        tuned = places[0].entry.problem
        octaves = tuned_entries.distance_between(tuned, problem)  # a sister with as many SMs is as far away
        if kernel_kind.shares_kernels(tuned, problem) and is_close(problem, tuned, octaves):
            entry = precedence.used_first(places, lambda each: why_not(each, problem))[0].entry
            otherwise = tuned.deterministic is not problem.deterministic
            near.append((otherwise, octaves + (SISTER_OCTAVES if is_sister else 0.0), is_sister, key, entry))
    for otherwise, _, _, _, entry in sorted(near, key=lambda each: each[:4]):
        repeats = entry.choice == KERNEL or not (otherwise and problem.deterministic)
        if why_not(entry, problem) is None and repeats:
            return entry.choice, entry, entry.variant
    return KERNEL, None, portfolio.default(problem, H200)


@settings(max_examples=80)
@given(st.sampled_from(SHIPPED), st.integers(), st.booleans())
def test_a_class_gets_what_the_rules_say_one_by_one(kind: Problem, seed: int, repeats: bool) -> None:
    problem = drawn.resized(random.Random(seed), kind, drawn.LARGE).problem.simplified()
    problem = replace(problem, deterministic=repeats and problem.op is Op.BACKWARD)
    smallest = size_class.representative(problem, H200.sm_count)
    explanation = cache_lookup.explain(problem, H200)
    if explanation.level in (Level.EXACT, Level.PREDICTED):
        return
    # The class's own, unless that cannot run at these sizes.
    decides = problem if explanation.chosen_for is None else smallest
    route, entry, variant = chosen_one_by_one(decides)
    choice = (explanation.route, explanation.entry and explanation.entry.problem, explanation.variant)
    assert choice == (route, entry and entry.problem, variant)


def test_nothing_of_the_shipped_cache_needs_another_rule() -> None:
    entries = [place.entry for tuned in TUNED.values() for places in tuned.measured.values() for place in places]
    assert entries
    assert all(entry.mark is None for entry in entries), "a mark takes more than `chosen_one_by_one` knows"


def test_words_that_are_read_later_are_those_of_the_choice(tmp_path: Path) -> None:
    store.merge(tmp_path, H200, Op.FORWARD, [samples.current(samples.measured())])
    problem = replace(samples.problem(), seq_kv=5000)
    explanation = cache_lookup.explain(problem, H200, tmp_path)
    next(path for path in (tmp_path / H200.name).iterdir() if path.suffix == ".json").unlink()
    assert cache_lookup.explain(problem, H200, tmp_path).level is Level.DEFAULT
    assert explanation.entry is not None
    assert str(explanation.entry.problem) in explanation.reason
