"""A report as its reader sees it, and the sections of entries that no file holds."""

from __future__ import annotations

from html.parser import HTMLParser

import samples

from autoattn.cache import file_format
from autoattn.core import triton_release
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.device import Device
from autoattn.core.problem import Op
from autoattn.report import contents

HOSTILE = "<script>alert('1')</script> | `code` [link](http://evil) \x1b[31m *star*\n# head"
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order, and collects what a reader sees and what a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.loads: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.policy = ""
        self.panels: dict[str, str] = {}  # id of a section -> what a reader sees of it
        self._sections: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")
            if name == "href" and (value or "").startswith("#"):
                self.targets.append((value or "")[1:])
            elif name in ("src", "href", "srcset", "data", "action"):
                self.loads.append(value or "")
        facts = dict(attrs)
        if facts.get("http-equiv") == "Content-Security-Policy":
            self.policy = facts.get("content") or ""
        if tag == "script":
            self.scripts.append("")
        if tag == "section":
            self._sections.append(facts.get("id") or "")
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "section":
            self._sections.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
            return
        self.text += data
        for name in self._sections:
            self.panels[name] = self.panels.get(name, "") + data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def sections_of(*entries: CacheEntry, card: Device = samples.H200) -> list[contents.Section]:
    return contents.gather([file_of(*entries, card=card)])


def file_of(*entries: CacheEntry, card: Device = samples.H200) -> file_format.CacheFile:
    known = {entry.problem.key: entry for entry in entries}
    return file_format.CacheFile(
        schema=1,
        op=Op.FORWARD,
        device=card.name,
        triton=triton_release.installed_release(),
        fingerprint=card.fingerprint,
        entries=known,
    )
