"""Images of the web: fetched from the hosts that the recipe allows, and never from addresses inside a network."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from shardtune.data.encoder import RowError

KEY = "data.image_hosts"
FETCH_SECONDS = 60.0
"""How long an image may take, with all redirects and repetitions."""
MOST_BYTES = 1 << 28
MOST_REDIRECTS = 5
_ATTEMPTS = 3
_CONNECT_SECONDS = 10.0
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
# Ranges of IPv6 in which an address stands for one of IPv4: NAT64, 6to4 and Teredo.
_TUNNELS = tuple(map(ipaddress.ip_network, ("64:ff9b::/32", "2002::/16", "2001::/32")))


class _ServerFault(Exception):
    """A request that may succeed when it is repeated."""


def fetch(url: str, hosts: Sequence[str]) -> bytes:
    """The content of a URL; after a fault of the server or of the connection the request is repeated.

    Args:
        url: http or https.
        hosts: `data.image_hosts`: names of hosts, `*.name` for all below a name, `*` for any.

    Raises:
        RowError: the host is not allowed, has an address that is not public, or does not deliver; redirects too.
    """
    until = time.monotonic() + FETCH_SECONDS
    try:
        for attempt in range(_ATTEMPTS):
            try:
                return _followed(url, hosts, until)
            except (_ServerFault, OSError, http.client.HTTPException) as error:
                if time.monotonic() > until:
                    raise ValueError(f"it took longer than {FETCH_SECONDS:.0f} s") from error
                if attempt == _ATTEMPTS - 1:
                    raise ValueError(str(error) or type(error).__name__) from error
    except ValueError as error:  # also of a URL that is none
        raise RowError(f"the image {url} cannot be fetched: {error}") from error
    raise AssertionError


def _followed(url: str, hosts: Sequence[str], until: float) -> bytes:
    for _ in range(MOST_REDIRECTS + 1):
        status, location, content = _answer(urlsplit(url), hosts, until)
        if status == http.client.OK:
            return content
        if status not in _REDIRECTS or location is None:
            fault = f"HTTP {status} {http.client.responses.get(status, '')}".strip()
            raise _ServerFault(fault) if status >= http.client.INTERNAL_SERVER_ERROR else ValueError(fault)
        url = urljoin(url, location)
    raise ValueError(f"more than {MOST_REDIRECTS} redirects")


def _answer(url: SplitResult, hosts: Sequence[str], until: float) -> tuple[int, str | None, bytes]:
    """The status of a request, where it redirects to, and its content if it succeeded."""
    host = (url.hostname or "").rstrip(".")
    if url.scheme not in _PORTS or not host:
        raise ValueError(f"{url.geturl()} is neither http nor https")
    if not _is_allowed(host, hosts):
        given = f"{KEY} is {list(hosts)}" if hosts else f"{KEY} allows no host"
        raise ValueError(f"{given}; add {host} to it, or download the image and name the file")
    port = url.port or _PORTS[url.scheme]
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    with closing(kind(host, port)) as connection, _until(until, _connected(host, port)) as raw:
        connection.sock = raw
        if url.scheme == "https":
            secured = ssl.create_default_context().wrap_socket(raw, server_hostname=host)
            connection.sock = secured
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        connection.request("GET", target, headers={"User-Agent": "shardtune", "Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            return answer.status, answer.getheader("Location"), b""
        content = answer.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MB")
    if time.monotonic() > until:  # a connection that is ended looks like the end of the content
        raise TimeoutError
    return answer.status, None, content


@contextmanager
def _until(until: float, connected: socket.socket) -> Iterator[socket.socket]:
    """Ends a connection at a time: a timeout of the socket begins again with each byte."""
    copy = connected.dup()  # securing a connection takes the socket itself away
    timer = threading.Timer(max(0.0, until - time.monotonic()), _shut, [copy])
    timer.daemon = True
    timer.start()
    try:
        yield connected
    finally:
        timer.cancel()
        copy.close()
        connected.close()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _is_allowed(host: str, hosts: Sequence[str]) -> bool:
    return any(
        allowed == "*" or host == allowed.lower() or (allowed.startswith("*.") and host.endswith(allowed[1:].lower()))
        for allowed in hosts
    )


def _connected(host: str, port: int) -> socket.socket:
    """A connection to an address of a host that was checked: a name that is looked up twice may have two answers."""
    addresses = list(
        dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    )
    inside = next((address for address in addresses if not is_public(address)), None)
    if inside is not None:
        raise ValueError(f"{host} is {inside}, an address of this machine or of a network of its own")
    for number, address in enumerate(addresses, 1):
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        except OSError:
            if number == len(addresses):
                raise
    raise ValueError(f"{host} has no address")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the Internet: not loopback, link-local, private, shared or multicast."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if any(found in tunnel for tunnel in _TUNNELS):
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved)
