"""How well the model of autoattn/model.py ranks kernels that were measured: `python benchmarks/model_quality.py`.

The data are 284 variants of one forward kernel, measured on an H200 (benchmarks/data/h200_triton_variants.json):
causal, bfloat16, 4 sequences of 16 heads and 4,096 tokens, head dims 64 and 128, every block masked. `--fit` fits the
constants anew; leaving one head dim out fits on the other one alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autoattn import model, profiles
from autoattn.mask import Mask
from autoattn.model import BOUNDS, CONSTANTS, Constants
from autoattn.problem import DType, Problem
from autoattn.trial import StaticReport
from autoattn.variant import Value

DATA = Path(__file__).parent / "data" / "h200_triton_variants.json"
# The file counts opcodes by their first word. These are 128 bits wide, or exp2, in every one of these kernels' loops.
SPELT_OUT = {"MUFU": "MUFU.EX2", "STS": "STS.128", "LDG": "LDG.128", "LDGSTS": "LDGSTS.128"}
# Code 2 stood before P V, below the load of the values: the machine code is that without a barrier, register for
# register. In the templates the load comes after the barrier, so that "before_pv" would say something else.
BARRIERS = {0: "none", 1: "after_qk", 2: "none"}
DEVICE = profiles.named("h200")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    problem: Problem
    params: dict[str, Value]
    report: StaticReport
    median_ms: float


def load(path: Path = DATA) -> list[Case]:
    """The measured variants."""
    cases = []
    for number, trial in enumerate(json.loads(path.read_text())["trials"]):
        head_dim, block_m, block_n, num_warps, num_stages, barrier = trial["variant"]
        counts = {SPELT_OUT.get(opcode, opcode): n for opcode, n in trial["loop_counts"].items()}
        params: dict[str, Value] = {
            "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages, "maxnreg": 0,
            "mask_loop": "every", "softmax": "online", "barrier": BARRIERS[barrier], "HEAD_GROUP": 1,
            "row_order": "ascending", "PERSISTENT": 0, "HEAD_SPLIT": 0, "products": "as_asked",
        }  # fmt: skip
        problem = Problem(
            dtype=DType.BFLOAT16, batch=4, heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096, head_dim=head_dim,
            mask=Mask.parse("causal"),
        )  # fmt: skip
        report = StaticReport(
            digest=str(number), arch=90, registers=trial["registers"], spilled_bytes=trial["stack_bytes"],
            shared_bytes=trial["shared_bytes"], num_warps=num_warps, code_bytes=0, loop=counts,
        )  # fmt: skip
        cases.append(Case(problem=problem, params=params, report=report, median_ms=trial["median_ms"]))
    return cases


# --- quality ----------------------------------------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, the mean rank where values tie."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop + 1 < len(order) and values[order[stop + 1]] == values[order[start]]:
            stop += 1
        for place in order[start : stop + 1]:
            found[place] = (start + stop) / 2
        start = stop + 1
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation."""
    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    spread = math.sqrt(sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y))
    return sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True)) / spread if spread else 0.0


def regret(cases: Sequence[Case], predicted: Sequence[float], first: int) -> float:
    """How much slower than the best the best measured one of the first choices is."""
    chosen = sorted(range(len(cases)), key=lambda i: (predicted[i], i))[:first]
    return min(cases[i].median_ms for i in chosen) / min(case.median_ms for case in cases) - 1


def by_model(constants: Constants) -> Callable[[Case], float]:
    return lambda case: model.predict(case.problem, DEVICE, case.params, case.report, constants).time_us / 1e3


def quality(cases: Sequence[Case], predictor: Callable[[Case], float]) -> str:
    predicted = [predictor(case) for case in cases]
    measured = [case.median_ms for case in cases]
    logs = [math.log(p / m) for p, m in zip(predicted, measured, strict=True)]
    center = sum(logs) / len(logs)
    return (
        f"{spearman(predicted, measured):9.3f} {regret(cases, predicted, 1):8.1%} {regret(cases, predicted, 10):8.1%} "
        f"{math.sqrt(sum(x * x for x in logs) / len(logs)):7.1%} {math.exp(center):6.2f}"
    )


# --- fitting ----------------------------------------------------------------------------------------------------------


def fit(cases: Sequence[Case], seed: int = 0, steps: int = 600) -> Constants:
    """Least squares of the logarithm of the time, by random steps inside BOUNDS; equal kernels are predicted once."""
    distinct: dict[tuple[object, ...], tuple[Case, list[float]]] = {}
    for case in cases:
        key = (*case.params.items(), *case.report.loop.items(), case.report.registers, case.problem.head_dim)
        distinct.setdefault(key, (case, []))[1].append(math.log(case.median_ms))

    def loss(values: dict[str, float]) -> float:
        predictor = by_model(Constants(**values))
        total = 0.0
        for case, logs in distinct.values():
            guess = math.log(predictor(case))
            total += sum((guess - log) ** 2 for log in logs)
        return total

    draw = random.Random(seed)
    best = {name: (low + high) / 2 for name, (low, high) in BOUNDS.items()}
    least, width = loss(best), 0.3
    for step in range(steps):
        tried = dict(best)
        for name in draw.sample(sorted(BOUNDS), draw.choice((1, 1, 2, 3))):
            low, high = BOUNDS[name]
            tried[name] = min(high, max(low, tried[name] + draw.gauss(0, width * (high - low))))
        if (found := loss(tried)) < least:
            best, least = tried, found
        if step % 100 == 99:
            width *= 0.6
    return Constants(**best)


NAIVE: dict[str, Callable[[Case], float]] = {
    "fewest instructions a score": lambda c: (
        sum(c.report.loop.values()) * int(c.params["num_warps"]) / (int(c.params["BLOCK_M"]) * int(c.params["BLOCK_N"]))
    ),
    "most warps on an SM": lambda c: (
        1.0
        / (model.occupancy(DEVICE, c.report.registers, c.report.shared_bytes, c.report.num_warps) * c.report.num_warps)
    ),
    "largest tile without spills": lambda c: (
        (1 + c.report.spilled_bytes) / (int(c.params["BLOCK_M"]) * int(c.params["BLOCK_N"]))
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants to all of the data and print them")
    cases = load()
    if parser.parse_args().fit:
        print({name: float(f"{value:.3g}") for name, value in asdict(fit(cases)).items()})
        return
    head_dims = sorted({case.problem.head_dim for case in cases})
    print(f"{len(cases)} variants; regret: of the first choice, and of the best of the first ten")
    print(f"{'':44} {'spearman':>9} {'first':>8} {'ten':>8} {'error':>7} {'bias':>6}")
    for head_dim in head_dims:
        own = [case for case in cases if case.problem.head_dim == head_dim]
        others = [case for case in cases if case.problem.head_dim != head_dim]
        print(f"{f'D={head_dim}, constants as shipped':44} {quality(own, by_model(CONSTANTS))}")
        print(f"{f'D={head_dim}, constants fitted without it':44} {quality(own, by_model(fit(others)))}")
        for name, predictor in NAIVE.items():
            print(f"{f'D={head_dim}, {name}':44} {quality(own, predictor)[:27]}")


if __name__ == "__main__":
    main()
