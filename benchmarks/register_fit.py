"""The registers that a thread of triton/forward wants, fitted to kernels that were compiled; the source of
`autoattn/cost_model/expected_time.py`'s constants.

    python benchmarks/register_fit.py                    the fit of each kind of product, and what it is wrong by
    python benchmarks/register_fit.py gather FOLDER      writes the kernels of a cache's journals to DATA

A thread wants a constant, its share of the output's tile, and multiples of its shares of the scores, the query and the
keys. Kernels that spill more than SPILLED registers are left out of the fit: the compiler gives up at different points.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autoattn.cache import store
from autoattn.codegen import search_space
from autoattn.core.mask import Mask
from autoattn.core.problem import DType, Precision, Problem
from autoattn.cost_model import expected_time
from autoattn.cost_model.loop_cost import widths
from autoattn.cost_model.occupancy import MAX_REGISTERS, WARP
from autoattn.search import storage
from autoattn.search.shared_trials import studies

DATA = Path(__file__).parent / "data" / "registers" / "a30.jsonl"
TEMPLATE = "triton/forward"
SPILLED = 75  # registers
NEAR = 1.05  # times the best prediction
NAMES = ("16 bits", "tf32", "parts", "ieee")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("gather").add_argument(
        "folder", type=Path, help="a cache that `autoattn tune` wrote without the card"
    )
    arguments = parser.parse_args()
    if arguments.verb == "gather":
        rows = gathered(arguments.folder)
        DATA.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        print(f"{len(rows)} kernels in {DATA.name}")
        return
    columns = ["products", "kernels", "fitted", "constant", "scores", "query", "keys", "rms error"]
    columns += ["most over the limit", "left out"]
    print(f"| {' | '.join(columns)} |\n|---{'|--:' * (len(columns) - 1)}|")
    for name in NAMES:
        print(fitted(name, [row for row in read() if _products_of(row) == name]))


def read() -> list[dict[str, Any]]:
    """The kernels that were compiled: dtype, precision, head_dim, params, registers, spilled_bytes, over_best."""
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def gathered(folder: Path) -> list[dict[str, Any]]:
    """A row for each kernel of a cache's journals; `over_best` is its least prediction over a problem's best one."""
    rows: dict[str, dict[str, Any]] = {}
    for problem, trials in _searches(folder):
        best = min(trial.prediction.time_us for trial in trials)
        for trial in trials:
            facts = {
                "dtype": problem.dtype.value,
                "precision": problem.precision.value if problem.dtype is DType.FLOAT32 else "",
                "head_dim": problem.head_dim,
                "params": search_space.load(TEMPLATE).params_of(trial.variant),
                "registers": trial.report.registers,
                "spilled_bytes": trial.report.spilled_bytes,
                "over_best": round(trial.prediction.time_us / best, 3),
            }
            known = rows.setdefault(trial.report.digest, facts)
            known["over_best"] = min(known["over_best"], facts["over_best"])
    return sorted(rows.values(), key=lambda row: json.dumps(row, sort_keys=True))


def _searches(folder: Path) -> Iterator[tuple[Problem, list[Any]]]:
    for file in store.read_folder(folder):
        for entry in file.entries.values():
            journal = folder / file.device / "studies" / f"{entry.problem.key}.journal"
            trials = [trial for trials in studies(storage.unchanged(journal)).values() for trial in trials]
            known = [trial for trial in trials if trial.prediction is not None and trial.variant.template == TEMPLATE]
            if known:
                yield entry.problem, known


def problem_of(row: dict[str, Any]) -> Problem:
    """A problem of the row's kind; its lengths are any."""
    return Problem(
        dtype=DType(row["dtype"]), batch=1, heads_q=1, heads_kv=1, seq_q=1024, seq_kv=1024, head_dim=row["head_dim"],
        mask=Mask.parse("causal"), precision=Precision(row["precision"] or "ieee"),
    )  # fmt: skip


def limit_of(row: dict[str, Any]) -> int:
    """Registers that a thread may have."""
    return int(row["params"]["maxnreg"]) or MAX_REGISTERS


def _products_of(row: dict[str, Any]) -> str:
    if row["dtype"] != DType.FLOAT32.value:
        return "16 bits"
    return "parts" if row["params"]["products"] != "as_asked" else str(row["precision"])


def fitted(name: str, rows: list[dict[str, Any]]) -> str:
    """A row of the table: the fit of one kind of product, and the most registers of variants within 5% of the best."""
    shares, wanted = [], []
    for row in rows:
        spilled = row["spilled_bytes"] / 4
        if spilled > SPILLED:
            continue
        params = row["params"]
        depth, depth_v = widths(problem_of(row), params)
        block_m, block_n, threads = params["BLOCK_M"], params["BLOCK_N"], WARP * params["num_warps"]
        shares.append([1.0, block_m * block_n / threads, block_m * depth / threads, block_n * depth / threads])
        wanted.append(row["registers"] + spilled - block_m * depth_v / threads)
    factors = _least_squares(np.array(shares), np.array(wanted))
    error = float(np.sqrt(np.mean((np.array(shares) @ factors - np.array(wanted)) ** 2)))
    near = max(_share(row) for row in rows if row["over_best"] <= NEAR)
    beyond = sum(math.isinf(expected_time.spilled(problem_of(row), row["params"])) for row in rows)
    cells = [
        name,
        len(rows),
        len(wanted),
        *(f"{factor:.2f}" for factor in factors),
        f"{error:.0f}",
        f"{near:.2f}",
        beyond,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _least_squares(shares: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Factors that are not negative: what would be negative is left out, and the rest is fitted again."""
    used = np.ones(shares.shape[1], dtype=bool)
    while True:
        factors = np.zeros(shares.shape[1])
        factors[used] = np.linalg.lstsq(shares[:, used], wanted, rcond=None)[0]
        if (factors >= 0).all():
            return factors
        used &= factors > 0


def _share(row: dict[str, Any]) -> float:
    """Registers that a kernel wants, over its limit."""
    return expected_time.registers(problem_of(row), row["params"]) / limit_of(row)


if __name__ == "__main__":
    main()
