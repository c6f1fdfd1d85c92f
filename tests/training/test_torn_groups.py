"""A loss that compares the images of a prompt needs all of them in one network call, noised alike.
Whatever a config says that tears such a group is refused before a weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from toykit import axes, toy

from flowrl.core.errors import ConfigError
from flowrl.training.trainer import Trainer

NOISY = "plan={fn: full, steps: 6, noise_scale: 0.5, ode_last: 1}"
DRAWS = "likelihood={fn: reverse}"
JOINS_DRAWS = "joins draws, and likelihood forward trains leaves.*segment={fn: prompt}"
NONE_LEFT = "left none of the 8 decisions"
TORN: dict[str, tuple[str, list[str], str]] = {
    # nothing, or something else, keeps the images of a prompt together
    "no segment": ("dgpo", ["segment=null"], "must be in one network call"),
    "segments of states": ("dgpo", ["segment={fn: siblings}"], JOINS_DRAWS),
    "segments of steps": ("dgpo", [NOISY, "segment={fn: fixed, sizes: [5]}"], JOINS_DRAWS),
    "segments by change": ("dgpo", [NOISY, "segment={fn: adaptive, chunks: 2}"], JOINS_DRAWS),
    "several steps": ("dgpo", [NOISY, DRAWS], "torn: 8 of its 40 images"),
    # some images are not trained
    "without advantage 0": ("dgpo", ["select={fn: nonzero}"], "nonzero: leaves out images"),
    "best and worst": ("dgpo", ["select={fn: best_of_n, top: 1, bottom: 1}"], NONE_LEFT),
    "the largest": ("dgpo", ["select={fn: largest, share: 0.5}"], NONE_LEFT),
    "the most different": ("dgpo", ["select={fn: spread, keep: 2}"], NONE_LEFT),
    "at random": ("dgpo", ["select={fn: fraction, share: 0.5}"], NONE_LEFT),
    # a prompt has several places, and each of these its own noise and process
    "knapsack": ("dgpo", ["sampler={fn: knapsack}", "train.prompts=4"], "several places"),
    # one call, but not one noise; with a draw for each step of the grid even the times agree
    "own noise": ("dgpo", ["likelihood.shared=false"], "same time and noise"),
    "own noise at all steps": (
        "dgpo",
        ["likelihood={fn: forward, draws: 5, times: grid, last: 5}"],
        "same time and noise",
    ),
    # the others that compare all images of a prompt
    "CRD": ("crd", ["select={fn: nonzero}"], "crd compares all images"),
    "CRD, states": ("crd", ["segment={fn: siblings}"], JOINS_DRAWS),
    "TRPA": ("dgpo", ["loss={fn: level_preference}", "segment={fn: siblings}"], JOINS_DRAWS),
    "Reg-GRPO": (
        "dgpo",
        [NOISY, DRAWS, "loss={fn: group_regression}", "select={fn: fraction, share: 0.5}"],
        "torn: 16 of its 40 images",
    ),
    "a surrogate": ("tdm_r1", ["segment={fn: siblings}"], "joins draws.* generated trains steps"),
    "a pair": ("diffusion_dpo", ["segment={fn: siblings}"], JOINS_DRAWS),
    "a pair's noise": ("diffusion_dpo", ["likelihood.shared=false"], "same time and noise"),
}


@pytest.mark.parametrize("name", TORN)
def test_a_torn_group_is_refused_before_the_model(tmp_path: Path, name: str) -> None:
    """The model of this config cannot be made, so the error is older than it."""
    slug, changes, words = TORN[name]
    given = [*axes(f"shapes/{slug}"), *changes]
    with pytest.raises(ConfigError, match=words):
        Trainer(toy(tmp_path, "model={fn: toykit.unloadable}", *given))


@pytest.mark.parametrize(
    "changes",
    [
        ["train.micro_batch=1"],  # a unit larger than that is a call of its own
        ["train.updates=7"],  # more than prompts: some steps have none
        ["train.parts=2", "train.order=step"],
        ["train.refill=2"],
    ],
)
def test_what_only_deals_out_tears_nothing(tmp_path: Path, changes: list[str]) -> None:
    """Two iterations of DGPO, of two prompts with eight images each."""
    trainer = Trainer(toy(tmp_path, *axes("shapes/dgpo"), *changes))
    assert all(trainer.step()["grad_norm"] > 0 for _ in range(2))
