"""Where what a few-step model generates is judged: noise levels above a state, and how it is noised
again to these (TDM, 2503.06674)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.core.devices import on_host
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import per_sample, shift_sigmas, wide
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Rollout

Interval = Literal["trajectory", "reverse"]


class Queries(NamedTuple):
    """Which noise levels states are judged at: up to the level where their step began
    ("trajectory") or up to pure noise ("reverse"), uniform before a time shift; none below
    `least`, unless a step began there."""

    interval: Interval
    shift: float
    least: float = 0.0

    def check(self) -> Queries:
        """Return it. Raises ConfigError for a shift that is none."""
        if not self.shift > 0:
            raise ConfigError(f"likelihood generated: expected shift > 0, got {self.shift}")
        return self

    def draw(
        self, rollout: Rollout, nodes: Tensor, streams: NodeStreams, *, shared: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Draw a level [B] and noise [B, *] for the states that the steps to nodes [B] ended in."""
        start, end = steps_to(rollout, nodes)
        low = self._even(end)
        high = torch.ones_like(low) if self.interval == "reverse" else self._even(start)
        low = low.maximum(self._even(torch.full_like(end, self.least)).minimum(high))
        shares, noises = [], []
        for stream in streams.of(nodes, shared=shared):
            shares.append(torch.rand(1, generator=stream))
            noises.append(torch.randn(1, *rollout.x.shape[1:], generator=stream))
        share = torch.cat(shares).clamp(1e-6, 1 - 1e-6)
        level = shift_sigmas(low + (high - low) * share, self.shift)
        noise = torch.cat(noises).to(wide(rollout.x[:1]), non_blocking=True)
        return level.to(rollout.x.device, non_blocking=True), noise

    def _even(self, sigma: Tensor) -> Tensor:
        """Undo the shift: sigma [B] as it was evenly spread."""
        return shift_sigmas(sigma.float(), 1 / self.shift)


def steps_to(rollout: Rollout, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return sigma before and after the step that ended in nodes [B] -> [B], [B] on the host.
    Raises ConfigError for an edge of several steps."""
    step, parent, nodes = (on_host(t) for t in (rollout.tree.step, rollout.tree.parent, nodes))
    before, after = step[parent[nodes]], step[nodes]
    if bool((after - before != 1).any()):
        raise ConfigError(
            "likelihood generated: it trains every step of the sampler, and the plan keeps only "
            "some of them; take plan: {fn: few_step, steps: 4}"
        )
    sigmas = on_host(rollout.sigmas)
    return sigmas[before], sigmas[after]


def noised_again(
    x0: Tensor, eps: Tensor, sigma: Tensor, level: Tensor, fresh: Tensor
) -> tuple[Tensor, Tensor]:
    """Noise a state further: from sigma [B], where it is ``(1 - sigma) x0 + sigma eps``, to a
    higher level [B], with fresh noise [B, *] -> the state [B, *] and the noise in it [B, *].

    The state's own noise keeps the share ``o = sigma (1 - level) / (1 - sigma)``; fresh noise of
    std ``sqrt(level^2 - o^2)`` makes up the rest, so that all noise has the std `level`.
    """
    own = sigma.double() * (1 - level.double()) / (1 - sigma.double())
    rest = (level.double().square() - own.square()).clamp_min(0).sqrt()
    scale = level.double()
    noise = per_sample(own / scale, x0) * eps + per_sample(rest / scale, x0) * fresh
    return (1 - per_sample(level, x0)) * x0 + per_sample(level, x0) * noise, noise
