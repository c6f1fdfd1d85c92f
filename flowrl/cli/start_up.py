"""Ctrl-C before a command has begun and after it has ended: nothing can be lost then, so the
process ends at once, with one line and no traceback."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

STOPPED = 130
SAID = b"\nflowrl: stopped before it began\n"


def end_quietly_on_interrupt() -> None:
    """Let Ctrl-C end this process at once, while modules are imported or the interpreter ends.

    An exception would not do: what is being imported may catch it, or die of it in other ways. A
    signal that is ignored stays ignored.
    """
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interrupt_as_usual() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, where `end_quietly_on_interrupt` was called."""
    if signal.getsignal(signal.SIGINT) == _end:
        signal.signal(signal.SIGINT, _interrupt)


def was_interrupted() -> bool:
    """Say whether Ctrl-C came since, also if a library made another error of it."""
    return bool(_interrupts)


def end_silently_on_interrupt(code: int) -> None:
    """Let Ctrl-C end this process, which has nothing left to do, with its own exit code."""
    main_thread = threading.current_thread() is threading.main_thread()
    if main_thread and signal.getsignal(signal.SIGINT) in (_end, _interrupt):
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(code))


_interrupts: list[int] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, SAID)
    os._exit(STOPPED)
