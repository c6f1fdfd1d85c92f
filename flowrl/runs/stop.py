"""Stop a run between two iterations, so that nothing is lost."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from flowrl.core.errors import RunError


class Interrupted(RunError):
    """The user asked to stop; a checkpoint was written first."""


class StopSignal:
    """Turn the first Ctrl-C or SIGTERM into a wish that the loop sees between iterations; a second
    one is immediate."""

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        try:
            self._old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: the host program keeps its own handlers
            self._old = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
