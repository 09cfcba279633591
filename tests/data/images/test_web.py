"""Images of the web: only from hosts that are allowed, never from inside a network, and not for ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shardtune.data.encoder import RowError
from shardtune.data.images import web


class Server(BaseHTTPRequestHandler):
    """Redirects /to?URL there, gives bytes at /image, and a byte now and then at /drip."""

    def do_GET(self) -> None:
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        for _ in range(100 if self.path == "/drip" else 1):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05 if self.path == "/drip" else 0)

    def log_message(self, format: str, *args: object) -> None:
        """Silently."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    serving = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    serving.daemon_threads = True
    threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
    yield serving.server_port
    serving.shutdown()
    serving.server_close()


@pytest.fixture
def url(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server under the name `public.test`, with 127.0.0.1 as if it were an address of the Internet."""

    def looked_up(host: str, port: int, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        address = {"public.test": "127.0.0.1", "inside.test": "10.0.0.7"}.get(host, host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    public = web.is_public
    monkeypatch.setattr(web, "is_public", lambda address: address == "127.0.0.1" or public(address))
    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    return f"http://public.test:{port}"


def refused(url: str, *hosts: str) -> str:
    with pytest.raises(RowError) as error:
        web.fetch(url, hosts)
    assert error.value.reason.startswith(f"the image {url} cannot be fetched: ")
    return error.value.reason


def test_only_hosts_that_the_recipe_names(url: str) -> None:
    assert "data.image_hosts allows no host; add public.test to it" in refused(f"{url}/image")
    assert "data.image_hosts is ['other.test']; add public.test" in refused(f"{url}/image", "other.test")
    for hosts in (["public.test"], ["*"], ["*.test"], ["PUBLIC.test"]):
        assert web.fetch(f"{url}/image", hosts) == b"x"
    assert "add evilpublic.test" in refused("http://evilpublic.test/image", "public.test", "*.public.test")


def test_each_redirect_is_checked_like_the_first_address(url: str) -> None:
    assert web.fetch(f"{url}/to?/image", ["public.test"]) == b"x"
    assert "inside.test is 10.0.0.7, an address of this machine or" in refused(f"{url}/to?http://inside.test/", "*")
    assert "add inside.test" in refused(f"{url}/to?http://inside.test/", "public.test")
    assert "neither http nor https" in refused(f"{url}/to?file:///etc/passwd", "*")
    assert "more than 5 redirects" in refused(f"{url}/to?" + "/to?" * 6, "*")


def test_a_server_that_never_ends_is_left(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "FETCH_SECONDS", 0.2)
    began = time.monotonic()
    assert "longer than 0 s" in refused(f"{url}/drip", "*")
    assert time.monotonic() - began < 2


def test_no_more_than_the_largest_size(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_BYTES", 2)
    assert "larger than" in refused(f"{url}/drip", "*")


@pytest.mark.parametrize(
    "word", ["http://", "http://[::1/", "http://public.test:port/", "https:", "http://a b/", "http://\u00ad/"]
)
def test_what_is_no_address(word: str) -> None:
    refused(word, "*")


def test_addresses_that_are_not_of_the_internet() -> None:
    inside = """127.0.0.1 127.9.9.9 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 224.0.0.1
    240.0.0.1 255.255.255.255 192.0.2.1 ::1 :: fe80::1 fe80::1%eth0 fc00::1 fd12::1 ff02::1 ::ffff:127.0.0.1
    ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: 2001:0:7f00:1::"""
    assert [address for address in inside.split() if web.is_public(address)] == []
    assert all(map(web.is_public, ["1.1.1.1", "93.184.215.14", "2606:4700:4700::1111", "::ffff:1.1.1.1"]))
