"""What is wrong with a reward or a config is found before a model is loaded."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import redness, toy

from flowrl.api.arguments import config_of
from flowrl.config.load import Config
from flowrl.core.errors import RewardError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_call import try_out
from flowrl.runs.train import train
from flowrl.training.run import first_batch
from flowrl.training.trainer import Trainer


def typo(images: Tensor, prompts: list[str]) -> Tensor:
    return images.meen((1, 2, 3))  # type: ignore


def short_answer(images: Tensor, prompts: list[str]) -> list[float]:
    return [0.5]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (typo, "reward 'mine' failed with AttributeError: .*meen"),
        (short_answer, r"reward 'mine': expected 2 numbers, one per image, got shape \[1\]"),
    ],
)
def test_a_mistake_in_a_reward_is_found_before_anything_is_loaded(
    tmp_path: Path, reward: Any, said: str
) -> None:
    config = toy(tmp_path, "model={fn: toykit.unloadable}")  # or its own error would come
    with pytest.raises(RewardError, match=f"two random images, before anything is loaded: {said}"):
        train(config_of(config, rewards={"mine": reward}), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(toy(tmp_path, "train.iterations=1"), tmp_path / "run")
    said = capsys.readouterr().err
    expected = "asking red, strict about two random images of 16 x 16 before anything is loaded"
    assert expected in said and said.index(expected) < said.index("run folder")


def asked(config: Config, rewards: dict[str, Any]) -> RewardBatch:
    """Try rewards out -> what they were asked about."""
    seen: list[RewardBatch] = []

    def watching(batch: RewardBatch) -> Tensor:
        seen.append(batch)
        return redness(batch)

    from flowrl.core.prompts import load_prompts

    batch = first_batch(load_prompts(config.prompts.train), config, 1)
    try_out({**rewards, "watching": watching}, batch)
    return seen[0]


def test_what_they_are_asked(tmp_path: Path) -> None:
    """Noise of the run's size, floats in [0, 1], with the first two records."""
    batch = asked(toy(tmp_path), {})
    assert batch.images.shape == (2, 3, 16, 16) and batch.images.dtype == torch.float32
    assert 0 <= float(batch.images.min()) < 0.1 < 0.9 < float(batch.images.max()) <= 1
    assert batch.prompts == ["a red dot", "a green dot"]
    assert [record["tag"] for record in batch.meta] == ["even", "odd"]


class Once:
    """A reward that counts, draws by chance, and is of a kind that is not asked, or not."""

    def __init__(self, **kinds: bool) -> None:
        self.calls = 0
        vars(self).update(kinds)

    def __call__(self, batch: RewardBatch) -> Tensor:
        self.calls += 1
        return torch.rand(len(batch.images)) * random.random()


def test_nothing_remembers_it(tmp_path: Path) -> None:
    """Neither the reward nor the global random streams; people and judges of latents are not
    asked."""
    counting = Once()
    states = torch.get_rng_state(), random.getstate()
    people, latents = Once(asks_people=True), Once(sees_latents=True)
    asked(toy(tmp_path), {"counting": counting, "people": people, "latents": latents})
    assert [counting.calls, people.calls, latents.calls] == [0, 0, 0]
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_a_run_begins_with_a_reward_that_counts(tmp_path: Path) -> None:
    """What it counted is the iteration's calls."""
    counting = Once()
    config = config_of(toy(tmp_path), rewards={"counting": counting})
    trainer = Trainer(config)
    trainer.step()
    assert counting.calls == 1 and os.getpid()
