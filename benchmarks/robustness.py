"""Whether cache files survive: `python benchmarks/robustness.py writers` and `... mutants --count 10000`.

`writers` lets processes merge into one cache at once while another reads it, and counts what is lost. `mutants` spoils
cache files, shapes files, search spaces and journals in random ways, and counts how each was read; a seed and `--only`
its number find a mutant again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import samples  # noqa: E402
import spoilt  # noqa: E402
from kept import tell  # noqa: E402
from spoilt import Fate, Kind  # noqa: E402

from autoattn.cache import file_format, store  # noqa: E402
from autoattn.codegen import resources  # noqa: E402
from autoattn.core.cache_entry import CacheEntry  # noqa: E402
from autoattn.core.problem import Op  # noqa: E402
from autoattn.core.trial import Evidence  # noqa: E402
from autoattn.errors import AutoattnError  # noqa: E402

SHARED = 20  # problems that all writers write
OWN = 100_000  # batches from one writer's first problem to the next one's
LARGEST = 6000  # bytes of a shapes file that is spoilt; larger ones only take longer
ENTRIES = 3  # of a cache file that is spoilt
CHUNK = 50  # mutants that a process takes at once
SHOWN = 20  # faults that are printed


@dataclass(slots=True, kw_only=True)
class Written:
    """What one writer was told that the cache holds."""

    own: dict[str, float] = field(default_factory=dict)  # problem key -> microseconds
    shared: dict[str, set[float]] = field(default_factory=dict)  # problem key -> those of its measurements
    merges: int = 0
    errors: list[str] = field(default_factory=list)


def write_for(folder: Path, number: int, seconds: float, barrier: threading.Barrier) -> Written:
    """Merges one entry after the other: two of its own problems, then one that all write."""
    rng, log = random.Random(number), Written()
    barrier.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        shared = log.merges % 3 == 2
        batch = 1 + rng.randrange(SHARED) if shared else (number + 1) * OWN + log.merges
        time_us = float(rng.randrange(1, 10**6))
        make = rng.choice((samples.measured, samples.predicted))
        entry = make(samples.problem(batch=batch), time_us=time_us, report=None, candidates=())
        entry = replace(entry, rivals=(), choice="kernel")
        try:
            store.merge(folder, samples.H200, Op.FORWARD, [entry])
        except AutoattnError as error:
            log.errors.append(str(error))
            continue
        log.merges += 1
        if not shared:
            log.own[entry.problem.key] = time_us
        elif entry.evidence is Evidence.MEASURED:
            log.shared.setdefault(entry.problem.key, set()).add(time_us)
    return log


def read_until(folder: Path, seconds: float, barrier: threading.Barrier) -> tuple[int, list[str]]:
    """Reads the cache all the while: (how often, what was wrong)."""
    barrier.wait()
    end, reads, faults = time.monotonic() + seconds, 0, []
    seen: set[str] = set()
    while time.monotonic() < end:
        try:
            keys = store.lookup(folder, samples.H200, Op.FORWARD).keys()
        except AutoattnError as error:
            faults.append(str(error))
            continue
        reads += 1
        if not seen <= keys:
            faults.append(f"{len(seen - keys)} entries were gone")
        seen = set(keys)
        time.sleep(0.02)
    return reads, faults


def lost(entries: dict[str, CacheEntry], logs: list[Written]) -> list[str]:
    """What a writer was told that is not in the cache."""
    faults = []
    for log in logs:
        for key, time_us in log.own.items():
            if key not in entries or entries[key].time_us != time_us:
                faults.append(f"{key} is lost")
    shared = {key for log in logs for key in log.shared}
    for key in sorted(shared):
        times = set().union(*(log.shared.get(key, set()) for log in logs))
        if key not in entries or entries[key].evidence is not Evidence.MEASURED or entries[key].time_us not in times:
            faults.append(f"{key} has lost its measurement")
    return faults


def writers(processes: int, seconds: float) -> tuple[str, int]:
    """(the run as Markdown, faults)"""
    folder = Path(tempfile.mkdtemp(prefix="autoattn-writers-"))
    context = multiprocessing.get_context("spawn")
    try:
        with context.Manager() as manager, ProcessPoolExecutor(processes + 1, mp_context=context) as pool:
            barrier = manager.Barrier(processes + 1)
            tickets = [pool.submit(write_for, folder, number, seconds, barrier) for number in range(processes)]
            reads, unreadable = pool.submit(read_until, folder, seconds, barrier).result()
            logs = [ticket.result() for ticket in tickets]
        path = store.path_of(folder, samples.H200, Op.FORWARD)
        entries = dict(store.read(path).entries)
        size, left = path.stat().st_size, [file.name for file in path.parent.iterdir() if file.suffix == ".tmp"]
    finally:
        shutil.rmtree(folder)
    errors = [error for log in logs for error in log.errors]
    faults = [*lost(entries, logs), *unreadable, *(f"{name} was left behind" for name in left)]
    rows: dict[str, int | str] = {
        "entries merged": sum(log.merges for log in logs),
        "of the slowest and the fastest writer": f"{min(o.merges for o in logs):,} and {max(o.merges for o in logs):,}",
        "entries of one writer alone": sum(len(log.own) for log in logs),
        "problems that all wrote": len({key for key in entries if entries[key].problem.batch <= SHARED}),
        "entries and bytes of the file at the end": f"{len(entries):,} and {size:,}",
        "readings meanwhile": reads,
        "merges refused in a sentence": len(errors),
        "lost, unreadable or left behind": len(faults),
    }
    lines = [f"{processes} processes for {seconds:g} s, each merging one entry at a time into one file.", _table(rows)]
    lines += _listed([*faults, *errors])
    return "\n\n".join(lines), len(faults) + len(errors)


def texts(kind: Kind) -> list[tuple[str, str]]:
    """(name below a folder, text) of the files of a kind that are spoilt."""
    if kind is Kind.SPACE:
        return [("space.yaml", resources.space_path("triton/forward").read_text(encoding="utf-8"))]
    if kind is Kind.SHAPES:
        paths = sorted((ROOT / "benchmarks" / "shapes").glob("*.yaml"))
        named_texts = [(path.name, path.read_text(encoding="utf-8")) for path in paths]
        return [(name, text) for name, text in named_texts if len(text) <= LARGEST]
    if kind is Kind.JOURNAL:
        with tempfile.TemporaryDirectory(prefix="autoattn-journal-") as folder:
            return [("study.journal", spoilt.journal(Path(folder) / "study.journal"))]
    cache_texts = []
    for file in store.read_folder(ROOT / "cache"):
        for start in range(0, len(file.entries), max(1, len(file.entries) // 8)):
            some = dict(list(file.entries.items())[start : start + ENTRIES])
            cache_texts.append((f"{file.device}/{file.name}", file_format.encode(replace(file, entries=some)).decode()))
    return cache_texts


def drawn(seed: int, number: int) -> tuple[Kind, str, bytes]:
    """The mutant that a seed and a number name: its kind, the file's name and its bytes."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choices(list(Kind), weights=(6, 3, 1, 2))[0]
    name, text = rng.choice(texts_of(kind))
    return kind, name, spoilt.mutant(rng, kind, text)


def texts_of(kind: Kind) -> list[tuple[str, str]]:
    """`texts`, read once."""
    if kind not in _TEXTS:
        _TEXTS[kind] = texts(kind)
    return _TEXTS[kind]


_TEXTS: dict[Kind, list[tuple[str, str]]] = {}


def judged(seed: int, numbers: range) -> list[tuple[int, Kind, Fate, float]]:
    """What became of mutants, and the seconds that each took."""
    judgements = []
    with tempfile.TemporaryDirectory(prefix="autoattn-mutants-") as folder:
        for number in numbers:
            kind, name, data = drawn(seed, number)
            path = Path(folder) / str(number) / name  # a place of its own: what is read is kept in memory by place
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
            began = time.monotonic()
            fate = spoilt.fate(kind, path)
            judgements.append((number, kind, fate, time.monotonic() - began))
            path.unlink()
    return judgements


def chunks(count: int) -> Iterator[range]:
    """All numbers below `count`, a chunk at a time."""
    for start in range(0, count, CHUNK):
        yield range(start, min(count, start + CHUNK))


def mutants(seed: int, count: int, jobs: int) -> tuple[str, int]:
    """(the run as Markdown, faults)"""
    tally: Counter[tuple[Kind, str]] = Counter()
    faults, slowest = [], 0.0
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for ticket in [pool.submit(judged, seed, numbers) for numbers in chunks(count)]:
            for number, kind, fate, seconds in ticket.result():
                tally[kind, "fault" if fate.fault else "loaded" if fate.loaded else "refused"] += 1
                slowest = max(slowest, seconds)
                if fate.fault:
                    faults.append(f"{number} ({kind.value}): {fate.fault}")
    rows = [
        f"| {kind.value} | {sum(tally[kind, end] for end in ENDS):,} | "
        + " | ".join(f"{tally[kind, end]:,}" for end in ENDS)
        + " |"
        for kind in Kind
    ]
    total = (
        f"{count:,} mutants, seed {seed}: {len(faults):,} faults; the slowest took {slowest:.2f} s to read and judge."
    )
    head = [
        "| what was spoilt | mutants | refused in a sentence | loaded as the text says | faults |",
        "|---|---|---|---|---|",
    ]
    return "\n\n".join([total, "\n".join([*head, *rows]), *_listed(faults)]), len(faults)


ENDS = ("refused", "loaded", "fault")


def _table(rows: dict[str, int | str]) -> str:
    lines = [f"| {name} | {value if isinstance(value, str) else f'{value:,}'} |" for name, value in rows.items()]
    return "\n".join(["| what | count |", "|---|---|", *lines])


def _listed(faults: list[str]) -> list[str]:
    return ["\n".join(["```", *faults[:SHOWN], "```"])] if faults else []


def main() -> int:
    """Runs one of the two, prints it, and keeps it if asked; 1 when something was lost or read wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writers_parser = commands.add_parser("writers", help="processes that write one cache")
    writers_parser.add_argument("--processes", type=int, default=8)
    writers_parser.add_argument("--seconds", type=float, default=60.0)
    mutants_parser = commands.add_parser("mutants", help="spoilt cache and YAML files")
    mutants_parser.add_argument("--count", type=int, default=10_000)
    mutants_parser.add_argument("--seed", type=int, default=0)
    mutants_parser.add_argument("--jobs", type=int, default=2, help="processes")
    mutants_parser.add_argument("--only", type=int, help="the number of one mutant, which is printed")
    for each in (writers_parser, mutants_parser):
        each.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    if options.command == "mutants" and options.only is not None:
        print(drawn(options.seed, options.only)[2].decode(errors="replace"))
        print(judged(options.seed, range(options.only, options.only + 1)))
        return 0
    if options.command == "writers":
        title, arguments = (
            "Processes that write one cache",
            f"--processes {options.processes} --seconds {options.seconds:g}",
        )
        text, faults = writers(options.processes, options.seconds)
    else:
        title, arguments = "Spoilt cache and YAML files", f"--count {options.count} --seed {options.seed}"
        text, faults = mutants(options.seed, options.count, options.jobs)
    command = f"python benchmarks/robustness.py {options.command} {arguments}"
    tell(title, command, text, options.command if options.write else None)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
