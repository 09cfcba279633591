"""Remote data files: patterns, directories, files of a web server, and what is missing."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest

from shardtune.data.sources.resolve import resolve_sources
from shardtune.errors import DataError


def write(number: int) -> bytes:
    return f"{json.dumps({'question': f'{number}?', 'answer': str(number)})}\n".encode()


def rows(sources: list[Any]) -> list[str]:
    return [row["answer"] for source in sources for file in source.files for _, row in source.rows(file)]


class Server(SimpleHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str]]] = []
    names_version = True

    def log_message(self, format: str, *args: Any) -> None:
        self.asked.append((self.command, self.path))

    def send_header(self, keyword: str, value: str) -> None:
        if self.names_version or keyword != "Last-Modified":
            super().send_header(keyword, value)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    Server.asked, Server.names_version = [], True
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_file_of_a_server(address: str, tmp_path: Path, data: Any) -> None:
    """Copied once per version; with its URL as its name, without what may be secret."""
    served = tmp_path / "served/a.jsonl"
    served.write_bytes(write(1) + write(2))
    said: list[str] = []
    url = f"{address}/a.jsonl?signature=secret"
    for _ in range(2):
        sources = resolve_sources(url, data, report=said.append)
        assert rows(sources) == ["1", "2"]
        assert sources[0].files[0].label == f"{address}/a.jsonl"
        assert sources[0].name == "a"
    assert [command for command, _ in Server.asked].count("GET") == 1
    assert next(line for line in said if "copying" in line).startswith(f"data: copying {address}/a.jsonl (")
    assert "secret" not in " ".join(said)
    served.write_bytes(write(3))
    assert rows(resolve_sources(url, data, report=said.append)) == ["3"]
    Server.names_version = False  # then no copy can be trusted
    for number in (4, 5):
        served.write_bytes(write(number))
        assert rows(resolve_sources(url, data, report=said.append)) == [str(number)]
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_patterns_and_directories(data: Any) -> None:
    system = fsspec.filesystem("memory")
    files = {"train-0.jsonl": 1, "train-1.jsonl": 2, "test-0.jsonl": 3, "_left/train-2.jsonl": 4, "notes.txt": 5}
    try:
        for name, number in files.items():
            system.pipe_file(f"/bucket/set/{name}", write(number))
        system.pipe_file("/bucket/set/dataset_info.json", b"{}")
        said = list[str]()
        resolve_sources("memory://bucket/set", data, report=said.append)
        assert "data: left out of memory://bucket/set, as descriptions of data sets: dataset_info.json" in said
        quiet: Any = {"report": lambda _: None}
        assert rows(resolve_sources("memory://bucket/set/train-*.jsonl", data, **quiet)) == ["1", "2"]
        whole = resolve_sources("memory://bucket/set", data, **quiet)
        assert (rows(whole), whole[0].name) == (["1", "2"], "set")
        assert whole[0].files[1].label == "memory:///bucket/set/train-1.jsonl"
        assert rows(resolve_sources("memory://bucket/set", data, purpose="eval", **quiet)) == ["3"]
        assert rows(resolve_sources({"path": "memory://bucket/set", "split": "test"}, data, **quiet)) == ["3"]
        for spec, what in (
            ("memory://bucket/set/x-*", "nothing matches"),
            ("memory://bucket/set/gone.jsonl", "cannot be read: FileNotFoundError"),
            ("memory://bucket/set/notes.txt", "the kind of the file"),
        ):
            with pytest.raises(DataError, match=what):
                resolve_sources(spec, data, **quiet)
    finally:
        system.rm("/bucket", recursive=True)


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_package_that_is_missing(scheme: str, package: str, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"{scheme}:// needs a package") as caught:
        resolve_sources(f"{scheme}://bucket/a.jsonl", data, report=lambda _: None)
    assert str(caught.value.remedy).startswith(f"pip install {package}")
    assert caught.value.where == f"data: {scheme}://bucket/a.jsonl"


def test_what_cannot_be_reached(address: str, data: Any) -> None:
    with pytest.raises(DataError, match="the remote data cannot be read: FileNotFoundError"):
        resolve_sources(f"{address}/gone.jsonl", data, report=lambda _: None)
    with pytest.raises(DataError, match="nowhere:// is not known"):
        resolve_sources("nowhere://a.jsonl", data, report=lambda _: None)
