"""The script that trains a judge of latents on shapes: which pairs it learns from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scriptkit import script_module

from flowrl.core.types import RewardBatch

SCRIPT: Any = script_module("assets/shapes_latent_preference")


class FewPrompts(SCRIPT.Pool):  # type: ignore[misc]
    """A pool whose verdicts are made up: an image is right for prompts of its own parity."""

    def __init__(self) -> None:
        self.own = torch.arange(6).repeat_interleave(4)
        self.tasks = [[0, 1, 2], [3, 4, 5]]

    def right(self, prompts: torch.Tensor) -> torch.Tensor:
        """Say so of image k, which is even or odd."""
        return (torch.arange(len(self.own)) - prompts) % 2 == 0


def test_pairs_are_a_right_and_a_wrong_image_of_one_prompt() -> None:
    pool = FewPrompts()
    pairs = SCRIPT.Pairs(pool, 5, torch.Generator().manual_seed(0))
    better, worse, prompts = pairs.batch(400)
    assert bool(((better - prompts) % 2 == 0).all()) and bool(((worse - prompts) % 2 == 1).all())
    # other prompts are of the task of the image
    assert torch.equal(pool.own[better] // 3, prompts // 3)
    assert torch.equal(pool.own[worse] // 3, prompts // 3)
    # every second pair is of a prompt's own images; of the others every second wrong image is
    own = pool.own[better] == prompts
    assert bool(own[1::2].all()) and not bool(own[::2].all())
    wrong = pool.own[worse] == prompts
    assert bool(wrong[1::2].all()) and bool(wrong[::4].all()) and not bool(wrong[2::4].all())
    again = SCRIPT.Pairs(pool, 5, torch.Generator().manual_seed(0)).batch(400)
    assert torch.equal(again[0], better) and torch.equal(again[1], worse)


@pytest.mark.integration
def test_verdicts_are_the_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the reward `shapes` on the decoded latents, prompt by prompt."""
    monkeypatch.setattr(SCRIPT, "groups_of", lambda *_: [])
    pool = SCRIPT.Pool("validation", 2, seed=3)
    assert pool.own.tolist() == torch.arange(66).repeat_interleave(2).tolist()
    config = SCRIPT.load_config("shapes/best_of_n", [])
    strict = SCRIPT.Trainer(config).rewards["strict"]
    with torch.no_grad():
        images = SCRIPT.Trainer(config).model.decode(pool.x0).float()
    for shift in (0, 1):
        asked = (pool.own + shift) % 66
        records = [pool.records[k] for k in asked.tolist()]
        texts = [pool.texts[k] for k in asked.tolist()]
        score = strict(RewardBatch(images, texts, asked, records, torch.zeros(132)))
        assert torch.equal(pool.right(asked), score > 0.5)
    assert 0.4 < float(pool.right(pool.own).float().mean()) < 0.9  # the base model has 0.65
