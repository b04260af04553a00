"""`autoattn show`, `explain`, `render`, `verify`, `report` and `devices`: what they print."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples
from command_line import CALL, Run, assert_one_sentence, autoattn, no_card, shapes, user_cache  # noqa: F401 - fixtures
from fake_device import set_device

from autoattn.cache import store
from autoattn.cli.terminal import print_json
from autoattn.codegen import resources, search_space
from autoattn.core.cache_entry import Finding, Mark
from autoattn.core.device import Device
from autoattn.core.problem import Op, Problem
from autoattn.runtime.plan import cache_lookup, explanations, machine_code
from autoattn.runtime.plan.reasons import Reasons
from autoattn.tools import verify

# Show


def test_show_lists_measured_and_predicted_in_tables_of_their_own(autoattn: Run, user_cache: Path) -> None:
    code, out, _ = autoattn("show")
    assert code == 0
    measured, predicted = out.index("h200, measured"), out.index("h200, predicted")
    assert measured < out.index("0.91x sdpa-cudnn") < predicted < out.index("bound by tensor")


def test_show_filters_by_evidence_and_device(autoattn: Run, user_cache: Path) -> None:
    assert "predicted" not in autoattn("show", "--evidence", "measured")[1]
    assert "0.91x" in autoattn("show", "--device", "NVIDIA H200")[1]
    code, out, _ = autoattn("show", "--device", "a30")
    assert code == 0
    assert "holds no such entry" in out


def test_show_names_a_faster_peer_and_who_was_absent(autoattn: Run, tmp_path: Path) -> None:
    entry = samples.beside(samples.measured(choice="kernel"), {"sdpa": 1.3, "fa4": 0.7})
    absent = {"fa2": "not installed (no module flash_attn)"}
    old = samples.measured(samples.problem(batch=7))
    store.merge(tmp_path, samples.H200, Op.FORWARD, [replace(entry, absent=absent), old])
    _, out, _ = autoattn("show", "--cache", tmp_path)
    assert "0.70x fa4" in out
    assert (
        "FlashAttention-2 (fa2) took part in 0 of 2 problems; absent: not installed (no module flash_attn) (1)\n"
        "FlashAttention-4 (fa4) took part in 1 of 2 problems\n"
        "1 of 2 problems met PyTorch's backends alone: who else was installed is not recorded\n"
    ) in out
    (file,) = json.loads(autoattn("show", "--cache", tmp_path, "--json")[1])
    assert [entry["absent"] for entry in file["entries"]] == [absent, None]


def test_show_of_a_card_counts_what_its_sister_cards_measured(autoattn: Run, user_cache: Path) -> None:
    sentence = "1 problem measured on NVIDIA H200, a sister card: what has no nearer measurement runs on it"
    assert sentence in autoattn("show", "--device", "h100")[1]
    assert "sister" not in autoattn("show", "--device", "a30")[1]
    assert "sister" not in autoattn("show")[1]


def lengths(autoattn: Run, *words: str) -> list[int]:
    """Keys of the problems that `show` lists, in its order."""
    documents = json.loads(autoattn("show", "--json", *words)[1])
    return [entry["problem"]["seq_kv"] for file in documents for entry in file["entries"]]


@pytest.fixture
def three(user_cache: Path) -> None:
    """Three measured problems more, of 1, 2 and 3 Ki keys, and gradients of 1 Ki keys."""
    for keys, time_us, choice in ((1024, 300.0, "kernel"), (2048, 100.0, "sdpa-cudnn"), (3072, 130.0, "kernel")):
        problem = samples.problem(seq_kv=keys, batch=1)
        entry = samples.measured(problem, time_us=time_us, choice=choice)
        entry = samples.beside(entry, {"sdpa-cudnn": keys / 2048})
        store.merge(user_cache, samples.H200, Op.FORWARD, [entry])
    gradients = samples.measured(samples.problem(seq_kv=1024, batch=1, op=Op.BACKWARD))
    store.merge(user_cache, samples.H200, Op.BACKWARD, [gradients])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [1024, 2048, 3072]),
        (("--sort", "problem", "--reverse"), [3072, 2048, 1024]),
        (("--sort", "time"), [2048, 3072, 1024]),
        (("--sort", "time", "--reverse"), [1024, 3072, 2048]),
        (("--sort", "tflops"), [3072, 2048, 1024]),
        (("--sort", "ratio"), [3072, 2048, 1024]),
        (("--sort", "ratio", "--reverse"), [1024, 2048, 3072]),
        (("--route", "sdpa-cudnn"), [2048]),
        (("--route", "kernel"), [1024, 3072]),
        (("--route", "triton/forward"), [1024, 3072]),
        (("--only", "x1024 ", "--only", "x3072 "), [1024, 3072]),
        (("--only", "x1024 ", "--sort", "time"), [1024]),
        (("--only", "x9 "), []),
    ],
)
def test_show_sorts_and_filters(autoattn: Run, three: None, words: tuple[str, ...], expected: list[int]) -> None:
    ours = () if "--only" in words else ("--only", " B1 ")
    assert lengths(autoattn, *ours, "--operation", "forward", *words) == expected


def test_show_filters_by_operation(autoattn: Run, three: None) -> None:
    assert lengths(autoattn, "--operation", "backward") == [1024]
    assert lengths(autoattn, "--only", "backward ") == [1024]


def test_entries_without_a_ratio_stand_last(autoattn: Run, user_cache: Path) -> None:
    document = json.loads(autoattn("show", "--json", "--sort", "ratio")[1])[0]["entries"]
    assert [entry["evidence"] for entry in document] == ["measured", "predicted"]
    document = json.loads(autoattn("show", "--json", "--sort", "ratio", "--reverse")[1])[0]["entries"]
    assert [entry["evidence"] for entry in document] == ["measured", "predicted"]


def test_a_misspelt_route_is_one_sentence(autoattn: Run, user_cache: Path) -> None:
    code, out, error = autoattn("show", "--route", "sdpa-cudn")
    assert (code, out) == (2, "")
    assert_one_sentence(error)
    assert "--route must be of gluon/backward, gluon/forward, kernel, latent/forward, sdpa, sdpa-cudnn," in error


def test_show_json_is_one_document(autoattn: Run, user_cache: Path) -> None:
    code, out, error = autoattn("show", "--json", "--evidence", "measured")
    assert (code, error) == (0, "")
    (file,) = json.loads(out)
    (entry,) = file["entries"]
    assert (file["device"], file["cache"]) == ("h200", str(user_cache))
    assert entry["evidence"] == "measured"
    assert entry["problem"]["heads_q"] == 32
    assert entry["measurement"]["median_us"] == 400.0
    assert json.loads(autoattn("show", "--json", "--device", "a30")[1]) == []


def test_json_holds_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"rms_error": float("nan"), "time_us": float("inf"), "entry": samples.measured()})
    document = json.loads(capsys.readouterr().out)
    assert (document["rms_error"], document["time_us"]) == (None, None)


def test_show_keeps_control_codes_of_a_cache_from_the_terminal(autoattn: Run, tmp_path: Path) -> None:
    name = "\x1b[31m[red]red[/red]\nrow"
    rival = dataclasses.replace(samples.measured().rivals[0], name=name)
    store.merge(tmp_path, samples.H200, Op.FORWARD, [samples.measured(choice=name, rivals=(rival,))])
    _, out, _ = autoattn("show", "--cache", tmp_path)
    assert "\x1b" not in out
    assert "[red]red[/red]\\nrow" in out


def test_show_leaves_out_what_gives_way_and_says_so(autoattn: Run, user_cache: Path) -> None:
    shipped = resources.shipped_cache()
    entries = [samples.measured(time_us=999.0), samples.measured(samples.problem(batch=7), time_us=777.0)]
    store.merge(shipped, samples.H200, Op.FORWARD, map(samples.current, entries))
    _, out, _ = autoattn("show", "--device", "h200", "--evidence", "measured")
    assert "400.0" in out
    assert "777.0" in out
    assert "999.0" not in out
    assert f"1 entry of {shipped} left out: another entry of the same problem goes before (docs/cache.md)\n" in out
    files = json.loads(autoattn("show", "--json")[1])
    assert [(file["cache"], len(file["entries"])) for file in files] == [(str(user_cache), 2), (str(shipped), 1)]
    assert "left out" not in autoattn("show", "--cache", shipped)[1]


def test_show_takes_the_entries_of_the_card_in_this_machine(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sister = replace(samples.H200, sm_count=128)
    store.merge(resources.shipped_cache(), sister, Op.FORWARD, [samples.current(samples.measured(time_us=999.0))])
    for card, words in ((samples.H200, "999.0"), (sister, "400.0")):
        set_device(monkeypatch, card)
        _, out, _ = autoattn("show", "--evidence", "measured")
        assert words not in out
        assert "1 entry of " in out
        assert f"left out: measured on another card, {sister.fingerprint if card is samples.H200 else ''}" in out


# Explain


def explained(problem: Problem, device: Device | None, folder: Path | None = None) -> explanations.Explanation:
    explained.called = (problem, device, folder)  # type: ignore[attr-defined]
    return explanations.Explanation(
        problem=problem, route="kernel", level=cache_lookup.Level.BUCKET,
        reasons=Reasons("a tuned problem is near", ("exact: no entry for this problem", "bucket: found one")),
        entry=samples.measured(), variant=samples.measured().variant,
    )  # fmt: skip


def test_explain_prints_route_level_reason_and_steps(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_lookup, "explain", explained)
    monkeypatch.setattr(machine_code, "find", lambda *arguments: None)
    code, out, _ = autoattn("explain", "--device", "h200", "--cache", "here", *CALL)
    assert code == 0
    words = ("kernel", "bucket", "a tuned problem is near", "BLOCK_M=", "1. exact: no entry", "2. bucket: found one")
    positions = [out.index(word) for word in words]
    assert positions == sorted(positions)
    assert explained.called == (samples.problem(), samples.H200, Path("here"))  # type: ignore[attr-defined]


def test_explain_tells_how_sure_the_ranking_of_a_problem_is(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_finals(problem: Problem, device: Device | None, folder: Path | None = None) -> explanations.Explanation:
        return replace(
            explained(problem, device, folder), entry=samples.certified(tuned_problem, worst=samples.worst())
        )

    monkeypatch.setattr(cache_lookup, "explain", with_finals)
    tuned_problem = samples.problem()
    _, out, _ = autoattn("explain", "--device", "h200", *CALL)
    assert "  finals   128 rounds, 3 more discarded; 1 as good as the winner\n" in out
    assert "  over     sdpa-cudnn 0.91x (0.90-0.92), sdpa-flash 1.42x (1.40-1.44)\n" in out
    assert "  rivals   met PyTorch's backends alone (sdpa-cudnn, sdpa-flash); who else" in out
    assert "  worst    2.32x its usual time, 928.4 us; 1,920 of 2,048 tiles are computed twice\n" in out
    tuned_problem = samples.problem(batch=7)  # a near problem's finals say nothing of this one
    assert "worst" not in autoattn("explain", "--device", "h200", *CALL)[1]
    assert "finals" not in autoattn("explain", "--device", "h200", *CALL)[1]


def test_explain_json_is_one_object_for_a_problem_and_a_list_for_a_file(
    autoattn: Run, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_lookup, "explain", explained)
    answer = json.loads(autoattn("explain", "--json", *CALL)[1])
    assert (answer["route"], answer["level"], answer["problem"]["seq_kv"]) == ("kernel", "bucket", 4096)
    assert len(answer["steps"]) == 2
    many = json.loads(autoattn("explain", "--json", "--shapes", shapes)[1])
    assert [document["problem"]["seq_q"] for document in many] == [1024, 2048, 1024]


def test_explain_tells_what_a_call_that_asks_for_the_lse_gets(autoattn: Run, user_cache: Path) -> None:
    words = ("explain", "--device", "h200", *CALL)
    default = search_space.load("triton/forward").default(samples.problem(), samples.H200)
    entry = samples.tuned(samples.problem(), default, choice="sdpa-cudnn")
    store.merge(user_cache, samples.H200, Op.FORWARD, [entry])
    assert "  runs on  sdpa-cudnn\n" in autoattn(*words)[1]
    _, out, _ = autoattn(*words, "--lse")
    assert "  runs on  kernel\n" in out
    assert "but it gives no LSE, so the kernel runs" in out
    assert "  runs on  eager\n" in autoattn("explain", *CALL, "--lse")[1], "on the CPU, where PyTorch gives none"
    code, _, error = autoattn(*words, "--lse", "--operation", "backward")
    assert code == 2
    assert "--lse is a choice for outputs, got backward bf16" in error


def test_explain_tells_what_a_training_call_gets(autoattn: Run, shapes: Path, user_cache: Path) -> None:
    _, out, _ = autoattn("explain", "--device", "h200", *CALL, "--training")
    assert out.startswith("bf16 B4 H32/8 1024x4096 D128 causal:bottom-right\n  runs on  kernel\n")
    assert "  level    forward: exact, backward: default\n" in out
    assert "  backward gluon/backward: " in out
    _, out, _ = autoattn("explain", "--device", "h200", *CALL, "--training", "--deterministic")
    assert "  level    forward: exact, backward: default\n" in out
    many = json.loads(autoattn("explain", "--device", "h200", "--shapes", shapes, "--training", "--json")[1])
    assert [document["problem"]["op"] for document in many] == ["forward"] * 3
    assert all(document["gradients"]["level"] == "default" for document in many)


# Render


def test_gradients_of_the_command_line_are_a_problem_of_their_own(autoattn: Run) -> None:
    code, out, _ = autoattn("render", "--device", "h200", *CALL, "--operation", "backward", "--deterministic")
    assert code == 0
    assert "def backward_queries" in out
    slopes = ("--modifier", "alibi", "--modifier", "learned_slopes")
    assert "def backward_slopes" in autoattn("render", "--device", "h200", *CALL, "--operation", "backward", *slopes)[1]
    answer = json.loads(autoattn("explain", "--device", "h200", *CALL, "--operation", "backward", "--json")[1])
    assert answer["problem"]["op"] == "backward"
    code, _, error = autoattn("explain", "--device", "h200", *CALL, "--deterministic")
    assert code == 2
    assert "deterministic is a choice for the operation backward alone" in error


def test_numerics_of_the_command_line_are_the_problems(autoattn: Run) -> None:
    code, out, _ = autoattn("explain", "--device", "h200", *CALL, "--numerics", "online")
    assert code == 0
    assert out.splitlines()[0].endswith(" online")
    answer = json.loads(autoattn("explain", "--device", "h200", *CALL, "--numerics", "any", "--json")[1])
    assert answer["problem"]["numerics"] == "any"
    _, text, _ = autoattn("render", "--device", "h200", *CALL, "--numerics", "online", "--param", "softmax=first_max")
    assert "# cannot run on that device: numerics online asks for" in text


def test_render_writes_the_templates_default_as_python(autoattn: Run) -> None:
    code, out, _ = autoattn("render", "--device", "a30", *CALL)
    assert code == 0
    assert out.splitlines()[0] == f"# {samples.problem()}, for NVIDIA A30"
    assert "# default of triton/forward; source digest " in out.splitlines()[1]
    compile(out, "kernel.py", "exec")
    assert "@triton.jit" in out


def test_render_writes_the_default_that_a_call_would_run(autoattn: Run) -> None:
    answer = json.loads(autoattn("explain", "--device", "h200", *CALL, "--json")[1])
    assert answer["level"] == "default"
    text = autoattn("render", "--device", "h200", *CALL)[1]
    assert text.splitlines()[1].startswith(f"# default of {answer['variant']['template']}; ")


def test_render_prefers_the_winner_of_the_cache(autoattn: Run, user_cache: Path, tmp_path: Path) -> None:
    code, out, _ = autoattn("render", "--device", "h200", *CALL, "--out", tmp_path / "kernel.py")
    assert (code, out) == (0, f"{tmp_path / 'kernel.py'}\n")
    text = (tmp_path / "kernel.py").read_text()
    assert "# measured winner of the cache" in text
    assert f"BLOCK_M = tl.constexpr({samples.measured().params['BLOCK_M']})" in text


def test_render_changes_what_param_names(autoattn: Run) -> None:
    _, out, _ = autoattn("render", "--device", "a30", *CALL, "--param", "BLOCK_M=64", "--param", "BLOCK_N=32")
    assert "changed by --param" in out.splitlines()[1]
    assert "BLOCK_M = tl.constexpr(64)" in out
    assert "BLOCK_N = tl.constexpr(32)" in out


def test_render_says_when_a_variant_cannot_run_on_the_device(autoattn: Run) -> None:
    choices = search_space.load("triton/forward").choices
    largest = {"BLOCK_M": max(choices["BLOCK_M"]), "BLOCK_N": max(choices["BLOCK_N"]), "num_warps": 1}  # type: ignore[type-var]
    settings = [word for name, value in largest.items() for word in ("--param", f"{name}={value}")]
    _, out, _ = autoattn("render", "--device", "a30", *CALL, *settings)
    assert out.splitlines()[2].startswith("# cannot run on that device: ")


def test_render_adds_the_log_sum_exp(autoattn: Run) -> None:
    assert "lse_ptr" not in autoattn("render", "--device", "a30", *CALL)[1]
    assert "lse_ptr" in autoattn("render", "--device", "a30", *CALL, "--lse")[1]


# Verify, report, devices


NOW = {"torch": "2.14.0", "driver": "600.1"}


def checked(finding: Finding) -> Callable[..., list[verify.Verification]]:
    return lambda entries, device: [
        verify.Verification(entry=entry, finding=finding, detail="the digests", versions=NOW) for entry in entries
    ]


@pytest.mark.parametrize("words", [("verify",), ("cache", "verify")])
def test_verify_lists_kernels_and_exits_with_1_when_one_fails(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    before = {path: path.read_bytes() for path in user_cache.rglob("*.json")}
    monkeypatch.setattr(verify, "verify", checked(Finding.SAME))
    code, out, _ = autoattn(*words, "--device", "h200")
    assert code == 0
    assert out.count("the digests") == 2
    monkeypatch.setattr(verify, "verify", checked(Finding.WRONG))
    code, out, _ = autoattn(*words, "--device", "h200")
    assert code == 1
    assert out.count("wrong") == 2
    assert {path: path.read_bytes() for path in user_cache.rglob("*.json")} == before, "nothing is written unasked"


def test_verify_marks_what_failed_and_unmarks_what_holds_again(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.path_of(user_cache, samples.H200, Op.FORWARD)
    monkeypatch.setattr(verify, "verify", checked(Finding.SLOWER))
    code, out, _ = autoattn("cache", "verify", "--device", "h200", "--mark")
    assert code == 1
    assert "2 marked, 0 unmarked" in out
    marks = [entry.mark for entry in store.read(path).entries.values()]
    assert [(mark.finding, mark.versions) for mark in marks if mark is not None] == [(Finding.SLOWER, NOW)] * 2
    assert "marked: slower" in autoattn("show", "--device", "h200")[1]
    monkeypatch.setattr(verify, "verify", checked(Finding.SAME))
    code, out, _ = autoattn("cache", "verify", "--device", "h200", "--mark")
    assert code == 0
    assert "0 marked, 2 unmarked" in out
    assert all(entry.mark is None for entry in store.read(path).entries.values())


def test_entries_of_each_operation_are_marked_in_their_own_file(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = samples.problem(op=Op.BACKWARD)
    space = search_space.load("triton/backward")
    params = space.default(gradients, samples.H200).as_dict()
    entry = samples.measured(
        gradients, template=space.template, params=params, space_digest=space.digest, candidates=()
    )
    entry = dataclasses.replace(entry, search=dataclasses.replace(entry.search, spaces={space.template: space.digest}))
    store.merge(user_cache, samples.H200, Op.BACKWARD, [entry])
    monkeypatch.setattr(verify, "verify", checked(Finding.WRONG))
    _, out, _ = autoattn("cache", "verify", "--device", "h200", "--mark")
    assert "2 marked" in out
    assert "1 marked" in out
    for op, count in ((Op.FORWARD, 2), (Op.BACKWARD, 1)):
        entries = store.read(store.path_of(user_cache, samples.H200, op)).entries.values()
        assert [stored.mark is not None for stored in entries] == [True] * count


def test_a_shipped_entry_is_marked_in_the_users_own_cache(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = samples.measured(samples.problem(batch=7))
    store.merge(resources.shipped_cache(), samples.H200, Op.FORWARD, [other])
    shipped = store.path_of(resources.shipped_cache(), samples.H200, Op.FORWARD)
    before = shipped.read_bytes()
    monkeypatch.setattr(verify, "verify", checked(Finding.BROKEN))
    autoattn("cache", "verify", "--device", "h200", "--mark")
    assert shipped.read_bytes() == before
    marked = store.read(store.path_of(user_cache, samples.H200, Op.FORWARD)).entries[other.problem.key]
    assert marked.mark is not None


def test_verify_checks_the_shipped_entry_where_the_users_is_stale_or_predicted(
    autoattn: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (samples.measured(samples.problem(batch=batch), time_us=999.0) for batch in (1, 2, 3))
    store.merge(resources.shipped_cache(), samples.H200, Op.FORWARD, map(samples.current, (first, second, third)))
    wrong = Mark(finding=Finding.WRONG, detail="off by 1.0", versions=NOW)
    marked = samples.current(samples.measured(third.problem, params={**third.params, "num_stages": 1}, mark=wrong))
    own = [samples.measured(first.problem), samples.current(samples.predicted(second.problem)), marked]
    store.merge(resources.user_cache(), samples.H200, Op.FORWARD, own)
    seen: list[Any] = []
    monkeypatch.setattr(verify, "verify", lambda entries, device: seen.extend(entries) or [])
    autoattn("verify", "--device", "h200")
    assert [entry.time_us for entry in seen] == [999.0, 999.0, 999.0, 400.0], "a mark may be lifted"


def test_verify_leaves_out_what_another_card_measured(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(verify, "verify", lambda entries, device: seen.extend(entries) or [])
    set_device(monkeypatch, replace(samples.H200, sm_count=128))
    _, out, _ = autoattn("verify")
    assert [entry.evidence.value for entry in seen] == ["predicted"]
    assert f"1 left out: measured on {samples.H200.fingerprint}, not on this card\n" in out


def test_verify_takes_the_users_entry_before_the_shipped_one(
    autoattn: Run, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = samples.measured(time_us=999.0)
    store.merge(resources.shipped_cache(), samples.H200, Op.FORWARD, [shipped])
    seen: list[Any] = []
    monkeypatch.setattr(verify, "verify", lambda entries, device: seen.extend(entries) or [])
    autoattn("verify", "--device", "h200")
    assert [entry.time_us for entry in seen if entry.problem == shipped.problem] == [400.0]


def test_report_prints_the_files_it_wrote(autoattn: Run, user_cache: Path, tmp_path: Path) -> None:
    code, out, _ = autoattn("report", "--cache", user_cache, "--out", tmp_path / "out")
    assert code == 0
    assert out.splitlines() == [str(tmp_path / "out" / "report.html"), str(tmp_path / "out" / "report.md")]
    assert all(Path(line).stat().st_size > 0 for line in out.splitlines())


def test_report_takes_the_shipped_cache_when_the_users_is_empty(autoattn: Run, tmp_path: Path) -> None:
    store.merge(resources.shipped_cache(), samples.A30, Op.FORWARD, [samples.predicted()])
    code, out, _ = autoattn("report", "--out", tmp_path / "out")
    assert code == 0
    assert "NVIDIA A30" in Path(out.splitlines()[1]).read_text()


def test_devices_lists_profiles_and_says_what_is_here(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = autoattn("devices")
    assert code == 0
    assert "NVIDIA A30" in out
    assert "No NVIDIA GPU was found" in out
    set_device(monkeypatch, samples.H200)
    assert "In this machine: NVIDIA H200 (h200)." in autoattn("devices")[1]


def test_devices_json_is_one_document(autoattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(autoattn("devices", "--json")[1])
    assert document["present"] is None
    assert {"a30", "a100", "h100", "h200", "l4", "rtx4090", "rtx5090", "b200"} <= {
        device["name"] for device in document["devices"]
    }
