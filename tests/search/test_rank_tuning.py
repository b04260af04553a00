"""Methods of one attention over ranks: measured on gloo ranks, kept in a file, and taken by `method="auto"`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels
import pytest
import rank_calls
import samples
import torch

from autoattn.cache import rank_choices
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import DType, Op
from autoattn.core.rank_choice import Link, Method, RankCall, RankChoice, RankChoices
from autoattn.distributed import measured_method
from autoattn.errors import CacheError, ProblemError, UsageError
from autoattn.hardware import nvidia
from autoattn.search import rank_tuning

CARD = samples.H200


def call(tokens: int = 48, **changes: Any) -> RankCall:
    facts: dict[str, Any] = {"dtype": DType.FLOAT32, "heads_q": 2, "heads_kv": 1, "head_dim": 8, "head_dim_v": 8}
    facts |= {"mask": Mask.parse("causal"), "packed": False, "learns": False, "batch": 1, "tokens": tokens}
    return RankCall(**{**facts, **changes})


def choices(*chosen: RankChoice, **changes: Any) -> RankChoices:
    link = Link(bytes_per_second=3e11, latency_us=20.0)
    facts: dict[str, Any] = {"schema": rank_choices.SCHEMA, "device": CARD.name, "fingerprint": CARD.fingerprint}
    return RankChoices(**{**facts, "ranks": 2, "link": link, "choices": chosen, **changes})


def choice(method: str, tokens: int = 48, **changes: Any) -> RankChoice:
    return RankChoice(
        call=call(tokens, **changes), method=Method(method), times_us={Method(method): 5.0, Method.ULYSSES: 9.0}
    )


@pytest.mark.exhaustive
def test_processes_of_their_own_measure_as_those_of_a_group_do() -> None:
    rank_calls.assert_measured(rank_tuning.measure(rank_calls.MEASURED, 2, "gloo"))


def test_a_file_keeps_what_was_measured_of_other_calls(tmp_path: Path) -> None:
    rank_choices.merge(tmp_path, CARD, choices(choice("ring", 10), choice("ring", 20)))
    path = rank_choices.merge(tmp_path, CARD, choices(choice("allgather", 20), choice("ring", 30)))
    assert path == tmp_path / CARD.name / "ranks-2.json"
    file = rank_choices.read(path)
    assert file is not None
    assert {each.call.tokens: each.method for each in file.choices} == {10: "ring", 20: "allgather", 30: "ring"}
    rank_choices.merge(tmp_path, CARD, choices(choice("ring", 40), fingerprint="another card"))
    file = rank_choices.read(path)
    assert file is not None
    assert [each.call.tokens for each in file.choices] == [40], "times of another card are no match"


def test_a_damaged_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = rank_choices.merge(tmp_path, CARD, choices(choice("ring")))
    text = json.loads(path.read_text())
    for damage in ({"schema": 2}, {"choices": [{**text["choices"][0], "method": "tree"}]}, {"link": 3}):
        path.write_text(json.dumps(text | damage))
        with pytest.raises(
            CacheError, match=r"the choices .*ranks-2.json must be as autoattn tune --ranks writes them"
        ):
            rank_choices.read(path)


def test_auto_takes_the_method_of_the_nearest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(nvidia, "present", lambda index=None: CARD)
    measured_method.find.cache_clear()
    rank_choices.merge(tmp_path, CARD, choices(choice("ring", 1000), choice("allgather", 100)))
    device = torch.device("cuda", 0)
    assert measured_method.find(call(400), 2, device) is Method.RING
    assert measured_method.find(call(200), 2, device) is Method.ALLGATHER
    assert measured_method.find(call(400, batch=4), 2, device) is Method.RING
    assert measured_method.find(call(200, learns=True), 2, device) is None
    assert measured_method.find(call(200), 4, device) is None
    assert measured_method.find(call(200), 2, torch.device("cpu")) is None
    monkeypatch.setattr(nvidia, "present", lambda index=None: replace(CARD, sm_count=CARD.sm_count + 1))
    measured_method.find.cache_clear()
    assert measured_method.find(call(200), 2, device) is None, "another card"
    measured_method.find.cache_clear()


def test_a_problem_is_a_call_that_ranks_share() -> None:
    problem = kernels.problem(seq_q=64, seq_kv=64, mask="causal", op=Op.BACKWARD)
    rank_call = RankCall.of(problem)
    assert (rank_call.batch, rank_call.tokens, rank_call.learns, rank_call.packed) == (2, 64, True, False)
    for other in ({"seq_q": 33}, {"modifiers": Modifiers(sinks=True)}, {"mask": "blocks:16x16,0.5"}):
        with pytest.raises(ProblemError, match="a method is measured for as many queries as keys, without a cache"):
            RankCall.of(kernels.problem(**{"seq_q": 64, "seq_kv": 64, **other}))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (1, "--ranks must be 2 or more, got 1; one rank makes the plain call"),
        (2, "--ranks 2 measures on as many GPUs of this machine, got 0 that are NVIDIA H200; run it on a host"),
    ],
)
def test_a_machine_without_the_cards_refuses(ranks: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rank_tuning.check(ranks, CARD, measured=False)
