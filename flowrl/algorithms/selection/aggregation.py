"""How the terms of good and of bad images are averaged, where images have differently many."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.selection._change import trained_draws
from flowrl.core.types import SelectInput


def sign_balance(data: SelectInput) -> Tensor:
    """Let good and bad images count by their number, however many trained draws they have ->
    factor [V].

    Balanced Aggregation (2605.04077): for each prompt ``(n+ / n) mean+ + (n- / n) mean-``, the
    means over all draws of advantage above and below 0, n+ and n- the numbers of its images that
    are good and bad. A plain mean over draws lets the side with the longer samples decide.
    Reconstruction of the abstract, which says both means and that counts of images weigh them.
    With equally many draws everywhere all factors are 1.

    **Differs:** draws of advantage 0 are a third side. Where draws of one image differ in sign, as
    below turning points, it counts on each side by its share of them; in a tree an image's draws
    are all those above it. Draws of one segment are one term. Prompts count by their images.

    Draws that an earlier entry of `select` left out do not count, so name this one last.
    """
    ro, tree = data.rollout, data.rollout.tree
    kept = trained_draws(ro) if data.factor is None else trained_draws(ro) & (data.factor > 0)
    term = kept.double()
    if data.segment is not None:  # as the losses that use segments share them out
        index = torch.unique(data.segment, return_inverse=True)[1]
        size = torch.zeros_like(term).index_add(0, index, term)[index]
        term = term / size.clamp_min(1)
    # terms of each draw's side, and those on the way to each node
    sides = torch.stack([(data.advantage.sign() == sign) * term for sign in (1, 0, -1)])
    path = sides.clone()
    for step in range(1, len(ro.sigmas)):
        here = ((tree.step == step) & (tree.parent >= 0)).nonzero().flatten()
        path[:, here] += path[:, tree.parent[here]]
    # by prompt: how many images are on each side, and how many terms
    share = (path[:, ro.leaf] / path[:, ro.leaf].sum(0)).nan_to_num()
    group = torch.unique(tree.group, return_inverse=True)[1]
    zeros = sides.new_zeros(3, int(group.max()) + 1)
    images = zeros.index_add(1, group[ro.leaf], share)
    terms = zeros.index_add(1, group, sides)
    weight = (images / images.sum() / (terms / terms.sum())).nan_to_num()
    side = (1 - data.advantage.sign()).long()
    return torch.where(kept, weight[side, group], 0.0).float()
