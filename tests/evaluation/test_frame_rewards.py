"""Image rewards on a model that makes videos, and video rewards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import toy

from flowrl.config.calls import Call
from flowrl.core.abilities import (
    asks_people,
    differentiable,
    ignores_quality,
    judges_singly,
)
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_call import PerFrame, ask, fitting
from rewards.novelty import novelty
from rewards.votes import votes


def brightness(batch: RewardBatch) -> Tensor:
    return batch.images.mean((1, 2, 3))


def motion(batch: RewardBatch) -> Tensor:
    return batch.images.diff(dim=1).abs().mean((1, 2, 3, 4))


motion.judges_videos = True  # type: ignore[attr-defined]


def videos(*frames: list[float]) -> RewardBatch:
    """Return videos of frames of one grey each."""
    count = len(frames)
    levels = torch.tensor(frames, dtype=torch.float32)[:, :, None, None, None].expand(
        -1, -1, 3, 2, 2
    )
    meta: list[dict[str, Any]] = [{"prompt": str(i)} for i in range(count)]
    names = [record["prompt"] for record in meta]
    return RewardBatch(levels, names, torch.tensor([0] * count), meta, torch.zeros(count))


@pytest.mark.parametrize(
    ("way", "expected"),
    [("mean", [0.5, 0.5]), ("min", [0.25, 0.0]), ("first", [0.25, 1.0]), ("last", [0.75, 0.5])],
)
def test_an_image_reward_judges_frames_as_the_config_says(way: str, expected: list[float]) -> None:
    """By hand: frames of grey .25 .5 .75 and 1 0 .5."""
    batch = videos([0.25, 0.5, 0.75], [1.0, 0.0, 0.5])
    assert ask("grey", PerFrame(brightness, way), batch, "here").tolist() == expected


def test_a_frame_without_a_score_and_a_wrong_number_of_scores() -> None:
    def some(batch: RewardBatch) -> list[float | None]:
        return [None if value == 0 else value for value in brightness(batch).tolist()]

    scores = ask("some", PerFrame(some, "mean"), videos([0.5, 0.5], [1.0, 0.0]), "here")
    assert scores[0] == 0.5 and scores[1].isnan()
    with pytest.raises(RewardError, match="reward 'one': expected 4 numbers, one per frame"):
        ask("one", PerFrame(lambda batch: torch.ones(2), "min"), videos([0, 0], [0, 0]), "here")


def test_prompts_records_and_groups_follow_the_frames() -> None:
    """A prompt's frames of one time are compared with each other: 2 prompts of 2 videos."""
    seen: list[RewardBatch] = []

    class Spy:
        judges_singly = True
        differentiable = True

        def __call__(self, batch: RewardBatch) -> Tensor:
            seen.append(batch)
            return brightness(batch)

    reward, batch = PerFrame(Spy(), "mean"), videos([0, 0], [0, 0], [0, 0], [0, 0])
    reward(batch._replace(group=torch.tensor([0, 0, 1, 1])))
    assert judges_singly(reward) and differentiable(reward)
    assert seen[0].prompts == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert [record["prompt"] for record in seen[0].meta] == seen[0].prompts
    assert seen[0].group.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_reward_that_asks_people_still_does_frame_by_frame() -> None:
    """The two that ship and say so: people are left alone by evaluations, and a reward of how
    frames differ may like a damaged one."""
    people = PerFrame(votes(folder="unused"), "first")
    assert asks_people(people) and not ignores_quality(people)
    unlike = PerFrame(object.__new__(novelty), "mean")
    assert ignores_quality(unlike) and not asks_people(unlike)
    assert not asks_people(PerFrame(brightness, "mean"))


def test_rewards_and_models_that_do_not_fit(tmp_path: Path) -> None:
    plain = Call("rewards.pick", "pickscore", "", {})
    whole = Call("rewards.move", "motion", "", {})
    assert fitting(plain, brightness, 1) is brightness and fitting(whole, motion, 5) is motion
    with pytest.raises(ConfigError, match=r"rewards.pick: pickscore judges images, .* 5 frames. "):
        fitting(plain, brightness, 5)
    with pytest.raises(ConfigError, match="rewards.move: motion judges videos, but .* images"):
        fitting(whole, motion, 1)
    both = Call("rewards.move", "motion", "", {}, frames="mean")
    with pytest.raises(ConfigError, match=r"rewards.move.frames: .* 'mean' has no effect"):
        fitting(both, motion, 5)
    # one frame has no mean, and nothing else is to be chosen from it
    ways = Call("rewards.pick", "pickscore", "", {}, frames="mean")
    with pytest.raises(ConfigError, match=r"rewards.pick.frames: the model makes images, .*'mean'"):
        fitting(ways, brightness, 1)
    learned = SimpleNamespace(
        update=0, state_dict=0, load_state_dict=0, trains_policy=0, __call__=0
    )
    learned_type = type("Learned", (), vars(learned))
    with pytest.raises(ConfigError, match="trained along on images"):
        fitting(Call("rewards.adv", "adversarial", "", {}, frames="mean"), learned_type(), 5)
    # as a config says it
    config = toy(tmp_path, "rewards.red.frames=min")
    assert config.rewards["red"].frames == "min"
    assert config.to_dict()["rewards"]["red"]["frames"] == "min"
    with pytest.raises(ConfigError, match="rewards.red.frames: expected"):
        toy(tmp_path, "rewards.red.frames=median")
