"""Every method's own axes, as configs/shapes has them, must raise a linear reward on a small linear
field."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

import pytest
from toykit import axes, toy
from toyscale import SETTING, TOY_SCALE
from trainkit import rise

from flowrl.core.shipped_files import list_configs
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.learning
ITERATIONS, SEEDS = 30, 2
# those have tests of their own: they need a reward that learns, images from files, or other runs;
# the guided ones have the axes of `rwr` and `best_of_n`, and draw with weights that stand still;
# `dina_lrm` has those of `awm`
APART = (
    "shapes/adv_awm",
    "shapes/adv_grpo",
    "shapes/adv_grpo_gated",
    "shapes/best_of_n_guided",
    "shapes/ddrl",
    "shapes/diffusion_dpo_offline",
    "shapes/dina_lrm",
    "shapes/flow_opd",
    "shapes/rwr_guided",
    "shapes/spo",
    "shapes/spo_latent",
    "shapes/tdm_r1_awm",
)
METHODS = [name for name in list_configs() if name.startswith("shapes/") and name not in APART]


def curve(folder: Path, name: str, seed: int) -> list[float]:
    changes = [*SETTING, *axes(name), *TOY_SCALE.get(name, [])]
    trainer = Trainer(toy(folder, *changes, f"seed={seed}", f"model.seed={seed}"))
    rows = [trainer.step() for _ in range(ITERATIONS)]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert max(row.get("on_policy_gap", 0.0) for row in rows) < 1e-4
    return [row["reward/red"] for row in rows]


@pytest.mark.parametrize("name", METHODS)
def test_the_reward_rises(tmp_path: Path, name: str) -> None:
    """Mean red minus mean green of images, moved into [0, 1]: the last 8 iterations against the
    first 8, for each seed.

    Measured: a mean of 0.069 (awm_tree, with 0.035 and 0.102) or more; without a signal a seed
    changes by at most 0.022 (test_learning_toy.py's control, on this scale).
    """
    gains = [rise(curve(tmp_path, name, seed), 8) for seed in range(SEEDS)]
    print(f"{name}: gains {gains}")
    assert mean(gains) > 0.06 and min(gains) > 0.03
