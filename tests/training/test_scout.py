"""Sol-RL's scouting: which noises are kept, and that images come from the very same ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toykit import axes, toy

from flowrl.core.errors import ConfigError
from flowrl.core.pixels import to_bytes
from flowrl.core.seeds import generator
from flowrl.training.parts.previews import Previews, chosen
from flowrl.training.trainer import Trainer

SETTING = [*axes("shapes/sol_rl"), "scout={images: 12, steps: 2}", "train.group=4"]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # by hand: best .9 .8, worst .1 .2
        ("extremes", [0, 2, 3, 5]),
        # mean .5 of those scored: farthest .9, .1, then .8 and .2 alike
        ("far", [0, 2, 3, 5]),
    ],
)
def test_which_noises_are_kept(how: str, expected: list[int]) -> None:
    scores = torch.tensor([0.9, 0.5, 0.1, 0.8, torch.nan, 0.2])
    assert chosen(scores, 4, how, generator(0)).tolist() == expected


def test_chance_and_what_is_not_scored() -> None:
    """Odd numbers: one more of the worst, as published (best = n // 2); half of "half" is sure;
    images without a score are taken only where there are no others."""
    scores = torch.tensor([0.9, 0.5, 0.1, 0.8, 0.4, 0.2])
    assert chosen(scores, 3, "extremes", generator(0)).tolist() == [0, 2, 5]
    for how in ("half", "random"):
        kept = chosen(scores, 4, how, generator(1)).tolist()
        assert len(set(kept)) == 4 and kept == sorted(kept)
        if how == "half":
            assert {0, 2} <= set(kept)
    lost = torch.tensor([torch.nan, 0.5, torch.nan, 0.1])
    assert {1, 3} < set(chosen(lost, 3, "extremes", generator(0)).tolist())


def test_images_start_from_the_noises_that_were_scouted(tmp_path: Path) -> None:
    """With as many steps previews are the images themselves: the kept are the two reddest and the
    two least red of twelve that an ordinary rollout would have drawn."""
    run = Trainer(toy(tmp_path, *SETTING, "scout.steps=6"))
    rows = run.rows()
    previews = run.parts.get(Previews)
    assert previews is not None
    noise = previews.noise(run, rows, range(len(rows)), 0)
    made = run.sample(rows)
    assert torch.equal(made.x[made.tree.parent < 0], noise)
    wide = Trainer(toy(tmp_path, *SETTING, "scout={images: 0}", "train.group=12"))
    every = wide.sample(rows)
    roots, leaves = every.x[every.tree.parent < 0], every.x[every.leaf]
    roots = roots.reshape(len(rows), 12, *roots.shape[1:])
    images = to_bytes(run.model.decode(leaves)).float()
    red = (images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))).reshape(len(rows), 12)
    for k in range(len(rows)):
        order = red[k].argsort()
        kept = sorted([*order[:2].tolist(), *order[-2:].tolist()])
        assert torch.equal(noise[4 * k : 4 * k + 4], roots[k][kept])
    # previews are counted: 12 noises of 6 steps for each prompt
    assert run.cost.nfe == wide.cost.nfe // 12 * 4 + len(rows) * 72
    assert run.step()["nfe"] > run.cost.nfe


def test_a_rollout_that_begins_at_another_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Stable Diffusion 1: the first sigma depends on the number of steps. The kept noises are
    those that the rollout would have drawn, at its own std."""
    shift = {2: 0.8, 6: 0.9}
    run = Trainer(toy(tmp_path, *SETTING, "scout.keep=random"))
    wide = Trainer(toy(tmp_path, *SETTING, "scout={images: 0}", "train.group=12"))
    for one in (run, wide):
        plain = one.model.sigmas
        monkeypatch.setattr(
            one.model,
            "sigmas",
            lambda steps, *size, plain=plain: plain(steps, *size) * shift[steps],
        )
    rows = run.rows()
    made, every = run.sample(rows), wide.sample(rows)
    drawn = every.x[every.tree.parent < 0]
    for root in made.x[made.tree.parent < 0]:
        assert min(float((root - other).abs().max()) for other in drawn) < 1e-6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("scout.images=4", "more noises than are kept"),
        ("train.same_noise=true", "one noise for all images"),
    ],
)
def test_what_does_not_go_with_it(tmp_path: Path, change: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(toy(tmp_path, *SETTING, change))
