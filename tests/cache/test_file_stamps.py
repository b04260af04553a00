"""Stamps of files: what changes with the files, and what does not."""

from __future__ import annotations

from pathlib import Path

from autoattn.cache import file_stamps


def test_a_file_that_is_made_changed_or_removed_is_seen(tmp_path: Path) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.write_text("one")
    paths = (str(there), str(missing), "no\0path")
    stamps = file_stamps.of(paths)
    assert file_stamps.are_unchanged(paths, stamps)
    missing.write_text("made")
    assert not file_stamps.are_unchanged(paths, stamps)
    missing.unlink()
    assert file_stamps.are_unchanged(paths, stamps)
    there.write_text("longer")
    assert not file_stamps.are_unchanged(paths, stamps)
    there.unlink()
    assert not file_stamps.are_unchanged(paths, stamps)
