"""Requests of the file system that wait together."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shardtune.checkpoint.at_once import FEW, THREADS, at_once
from shardtune.checkpoint.atomic import remove_files


@pytest.mark.parametrize("number", [0, 1, FEW, FEW + 1, 1000])
def test_answers_are_in_the_order_of_the_items(number: int) -> None:
    assert at_once(lambda item: 2 * item, range(number)) == [2 * item for item in range(number)]


def test_many_requests_wait_together() -> None:
    """The first of each thread waits for those of all others."""
    all_of_them, met = threading.Barrier(THREADS), threading.local()

    def request(_: int) -> None:
        if not vars(met):
            met.once = True
            all_of_them.wait(timeout=30)

    at_once(request, range(20 * THREADS))


@pytest.mark.parametrize("number", [3, 500])
def test_what_the_first_of_the_items_raises_is_raised(number: int) -> None:
    def request(item: int) -> None:
        if item in (1, 2, number - 1):
            raise OSError(item)

    with pytest.raises(OSError, match=r"^1$"):
        at_once(request, range(number))


def test_a_folder_of_many_files_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for part in ("model", "model/more", "optimizer"):
        (folder / part).mkdir(parents=True)
        for number in range(FEW):
            (folder / part / f"{number}").write_text("rows")
    (folder / "link").symlink_to(tmp_path)
    remove_files(folder)
    assert not folder.exists()
    remove_files(folder)  # which is gone
    assert tmp_path.exists()
