"""`autoattn bench ranks`: one attention over the GPUs of this machine, at the sizes of a published table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoattn.cli import options

EXAMPLES = (
    "Examples:\n\n[bold]autoattn bench ranks --out bench[/]\n\n[bold]autoattn bench ranks --ranks 1,2,4 --out bench[/]"
)


def command(
    ranks: Annotated[str, typer.Option("--ranks", metavar="A,B", help="Numbers of GPUs.")] = "1,2",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write into.")] = Path("bench"),
) -> None:
    """Time context_attention over GPUs of this machine: float32, forward, without a mask, at the sizes of the published
    table's ring_v2_collective. Each number of GPUs has new processes; one that fails leaves the others.

    Outputs are checked first. Writes DIR/ranks.md.
    """
    numbers = options.lengths("--ranks", ranks)
    from autoattn.bench import kernel_bench, rank_bench
    from autoattn.cli import terminal
    from autoattn.report import files

    console = terminal.console()
    ran_on = ", ".join(f"{name} {what}" for name, what in kernel_bench.machine(()).items())
    lines = [f"autoattn bench ranks --ranks {ranks}; {ran_on}", ""]
    for line in rank_bench.table(rank_bench.rows(numbers, "nccl")):
        console.print(terminal.printable(line), soft_wrap=True)
        lines.append(line)
    files.write_all(out, {"ranks.md": "\n".join(lines) + "\n"})
    console.print(f"The table is in {out / 'ranks.md'}", soft_wrap=True)
