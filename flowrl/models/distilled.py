"""A warning for models that were distilled to a few steps."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

FEW_STEPS = re.compile(r"(?<![a-z])(schnell|turbo|lightning|hyper)(?![a-z])", re.IGNORECASE)


def warn_if_distilled(path: str, *, known: bool = False) -> None:
    """Warn if a model is known to be distilled to a few steps, or has a name that says so. Called
    by the function that loads a model, on behalf of who called that one."""
    if known or FEW_STEPS.search(Path(path).name):
        warnings.warn(
            f"{path} looks distilled to a few steps, like FLUX.1-schnell. Users of several methods "
            "report that such models blur and collapse under reinforcement learning: watch the "
            "image grids, keep a KL penalty and a low learning rate, or train the model that it "
            "was made of, such as FLUX.1-dev",
            stacklevel=4,
        )
