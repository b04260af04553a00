"""`autoattn tune --ranks`: which method computes one attention over the cards of this machine the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autoattn.errors import ProblemError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from autoattn.core.rank_choice import RankCall
    from autoattn.search.rank_tuning import GroupMeasurements
    from autoattn.shapes.shapes_file import NamedProblem


def tune(device: str, named: list[NamedProblem], ranks: int, cache: Path) -> None:
    """Says what is about to happen, measures, and says what came of it.

    Raises:
        UsageError: this machine cannot measure it, or no problem is one that ranks share.
        GroupError: a rank ended.
    """
    from autoattn.cli import terminal
    from autoattn.hardware import nvidia
    from autoattn.search import rank_tuning

    card, measured = nvidia.resolve(device)
    rank_tuning.check(ranks, card, measured=measured)
    console = terminal.console()
    calls = calls_of(named, console)
    console.print(f"Measuring {len(calls):,} calls on {ranks} x {card.full_name}, cache {cache}", soft_wrap=True)
    path, _, measurements = rank_tuning.tune(calls, card, ranks, cache)
    for line in lines(measurements):
        console.print(terminal.printable(line), soft_wrap=True)
    console.print(f"The choices are in {path}", soft_wrap=True)


def check_alone(searching: dict[str, object]) -> None:
    """Refuses options of a search beside --ranks.

    Args:
        searching: those options and their values; None where they are not given.

    Raises:
        UsageError: one is given.
    """
    for name, given in searching.items():
        if given is not None:
            raise UsageError(f"--ranks searches no kernels, got {name} {given} beside it; leave one of them out")


def calls_of(named: list[NamedProblem], console: Console) -> list[RankCall]:
    """The calls that problems are of; a note tells of those that ranks do not share.

    Raises:
        UsageError: there is none.
    """
    from autoattn.cli import terminal
    from autoattn.core.rank_choice import RankCall

    calls, reason = [], ""
    for shape in named:
        try:
            calls.append(RankCall.of(shape.problem))
        except ProblemError as error:
            reason = str(error)
            console.print(terminal.printable(f"Note: {reason}."), soft_wrap=True)
    if not calls:
        raise UsageError(f"--ranks must have a problem that ranks share, got none: {reason or 'no problem at all'}")
    return list(dict.fromkeys(calls))


def lines(measurements: GroupMeasurements) -> list[str]:
    """What was found, a line for each call and method."""
    link = measurements.link
    report = [f"Link: {link.bytes_per_second / 1e9:.1f} GB/s each way, {link.latency_us:.0f} us"]
    for choice in measurements.choices:
        times = sorted(choice.times_us.items(), key=lambda each: each[1])
        report.append(f"{choice.call}: {', '.join(f'{method.value} {time_us:,.0f} us' for method, time_us in times)}")
    report += [f"{attempt}: {why}" for attempt, why in measurements.refused.items()]
    if measurements.communication_sms is not None:
        report.append(f"Communication does best with at most {measurements.communication_sms} SMs (NCCL's max_ctas)")
    return report
