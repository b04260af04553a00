"""`autoattn explain`: what a call would run on, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoattn.cli import options

if TYPE_CHECKING:
    from autoattn.dispatch import Explanation

EXAMPLES = (
    "Examples:\n\n[bold]autoattn explain --device a30 --dtype bf16 --batch 4 --heads 32 --heads-kv 8 --seq-q 1000 "
    "--head-dim 128 --mask causal[/]\n\n[bold]autoattn explain --device h200 --shapes shapes.yaml --json[/]"
)


def command(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="As if on this device; the GPU in this machine, or else its CPU, if left out.",
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Only this cache; yours and the shipped if left out.")
    ] = None,
    shapes: options.Shapes = None,
    group: options.Groups = None,
    json: options.Json = False,
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
    operation: options.Operation = None,
    deterministic: options.Deterministic = False,
    modifier: options.Modifiers = None,
) -> None:
    """Say which kernel a call would run on, how near to a tuned problem that is, and why nothing nearer was taken."""
    problem = options.problem_of(
        dtype=dtype, batch=batch, heads=heads, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim,
        head_dim_v=head_dim_v, mask=mask, layout=layout, tokens=tokens, precision=precision, numerics=numerics,
        operation=operation, deterministic=deterministic, modifiers=modifier,
    )  # fmt: skip
    named = options.problems_of(shapes, group, problem)
    from autoattn import dispatch, gpu
    from autoattn.cli import terminal

    card = gpu.resolve(device)[0] if device is not None else gpu.present()
    answers = [dispatch.explain(one.problem, card, cache) for one in named]
    if json:
        documents = [_document(answer) for answer in answers]
        terminal.print_json(documents[0] if problem is not None else documents)
        return
    for answer in answers:
        _print(answer)


def _document(answer: Explanation) -> dict[str, Any]:
    names = ("problem", "route", "level", "reason", "steps", "variant", "entry")
    return {name: getattr(answer, name) for name in names}


def _print(answer: Explanation) -> None:
    from autoattn.report import figures

    print(figures.printable(answer.problem))
    print(f"  runs on  {figures.printable(answer.route)}")
    print(f"  level    {answer.level.value}")
    print(f"  because  {figures.printable(answer.reason)}")
    if answer.variant is not None:
        print(f"  variant  {figures.printable(answer.variant.template)}: {figures.printable(answer.variant)}")
    if answer.entry is not None and answer.entry.finals is not None and answer.entry.problem == answer.problem:
        leads = [f"{one.name} {figures.against(one.lead)}" for one in figures.others(answer.entry) if one.lead]
        print(f"  finals   {figures.printable(figures.finals(answer.entry))}")
        print(f"  over     {figures.printable(', '.join(leads) or 'nobody, or too few rounds')}")
    if answer.entry is not None and answer.entry.worst is not None and answer.entry.problem == answer.problem:
        print(f"  worst    {figures.printable(figures.worst(answer.entry))}")
    for position, step in enumerate(answer.steps, start=1):
        print(f"  {position:>7}. {figures.printable(step)}")
