"""Rewards that judge images, for models that make videos: frame by frame, if a config says how."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor

from flowrl.config.calls import Call, FrameWay
from flowrl.config.load import Config
from flowrl.core.abilities import LearnedReward, RewardWithProbe
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.reward_traits import (
    asks_people,
    differentiable,
    ignores_quality,
    judges_singly,
    judges_videos,
    least_frames,
)
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_answer import as_tensor, call_reward


def frames_of(config: Config, model: Any = None) -> int:
    """Return how many frames the videos of a config's model have, or of one that is there already;
    1: it makes images."""
    asked = config.model.kwargs.get("frames") if model is None else getattr(model, "frames", 1)
    return int(asked or 1)


def fitting(call: Call, reward: Any, frames: int) -> Any:
    """Return what judges a model's videos of so many frames; 1: images. Raises ConfigError for a
    reward that judges the other kind or longer videos, and for a way to judge frames where there is
    one frame."""
    videos = judges_videos(reward)
    if frames == 1 and videos:
        raise ConfigError(
            f"{call.key}: {call.fn} judges videos, but the model makes images; take a video model "
            "with model.frames above 1, or a reward that judges images"
        )
    if frames == 1 and call.frames:
        raise ConfigError(
            f"{call.key}.frames: the model makes images, so that {call.frames!r} has no effect; "
            "leave it out, or take a video model with model.frames above 1"
        )
    least = least_frames(reward)
    if videos and not call.frames and frames < least:
        raise ConfigError(
            f"{call.key}: {call.fn} judges videos of at least {least} frames as it is set, but the "
            f"model makes {frames}; raise model.frames, or let the reward look at fewer"
        )
    # what is judged is what the model makes
    if frames == 1 or (videos and not call.frames):
        return reward
    if videos:
        raise ConfigError(
            f"{call.key}.frames: {call.fn} judges whole videos, so that {call.frames!r} has no "
            "effect; leave it out"
        )
    # images are judged, videos are made: only the user knows how to get from one to the other
    if not call.frames:
        ways = ", ".join(get_args(FrameWay))
        raise ConfigError(
            f"{call.key}: {call.fn} judges images, but the model makes videos of {frames} frames. "
            f"Say how it judges them, as in {call.key}.frames=mean (there is: {ways}), or take a "
            "reward that judges videos; one of your own says so by `judges_videos = True`, "
            "`remote` by videos: true"
        )
    if isinstance(reward, LearnedReward):
        raise ConfigError(
            f"{call.key}: {call.fn} is trained along on images; with a video model it cannot be"
        )
    return PerFrame(reward, call.frames)


class PerFrame:
    """Judge videos [L, T, 3, H, W] by an image reward -> [L]: the mean or the lowest score of all
    frames, or that of the first or the last. A frame without a score leaves its video without one.

    For rewards that compare images of a prompt, frames of one place in time are a prompt's images.
    """

    judges_videos = True

    def __init__(self, reward: Any, way: str) -> None:
        self.reward, self.way = reward, way
        # what the reward promises of itself holds for its frames, too
        self.judges_singly, self.differentiable = judges_singly(reward), differentiable(reward)
        self.asks_people, self.ignores_quality = asks_people(reward), ignores_quality(reward)
        # only what the reward has: all records are shown to one that checks them
        for name in ("check_record", "check_records"):
            if hasattr(reward, name):
                setattr(self, name, getattr(reward, name))

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score videos [L, T, 3, H, W]. Raises RewardError unless there is a number per frame."""
        shown = {"first": slice(0, 1), "last": slice(-1, None)}.get(self.way, slice(None))
        images = batch.images[:, shown]
        count, frames = images.shape[:2]
        rows = [i for i in range(count) for _ in range(frames)]
        flat = RewardBatch(
            images=images.flatten(0, 1),
            prompts=[batch.prompts[i] for i in rows],
            group=_by_time(batch.group, frames),
            meta=[{**batch.meta[i]} for i in rows],
            sigma=batch.sigma.repeat_interleave(frames),
            source=[batch.source[i] for i in rows] if batch.source else [],
        )
        values = as_tensor(call_reward(self.reward, flat), len(rows))
        if values.shape != (len(rows),):
            raise RewardError(
                f"expected {len(rows)} numbers, one per frame, got shape {list(values.shape)}"
            )
        scores = values.reshape(count, frames)
        # both keep NaN
        return scores.amin(1) if self.way == "min" else scores.mean(1)

    def probe(self) -> None:
        """Ask the reward whether it is ready, if it can tell."""
        if isinstance(self.reward, RewardWithProbe):
            self.reward.probe()


def _by_time(group: Tensor, frames: int) -> Tensor:
    """Number each prompt's images of one place in time [L * T]."""
    time = group.new_tensor(range(frames)).repeat(len(group))
    return group.repeat_interleave(frames) * frames + time
