"""A finished folder takes the place of what has its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardtune.checkpoint.atomic import publish, write_output
from tests.support.full_disk import Disk, filling


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


def test_a_named_file_is_replaced_or_stays(tmp_path: Path) -> None:
    file, link = tmp_path / "page.html", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    for number in (1, 2):
        with filling(Disk(tmp_path.resolve(), full_at=number)), pytest.raises(OSError, match=r"page\.html"):
            write_output(link, "new")
        assert (file.read_text(), sorted(tmp_path.iterdir())) == ("old", [link, file])
    write_output(link, "new")
    assert (file.read_text(), link.is_symlink()) == ("new", True)
    write_output(Path(os.devnull), "nothing")
    assert Path(os.devnull).is_char_device()
