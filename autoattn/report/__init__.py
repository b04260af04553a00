"""Cache -> one HTML file that needs nothing else, and a summary of it in Markdown."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import jinja2

from autoattn.cache import inventory
from autoattn.errors import StateError
from autoattn.hardware import nvidia
from autoattn.report import attendance, baseline, contents, figures, files, finals_table, groups, listing, overview

FOLDER = Path(__file__).parent
SCRIPT = "\n" + (FOLDER / "table.js").read_text(encoding="utf-8")  # constant: no text of a cache is ever in it
MARKDOWN_BYTES = 100_000  # of the summary
MARKDOWN_ROWS = 400  # of each of its tables at most; fewer where that many do not fit
# What stands below predictions beside published times.
PROVES = (
    "The other kernel is well tuned, so that a right prediction for one of ours comes near its time: this shows "
    "whether the size of the predictions is believable. It does not show that they rank variants rightly on this card, "
    "and at which clock the other kernel ran is not known."
)


def build(cache_folder: Path | None, out: Path, against: Path | None = None) -> tuple[Path, ...]:
    """Writes `report.html` and `report.md` into `out`, which is made when it is missing.

    Args:
        cache_folder: the cache to report on; what calls take of the user's and the shipped one when None.
        against: a baseline cache; the report says what changed from it to `cache_folder`.

    Returns:
        The paths of the two files.

    Raises:
        StateError: the cache holds nothing to report.
        CacheError: `cache_folder` or `against` is no folder, or a cache file is damaged, newer or foreign.
        OSError: `out` cannot be written.
    """
    overlays = inventory.overlays(cache_folder, nvidia.fingerprint_of)
    homes = {(overlay.device, key): place.folder for overlay in overlays for key, place in overlay.counting.items()}
    sections = contents.gather([overlay.file for overlay in overlays], homes)
    if not sections:
        where = ", ".join(map(str, inventory.folders(cache_folder)))
        raise StateError(f"a report needs cache entries, found none in {where}; run autoattn tune, or name a --cache")
    comparison = None
    if against is not None:
        before = [overlay.file for overlay in inventory.overlays(against, nvidia.fingerprint_of)]
        comparison = baseline.compare(str(against), before, [overlay.file for overlay in overlays])
    command = _command(cache_folder, against)
    texts = {
        "report.html": html_text(sections, command, comparison),
        "report.md": markdown_text(sections, command, comparison),
    }
    return files.write_all(out, texts)


def html_text(
    sections: list[contents.Section], command: str = "autoattn report", comparison: baseline.Comparison | None = None
) -> str:
    """The report as one HTML document, whose only script is SCRIPT, without links to other hosts or files beside it.

    Args:
        command: what writes the report again.
        comparison: what changed against a baseline.
    """
    facts = _facts(sections, command, comparison)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    script = {"script": SCRIPT, "script_digest": digest}
    return environment(autoescape=True).get_template("report.html.j2").render(facts | script)


def markdown_text(
    sections: list[contents.Section], command: str = "autoattn report", comparison: baseline.Comparison | None = None
) -> str:
    """A summary in Markdown of at most MARKDOWN_BYTES: tables without kernels, and of long ones the first rows."""
    facts = _facts(sections, command, comparison)
    template = environment(finalize=markdown_cell).get_template("report.md.j2")
    rows = MARKDOWN_ROWS
    while len((text := template.render(facts, most=rows)).encode()) > MARKDOWN_BYTES and rows > 1:
        rows //= 2
    return text


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


def _facts(sections: list[contents.Section], command: str, comparison: baseline.Comparison | None) -> dict[str, object]:
    return {
        "sections": sections,
        "overview": overview.of(sections),
        "shown": overview.SHOWN,
        "comparison": comparison,
        "command": command,
        "proves": PROVES,
    }


def _command(source: Path | None, against: Path | None) -> str:
    """The command that writes a report again, of the user's and the shipped cache where `source` is None."""
    options = {"--cache": source, "--against": against, "--out": Path("report")}
    words = [f"{name} {shlex.quote(str(path))}" for name, path in options.items() if path is not None]
    return " ".join(["autoattn report", *words])


def _place(percent: float) -> str:
    """A place in a chart, short: a report has thousands of them."""
    return f"{percent:.1f}".removesuffix(".0")


def environment(*, autoescape: bool = False, finalize: Callable[[object], object] | None = None) -> jinja2.Environment:
    """Where templates find their files and the words for figures."""
    jinja_environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=autoescape,
        finalize=finalize,
    )
    jinja_environment.filters.update(
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
        kind=groups.kind_of,
        middle=figures.middle,
        words=overview.words_of,
        finals_columns=finals_table.columns,
        time_or_none=baseline.words_of,
    )
    return jinja_environment
