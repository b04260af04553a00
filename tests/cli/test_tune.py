"""`autoattn tune`: what it says before, meanwhile and at the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from cache_files import FORWARD_FILE
from command_line import CALL, Run, assert_one_sentence, autoattn, no_card, shapes  # noqa: F401 - fixtures
from fake_device import set_device
from fake_tuner import fake_tune

from autoattn.bench import kernel_bench
from autoattn.cache import rank_choices
from autoattn.cli import memory
from autoattn.cli.progress import Display, Remaining, duration
from autoattn.codegen import resources
from autoattn.core.rank_choice import Link, Method, RankCall, RankChoice
from autoattn.errors import CacheError, HostError
from autoattn.search import rank_tuning, search_options, tuner
from autoattn.search.rank_tuning import GroupMeasurements
from autoattn.search.search_options import Progress

# Tune


def test_the_first_line_says_that_nothing_is_measured(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "tune", fake_tune({}))
    _, out, _ = autoattn("tune", "--device", "a30", "--shapes", shapes)
    first = out.splitlines()[0]
    assert first == (
        "Predicting for NVIDIA A30 (not in this machine: no NVIDIA GPU was found): nothing here is measured"
    )


def test_the_first_line_names_the_other_card_in_the_machine(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_device(monkeypatch, samples.H200)
    monkeypatch.setattr(tuner, "tune", fake_tune({}))
    _, out, _ = autoattn("tune", "--device", "a30", "--shapes", shapes)
    assert "Predicting for NVIDIA A30 (not in this machine: there is NVIDIA H200)" in out.splitlines()[0]


@pytest.mark.parametrize("name", ["h200", "auto", "NVIDIA H200"])
def test_on_the_card_itself_it_measures(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    set_device(monkeypatch, samples.H200)
    fake = fake_tune({})
    monkeypatch.setattr(tuner, "tune", fake)
    _, out, _ = autoattn("tune", "--device", name, "--shapes", shapes)
    assert out.splitlines()[0] == "Measuring on NVIDIA H200, the card in this machine"
    assert fake.called["measured"] is True  # type: ignore[attr-defined]
    assert "predicted" not in out


LONG = ("--dtype", "bf16", "--batch", "64", "--heads", "64", "--seq-q", "16384", "--head-dim", "128")


def test_problems_beyond_the_devices_memory_are_warned_of_and_tuned_all_the_same(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fake_tune({})
    monkeypatch.setattr(tuner, "tune", fake)
    code, out, _ = autoattn("tune", "--device", "a30", *LONG)
    assert code == 0
    assert out.splitlines()[2] == (
        "Warning: 1 problem does not fit into the 23.5 GiB of NVIDIA A30: bf16 B64 H64 16384x16384 D128 full needs "
        "64.0 GiB; make batch or lengths smaller"
    )
    assert len(fake.called["problems"]) == 1  # type: ignore[attr-defined]
    assert "Warning" not in autoattn("tune", "--device", "h200", *LONG)[1]
    assert "needs 128.2 GiB" in autoattn("tune", "--device", "h100", *LONG, "--operation", "backward")[1]
    assert "Warning" not in autoattn("tune", "--device", "a30", "--shapes", shapes)[1]


def test_bench_warns_of_them_too(autoattn: Run, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes.write_text(shapes.read_text().replace("batch: 4", "batch: 8192"))
    set_device(monkeypatch, samples.H200)
    monkeypatch.setattr(kernel_bench, "machine", lambda peers: {"card": "a card", "torch": "2.13"})
    monkeypatch.setattr(kernel_bench, "rows", lambda *facts: iter(()))
    code, out, _ = autoattn("bench", shapes, "--group", "train", "--out", tmp_path / "bench")
    assert code == 0
    assert "Warning: 2 problems do not fit into the 141.0 GiB of NVIDIA H200: bf16 B8192 H32 1024" in out


def test_a_warning_names_three_problems_and_counts_the_others() -> None:
    problems = [samples.problem(batch=batch, seq_q=65536, seq_kv=65536) for batch in (64, 128, 256, 512, 1)]
    text = memory.warning(problems, samples.A30)
    assert text is not None
    assert text.startswith("Warning: 4 problems do not fit into the 23.5 GiB of NVIDIA A30: bf16 B64 H32/8 65536x65536")
    assert text.count("needs") == 3
    assert text.endswith(", 1 more; make batch or lengths smaller")
    assert memory.warning(problems, replace(samples.A30, memory_bytes=0)) is None, "unknown"


def test_options_reach_the_search(autoattn: Run, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_tune({})
    monkeypatch.setattr(tuner, "tune", fake)
    autoattn("tune", "--device", "a30", "--shapes", shapes, "--group", "prefill", "--effort", "max", "--trials", 7,
             "--timeout", 60, "--seed", 3, "--cache", tmp_path / "mine", "--jobs", 2, "--workers", 3,
             "--storage", "sqlite:///trials.db", "--objective", "energy")  # fmt: skip
    called = fake.called  # type: ignore[attr-defined]
    assert [problem.seq_q for problem in called["problems"]] == [1024, 2048]
    assert called["device"] == samples.A30
    options = called["options"]
    assert (options.effort, options.trials, options.timeout_s) == (search_options.Effort.MAX, 7, 60.0)
    assert (options.seed, options.cache, options.jobs) == (3, tmp_path / "mine", 2)
    assert options.objective is search_options.Objective.ENERGY
    assert (options.workers, options.storage) == (3, "sqlite:///trials.db")


def test_a_password_in_the_storage_is_not_printed(autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "tune", fake_tune({}))
    _, out, _ = autoattn("tune", "--device", "a30", "--shapes", shapes, "--storage", "postgresql://me:s3cret@db/x")
    assert "Sharing trials at postgresql://me@db/x" in out
    assert "s3cret" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--storage", "redis://db"), "--storage must be a URL that begins with postgresql://"),
        (("--storage", "sqlite:////no/such/folder/x.db"), "unable to open database file"),
        (("--workers", "2"), "--workers must be at most the visible GPUs that are NVIDIA A30 (0), got 2"),
        (("--workers", "0"), "--workers must be at least 1"),
    ],
)
def test_a_storage_or_workers_that_cannot_be_are_one_sentence_before_anything_is_tried(
    autoattn: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, _, error = autoattn("tune", "--device", "a30", *CALL, "--cache", tmp_path / "mine", *arguments)
    assert code in (1, 2)
    assert_one_sentence(error)
    assert words in error
    assert not (tmp_path / "mine").exists()


def test_the_cache_is_the_users_when_none_is_named(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_tune({})
    monkeypatch.setattr(tuner, "tune", fake)
    autoattn("tune", "--device", "a30", *CALL)
    assert fake.called["options"].cache == resources.user_cache()  # type: ignore[attr-defined]
    assert fake.called["problems"] == [samples.problem()]  # type: ignore[attr-defined]


def test_without_a_terminal_each_finished_problem_is_one_plain_line(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "tune", fake_tune({}, kept=1))
    _, out, _ = autoattn("tune", "--device", "a30", "--shapes", shapes)
    lines = [line for line in out.splitlines() if line.startswith("[")]
    assert lines == [
        "[1/3] bf16 B4 H32 1024x1024 D128 causal: already up to date, 400.2 us, 343 TFLOP/s predicted",
        "[2/3] bf16 B4 H32 2048x2048 D128 causal: 400.2 us, 343 TFLOP/s predicted, 96 tried",
        "[3/3] bf16 B4 H32 1024x1024 D128 full: 400.2 us, 343 TFLOP/s predicted, 96 tried",
    ]
    assert "\x1b" not in out


def test_the_end_has_a_table_for_each_group_and_the_cache_file(
    autoattn: Run, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = samples.problem(heads_kv=32, seq_kv=1024)
    monkeypatch.setattr(tuner, "tune", fake_tune({problem.key: samples.predicted(problem)}))
    code, out, _ = autoattn("tune", "--device", "a30", "--shapes", shapes, "--cache", tmp_path / "mine")
    assert code == 0
    prefill, train = out.index("\nprefill, predicted"), out.index("\ntrain, predicted")
    row = next(line for line in out[prefill:train].splitlines() if str(problem) in line)
    assert "predicted" in row
    assert "500.0" in row
    assert "bound by tensor" in row
    assert f"Cache: {tmp_path / 'mine' / 'a30' / FORWARD_FILE}" in out
    assert "91 trials (71 ok, 20 infeasible), 64 distinct kernels compiled" in out


def test_the_end_says_who_was_in_the_finals(autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = samples.problem(heads_kv=32, seq_kv=1024)
    entry = samples.measured(problem, absent={"fa4": "not installed (no module flash_attn)"})
    monkeypatch.setattr(tuner, "tune", fake_tune({problem.key: entry}))
    _, out, _ = autoattn("tune", "--device", "h200", "--shapes", shapes)
    absent = "absent: not installed (no module flash_attn) (1)"
    assert f"\nFlashAttention-4 (fa4) took part in 0 of 1 problem; {absent}\n" in out


def test_a_failed_problem_gives_its_reason_and_exit_code_1(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "tune", fake_tune({}, failed={samples.problem().key: "no variant fits"}))
    code, out, _ = autoattn("tune", "--device", "a30", *CALL)
    assert code == 1
    assert re.search(r"causal:bottom-right +failed +no variant fits", out)
    assert "no kernel (why)" in out


def test_a_run_that_tuned_nothing_says_the_commonest_reason_first_and_names_no_cache(
    autoattn: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"timeout: no answer within 60 s": 2, "interpreter crash: TypeError: no": 40}
    failed = {samples.problem().key: "none of 42 variants worked"}
    monkeypatch.setattr(tuner, "tune", fake_tune({}, failed=failed, reasons=reasons))
    code, out, _ = autoattn("tune", "--device", "a30", *CALL)
    assert code == 1
    rest = out[out.index("Nothing was tuned") :]
    assert rest.startswith("Nothing was tuned: interpreter crash: TypeError: no (40 of 42 variants that failed)\n")
    assert "Cache:" not in out


def test_where_no_variant_failed_the_problems_say_why(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "tune", fake_tune({}, failed={samples.problem().key: "no variant fits"}))
    _, out, _ = autoattn("tune", "--device", "a30", *CALL)
    assert "Nothing was tuned: no variant fits (1 of 1 problems)\n" in out


def test_rehearsals_are_counted_beside_trials(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = samples.problem()
    counts = {"ok": 3, "interpreter crash": 2, "wrong result": 1}
    monkeypatch.setattr(tuner, "tune", fake_tune({problem.key: samples.predicted(problem)}, rehearsals=counts))
    _, out, _ = autoattn("tune", "--device", "a30", *CALL)
    assert "\n6 rehearsals (3 ok, 2 interpreter crash, 1 wrong result) in an interpreter\n" in out
    assert "Nothing was tuned" not in out


def test_a_machine_that_lacks_something_is_one_sentence_and_exit_code_1(
    autoattn: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = HostError("disk full: there must be room on the disk of /x, but there is none; free some")
    monkeypatch.setattr(tuner, "tune", fake_tune({}, stopped=stopped))
    code, out, error = autoattn("tune", "--device", "a30", *CALL)
    assert code == 1
    assert error == f"autoattn: {stopped}\n"
    assert "1 problem: 0 tuned, 0 already up to date, 0 failed, 1 not reached" in out
    assert "Cache:" not in out


def test_an_interrupted_run_says_how_to_go_on_and_exits_with_130(
    autoattn: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "tune", fake_tune({}, interrupted=True))
    code, out, _ = autoattn("tune", "--device", "a30", *CALL)
    assert code == 130
    assert "run the same command again to go on" in out


def test_an_interrupt_outside_the_search_exits_with_130(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "tune", interrupted)
    code, _, error = autoattn("tune", "--device", "a30", *CALL)
    assert code == 130
    assert_one_sentence(error)


def test_an_unwritable_cache_is_one_sentence_and_exit_code_1(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise CacheError("the cache /x must be writable, but it is not; use --cache DIR")

    monkeypatch.setattr(tuner, "tune", refused)
    code, _, error = autoattn("tune", "--device", "a30", *CALL)
    assert code == 1
    assert error == "autoattn: the cache /x must be writable, but it is not; use --cache DIR\n"


def test_a_terminal_shows_bars_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    from rich.console import Console

    screen = Console(file=StringIO(), force_terminal=True, width=120)
    options = search_options.Options(
        effort=search_options.Effort.QUICK, trials=None, timeout_s=None, seed=0, cache=Path(), jobs=None
    )
    with Display(screen, measured=True) as display:
        fake_tune({})([samples.problem()], samples.H200, measured=True, options=options, listen=display)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "all problems" in text
    assert "[1/1]" in text
    assert "best 400.2 us, 343 TFLOP/s" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden and is back


def reported(phase: str, share: float | None, **facts: Any) -> Progress:
    known = {"index": 0, "tried": 5, "planned": 10, "best_us": None, "best_tflops": None}
    return Progress(**{**known, **facts, "problem": samples.problem(), "total": 4, "phase": phase, "share": share})


def test_time_left_is_the_rest_of_the_work_at_the_pace_since_the_first_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("autoattn.cli.progress.time.monotonic", lambda: now[0])
    clock = Remaining()
    clock.hear(reported("kept", 0.0))
    assert clock.left() is None
    now[0] = 150.0  # until the workers have started
    clock.hear(reported("search", 0.1))
    assert clock.left() is None, "one result has no pace"
    now[0] = 160.0
    clock.hear(reported("search", 0.105))
    assert clock.left() is None, "nor have two that came almost at once"
    clock.hear(reported("search", 0.3))
    assert clock.left() == pytest.approx(35.0)  # a fifth took 10 s; seven tenths are left
    clock.hear(reported("done", 1.0))
    assert clock.left() == 0.0
    assert clock.finished == 2


def test_a_line_says_how_many_problems_are_finished_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever problem it is: those that share kernels are searched together."""
    from io import StringIO

    from rich.console import Console

    now = [100.0]
    monkeypatch.setattr("autoattn.cli.progress.time.monotonic", lambda: now[0])
    screen = Console(file=StringIO(), width=200)
    with Display(screen, measured=False) as display:
        display(reported("search", 0.1, index=3))
        now[0] = 180.0
        display(reported("done", 0.5, index=3, best_us=400.2, best_tflops=343.0))
        display(reported("done", 1.0, index=0, best_us=400.2, best_tflops=343.0))
    first, second = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first.startswith("[1/4] ")
    assert first.endswith("400.2 us, 343 TFLOP/s predicted, 5 tried, about 1 min 40 s left")
    assert second.startswith("[2/4] ")


@pytest.mark.parametrize(("seconds", "text"), [(4.25, "4.2 s"), (42, "42 s"), (190, "3 min 10 s"), (7500, "2 h 5 min")])
def test_durations_are_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Over ranks

WHOLE = ("--dtype", "bf16", "--heads", "32", "--heads-kv", "8", "--seq-q", "65536", "--head-dim", "128")
RANKS = ("tune", "--device", "h200", "--ranks", "2", *WHOLE, "--mask", "causal")


def test_without_the_cards_no_ranks_are_measured(autoattn: Run) -> None:
    code, _, error = autoattn(*RANKS)
    assert code == 2
    assert_one_sentence(error)
    assert "--ranks 2 measures on as many GPUs of this machine, got 0 that are NVIDIA H200" in error


@pytest.mark.parametrize("given", [("--trials", "3"), ("--storage", "sqlite:///x")])
def test_options_of_a_search_beside_ranks_are_refused(autoattn: Run, given: tuple[str, str]) -> None:
    code, _, error = autoattn(*RANKS, *given)
    assert code == 2
    assert f"--ranks searches no kernels, got {' '.join(given)} beside it; leave one of them out" in error


def test_choices_over_ranks_are_told_and_kept(autoattn: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_device(monkeypatch, samples.H200)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def measure(calls: Sequence[RankCall], ranks: int, backend: str) -> GroupMeasurements:
        times = {Method.RING: 1234.0, Method.ALLGATHER: 2345.0}
        choices = [RankChoice(call=each, method=Method.RING, times_us=times) for each in calls]
        link = Link(bytes_per_second=3e11, latency_us=20.0)
        return GroupMeasurements(
            link=link, choices=tuple(choices), refused={"it by ulysses": "why"}, communication_sms=8
        )

    monkeypatch.setattr(rank_tuning, "measure", measure)
    code, out, _ = autoattn(*RANKS, "--cache", tmp_path)
    assert code == 0
    assert out.splitlines()[1:] == [
        "Link: 300.0 GB/s each way, 20 us",
        "bfloat16 B1 32/8 heads D128 causal, 65,536 tokens, forward: ring 1,234 us, allgather 2,345 us",
        "it by ulysses: why",
        "Communication does best with at most 8 SMs (NCCL's max_ctas)",
        f"The choices are in {tmp_path / 'h200' / 'ranks-2.json'}",
    ]
    kept = rank_choices.read(tmp_path / "h200" / "ranks-2.json")
    assert kept is not None
    assert (kept.ranks, kept.communication_sms, len(kept.choices)) == (2, 8, 1)


def test_problems_that_ranks_do_not_share_are_named(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    set_device(monkeypatch, samples.H200)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, out, error = autoattn(*RANKS, "--seq-kv", "128")
    assert code == 2
    assert "Note: a method is measured for as many queries as keys" in " ".join(out.split())
    assert "--ranks must have a problem that ranks share, got none" in error
