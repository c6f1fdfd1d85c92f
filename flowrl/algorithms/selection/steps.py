"""Which of the steps of a sampler without noise are trained."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.nodes import trained_nodes
from flowrl.algorithms.selection._change import one_of_each
from flowrl.core.types import SelectInput


def one_step(data: SelectInput) -> Tensor:
    """Train one step of each image, drawn anew in each iteration -> factor [V], 0 or 1. For a
    sampler of few steps without noise, all of which are trained otherwise (`generated`).

    TDM (2503.06674), the authors' code (Luo-Yihong/TDM 81b019f) draws one of 4.
    """
    nodes = trained_nodes(data.rollout, "steps")
    kept = one_of_each(data.rollout, nodes, data.generator)
    return torch.zeros_like(data.rollout.tree.std).index_fill(0, kept, 1.0)
