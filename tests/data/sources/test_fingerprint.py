"""Fingerprints notice other content, of whatever size, without reading all of a large file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardtune.data.sources import fingerprint
from shardtune.data.sources.fingerprint import contents, fingerprints, outline


def keys(root: Path, *paths: Path | str) -> list[str | None]:
    return [entry["key"] for entry in fingerprints([str(path) for path in paths], root / "cache")]


def test_a_file_is_known_by_its_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("a")
    other.write_text("a")
    first, second = keys(tmp_path, one, other)
    assert first == second
    one.write_text("b")
    assert keys(tmp_path, one) != [first]


def test_a_directory_is_known_by_names_and_content(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a").write_text("aa")
    first = keys(tmp_path, folder)
    assert keys(tmp_path, folder.rename(tmp_path / "moved")) == first
    folder = tmp_path / "moved"
    (folder / "sub" / "a").write_text("aaa")
    assert keys(tmp_path, folder) != first
    (folder / "sub" / "a").write_text("ab")
    assert keys(tmp_path, folder) != first, "other content of the same size"
    (folder / "sub" / "a").write_text("aa")
    (folder / "b").write_text("")
    assert keys(tmp_path, folder) != first


def test_what_is_no_file_has_no_key(tmp_path: Path) -> None:
    assert keys(tmp_path, "someone/a-data-set", "*.jsonl") == [None, None]


def test_content_by_file(tmp_path: Path) -> None:
    assert contents(tmp_path / "none") == {"": "missing"}
    (tmp_path / "inner").mkdir()
    (tmp_path / "README.md").write_text("left out")
    for name in ("a.bin", "inner/b.bin", ".hidden"):
        (tmp_path / name).write_text("1234567")
    before = contents(tmp_path)
    assert before.keys() == {"", "a.bin", "inner/b.bin"}
    assert before["a.bin"].startswith("7 bytes, content ")
    assert before[""].startswith("2 files, names ")
    (tmp_path / "inner/b.bin").write_text("1234568")
    after = contents(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"inner/b.bin"}
    (tmp_path / "a.bin").rename(tmp_path / "c.bin")
    assert contents(tmp_path)[""] != before[""]
    assert contents(tmp_path / "*.bin").keys() == {"", str(tmp_path / "c.bin")}


def test_a_large_file_is_sampled_and_a_directory_of_many_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    header = b'{"a": {"dtype": "U8", "shape": [3000000], "data_offsets": [0, 3000000]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(3_000_000)
    file.write_bytes(content)
    before = contents(file)
    for place in (20, (len(content) - 4096) * 64 // 127 + 5, len(content) - 1):  # the header, a sample, the last
        file.write_bytes(content[:place] + b"\x01" + content[place + 1 :])
        assert contents(file) != before, place
    read = []
    monkeypatch.setattr(fingerprint, "_sampled", lambda path: read.append(path) or "same")
    monkeypatch.setattr(fingerprint, "SAMPLED_FILES", 10)
    for number in range(95):
        (tmp_path / f"{number}.png").touch()
    assert len(contents(tmp_path)) - 1 == len(read) == 10


def test_rows_are_hashed_whole(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    line = b'{"text": "a"}\n'
    content = line * (3_000_000 // len(line))
    (folder / "a.jsonl").write_bytes(content)
    os.utime(folder / "a.jsonl", (1, 1))

    paths = [folder, folder / "a.jsonl", folder / "*.jsonl"]
    before = keys(tmp_path, *paths)
    place = 1_000_011 // len(line) * len(line) + 10
    (folder / "a.jsonl").write_bytes(content[:place] + b"b" + content[place + 1 :])
    os.utime(folder / "a.jsonl", (1, 1))  # as rsync keeps it
    assert all(one != other for one, other in zip(before, keys(tmp_path, *paths), strict=True))


def test_files_of_one_name_that_a_pattern_matches_are_told_apart(tmp_path: Path) -> None:
    for place in ("d/a", "d/b", "d/b/run"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "rows.jsonl").write_text("1")
    (tmp_path / "d/b/run/manifest.json").write_text('{"versions": {"shardtune": "0"}}')

    def of(pattern: str, home: str = "d") -> list[object]:
        path = tmp_path / home / pattern
        return [*keys(tmp_path, path), outline(path), *contents(path).items()]

    for pattern in ("*/rows.jsonl", "**/*.jsonl"):
        before = of(pattern)
        (tmp_path / "d/a/rows.jsonl").write_text("2")
        assert all(one != other for one, other in zip(before[:2], of(pattern)[:2], strict=True))
        (tmp_path / "d/a/rows.jsonl").write_text("1")
        (tmp_path / "d/b/run/rows.jsonl").write_text("2")  # no part of it
        assert of(pattern) == before
        (tmp_path / "d").rename(tmp_path / "e")
        assert of(pattern, "e")[:2] == before[:2]
        (tmp_path / "e").rename(tmp_path / "d")


def test_links_to_folders_count_among_rows_and_not_beside_a_model(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "home/link").symlink_to(tmp_path / "far")
    (tmp_path / "far/a.jsonl").write_text("1")
    rows, files = keys(tmp_path, tmp_path / "home"), contents(tmp_path / "home")
    (tmp_path / "far/a.jsonl").write_text("22")
    assert keys(tmp_path, tmp_path / "home") != rows
    assert contents(tmp_path / "home") == files
