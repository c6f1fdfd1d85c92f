"""All that flowrl reads and others have written, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fuzzfiles import PROMPTS, checkpoints, configs, images, prompts
from fuzzkit import Target
from fuzzservers import addresses, answers, judge_texts, judges, requests


def targets(home: Path) -> dict[str, Callable[[], Target]]:
    """Return what makes each target, by name; `home` is for what they write."""
    return {
        "configs": partial(configs, home),
        **{f"prompts{suffix}": partial(prompts, suffix) for suffix in PROMPTS},
        "checkpoints": partial(checkpoints, home),
        "requests": requests,
        "addresses": addresses,
        "answers": answers,
        "judges": judges,
        "judge texts": judge_texts,
        "images": images,
    }
