"""A stand-in of the Hub's HTTP API on this machine: repositories, preupload, LFS, commits; it records every request."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants

TOKEN = "hf_" + "Qz7" * 11
REPO = r"[\w.-]+/[\w.-]+"


@dataclass
class Repository:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b""}})


@dataclass
class Hub:
    """What a stand-in holds, and what it was asked.

    Attributes:
        role: of the token.
        fails: a status code with which every commit is refused.
        requests: method, path, headers and body of each request.
    """

    user: str = "me"
    role: str = "write"
    fails: int = 0
    endpoint: str = ""
    repos: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """The files of a branch, without the one that every repository begins with."""
        held = self.repos[repo].branches[branch]
        return {name: content for name, content in held.items() if name != ".gitattributes"}

    def commit(self, repo: str, branch: str, body: bytes) -> None:
        held = self.repos[repo].branches[branch]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                held[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                held[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del held[value["path"]]


@contextmanager
def standing_in() -> Iterator[Hub]:
    """A stand-in that serves meanwhile."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def replaced_hub() -> Iterator[Hub]:
    """A stand-in to which this process, and those that it starts, publish meanwhile, with `TOKEN`."""
    with standing_in() as hub, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            patch.setattr(constants, name, value)
        for name, value in {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
        }.items():
            patch.setenv(name, value)
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, self.path, dict(self.headers), body))
        for pattern, handler in ROUTES:
            found = re.fullmatch(pattern, f"{self.command} {path}")
            if found is not None:
                handler(self, body, *found.groups())
                return
        self.answer(404, {"error": f"no such place: {path}"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, status: int, value: object = None, *, raw: bytes | None = None, **headers: str) -> None:
        content = json.dumps(value).encode() if raw is None else raw
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def whoami(self, _: bytes) -> None:
        token = {"displayName": "t", "role": self.hub.role}
        if self.headers.get("Authorization") is None:
            self.answer(401, {"error": "no token"})
        else:
            self.answer(200, {"type": "user", "name": self.hub.user, "orgs": [], "auth": {"accessToken": token}})

    def info(self, _: bytes, repo: str, branch: str | None = None) -> None:
        if repo not in self.hub.repos:
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        held = self.hub.repos[repo]
        self.answer(200, {"_id": "1", "id": repo, "sha": "a" * 40, "private": held.private, "siblings": []})

    def create(self, body: bytes) -> None:
        given = json.loads(body)
        repo = f"{given['organization'] or self.hub.user}/{given['name']}"
        url = {"url": f"{self.hub.endpoint}/{repo}", "name": repo, "id": "1"}
        if repo in self.hub.repos:
            self.answer(409, {**url, "error": "exists"})
            return
        private = given.get("visibility", "private" if given.get("private") else "public")
        self.hub.repos[repo] = Repository(private == "private")
        self.answer(200, url)

    def branch(self, _: bytes, repo: str, name: str) -> None:
        branches = self.hub.repos[repo].branches
        known = name in branches
        branches.setdefault(name, dict(branches["main"]))
        self.answer(409 if known else 201, {})

    def tree(self, _: bytes, repo: str, branch: str) -> None:
        held = self.hub.repos[repo].branches[branch]
        self.answer(
            200,
            [{"type": "file", "path": name, "size": len(data), "oid": _blob(data)} for name, data in held.items()],
        )

    def preupload(self, body: bytes, repo: str, branch: str) -> None:
        files = json.loads(body)["files"]
        held = self.hub.repos[repo].branches[branch]
        self.answer(200, {"files": [self._mode(file, held) for file in files]})

    @staticmethod
    def _mode(file: dict[str, Any], held: dict[str, bytes]) -> dict[str, Any]:
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        before = held.get(file["path"])
        return {
            "path": file["path"],
            "uploadMode": mode,
            "shouldIgnore": False,
            "oid": None if before is None or mode == "lfs" else _blob(before),
        }

    def batch(self, body: bytes, repo: str) -> None:
        objects = []
        for one in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.endpoint}/storage/{one['oid']}"}
            verify = {"href": f"{self.hub.endpoint}/storage/verify"}
            known = one["oid"] in self.hub.objects
            objects.append({**one, **({} if known else {"actions": {"upload": upload, "verify": verify}})})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.answer(200, {})

    def verify(self, body: bytes) -> None:
        self.answer(200 if json.loads(body)["oid"] in self.hub.objects else 404, {})

    def validate(self, _: bytes) -> None:
        self.answer(200, {"errors": [], "warnings": []})

    def commit(self, body: bytes, repo: str, branch: str) -> None:
        if self.hub.fails:
            self.answer(self.hub.fails, {"error": "not today"})
            return
        self.hub.commit(repo, branch, body)
        oid = hashlib.sha1(body).hexdigest()
        url = f"{self.hub.endpoint}/{repo}/commit/{oid}"
        self.answer(200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def resolve(self, _: bytes, repo: str, branch: str, name: str) -> None:
        data = self.hub.repos[repo].branches[branch][name]
        self.answer(200, raw=data, ETag=f'"{_blob(data)}"', X_Repo_Commit="a" * 40)


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


ROUTES = (
    ("GET /api/whoami-v2", _Handler.whoami),
    ("POST /api/repos/create", _Handler.create),
    ("POST /api/validate-yaml", _Handler.validate),
    (f"GET /api/models/({REPO})", _Handler.info),
    (f"GET /api/models/({REPO})/revision/([^/]+)", _Handler.info),
    (f"POST /api/models/({REPO})/branch/([^/]+)", _Handler.branch),
    (f"GET /api/models/({REPO})/tree/([^/]+)", _Handler.tree),
    (f"POST /api/models/({REPO})/preupload/([^/]+)", _Handler.preupload),
    (f"POST /api/models/({REPO})/commit/([^/]+)", _Handler.commit),
    (rf"POST /({REPO})\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT /storage/([0-9a-f]{64})", _Handler.store),
    ("POST /storage/verify", _Handler.verify),
    (f"(?:GET|HEAD) /({REPO})/resolve/([^/]+)/(.+)", _Handler.resolve),
)
