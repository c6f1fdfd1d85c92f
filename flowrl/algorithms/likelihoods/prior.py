"""The likelihood of initial noise: a learned Gaussian that the samples start from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.algorithms.forest import cond_of
from flowrl.algorithms.transitions import gaussian_log_prob
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import per_sample, wide
from flowrl.core.seeds import NodeStreams, generator
from flowrl.core.types import Batch, Cond, Eval, FlowModel, Rollout, Transition

ROW = "prior_row"  # of the conditioning: which prompt of the training list, -1 for another


class prior:
    """Train the initial noise, ``x_1 ~ N(mean, spread^2)``; the network stays as it is.

    The mean starts at 0, which is the model's own noise. It has one number per latent entry, the
    same for all prompts, and with ``reads`` a part that is linear in a prompt's vector. FIND
    (2407.19453) is this with `learn_spread`, credit `value_baseline`, loss `clamped_ratio` and
    penalty `noise_moments`; ZO-RankSGD (2303.03751) with `own`, `start: noise`, a small spread
    and credit `rank_edges`.

    Args:
        reads: name of a conditioning tensor [G, D] that the mean is linear in; empty = none.
        own: each prompt of the training list has a mean and a spread of its own; other prompts
            start from the model's own noise.
        spread: the std that it begins with.
        learn_spread: the std is trained too, one number per latent entry, at least 1e-4.
        start: what the mean begins with: zero, or a standard normal draw of each prompt.
        seed: of that draw; None = the run's own, so that runs with other seeds begin elsewhere.

    **Differs:** FIND's code scores the noise against N(0, 1) for ever; here the old policy is the
    one that sampled.

    Raises: ConfigError for a spread that is not above 0, `reads` beside `own` or of what the model
    does not have, or a `start` from noise without `own`.
    """

    trains: Literal["roots"] = "roots"
    rows_per_state = 0
    keeps = frozenset({"old_log_prob"})

    def __init__(
        self,
        *,
        reads: str = "",
        own: bool = False,
        spread: float = 1.0,
        learn_spread: bool = False,
        start: Literal["zero", "noise"] = "zero",
        seed: int | None = None,
    ) -> None:
        if not (math.isfinite(spread) and spread > 0):
            raise ConfigError(f"likelihood prior: expected spread > 0, got {spread}")
        if (own and reads) or (start == "noise" and not own):
            raise ConfigError(
                "likelihood prior: `own` gives each prompt a mean, so it goes without `reads`, and "
                f"`start: noise` needs it; got {own=}, {reads=}, {start=}"
            )
        self.reads, self.own, self.spread = reads, own, spread
        self.learn_spread, self.start, self.seed = learn_spread, start, seed
        self.wants_prompts = own
        self.parameters: dict[str, nn.Parameter] = {}
        self.rows: dict[str, int] = {}

    def extend(
        self,
        model: FlowModel,
        shape: tuple[int, ...],
        prompts: Sequence[str] = (),
        run_seed: int = 0,
    ) -> FlowModel:
        """Return the model with this noise, and with the parameters "prior.mean" [*shape], with
        `reads` "prior.text" [*shape, D], and with `learn_spread` "prior.spread" [*shape]. With
        `own` each has a row for each different one of `prompts`. `run_seed` draws the first mean
        where the likelihood has no seed of its own."""
        # where its own parameters are; a model without any is asked for an embedding
        cond = model.encode([""]) if self.reads or not model.trainable() else {}
        known = [*model.trainable().values(), *cond.values()]
        device = known[0].device if known else torch.device("cpu")
        # a row for each different prompt, in the order of the list
        self.rows = {text: row for row, text in enumerate(dict.fromkeys(prompts))}
        size = (len(self.rows), *shape) if self.own else shape
        mean = torch.zeros(size)
        if self.start == "noise":
            seed = run_seed if self.seed is None else self.seed
            for text, row in self.rows.items():
                # drawn by the text, so a prompt's noise does not depend on the other prompts
                stream = generator(seed, "start", text)
                mean[row] = torch.randn(shape, generator=stream)
        self.parameters = {"prior.mean": nn.Parameter(mean.to(device))}
        if self.reads:
            width = self._vector(cond).shape[-1]
            zeros = torch.zeros(*shape, width, device=device)
            self.parameters["prior.text"] = nn.Parameter(zeros)
        if self.learn_spread:
            full = torch.full(size, self.spread, device=device)
            self.parameters["prior.spread"] = nn.Parameter(full)
        return _ModelWithPrior(model, self)  # type: ignore[return-value]

    def _vector(self, cond: Cond) -> Tensor:
        """Return the conditioning that the mean is linear in [G, D]. Raises ConfigError."""
        floats = {name: value for name, value in cond.items() if value.is_floating_point()}
        vectors = sorted(name for name, value in floats.items() if value.dim() == 2)
        if self.reads not in vectors:
            raise ConfigError(
                f"likelihood prior: reads={self.reads!r} is no vector of a prompt that this model "
                f"has; it has {', '.join(vectors) or 'none'}: take one of these, or leave it out"
            )
        return cond[self.reads]

    def mean(self, cond: Cond, count: int) -> Tensor:
        """Return the mean of the initial noise for conditioning {name: [R, ...]} -> [R, *]."""
        base = self._of(self.parameters["prior.mean"], cond, count, 0.0)
        if not self.reads:
            return base
        text = self.parameters["prior.text"]
        return base + torch.tensordot(cond[self.reads].to(text.dtype), text, dims=([1], [-1]))

    def std(self, cond: Cond, count: int) -> Tensor:
        """Return the std of the initial noise -> [R, *], or [R] where it is not learned."""
        if self.learn_spread:
            least = 1e-4
            return self._of(self.parameters["prior.spread"].clamp_min(least), cond, count, 1.0)
        device = self.parameters["prior.mean"].device
        if not self.own:
            return torch.full((count,), self.spread, device=device)
        return torch.where(cond[ROW] >= 0, self.spread, 1.0).to(device)

    def describe(self, cond: Cond) -> Tensor:
        """Return what the noise of prompts is, for a credit that judges it: mean, std where it is
        learned, and the prompts' vectors, for conditioning {name: [R, ...]} -> [R, D] float32."""
        count = len(next(iter(cond.values())))
        parts = [self.mean(cond, count).flatten(1)]
        if self.learn_spread:
            parts.append(self.std(cond, count).flatten(1))
        for name in sorted(cond):
            vector = cond[name].dim() == 2 and cond[name].is_floating_point()
            if vector and not name.startswith("negative_"):
                parts.append(cond[name].to(parts[0]))
        return torch.cat(parts, 1).detach().float()

    def score(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor, Tensor]:
        """Score noise x [R, *] -> log-prob [R], mean over dimensions; mean [R, *]; std."""
        mean, std = self.mean(cond, len(x)), self.std(cond, len(x))
        if std.dim() == 1:
            return gaussian_log_prob(x, mean, std), mean, std
        z = (x.double() - mean.double()) / std.double()
        value = -0.5 * z.square() - std.double().log() - 0.5 * math.log(2 * math.pi)
        return value.flatten(1).mean(1), mean, std

    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams | None = None
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
        """Score the initial noise -> Eval, std [B, *] where it is learned; neither the network
        nor the transition plays a part."""
        # a model whose grid starts below sigma 1 starts from scaled noise
        x = wide(batch.target) / per_sample(torch.hypot(1 - batch.sigma, batch.sigma), batch.target)
        return Eval(*self.score(x, batch.cond))

    def _of(self, rows: Tensor, cond: Cond, count: int, other: float) -> Tensor:
        """Return each prompt's row of a parameter -> [R, *]; `other` for prompts without one."""
        if not self.own:
            return rows.expand(count, *rows.shape)
        place = cond[ROW].to(rows.device)
        known = (place >= 0).view(-1, *[1] * (rows.dim() - 1))
        return torch.where(known, rows[place.clamp_min(0)], other)


class _ModelWithPrior:
    """A model and the learned noise that its samples start from."""

    def __init__(self, model: FlowModel, noise: prior) -> None:
        self._model, self._prior = model, noise
        self._plain = False

    @contextmanager
    def plain_noise(self) -> Iterator[None]:
        """Let samples start from standard normal noise, as the model's own do."""
        before, self._plain = self._plain, True
        try:
            yield
        finally:
            self._plain = before

    def encode(self, prompts: list[str]) -> Cond:
        """Encode prompts, and say which of the noise's own each of them is."""
        return self._named(self._model.encode(prompts), prompts)

    def _named(self, cond: Cond, prompts: list[str]) -> Cond:
        if not self._prior.own:
            return cond
        rows = torch.tensor([self._prior.rows.get(text, -1) for text in prompts])
        return {**cond, ROW: rows.to(next(iter(cond.values())).device)}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Ask the model, which knows nothing of the noise."""
        bare = {name: value for name, value in cond.items() if name != ROW}
        return self._model.velocity(x, sigma, bare)

    def initial_noise(self, noise: Tensor, cond: Cond) -> Tensor:
        """Move standard normal noise [R, *] to the learned Gaussian; cond {name: [R, ...]}."""
        if self._plain:
            return noise
        std = self._prior.std(cond, len(noise)).to(noise)
        wide_std = per_sample(std, noise) if std.dim() == 1 else std
        return wide_std * noise + self._prior.mean(cond, len(noise)).to(noise)

    def initial_log_prob(self, x: Tensor, cond: Cond) -> Tensor:
        """Score initial noise [R, *] as `initial_noise` gives it -> [R], nats per dimension."""
        return self._prior.score(x, cond)[0]

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the model's own parameters and those of the noise."""
        return {**self._model.trainable(), **self._prior.parameters}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if name != "encode_with_sources":
            return found
        return lambda prompts, sources: self._named(found(prompts, sources), prompts)
