"""docs/context-parallel.md: its examples run on several ranks, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import context_calls
from checkout_paths import CHECKOUT
from process_groups import Ranks

PAGE = (CHECKOUT / "docs" / "context-parallel.md").read_text(encoding="utf-8")


def test_the_examples_run_on_two_ranks(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(examples) == 4
    ranks = Ranks(tmp_path, 2)
    for names in ranks.run(2, context_calls.execute, examples):
        assert {"whole", "lse", "window"} <= set(names)
    ranks.close()
