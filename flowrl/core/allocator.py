"""How the C library hands out memory: on a CPU, new memory costs as much as arithmetic."""

from __future__ import annotations

import ctypes
import os
import sys

# numbers of glibc's mallopt (malloc.h)
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
KEPT = 2**31 - 1  # bytes of free memory at the end of the heap; mallopt takes an int
STEP = 64 * 2**20  # bytes by which the heap grows
OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # beginnings of variables of a user's own choice


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, for the next tensor. Say whether that was done.

    By default glibc gives each large block back to the system when it is freed, and the next tensor
    of that size starts on new pages, which the system fills with zeros first. A network of a few
    million weights allocates such a block in every layer. No number changes; the time does
    (`scripts/research/allocator.py`).

    Nothing happens without glibc, or where the user has chosen an allocator or its settings.
    """
    if not sys.platform.startswith("linux") or any(name.startswith(OWN) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    # no block is mapped on its own, and the heap does not shrink
    asked = {MMAP_MAX: 0, TRIM_THRESHOLD: KEPT, TOP_PAD: STEP}
    done = [mallopt(option, value) for option, value in asked.items()]
    return all(done)
