"""Keep diffusers and transformers from writing to the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import diffusers
import transformers


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep the libraries from drawing bars while files are read; downloads show theirs."""
    shown = [
        log
        for log in (diffusers.utils.logging, transformers.utils.logging)
        if log.is_progress_bar_enabled()
    ]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep diffusers and transformers from logging what flowrl says itself, or what nobody needs to
    know."""
    logs = (diffusers.utils.logging, transformers.utils.logging)
    before = [log.get_verbosity() for log in logs]
    try:
        for log in logs:
            log.set_verbosity_error()
        yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.set_verbosity(level)
