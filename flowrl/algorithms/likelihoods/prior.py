"""The likelihood of initial noise: a learned Gaussian that the samples start from."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.algorithms.nodes import cond_of
from flowrl.algorithms.transitions import gaussian_log_prob
from flowrl.core.noise_path import per_sample, wide
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Cond, Eval, FlowModel, Rollout, Transition


class prior:  # noqa: N801 - configs name likelihoods in lower case
    """Train the mean of the initial noise, ``x_1 ~ N(mean, 1)``; the network stays as it is.

    The mean starts at 0, which is the model's own noise. It has one number per latent entry, the
    same for all prompts, and with ``reads`` a part that is linear in a prompt's vector.

    Args:
        reads: name of a conditioning tensor [G, D] that the mean is linear in; empty = none.
    """

    trains: Literal["roots"] = "roots"
    evaluations = 0
    keeps = frozenset({"old_log_prob"})

    def __init__(self, *, reads: str = "") -> None:
        self.reads = reads
        self.parameters: dict[str, nn.Parameter] = {}

    def extend(self, model: FlowModel, shape: tuple[int, ...]) -> FlowModel:
        """Return the model with this noise, and with the parameters "prior.mean" [*shape] and, with
        `reads`, "prior.text" [*shape, D]."""
        cond = model.encode([""])
        device = next((value.device for value in cond.values()), torch.device("cpu"))
        self.parameters = {"prior.mean": nn.Parameter(torch.zeros(shape, device=device))}
        if self.reads:
            width = cond[self.reads].shape[-1]
            zeros = torch.zeros(*shape, width, device=device)
            self.parameters["prior.text"] = nn.Parameter(zeros)
        return _ModelWithPrior(model, self)  # type: ignore[return-value]

    def mean(self, cond: Cond, count: int) -> Tensor:
        """Return the mean of the initial noise for conditioning {name: [R, ...]} -> [R, *]."""
        base = self.parameters["prior.mean"].expand(count, *self.parameters["prior.mean"].shape)
        if not self.reads:
            return base
        text = self.parameters["prior.text"]
        return base + torch.tensordot(cond[self.reads].to(text.dtype), text, dims=([1], [-1]))

    def batch(
        self,
        rollout: Rollout,
        advantage: Tensor,
        nodes: Tensor,
        streams: NodeStreams | None = None,
    ) -> Batch:
        """Collect roots [B] with their advantage [V], the mean of the images below -> Batch of
        B."""
        sigma = rollout.sigmas[:1].expand(len(nodes))
        return Batch(
            x=rollout.x[nodes],
            sigma=sigma,
            sigma_next=sigma,
            noise_scale=torch.zeros_like(sigma),
            target=rollout.x[nodes],
            old_log_prob=rollout.log_prob[nodes],
            advantage=advantage[nodes],
            node=nodes,
            parent=nodes,
            step=torch.zeros_like(nodes),
            cond=cond_of(rollout, nodes),
        )

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Score the initial noise; neither the network nor the transition plays a part."""
        # a model whose grid starts below sigma 1 starts from scaled noise
        x = wide(batch.target) / per_sample(torch.hypot(1 - batch.sigma, batch.sigma), batch.target)
        mean = self.mean(batch.cond, len(x))
        std = torch.ones(len(x), device=x.device)
        return Eval(gaussian_log_prob(x, mean, std), mean, std)


class _ModelWithPrior:
    """A model and the learned noise that its samples start from."""

    def __init__(self, model: FlowModel, noise: prior) -> None:
        self._model, self._prior = model, noise

    def initial_noise(self, noise: Tensor, cond: Cond) -> Tensor:
        """Move standard normal noise [R, *] to the learned Gaussian; cond {name: [R, ...]}."""
        return noise + self._prior.mean(cond, len(noise)).to(noise)

    def initial_log_prob(self, x: Tensor, cond: Cond) -> Tensor:
        """Score initial noise [R, *] as `initial_noise` gives it -> [R], nats per dimension."""
        return gaussian_log_prob(
            x, self._prior.mean(cond, len(x)).to(x), torch.ones(len(x), device=x.device)
        )

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the model's own parameters and those of the noise."""
        return {**self._model.trainable(), **self._prior.parameters}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
