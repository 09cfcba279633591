"""A finished folder takes the place of what has its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.checkpoint.atomic import publish


@pytest.mark.parametrize("before", ["nothing", "folder", "link", "dangling link"])
def test_publishing_replaces_a_folder_or_a_link_and_not_what_the_link_leads_to(tmp_path: Path, before: str) -> None:
    temporary, target, other = tmp_path / ".new", tmp_path / "target", tmp_path / "disk/other"
    for folder in [temporary, *([other] if before == "link" else []), *([target] if before == "folder" else [])]:
        folder.mkdir(parents=True)
        (folder / "file").write_text(folder.name)
    if "link" in before:
        target.symlink_to(other)
    publish(temporary, target)
    assert not target.is_symlink()
    assert (target / "file").read_text() == ".new"
    assert {path.name for path in tmp_path.iterdir()} - {"disk"} == {"target"}
    assert before != "link" or (other / "file").read_text() == "other"
