"""A tuner for the command line that tells of a search and searches nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cache_files import FORWARD_FILE
from command_line import CALL, Run, assert_one_sentence, autoattn, no_card, shapes  # noqa: F401 - fixtures

from autoattn.core.device import Device
from autoattn.core.problem import Problem
from autoattn.search import search_options
from autoattn.search.search_options import Progress, Summary


def fake_tune(
    entries: dict[str, Any],
    *,
    failed: dict[str, str] | None = None,
    interrupted: bool = False,
    kept: int = 0,
    **facts_of_summary: Any,
) -> Callable[..., Summary]:
    def tuned(
        problems: list[Problem],
        device: Device,
        *,
        measured: bool,
        options: search_options.Options,
        listen: Callable[..., None],
    ) -> Summary:
        tuned.called = {"problems": problems, "device": device, "measured": measured, "options": options}  # type: ignore[attr-defined]
        for index, problem in enumerate(problems):
            facts: dict[str, Any] = {"problem": problem, "index": index, "total": len(problems), "planned": 96}
            listen(Progress(**facts, phase="search", tried=48, best_us=512.5, best_tflops=268.2, detail=""))
            phase = "kept" if index < kept else "done"
            best = None if problem.key in (failed or {}) else 400.25
            listen(Progress(**facts, phase=phase, tried=96, best_us=best, best_tflops=best and 343.4, detail="why"))
        path = options.cache / device.name / FORWARD_FILE
        return Summary(
            entries=entries, kept=kept, failed=failed or {}, interrupted=interrupted,
            outcomes={"ok": 71, "infeasible": 20}, kernels=64, seconds=12.5, written=(path,) if entries else (),
            **facts_of_summary,
        )  # fmt: skip

    return tuned
