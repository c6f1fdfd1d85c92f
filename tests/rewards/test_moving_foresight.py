"""MIND-V's reward on moving shapes: what the included world model foresees, and that a video which
stands still does not win."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.config.load import load_config
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.moving_shapes import EVERY, SIZE, paint_video
from flowrl.training.trainer import Trainer

CONFIG = load_config("shapes/mind_v")


def judged(name: str, videos: Tensor) -> Tensor:
    """Score videos [L, T, 3, H, W], one of each scene, by a reward as the config has it."""
    meta: list[dict[str, Any]] = [scene.record for scene in EVERY]
    prompts = [scene.prompt for scene in EVERY]
    count = len(EVERY)
    batch = RewardBatch(videos, prompts, torch.arange(count), meta, torch.zeros(count))
    scores: Tensor = CONFIG.call(f"rewards.{name}")()(batch)
    return scores


@pytest.fixture(scope="module")
def videos() -> dict[str, Tensor]:
    """Right films of all scenes, and what is broken about them: a frame of a film from elsewhere, a
    film that stands still, one without an object."""
    draw = torch.Generator().manual_seed(3)
    right = torch.stack([paint_video(scene, draw, anywhere=True) for scene in EVERY])
    other = torch.stack([paint_video(scene, draw, anywhere=True) for scene in EVERY])
    cut = right.clone()
    cut[:, 3] = other[:, 0]
    still = right[:, :1].expand_as(right).contiguous()
    empty = right[:, :, :, :1, :1].expand(-1, -1, -1, SIZE, SIZE).contiguous()
    return {"right": right, "cut": cut, "still": still, "empty": empty}


def test_what_moves_on_is_foreseen_and_a_cut_is_not(videos: dict[str, Tensor]) -> None:
    """Measured: .03 on average, and in every scene."""
    right, cut = judged("physics", videos["right"]), judged("physics", videos["cut"])
    assert float(right.mean()) > float(cut.mean()) + 0.02
    assert float((right > cut).double().mean()) > 0.9


def test_a_still_video_does_not_win(videos: dict[str, Tensor]) -> None:
    """It is foreseen as well as one that moves, which is the trap; in the sum of both rewards, with
    the config's weights, the right film is ahead of the still and of the empty one in every
    scene."""
    physics = {name: judged("physics", some) for name, some in videos.items()}
    assert float(physics["still"].mean()) > float(physics["right"].mean()) - 0.02
    weights = {name: CONFIG.to_dict()["rewards"][name]["weight"] for name in ("moving", "physics")}
    total = {}
    for name, some in videos.items():
        total[name] = weights["moving"] * judged("moving", some)
        total[name] += weights["physics"] * physics[name]
    for name in ("still", "empty"):
        assert bool((total["right"] > total[name]).all()), name


@pytest.mark.integration
def test_one_iteration_on_the_video_model() -> None:
    """The ratio is 1 before the first update, both rewards are there, and the weights move."""
    trainer = Trainer(load_config("shapes/mind_v", ["train.prompts=2", "train.warmup=0"]))
    before = {name: p.detach().clone() for name, p in trainer.params.items()}
    metrics = trainer.step()
    assert metrics["on_policy_gap"] < 1e-5 and metrics["grad_norm"] > 0
    assert -1 <= metrics["reward/physics"] <= 1 and 0 <= metrics["reward/moving"] <= 1
    assert any(not torch.equal(p, before[name]) for name, p in trainer.params.items())
