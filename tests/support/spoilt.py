"""Mutants of cache and YAML files, drawn from a seed, and what reading one of them came to.

A reader may refuse a mutant in one sentence, or load it as its text says; all else is a fault.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import samples
import yaml

from autoattn.cache import file_format, store
from autoattn.codegen import render, resources, search_space
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.problem import Problem
from autoattn.core.trial import Evidence, Outcome, Trial
from autoattn.core.variant import Variant
from autoattn.errors import AutoattnError, SpaceError
from autoattn.search import storage
from autoattn.search.shared_trials import Ledger
from autoattn.shapes import shapes_file

STUDY = "one"

ODD = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.0, -0.5, 1e-300, 1e300, math.nan, math.inf, "", "forward",
    "measured", "predicted", "../../etc/passwd", "gluon/forward", "triton/forward", "\x00", "\u2603" * 50, [], {}, [[]],
    {"": {}}, "a" * 5000, "16", 16, 64, 128, "causal", "float16",
)  # fmt: skip
TOKENS = (
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"'", b"\n", b"\t", b" ", b"-", b"- ", b"&a ", b"*a", b"<<: ", b"!!int ",
    b"|", b"null", b"NaN", b"1e999", b"\x00", b"\xff", b"\xef\xbb\xbf", b"# ", b"? ", b"%YAML 9\n", b"---\n",
    b"2025-99-99", b"~", b"!!python/object/apply:os.system ", b"0x", b"1_0", b"\\ud800",
)  # fmt: skip


class Kind(str, Enum):
    """What a mutant was made of."""

    CACHE = "cache file"
    SHAPES = "shapes file"
    SPACE = "search space"
    JOURNAL = "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What reading a mutant came to."""

    loaded: bool = False
    refused: str = ""  # the sentence
    fault: str = ""  # why neither is right


def mutant(rng: random.Random, kind: Kind, text: str) -> bytes:
    """The text with one to three changes: of bytes, of lines, or of a value in its tree."""
    data = text.encode()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change = rng.choice((_byte, _token, _cut, _lines, _number, _tree, _tree, _tree))
        data = _tree(rng, data, kind) if change is _tree else change(rng, data)  # type: ignore[call-arg]
    return data


def _byte(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) or 1)
    return data[:place] + bytes([rng.randrange(256)]) + data[place + rng.randrange(2) :]


def _token(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) or 1)
    return data[:place] + rng.choice(TOKENS) + data[place + rng.choice((0, 0, 1, 4)) :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice((data[:start], data[end:], data[:start] + data[end:], data[:end] + data[start:]))


def _lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    if rng.random() < 0.5:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        lines[first : first + rng.randrange(2)] = [lines[second]]
    return b"".join(lines)


def _number(rng: random.Random, data: bytes) -> bytes:
    """Another digit in the place of one: what reads well and may mean something else."""
    places = [place for place, sign in enumerate(data) if sign in b"0123456789"]
    if not places:
        return data
    place = rng.choice(places)
    return data[:place] + rng.choice((b"%d" % rng.randrange(10), b"", b"00", b".", b"-")) + data[place + 1 :]


def _tree(rng: random.Random, data: bytes, kind: Kind) -> bytes:
    """Another value, name or place for a node of the tree; keys of entries follow what became of their problems."""
    if kind is Kind.JOURNAL:  # a tree a line
        lines = data.splitlines(keepends=True) or [b""]
        place = rng.randrange(len(lines))
        lines[place] = b" ".join(_tree(rng, lines[place], Kind.CACHE).split()) + b"\n"
        return b"".join(lines)
    try:
        tree = json.loads(data) if kind is Kind.CACHE else yaml.safe_load(data)
    except Exception:  # spoilt by an earlier change
        return data
    places = list(_places(tree))
    if not places:
        return data
    parent, name = rng.choice(places)
    other, other_name = rng.choice(places)
    act = rng.randrange(5)
    if act == 0:
        del parent[name]
    elif act == 1:
        parent[name] = copy.deepcopy(rng.choice(ODD))
    elif act == 2:
        parent[name] = copy.deepcopy(other[other_name])
    elif act == 3 and isinstance(parent, dict):
        parent[rng.choice(("more", "", str(name).upper(), other_name))] = parent.pop(name)
    elif isinstance(parent[name], int | float) and not isinstance(parent[name], bool):
        parent[name] = parent[name] * rng.choice((2, -1, 0, 1000)) + rng.choice((0, 1))
    if kind is not Kind.CACHE:
        return yaml.safe_dump(tree, sort_keys=False).encode()
    if rng.random() < 0.7:
        _name_anew(tree)
    return json.dumps(tree, indent=1).encode("utf-8", "surrogatepass")


def _name_anew(tree: Any) -> None:
    """Gives the entries the keys of their problems, so that more than the key of a mutant is tried."""
    try:
        entries = tree["entries"].values()
        named = {msgspec.convert(entry["problem"], Problem).key: entry for entry in entries}
    except Exception:  # a problem that cannot be
        return
    tree["entries"] = named


def _places(tree: Any) -> Any:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in list(pairs):
        yield tree, name
        yield from _places(value)


def fate(kind: Kind, path: Path) -> Fate:
    """Reads a mutant at `path` as the program would, and judges what came."""
    judge: Callable[[Path], str] = {
        Kind.CACHE: _cache_fault,
        Kind.SHAPES: _shapes_fault,
        Kind.SPACE: _space_fault,
        Kind.JOURNAL: _journal_fault,
    }[kind]
    before = path.read_bytes()
    try:
        fault = judge(path)
    except AutoattnError as error:
        sentence = str(error)
        fault = "an error of several lines" if "\n" in sentence else ""
        fault = fault or ("an error without end" if len(sentence) > 3000 else "")
        return Fate(refused=sentence, fault=fault or _touched(path, before, kind))
    except Exception as error:
        return Fate(fault=f"{type(error).__name__}: {str(error)[:300]}")
    return Fate(loaded=True, fault=fault or _touched(path, before, kind))


def _touched(path: Path, before: bytes, kind: Kind) -> str:
    after = path.read_bytes()
    if kind is Kind.JOURNAL:  # which goes on, behind its last whole line
        lines = before.splitlines(keepends=True)
        return "" if after.startswith(b"".join(lines[:-1])) else "opening it changed what was written"
    return "" if after == before else "reading changed the file"


def journal(path: Path) -> str:
    """The text of a journal of one study: five trials with an outcome, one given up, one that is being tried."""
    points = search_space.load("triton/forward")
    ledger = Ledger(STUDY, storage.journal(path), points)
    outcomes = list(Outcome)[:5]
    trying: list[Variant] = []
    for variant, outcome in zip(points.feasible(samples.problem(), samples.A30), [*outcomes, None, None], strict=False):
        assert ledger.claim(variant)
        if outcome is not None:
            prediction = samples.prediction(7.5) if outcome is Outcome.OK else None
            ledger.finish(Trial(variant=variant, outcome=outcome, prediction=prediction), 7.5)
        else:
            trying.append(variant)
    ledger.give_up(trying[0])
    return path.read_text(encoding="utf-8")


def _journal_fault(path: Path) -> str:
    """What is wrong with a journal that loaded: each finished trial must stand in its text, and its variant exist."""
    points = search_space.load("triton/forward")
    ledger = Ledger(STUDY, storage.journal(path), points)
    try:
        finished = ledger.news().finished
    finally:
        ledger.leave()
    said = [attributes["trial"] for attributes in _attributes(path.read_bytes()) if "trial" in attributes]
    for trial in finished:
        points.check(trial.variant.as_dict())
        if all(_differs(msgspec.to_builtins(trial), other) is not None for other in said):
            return f"{trial.variant} is not what the text says"
    return ""


def _attributes(data: bytes) -> Any:
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            log = json.loads(line)
            yield from (log[name] for name in ("user_attr", "user_attrs") if isinstance(log.get(name), dict))


def _cache_fault(path: Path) -> str:
    """What is wrong with a cache file that loaded: it must say what its text says, and each entry must be sound."""
    file = store.read(path)
    said = json.loads(path.read_bytes())
    if (where := _differs(msgspec.to_builtins(file), said)) is not None:
        return f"{where} is not what the text says"
    for key, entry in file.entries.items():
        if fault := _entry_fault(key, entry):
            return fault
    again = file_format.decode(file_format.encode(file), path)
    if list(again.entries) != list(file.entries):
        return "writing it anew loses entries"
    return ""


def _entry_fault(key: str, entry: CacheEntry) -> str:
    if key != entry.problem.key:
        return f"{key} holds another problem"
    if not 0.0 < entry.time_us < math.inf:
        return f"{key} takes {entry.time_us} us"
    measured = entry.evidence is Evidence.MEASURED
    if measured != (entry.measurement is not None) or measured != (entry.verdict is not None and entry.verdict.ok):
        return f"{key} is {entry.evidence.value}, but rests on something else"
    try:
        stale = store.why_stale(entry)
    except AutoattnError as error:  # what was read must not stop whoever looks at it
        return f"{key} cannot be judged: {error}"
    if stale is None and render.render(entry.problem, entry.variant).digest != entry.source_digest:
        return f"{key} would run another kernel than the one that was tuned"
    return ""


def _differs(loaded: Any, said: Any, where: str = "") -> str | None:
    """Where a loaded value is not the text's; what the text leaves out has its default."""
    if isinstance(said, dict) and isinstance(loaded, dict):
        pairs = [(name, loaded[name], said[name]) for name in said if name in loaded]
    elif isinstance(said, list) and isinstance(loaded, list | tuple) and len(said) == len(loaded):
        pairs = [(str(place), *both) for place, both in enumerate(zip(loaded, said, strict=True))]
    else:
        same = loaded == said and isinstance(loaded, bool) == isinstance(said, bool)
        return None if same else where or "the file"
    places = (_differs(read, meant, f"{where}/{name}") for name, read, meant in pairs)
    return next((place for place in places if place is not None), None)


def _shapes_fault(path: Path) -> str:
    """What is wrong with a shapes file that loaded: plain data of the same content must give the same problems."""
    named = shapes_file.load(path)
    plain = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    if [named_problem.problem for named_problem in shapes_file.parse(plain, "plain")] != [
        named_problem.problem for named_problem in named
    ]:
        return "its problems are not those of its data"
    if not named or any(not named_problem.groups or named_problem.problem.kept_pairs() < 0 for named_problem in named):
        return "a problem has no group, or counts of pairs below 0"
    keys = [named_problem.problem.key for named_problem in named]
    return "a problem stands twice" if len(set(keys)) != len(keys) else ""


def _space_fault(path: Path) -> str:
    """What is wrong with a search space that loaded: its parameters must be those of its data, and its seeds points."""
    template = "triton/forward"
    kept = resources.space_path
    resources.space_path = lambda name: path
    try:
        loaded = search_space.load.__wrapped__(template)
    finally:
        resources.space_path = kept
    plain = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    said = {name: tuple(parameter["choices"]) for name, parameter in plain["parameters"].items()}
    if loaded.choices != said or len(loaded.require) != len(plain.get("require") or ()):
        return "its parameters or rules are not those of its data"
    for _, params in loaded.seeds:
        try:
            loaded.check(params)
        except SpaceError as error:
            return f"a seed is no point of it: {error}"
    return ""
