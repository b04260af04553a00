"""Runs a copy of FlashAttention's tests/test_flash_attn.py against autoattn.functional.

python benchmarks/flash_attention_tests.py FILE [--cases 20] [--seed 0] [--only TEXT] [--workers 8] [--limit 200]
    [--write] [--list]

FILE imports einops, and `flash_attn`, in whose place modules of this script stand. What autoattn has no counterpart for
is left out and counted by reason: errors of lengths on the GPU, FlashAttention's own extension, and cases that read its
matrix of dropped probabilities. Of what remains, N cases of each test are drawn by a seed. --list counts the cases and
runs none; it needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from kept import keep
from torch import Tensor

from autoattn import functional
from autoattn.hardware import nvidia
from autoattn.reference import append_formula
from autoattn.tensors.appended import Rotation

NO_LENGTHS = "autoattn reads no lengths of a cache on the GPU, so that it refuses none"
NO_EXTENSION = "it asks for FlashAttention's own extension"
NO_PROBABILITIES = "autoattn does not write the probabilities of a dropout"
LEFT_OUT: tuple[tuple[str, str | None, str], ...] = (  # a name in a test's code, the parameter that asks for it, why
    ("_flash_attn_varlen_forward", None, NO_EXTENSION),
    ("flash_attn_gpu", None, NO_EXTENSION),
    ("convert_flash_attn_S_to_softmax", "dropout_p", NO_PROBABILITIES),
    ("raises", None, NO_LENGTHS),
)
HOPPER = (9, 0)  # the capability that tests find on a machine without a GPU; they ask for it when they are imported
LATE = "took longer than"
OUTCOMES = ("passed", "failed", "late", "skipped")
SLOWEST = 10  # cases that are named
SHOWN = 200  # characters of a failure


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
        with torch.no_grad():  # FlashAttention's gives none for pages either
            return functional.flash_attn_varlen_func(
                query, key, value, *rest, window_size=window_of(window_size), block_table=block_table, **given
            )
    return functional.flash_attn_varlen_func(query, key, value, *rest, window_size=window_of(window_size), **given)


def with_cache(*tensors: Any, window_size: Any = (-1, -1), **given: Any) -> Any:
    """flash_attn.flash_attn_with_kvcache."""
    return functional.flash_attn_with_kvcache(*tensors, window_size=window_of(window_size), **given)


def apply_rotary_emb(
    tensor: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, *, seqlen_offsets: Tensor
) -> Tensor:
    """flash_attn.layers.rotary.apply_rotary_emb: token i of a sequence stands at its offset + i."""
    rotation = Rotation(query=tensor, cos=cos, sin=sin, interleaved=interleaved, moving=True)
    positions = seqlen_offsets[:, None] + torch.arange(tensor.shape[1], device=tensor.device)
    return append_formula.rotated(tensor.transpose(1, 2), positions, rotation).transpose(1, 2)


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
    return index_first_axis(padded.flatten(0, 1), places), places, offsets, int(taken.max()), lengths


def pad_input(tokens: Tensor, places: Tensor, batch: int, longest: int) -> Tensor:
    """flash_attn.bert_padding.pad_input, its inverse, with zeros elsewhere."""
    padded = tokens.new_zeros(batch * longest, *tokens.shape[1:])
    padded[places] = tokens
    return padded.unflatten(0, (batch, longest))


def index_first_axis(tokens: Tensor, places: Tensor) -> Tensor:
    """flash_attn.bert_padding.index_first_axis: the tokens at these places."""
    return tokens[places]


def missing(reason: str) -> Callable[..., NoReturn]:
    """What autoattn has nothing for."""

    def skip(*args: Any, **given: Any) -> NoReturn:
        pytest.skip(reason)

    return skip


CONTENTS: dict[str, dict[str, Any]] = {
    "flash_attn": {
        "flash_attn_func": dense,
        "flash_attn_kvpacked_func": dense_of_pair,
        "flash_attn_qkvpacked_func": dense_of_three,
        "flash_attn_varlen_func": varlen,
        "flash_attn_varlen_kvpacked_func": varlen_of_pair,
        "flash_attn_varlen_qkvpacked_func": varlen_of_three,
        "flash_attn_with_kvcache": with_cache,
    },
    "flash_attn.bert_padding": {
        "index_first_axis": index_first_axis,
        "pad_input": pad_input,
        "unpad_input": unpad_input,
    },
    "flash_attn.flash_attn_interface": {
        "_get_block_size_n": missing(NO_PROBABILITIES),
        "_flash_attn_varlen_forward": missing(NO_EXTENSION),
        "flash_attn_gpu": None,
        "USE_TRITON_ROCM": False,
    },
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {"apply_rotary_emb": apply_rotary_emb},
}


def install() -> None:
    """Makes `import flash_attn` give autoattn's functions in this process."""
    for name, members in CONTENTS.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(members)
    if not torch.cuda.is_available():
        torch.cuda.get_device_capability = lambda device=None: HOPPER  # type: ignore[assignment]


# --- which cases are run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """The cases of a test that can be run, as the values that its parametrize marks give; one mark may name several."""

    names: tuple[str, ...]
    axes: tuple[tuple[tuple[Any, ...], ...], ...]
    left_out: dict[str, int]  # cases by reason

    @property
    def count(self) -> int:
        return math.prod(map(len, self.axes))


def cases_of(function: Callable[..., Any]) -> Cases:
    """Splits the cases of a test into those that can be run and those that are left out."""
    names: list[str] = []
    axes: list[tuple[tuple[Any, ...], ...]] = []
    owners: dict[str, tuple[int, int]] = {}  # a parameter's axis, and its place there
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            words = [word.strip() for word in mark.args[0].split(",")]
            owners |= {word: (len(axes), place) for place, word in enumerate(words)}
            names += words
            axes.append(tuple(tuple(value) if len(words) > 1 else (value,) for value in mark.args[1]))
    left_out: Counter[str] = Counter()
    for used, parameter, reason in LEFT_OUT:
        if used not in function.__code__.co_names:
            continue
        count = math.prod(map(len, axes))
        if parameter is None:
            axes.append(())
        elif parameter in owners:
            axis, place = owners[parameter]
            axes[axis] = tuple(value for value in axes[axis] if not value[place])
        left_out[reason] += count - math.prod(map(len, axes))
    return Cases(names=tuple(names), axes=tuple(axes), left_out=dict(+left_out))


def drawn(axes: tuple[tuple[tuple[Any, ...], ...], ...], count: int, draw: random.Random) -> list[tuple[Any, ...]]:
    """So many combinations of the axes' values, or all where there are no more."""
    total = math.prod(map(len, axes))
    rows = []
    for number in draw.sample(range(total), min(count, total)):
        row: tuple[Any, ...] = ()
        for values in axes:
            number, place = divmod(number, len(values))
            row += values[place]
        rows.append(row)
    return rows


# --- pytest's hooks: this script is the plugin of the pytest that it starts -------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fa-cases", type=int, default=20)
    parser.addoption("--fa-seed", type=int, default=0)
    parser.addoption("--fa-only", default="")
    parser.addoption("--fa-limit", type=int, default=0)


def pytest_configure() -> None:
    install()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> list[pytest.Item] | None:
    """Gives a test its drawn cases before pytest makes all, of which there are some hundred thousand."""
    if not name.startswith("test_") or not hasattr(obj, "__code__"):
        return None
    options, cases = collector.config.option, cases_of(obj)
    rows = drawn(cases.axes, options.fa_cases, random.Random(f"{options.fa_seed} {name}"))
    if not rows or options.fa_only not in name:
        return []
    obj.pytestmark = [mark for mark in getattr(obj, "pytestmark", []) if mark.name != "parametrize"]
    if cases.names:
        ids = [",".join(f"{key}={value}" for key, value in zip(cases.names, row, strict=True)) for row in rows]
        params = [pytest.param(*row, id=words.replace("torch.", "")) for row, words in zip(rows, ids, strict=True)]
        pytest.mark.parametrize(cases.names, params)(obj)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    limit = item.config.option.fa_limit

    def end(*given: Any) -> None:
        pytest.fail(f"{LATE} {limit} s", pytrace=False)

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- the tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of each case, in the process that the workers report to."""

    reports: dict[str, pytest.TestReport] = field(default_factory=dict)  # by the case's name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.reports[report.nodeid.partition("::")[2]] = report


def outcome_of(report: pytest.TestReport) -> str:
    return "late" if report.failed and LATE in report.longreprtext else report.outcome


def first_words(text: str) -> str:
    """The line that says what is wrong, as pytest marks it, or else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines[-1:] or ["no message"])[0][:SHOWN]


def summary(reports: dict[str, pytest.TestReport]) -> Iterator[str]:
    """What became of the cases, as markdown."""
    tests: dict[str, list[pytest.TestReport]] = defaultdict(list)
    for case, report in reports.items():
        tests[case.partition("[")[0]].append(report)
    yield f"| test | {' | '.join(OUTCOMES)} | seconds |"
    yield f"|---{'|--:' * (len(OUTCOMES) + 1)}|"
    for test, members in [*tests.items(), ("all", list(reports.values()))]:
        counts = Counter(map(outcome_of, members))
        cells = [str(counts[outcome]) for outcome in OUTCOMES]
        yield f"| {test} | {' | '.join(cells)} | {sum(report.duration for report in members):,.1f} |"
    skipped = Counter(str(report.longrepr[2]) for report in reports.values() if isinstance(report.longrepr, tuple))
    slowest = sorted(reports, key=lambda case: -reports[case].duration)[:SLOWEST]
    yield from ["", *(f"- {count} skipped: {words.removeprefix('Skipped: ')}" for words, count in skipped.items())]
    failed = [(case, report) for case, report in reports.items() if report.failed]
    yield from (f"- failed: `{case}`: {first_words(report.longreprtext)}" for case, report in failed)
    yield from (f"- among the slowest: {reports[case].duration:,.1f} s, `{case}`" for case in slowest)


def listing(module: ModuleType, count: int, only: str) -> Iterator[str]:
    """How many cases each test has, how many are drawn, and how many are left out and why."""
    yield "| test | can be run | drawn | left out | why |"
    yield "|---|--:|--:|--:|---|"
    for name, function in vars(module).items():
        if name.startswith("test_") and only in name and hasattr(function, "__code__"):
            cases = cases_of(function)
            left_out, why = sum(cases.left_out.values()), "; ".join(cases.left_out)
            yield f"| {name} | {cases.count:,} | {min(count, cases.count):,} | {left_out:,} | {why} |"


# --- the command ------------------------------------------------------------------------------------------------------


def load(path: Path) -> ModuleType:
    """The test file as a module."""
    install()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs FlashAttention's own tests against autoattn.functional.")
    parser.add_argument("file", type=Path, help="a copy of FlashAttention's tests/test_flash_attn.py")
    parser.add_argument("--cases", type=int, default=20, help="of each test")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="", help="only tests whose name holds this text")
    parser.add_argument("--workers", type=int, default=0, help="processes; needs pytest-xdist")
    parser.add_argument("--limit", type=int, default=200, help="seconds of a case, compilation included; 0 is none")
    parser.add_argument("--list", action="store_true", help="count the cases and run none")
    parser.add_argument("--write", action="store_true", help="keep the tables under benchmarks/results/")
    given = parser.parse_args()
    given.file = given.file.resolve()
    if not given.file.is_file():
        parser.error(f"the file must be a copy of tests/test_flash_attn.py, got {given.file}; download it first")
    if given.workers and importlib.util.find_spec("xdist") is None:
        parser.error(
            f"--workers {given.workers} needs pytest-xdist, which is not installed; install it or leave it out"
        )
    return given


def command_line(given: argparse.Namespace) -> list[str]:
    """How pytest is called: neither a project's settings nor conftest files beside the tests take part."""
    words = [str(given.file), "-q", "--tb=short", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "--noconftest"]
    words += ["-c", os.devnull, "--rootdir", str(given.file.parent), f"--fa-cases={given.cases}"]
    words += [f"--fa-seed={given.seed}", f"--fa-only={given.only}", f"--fa-limit={given.limit}"]
    return [*words, "-n", str(given.workers), "--dist", "worksteal"] if given.workers else words


def main() -> int:
    """Prints the tables; pytest's exit status."""
    given = arguments()
    try:
        cases = "\n".join(listing(load(given.file), given.cases, given.only))
    except ImportError as error:
        print(f"{given.file.name} must be importable, got: {error}; install what it needs", file=sys.stderr)
        return 2
    if given.list:
        print(cases)
        return 0
    tally = Tally()
    code = int(pytest.main(command_line(given), plugins=[tally]))
    text = "\n".join([*summary(tally.reports), "", cases])
    print(f"\n{text}")
    if given.write:
        card = nvidia.present()
        name = card.name if card else "cpu"
        about = f"{name}, torch {torch.__version__}: `{' '.join(sys.argv)}`"
        page = f"# FlashAttention's own tests on autoattn\n\n{about}\n\n{text}"
        print(f"written to {keep(f'{name}_flash_attention_tests', page)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
