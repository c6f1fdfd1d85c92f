"""Give memory that is no longer used back to the system, between runs in one process."""

from __future__ import annotations

import ctypes
import gc
import sys


def free_memory() -> None:
    """Collect garbage, and have glibc hand back what it keeps of freed memory; elsewhere the first
    alone. Otherwise freed blocks below the newest ones stay with the process, which grows from run
    to run.
    """
    gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
