"""Files of a task of the user's own: another content is another key, the same content elsewhere is not."""

from __future__ import annotations

from pathlib import Path

from shardtune.data.sources.fingerprint import fingerprints


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


def test_a_directory_is_known_by_names_and_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a").write_text("aa")
    first = keys(tmp_path, folder)
    assert keys(tmp_path, folder.rename(tmp_path / "moved")) == first
    folder = tmp_path / "moved"
    (folder / "sub" / "a").write_text("aaa")
    assert keys(tmp_path, folder) != first
    (folder / "sub" / "a").write_text("aa")
    (folder / "b").write_text("")
    assert keys(tmp_path, folder) != first


def test_what_is_no_file_has_no_key(tmp_path: Path) -> None:
    assert keys(tmp_path, "someone/a-data-set", "*.jsonl") == [None, None]
