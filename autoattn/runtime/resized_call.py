"""Prepares calls that differ from earlier ones in batch and lengths alone, without parsing or planning them.

A program that generates text, or trains on ragged batches, meets each length once. All that is found out about such a
call but its sizes was found out before: what its arguments mean, and which kernels run for its class of sizes
(autoattn.core.size_class). So both are kept by the call's key without sizes. For a new length the sizes are checked,
the kernels' rules are asked of them, and the launch is bound.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoattn.cache import inventory
from autoattn.codegen import feasibility, search_space
from autoattn.codegen.feasibility import Judgement
from autoattn.codegen.space_facts import size_facts
from autoattn.core import size_class
from autoattn.core.call_arguments import ARGUMENTS, PACKED_ARGUMENTS, KeyRole, names
from autoattn.core.device import Device
from autoattn.core.problem import MAX_SIZE, Layout, Problem, Sizes, sizes_of
from autoattn.hardware import nvidia
from autoattn.kernels import forward
from autoattn.runtime import call_cache, prepared_call
from autoattn.runtime.call_cache import PreparedCall
from autoattn.runtime.call_keys import ExtraFacts, Key
from autoattn.runtime.parse import arguments
from autoattn.runtime.parse.arguments import Call
from autoattn.runtime.plan import planner, tuned_entries
from autoattn.runtime.plan.planner import KnownCalls, Plan
from autoattn.tensors import cu_seqlens, score_tensors
from autoattn.tensors.operands import View
from autoattn.tensors.score_tensors import UNCHANGED, ScoreViews

MAX_CLASSES = 1024  # of sizes, of one family
SELDOM = names(ARGUMENTS, KeyRole.SELDOM)
_LAYOUTS = {layout.value: layout for layout in Layout}
PACKED = Layout.PACKED.value
_AXES = {"bhsd": (4, 1, 2), "bshd": (4, 2, 1), PACKED: (3, 1, 0)}  # layout -> axes, place of heads, of the sequence
_PACKED_USUAL = len(names(PACKED_ARGUMENTS, KeyRole.USUAL))  # words of a packed key in front of the longest lengths


class SizedKey(NamedTuple):
    """A call's key, taken apart."""

    call_key: Key
    family: Key  # all but sizes and strides
    layout: Layout
    sizes: Sizes
    addresses: int  # of query, key and value, combined by bitwise or, modulo 16
    longest: tuple[int, int]  # max_seqlen_q and max_seqlen_kv of a packed call, as the caller says them
    scores: ScoreViews = UNCHANGED  # of bias and slopes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """Who answers a class of sizes."""

    plan: Plan
    prepared: PreparedCall  # of one of its calls
    judgements: tuple[Judgement, ...]  # of its kernels
    sizes_read: frozenset[str]  # by their rules


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Family:
    """What calls share that differ in batch and lengths alone."""

    problem: Problem  # of one of them
    sm_count: int  # of the card
    backward_problem: Problem | None  # of its gradients, where somebody may differentiate
    known: KnownCalls | None  # None where no kernels answer
    memory: tuple[int, bool]  # `forward.memory_of_views` of query, key and value; nothing reaches far
    tuned: frozenset[Sizes]  # of problems that were tuned themselves, and are planned by themselves
    choices: dict[Sizes, _Choice] = field(default_factory=dict)  # of classes, by their smallest sizes

    def choose(self, of_class: Sizes, problem: Problem, sizes: Sizes) -> _Choice | None:
        """Who answers a class that is new, by kernels that answer another; None where these are others."""
        if self.known is None:
            return None
        backward_problem = None if self.backward_problem is None else self.backward_problem.resized(*sizes)
        plan = planner.replan(self.known, problem, backward_problem)
        if plan is None or not _speaks_for(plan, of_class):
            return None
        for choice in tuple(self.choices.values()):
            if choice.plan.kernel is plan.kernel and choice.plan.gradients is plan.gradients:
                return self.keep(of_class, replace(choice, plan=plan))
        return None

    def keep(self, of_class: Sizes, choice: _Choice) -> _Choice:
        """Keeps who answers a class."""
        with _writing:
            if len(self.choices) >= MAX_CLASSES:
                self.choices.clear()
            self.choices[of_class] = choice
        return choice


def take_apart(
    call_key: Key | None, layout: str, given: Mapping[str, Any], longest: tuple[Any, Any] = (0, 0)
) -> SizedKey | None:
    """A key without its sizes; None where these change more of the call than numbers of the launch.

    Args:
        layout: "bhsd", "bshd" or "packed".
        given: the call's arguments.
        longest: max_seqlen_q and max_seqlen_kv of a packed call, which end the usual words of its key.
    """
    if call_key is None or layout not in _AXES:
        return None
    mask, window = given.get("mask"), given["window"]
    if mask is not None and not isinstance(mask, Tensor) and (not isinstance(mask, str) or mask.startswith("window")):
        return None
    if window is not None and not (len(window) == 2 and all(type(side) is int for side in window)):
        return None
    parts: tuple[Any, ...] = call_key
    dtype, device, query, _, key, _, value, _, offsets, extras, *facts, words = parts
    axes, heads, seq = _AXES[layout]
    alike = len(query) == len(key) == len(value) == axes and key[:-1] == value[:-1]
    if not alike or (layout != PACKED and query[0] != key[0]):
        return None
    if layout == PACKED:
        if not (len(offsets[0]) == 1 and all(type(most) is int for most in longest)):
            return None
        sizes = offsets[0][0] - 1, min(longest[0], query[0]), min(longest[1], key[0]), query[0], key[0]
        words = words[:_PACKED_USUAL] + words[_PACKED_USUAL + len(longest) :]
    else:
        sizes = query[0], query[seq], key[seq], 0, 0
    _, seq_q, seq_kv, *_ = sizes
    if not 0 < min(sizes[:3]) <= max(sizes) <= MAX_SIZE:
        return None
    # A window that is wider than the sequence has no bound, and the two alignments of a causal mask are one where
    # lengths agree (`Problem.simplified`).
    shape = seq_q == seq_kv, window and (window[0] < seq_kv - 1, window[1] < seq_q - 1)
    dims = query[heads], query[-1], key[heads], key[-1], value[-1]
    scores, kinds = UNCHANGED, ()
    if extras:
        taken = _scores_of(extras, given, (sizes[0], query[heads], seq_q, seq_kv))
        if taken is None:
            return None
        scores, kinds = taken
    family = (layout, dtype, device, dims, shape, kinds, *facts, words)
    return SizedKey(
        call_key=call_key, family=family, layout=_LAYOUTS[layout], sizes=sizes, addresses=facts[0], longest=longest,
        scores=scores,
    )  # fmt: skip


def _scores_of(
    extras: tuple[ExtraFacts, ...], given: Mapping[str, Any], whole: tuple[int, int, int, int]
) -> tuple[ScoreViews, tuple[Any, ...]] | None:
    """How bias and slopes of a call lie, and what of all its extra tensors a family shares; None where that is unknown.

    Args:
        extras: of the tensors among the arguments, in the order of the key.
        given: the call's arguments.
        whole: batch, heads_q, seq_q and seq_kv.
    """
    names = [name for name in SELDOM if isinstance(given.get(name), Tensor)]
    scores, kinds = UNCHANGED, []
    for name, facts in zip(names, extras, strict=True):
        kind: tuple[Any, ...] = name, facts.dtype, facts.device, facts.learns
        if name in ("mask", "bias"):
            view = score_tensors.expanded(facts.shape, facts.strides, whole)
            if view is None:
                return None
            if facts.dtype is torch.bool and (view.strides[2] == 0 or whole[2] == 1):  # of keys alone
                view = View((*whole[:2], 1, whole[3]), view.strides)
            scores = replace(scores, bias_strides=view.strides, bias_sizes=score_tensors.four(facts.shape))
            kind += view.shape[2] == whole[2], forward.bias_alignment(view, facts.address, facts.dtype)
            kind += (forward.is_shared_by_queries(view),)
        elif name == "alibi_slopes":
            view = score_tensors.expanded(facts.shape, facts.strides, whole[:2])
            if view is None:
                return None
            scores = replace(scores, slope_strides=view.strides)
        elif name != "sinks" or facts.shape != whole[1:2]:
            return None
        kinds.append(kind)
    return scores, tuple(kinds)


def prepare(sized: SizedKey | None, tensors: tuple[Tensor, ...]) -> PreparedCall | None:
    """What answers a call of a known family and class, kept for the next one like it; None where either is new.

    Args:
        tensors: those of the key.

    Raises:
        TensorError: the offsets or the maxima describe no sequences of these tokens.
    """
    family = None if sized is None else call_cache.find_family(sized.family)
    if sized is None or family is None or sized.sizes in family.tuned:
        return None
    if sized.layout is Layout.PACKED:
        query, key, _, starts, ends, *_ = tensors
        arguments.longest(query, key, starts, ends, *sized.longest)
        cu_seqlens.check_pair(starts, ends)
    problem, views = family.problem.resized(*sized.sizes), _views_of(sized)
    if forward.may_reach_far(problem) or _memory_of(views, sized, problem) != family.memory:
        return None
    of_class = size_class.smallest(sized.sizes, problem.heads_q, family.sm_count)
    choice = family.choices.get(of_class)
    if choice is None:
        choice = family.choose(of_class, problem, sized.sizes)  # which asks the kernels' rules too
    elif not _may_run(choice, problem):
        return None
    if choice is None or planner.settled(choice.plan, problem) is not choice.plan:
        return None
    if planner.why_too_many_programs(problem) is not None:
        return None
    prepared = prepared_call.resize(choice.prepared, sized.call_key, problem, views, sized.scores)
    if prepared is not None:
        call_cache.keep(sized.call_key, prepared)
    return prepared


def remember(sized: SizedKey | None, call: Call, plan: Plan) -> None:
    """Keeps who answered a call for others of its family and its class of sizes, where that is possible."""
    prepared = None if sized is None else call_cache.find(sized.call_key)
    if sized is None or prepared is None or plan.repeats or sizes_of(call.problem) != sized.sizes:
        return
    card = nvidia.present(call.operands.query.device.index)
    if card is None:
        return
    of_class = size_class.smallest(sized.sizes, call.problem.heads_q, card.sm_count)
    if not _speaks_for(plan, of_class) or forward.may_reach_far(call.problem):
        return
    family = call_cache.find_family(sized.family)
    if family is None:
        family = _new_family(sized, call, plan, card)
        call_cache.keep_family(sized.family, family)
    if family.known is not None:
        family.known.note(plan)
    judgements = _judgements_of(call, plan, card)
    sizes_read = frozenset().union(*(judgement.sizes_read for judgement in judgements))
    family.keep(of_class, _Choice(plan=plan, prepared=prepared, judgements=judgements, sizes_read=sizes_read))


def _speaks_for(plan: Plan, of_class: Sizes) -> bool:
    """Whether a plan is that of all calls of a class."""
    spoken_for = plan.explanation.chosen_for
    return spoken_for is not None and sizes_of(spoken_for) == of_class and plan.captured is None and plan.lasting


def _views_of(sized: SizedKey) -> tuple[View, View, View]:
    """How query, key and value of a call lie in memory."""
    parts: tuple[Any, ...] = sized.call_key
    _, _, query, query_steps, key, key_steps, value, value_steps, *_ = parts
    return (
        View.of_given(query, query_steps, sized.layout),
        View.of_given(key, key_steps, sized.layout),
        View.of_given(value, value_steps, sized.layout),
    )


def _memory_of(views: tuple[View, View, View], sized: SizedKey, problem: Problem) -> tuple[int, bool]:
    return forward.memory_of_views(views, sized.addresses, problem.dtype.bytes)


def _may_run(choice: _Choice, problem: Problem) -> bool:
    """Whether the kernels of a class are feasible at these sizes."""
    sizes = size_facts(problem, choice.sizes_read)
    return all(judgement.why_not(sizes) is None for judgement in choice.judgements)


def _new_family(sized: SizedKey, call: Call, plan: Plan, card: Device) -> _Family:
    problems = [call.problem] if plan.backward_problem is None else [call.problem, plan.backward_problem]
    of_kind = [tuned_entries.of(problem, card, inventory.folders(None)) for problem in problems]
    tuned = (places for each in of_kind for group in (each.measured, each.predicted) for places in group.values())
    index = call.operands.query.device.index
    return _Family(
        problem=call.problem,
        sm_count=card.sm_count,
        backward_problem=plan.backward_problem,
        known=KnownCalls.of(plan, call.problem, index),
        memory=_memory_of(_views_of(sized), sized, call.problem),
        tuned=frozenset(sizes_of(places[0].entry.problem) for places in tuned),
    )


def _judgements_of(call: Call, plan: Plan, card: Device) -> tuple[Judgement, ...]:
    """What rules ask of sizes for the kernels of a plan, if any."""
    variants = [(plan.explanation.variant, call.problem)] if plan.kernel is not None else []
    if plan.gradients is not None and plan.backward_problem is not None:
        variants.append((plan.gradients.source.variant, plan.backward_problem))
    return tuple(
        feasibility.specialised(search_space.load(variant.template).judgement_of(variant, problem, card))
        for variant, problem in variants
        if variant is not None
    )


_writing = threading.Lock()
