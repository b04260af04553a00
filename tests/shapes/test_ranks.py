"""The problems of ranks that share a sequence are the calls of their schedules."""

from __future__ import annotations

from typing import Any

import pytest

from autoattn.core.mask import Mask
from autoattn.core.rank_choice import Method
from autoattn.distributed import schedule
from autoattn.distributed.rectangles import Reach
from autoattn.distributed.schedule import Split
from autoattn.distributed.sharding import Sharding
from autoattn.errors import ShapesError
from autoattn.shapes import model_config, shapes_file

SEQ, RANKS = 4096, 4


def problems_of(**values: Any) -> list[tuple[int, int, str]]:
    given = {"dtype": "bfloat16", "batch": 1, "heads": 4, "head_dim": 64, "seq": SEQ, "ranks": RANKS, **values}
    document = {"version": 1, "groups": {"one": {"problems": [given]}}}
    problems = [named.problem for named in shapes_file.parse(document, "f.yaml")]
    return [(problem.seq_q, problem.seq_kv, str(problem.mask)) for problem in problems]


@pytest.mark.parametrize(
    ("mask", "reach", "method"),
    [
        ("causal", Reach(right=0), Method.RING),
        ("full", Reach(), Method.RING),
        ("window:128,0", Reach(left=128, right=0), Method.ALLGATHER),
    ],
)
def test_they_are_the_calls_of_a_rank_in_the_middle(mask: str, reach: Reach, method: Method) -> None:
    split = Split(offsets=(0, SEQ), ranks=RANKS, sharding=Sharding.ZIGZAG)
    calls = {
        (*(end - begin for begin, end in (each.queries, each.keys)), str(Mask.window(*each.window)))
        for hop in schedule.plan(split, 1, reach, method).hops
        for call in hop.calls
        for each in call
    }
    assert set(problems_of(mask=mask)) == calls


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seq": 100, "mask": "causal"}, "4 ranks must share a sequence in 8 equal chunks, got 100 tokens"),
        ({"seq": "8x16"}, "ranks share a sequence with as many queries as keys and no table, cache or packing, got"),
        ({"layout": "packed", "tokens": 8192}, "ranks share a sequence with as many queries as keys"),
        ({"ranks": 0}, "ranks must be a whole number from 1"),
    ],
)
def test_what_ranks_do_not_share_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapesError, match=message):
        problems_of(**values)


def test_one_rank_has_the_whole_sequence() -> None:
    assert problems_of(mask="causal", ranks=1) == [(SEQ, SEQ, "causal:bottom-right")]


def test_a_model_has_a_group_of_them() -> None:
    config = model_config.read(
        {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 8192}, "c"
    )
    document = model_config.document(config, lengths=[SEQ], ranks=RANKS)
    problems = [named.problem for named in shapes_file.parse(document, "c") if "context-parallel" in named.groups]
    assert {(problem.op.value, problem.seq_q, problem.seq_kv) for problem in problems} == {
        (operation, *sizes)
        for operation in ("forward", "backward")
        for sizes in ((1024, 1024), (1024, 512), (512, 1024))
    }
