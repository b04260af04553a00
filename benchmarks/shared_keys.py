"""How many of the query heads that share keys a program of gluon/backward should walk: measured times beside the rule.

python benchmarks/shared_keys.py measure --seconds 500    needs a GPU; adds to data/shared_keys.jsonl
python benchmarks/shared_keys.py compare                  needs none

measure: gradients of 8 to 64 query heads on 1 to 8. Of each problem all crossings of WALKED_HEADS, HEAD_GROUP and a few
bases pass the gate and have a first look, and the fastest meet in rounds (`measured_calls.py`).

compare: the best time of a problem over that of the best kernel with the number of heads that the search space names
(`walked_best`), and with each number (docs/decisions/shared-key-gradients.md).
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import measured_calls
import msgspec
import typer
from measured_calls import Subject

from autoattn.codegen import search_space
from autoattn.core import device_profiles
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Layout, Op, Problem
from autoattn.core.trial import Trial
from autoattn.core.variant import Value, Variant
from autoattn.hardware import nvidia

DATA = Path(__file__).resolve().parent / "data" / "shared_keys.jsonl"
SPACE = search_space.load("gluon/backward")
CARD = device_profiles.named("h100")  # the rule's arithmetic has its SMs and its L2
HEADS = ((32, 8), (8, 1), (64, 8), (16, 8), (28, 4), (24, 8))
# Sequences, and tokens of each: between powers of two, and powers of two
SIZES = (
    (1, 700), (1, 1500), (1, 2200), (2, 2500), (1, 3600), (3, 900), (1, 4300),
    (1, 512), (1, 1024), (1, 2048), (1, 4096), (2, 1024), (4, 1024), (2, 2048), (4, 2048), (1, 8192), (8, 512),
)  # fmt: skip
PACKED = ((8, 700, 3072), (4, 2000, 4096), (30, 500, 8192), (12, 4000, 16384))  # sequences, the longest, all tokens
MOST_TOKENS = 64 * 8192  # of all heads; of wide heads half as many
WALKED, GROUPS = (0, 4, 2, 1), (1, 4, 16, 0)
FINALISTS = 8
Times = dict[tuple[int, int, int], float]  # (base, WALKED_HEADS, HEAD_GROUP) -> us

COMMON: dict[str, Value] = {
    "BLOCK_M": 64, "num_stages": 2, "score_grad_stages": 2, "summing": "tma", "next_scores": "own_step",
    "value_grad": "late", "row_loads": "late", "fences": "none", "mask_loop": "split", "slot_release": "named",
    "producer_registers": 24, "order": "any", "schedule": "one_tile", "key_stages": 1, "query_walk": "by_head",
}  # fmt: skip
LEAN: dict[str, Value] = {"score_grad_stages": 1, "slot_release": "mbarrier"}
BROAD: dict[str, Value] = {"BLOCK_M": 128, "next_scores": "after_query_grad"}
WIDE: dict[str, Value] = {
    "summing": "threads", "next_scores": "after_query_grad", "fences": "own", "producer_registers": 40,
}  # fmt: skip
DYNAMIC: dict[str, Value] = {"schedule": "dynamic"}

app = typer.Typer(help="Query heads that a program of gluon/backward walks: measured times beside the rule.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A problem with the times of its crossings."""

    problem: Problem
    times_us: Times

    def best_us(self, walked: int | None = None) -> float:
        """The shortest time, of kernels that walk so many heads where that is given; infinite where there are none."""
        return min((us for (_, heads, _), us in self.times_us.items() if walked in (None, heads)), default=math.inf)


def bases(problem: Problem) -> list[dict[str, Value]]:
    """What is crossed with WALKED_HEADS and HEAD_GROUP, by the width of a tile."""
    order: dict[str, Value] = {"order": "descending" if problem.mask.bounded_right else "ascending"}
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > 128:
        choices = [WIDE, WIDE | {"mask_loop": "branch"}]
    elif widest > 64:
        turns = {"score_grad_stages": 1, **order}
        choices = [
            LEAN | DYNAMIC, LEAN | DYNAMIC | {"num_stages": 3}, LEAN, turns | DYNAMIC, turns | {"row_loads": "early"},
        ]  # fmt: skip
    else:
        turns = {"BLOCK_M": 128, "next_scores": "after_value_grad", **order}
        choices = [
            BROAD | DYNAMIC, BROAD, {"next_scores": "after_value_grad", "num_stages": 4, "value_grad": "early"},
            DYNAMIC | {"key_stages": 2, "num_stages": 4, "slot_release": "mbarrier"}, turns | DYNAMIC, turns,
        ]  # fmt: skip
    return [COMMON | choice for choice in choices]


def crossings(problem: Problem) -> dict[tuple[int, int, int], Variant]:
    """What is timed of a problem."""
    variants = {
        (place, walked, group): SPACE.variant({**base, "WALKED_HEADS": walked, "HEAD_GROUP": group})
        for place, base in enumerate(bases(problem))
        for walked in WALKED
        for group in GROUPS
    }
    return {key: each for key, each in variants.items() if SPACE.why_infeasible(each, problem, CARD) is None}


def problems() -> list[Problem]:
    """What is measured, in a random order, so that a run that ends early has some of all."""
    drawn = [
        _problem(heads, batch, seq, head_dim, mask)
        for head_dim in (128, 64, 256, 192)
        for heads in HEADS
        for mask in ("causal", "full", "window:1023,0")
        for batch, seq in SIZES
        if heads[0] * batch * seq * (1 + (head_dim > 128)) <= MOST_TOKENS
    ]
    drawn += [
        _problem(heads, batch, seq, head_dim, "causal", tokens)
        for head_dim in (128, 64)
        for heads in HEADS
        for batch, seq, tokens in PACKED
    ]
    random.Random(5).shuffle(drawn)
    return drawn


def _problem(heads: tuple[int, int], batch: int, seq: int, head_dim: int, mask: str, tokens: int = 0) -> Problem:
    return Problem(
        op=Op.BACKWARD,
        dtype=DType.BFLOAT16,
        batch=batch,
        heads_q=heads[0],
        heads_kv=heads[1],
        seq_q=seq,
        seq_kv=seq,
        tokens_q=tokens,
        tokens_kv=tokens,
        head_dim=head_dim,
        mask=Mask.parse(mask),
        layout=Layout.PACKED if tokens else Layout.BSHD,
    )


def read(path: Path = DATA) -> list[Example]:
    """All problems of a file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Example(
            problem=msgspec.convert(row["problem"], Problem),
            times_us={(base, walked, group): us for base, walked, group, us in row["times_us"]},
        )
        for row in rows
    ]


def line_of(example: Example) -> str:
    """A problem as a line of the file."""
    times = [[*key, round(us, 1)] for key, us in example.times_us.items()]
    return json.dumps({"problem": msgspec.to_builtins(example.problem), "times_us": times})


@app.command()
def measure(
    seconds: Annotated[float, typer.Option(help="After these no problem is begun.")] = 500.0,
    out: Annotated[Path, typer.Option(help="The file of the measurements.")] = DATA,
) -> None:
    """Time crossings of problems that the file does not have."""
    card = nvidia.present()
    if card is None:
        sys.exit("benchmarks/shared_keys.py measures on an NVIDIA GPU in this machine, and found none")
    known = {example.problem for example in read(out)} if out.exists() else set()
    subjects: dict[Problem, Subject] = {}

    def subject_of(problem: Problem) -> Subject:
        subjects[problem] = Subject(problem, card, list(crossings(problem).values()), FINALISTS)
        return subjects[problem]

    unknown = (problem for problem in problems() if problem not in known)
    for problem, result in measured_calls.lines(map(subject_of, unknown), time.monotonic() + seconds, card):
        if isinstance(result, str):
            print(f"{problem}: {result}", flush=True)
            continue
        example = Example(problem=problem, times_us=times_of(problem, subjects[problem].trials, result["times_us"]))
        with out.open("a", encoding="utf-8") as file:
            print(line_of(example), file=file)
        print(f"{problem}: {example.best_us():.1f} us of {len(example.times_us)}", flush=True)


def times_of(problem: Problem, trials: Iterable[Trial], finals: Iterable[tuple[str, dict[str, Value], float]]) -> Times:
    """First looks, and the times of rounds in their place where a crossing came to those."""
    keys = {variant: key for key, variant in crossings(problem).items()}
    looks = {keys[trial.variant]: trial.time_us for trial in trials if trial.time_us is not None}
    return looks | {keys[Variant.of(template, params)]: time_us for template, params, time_us in finals}


def walked_of_default(problem: Problem) -> int:
    """How many heads a program walks of a call that nobody tuned."""
    return int(SPACE.params_of(SPACE.seeds_for(problem, CARD)[0])["WALKED_HEADS"])


def shares(examples: Iterable[Example], walked: int | None) -> list[float]:
    """The best time over that of the best kernel with a number of heads, or with the rule's where that is None."""
    pairs = [(each, walked if walked is not None else walked_of_default(each.problem)) for each in examples]
    return [each.best_us() / us for each, heads in pairs if math.isfinite(us := each.best_us(heads))]


def rows(examples: Sequence[Example]) -> Iterator[str]:
    """The table of `compare`."""
    kinds: dict[str, list[Example]] = defaultdict(list)
    for each in examples:
        left, right = each.problem.mask.bounded_left, each.problem.mask.bounded_right
        kind = "window" if left else "causal" if right else "no mask"
        kinds["packed, " + kind if each.problem.packed else kind].append(each)
    yield "| mask | number of heads | problems | geometric mean | lowest |\n|---|---|--:|--:|--:|"
    for kind, of_kind in sorted(kinds.items()):
        for name, walked in (("the rule's", None), ("all", 0), ("4", 4), ("2", 2), ("1", 1)):
            if values := shares(of_kind, walked):
                mean = statistics.geometric_mean(values)
                yield f"| {kind} | {name} | {len(values)} | {mean:.4f} | {min(values):.2f} |"


@app.command()
def compare(data: Annotated[Path, typer.Option(help="A file of `measure`.")] = DATA) -> None:
    """Print how near each number of heads, and the rule's, comes to the best."""
    print("\n".join(rows(read(data))))


if __name__ == "__main__":
    app()
