"""Samplers as data: none, where the images are there already."""

from __future__ import annotations

from typing import Literal

from flowrl.algorithms.rollout.plan_steps import chain, check_steps_and_noise
from flowrl.core.types import Plan


def pairs(
    iteration: int, *, steps: int = 1, judged_by: Literal["labels", "rewards"] = "labels"
) -> Plan:
    """Sample nothing: the images of a prompt are the two that its record names, as in offline
    preference learning (Diffusion-DPO, 2311.12908).

    The list of `prompts.train` has ``image_0``, ``image_1`` and ``label_0`` in each record, as
    `flowrl pairs` writes it; `train.group` is 2.

    Args:
        steps: steps of the model's grid, for likelihood `forward` with `times: grid`; as many as a
            model that predicts noise has training timesteps makes all of them equally likely.
        judged_by: labels = credit sees the labels in place of the rewards, which are only watched;
            rewards = it sees the rewards of the stored images (the paper's pseudo-labels).
    """
    check_steps_and_noise(steps, 0.0)
    return chain(steps, 0.0, range(0))._replace(stored=judged_by)
