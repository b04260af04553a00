"""Times whole Hugging Face models of random weights with each attention, on the GPU that is here.

python benchmarks/whole_models.py [--row TEXT] [--rounds 12] [--seconds 600] [--compiled] [--out FILE]
python benchmarks/whole_models.py examples [--out FILE]
python benchmarks/whole_models.py --device cpu --tiny

Llama 3, Mistral, Gemma 2, GPT-OSS, BERT and ViT have their real layer shapes and few layers, in bfloat16. A prompt is
read, tokens are decoded behind it, a training step is both passes without an optimizer. In a row all attentions take
turns in one process, in random order in each round, and a sample is timed by the host's clock until the GPU is done.
Each attention's outputs, or the gradients of the first layer, are compared with those of eager attention in float32
before it is timed. What fails says so in its row. No row begins once --seconds have passed; those are listed.

examples runs the scripts of examples/ at the sizes of a GPU and makes one table of what they print.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import platform
import signal
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from kept import printed
from model_tasks import MODELS, Model, Prepared, Task, Workload, build

from autoattn import __version__, functional
from autoattn.bench.training_bench import reason_of
from autoattn.core import paired_stats
from autoattn.core.paired_stats import Interval, Round
from autoattn.hardware import nvidia
from autoattn.integrations import huggingface
from autoattn.runtime.plan.explanations import Level

BEGUN = time.monotonic()
OURS, SDPA, FLEX, EAGER = "autoattn", "sdpa", "flex_attention", "eager"
RIVALS = (SDPA, FLEX, EAGER)
# The error of an output is its distance from that of eager attention in float32, as a part of the latter's norm.
FACTOR = 3.0  # so many times the error of eager attention in the model's dtype is right,
FLOOR = {torch.float32: 1e-3, torch.bfloat16: 1e-2}  # and this much in any case;
WITHOUT_EAGER = {torch.float32: 1e-3, torch.bfloat16: 1e-1}  # this much, where eager attention has no memory
ROW_SECONDS = 5.0  # of the rounds of a row
PREPARED_SECONDS = 60  # that an attention has until its first call is done: compilers are at work
CALL_SECONDS = 10.0  # a later call that takes longer is told and takes part in no round
EXAMPLES_FOLDER = Path(__file__).parents[1] / "examples"
IMAGES = "generate_images"  # whose model has no mask that FlexAttention could use
# Name -> (unit, its words on a GPU, its words with --tiny)
EXAMPLES = {
    "generate": (
        "tokens a second",
        "--hidden 4096 --layers 8 --heads 32 --kv-heads 8 --prompt 8192 --tokens 128",
        "--hidden 64 --layers 1 --heads 4 --kv-heads 2 --prompt 12 --tokens 4 --rounds 1",
    ),
    "train_llama": (
        "tokens a second",
        "--hidden 2048 --layers 8 --heads 16 --kv-heads 8 --tokens 16384 --longest 4096 --steps 20",
        "--hidden 64 --layers 1 --heads 4 --kv-heads 2 --tokens 48 --longest 24 --steps 3",
    ),
    IMAGES: (
        "steps a second",
        "--heads 24 --layers 4 --pixels 1024 --text 512 --steps 8",
        "--heads 1 --layers 1 --pixels 32 --text 4 --steps 2 --rounds 1",
    ),
}


@dataclass(slots=True, kw_only=True)
class Row:
    """What came of one task of one model."""

    model: Model
    task: Task
    units: int = 1  # that a sample's time is divided by
    rounds: list[Round] = field(default_factory=list)  # samples of the attentions that are right
    reasons: dict[str, str] = field(default_factory=dict)  # why an attention has no time
    ran: str = ""  # what answered autoattn's calls

    def milliseconds(self, name: str) -> list[float]:
        """Of each round; none of an attention without a time."""
        return [each.times_us[name] / 1e3 / self.units for each in self.rounds if name in each.times_us]

    def ratio(self, rival: str) -> Interval | float | None:
        """Its time over ours, with an interval where there are rounds enough; None without both."""
        if not self.milliseconds(OURS) or not self.milliseconds(rival):
            return None
        interval = paired_stats.interval(self.rounds, rival, OURS, finalists=1)
        return interval or statistics.median(each.times_us[rival] / each.times_us[OURS] for each in self.rounds)


# What a reader of the page must know.
HOW = {
    "models": (
        "Milliseconds of a prompt, of a new token, or of a training step without an optimizer: medians, and between",
        "which three fifths of the rounds lie. In bold a rival's time over autoattn's (above 1: autoattn is faster),",
        "with its 95% interval. *ran* says what answered autoattn's calls of a sample.", "",
    ),
    "examples": ("The median of rounds in turn; of training, the median of the steps.", ""),
}  # fmt: skip


# --- a row ------------------------------------------------------------------------------------------------------------


def rows(models: Sequence[Model], device: torch.device, options: argparse.Namespace) -> Iterator[Row]:
    """One row after the other; those that no time is left for say so."""
    begin = time.monotonic()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for model in models:
        tasks = [task for task in model.tasks if options.row in f"{model.name}, {task.value}"]
        tasks = [task for task in tasks if task is not Task.COMPILED or options.compiled]
        workload = None
        for task in tasks:
            if time.monotonic() - begin > options.seconds:
                yield Row(model=model, task=task, reasons={OURS: f"not reached in --seconds {options.seconds:g}"})
                continue
            workload = workload or Workload.of(model, build(model, device, dtype))
            yield contest(workload, task, options.rounds)
            free(device)
        workload = None
        free(device)


def contest(workload: Workload, task: Task, rounds: int) -> Row:
    """Compares the attentions with float32, then times those that are right in turns."""
    row, net = Row(model=workload.model, task=task), workload.net
    torch.compiler.reset()  # so that no length is taken for a dynamic one, and no graph counts against the next row's
    try:
        expected = workload.expected(task)
    except Exception as error:
        row.reasons[OURS] = f"nothing to compare with: {reason_of(error)}"
        return row
    prepared: dict[str, Prepared] = {}
    allowed = WITHOUT_EAGER[net.dtype]
    for name in (EAGER, OURS, SDPA, *((FLEX,) if net.device.type == "cuda" and task in workload.model.flex else ())):
        print(f"{workload.model.name}, {task.value}: {name} after {time.monotonic() - BEGUN:.0f} s", file=sys.stderr)
        try:
            with limited(PREPARED_SECONDS):
                net.set_attn_implementation(name)
                program = workload.prepare(task)
                with routes() as ways:
                    error = distance(program.output(), expected)
                program.ready()
                program.call()  # a shorter list of logits, or gradients that are not there yet, may need another kernel
            if name == EAGER:
                allowed = max(FLOOR[net.dtype], FACTOR * error)
            if error > allowed:
                row.reasons[name] = f"wrong: its error is {error:.2g} of the norm, at most {allowed:.2g} is right"
            elif (seconds := seconds_of(program, net)) > CALL_SECONDS:
                row.reasons[name] = f"a call takes {seconds:.1f} s, more than {CALL_SECONDS:g} s"
            else:
                prepared[name] = program
            if name == OURS:
                row.ran = ", ".join(f"{way} ({count})" for way, count in ways.most_common())
        except Exception as error:
            row.reasons[name] = reason_of(error)
        free(net.device)
    del expected
    try:
        row.units, row.rounds = time_in_turns(prepared, net, rounds)
    except Exception as error:
        row.reasons[OURS] = f"while it was timed: {reason_of(error)}"
    return row


def distance(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Of an output from what it should be, as a part of that one's norm; infinite where it is not finite."""
    error = float((output.float() - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf


def seconds_of(task: Prepared, net: Any) -> float:
    """Of one call, by the host's clock until the GPU is done."""

    def wait() -> None:
        if net.device.type == "cuda":
            torch.cuda.synchronize()

    task.ready()
    wait()
    start = time.perf_counter()
    task.call()
    wait()
    return time.perf_counter() - start


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Ends what runs longer with an error: a compiler that begins anew in each step takes minutes."""

    def end(*_: object) -> None:
        raise TimeoutError(f"it was not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def time_in_turns(prepared: dict[str, Prepared], net: Any, rounds: int) -> tuple[int, list[Round]]:
    """What a sample's time is divided by, and the samples."""
    begin = time.monotonic()

    def sample(name: str) -> float:
        net.set_attn_implementation(name)
        return 1e6 * seconds_of(prepared[name], net)

    def enough(done: list[Round]) -> bool:
        spent = time.monotonic() - begin
        return len(done) >= rounds or (spent > ROW_SECONDS and len(done) >= paired_stats.MIN_ROUNDS)

    if not prepared:
        return 1, []
    units = next(iter(prepared.values())).units
    return units, paired_stats.hold(list(prepared), sample, lambda: None, seed=0, enough=enough)


@contextmanager
def routes() -> Iterator[Counter[str]]:
    """Counts what answers calls of `attention` and `packed_attention`: a kernel of which level, or PyTorch."""
    ways: Counter[str] = Counter()

    def noting(attend: Callable[..., Any], explain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **words: Any) -> Any:
            if not torch.compiler.is_compiling():
                explanation = explain(*given, **words)
                level = "" if explanation.level is Level.SDPA else f" {explanation.levels}"
                ways[explanation.route + level] += 1
            return attend(*given, **words)

        return call

    before = functional.attention, functional.packed_attention
    functional.attention = noting(functional.attention, functional.explain)
    functional.packed_attention = noting(functional.packed_attention, functional.explain_packed)
    try:
        yield ways
    finally:
        functional.attention, functional.packed_attention = before


def free(device: torch.device) -> None:
    """Gives back memory that nothing uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- the page ---------------------------------------------------------------------------------------------------------


def table(measured_rows: Iterator[Row]) -> Iterator[str]:
    """A line of Markdown for each row as it comes, then the means, and why some have no time."""
    yield f"| model | task | {OURS} ms | {' | '.join(f'{rival} ms, over ours' for rival in RIVALS)} | ran |"
    yield "|---|---|--:|--:|--:|--:|---|"
    notes: list[str] = []
    ratios: dict[tuple[Task, str], list[float]] = {}
    for row in measured_rows:
        cells = [_cell(row, OURS, notes), *(_cell(row, rival, notes) for rival in RIVALS)]
        what = f"{row.model.name} | {row.task.value}, {row.model.size(row.task)}"
        yield f"| {what} | {' | '.join(cells)} | {row.ran} |"
        for rival in RIVALS:
            ratio = row.ratio(rival)
            if ratio is not None:
                ratios.setdefault((row.task, rival), []).append(_middle(ratio))
    yield ""
    for (task, rival), values in sorted(ratios.items(), key=lambda pair: (pair[0][0].value, pair[0][1])):
        rows_of = "1 row" if len(values) == 1 else f"{len(values)} rows"
        yield f"- {task.value}: {rival} takes {statistics.geometric_mean(values):.3f} times as long ({rows_of})"
    yield from ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]


def _middle(ratio: Interval | float) -> float:
    return ratio if isinstance(ratio, float) else ratio.ratio


def _cell(row: Row, name: str, notes: list[str]) -> str:
    """The median and between which three fifths of the samples lie; a rival's time over ours."""
    times = row.milliseconds(name)
    if not times:
        if name not in row.reasons:
            return ""
        note = f"{name}: {row.reasons[name]}"
        if note not in notes:
            notes.append(note)
        return f"[{notes.index(note) + 1}]"
    low, *_, high = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 2
    text = f"{statistics.median(times):.3g} ({low:.3g} to {high:.3g})"
    ratio = row.ratio(name) if name != OURS else None
    if ratio is None:
        return text
    bounds = f" ({ratio.low:.3f} to {ratio.high:.3f})" if isinstance(ratio, Interval) else ""
    return f"{text}, **{_middle(ratio):.3f}**{bounds}"


def example_table(tiny: bool) -> Iterator[str]:
    """A line of Markdown for each attention that an example runs beside SDPA."""
    yield "| example | unit | attention | its speed | that of SDPA beside it | over SDPA |"
    yield "|---|---|---|--:|--:|--:|"
    for name, (unit, words, small) in EXAMPLES.items():
        given = small if tiny else words
        rivals = (OURS, FLEX) if torch.cuda.is_available() and name != IMAGES else (OURS,)
        for rival in rivals:  # apart, so that one that fails takes no number from the other
            chosen = [] if name == IMAGES else ["--attentions", SDPA, rival]
            cells = " | ".join(_speeds(name, [*given.split(), *chosen]))
            yield f"| `{name}.py {given}` | {unit} | {rival} | {cells} |"


def _speeds(name: str, words: list[str]) -> list[str]:
    """The speed of an attention, SDPA's, and their ratio; why not, where the example fails."""
    try:
        sdpa, other = _load_example(name).main(words).values()
    except SystemExit as error:
        return [str(error), "", ""]
    except Exception as error:
        return [reason_of(error), "", ""]
    return [f"{other:,.1f}", f"{sdpa:,.1f}", f"{other / sdpa:.3f}"]


def _load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES_FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heading(options: argparse.Namespace, given: Sequence[str]) -> list[str]:
    """What was run on what."""
    card = nvidia.present() if options.device == "cuda" else None
    where = card.full_name if card is not None else "a CPU"
    what = "Examples" if options.what == "examples" else "Whole models"
    versions = f"torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}"
    return [
        f"# {what} on {where}, {date.today()}", "", f"`{' '.join(['python benchmarks/whole_models.py', *given])}`:",
        f"{versions}, Python {platform.python_version()}, autoattn {__version__}.", "", *HOW.get(options.what, ()),
    ]  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Prints a table, and writes it where --out says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("models", "examples"), default="models")
    parser.add_argument("--row", default="", help="only rows whose model and task hold this")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no row begins")
    parser.add_argument("--compiled", action="store_true", help="with rows of compiled decoding, which take long")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, which show that the script runs")
    parser.add_argument("--out", type=Path, help="the Markdown file")
    given = sys.argv[1:] if words is None else list(words)
    options = parser.parse_args(given)
    if options.device == "cuda" and nvidia.present() is None:
        parser.error("this measures on an NVIDIA GPU, and torch finds none; give --device cpu --tiny to try the script")
    huggingface.register()
    transformers.logging.set_verbosity_error()
    lines = printed(heading(options, given))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the table says in its last column, and PyTorch's compiler
        if options.what == "examples":
            lines += printed(example_table(options.tiny))
        else:
            models = [model.shrunk() for model in MODELS] if options.tiny else list(MODELS)
            lines += printed(table(rows(models, torch.device(options.device), options)))
    if options.out is not None:
        options.out.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
