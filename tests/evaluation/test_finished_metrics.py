"""What is logged of images that are not finished: nothing under the names of finished ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toykit import redness, toy

from flowrl.algorithms.nodes import KINDS, leaf_kinds
from flowrl.core.pixels import from_bytes
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_metrics import distances
from flowrl.training.checks import broken_rows
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer

COMB = "plan={fn: comb, steps: 5, size: 3, noise_scale: 0.5, baseline: true}"
RAKE = "plan={fn: rake, steps: 5, branch: 2, low: 0, high: 2, noise_scale: 0.5, strides: [1, 2]}"
TREE = "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 2], ode_last: 1}"


@pytest.mark.parametrize(
    ("plan", "want"),
    [
        # a root's leaves in the engine's order: baseline, previews after draws 0 and 1, the end;
        # each for both prompts with their two roots
        (COMB, [3] * 4 + [1] * 8 + [0] * 4),
        # at both steps both children with stride 1, then with stride 2; one root for each prompt
        (RAKE, [0] * 4 + [2] * 4 + [0] * 4 + [2] * 4),
        (TREE, [0] * 16),
    ],
)
def test_what_is_finished(tmp_path: Path, plan: str, want: list[int]) -> None:
    """The means of the leaves of each kind, taken apart here."""
    trainer = Trainer(toy(tmp_path, plan, "train.group=8", "rewards.strict=null"))
    ro, batch, values = collect(trainer, trainer.rows())
    batch = batch._replace(images=from_bytes(batch.images))
    assert leaf_kinds(ro.tree, ro.leaf).tolist() == want
    metrics = trainer.reward_set.advantages(
        values, batch, ro.leaf, ro.tree, lambda *_: torch.zeros(len(ro.tree.parent))
    )[1]
    scores, kinds = redness(batch), torch.tensor(want)
    for place, name in enumerate(KINDS):
        mine = scores[kinds == place]
        key = f"{name}/reward" if place else "reward"
        assert (key in metrics) == bool(len(mine))
        if len(mine):
            assert metrics[key] == pytest.approx(float(mine.mean()), abs=1e-6)
            assert metrics.get(f"{name}/images", len(mine)) == len(mine)
    assert metrics["reward/red"] == metrics["reward"]
    # as if nothing else had been drawn
    done = kinds == 0
    alone = batch._replace(images=batch.images[done], group=batch.group[done])
    assert metrics["diversity"] == pytest.approx(spread(alone), rel=1e-4)


def spread(batch: RewardBatch) -> float:
    """Return the mean over prompts of the root-mean-square distance of two images, pair by pair."""
    means = []
    for g in batch.group.unique():
        pixels = batch.images[batch.group == g].flatten(1).double()
        pairs = torch.pdist(pixels).square() / pixels.shape[1]
        means.append(float(pairs.mean().sqrt()))
    return sum(means) / len(means)


def test_distances_are_those_of_each_two_images() -> None:
    """Oracle: the root of the mean squared distance over all pairs, by `torch.pdist` in float64."""
    levels = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8)
    group = torch.tensor([4, 4, 4, 1, 1, 1, 1, 4, 7])
    wanted = []
    for prompt in (1, 4):
        rows = levels[group == prompt].flatten(1).double() / 255
        wanted.append(float((torch.pdist(rows).square() / rows.shape[1]).mean().sqrt()))
    for images in (levels, from_bytes(levels), from_bytes(levels).double()):
        found = distances(images, group)
        assert found[:2].tolist() == pytest.approx(wanted, rel=1e-6) and found[2].isnan()
    assert distances(levels[:1].expand(4, -1, -1, -1), torch.zeros(4)).tolist() == [0]


def test_broken_rows() -> None:
    """Infinities of both signs, a sum that is too large though no term is, a NaN."""
    rows = torch.zeros(5, 2, 2)
    assert broken_rows(rows) == []
    rows[1] = 3e38
    assert broken_rows(rows) == []
    rows[2, 0] = torch.tensor([torch.inf, -torch.inf])
    rows[4, 1, 1] = torch.nan
    assert broken_rows(rows) == [2, 4]
