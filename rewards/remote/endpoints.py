"""Which of several servers to ask next: the least busy one first, and a rest for one that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .messages import LONGEST


class NoAnswer(Exception):
    """A request that no server answered, with addresses and reasons."""


@dataclass
class Endpoint:
    """One server and how it is doing."""

    url: str
    outstanding: int = 0  # requests that it has not answered yet
    sent: int = 0
    failures: int = 0  # in a row
    rests: int = 0  # in a row
    until: float = 0.0  # end of its rest
    reason: str = ""  # of its last failure


class Endpoints:
    """Hand out servers, with a circuit breaker for each. Thread-safe.

    After `threshold` failures in a row a server rests, first for `rest` seconds and twice as long
    each further time, up to 10 seconds. Then one request tries it: an answer ends the trouble, a
    failure begins the next rest.
    """

    def __init__(
        self,
        urls: list[str],
        *,
        threshold: int = 3,
        rest: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.all = [Endpoint(url) for url in urls]
        self._threshold, self._rest, self._clock = threshold, rest, clock
        self._lock = threading.Lock()

    def take(self, avoid: Endpoint | None = None) -> Endpoint | None:
        """Return the server with the fewest requests outstanding, `avoid` only if there is no
        other; None if all rest.

        Each one taken must be given back.
        """
        with self._lock:
            ready = [one for one in self.all if self._lets_through(one)]
            if not ready:
                return None
            best = min(ready, key=lambda one: (one is avoid, one.outstanding, one.sent))
            best.outstanding += 1
            best.sent += 1
            return best

    def give(self, endpoint: Endpoint) -> None:
        """Give back a server of which nothing was learnt: the request was cancelled."""
        with self._lock:
            endpoint.outstanding -= 1

    def give_answered(self, endpoint: Endpoint) -> None:
        """Give back a server that answered: its troubles are over."""
        with self._lock:
            endpoint.outstanding -= 1
            endpoint.failures = endpoint.rests = 0

    def give_failed(self, endpoint: Endpoint, reason: str) -> None:
        """Give back a server that failed; it may have to rest now."""
        with self._lock:
            endpoint.outstanding -= 1
            endpoint.failures += 1
            endpoint.reason = reason
            resting = (
                self._clock() < endpoint.until
            )  # then this request was under way when the rest began
            if endpoint.failures >= self._threshold and not resting:
                endpoint.until = self._clock() + min(
                    LONGEST, self._rest * 2 ** min(endpoint.rests, 16)
                )
                endpoint.rests += 1

    def soonest(self) -> float:
        """Return the seconds until a server may be asked; 0 = now."""
        with self._lock:
            resting = [
                one.until - self._clock() if one.failures >= self._threshold else 0.0
                for one in self.all
            ]
            return max(0.0, min(resting))

    def reasons(self) -> str:
        """Return the address and the last failure of each server that is in trouble."""
        with self._lock:
            return "; ".join(f"{one.url}: {one.reason}" for one in self.all if one.failures)

    def _lets_through(self, one: Endpoint) -> bool:
        if one.failures < self._threshold:
            return True
        return self._clock() >= one.until and one.outstanding == 0
