"""Prints the project's own figures: how fast a tune without a GPU is, and how fast the kernels are that a GPU measured.

python benchmarks/figures.py predict [DEVICE]     tunes shapes.yaml for a card that is not here, twice, and imports
python benchmarks/figures.py measured [CACHE]     ratios over SDPA's backends, from a cache that a tune wrote
"""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORTS = "import torch, time; t = time.perf_counter(); import autoattn; {use}; print(time.perf_counter() - t)"


def predict(device: str) -> None:
    """Tunes with empty caches, then again with nothing changed."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "AUTOATTN_CACHE": f"{folder}/user", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, "-m", "autoattn", "tune", "--device", device, "--shapes", str(ROOT / "shapes.yaml")]
        seconds, memory, output = watched(command, environment)
        kernels = int(re.search(r"([\d,]+) distinct kernels? compiled", output)[1].replace(",", ""))
        print(output[output.rindex("\n", 0, output.index(" tuned,")) + 1 :].strip())
        print(f"tune, empty caches        {seconds:8.1f} s")
        print(f"kernels compiled and read {kernels:8d}   {kernels / seconds:.2f} a second over the whole run")
        print(f"peak memory, all processes{memory / 2**30:8.2f} GiB")
        seconds, _, _ = watched(command, environment)
        print(f"tune, nothing changed     {seconds:8.1f} s")
    for use in ("pass", "autoattn.Attention"):
        times = [imported(use) for _ in range(5)]
        spread = f"median of {len(times)}, {min(times):.3f} to {max(times):.3f}"
        print(f"import after torch, {use:18} {statistics.median(times):.3f} s ({spread})")


def watched(command: list[str], environment: dict[str, str]) -> tuple[float, int, str]:
    """Wall-clock seconds, peak resident bytes of the process and its descendants, and the output."""
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.25)
        log.seek(0)
        output = log.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)} exited with {process.returncode}:\n{output}")
    return time.monotonic() - begin, peak, output


def resident(root: int) -> int:
    """Proportional resident bytes of a process and all that descend from it: shared pages count once."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    family = {root}
    while True:
        children = {child for child, parent in parents.items() if parent in family} - family
        if not children:
            break
        family |= children
    total = 0
    for member in family:
        try:
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:
            continue
        match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        total += int(match[1]) * 1024 if match else 0
    return total


def imported(use: str) -> float:
    """Seconds that importing autoattn takes after torch."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(use=use)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return float(done.stdout)


def measured(folder: Path) -> None:
    """Geometric means, lowest and highest of each rival's time over the kernel's, over each group of shapes.yaml."""
    from autoattn import frames
    from autoattn.shapes import shapes_file

    named = {shape.problem.key: shape.groups for shape in shapes_file.load(ROOT / "shapes.yaml")}
    rivals = frames.rivals(folder)
    rivals["group"] = rivals.key.map(lambda key: named.get(key, ()))
    rivals["log_ratio"] = (rivals.median_us / rivals.kernel_us).map(math.log)
    rivals["causal"] = rivals.problem.str.contains("causal")
    columns = ["device", "operation", "group", "causal", "rival"]
    table = rivals.explode("group").dropna(subset=["group"]).groupby(columns, sort=False).log_ratio
    summary = table.agg(["mean", "min", "max"]).map(math.exp).join(table.agg(problems="count"))
    print("times of rivals over the kernel's; above 1 the kernel is faster")
    print(summary.round(3).to_string())


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or ["help"]
    if what == "predict":
        predict(rest[0] if rest else "a30")
    elif what == "measured":
        measured(Path(rest[0]) if rest else ROOT / "cache")
    else:
        sys.exit(__doc__)
