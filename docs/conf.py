"""Builds the documentation's site with Sphinx: `make docs`. The source is the checkout, the pages are Markdown.

Pages link to one another, and to files of the repository, as they do there. Links to files that are no pages lead to
the repository. A link to nothing, and a page that no table of contents has, are errors of a strict build.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

import autoattn

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/autoattn/autoattn"
HOME = "README"

project = "autoattn"
author = "The autoattn authors"
release = version = autoattn.__version__
root_doc = HOME
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**", "benchmarks/README.md",
    "benchmarks/results/*",
]  # fmt: skip
exclude_patterns = [".*", "site", "dist", "**/__pycache__"]
suppress_warnings = ["myst.header"]  # results begin with headings of any level

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 3  # as GitHub makes them
default_role = "literal"  # `names` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings have types with their shapes; overloads would hide the arguments
smartquotes = False  # options begin with two hyphens
maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"autoattn {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": REPOSITORY, "source_branch": "main", "source_directory": "",
    "top_of_page_buttons": ["view"],
}  # fmt: skip

# A relative link, by its text, path and anchor: neither a scheme nor the anchor alone.
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
PAGE = re.compile(r"[\w./-]+\.md")


def on_source_read(app: Any, name: str, source: list[str]) -> None:
    """Adds what a page has on the site alone. Links to what is no page lead into the repository.

    A link whose text is the name of a page gets the title of the page or of the section.
    """
    folder = posixpath.dirname(name)

    def of_the_site(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if Path(path).suffix == ".md":
            return f"[{'' if PAGE.fullmatch(text) else text}]({target}{anchor})"
        if not (ROOT / path).exists() or Path(path).suffix == ".svg":
            return link[0]
        return f"[{text}]({REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{anchor})"

    source[0] = LINK.sub(of_the_site, source[0])
    if name == HOME:
        source[0] += (ROOT / "docs" / "contents.txt").read_text(encoding="utf-8")
    elif name == "docs/reference/command-line":
        source[0] += command_line()
    elif name == "docs/decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    elif name == "benchmarks/README":
        source[0] += "\n## All results\n\n```{toctree}\n:glob:\n:reversed:\n:titlesonly:\n\nresults/*\n```\n"


def command_line() -> str:
    """Markdown of all commands: their help, arguments and options, as `--help` has them."""
    import typer

    from autoattn.cli import app

    program: Any = typer.main.get_command(app.app)
    return (
        "\n\n".join(text for name, one in program.commands.items() for text in help_of(f"autoattn {name}", one)) + "\n"
    )


def help_of(name: str, command: Any) -> list[str]:
    """Markdown of a command, and of the commands below it."""
    words = (command.help or "").replace("\b", "").split("\n\n")
    parts = [f"## {name}", *(plain(part) for part in words)]
    rows = [f"| {spelling(one)} | {plain(getattr(one, 'help', '') or '')} |" for one in command.params]
    if rows:
        parts.append("\n".join(["| | |", "|---|---|", *rows]))
    for word, below in getattr(command, "commands", {}).items():
        parts += help_of(f"{name} {word}", below)
    return parts


def spelling(parameter: Any) -> str:
    """An argument by its name, an option as it is written."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    written = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    return written if parameter.is_flag or not parameter.metavar else f"{written} `{parameter.metavar}`"


def plain(text: str) -> str:
    """One line without markup of Markdown or of rich."""
    text = re.sub(r"\[/?(?:bold|italic|dim)?\]", "", " ".join(text.split()))
    return re.sub(r"([|<*_\[\]])", r"\\\1", text)


def on_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: what reStructuredText would read as markup is escaped, but for `names`."""
    lines[:] = [re.sub(r"([*|])", r"\\\1", line) for line in lines]


def on_finished(app: Any, error: Exception | None) -> None:
    """The README is the first page."""
    if error is None:
        shutil.copyfile(Path(app.outdir) / f"{HOME}.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", on_source_read)
    app.connect("autodoc-process-docstring", on_docstring, priority=400)  # before napoleon
    app.connect("build-finished", on_finished)
