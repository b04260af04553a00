"""Ablations: what differs from the baseline, what is no attention, and how the tables count."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import interpreted
import kernels
import pytest
import samples
from ablated import Products
from command_line import Run as Program
from command_line import autoattn, no_card  # noqa: F401
from fake_device import set_device

from autoattn.bench import ablation, ablation_bench
from autoattn.bench.ablation import BASELINE, BOUND, Cell, Change, Options, Row, Run
from autoattn.cache import store
from autoattn.codegen import render, search_space
from autoattn.codegen.template_facts import NO_SOFTMAX
from autoattn.core import device_profiles
from autoattn.core.device import Device
from autoattn.core.mask import Mask
from autoattn.core.modifiers import Modifiers
from autoattn.core.problem import Op, Problem
from autoattn.core.trial import Outcome, StaticReport, Verdict
from autoattn.core.variant import Traits, Variant
from autoattn.cost_model import predictor
from autoattn.errors import CacheError, CompileError
from autoattn.kernels import compiler
from autoattn.report import ablation_tables as tables
from autoattn.workers.worker_pool import Failure, Pool

H200, A30 = samples.H200, samples.A30
CAUSAL = samples.problem(batch=16, heads_kv=32, seq_q=1024, seq_kv=1024)
FULL = samples.problem(batch=16, heads_kv=32, seq_q=1024, seq_kv=1024, mask=Mask())


def named(template: str, problem: Problem = CAUSAL, device: Device = H200) -> dict[str, Change]:
    return {change.name: change for change in ablation.changes(search_space.load(template), problem, device)}


def difference(change: Change, base: Change) -> dict[str, Any]:
    assert change.variant is not None
    assert base.variant is not None
    space = search_space.load(base.variant.template)
    now, then = space.params_of(change.variant), space.params_of(base.variant)
    return {name: value for name, value in now.items() if then[name] != value}


# --- what is changed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "device"),
    [("triton/forward", H200), ("triton/forward", A30), ("gluon/forward", H200)],
    ids=lambda argument: getattr(argument, "name", argument),
)
@pytest.mark.parametrize("problem", [CAUSAL, FULL], ids=str)
def test_every_change_is_feasible_and_differs_just_in_what_its_name_says(
    template: str, device: Device, problem: Problem
) -> None:
    if (reason := search_space.load(template).why_unavailable()) is not None:
        pytest.skip(reason)
    changes = named(template, problem, device)
    assert changes[BASELINE].variant == search_space.load(template).default(problem, device)
    for name, change in changes.items():
        if change.variant is None or name in (BASELINE, BOUND):
            continue
        assert search_space.load(template).why_infeasible(change.variant, problem, device) is None
        params = dict(part.split(" ") for part in re.findall(r"[A-Za-z_]+ [a-z_0-9]+", name))
        assert params == {key: str(value) for key, value in difference(change, changes[BASELINE]).items()}, name


def test_the_steps_of_flash2_a100_are_all_there() -> None:
    changes = named("triton/forward")
    for step in ("barrier after_qk", "barrier before_pv", "barrier loop_end", "softmax lazy", "mask_loop every",
                 "mask_loop branch", "PERSISTENT 1", BOUND):  # fmt: skip
        assert any(name.startswith(step) for name in changes), step


def test_what_a_change_took_along_stands_as_a_row_of_its_own() -> None:
    changes = named("triton/forward")
    assert difference(changes["barrier after_qk (num_stages 1)"], changes[BASELINE]) == {
        "barrier": "after_qk",
        "num_stages": 1,
    }
    assert difference(changes["num_stages 1"], changes[BASELINE]) == {"num_stages": 1}


def test_no_kernel_is_timed_twice() -> None:
    variants = [change.variant for change in named("triton/forward").values() if change.variant is not None]
    assert len(variants) == len(set(variants))


def test_a_change_that_cannot_be_says_why() -> None:
    short = samples.problem(batch=1, heads_q=1, heads_kv=1, seq_q=64, seq_kv=64)
    change = named("triton/forward", short, A30)["PERSISTENT 1"]
    assert change.variant is None
    assert "persistent programs need more tiles" in change.why_not


# --- what is no attention ---------------------------------------------------------------------------------------------


def without_softmax(template: str = "triton/forward", **changes: Any) -> Variant:
    params = search_space.load(template).default(CAUSAL, H200).as_dict()
    return Variant.of(template, {**params, "softmax": NO_SOFTMAX, **changes})


def test_no_search_space_offers_a_kernel_without_softmax() -> None:
    for space in search_space.of(Op.FORWARD):
        assert NO_SOFTMAX not in space.choices.get("softmax", (space.fixed.get("softmax"),))
        assert not space.holds(without_softmax().as_dict())


def test_no_cache_holds_a_kernel_without_softmax(tmp_path: Path) -> None:
    entry = samples.measured(CAUSAL, params=without_softmax().as_dict())
    with pytest.raises(CacheError, match="softmax of triton/forward must be one of"):
        store.merge(tmp_path, H200, Op.FORWARD, [entry])
    assert "another search space" in (store.why_stale(entry) or "")


def test_the_source_says_that_it_is_no_attention() -> None:
    text = render.render(CAUSAL, without_softmax()).text
    assert "THIS IS NOT ATTENTION" in text
    assert "exp2" not in text.partition('"""\n\nimport')[2]
    assert "NOT ATTENTION" not in render.render(CAUSAL, without_softmax(softmax="lazy")).text


@pytest.mark.parametrize(
    ("problem", "traits"),
    [
        (samples.problem(modifiers=Modifiers(softcap=True)), None),
        (samples.problem(modifiers=Modifiers(sinks=True)), None),
        (CAUSAL, Traits(lse=True)),
    ],
)
def test_only_plain_problems_have_a_kernel_without_softmax(problem: Problem, traits: Traits | None) -> None:
    with pytest.raises(CompileError, match="only triton/forward has a kernel without softmax"):
        render.render(problem, without_softmax(), traits)


def verdict(child: Pool, problem: Problem, **params: Any) -> Verdict:
    source = render.render(problem, kernels.variant(**params))
    result = child.result(Products(problem=problem, source=source), interpreted.SECONDS)
    assert not isinstance(result, Failure), result
    return result


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("mask", "loop"), list(itertools.product(("full", "causal", "window:9,3"), ("split", "branch")))
)
def test_a_kernel_without_softmax_multiplies_the_scores_with_the_values(child: Pool, mask: str, loop: str) -> None:
    result = verdict(child, kernels.problem(mask=mask), softmax=NO_SOFTMAX, mask_loop=loop, PERSISTENT=loop == "split")
    assert result.ok, result


@pytest.mark.interpreter
def test_attention_is_told_from_the_bare_products(child: Pool) -> None:
    result = verdict(child, kernels.problem(mask="causal"), softmax="online")
    assert not result.ok
    assert "bare products" in result.reason


def test_the_model_predicts_the_bound_from_a_loop_of_products_alone() -> None:
    times = {}
    for softmax in ("online", NO_SOFTMAX):
        variant = Variant.of("triton/forward", {**search_space.load("triton/forward").default(CAUSAL, A30).as_dict(),
                                                "softmax": softmax})  # fmt: skip
        report = compiler.inspect(render.render(CAUSAL, variant), A30.arch)
        assert any(name.startswith("HMMA") for name in report.loop)
        assert ("MUFU.EX2" in report.loop) == (softmax == "online")
        assert report.code_bytes / 16 > 2 * sum(report.loop.values())  # a loop, not the whole kernel
        times[softmax] = predictor.predict(CAUSAL, A30, variant, report).time_us
    assert times[NO_SOFTMAX] < times["online"]


# --- how the tables count ---------------------------------------------------------------------------------------------


def cell(name: str, time_us: float = math.nan, *, step: str = "", clocks: tuple[int, ...] = (1700, 1650, 1710)) -> Cell:
    change = Change(name=name, step=step, variant=samples.measured().variant)
    if not math.isfinite(time_us):
        return Cell(change=change, outcome=Outcome.WRONG_RESULT, detail="two runs on the same inputs differ")
    return Cell(change=change, outcome=Outcome.OK, times_us=(time_us,) * 3, clocks_mhz=clocks)


def row(problem: Problem, *cells: Cell) -> Row:
    return Row(problem=problem, template="triton/forward", cells=cells)


def run_of(*rows: Row, measured: bool = True) -> Run:
    return Run(
        machine={"device": "NVIDIA H200"}, command="autoattn ablate", device=H200, measured=measured, rows=list(rows)
    )


@pytest.fixture
def two() -> Run:
    """The A100 tables' first rows, and a wrong kernel."""
    return run_of(
        row(FULL, cell(BASELINE, 1547.0), cell("barrier loop_end", 1542.0, step="barrier"),
            cell("barrier after_qk", 1600.0, step="barrier"), cell("softmax lazy"), cell(BOUND, 1264.0)),
        row(CAUSAL, cell(BASELINE, 956.0), cell("softmax lazy", 900.0)),
    )  # fmt: skip


def lines(text: str) -> dict[str, list[str]]:
    """Rows of all tables, by their first five cells."""
    rows = [
        [part.strip().replace("\\", "") for part in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line
    ]
    return {" ".join(cells[:5]): cells for cells in rows}


def test_rates_are_those_that_flash2_a100_published(two: Run) -> None:
    rows = lines(tables.markdown_text(two))
    assert rows["16 1024 1024 32 177.68"][5:] == [
        "1.547", "178.26", "1.542", "217.47", "1.264", "1700 (1650)", "barrier loop_end",
    ]  # fmt: skip
    assert rows["True 16 1024 1024 32"][5:] == ["143.76", "0.956", "143.90", "1700 (1650)"]


def test_causal_rates_of_flash2_a100_understate_queries_at_the_end_of_longer_keys() -> None:
    later = samples.problem(seq_q=1024, seq_kv=4096)
    assert later.flops() / tables.published_flops(later) == pytest.approx(0.875 / 0.5, rel=1e-3)


def test_effects_are_ratios_to_the_baseline_of_the_same_problem(two: Run) -> None:
    effects = {effect.name: effect for effect in tables.effects(two.rows)}
    assert effects["softmax lazy"].problems == 1
    assert effects["softmax lazy"].mean == pytest.approx(956 / 900)
    assert BASELINE not in effects


def test_a_wrong_kernel_has_its_reason_and_no_rate(two: Run) -> None:
    text = tables.markdown_text(two)
    assert "wrong result: two runs on the same inputs differ" in text
    wrong = next(
        record for record in csv.DictReader(io.StringIO(tables.csv_text(two))) if record["outcome"] == "wrong result"
    )
    assert (wrong["time_us"], wrong["detail"]) == ("", "two runs on the same inputs differ")


def test_the_csv_tells_the_bound_from_attention(two: Run) -> None:
    records = list(csv.DictReader(io.StringIO(tables.csv_text(two))))
    assert [record["change"] for record in records if record["attention"] == "0"] == [BOUND]
    assert {record["clock_mhz_median"] for record in records if record["time_us"]} == {"1700"}


def test_predicted_tables_say_so_and_assume_a_clock(two: Run) -> None:
    text = tables.markdown_text(replace(two, measured=False))
    assert "Nothing here was measured" in text
    assert f"{H200.sustained_clock_mhz} (assumed)" in text
    assert "Nothing here was measured" not in tables.markdown_text(two)


# --- the command ------------------------------------------------------------------------------------------------------

SHAPES = """
version: 1
groups:
  one: {problems: [{dtype: bfloat16, batch: 16, heads: 32, seq: 1024, head_dim: 128, mask: causal}]}
"""
REPORT = StaticReport(
    digest="", arch=80, registers=255, spilled_bytes=0, shared_bytes=65536, num_warps=4, code_bytes=1,
    loop={"HMMA.16816.F32": 64, "MUFU.EX2": 32, "FFMA": 96, "LDGSTS": 8},
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shapes, and machine code that nobody compiled."""

    def inspected(_: Pool, sources: Mapping[str, Any], device: Device, reports: dict[str, Any]) -> None:
        reports |= dict.fromkeys(sources, REPORT)

    monkeypatch.setattr(ablation_bench, "inspect_kernels", inspected)
    (tmp_path / "shapes.yaml").write_text(SHAPES)
    return tmp_path / "shapes.yaml"


def test_without_the_card_the_command_predicts_and_says_so(file: Path, tmp_path: Path, autoattn: Program) -> None:
    code, out, _ = autoattn("ablate", file, "--device", "a30", "--out", tmp_path / "out")
    assert code == 0
    assert "predicted by the model" in out
    text = (tmp_path / "out" / "ablations.md").read_text()
    assert "NVIDIA A30, predicted" in text
    assert "| barrier loop\\_end" in text
    assert "those of Hopper" in text  # why Gluon has no row


def test_without_a_card_and_a_name_the_command_is_one_sentence(file: Path, autoattn: Program) -> None:
    code, _, err = autoattn("ablate", file)
    assert (code, err.count("\n")) == (2, 1)
    assert "needs an NVIDIA GPU in this machine" in err


def test_on_the_card_what_is_wrong_hangs_or_is_right_stands_apart(
    file: Path, tmp_path: Path, autoattn: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_device(monkeypatch, device_profiles.named("a30"))
    right = Verdict(ok=True, checks=1, max_error=0.0, rms_error=0.0, allowed=1.0)

    def result(_: Pool, job: Any, seconds: float) -> Any:
        if isinstance(job, ablation_bench.Race):
            times = {name: [100.0 + place] * job.rounds for place, name in enumerate(job.sources)}
            return ablation_bench.Raced(times_us=times, clocks_mhz={name: [1400] * job.rounds for name in times})
        softmax = job.source.variant["softmax"]
        assert job.bound == (softmax == NO_SOFTMAX)
        if softmax == "lazy":
            return Failure(outcome=Outcome.TIMEOUT, detail="no answer within 25 s")
        return replace(right, ok=softmax != "first_max", reason="it differs")

    monkeypatch.setattr(Pool, "result", result)
    assert autoattn("ablate", file, "--out", tmp_path / "out", "--rounds", 3)[0] == 0
    records = {record["change"]: record for record in csv.DictReader((tmp_path / "out" / "ablations.csv").open())}
    assert (records[BASELINE]["time_us"], records[BASELINE]["samples"], records[BASELINE]["evidence"]) == (
        "100", "3", "measured",
    )  # fmt: skip
    assert records["softmax lazy"]["outcome"] == "timeout"
    assert records["softmax first_max"]["detail"] == "it differs"
    assert records[BOUND]["clock_mhz_min"] == "1400"


@pytest.mark.usefixtures("file")
def test_a_template_without_a_default_is_a_note() -> None:
    (rows,) = ablation_bench.run([CAUSAL], A30, measured=False, options=Options())
    row = next(row for row in rows if row.template == "gluon/forward")
    assert "must have a feasible seed" in row.note
    assert not row.cells
