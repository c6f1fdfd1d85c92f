"""Credit for what each draw adds to the reward of the image that would follow from it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.credit._chains import comb_of, spread_to_nodes
from flowrl.algorithms.forest import normalize_by
from flowrl.core.types import Tree


def step_gain(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    among: Literal["step", "prompt"] = "step",
    eps: float = 1e-4,
    ddof: int = 0,
) -> Tensor:
    """Normalise the gains ``R_t - R_(t-1)`` of a chain's draws, from rewards [L] -> [V] float32;
    for plan comb + baseline.

    R_0 is the reward of the initial noise finished without any draw, R_t that of the sample
    finished without noise after draw t. among "step": each step among a prompt's samples, DenseGRPO
    (2601.20218). "prompt": all gains of a prompt together, Stepwise-Flow-GRPO (2603.28718): steps
    that hardly change the reward then hardly count. A gain that reads an unscored image has
    advantage 0.

    At steps where all gains are nearly equal, "step" blows small differences up; a larger `eps`
    keeps them small.

    Raises: ConfigError unless every initial noise has one chain, previews and a baseline.
    """
    comb = comb_of("step_gain", leaf, tree, baseline=True)
    path = reward.double()[torch.cat([comb.start[:, None], comb.seen], 1)]
    gain, node = path.diff(dim=1).flatten(), comb.decision.flatten()
    keys = [tree.group[node]] + ([tree.step[node]] if among == "step" else [])
    return spread_to_nodes(normalize_by(gain, *keys, eps=eps, ddof=ddof), comb.owner)
