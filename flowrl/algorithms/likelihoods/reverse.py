"""The likelihood of draws: each stored step under the sampler's own Gaussian."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.forest import cond_of, state_rows, states_of
from flowrl.algorithms.transitions import gaussian_log_prob
from flowrl.core.noise_path import wide
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Eval, FlowModel, Rollout, Transition


class reverse:
    """Train every draw but those of the last step. Source: DDPO (2305.13301) eq. 6, Flow-GRPO
    (2505.05470)."""

    trains: Literal["draws"] = "draws"
    rows_per_state = 1
    keeps: frozenset[str] = frozenset({"old_log_prob", "old_mean"})

    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams | None = None
    ) -> Batch:
        """Collect the draws that made the nodes [B], with their advantage [V] -> Batch of B.

        Conditioning is copied once per draw, so take no more of them at a time than one network
        call needs.
        """
        tree = rollout.tree
        parent = tree.parent[nodes]
        return Batch(
            x=rollout.x[parent],
            sigma=rollout.sigmas[tree.step[parent]],
            sigma_next=rollout.sigmas[tree.step[nodes]],
            noise_scale=rollout.noise_scale[nodes],
            target=rollout.x[nodes],
            old_log_prob=rollout.log_prob[nodes],
            advantage=advantage[nodes],
            node=nodes,
            parent=states_of(rollout, nodes),
            step=tree.step[parent],
            cond=cond_of(rollout, nodes),
        )

    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval:
        """Score the stored x_next under the transition, with v evaluated anew at the stored x.

        Right after the rollout ``log_prob == batch.old_log_prob``: to the bit where network calls
        have the same rows, else to float32 rounding. Gradients flow through v only.
        """
        x = wide(batch.x)
        # siblings of a fork were drawn from one state: v once for each
        first, state = batch.rows or state_rows(batch.parent)
        if len(first) == len(x):
            v = model.velocity(x, batch.sigma, batch.cond)
        else:
            cond = {}
            for name, value in batch.cond.items():
                cond[name] = value[first]
            v = model.velocity(x[first], batch.sigma[first], cond)[state]
        mean, std = transition(x, v, batch.sigma, batch.sigma_next, batch.noise_scale)
        return Eval(gaussian_log_prob(batch.target, mean, std), mean, std, v)


class reverse_unguided(reverse):
    """Train draws as `reverse` does, where sampling alone is guided (`train.guidance`): the old
    log-prob is that of the network as it is trained, asked at the stored states, not the sampler's
    own. With the model's own guidance above 1 that is guided, too.

    The hybrid guidance of Qwen-Image-2.0-RL (2606.27608): rollouts are guided, the policy is
    updated on the conditional branch. The sampler's log-prob belongs to the guided mean; against it
    the first ratio would be far from 1. Here it is 1 to the bit, because both log-probs of the
    first update are one; later updates of a rollout ask the weights that sampled once more.

    Reconstruction: how the old log-prob is made was not found.
    """

    keeps: frozenset[str] = frozenset()
    rescores = True  # so that sampling may have another guidance

    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams | None = None
    ) -> Batch:
        """Collect the draws that made the nodes [B], without the sampler's log-prob -> Batch of
        B."""
        found = super().batch(rollout, advantage, nodes, streams)
        return found._replace(old_log_prob=torch.zeros_like(found.old_log_prob))
