"""What is installed: versions for a run's record, and another package of the name ``flowrl``, whose
files would be mixed with ours."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from flowrl.core.shipped_files import checkout
from flowrl.core.version import __version__

PACKAGES = ("torch", "diffusers", "transformers", "peft", "safetensors", "numpy")


def environment() -> dict[str, Any]:
    """Describe where a run happens: versions, processors, the commit; nothing that names a person
    or a host."""
    # slow to import, and the commands that install an extra are asked for without it
    import torch

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
    # the full hash; "-dirty" at its end means changes of more than the files of results, which a
    # command that keeps what it measured changes itself
    head = ["rev-parse", "HEAD"]
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS}"]
    said = []
    for words in (head, changes):
        command = ["git", "-C", str(root), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        said.append(done.stdout.strip())
    return said[0] + ("-dirty" if said[1] else "")


RESULTS = "assets/results"
DISTRIBUTION = "flowrl-diffusion"
COMMAND = "flowrl.__main__:command"
EARLIER = {COMMAND, "flowrl.cli.main:command"}


def other_package() -> str | None:
    """Say what to do about an installed distribution ``flowrl`` that is not this project; None if
    there is none.

    It has the same import name: one of the two overwrites files of the other, or hides it. An
    installation of this project from before its distribution was called ``flowrl-diffusion`` is
    known by its command.
    """
    try:
        other = importlib.metadata.distribution("flowrl")
    except importlib.metadata.PackageNotFoundError:
        return None
    commands = {e.value for e in other.entry_points if e.group == "console_scripts"}
    if commands & EARLIER:
        return None
    where = Path(str(other.locate_file("flowrl")))
    return (
        f"another package called flowrl ({other.version}) is installed in {where}. It has the same "
        f"import name, and files of the two get mixed: run `pip uninstall flowrl`, then `pip "
        "install --force-reinstall --no-deps -e .` in a checkout of this project"
    )
