"""Memory between runs goes back to the system."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flowrl.core.free_memory import free_memory


def _resident() -> int:
    """MiB that the process holds, by the kernel's own count."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count is read")
def test_freed_blocks_go_back_to_the_system() -> None:
    """Of 256 MiB in small blocks, of which each 500th stays, nearly all can go back."""
    start = _resident()
    blocks = [bytearray(b"x" * 50_000) for _ in range(5400)]
    assert _resident() - start > 200
    kept = blocks[::500]
    del blocks
    free_memory()
    assert _resident() - start < 60 and len(kept) == 11
