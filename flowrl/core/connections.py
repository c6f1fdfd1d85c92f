"""Connections of a server as a stranger may open them: many, idle, or with a request that never
ends. uvicorn itself waits without an end for the head of a request."""

from __future__ import annotations

import asyncio
import resource
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # for the head of a request, from the connection or from its first byte
PER_ADDRESS = 1024  # connections of one address
FILES = 65_536  # that a server asks the system for
SPARE = 256  # of them for other files than connections

_Address = dict["Connection", None]
_servers: WeakKeyDictionary[Any, dict[str, _Address]] = WeakKeyDictionary()
"""Server -> address -> its connections, the oldest first."""


def raise_file_limit() -> None:
    """Raise how many files this process may have open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Return how many connections leave files enough for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = FILES if soft == resource.RLIM_INFINITY else soft
    return max(soft // 2, soft - SPARE)


class Connection(H11Protocol):
    """A connection that is closed where no whole head of a request comes in HEAD_SECONDS. One too
    many of its address, or of all, closes the oldest that asks nothing; where all ask something it
    is closed itself."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a new connection of its address, and wait for its first head."""
        super().connection_made(transport)
        addresses = _servers.setdefault(self.server_state, {})
        host = self.client[0] if self.client else ""
        addresses.setdefault(host, {})[self] = None
        self._wait_for_head()
        # room for this one: of the same address, then of the one that has most
        if len(addresses[host]) > PER_ADDRESS:
            _close_oldest(addresses[host])
        if sum(map(len, addresses.values())) > most_connections():
            _close_oldest(max(addresses.values(), key=len))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.asks():
            self._wait_no_more()
        elif self._late is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        addresses = _servers.get(self.server_state, {})
        host = self.client[0] if self.client else ""
        addresses.get(host, {}).pop(self, None)
        if not addresses.get(host, True):
            del addresses[host]
        super().connection_lost(exc)

    def asks(self) -> bool:
        """Say whether a request of it is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _wait_no_more(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if not self.asks():
            self.transport.abort()


def _close_oldest(connections: _Address) -> None:
    """Close the oldest connection that asks nothing, else the newest one."""
    idle = (one for one in connections if not one.asks())
    chosen = next(idle, None) or next(reversed(connections))
    connections.pop(chosen)
    chosen.transport.abort()
