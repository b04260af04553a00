"""What a tuning run shows while it goes on: bars on a terminal, one line per finished problem elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from autoattn.report import figures

if TYPE_CHECKING:
    from autoattn.search.search_options import Progress as Report

FINISHED = ("done", "kept")
LEAST_SHARE = 0.01  # of the work, before which its pace says nothing of the rest


class Display:
    """Listens to a tuning run; also a context manager, so that the terminal is left as it was."""

    def __init__(self, console: Console, *, measured: bool) -> None:
        self.console = console
        self.kind = "" if measured else " predicted"
        self.clock = Remaining()
        self.bars: Progress | None = None
        self.overall: TaskID | None = None
        self.current: TaskID | None = None

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self.console,
                transient=True,
            )
            self.bars.start()
            self.overall = self.bars.add_task("all problems", total=None, note="")
            self.current = self.bars.add_task("", total=None, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bars is not None:
            self.bars.stop()

    def __call__(self, report: Report) -> None:
        """Takes one report of the run."""
        self.clock.hear(report)
        left = self.clock.left()
        note = f"about {duration(left)} left" if left is not None else ""
        if report.phase in FINISHED:
            behind = f", {note}" if note and not self.console.is_terminal and report.phase != "kept" else ""
            self.console.print(Text(self._line(report) + behind), soft_wrap=True)
        if self.bars is not None and self.overall is not None and self.current is not None:
            self.bars.update(self.overall, total=report.total, completed=self.clock.finished, note=note)
            self.bars.update(
                self.current,
                description=figures.printable(report.problem),
                total=report.planned or None,
                completed=report.tried,
                note=self._note(report),
            )

    def _line(self, report: Report) -> str:
        width = len(str(report.total))
        head = f"[{self.clock.finished:>{width}}/{report.total}] {figures.printable(report.problem)}: "
        if report.phase == "kept":
            return head + "already up to date" + self._figures(report, ", ")
        if report.best_us is None:
            return head + f"no kernel ({figures.printable(report.detail) or 'every variant failed'})"
        return head + self._figures(report) + f", {report.tried} tried"

    def _note(self, report: Report) -> str:
        words = ["finals" if report.phase == "final" else "", self._figures(report, "best "), report.detail]
        return figures.printable(", ".join(word for word in words if word))

    def _figures(self, report: Report, before: str = "") -> str:
        if report.best_us is None:
            return ""
        rate = f", {figures.tflops(report.best_tflops)} TFLOP/s" if report.best_tflops is not None else ""
        return f"{before}{figures.microseconds(report.best_us)} us{rate}{self.kind}"


class Remaining:
    """How long the rest will take, if it goes on as it did since the first result: starting the workers is no work."""

    def __init__(self) -> None:
        self.finished = 0  # problems, those that were kept included
        self._first: tuple[float, float] | None = None  # when the first result came, and the share that was done
        self._share = 0.0

    def hear(self, report: Report) -> None:
        """Takes note of how far the run is."""
        self.finished += report.phase in FINISHED
        if report.share is None or report.phase == "kept":
            return
        self._share = report.share
        if self._first is None and report.share > 0:
            self._first = time.monotonic(), report.share

    def left(self) -> float | None:
        """Seconds, or None while there is nothing to go by."""
        if self._first is None or self._share - self._first[1] < LEAST_SHARE:
            return None
        begin, share = self._first
        return (time.monotonic() - begin) * max(0.0, 1.0 - self._share) / (self._share - share)


def duration(seconds: float) -> str:
    """Seconds in the unit that fits: 4.2 s, 3 min 10 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
