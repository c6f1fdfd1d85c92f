"""Import what measures at real size, scripts/bench, whose files import each other by bare names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


def bench_module(name: str) -> Any:
    """Import scripts/bench/<name>.py, once."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))
