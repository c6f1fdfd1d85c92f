"""How sure a judge has to be of a pair of candidates, by the noise of the step."""

from __future__ import annotations

import math

import pytest
import torch
from rolloutkit import run

from flowrl.algorithms.credit.comparisons import candidate_pairs
from flowrl.algorithms.plans.trees import candidates
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree

# LPO's table of DDIM's stds for 20 steps (Kwai-Kolors/LPO 9c2e8b8, compare_funcs.py): noise rises
LPO_STD = {0: 0.0206, 1: 0.0406, 5: 0.2836, 10: 0.4293, 15: 0.5576, 19: 0.6444}


def lpo_pairs(scores: list[list[float]]) -> list[list[float]]:
    """Credit of four candidates of each of six states of one chain, the k-th with the k-th std."""
    size, states = len(scores[0]), len(scores)
    parent, std, leaf, step = [-1], [0.0], list[int](), [0]
    above, drawn = 0, list[list[int]]()
    for k, noise in enumerate(LPO_STD.values()):
        first = len(parent)
        drawn.append(list(range(first, first + size)))
        parent += [above] * size + drawn[-1]
        std += [noise] * size + [0.0] * size
        step += [k + 1] * size + [states + 1] * size
        leaf += range(first + size, first + 2 * size)
        above = first
    group = torch.zeros(len(parent)).long()
    tree = Tree(torch.tensor(parent), torch.tensor(step), torch.tensor(std), group)
    flat = torch.tensor([one for row in scores for one in row])
    sign = candidate_pairs(flat, torch.tensor(leaf), tree, least=0.35, noisiest=0.5)
    return [sign[row].tolist() for row in drawn]


def test_the_noisier_a_step_the_surer_a_pair_has_to_be() -> None:
    """LPO's thresholds, executed by the reference at six of its steps: .35, .354809, .413241,
    .448277, .479128, .5. Scores just above each make a pair, just below none; its two examples."""
    known = [0.35, 0.354809, 0.413241, 0.448277, 0.479128, 0.5]
    for more, wanted in ((1e-4, [1, 0, 0, -1]), (-1e-4, [0, 0, 0, 0])):
        gaps = [2 * math.atanh(share + more) for share in known]
        assert lpo_pairs([[gap, 0.1, 0.1, 0.0] for gap in gaps]) == [wanted] * 6
    # (1, .2, .9, -.1) counts at the noisiest step, (.3, .25, .1, 0) at none
    blank = [[0.0] * 4] * 5
    assert lpo_pairs([*blank, [1, 0.2, 0.9, -0.1]])[-1] == [1, 0, 0, -1]
    assert lpo_pairs([[0.3, 0.25, 0.1, 0], *blank])[0] == [0, 0, 0, 0]
    made = run(candidates(0, steps=5, noise_scale=0.5, branch=3, first=1), cps)
    with pytest.raises(ConfigError, match="least <= noisiest"):
        candidate_pairs(torch.zeros(10), made.leaf, made.tree, least=0.5, noisiest=0.3)
