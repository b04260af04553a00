"""Whether kills lose anything: `python benchmarks/kills.py --kills 100`.

Runs `autoattn tune` without a GPU over a search space of a few variants, once undisturbed, then again and again while
it kills the tuner or one of the processes below it (`kill -9`) at random moments, and gives the same command again. In
the end the cache file and the finished trials must be those of the undisturbed run, nothing that was finished before a
kill may be gone after it, and no process may outlive its tuner. With `--tuners 2` two of them share the study.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kept import tell  # noqa: E402

from autoattn.core.trial import Trial  # noqa: E402
from autoattn.core.variant import Variant  # noqa: E402
from autoattn.search import shared_trials, storage  # noqa: E402

CHOICES: dict[str, list[Any]] = {"BLOCK_M": [16, 32], "BLOCK_N": [16, 32], "num_warps": [1], "num_stages": [1, 2]}
TRIALS = 8  # all that those choices allow
OPTIONS = ("--dtype", "fp16", "--heads", "2", "--seq-q", "64", "--head-dim", "16")
AT_ONCE = 10  # kills until a run may end
GONE_SECONDS = 10.0  # until what a killed tuner started must have ended
END_SECONDS = 600.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was done, and what was wrong."""

    kills: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    outcomes: int = 0  # runs that ended and were compared
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run leaves behind."""

    cache: bytes
    trials: dict[Variant, Trial]


def small_checkout(folder: Path) -> Path:
    """A copy of the package whose search space has a few variants."""
    shutil.copytree(ROOT / "autoattn", folder / "autoattn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("triton", "shared"):
        shutil.copytree(ROOT / "templates" / name, folder / "templates" / name)
    space = yaml.safe_load((ROOT / "search_spaces" / "triton" / "forward.yaml").read_text(encoding="utf-8"))
    for name, parameter in space["parameters"].items():
        parameter["choices"] = CHOICES.get(name) or [space["base"].get(name, parameter.get("implied"))]
    space["seeds"] = space["seeds"][-1:]
    space.pop("rehearsal")  # values that are no choices here
    path = folder / "search_spaces" / "triton" / "forward.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(space, sort_keys=False), encoding="utf-8")
    (folder / "cache").mkdir()
    return folder


class Run:
    """One search until its end, by one or more tuners, with kills in between."""

    def __init__(self, checkout: Path, folder: Path, url: str | None, tally: Tally) -> None:
        self.checkout, self.folder, self.url, self.tally = checkout, folder, url, tally
        self.tuners: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """The command that a user would give (again)."""
        command = [sys.executable, "-m", "autoattn", "tune", "--device", "a30", *OPTIONS]
        command += ["--trials", str(TRIALS), "--jobs", "2", "--cache", str(self.folder / "cache")]
        command += ["--storage", self.url] if self.url is not None else []
        environment = {**os.environ, "PYTHONPATH": str(self.checkout), "TRITON_CACHE_DIR": str(self.folder / "triton")}
        with (self.folder / "said").open("ab") as said:
            self.tuners.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said, cwd=self.checkout))
        self.tally.starts += 1

    def finished(self) -> dict[Variant, Trial]:
        """The trials that are kept by now."""
        journals = sorted(self.folder.rglob("*.journal"))
        if self.url is None and not journals:
            return {}
        kept = storage.server(self.url) if self.url is not None else storage.unchanged(journals[0])
        trials = [trial for study in shared_trials.studies(kept).values() for trial in study]
        if len({trial.variant for trial in trials}) < len(trials):
            self.tally.faults.append("a variant was tried twice")
        return {trial.variant: trial for trial in trials}

    def kill(self, rng: random.Random) -> None:
        """Kills a tuner, or one of the processes that it started; then sees to it that nothing is lost or left."""
        tuner = rng.choice(self.tuners)
        below = descendants(tuner.pid)
        before = self.finished()
        if below and rng.random() < 0.5:
            victim = rng.choice(sorted(below))
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                self.tally.kills["workers and what they started"] += 1
        else:
            tuner.kill()
            tuner.wait()
            self.tuners.remove(tuner)
            self.tally.kills["tuners"] += 1
            if not gone(below):
                self.tally.faults.append("a process outlived its tuner")
        after = self.finished()
        if any(after.get(variant) != trial for variant, trial in before.items()):
            self.tally.faults.append("a finished trial was lost")

    def disturbed(self, rng: random.Random, kills: int, seconds: float, tuners: int) -> None:
        """Goes on until `kills` kills are done and the search has ended."""
        for _ in range(kills):
            while len(self.tuners) < tuners:
                self.start()
            end = time.monotonic() + rng.uniform(0.0, seconds)
            while time.monotonic() < end and all(tuner.poll() is None for tuner in self.tuners):
                time.sleep(0.01)
            self.bury()
            if self.tuners:
                self.kill(rng)
            elif self.ended():
                break
        self.ending()

    def bury(self) -> None:
        """Notes tuners that ended by themselves."""
        for tuner in [process for process in self.tuners if process.poll() is not None]:
            self.tuners.remove(tuner)
            if tuner.returncode != 0:
                said = (self.folder / "said").read_text(encoding="utf-8", errors="replace")[-400:]
                self.tally.faults.append(f"a tuner ended with {tuner.returncode}: {said}")

    def ended(self) -> bool:
        """Whether the cache has its entry."""
        return any(self.folder.glob("cache/*/forward.triton-*.json"))

    def ending(self) -> None:
        """Lets the search end undisturbed, and compares."""
        if not self.tuners:
            self.start()
        for tuner in self.tuners:
            tuner.wait(END_SECONDS)
        self.bury()

    def outcome(self) -> Outcome:
        """What is left behind."""
        cache = next(self.folder.glob("cache/*/forward.triton-*.json"))
        return Outcome(cache=cache.read_bytes(), trials=self.finished())


def descendants(process: int) -> dict[int, str]:
    """The processes below one, and when each began."""
    parents, begun = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            facts = path.read_text().rpartition(")")[2].split()
            if facts[0] not in "ZX":
                number = int(path.parent.name)
                parents[number], begun[number] = int(facts[1]), facts[19]
    offspring: dict[int, str] = {}
    grown = {process}
    while grown:
        grown = {number for number, parent in parents.items() if parent in grown and number not in offspring}
        offspring |= {number: begun[number] for number in grown}
    return offspring


def gone(processes: dict[int, str]) -> bool:
    """Whether all of them end within a moment."""
    end = time.monotonic() + GONE_SECONDS
    while time.monotonic() < end:
        if not any(alive(number, begun) for number, begun in processes.items()):
            return True
        time.sleep(0.02)
    return False


def alive(process: int, begun: str) -> bool:
    """Whether the process that began then still runs."""
    with contextlib.suppress(OSError):
        facts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return facts[0] not in "ZX" and facts[19] == begun
    return False


def differences(outcome: Outcome, wanted: Outcome) -> list[str]:
    """In what a run's outcome is not that of the undisturbed one."""
    ours, theirs = outcome.cache.decode().splitlines(), wanted.cache.decode().splitlines()
    lines = [
        line for line in difflib.unified_diff(theirs, ours, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")
    ]
    words = [f"the cache file differs: {' '.join(' '.join(lines).split())[:600]}"] if lines else []
    for variant in outcome.trials.keys() | wanted.trials.keys():
        trial, expected = outcome.trials.get(variant), wanted.trials.get(variant)
        if trial != expected:
            words.append(f"{variant}: {trial.outcome.value if trial else 'missing'} {trial.detail if trial else ''}")
    return words


def kills(seed: int, count: int, tuners: int, url: str | None, share: float) -> tuple[str, int]:
    """(the run as Markdown, faults)"""
    rng, tally = random.Random(seed), Tally()
    place = Path(tempfile.mkdtemp(prefix="autoattn-kills-"))
    begin = time.monotonic()
    try:
        checkout = small_checkout(place / "checkout")
        calm = Run(checkout, new_folder(place / "calm"), None, Tally())
        calm.ending()
        seconds, wanted = time.monotonic() - begin, calm.outcome()
        assert len(wanted.trials) == TRIALS, f"{len(wanted.trials)} trials: CHOICES and TRIALS do not agree"
        while sum(tally.kills.values()) < count:
            number = tally.outcomes
            run = Run(checkout, new_folder(place / str(number)), url and url.format(number=number), tally)
            left = count - sum(tally.kills.values())
            run.disturbed(rng, min(left, AT_ONCE), share * seconds, tuners)
            tally.faults += [f"run {number}: {words}" for words in differences(run.outcome(), wanted)]
            tally.outcomes += 1
            print(f"{sum(tally.kills.values())} kills, {tally.outcomes} runs, faults: {tally.faults}", flush=True)
            shutil.rmtree(run.folder)
    finally:
        shutil.rmtree(place)
    rows = {
        **{f"kills of {what}": number for what, number in sorted(tally.kills.items())},
        "searches that went on to their end": tally.outcomes,
        "times that the command was given": tally.starts,
        "finished trials lost, variants tried twice, processes left behind, other outcomes": len(tally.faults),
    }
    lines = [
        f"{sum(tally.kills.values())} kills, seed {seed}, {tuners} tuner{'s' if tuners > 1 else ''} at a time, trials "
        f"in {url.partition(':')[0] if url else 'a journal'}; an undisturbed search of {TRIALS} variants took "
        f"{seconds:.0f} s.",
        "\n".join(["| what | count |", "|---|---|", *(f"| {name} | {value:,} |" for name, value in rows.items())]),
    ]
    lines += ["\n".join(["```", *tally.faults[:20], "```"])] if tally.faults else []
    return "\n\n".join(lines), len(tally.faults)


def new_folder(folder: Path) -> Path:
    """The folder, made."""
    folder.mkdir(parents=True)
    return folder


def main() -> int:
    """Kills, prints what came of it, and keeps it if asked; 1 when something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tuners", type=int, default=1, help="that share a study")
    parser.add_argument(
        "--share", type=float, default=0.4, help="of an undisturbed run: the longest time from one kill to the next"
    )
    parser.add_argument("--storage", help="a URL with {number} where a number makes a fresh database's name")
    parser.add_argument("--write", metavar="NAME", help="keep the result in benchmarks/results under this name")
    options = parser.parse_args()
    text, faults = kills(options.seed, options.kills, options.tuners, options.storage, options.share)
    arguments = f"--kills {options.kills} --seed {options.seed} --tuners {options.tuners} --share {options.share:g}"
    if options.storage:
        arguments += f" --storage {storage.shown(options.storage)}"
    tell("Kills at random moments", f"python benchmarks/kills.py {arguments}", text, options.write)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
