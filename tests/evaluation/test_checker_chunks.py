"""The checker looks at images a few at a time, in threads: what it says stays the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paintkit import EVERY
from torch import Tensor

from flowrl.evaluation.suites.shapes import detect as detect_module
from flowrl.evaluation.suites.shapes.detect import detect
from flowrl.evaluation.suites.shapes.prompts import scenes_for
from flowrl.evaluation.suites.shapes.scene import render


def images() -> Tensor:
    """Scenes of all tasks, noisy ones, noise and a flat image."""
    rng = np.random.default_rng(0)
    clean = render(scenes_for(EVERY[::3], rng))
    noise = torch.from_numpy(rng.random(clean.shape, np.float32))
    every = [clean, 0.8 * clean + 0.2 * noise, noise[:2], torch.full_like(noise[:1], 0.95)]
    return torch.cat(every)


@pytest.mark.parametrize(("size", "threads"), [(1, 1), (7, 1), (7, 3)])
def test_every_field_is_that_of_one_look(
    size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = images()
    monkeypatch.setattr(detect_module, "CHUNK", len(some))
    whole = detect(some, find_flaws=True)
    monkeypatch.setattr(detect_module, "CHUNK", size)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for name, one, parts in zip(whole._fields, whole, detect(some, find_flaws=True), strict=True):
        assert one is not None and parts is not None and np.array_equal(one, parts), name


def test_no_images() -> None:
    assert len(detect(torch.zeros(0, 3, 64, 64)).number) == 0
