"""Stop a run between two iterations, so that nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from flowrl.core.errors import RunError
from flowrl.core.processes import is_waiting

# Ctrl-C; what a scheduler sends before it kills; a terminal that is closed; Slurm's early warning
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
HEARD = b"\nflowrl: stopping after this iteration, with a checkpoint; once more stops at once\n"


HURRIED = (
    b"\nflowrl: stopping, with a checkpoint: at once, or after this iteration where weights are "
    b"being changed\n"
)
TWICE = 2.0  # seconds in which a second signal is the first one again


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

    Where `repeatable` is given, something kills soon after the signal, as launchers do. Then the
    first signal is immediate, too, as long as `repeatable()` says that what is being done can be
    made again: while a reward or another process is waited for, and wherever `leave` is called.
    What comes after that, or in its first seconds again from a terminal, is the same wish.

    A signal that is ignored stays ignored, as SIGHUP under nohup.
    """

    def __init__(self) -> None:
        self.asked = False
        self.repeatable: Callable[[], bool] | None = None
        self._left, self._when = False, 0.0
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

    def leave(self) -> None:
        """Raise KeyboardInterrupt where a stop was asked for that cannot wait for the iteration,
        and what is being done can be made again."""
        if self.asked and not self._left and self.repeatable is not None and self.repeatable():
            self._left = True
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        hurried = self.repeatable is not None
        # a launcher's signal comes twice from a terminal; and nothing may disturb the save
        if not first:
            if self._left or (hurried and time.monotonic() - self._when < TWICE):
                return
            raise KeyboardInterrupt
        self._when = time.monotonic()
        # no print: the signal may have come in the middle of one
        with contextlib.suppress(OSError):
            os.write(2, HURRIED if hurried else HEARD)
        if is_waiting():
            self.leave()
