"""What a build makes: search spaces as JSON in the wheel, and the README with links that work elsewhere."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class ParsedSearchSpaces(BuildHookInterface):  # type: ignore[type-arg]
    """Adds a JSON file beside each YAML file of a wheel, which is read ten times as fast."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes them; an editable install reads the YAML files."""
        if version == "editable":
            return
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.root) / "search_spaces"
        for path in sorted(root.rglob("*.yaml")):
            target = Path(self.folder.name) / path.relative_to(root).with_suffix(".json")
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))), encoding="utf-8")
            place = Path("autoattn/_data/search_spaces") / path.relative_to(root).with_suffix(".json")
            build_data["force_include"][str(target)] = str(place)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what `initialize` wrote."""
        if version != "editable":
            self.folder.cleanup()


class ReadmeOfTheRelease(MetadataHookInterface):
    """The README as the description of the release: a package index has neither the pages nor the chart beside it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Makes links to files of the repository absolute; an image needs the file itself, not its page."""
        home = metadata["urls"]["Repository"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r'(<img src=")(?!https?:)', rf"\g<1>{home}/raw/main/", text)
        text = re.sub(r"(\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{home}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
