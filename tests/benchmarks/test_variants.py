"""The survey of random variants: what it draws, and what it records of what became of them."""

from __future__ import annotations

import kernels
import planted_looks
import pytest
import variants
from checkout_paths import python_path

from autoattn.cache import search_recording
from autoattn.codegen import render, search_space
from autoattn.core.problem import DType
from autoattn.core.trial import Outcome, StaticReport
from autoattn.core.variant import Variant

CAUSAL = kernels.problem(
    dtype=DType.BFLOAT16, batch=4, heads_q=16, heads_kv=16, seq_q=4096, seq_kv=4096, head_dim=64, mask="causal"
)


@pytest.mark.parametrize("template", variants.FAMILIES)
def test_seeds_come_first_and_all_that_is_drawn_is_feasible_and_new(template):
    drawn = variants.drawn(CAUSAL, template, variants.DEVICE, 30, 1)
    shipped = search_space.load(template)
    seeds = shipped.seeds_for(CAUSAL, variants.DEVICE)
    assert drawn[: len(seeds)] == seeds
    assert len(set(drawn)) == 30
    assert all(shipped.why_infeasible(variant, CAUSAL, variants.DEVICE) is None for variant in drawn)
    assert drawn == variants.drawn(CAUSAL, template, variants.DEVICE, 30, 1)
    assert drawn != variants.drawn(CAUSAL, template, variants.DEVICE, 30, 2)


def test_a_run_that_is_cut_short_has_some_of_every_group():
    first = [next(subjects) for subjects in [variants.subjects(2, 1)] for _ in range(6)]
    assert {subject.ptx_arch for subject in first} == {None, 80}
    assert {subject.template for subject in first} == set(variants.FAMILIES)


def test_what_is_recorded_already_is_left_out():
    names = [next(subjects).name for subjects in [variants.subjects(1, 1)] for _ in range(3)]
    left = next(variants.subjects(1, 1, {names[0], names[2]}.__contains__))
    assert left.name == names[1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_survey_records_what_became_of_each_variant_with_its_machine_code(monkeypatch, tmp_path):
    monkeypatch.setattr(variants, "Look", planted_looks.Look)
    monkeypatch.setattr(variants, "Translate", planted_looks.Translate)
    monkeypatch.setenv("PYTHONPATH", python_path())
    tiles = [kernels.variant(BLOCK_M=m, BLOCK_N=n, num_warps=4) for m, n in ((64, 16), (64, 32), (128, 16))]
    subject = variants.Subject(
        problem=CAUSAL, template=kernels.TEMPLATE, ptx_arch=80, gate=True, card=0,
        variants={variant: render.render(CAUSAL, variant) for variant in tiles},
    )  # fmt: skip
    survey = variants.Survey(iter([subject]), ["0"], 300.0)
    survey.run()
    assert survey.begun == [subject]
    assert subject.done
    recording = variants.recorded(subject, "a card that is made up")
    assert recording is not None
    search_recording.write(recording, tmp_path / "found.jsonl")
    read = search_recording.read(tmp_path / "found.jsonl")
    trials = {(variant["BLOCK_M"], variant["BLOCK_N"]): trial for variant, trial in read.trials.items()}
    assert trials[64, 32].outcome is Outcome.WRONG_RESULT
    assert [trials[m, 16].time_us for m in (64, 128)] == [64.0, 128.0]
    report = trials[64, 16].report
    assert report is not None
    assert report.arch == 90
    assert any(opcode.startswith("HMMA") for opcode in report.loop)  # Ampere's products, in Hopper's machine code
    assert trials[64, 32].report is None


def test_implied_parameters_are_recorded_so_that_all_lines_are_alike():
    shared, alone = (kernels.variant(SPLITS=splits) for splits in (2, 1))
    assert isinstance(shared, Variant)
    subject = variants.Subject(
        problem=CAUSAL, template=kernels.TEMPLATE, ptx_arch=None, gate=False, card=0, variants={},
        reports={variant: report() for variant in (shared, alone)},
        looks={variant: variants.Looked(median_us=1.0, registers=1, report=None) for variant in (shared, alone)},
    )  # fmt: skip
    recording = variants.recorded(subject, "nowhere")
    assert recording is not None
    assert [variant["SPLITS"] for variant in recording.trials] == [2, 1]


def report():
    return StaticReport(
        digest="d", arch=90, registers=1, spilled_bytes=0, shared_bytes=0, num_warps=1, code_bytes=0, loop={"HMMA": 1}
    )
