"""Stop a run between two iterations, so that nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import Any, Protocol

from flowrl.core.errors import RunError

# Ctrl-C; what a scheduler sends before it kills; a terminal that is closed; Slurm's early warning
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
HEARD = b"\nflowrl: stopping after this iteration, with a checkpoint; once more stops at once\n"


class Interrupted(RunError):
    """The user asked to stop; a checkpoint was written first."""


class Stop(Protocol):
    """What tells a run to stop."""

    @property
    def asked(self) -> bool:
        """Tell whether the run is to stop after this iteration."""
        ...


class StopSignal:
    """Turn the first signal into a wish that the loop sees between iterations, and say so at once;
    a second one is immediate.

    A signal that is ignored stays ignored, as SIGHUP under nohup.
    """

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        with contextlib.suppress(ValueError):  # not the main thread: the program has its own
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._old[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        # no print: the signal may have come in the middle of one
        with contextlib.suppress(OSError):
            os.write(2, HEARD)
