"""Where a run happens: versions, processors, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import torch

from flowrl.core.shipped_files import checkout
from flowrl.core.version import __version__

PACKAGES = ("torch", "diffusers", "transformers", "peft", "safetensors", "numpy")


def environment() -> dict[str, Any]:
    """Describe where a run happens: versions, processors, the commit; nothing that names a person
    or a host."""
    return {
        "python": platform.python_version(),
        "flowrl": __version__,
        **{name: _version(name) for name in PACKAGES},
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = checkout()
    if root is None or not (root / ".git").exists():
        return None
    # the full hash, never a tag; "-dirty" at its end means uncommitted changes
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
