"""A pattern with `**` matches what `glob` matches; where links lead back, each file once."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from shardtune.data.sources.found_files import fixed_part, matching


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.x", "b/a.x", "b/c/a.x", "b/c/b.y", "b/.h/a.x", ".h/a.x", ".a.x", "d/c/[e]/a.x", "d/c/e f/b.y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    [
        *("**", "**/*", "**/*.x", "**/a.?", "b/**", "*/**/*.x", "**/c/*", "**/c/**/*.x", "b/**/.h/*.x", ".h/**/*.x"),
        *("**/[[]e]/*", "d/**/e f/*", "*/c/**", "no/**", "**/no", "b**/*", "*/*", "*.x", "./**/*.x", "**/**/*.y"),
    ],
)
def test_patterns(home: Path, pattern: str) -> None:
    for given in (pattern, f"{home}/{pattern}"):
        expected = {Path(match) for match in glob.glob(given, recursive=True)}
        assert matching(given).files == sorted((path for path in expected if path.is_file()), key=str)


@pytest.mark.parametrize("pattern", ["d/c/[e]/*.x", "d/c/[e]/**", "d/c/[[]e]/*", "d/*/[[]e]/*", "*/c/[[]e]/*.x"])
def test_brackets_in_the_name_of_a_folder(home: Path, pattern: str) -> None:
    for given in (pattern, f"{home}/{pattern}"):
        assert [file.relative_to(home) if file.is_absolute() else file for file in matching(given).files] == [
            Path("d/c/[e]/a.x")
        ]
    assert matching("d/[bc]/*/a.x").files == [Path("d/c/[e]/a.x")]
    assert fixed_part("d/c/[e]/*.x") == Path("d/c/[e]")


def test_links_that_lead_back(home: Path) -> None:
    for name in ("b/up", "b/again", "b/c/up", "d/other"):
        (home / name).symlink_to(home / "b" if name.startswith("d") else home)
    assert [str(file) for file in matching("**/*.x").files] == ["a.x", "b/a.x", "b/c/a.x", "d/c/[e]/a.x"]
    assert [str(file) for file in matching("d/other/**/b.y").files] == ["d/other/again/d/c/e f/b.y", "d/other/c/b.y"]


def test_the_fixed_part(home: Path) -> None:
    assert [str(fixed_part(text)) for text in ("a/b/*.x", "**/a", "/c/?/d", "a/b")] == ["a/b", ".", "/c", "a/b"]
