"""How large the report of many problems is, and how soon a browser shows it.

    python benchmarks/report.py [--problems 100] [--trials 32] [--write]

Needs Chromium in the PATH, or its path in AUTOATTN_CHROMIUM. Entries and journals are made up, but kernels and their
differences are rendered for real; each problem has another winner and runner-up.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import browser  # noqa: E402
import searched  # noqa: E402
from browser import Browser  # noqa: E402
from kept import keep  # noqa: E402

from autoattn import __version__, report  # noqa: E402
from autoattn.workers.worker_pool import cores  # noqa: E402

OPENINGS = 5
WIDTHS = {"desktop": 1440, "phone": 390}


def main() -> None:
    """Makes the cache, writes the report, opens it a few times and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=100, help="at most 180")
    parser.add_argument("--trials", type=int, default=32, help="in the journal of each; 32 is effort standard, 200 max")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/")
    options = parser.parse_args()
    path = browser.chromium_path()
    if path is None:
        parser.error("this needs Chromium in the PATH, or its path in AUTOATTN_CHROMIUM")
    with tempfile.TemporaryDirectory() as room:
        text = measured(Path(room), path, options.problems, options.trials)
    print(text)
    if options.write:
        keep(f"report_{options.problems}x{options.trials}", text)


def measured(room: Path, path: str, problems: int, trials: int) -> str:
    """The table."""
    entries = [searched.entry_of(problem, number) for number, problem in enumerate(searched.problems(problems))]
    folder = searched.folder_of(room / "cache", entries, trials=trials)
    begin = time.perf_counter()
    page, twin = report.build(folder, room / "out")
    wrote = time.perf_counter() - begin
    rows = [
        ("report.html", f"{page.stat().st_size / 1e6:.2f} MB"),
        ("report.md", f"{twin.stat().st_size / 1e6:.2f} MB"),
        ("writing both", f"{wrote:.1f} s"),
    ]
    with Browser(path, room / "profile") as window:
        version = window.send("Browser.getVersion")["product"]
        for name, width in WIDTHS.items():
            times = [window.open(page, width=width) for _ in range(OPENINGS)]
            median, first = statistics.median(times), times[0]
            rows.append((f"opening, {name} {width} px", f"{median:.2f} s in the median, the first {first:.2f} s"))
        elements = window.run("document.querySelectorAll('*').length")
        rows.append(("elements", f"{elements:,}"))
    lines = [f"| {what} | {figure} |" for what, figure in rows]
    return "\n".join(
        [
            f"# The report of {problems} problems",
            "",
            f"`python benchmarks/report.py --problems {problems} --trials {trials}`",
            "",
            f"{problems} measured problems, each with rivals, two runners-up and a journal of {trials} trials. Opening "
            "is from the request until",
            f"the page had loaded and was painted once, {OPENINGS} times each.",
            "",
            "| what | figure |",
            "|---|---|",
            *lines,
            "",
            f"autoattn {__version__}, Python {platform.python_version()}, {version}, "
            f"{platform.system()} with {cores()} cores",
            "",
        ]
    )


if __name__ == "__main__":
    main()
