"""Ask one reward, whatever it is made of: every failure is one message, every answer is checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl.config.calls import Call
from flowrl.core.abilities import RewardWithProbe
from flowrl.core.errors import ConfigError, FlowRLError, RewardError
from flowrl.core.pixels import from_bytes
from flowrl.core.types import Reward, RewardBatch, Source
from flowrl.core.users_code import FAILURES, as_one_message, describe_error
from flowrl.evaluation.frame_rewards import fitting
from flowrl.evaluation.offloaded_rewards import resting
from flowrl.evaluation.reward_answer import as_tensor, call_reward, hint

_UNCHANGING = (str, int, float, bool, type(None))


def rewards_of(calls: Mapping[str, Call], frames: int = 1) -> dict[str, Any]:
    """Make the rewards of a config for a model whose videos have so many frames; 1: images. Raises
    ConfigError that names the one which failed, or what it raises of our own errors."""
    made = {}
    for name, call in calls.items():
        with as_one_message(f"making reward {name!r}", ConfigError):
            made[name] = fitting(call, resting(call) if call.offload else call.make(), frames)
    return made


def probe_rewards(rewards: Mapping[str, Any]) -> None:
    """Ask each reward that can tell whether it is ready. Raises RewardError, or what it raises of
    our own errors."""
    for name, reward in rewards.items():
        if isinstance(reward, RewardWithProbe):
            with as_one_message(f"the probe of reward {name!r}", RewardError):
                reward.probe()


def ask(name: str, reward: Reward | Callable[..., Any], batch: RewardBatch, where: str) -> Tensor:
    """Call one reward -> its values [L] as `checked_scores` returns them. Raises RewardError that
    names it, whatever it failed with.

    The reward gets a batch of its own, as `own_batch` says.
    """
    own = own_batch(batch)
    try:
        values = call_reward(reward, own)
    except FlowRLError as error:
        raise RewardError(f"{where}: reward {name!r}: {error}") from error
    except FAILURES as error:  # rewards are users' code and servers: they fail in any way
        what = f"{where}: reward {name!r} failed with {describe_error(error)}{hint(error)}"
        raise RewardError(what) from error
    return checked_scores(name, values, batch, where)


def own_batch(batch: RewardBatch) -> RewardBatch:
    """Return a batch with images, prompts, groups, records, sigmas and sources of its own: what a
    reward changes in them, no other sees. Latents, on the model's device, are shared. Images of 256
    levels, uint8, become floats; others keep their gradient."""
    # by place: whoever watches what a reward reads watches the names
    images, prompts, group, meta, sigma = batch[:5]
    pixels = from_bytes(images) if images.dtype == torch.uint8 else images.clone()
    return batch._replace(
        images=pixels,
        prompts=[*prompts],
        group=group.clone(),
        meta=[_own(record) for record in meta],
        sigma=sigma.clone(),
        source=_copied(batch.source),
    )


def _own(value: Any) -> Any:
    """Copy what a record holds. Plain JSON, as files have it, is copied several times as fast as by
    `copy.deepcopy`, which looks after everything else."""
    kind = type(value)
    if kind is dict:
        return {key: _own(one) for key, one in value.items()}
    if kind is list:
        return [_own(one) for one in value]
    return value if kind in _UNCHANGING else copy.deepcopy(value)


def _copied(sources: list[Source]) -> list[Source]:
    """Copy sources [L]; images that share theirs still do."""
    copies: dict[int, Source] = {}
    for source in sources:
        if id(source) not in copies:
            copies[id(source)] = tuple(image.clone() for image in source)
    return [copies[id(source)] for source in sources]


def checked_scores(name: str, values: Any, batch: RewardBatch, where: str) -> Tensor:
    """Return what a reward gave as [L] float32 on the CPU, NaN = not scored.

    Tensors, arrays and lists have one number per image, None for one that is not scored; a plain
    number counts for every image, a tensor without dimensions is a mistake. Raises RewardError for
    anything else.
    """
    # one number per image
    count = len(batch.images)
    said = f"{where}: reward {name!r}: expected {count} numbers, one per image, got"
    try:
        rows = as_tensor(values, count)
        if rows.is_complex():
            raise TypeError("complex numbers have no order")
        rows = rows.detach().float().cpu()
    except FAILURES as error:  # what was given may have code of its own, such as __array__
        raise RewardError(f"{said} {type(values).__name__}: {error}") from error
    if rows.shape != (count,):
        raise RewardError(f"{said} shape {list(rows.shape)}")
    # none of them infinite
    infinite = rows.isinf().nonzero()
    if len(infinite):
        rule = "NaN means not scored; infinity is never allowed"
        raise unusable(name, rows, batch.prompts, where, int(infinite[0]), rule)
    return rows


def unusable(
    name: str, values: Tensor, prompts: list[str], where: str, first: int, rule: str
) -> RewardError:
    """Say which image has no usable score, and how many have none."""
    missing = int((~values.isfinite()).sum())
    return RewardError(
        f"{where}: reward {name!r} gave {values[first].item()} for image {first}, prompt "
        f"{prompts[first]!r} ({missing} of {len(values)} images have no finite score). {rule}"
    )
