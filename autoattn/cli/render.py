"""`autoattn render`: a kernel as a file that stands alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoattn.cli import options
from autoattn.errors import UsageError

if TYPE_CHECKING:
    from autoattn.core.cache_entry import CacheEntry
    from autoattn.core.device import Device
    from autoattn.core.problem import Problem
    from autoattn.core.variant import Variant

EXAMPLES = (
    "Examples:\n\n[bold]autoattn render --device h200 --dtype bf16 --heads 32 --seq-q 4096 --head-dim 128 "
    "--out kernel.py[/]\n\n[bold]autoattn render --device a30 --dtype fp16 --heads 8 --seq-q 1024 --head-dim 64 "
    "--param BLOCK_M=64 --param num_warps=4[/]"
)


def command(
    device: options.Device = "auto",
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Only this cache; yours and the shipped if left out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write; standard output if left out.")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", metavar="NAME", help="Start from this template's default instead.")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="NAME=VALUE", help="Change a parameter; can be repeated.")
    ] = None,
    lse: Annotated[bool, typer.Option("--lse", help="Also write the log-sum-exp of each row.")] = False,
    dtype: options.DType = None,
    batch: options.Batch = None,
    heads: options.Heads = None,
    heads_kv: options.HeadsKV = None,
    seq_q: options.SeqQ = None,
    seq_kv: options.SeqKV = None,
    head_dim: options.HeadDim = None,
    head_dim_v: options.HeadDimV = None,
    mask: options.Mask = None,
    layout: options.Layout = None,
    tokens: options.Tokens = None,
    precision: options.Precision = None,
    numerics: options.Numerics = None,
    key_cache: options.KeyCache = None,
    key_lengths: options.KeyLengths = None,
    operation: options.Operation = None,
    deterministic: options.Deterministic = False,
    modifier: options.Modifiers = None,
) -> None:
    """Write the kernel of one problem as a Python file that needs only Triton.

    It is the winner that the cache holds for the problem on the device, unless no call uses that, else the default.
    """
    problem = options.problem_of(
        dtype=dtype, batch=batch, heads=heads, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim,
        head_dim_v=head_dim_v, mask=mask, layout=layout, tokens=tokens, precision=precision, numerics=numerics,
        key_cache=key_cache, key_lengths=key_lengths, operation=operation, deterministic=deterministic,
        modifiers=modifier,
    )  # fmt: skip
    if problem is None:
        raise UsageError("render needs a problem: --dtype, --heads, --seq-q and --head-dim, got none of them; add them")
    from autoattn.report import files

    text = _text(problem, device, cache, template, param or [], lse)
    if out is None:
        sys.stdout.write(text)
    else:
        files.write(out, text)
        print(out)


def _text(
    problem: Problem, device: str, cache: Path | None, template: str | None, settings: list[str], lse: bool
) -> str:
    from autoattn.codegen import portfolio, render, search_space
    from autoattn.hardware import nvidia

    card, _ = nvidia.resolve(device)
    entry = _winner(problem, card, cache) if template is None else None
    if entry is not None:
        variant, origin = entry.variant, f"{entry.evidence.value} winner of the cache"
    else:
        variant = portfolio.default(problem, card)
        if template is not None:
            variant = search_space.load(template).default(problem, card)
        origin = f"default of {variant.template}"
    if settings:
        variant, origin = changed(variant, settings), f"{origin}, changed by --param"
    source = render.render(problem, variant, render.natural_traits(problem, lse=lse))
    header = [f"{problem}, for {card.full_name}", f"{origin}; source digest {source.digest}"]
    if (reason := search_space.load(variant.template).why_infeasible(variant, problem, card)) is not None:
        header.append(f"cannot run on that device: {reason}")
    return "".join(f"# {line}\n" for line in header) + source.text


def _winner(problem: Problem, card: Device, folder: Path | None) -> CacheEntry | None:
    from autoattn.cache import inventory, store

    for overlay in inventory.overlays(folder, lambda _: card.fingerprint, card.name):
        place = overlay.counting.get(problem.key)
        if place is not None and store.why_held_back(place.entry) is None:
            return place.entry
    return None


def changed(variant: Variant, settings: list[str]) -> Variant:
    """`variant` with the parameters that `NAME=VALUE` settings name replaced.

    Raises:
        UsageError: a setting is not NAME=VALUE, or the search space has no such parameter or value.
    """
    from autoattn.codegen import search_space

    searched = search_space.load(variant.template)
    choices = searched.choices
    params = variant.as_dict()
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not text:
            raise UsageError(f"--param must be NAME=VALUE, got {setting!r}; write it as BLOCK_M=64")
        if name not in choices:
            known = ", ".join(choices)
            raise UsageError(f"--param must name a parameter of {variant.template}, got {name!r}; it has {known}")
        # Only a value of the space reaches the template, so that no text of the command line becomes code.
        values = {str(choice): choice for choice in choices[name]}
        if text not in values:
            raise UsageError(f"--param {name} must be one of {', '.join(values)}, got {text!r}; correct it")
        params[name] = values[text]
    return searched.variant(params)
