"""What models and rewards may be able to do besides what every one does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

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
class EncodesSources(Protocol):
    """A model whose images start from others, which the prompts' records name: it edits them, or
    sets them in motion."""

    @property
    def most_sources(self) -> int: ...  # of one prompt; `fewest_sources`, if there, else 1

    # sources [G] -> {name: [G, ...]}
    def encode_with_sources(self, prompts: list[str], sources: Sequence[Source]) -> Cond: ...


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
