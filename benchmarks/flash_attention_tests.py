"""Runs a copy of FlashAttention's tests/test_flash_attn.py against autoattn.functional, on the GPU that is here.

python benchmarks/flash_attention_tests.py FILE [--cases 20] [--seed 0] [--only TEXT] [--workers 8] [--write]

FILE imports `flash_attn`, in whose place modules of this script stand. Of each test, as many cases are drawn as asked
for. Left out are caches of keys and pages, which autoattn does not have, and cases that read the probabilities of a
dropout in the layout that FlashAttention-2 writes them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kept import keep
from torch import Tensor

from autoattn import functional

NO_CACHE = "autoattn has no key cache and no pages yet"
NO_PROBABILITIES = "autoattn does not write the probabilities of a dropout"
PROBABILITIES = "dropout_p"  # the parameter of tests that read them, but for those of REPEATED
REPEATED = "race_condition"  # what reads no probabilities
SLOWEST = 10  # cases that are named


# --- in place of flash_attn -------------------------------------------------------------------------------------------


def window_of(window: Any) -> tuple[int, int]:
    """A window, which the tests draw as a tensor."""
    left, right = (int(side) for side in window)
    return left, right


def dense(query: Tensor, key: Tensor, value: Tensor, *rest: Any, window_size: Any = (-1, -1), **given: Any) -> Any:
    """flash_attn.flash_attn_func."""
    return functional.flash_attn_func(query, key, value, *rest, window_size=window_of(window_size), **given)


def varlen(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, window_size: Any = (-1, -1), block_table: Any = None,
    **given: Any,
) -> Any:  # fmt: skip
    """flash_attn.flash_attn_varlen_func."""
    if block_table is not None:
        pytest.skip(NO_CACHE)
    return functional.flash_attn_varlen_func(query, key, value, *rest, window_size=window_of(window_size), **given)


def dense_of_pair(query: Tensor, pair: Tensor, *rest: Any, **given: Any) -> Any:
    """flash_attn.flash_attn_kvpacked_func: key and value are one tensor."""
    return dense(query, *pair.unbind(2), *rest, **given)


def dense_of_three(three: Tensor, *rest: Any, **given: Any) -> Any:
    """flash_attn.flash_attn_qkvpacked_func: all three are one tensor."""
    return dense(*three.unbind(2), *rest, **given)


def varlen_of_pair(query: Tensor, pair: Tensor, *rest: Any, **given: Any) -> Any:
    """flash_attn.flash_attn_varlen_kvpacked_func."""
    return varlen(query, *pair.unbind(1), *rest, **given)


def varlen_of_three(three: Tensor, offsets: Tensor, longest: int, *rest: Any, **given: Any) -> Any:
    """flash_attn.flash_attn_varlen_qkvpacked_func, which takes one set of offsets for all three."""
    return varlen(*three.unbind(1), offsets, offsets, longest, longest, *rest, **given)


def unpad_input(
    padded: Tensor, mask: Tensor, unused: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """flash_attn.bert_padding.unpad_input: tokens that a mask keeps, where they stood, offsets, the longest, lengths.

    Args:
        unused: tokens that have room among those that are kept, and that no sequence has.
    """
    lengths = mask.sum(-1, dtype=torch.int32)
    places = (mask if unused is None else mask | unused).flatten().nonzero().flatten()
    taken = lengths if unused is None else (mask | unused).sum(-1, dtype=torch.int32)
    offsets = torch.nn.functional.pad(taken.cumsum(0, dtype=torch.int32), (1, 0))
    return padded.flatten(0, 1)[places], places, offsets, int(taken.max()), lengths


def pad_input(tokens: Tensor, places: Tensor, batch: int, longest: int) -> Tensor:
    """flash_attn.bert_padding.pad_input, its inverse, with zeros elsewhere."""
    padded = tokens.new_zeros(batch * longest, *tokens.shape[1:])
    padded[places] = tokens
    return padded.unflatten(0, (batch, longest))


def without_cache(*args: Any, **given: Any) -> Any:
    """What autoattn has nothing for."""
    pytest.skip(NO_CACHE)


def modules() -> dict[str, ModuleType]:
    """What the test file imports, by name."""
    contents: dict[str, dict[str, Any]] = {
        "flash_attn": {
            "flash_attn_func": dense,
            "flash_attn_kvpacked_func": dense_of_pair,
            "flash_attn_qkvpacked_func": dense_of_three,
            "flash_attn_varlen_func": varlen,
            "flash_attn_varlen_kvpacked_func": varlen_of_pair,
            "flash_attn_varlen_qkvpacked_func": varlen_of_three,
            "flash_attn_with_kvcache": without_cache,
        },
        "flash_attn.bert_padding": {"pad_input": pad_input, "unpad_input": unpad_input},
        "flash_attn.flash_attn_interface": {
            "_get_block_size_n": without_cache,
            "_flash_attn_varlen_forward": without_cache,
            "flash_attn_gpu": None,
            "USE_TRITON_ROCM": False,
        },
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"apply_rotary_emb": without_cache},
    }
    made = {}
    for name, members in contents.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(members)
    return made


# --- pytest's hooks: this script is the plugin of the pytest that it starts -------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=20)
    parser.addoption("--seed", type=int, default=0)
    parser.addoption("--limit", type=int, default=200)
    parser.addoption("--table", default="")


def pytest_configure(config: pytest.Config) -> None:
    sys.modules.update(modules())


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> None:
    """Draws cases before pytest makes them all, of which there are some hundred thousand."""
    marks = getattr(obj, "pytestmark", [])
    axes = [mark for mark in marks if mark.name == "parametrize"]
    if name.startswith("test_") and axes:
        draw = random.Random(f"{collector.config.getoption('seed')} {name}")
        names = ",".join(mark.args[0] for mark in axes)
        rows = drawn([list(mark.args[1]) for mark in axes], collector.config.getoption("cases"), draw)
        obj.pytestmark = [mark for mark in marks if mark.name != "parametrize"]
        pytest.mark.parametrize(names, rows if "," in names else [row[0] for row in rows])(obj)


def drawn(axes: list[list[Any]], count: int, draw: random.Random) -> list[tuple[Any, ...]]:
    """So many combinations of the axes' values, or all where there are no more; one may stand for several names."""
    total = math.prod(map(len, axes))
    rows = []
    for number in draw.sample(range(total), min(count, total)):
        row: list[Any] = []
        for values in axes:
            number, place = divmod(number, len(values))
            value = values[place]
            row += value if isinstance(value, tuple) else [value]
        rows.append(tuple(row))
    return rows


def pytest_runtest_setup(item: pytest.Item) -> None:
    params = getattr(item, "callspec", None)
    if params is not None and params.params.get(PROBABILITIES) and REPEATED not in item.name:
        pytest.skip(NO_PROBABILITIES)
    if "generator_arg" in item.name:
        pytest.skip("it asks for FlashAttention's own extension")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    limit = item.config.getoption("limit")

    def end(*given: Any) -> None:
        pytest.fail(f"took longer than {limit} s", pytrace=False)

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if path := config.getoption("table"):
        Path(path).write_text(summary(terminalreporter.stats) + "\n", encoding="utf-8")


def summary(stats: dict[str, list[Any]]) -> str:
    """What became of the cases, as markdown."""
    failed = stats.get("failed", []) + stats.get("error", [])
    late = [report for report in failed if "took longer than" in str(report.longrepr)]
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in stats.get("skipped", []))
    passed = stats.get("passed", [])
    lines = ["| outcome | cases |", "|---|--:|", f"| passed | {len(passed)} |"]
    lines += [f"| failed | {len(failed) - len(late)} |", f"| longer than the limit | {len(late)} |"]
    lines += [f"| left out: {reason} | {count} |" for reason, count in sorted(reasons.items())]
    slowest = sorted(passed + failed, key=lambda report: -report.duration)[:SLOWEST]
    lines += ["", "| slowest cases | s |", "|---|--:|"]
    lines += [f"| {report.nodeid.rpartition('::')[2]} | {report.duration:.1f} |" for report in slowest]
    lines += ["", *(f"- failed: {report.nodeid.rpartition('::')[2]}" for report in failed)]
    return "\n".join(lines).rstrip()


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Starts pytest with this script as its plugin, and prints what it found."""
    parser = argparse.ArgumentParser(description="Runs FlashAttention's own tests against autoattn.functional.")
    parser.add_argument("file", type=Path, help="a copy of FlashAttention's tests/test_flash_attn.py")
    parser.add_argument("--cases", type=int, default=20, help="of each test")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="", help="only tests whose name matches (pytest -k)")
    parser.add_argument("--workers", type=int, default=0, help="processes; needs pytest-xdist")
    parser.add_argument("--limit", type=int, default=200, help="seconds of a case")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results/")
    asked = parser.parse_args()
    if not asked.file.is_file():
        parser.error(f"the file must be a copy of tests/test_flash_attn.py, got {asked.file}; download it first")
    table = Path(os.environ.get("TMPDIR", "/tmp")) / f"flash_attention_tests_{os.getpid()}.md"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", Path(__file__).stem]
    command += [str(asked.file), "--cases", str(asked.cases), "--seed", str(asked.seed), "--limit", str(asked.limit)]
    command += ["--table", str(table), *(["-k", asked.only] if asked.only else [])]
    command += ["-n", str(asked.workers), "--dist", "worksteal"] if asked.workers else []
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    code = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False).returncode
    if not table.exists():
        return code
    text = table.read_text(encoding="utf-8")
    table.unlink()
    print(text)
    if asked.write:
        keep("flash_attention_tests", f"# FlashAttention's own tests\n\n`{' '.join(sys.argv)}`\n\n{text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
