"""What a new length costs a look-up: no text, no file and no other kind's entries."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import samples

from autoattn.cache import store
from autoattn.codegen import resources
from autoattn.codegen.space_rules import Rule
from autoattn.core import kernel_kind, size_class, variant
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.mask import Mask
from autoattn.core.problem import Numerics, Op, Problem
from autoattn.runtime.plan import cache_lookup, planner, reasons, tuned_entries
from autoattn.runtime.plan.explanations import Level

H200 = samples.H200
PROBLEM = samples.problem()


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resources, "shipped_cache", lambda: tmp_path / "shipped")


def measured(problem: Problem, **changes: Any) -> CacheEntry:
    return samples.current(replace(samples.measured(problem), choice="kernel", **changes))


def written(folder: Path, *entries: CacheEntry) -> Path:
    store.merge(folder, H200, Op.FORWARD, entries)
    return folder


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function after which no text is rendered or hashed, no sentence formed and no cache file read."""

    def forbid() -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a new length did what only a new kind may do")

        monkeypatch.setattr(jinja2.Template, "render", fail)
        monkeypatch.setattr(variant, "digest_of", fail)
        monkeypatch.setattr(Path, "open", fail)
        monkeypatch.setattr(store, "files_of", fail)
        monkeypatch.setattr(store, "source_of", fail)
        monkeypatch.setattr(reasons, "formed", fail)
        monkeypatch.setattr(Problem, "__str__", fail)
        monkeypatch.setattr(Problem, "key", property(fail))

    return forbid


@pytest.mark.parametrize("tuned", [True, False], ids=["tuned", "default"])
@pytest.mark.usefixtures("no_portfolio")
def test_a_new_length_renders_nothing_hashes_nothing_says_nothing_and_reads_no_file(
    tuned: bool, tmp_path: Path, forbidden: Any
) -> None:
    folder = written(tmp_path, measured(PROBLEM if tuned else samples.problem(head_dim=80)))
    first = cache_lookup.explain(replace(PROBLEM, seq_kv=5000), H200, folder)
    sources = [planner.render.render(PROBLEM, next(cache_lookup.variants(first, H200)))]
    forbidden()
    for length in range(3000, 3050):
        problem = replace(PROBLEM, seq_kv=length)
        explanation = cache_lookup.explain(problem, H200, folder)
        assert explanation.level in ((Level.BUCKET, Level.NEAREST) if tuned else (Level.DEFAULT,))
        sources.append(planner.render.render(problem, next(cache_lookup.variants(explanation, H200))))
    assert all(source is sources[0] for source in sources)


@pytest.mark.parametrize("level", [Level.NEAREST, Level.DEFAULT])
@pytest.mark.usefixtures("no_portfolio")  # beside one, only near entries are asked
def test_a_new_class_renders_nothing_hashes_nothing_and_says_nothing(
    level: Level, tmp_path: Path, forbidden: Any
) -> None:
    # Several entries; where none of them can serve, each leaves a step that nobody reads.
    lengths, batch = ([2048, 4096, 8192], 1) if level is Level.NEAREST else ([2048, 4096, 8192], 2)
    numerics = {"params": {**samples.measured().params, "softmax": "first_max"}} if level is Level.DEFAULT else {}
    tuned = [measured(replace(PROBLEM, seq_kv=length), rivals=(), candidates=(), **numerics) for length in lengths]
    folder = written(tmp_path, *tuned)
    problem = replace(PROBLEM, batch=batch, numerics=Numerics.ONLINE if numerics else Numerics.ANY)
    for length in (2000, 5000, 9000):  # an entry's text is compared when the entry is first about to serve
        cache_lookup.explain(replace(problem, seq_kv=length), H200, folder)
    forbidden()
    classes = {size_class.rounded(length) for length in range(512, 16384)}
    explanations = [cache_lookup.explain(replace(problem, seq_kv=length), H200, folder) for length in sorted(classes)]
    assert len(explanations) == 64
    if level is Level.DEFAULT:
        assert {explanation.level for explanation in explanations} == {Level.DEFAULT}
        assert all(len(explanation.reasons.texts) == len(tuned) + 3 for explanation in explanations)
    else:
        assert {explanation.level for explanation in explanations} <= {Level.BUCKET, Level.NEAREST}


@pytest.mark.usefixtures("no_portfolio")  # beside one, only near entries are asked
def test_a_new_class_asks_a_rule_once_however_many_entries_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = [replace(PROBLEM, seq_kv=length) for length in range(1024, 1036)]
    folder = written(tmp_path, *(measured(problem, rivals=(), candidates=()) for problem in tuned))
    refusing = replace(PROBLEM, seq_q=64, seq_kv=5000)  # too few rows for the tiles of these entries
    assert len(cache_lookup.explain(refusing, H200, folder).steps) == len(tuned) + 3
    rules: list[Rule] = []
    call = Rule.__call__
    monkeypatch.setattr(Rule, "__call__", lambda rule, facts: rules.append(rule) or call(rule, facts))
    cache_lookup.explain(replace(refusing, seq_kv=6200), H200, folder)
    assert rules
    assert max(Counter(rules).values()) <= 2, "of the smallest problem of the class, and of 6,200 keys"


def test_entries_of_other_kinds_are_not_among_them(tmp_path: Path) -> None:
    others = [samples.problem(head_dim=80), samples.problem(mask=Mask.window(64, 0))]
    folder = written(tmp_path, measured(PROBLEM), *map(measured, others))
    entries = tuned_entries.of(PROBLEM, H200, (folder,))
    assert list(entries.measured) == [PROBLEM.key]
    everything = tuned_entries.read(Op.FORWARD, H200, (folder,))
    assert set(everything.measured) == {problem.key for problem in (PROBLEM, *others)}
    assert all(not kernel_kind.shares_kernels(PROBLEM, other) for other in others)


def test_a_file_that_was_written_since_is_read_again(tmp_path: Path) -> None:
    folder = written(tmp_path, measured(samples.problem(seq_kv=8192)))
    assert cache_lookup.explain(PROBLEM, H200, folder).level is not Level.EXACT
    written(folder, measured(PROBLEM))
    assert cache_lookup.explain(PROBLEM, H200, folder).level is Level.EXACT
    next(path for path in (folder / H200.name).iterdir() if path.suffix == ".json").unlink()
    assert cache_lookup.explain(PROBLEM, H200, folder).level is Level.DEFAULT


def test_who_asks_time_and_again_sees_a_written_file_a_while_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, measured(samples.problem(seq_kv=8192)))
    monkeypatch.setattr(tuned_entries.inventory, "folders", lambda named: (folder,))
    clock = [100.0]
    monkeypatch.setattr(tuned_entries.time, "monotonic", lambda: clock[0])
    watched = tuned_entries.WatchedEntries(PROBLEM, H200)
    before = watched.now()
    written(folder, measured(PROBLEM))
    clock[0] += tuned_entries.CHECK_SECONDS / 2
    assert watched.now() is before, "no file was looked at"
    clock[0] += tuned_entries.CHECK_SECONDS
    assert PROBLEM.key in watched.now().measured


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_entries, "MAX_KINDS", 2)
    read: list[Any] = []
    gather = tuned_entries.read
    monkeypatch.setattr(tuned_entries, "read", lambda *given: read.append(given) or gather(*given))
    kinds = [samples.problem(head_dim=head_dim) for head_dim in (32, 64, 96)]
    for problem in (*kinds, kinds[2], kinds[1], kinds[0]):
        tuned_entries.of(problem, H200, (tmp_path,))
    assert len(read) == 4, "of three kinds two are kept, and the first was read again"


def test_why_an_entry_is_held_back_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tuned_entries.of(PROBLEM, H200, (written(tmp_path, measured(PROBLEM)),))
    entry = entries.measured[PROBLEM.key][0].entry
    checked_entries: list[CacheEntry] = []
    monkeypatch.setattr(store, "why_held_back", lambda each: checked_entries.append(each) or "no reason")
    assert [entries.why_held_back(entry) for _ in range(3)] == ["no reason"] * 3
    assert checked_entries == [entry]
    stranger = replace(entry)
    assert [entries.why_held_back(stranger) for _ in range(2)] == ["no reason"] * 2
    assert checked_entries == [entry, stranger, stranger], "one that does not stand in the cache may be gone at once"
