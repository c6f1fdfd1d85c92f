"""Checks of what only the device knows, all read at once.

A check that is read where it is made lets the host wait for the device in every network call.
Inside `checked_later` the host waits once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Waiting = list[tuple[Tensor, Callable[[], Exception]]]
_WAITING: ContextVar[Waiting | None] = ContextVar("waiting", default=None)


def refuse_if(wrong: Tensor, error: Callable[[], Exception]) -> None:
    """Raise an error if `wrong` [] is true: at once, or at the end of `checked_later`."""
    waiting = _WAITING.get()
    if waiting is not None:
        waiting.append((wrong.detach(), error))
    elif bool(wrong):
        raise error()


@contextmanager
def checked_later() -> Iterator[None]:
    """Put off what `refuse_if` is asked inside -> at the end the first error is raised. After
    another exception nothing is checked."""
    waiting: Waiting = []
    token = _WAITING.set(waiting)
    try:
        yield
    finally:
        _WAITING.reset(token)
    if waiting:
        flags = torch.stack([wrong for wrong, _ in waiting]).tolist()
        for (_, error), flag in zip(waiting, flags, strict=True):
            if flag:
                raise error()
