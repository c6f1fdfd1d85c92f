"""Before a command has begun and after it has ended: a sign of life while libraries load; Ctrl-C
ends the process at once then, with one line and no traceback, since nothing can be lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import FrameType, ModuleType

STOPPED = 130
SAID = b"\nflowrl: stopped before it began\n"
SLOW = ("torch", "matplotlib", "scipy", "diffusers", "transformers")  # to import, by seconds


class _Announcer(MetaPathFinder):
    """Finds no module; says a line when the first slow one is looked for."""

    def __init__(self, line: str) -> None:
        self.line = line

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Say the line once, in the first of several processes."""
        if name in SLOW:
            sys.meta_path.remove(self)
            if os.environ.get("RANK", "0") == "0":
                print(self.line, file=sys.stderr, flush=True)


def say_when_loading(line: str) -> None:
    """Print a line on stderr as soon as a library is imported that takes seconds; nothing where all
    are there already, or none is needed."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Announcer)]
    if not any(name in sys.modules for name in SLOW):
        sys.meta_path.insert(0, _Announcer(line))


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
