"""Cache -> one HTML file that needs nothing else, and the same in Markdown."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import jinja2

from autoattn.cache import inventory
from autoattn.errors import StateError
from autoattn.hardware import nvidia
from autoattn.report import attendance, contents, figures, files, finals_table, listing

FOLDER = Path(__file__).parent
# What stands below predictions beside published times.
PROVES = (
    "The other kernel is well tuned, so that a right prediction for one of ours comes near its time: this shows "
    "whether the size of the predictions is believable. It does not show that they rank variants rightly on this card, "
    "and at which clock the other kernel ran is not known."
)


def build(cache_folder: Path | None, out: Path) -> tuple[Path, ...]:
    """Writes `report.html` and `report.md` into `out`, which is made when it is missing.

    Args:
        cache_folder: the cache to report on; what calls take of the user's and the shipped one when None.

    Returns:
        The paths of the two files.

    Raises:
        StateError: the cache holds nothing to report.
        CacheError: `cache_folder` is no folder, or a cache file is damaged, newer or foreign.
        OSError: `out` cannot be written.
    """
    overlays = inventory.overlays(cache_folder, nvidia.fingerprint_of)
    homes = {(overlay.device, key): place.folder for overlay in overlays for key, place in overlay.counting.items()}
    sections = contents.gather([overlay.file for overlay in overlays], homes)
    if not sections:
        where = ", ".join(map(str, inventory.folders(cache_folder)))
        raise StateError(f"a report needs cache entries, found none in {where}; run autoattn tune, or name a --cache")
    texts = {"report.html": html_text(sections, cache_folder), "report.md": markdown_text(sections, cache_folder)}
    return files.write_all(out, texts)


def html_text(sections: list[contents.Section], source: Path | None = Path("cache")) -> str:
    """The report as one HTML document without scripts, links to other hosts or files beside it.

    Args:
        source: the cache, for the command that writes the report again; None for the user's and the shipped one.
    """
    return environment(autoescape=True).get_template("report.html.j2").render(_facts(sections, source))


def markdown_text(sections: list[contents.Section], source: Path | None = Path("cache")) -> str:
    """The same rows in Markdown."""
    return environment(finalize=markdown_cell).get_template("report.md.j2").render(_facts(sections, source))


class Verbatim(str):
    """Markdown that is already safe."""


def markdown_cell(value: object) -> object:
    """Escapes what Markdown or the HTML in it would act upon; every value of the template passes through here."""
    if isinstance(value, Verbatim):
        return value
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(figures.printable(value), quote=False))


def fenced(text: str, language: str = "") -> Verbatim:
    """A code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return Verbatim(f"{fence}{language}\n{text.rstrip()}\n{fence}")


def _facts(sections: list[contents.Section], source: Path | None) -> dict[str, object]:
    named = f" --cache {shlex.quote(str(source))}" if source is not None else ""
    command = f"autoattn report{named} --out report"
    return {"sections": sections, "command": command, "finals_head": finals_table.HEAD, "proves": PROVES}


def _place(percent: float) -> str:
    """A place in a chart, short: a report has thousands of them."""
    return f"{percent:.1f}".removesuffix(".0")


def environment(*, autoescape: bool = False, finalize: Callable[[object], object] | None = None) -> jinja2.Environment:
    """Where templates find their files and the words for figures."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=autoescape,
        finalize=finalize,
    )
    made.filters.update(
        us=figures.microseconds,
        rate=figures.tflops,
        times=figures.times,
        error=figures.error,
        choice=figures.choice,
        tile=figures.tile,
        tile_of=figures.tile_of,
        against=figures.against,
        standing=figures.standing,
        percent=figures.percent,
        energy=figures.energy,
        place=_place,
        versions=figures.versions,
        finals=figures.finals,
        worst=figures.worst,
        met=attendance.sentence,
        counts=figures.counts,
        settings=figures.settings,
        differing=listing.differing,
        fenced=fenced,
    )
    return made
