"""Connections that a stranger opens and leaves, or feeds with a head that never ends."""

from __future__ import annotations

import resource
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from serving import served

from flowrl.core import connections


async def app(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
    """Answer everything at once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"here"})  # type: ignore[operator]


@contextmanager
def opened(url: str, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections and send some bytes on each."""
    port = int(url.rpartition(":")[2])
    with ExitStack() as held:
        found = []
        for _ in range(count):
            one = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            if first:
                one.sendall(first)
            found.append(one)
        yield found


def answer(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return bytes(reply.read())


def is_closed(one: socket.socket) -> bool:
    """Wait until the server says something or closes."""
    try:
        return one.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def few_files() -> Iterator[None]:
    """As many files as a login shell has: 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nX-A: "])
def test_idle_connections_stop_nobody(first: bytes, few_files: None) -> None:
    """Both ends are in this process: 400 connections are 800 of its 1,024 files."""
    with served(app) as url, opened(url, 400, first):
        assert answer(url) == b"here"


def test_no_head_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with served(app) as url:
        for first in (b"", b"GET / HT"):
            with opened(url, 1, first) as [one]:
                assert is_closed(one)
        # also a head that comes byte by byte, and one after a whole request
        with opened(url, 1) as [one]:
            began = time.monotonic()
            with pytest.raises(OSError):
                for letter in b"GET / HTTP/1.1\r\nX-A: " + b"a" * 1000:
                    one.sendall(bytes([letter]))
                    time.sleep(0.02)
            assert time.monotonic() - began < 10
        with opened(url, 1, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as [one]:
            assert one.recv(100)
            time.sleep(0.5)
            one.sendall(b"G")
            while one.recv(100):  # the rest of the answer, then the end
                pass


def test_the_oldest_idle_connection_of_an_address_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "PER_ADDRESS", 3)
    with served(app) as url, opened(url, 5) as held:
        assert answer(url) == b"here"
        assert is_closed(held[0]) and is_closed(held[1])


def test_how_many_files_there_are(few_files: None) -> None:
    """A quarter of 1,024 is left for other files; a process asks for more where it may."""
    assert connections.most_connections() == 1024 - connections.SPARE
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections.raise_file_limit()
    most = connections.FILES if hard == resource.RLIM_INFINITY else min(hard, connections.FILES)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
