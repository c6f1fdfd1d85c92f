"""What a reward promises by an attribute of its own."""

from __future__ import annotations

import functools
from typing import Any

from flowrl.core.types import Reward


def ignores_quality(reward: Reward) -> bool:
    """Say whether a reward tells, by `ignores_quality = True`, that a damaged image may be worth as
    much as a good one: it looks at how images differ."""
    return bool(getattr(reward, "ignores_quality", False))


def judges_singly(reward: Reward) -> bool:
    """Say whether a reward promises, by `judges_singly = True`, that an image's score depends on
    the image, its prompt and its record alone: equal images are then scored once."""
    return bool(getattr(reward, "judges_singly", False))


def judges_videos(reward: Any) -> bool:
    """Say whether a reward promises, by `judges_videos = True`, that it scores videos [L, T, 3, H,
    W]."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return bool(getattr(reward, "judges_videos", False))


def least_frames(reward: Any) -> int:
    """Return the frames that a video must have at least, by `least_frames`; 1 where a reward says
    nothing."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return int(getattr(reward, "least_frames", 1))


def asks_people(reward: Any) -> bool:
    """Say whether a reward waits for people, by `asks_people = True`: evaluations and the doctor
    leave it alone."""
    return bool(getattr(reward, "asks_people", False))


def sees_latents(reward: Any) -> bool:
    """Say whether a reward promises, by `sees_latents = True`, that it judges what images are
    decoded from: evaluations, which have images alone, and the doctor leave it alone."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return bool(getattr(reward, "sees_latents", False))


def differentiable(reward: Any) -> bool:
    """Say whether a reward promises, by `differentiable = True`, that its scores have a gradient
    with respect to the images."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return bool(getattr(reward, "differentiable", False))


def sees_sigma(reward: Any) -> bool:
    """Say whether a reward promises, by `sees_sigma = True`, that it judges estimates by the sigma
    of the state that they were made from."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return bool(getattr(reward, "sees_sigma", False))
