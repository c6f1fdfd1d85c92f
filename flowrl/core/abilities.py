"""What models, rewards, likelihoods and samplers of prompts may be able to do beside what each
does.

A reward promises some of it by attributes of its own, of the names of the functions below that ask
for them, such as `judges_videos = True`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.core.types import Cond, FlowModel, Reward, RewardBatch, Source


@runtime_checkable
class ExtendsModel(Protocol):
    """A likelihood with parameters of its own. It returns the model with them among `trainable`, so
    that checkpoints, averages and evaluations have them too.

    The model that it returns may also have `initial_noise` and `initial_log_prob`: see
    `flowrl.algorithms.likelihoods.prior`.
    """

    # whether `extend` is given the training prompts
    wants_prompts: bool

    def extend(
        self,
        model: FlowModel,
        shape: tuple[int, ...],
        prompts: Sequence[str] = (),
        run_seed: int = 0,
    ) -> FlowModel: ...


@runtime_checkable
class LearnsNoise(Protocol):
    """A model whose samples start from a learned noise."""

    # samples start from the model's own noise for a while
    def plain_noise(self) -> AbstractContextManager[None]: ...


@runtime_checkable
class EncodesAhead(Protocol):
    """A model that keeps what it encoded. It encodes prompts until its memory is full."""

    def encode_ahead(self, prompts: Sequence[str]) -> None: ...


@runtime_checkable
class Guides(Protocol):
    """A model whose guidance can be another for a while."""

    # off: the scale may also be that of no guidance
    def guiding(self, scale: float, *, off: bool = False) -> AbstractContextManager[None]: ...


@runtime_checkable
class TakesLora(Protocol):
    """A model that can begin with a LoRA file of another program."""

    # a file or folder, and alpha where the caller knows it -> the parameters that it changes,
    # whole; None for what is no LoRA
    def from_lora(self, path: Path, alpha: float | None) -> Iterator[tuple[str, Tensor]] | None: ...


@runtime_checkable
class PassesFence(Protocol):
    """A model that is compared with its own pipeline before it is trained."""

    # for a run of so many steps, of images of so many pixels -> what was compared, with `lines`
    def pass_fence(self, steps: int, height: int, width: int) -> Any: ...

    # the same of all comparisons, as plain data
    def fence_record(self) -> list[dict[str, Any]]: ...


def conditioning(model: FlowModel, prompts: list[str], sources: Sequence[Source]) -> Cond:
    """Encode prompts [G], with their sources [G] where the model starts from images."""
    with_sources = getattr(model, "encode_with_sources", None)
    if with_sources is None:
        return model.encode(prompts)
    found: Cond = with_sources(prompts, sources)
    return found


def stays(model: FlowModel) -> bool:
    """Tell whether a model's trained weights must keep their place in memory: ``weights_stay``,
    which a model need not have."""
    return bool(getattr(model, "weights_stay", False))


def discrete_levels(model: FlowModel) -> bool:
    """Tell whether a model knows the noise levels of its training timesteps alone, and none in
    between: ``discrete_levels``, which a model need not have."""
    return bool(getattr(model, "discrete_levels", False))


class Ahead(NamedTuple):
    """What is known of a model before it is loaded. An adapter's `Facts` have these names; another
    function says them of its arguments by an attribute ``ahead``."""

    discrete_levels: bool = False
    encodes_images: bool = True


def known_ahead(function: Any, arguments: Mapping[str, Any]) -> Ahead:
    """Return what a config's ``model.fn`` says of the model that it would load."""
    ahead = getattr(function, "ahead", None)
    if ahead is not None:
        found: Ahead = ahead(**arguments)
        return found
    facts = getattr(function, "facts", None)
    known: dict[str, Any] = {}
    for name, default in Ahead._field_defaults.items():
        known[name] = getattr(facts, name, default)
    return Ahead(**known)


@runtime_checkable
class RewardWithProbe(Protocol):
    """A reward that can say early that it could not answer: a server is down, a file is missing."""

    def probe(self) -> None: ...


@runtime_checkable
class LearnedReward(Reward, Protocol):
    """A reward that is trained along: a discriminator on the run's own images. Scoring must not
    change its state."""

    # one round on an iteration's images -> metrics
    def update(self, batch: RewardBatch) -> dict[str, float]: ...

    # everything that a bit-for-bit resume needs
    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...

    # False: only the reward learns in this iteration. One that counts its updates in `rounds` keeps
    # the count when a monitor takes the run back to an earlier checkpoint
    def trains_policy(self, iteration: int) -> bool: ...


def promised(reward: Any, name: str, otherwise: Any = False) -> Any:
    """Return what a reward, or the function of a partial, says of itself by an attribute."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return getattr(reward, name, otherwise)


def ignores_quality(reward: Any) -> bool:
    """Say whether a damaged image may be worth as much as a good one: it looks at how images
    differ."""
    return bool(promised(reward, "ignores_quality"))


def judges_singly(reward: Any) -> bool:
    """Say whether an image's score depends on the image, its prompt and its record alone: equal
    images are then scored once."""
    return bool(promised(reward, "judges_singly"))


def judges_videos(reward: Any) -> bool:
    """Say whether it scores videos [L, T, 3, H, W]."""
    return bool(promised(reward, "judges_videos"))


def least_frames(reward: Any) -> int:
    """Return the frames that a video must have at least; 1 where a reward says nothing."""
    return int(promised(reward, "least_frames", 1))


def asks_people(reward: Any) -> bool:
    """Say whether it waits for people: evaluations and the doctor leave it alone."""
    return bool(promised(reward, "asks_people"))


def sees_latents(reward: Any) -> bool:
    """Say whether it judges what images are decoded from: evaluations, which have images alone, and
    the doctor leave it alone."""
    return bool(promised(reward, "sees_latents"))


def differentiable(reward: Any) -> bool:
    """Say whether its scores have a gradient with respect to the images."""
    return bool(promised(reward, "differentiable"))


def sees_sigma(reward: Any) -> bool:
    """Say whether it judges estimates by the sigma of the state that they were made from."""
    return bool(promised(reward, "sees_sigma"))


class PromptDraw(NamedTuple):
    """What a sampler sees of an iteration before its first image."""

    iteration: int
    places: int  # of the iteration: `train.prompts`
    group: int  # images of a place: `train.group`
    # (from, so many) -> rows of the training list: the endless stream of shuffled epochs
    stream: Callable[[int, int], list[int]]
    generator: torch.Generator  # on the CPU, seeded by (seed, iteration)


class Visit(NamedTuple):
    """What a prompt's images were worth in an iteration."""

    row: int  # of the training list
    mean: float  # of the weighted sum of rewards, after their transforms
    std: float  # biased
    images: int  # that were scored


@runtime_checkable
class PromptSampler(Protocol):
    """Choose the prompts of each iteration. Calling it changes nothing; `update` takes in what an
    iteration showed, and checkpoints keep what it remembers."""

    # whether places of one prompt are one group: it may then get more images than another
    joins: bool

    def start(self, prompts: list[str]) -> None: ...  # those of the training list

    def __call__(self, draw: PromptDraw) -> list[int]: ...  # a row for each place

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...
