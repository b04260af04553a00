"""`autoattn cache`: what its commands print, and their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import kernels
import pytest
import samples
from cache_files import FORWARD_FILE
from command_line import CALL, Run, assert_one_sentence, autoattn, no_card, user_cache  # noqa: F401 - fixtures
from typer.testing import CliRunner

from autoattn.cache import store
from autoattn.cli.app import app
from autoattn.cli.cache import COMMANDS
from autoattn.codegen import precompiled, resources
from autoattn.core.problem import Op
from autoattn.tools import bundle


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A cache that has another time for one problem, and a problem more."""
    folder = tmp_path / "other"
    entries = [samples.measured(time_us=300.0), samples.predicted(samples.problem(batch=9))]
    store.merge(folder, samples.H200, Op.FORWARD, map(samples.current, entries))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_has_an_example_with_its_own_options(command: str) -> None:
    text = CliRunner().invoke(app, ["cache", command, "--help"], env={"COLUMNS": "400"}).output
    options, _, examples = text.partition("Example")
    assert f"autoattn cache {command}" in examples
    assert set(re.findall(r"--[a-z-]+", examples)) <= set(re.findall(r"--[a-z-]+", options))


def test_list_counts_entries(autoattn: Run, user_cache: Path) -> None:
    code, out, _ = autoattn("cache", "list")
    assert code == 0
    assert samples.H200.fingerprint in out
    (held,) = json.loads(autoattn("cache", "list", "--json")[1])
    assert (held["measured"], held["predicted"], held["stale"]) == (1, 1, 0)
    (user_cache / "none").mkdir()
    assert "no cache file" in autoattn("cache", "list", "--cache", user_cache / "none")[1]


def test_diff_exits_with_1_when_caches_differ_and_0_when_not(autoattn: Run, user_cache: Path, other: Path) -> None:
    code, out, _ = autoattn("cache", "diff", user_cache, other)
    assert code == 1
    assert "0.75x" in out
    assert "only in the first" in out
    assert "only in the second" in out
    assert autoattn("cache", "diff", other, other)[:2] == (0, "They hold the same.\n")
    code, out, _ = autoattn("cache", "diff", user_cache, other, "--json")
    assert code == 1
    assert sorted(difference["ratio"] or 0 for difference in json.loads(out)) == [0, 0, 0.75]


def test_merge_says_what_it_took_and_what_not(autoattn: Run, user_cache: Path, other: Path) -> None:
    entry = samples.current(samples.predicted())
    store.merge(other.parent / "third", samples.H200, Op.FORWARD, [entry])
    out = autoattn("cache", "merge", other, user_cache)[1]
    assert "2 taken, 0 there already, 0 not taken" in out
    assert f"  replaced: {entry.problem}: it runs the same, and was measured with no older software: 273 us" in out
    assert "0 taken, 2 there already, 0 not taken" in autoattn("cache", "merge", other, user_cache)[1]
    code, out, _ = autoattn("cache", "merge", other.parent / "third" / "h200" / FORWARD_FILE, user_cache)
    assert code == 0
    assert "1 not taken" in out
    assert f"  not taken: {entry.problem}: a prediction never takes a measurement's place" in out


def test_a_bundle_carries_entries_from_one_cache_to_another(autoattn: Run, user_cache: Path, tmp_path: Path) -> None:
    code, out, _ = autoattn("cache", "export", "all", "--out", tmp_path / "all.zip")
    assert code == 0
    assert "2 entries" in out
    assert re.search(r"SHA-256 [0-9a-f]{64}\n", out)
    assert "2 taken" in autoattn("cache", "merge", tmp_path / "all.zip", tmp_path / "new")[1]
    assert autoattn("cache", "diff", user_cache, tmp_path / "new")[0] == 0
    for name in (samples.problem(), samples.problem().key):
        assert "1 entry" in autoattn("cache", "export", name, "--out", tmp_path / "one.zip")[1]


@pytest.fixture
def both(user_cache: Path) -> Path:
    """Another card's entry in the user's cache, and a shipped cache that shares a problem with the user's."""
    shipped = resources.shipped_cache()
    store.merge(user_cache, samples.A30, Op.FORWARD, [samples.current(samples.predicted())])
    entries = [samples.measured(time_us=999.0), samples.measured(samples.problem(batch=7))]
    store.merge(shipped, samples.H200, Op.FORWARD, map(samples.current, entries))
    return shipped


def test_export_takes_the_entries_that_calls_take(autoattn: Run, both: Path, user_cache: Path, tmp_path: Path) -> None:
    code, out, _ = autoattn("cache", "export", "all", "--device", "h200", "--out", tmp_path / "x.zip")
    assert code == 0
    assert f"3 entries: 2 of {user_cache}, 1 of {both}\n" in out
    (file,) = bundle.unpack(tmp_path / "x.zip").files
    assert [entry.time_us for entry in file.entries.values() if entry.problem == samples.problem()] == [400.0]
    assert "4 entries" in autoattn("cache", "export", "all", "--out", tmp_path / "y.zip")[1]
    assert "2 entries" in autoattn("cache", "export", "all", "--cache", both, "--out", tmp_path / "z.zip")[1]


def test_a_tuned_card_does_not_hide_the_shipped_entries_of_another(autoattn: Run, tmp_path: Path) -> None:
    entry = samples.current(samples.measured())
    store.merge(resources.user_cache(), samples.A30, Op.FORWARD, [samples.current(samples.predicted())])
    store.merge(resources.shipped_cache(), samples.H200, Op.FORWARD, [entry])
    code, out, _ = autoattn("cache", "export", "all", "--device", "h200", "--out", tmp_path / "x.zip")
    assert code == 0
    assert "1 entry: 1 of" in out
    autoattn("report", "--out", tmp_path / "out")
    assert "NVIDIA H200" in (tmp_path / "out" / "report.md").read_text()


def test_list_says_how_many_entries_are_shadowed(autoattn: Run, both: Path) -> None:
    held = json.loads(autoattn("cache", "list", "--json")[1])
    assert [(overlay["device"], overlay["shadowed"]) for overlay in held] == [("a30", 0), ("h200", 0), ("h200", 1)]
    assert "Shadowed" in autoattn("cache", "list")[1]


def test_diff_with_one_cache_compares_it_with_what_calls_take(autoattn: Run, both: Path, tmp_path: Path) -> None:
    autoattn("cache", "export", "all", "--out", tmp_path / "all.zip")
    assert autoattn("cache", "diff", tmp_path / "all.zip")[:2] == (0, "They hold the same.\n")
    code, out, _ = autoattn("cache", "diff", both)
    assert code == 1
    assert "0.40x" in out


READERS = (
    ("show",), ("report",), ("verify", "--device", "h200"), ("explain", *CALL), ("explain", "--device", "h200", *CALL),
    ("render", "--device", "h200", *CALL), ("cache", "list"), ("cache", "verify", "--device", "h200", "--mark"),
    ("cache", "export", "all", "--out", "x.zip"), ("cache", "prune"), ("cache", "prune", "--dry-run"),
)  # fmt: skip


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_a_cache_that_does_not_exist_is_an_error_wherever_one_is_read(
    autoattn: Run, user_cache: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    code, out, error = autoattn(*words, "--cache", tmp_path / "cahce")
    assert (code, out) == (1, "")
    assert_one_sentence(error)
    assert error == (
        f"autoattn: the cache {tmp_path / 'cahce'} must be a folder that is there, but it does not exist; "
        "correct the path\n"
    )
    assert not (tmp_path / "cahce").exists()


def test_all_leaves_stale_entries_out_and_a_name_of_one_is_refused(autoattn: Run, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    held, stale = samples.current(samples.measured()), samples.measured(samples.problem(batch=3))
    store.merge(folder, samples.H200, Op.FORWARD, [held, stale])
    assert "1 entry" in autoattn("cache", "export", "all", "--cache", folder, "--out", tmp_path / "a.zip")[1]
    code, _, error = autoattn("cache", "export", stale.problem, "--cache", folder, "--out", tmp_path / "b.zip")
    assert code == 1
    assert "is stale" in error
    assert not (tmp_path / "b.zip").exists()


def test_prune_says_first_what_would_go(autoattn: Run, tmp_path: Path) -> None:
    path = store.merge(tmp_path, samples.H200, Op.FORWARD, [samples.predicted()])
    before = path.read_bytes()
    code, out, _ = autoattn("cache", "prune", "--cache", tmp_path, "--dry-run")
    assert code == 0
    assert f"would go: {samples.problem()} ({path})" in out
    assert "would go: 1 stale entry, 0 journals" in out
    assert path.read_bytes() == before
    assert "removed: 1 stale entry" in autoattn("cache", "prune", "--cache", tmp_path)[1]
    assert store.read(path).entries == {}
    assert "removed: 0 stale entries" in autoattn("cache", "prune", "--cache", tmp_path)[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["diff", "{folder}", "{folder}/none"], 1, "there is none; correct the path"),
        (["diff", "{folder}", "{folder}/text"], 1, "is damaged"),
        (["merge", "{folder}", "{folder}/new"], 1, "must hold cache files, found none"),
        (["merge", "{folder}/none", "{folder}/new"], 1, "there is none; correct the path"),
        (["merge", "{other}", "{folder}/text"], 2, "INTO must be a cache folder"),
        (["export", "all", "--cache", "{folder}", "--out", "{folder}/x.zip"], 1, "must hold an entry, got none"),
        (["export", "mine", "--cache", "{other}", "--out", "{folder}/x.zip"], 2, "got 'mine'; correct it"),
        (["export", "all", "--cache", "{other}", "--out", "{folder}/no/x.zip"], 1, "No such file or directory"),
        (["export", "all", "--device", "a99", "--out", "x.zip"], 2, "got 'a99'"),
        (["export", "all"], 2, "--out"),
        (["bogus"], 2, "No such command 'bogus'"),
    ],
)
def test_a_mistake_is_one_sentence(
    autoattn: Run, other: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "text").write_text("text")
    places = {"{folder}": str(folder), "{other}": str(other)}
    given = []
    for argument in arguments:
        for name, place in places.items():
            argument = argument.replace(name, place)
        given.append(argument)
    exit_code, out, error = autoattn("cache", *given)
    assert (exit_code, out) == (code, "")
    assert_one_sentence(error)
    assert words in error
    assert [path.name for path in folder.iterdir()] == ["text"]


@pytest.mark.exhaustive
def test_compile_keeps_machine_code_that_export_packs_and_merge_takes(
    autoattn: Run, user_cache: Path, tmp_path: Path
) -> None:
    problem = kernels.problem(head_dim=16)
    store.merge(user_cache, samples.H200, Op.FORWARD, [samples.tuned(problem, kernels.variant())])
    outcome = autoattn("cache", "compile", "--device", "h200", "--cache", user_cache, "--jobs", "2")
    assert outcome[0] == 0, outcome
    paths = precompiled.paths_in(user_cache, 90)
    assert f"{len(paths)} compiled in " in outcome[1]
    assert paths
    code, out, _ = autoattn("cache", "compile", "--device", "h200", "--cache", user_cache)
    assert (code, "0 compiled in " in out) == (0, True)
    code, out, _ = autoattn(
        *("cache", "export", "all", "--cache", user_cache, "--device", "h200", "--compiled"),
        *("--out", tmp_path / "bundle.zip"),
    )
    assert code == 0
    count = int(re.findall(r"(\d+) precompiled kernels", out)[0])
    assert 0 < count <= len(paths)  # without those of problems that PyTorch answers
    code, out, _ = autoattn("cache", "merge", tmp_path / "bundle.zip", tmp_path / "other")
    assert code == 0
    assert f"{count} precompiled kernels taken, 0 there already" in out
    taken = {path.name for path in precompiled.paths_in(tmp_path / "other", 90)}
    assert len(taken) == count
    assert taken <= {path.name for path in paths}


def test_compile_needs_problems_of_the_architecture(autoattn: Run, user_cache: Path) -> None:
    problem = kernels.problem(head_dim=16)
    store.merge(user_cache, samples.H200, Op.FORWARD, [samples.tuned(problem, kernels.variant())])
    code, _, error = autoattn("cache", "compile", "--device", "a30", "--cache", user_cache)
    assert code == 1
    assert "must hold entries of a card of sm_80, found none; tune first, or name --shapes" in error
    code, _, error = autoattn("cache", "compile", "--device", "h200", "--cache", user_cache, "--jobs", "0")
    assert (code, "--jobs" in error) == (2, True)
