"""The tuner's self-test: kernels with planted faults end as trials of the right outcome, and never in the cache."""

from __future__ import annotations

import os
from pathlib import Path

import interpreted
import planted_kernels
import pytest
import samples
from planted_kernels import CAUSAL, FAULTS, Fault

from autoattn.cache import store
from autoattn.codegen import render, resources
from autoattn.core.problem import Op
from autoattn.core.trial import Outcome, Verdict
from autoattn.core.variant import Variant
from autoattn.errors import CompileError
from autoattn.kernels.compiler import build
from autoattn.search import search_options, tuner
from autoattn.search.gpu_jobs import Rehearse
from autoattn.search.trial_pipeline import Workshop
from autoattn.workers.worker_pool import Failure, Pool

pytestmark = pytest.mark.interpreter

HANGS = 2.0  # seconds after which a kernel is taken to hang


SEEN = [name for name, fault in FAULTS.items() if fault.outcome is Outcome.WRONG_RESULT]


@pytest.mark.parametrize("name", SEEN)
def test_the_gate_catches_a_kernel_that(child: Pool, name: str) -> None:
    fault = FAULTS[name]
    result = child.result(Rehearse(problem=fault.problem, source=fault.source()), interpreted.SECONDS)
    assert isinstance(result, Verdict)
    assert not result.ok
    assert fault.says in result.reason


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in SEEN])
def test_the_pool_catches_and_outlives_a_kernel_that(child: Pool, name: str) -> None:
    fault = FAULTS[name]
    seconds = HANGS if fault.outcome is Outcome.TIMEOUT else interpreted.SECONDS
    result = child.result(Rehearse(problem=fault.problem, source=fault.source()), seconds)
    assert isinstance(result, Failure)
    assert result.outcome is fault.outcome
    assert fault.says in result.detail
    assert interpreted.run(child, planted_kernels.FULL).ok, "the next worker takes over"


@pytest.mark.parametrize(
    "problem", [planted_kernels.FULL, CAUSAL, planted_kernels.WINDOW, planted_kernels.PACKED], ids=str
)
def test_the_same_kernels_pass_without_a_fault(child: Pool, problem: planted_kernels.Problem) -> None:
    source = planted_kernels.kernels.source(problem, render.natural_traits(problem, lse=True))
    result = child.result(Rehearse(problem=problem, source=source), interpreted.SECONDS)
    assert isinstance(result, Verdict)
    assert result.ok, result.reason


@pytest.mark.parametrize("name", FAULTS)
def test_the_compiler_takes_the_planted_kernels(name: str) -> None:
    """So that on a card it is not the compiler that catches them."""
    try:
        build(FAULTS[name].source(), 80)
    except CompileError as error:
        pytest.fail(str(error))


# --- in the tuner -----------------------------------------------------------------------------------------------------


def tuned(folder: Path, fault: Fault) -> search_options.Summary:
    options = search_options.Options(effort=search_options.Effort.QUICK, trials=2, cache=folder, jobs=1)
    return tuner.tune([fault.problem], samples.A30, measured=False, options=options)


@pytest.mark.slow
def test_a_wrong_kernel_is_never_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault = FAULTS["sees one key too many at the diagonal"]
    monkeypatch.setattr(render, "render", fault.renderer(lambda variant: True))
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "nothing shipped")
    summary = tuned(tmp_path, fault)
    assert summary.entries == {}
    (reason,) = summary.failed.values()
    assert reason.startswith("none of 2 variants passed an interpreter; 2 ended with wrong result: ")
    assert (summary.outcomes, summary.rehearsals, summary.written) == ({"ok": 2}, {"wrong result": 2}, ())
    assert store.lookup(tmp_path, samples.A30, Op.FORWARD) == {}


@pytest.mark.slow
def test_a_kernel_that_the_interpreter_cannot_run_is_cached_as_not_rehearsed_and_not_called_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "nothing shipped")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(planted_site(tmp_path)), os.environ.get("PYTHONPATH", "")]))
    summary = tuned(tmp_path / "cache", FAULTS["sees one key too many at the diagonal"])
    assert summary.failed == {}
    assert summary.rehearsals == {"interpreter crash": 2}
    assert summary.reasons == {"interpreter crash: TypeError: planted": 2}
    (entry,) = summary.entries.values()
    assert entry.checked == "not rehearsed: TypeError: planted"


def planted_site(folder: Path) -> Path:
    """A folder for PYTHONPATH, with which every process that interprets kernels fails at their first load."""
    place = folder / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(SITE)
    return place


SITE = """
import os
if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter
    def load(*arguments, **named):
        raise TypeError("planted")
    interpreter.InterpreterBuilder.create_masked_load = load
"""


@pytest.mark.slow
def test_a_right_kernel_is_cached_in_place_of_wrong_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault = FAULTS["sees one key too many at the diagonal"]

    def split(variant: Variant) -> bool:
        return variant["mask_loop"] == "split"

    monkeypatch.setattr(render, "render", fault.renderer(split))
    with Workshop(samples.A30, measured=False, jobs=1) as shop:
        wrong = shop.check(CAUSAL, planted_kernels.kernels.variant(mask_loop="split"))
        right = shop.check(CAUSAL, planted_kernels.kernels.variant(mask_loop="every"))
    assert isinstance(wrong, Verdict)
    assert isinstance(right, Verdict)
    assert (wrong.ok, right.ok) == (False, True)
