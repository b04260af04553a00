"""`autoattn explain`: what a call would run on, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoattn.cli import completion, options
from autoattn.errors import UsageError

if TYPE_CHECKING:
    from autoattn.runtime.plan.explanations import Explanation

EXAMPLES = (
    "Examples:\n\n[bold]autoattn explain --device a30 --dtype bf16 --batch 4 --heads 32 --heads-kv 8 --seq-q 1000 "
    "--head-dim 128 --mask causal[/]\n\n[bold]autoattn explain --device h200 --shapes shapes.yaml --training --json[/]"
)


def command(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="As if on this device; the GPU in this machine, or else its CPU, if left out.",
            autocompletion=completion.devices,
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Only this cache; yours and the shipped if left out.")
    ] = None,
    shapes: options.Shapes = None,
    group: options.Groups = None,
    lse: Annotated[bool, typer.Option("--lse", help="Of a call that asks for the LSE (return_lse=True).")] = False,
    training: Annotated[
        bool,
        typer.Option("--training", help="Of a call whose inputs need gradients: both passes are decided together."),
    ] = False,
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
    key_cache: options.KeyCache = None,
    key_lengths: options.KeyLengths = None,
    operation: options.Operation = None,
    deterministic: options.Deterministic = False,
    modifier: options.Modifiers = None,
) -> None:
    """Say which kernel a call would run on, how near to a tuned problem that is, and why nothing nearer was taken.

    With --operation backward, the answer is that of the gradients alone; with --training, that of the whole call.
    """
    problem = options.problem_of(
        dtype=dtype, batch=batch, heads=heads, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim,
        head_dim_v=head_dim_v, mask=mask, layout=layout, tokens=tokens, precision=precision, numerics=numerics,
        key_cache=key_cache, key_lengths=key_lengths, deterministic=deterministic,
        operation=_operation(operation, training, given=dtype is not None), modifiers=modifier,
    )  # fmt: skip
    named = options.problems_of(shapes, group, problem)
    for shape in named:
        if lse and not training and shape.problem.op.value == "backward":
            raise UsageError(f"--lse is a choice for outputs, got {shape.problem}; leave it out, or add --training")
    from autoattn.cli import terminal
    from autoattn.hardware import nvidia
    from autoattn.runtime.plan import decision

    card = nvidia.resolve(device)[0] if device is not None else nvidia.present()
    answers = [decision.explain(shape.problem, card, cache, lse=lse, training=training) for shape in named]
    if json:
        documents = [_document(answer) for answer in answers]
        terminal.print_json(documents[0] if problem is not None else documents)
        return
    for answer in answers:
        _print(answer)


def _operation(operation: str | None, training: bool, *, given: bool) -> str | None:
    """The operation of the one problem: of a training call, the gradients, which say what is learned and repeats."""
    return "backward" if training and given and operation is None else operation


def _document(answer: Explanation) -> dict[str, Any]:
    names = ("problem", "route", "level", "reason", "unavailable", "steps", "variant", "entry", "precompiled")
    document = {name: getattr(answer, name) for name in names}
    return document | {"gradients": None if answer.gradients is None else _document(answer.gradients)}


def _print(answer: Explanation) -> None:
    from autoattn.report import attendance, figures

    print(figures.printable(answer.problem))
    print(f"  runs on  {figures.printable(answer.route)}")
    print(f"  level    {answer.levels}")
    print(f"  because  {figures.printable(answer.reason)}")
    if answer.unavailable:
        print(f"  tuned    {figures.printable(f'a kernel that cannot run here: {answer.unavailable}')}")
    for name, kernel in (("code", answer), ("backward code", answer.gradients)):
        if kernel is not None and kernel.precompiled:
            print(f"  {name:<8} {figures.printable(kernel.precompiled)}")
    if answer.variant is not None:
        print(f"  variant  {figures.printable(answer.variant.template)}: {figures.printable(answer.variant)}")
    if answer.gradients is not None and answer.gradients.variant is not None:
        variant = answer.gradients.variant
        print(f"  backward {figures.printable(variant.template)}: {figures.printable(variant)}")
    if answer.entry is not None and answer.entry.checked:
        print(f"  numbers  {figures.printable(answer.entry.checked)}")
    if answer.entry is not None and answer.entry.finals is not None and answer.entry.problem == answer.problem:
        leads = [f"{rival.name} {figures.against(rival.lead)}" for rival in figures.others(answer.entry) if rival.lead]
        print(f"  finals   {figures.printable(figures.finals(answer.entry))}")
        print(f"  over     {figures.printable(', '.join(leads) or 'nobody, or too few rounds')}")
        print(f"  rivals   {figures.printable(attendance.sentence(answer.entry))}")
    if answer.entry is not None and answer.entry.worst is not None and answer.entry.problem == answer.problem:
        print(f"  worst    {figures.printable(figures.worst(answer.entry))}")
    for position, step in enumerate(answer.steps, start=1):
        print(f"  {position:>7}. {figures.printable(step)}")
