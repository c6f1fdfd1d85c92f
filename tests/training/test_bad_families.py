"""Settings of the other families that cannot work are refused before a weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from toykit import axes, toy

from flowrl.core.errors import ConfigError
from flowrl.training.trainer import Trainer

WRONG = [
    ("shapes/diffusion_nft", ["loss.beta=0"], "nft: .*beta > 0"),
    ("shapes/dgpo", ["segment=null"], "must be in one network call"),
    ("shapes/crd", ["segment=null"], "must be in one network call"),
    ("shapes/awm", ["likelihood={fn: forward, low: 0.5, high: 1.2}"], "0 < low < high < 1"),
    ("shapes/awm", ["likelihood={fn: forward, low: -0.1}"], "0 < low < high < 1"),
    ("shapes/awm", ["likelihood={fn: forward, low: 0}"], "low=0.0, high=None; leave out"),
    ("shapes/ram", ["likelihood.high=1"], "low=None, high=1.0; leave out"),
    ("shapes/diffusion_dpo_offline", ["likelihood.low=0"], "low=0.0, high=None; leave out"),
    ("shapes/awm", ["likelihood.last=9"], "it has steps 0 to"),
    ("shapes/diffusion_nft", ["loss.labels=some"], "loss.labels"),
    ("shapes/refl", ["rewards.red.fn=toykit.reddish"], "cannot be differentiated"),
    ("shapes/spo", [], "judges every image as a finished one"),
    # penalties and losses of a step, under a likelihood without a std; velocities under one without
    (
        "shapes/diffusion_nft",
        ["kl={fn: transition_kl, beta: 0.1}"],
        "transition_kl: compares steps",
    ),
    (
        "shapes/diffusion_nft",
        ["kl={fn: early_mean_gap, beta: 1, steps: 2}"],
        "early_mean_gap: comp",
    ),
    ("shapes/awm", ["loss={fn: guard, clip_low: 0.1, clip_high: 0.1}"], "guard: compares steps"),
    ("shapes/awm", ["loss={fn: divergence_mask, most: 1}"], "divergence_mask: compares steps"),
    ("shapes/flow_grpo_full", ["loss={fn: nft, beta: 1}"], "nft: compares velocities"),
    ("shapes/flow_grpo_full", ["loss={fn: ram}"], "ram: compares velocities"),
    ("shapes/grpo_guard", ["segment={fn: fixed, sizes: [1, 2]}"], "guard: its ratio is that of a"),
    ("shapes/crd", ["likelihood.shared_times=false"], "likelihood.shared_times=true"),
    (
        "shapes/dense_grpo",
        ["transition.fn=stepwise_sde", "plan.noise_scale=1.5"],
        "from 0 to 1, got",
    ),
    ("shapes/pref_grpo", ["rewards={wins: {fn: win_rate, judge: {fn: nobody}}}"], "nobody"),
]


@pytest.mark.parametrize(("name", "changes", "words"), WRONG)
def test_it_is_refused_before_the_model(
    tmp_path: Path, name: str, changes: list[str], words: str
) -> None:
    """The model of this config cannot be made, so the error is older than it."""
    rewards = "rewards={red: {fn: toykit.reddish}}" if name == "shapes/spo" else ""
    given = [*axes(name), *([rewards] if rewards else []), *changes]
    with pytest.raises(ConfigError, match=words):
        Trainer(toy(tmp_path, "model={fn: toykit.unloadable}", *given))
