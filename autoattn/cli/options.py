"""Options that several commands share, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from autoattn.cli import completion
from autoattn.core.modifiers import SWITCHES
from autoattn.errors import ProblemError, ShapesError, UsageError

if TYPE_CHECKING:
    from autoattn.core.problem import Problem
    from autoattn.shapes.shapes_file import NamedProblem

Choice = TypeVar("Choice", bound=Enum)
PANEL = "One problem"
MODIFIERS = (*SWITCHES, "bias", "score_mod")

Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", help="A device of `autoattn devices`, or auto.", autocompletion=completion.devices
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Shapes = Annotated[
    Path | None,
    typer.Option(
        "--shapes",
        metavar="FILE",
        help="YAML file of problems (docs/shapes.md), or one problem below.",
    ),
]
Groups = Annotated[
    list[str] | None,
    typer.Option(
        "--group",
        metavar="NAME",
        help="Only this group of the file; can be repeated.",
        autocompletion=completion.groups,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="TEXT", help="Only problems whose printed name holds this; can be repeated."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="Problems of a Hugging Face model: a config.json, its folder, or a cached name."
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option("--lengths", metavar="A,B", help="Tokens of --model's problems; 1024,4096,16384 up to its longest."),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="float16, bfloat16, float32 or float8_e4m3.",
        rich_help_panel=PANEL,
        autocompletion=completion.dtypes,
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", help="Sequences; 1 if left out.", rich_help_panel=PANEL)]
Heads = Annotated[int | None, typer.Option("--heads", help="Query heads.", rich_help_panel=PANEL)]
HeadsKV = Annotated[
    int | None,
    typer.Option("--heads-kv", help="Key and value heads; as --heads if left out.", rich_help_panel=PANEL),
]
SeqQ = Annotated[int | None, typer.Option("--seq-q", help="Query tokens per sequence.", rich_help_panel=PANEL)]
SeqKV = Annotated[
    int | None,
    typer.Option("--seq-kv", help="Key tokens per sequence; as --seq-q if left out.", rich_help_panel=PANEL),
]
HeadDim = Annotated[
    int | None,
    typer.Option("--head-dim", help="Elements per head, up to 256; of a latent cache 576.", rich_help_panel=PANEL),
]
HeadDimV = Annotated[
    int | None,
    typer.Option(
        "--head-dim-v", help="Elements of a value, up to 512; as --head-dim if left out.", rich_help_panel=PANEL
    ),
]
Mask = Annotated[
    str | None,
    typer.Option(
        "--mask",
        metavar="MASK",
        help="full, causal, causal:top-left, causal:bottom-right, window:LEFT,RIGHT or blocks:ROWSxKEYS,DENSITY; full "
        "if left out.",
        rich_help_panel=PANEL,
        autocompletion=completion.masks,
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="AXES",
        help="bhsd, bshd or packed; bhsd if left out.",
        rich_help_panel=PANEL,
        autocompletion=completion.layouts,
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="COUNT",
        help="Tokens of all packed sequences: 65536, or 4096x65536 for queries and keys.",
        rich_help_panel=PANEL,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="KIND",
        help="How float32 products are formed: ieee, tf32 or tf32x3.",
        rich_help_panel=PANEL,
        autocompletion=completion.precisions,
    ),
]
Numerics = Annotated[
    str | None,
    typer.Option(
        "--numerics",
        metavar="KIND",
        help="any, or online for kernels whose time no growth of the scores changes; any if left out.",
        rich_help_panel=PANEL,
        autocompletion=completion.numerics,
    ),
]
KeyCache = Annotated[
    str | None,
    typer.Option(
        "--key-cache",
        metavar="KIND",
        help="contiguous or paged:KEYS, where keys and values lie in a cache (docs/kv-cache.md).",
        rich_help_panel=PANEL,
    ),
]
KeyLengths = Annotated[
    str | None,
    typer.Option(
        "--key-lengths",
        metavar="LENGTHS",
        help="Keys of the sequences in the cache, as uniform:100-4000; all have --seq-kv when left out.",
        rich_help_panel=PANEL,
    ),
]
Operation = Annotated[
    str | None,
    typer.Option(
        "--operation",
        metavar="KIND",
        help="forward, or backward for the gradients of such a call; forward if left out.",
        rich_help_panel=PANEL,
        autocompletion=completion.operations,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Gradients that repeat to the bit, with --operation backward.",
        rich_help_panel=PANEL,
    ),
]
Modifiers = Annotated[
    list[str] | None,
    typer.Option(
        "--modifier",
        metavar="NAME[=VALUE]",
        help=f"{', '.join(SWITCHES)}, bias=KIND or score_mod=EXPRESSION (docs/shapes.md); can be repeated.",
        rich_help_panel=PANEL,
        autocompletion=completion.words(*MODIFIERS),
    ),
]


def problem_of(
    *,
    dtype: str | None,
    batch: int | None,
    heads: int | None,
    heads_kv: int | None,
    seq_q: int | None,
    seq_kv: int | None,
    head_dim: int | None,
    head_dim_v: int | None,
    mask: str | None,
    layout: str | None,
    tokens: str | None,
    precision: str | None,
    numerics: str | None,
    key_cache: str | None,
    key_lengths: str | None,
    operation: str | None,
    deterministic: bool,
    modifiers: list[str] | None,
) -> Problem | None:
    """The problem that the options describe; None when they describe none.

    Raises:
        UsageError: some of the options that a problem needs are there and others are not.
        ProblemError: the problem cannot exist.
    """
    needed = {"--dtype": dtype, "--heads": heads, "--seq-q": seq_q, "--head-dim": head_dim}
    missing = [name for name, value in needed.items() if value is None]
    optional = (
        *(batch, heads_kv, seq_kv, head_dim_v, mask, layout, tokens, precision, numerics, key_cache, key_lengths),
        operation,
        *(deterministic or None, modifiers or None),
    )
    if len(missing) == len(needed) and all(value is None for value in optional):
        return None
    if missing:
        raise UsageError(
            f"a problem needs {', '.join(needed)}, got no {' and no '.join(missing)}; "
            "add what is missing, or give no part of a problem"
        )
    values: dict[str, Any] = {
        "dtype": dtype,
        **({"precision": precision} if precision is not None else {}),
        "batch": 1 if batch is None else batch,
        "heads": heads,
        "heads_kv": heads if heads_kv is None else heads_kv,
        "seq_q": seq_q,
        "seq_kv": seq_q if seq_kv is None else seq_kv,
        "head_dim": head_dim,
        "mask": mask if mask is not None else "full",
        "layout": layout if layout is not None else "bhsd",
        **({"numerics": numerics} if numerics is not None else {}),
        **({"cache": key_cache} if key_cache is not None else {}),
        **({"lengths": key_lengths} if key_lengths is not None else {}),
        **({"operation": operation} if operation is not None else {}),
        **({"deterministic": True} if deterministic else {}),
        **({"head_dim_v": head_dim_v} if head_dim_v is not None else {}),
        **({"tokens": int(tokens) if tokens.isdecimal() else tokens} if tokens is not None else {}),
    }
    return _parsed(values | dict(map(_modifier, modifiers or ())))


def _modifier(text: str) -> tuple[str, str | bool]:
    """ "softcap" -> (softcap, True), "bias=keys" -> (bias, keys)."""
    name, equals, value = text.partition("=")
    if name not in MODIFIERS:
        raise UsageError(f"--modifier must name one of {', '.join(MODIFIERS)}, got {text!r:.60}; correct it")
    return name, value if equals else True


def _parsed(values: dict[str, Any]) -> Problem:
    """Reads the values as a shapes file's, so that both accept the same spellings and refuse in the same words."""
    from autoattn.shapes import shapes_file

    try:
        return shapes_file.parse({"version": 1, "groups": {"options": {"problems": [values]}}}, "options")[0].problem
    except ShapesError as error:
        raise ProblemError(str(error).removeprefix("options: group 'options', problem 1: ")) from None


def problems_of(file: Path | None, groups: list[str] | None, problem: Problem | None) -> list[NamedProblem]:
    """The problems to work on, from a shapes file or from the options.

    Raises:
        UsageError: neither or both of them are there, or a group is not in the file.
        ShapesError: the file cannot be read.
    """
    from autoattn.shapes import shapes_file

    if (file is None) == (problem is None):
        came = "neither" if file is None else "both"
        raise UsageError(
            f"problems come from --shapes FILE or from --dtype, --heads, --seq-q and --head-dim, got {came}; give one"
        )
    if problem is not None:
        if groups:
            raise UsageError(f"--group picks from a shapes file, got {groups[0]!r} without --shapes; leave it out")
        return [shapes_file.NamedProblem(problem=problem, groups=("one problem",))]
    assert file is not None
    return of_groups(shapes_file.load(file), groups, str(file))


def of_groups(named: list[NamedProblem], groups: list[str] | None, source: str) -> list[NamedProblem]:
    """The problems of some groups; of all when none is named.

    Raises:
        UsageError: the source has no such group.
    """
    known = list(dict.fromkeys(group for shape in named for group in shape.groups))
    for group in groups or ():
        if group not in known:
            raise UsageError(f"--group must be a group of {source}, got {group!r}; it has {', '.join(known)}")
    return [shape for shape in named if not groups or set(shape.groups) & set(groups)]


def at_least(name: str, least: float, given: float | None) -> None:
    """Refuses a number below its least.

    Raises:
        UsageError: it is.
    """
    if given is not None and not given >= least:
        raise UsageError(f"{name} must be at least {least:g}, got {given:g}; correct it")


def words(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The words between commas, each once.

    Raises:
        UsageError: there are none, or one that nobody knows.
    """
    known = list(known)
    chosen = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not chosen or not set(chosen) <= set(known):
        raise UsageError(f"{option} must be of {', '.join(known)}, got {text!r}; separate several by commas")
    return chosen


def choices(option: str, text: str, known: type[Choice]) -> tuple[Choice, ...]:
    """The same of an enumeration's values."""
    return tuple(known(word) for word in words(option, text, [choice.value for choice in known]))


def lengths(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas, each once.

    Raises:
        UsageError: there is something else, or nothing.
    """
    numbers = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in numbers):
        raise UsageError(f"{option} must be whole numbers from 1, got {text!r}; write for example 256,1024")
    return tuple(dict.fromkeys(int(word) for word in numbers))


def seed(given: int) -> None:
    """Refuses a seed that a sampler cannot take: NumPy's are whole numbers of 32 bits.

    Raises:
        UsageError: it is another number.
    """
    if not 0 <= given < 2**32:
        raise UsageError(f"--seed must be a whole number from 0 to {2**32 - 1}, got {given}; correct it")
