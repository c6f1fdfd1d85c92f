"""Calibrate the noise scale of each step of a plan `comb`, as DenseGRPO (2601.20218) does.

    python scripts/assets/calibrate_noise.py shapes/dense_grpo --rounds 20 --out scales.json
    flowrl train shapes/dense_grpo "plan.noise_scale=[0.41, 0.38, 0.4]"

The second line has the scales that the first one printed. Before training, the base model samples
trajectories, and each is rewarded before its first draw and after every one. What a draw adds to
the reward is its gain. The paper's rule: where the numbers of positive and of negative gains at a
step differ by less than 2, the step's scale grows by 0.01, else it falls by 0.01.

Ours, since the paper does not say it: where the scales start (the config's), how many rounds there
are (`--rounds`), how many trajectories one has (those of one iteration of the config, for which
`train.prompts` and `train.group` can be set on the command line; 2 of many is a narrow margin, and
`--margin` widens it), that every round has prompts and noise of its own, and that a scale stays
between one move and the largest that the transition takes, or where it takes any, the larger of 1
and the largest scale at the start. **Differs:** the paper's number is the whole rate of the step;
here it is the scale that the config's transition reads.

The file: {"noise_scale": a scale per step with noise, "rounds": for each round the scales that it
sampled with, and how many gains were positive and negative}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.credit._chains import comb_of
from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.files import write_json
from flowrl.training.rehearsal import MOST_NOISE_SCALE
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer

MOVE, MARGIN = 0.01, 2  # the paper's


def moved(
    scales: Sequence[float],
    positive: Sequence[int],
    negative: Sequence[int],
    *,
    margin: int = MARGIN,
    most: float = 1.0,
) -> list[float]:
    """Move each step's scale by the rule, given how many gains were above and below 0 there."""
    found = []
    for scale, up, down in zip(scales, positive, negative, strict=True):
        step = MOVE if abs(up - down) < margin else -MOVE
        found.append(round(min(max(scale + step, MOVE), most), 6))
    return found


def gains(trainer: Trainer) -> Tensor:
    """Sample the trainer's next iteration -> what each draw of each trajectory adds [C, w]. Raises
    ConfigError for a plan without previews and a baseline."""
    seen = collect(trainer, trainer.rows())
    ro = seen.rollout
    comb = comb_of("calibrate_noise", ro.leaf, ro.tree, baseline=True)
    reward = trainer.reward_set.judged(seen.values, seen.batch, ro.leaf, ro.tree).double()
    return reward[torch.cat([comb.start[:, None], comb.seen], 1)].diff(dim=1)


def calibrate(config: Config, *, rounds: int, margin: int = MARGIN) -> dict[str, Any]:
    """Move the scales `rounds` times -> what the file holds. Raises ConfigError."""
    if config.plan.fn != "comb" or rounds < 1:
        raise ConfigError(
            "calibrate_noise: expected plan comb and --rounds of at least 1, got "
            f"{config.plan.fn} and {rounds}"
        )
    size, given = config.plan.kwargs["size"], config.plan.kwargs["noise_scale"]
    scales = [given] * size if isinstance(given, int | float) else list(given)
    most = MOST_NOISE_SCALE.get(config.transition.fn, max(1.0, *scales))
    model, told = None, []
    for number in range(rounds):
        # a config per round, since the plan is a part of it; the model stays
        plan = replace(config.plan, kwargs={**config.plan.kwargs, "noise_scale": scales})
        trainer = Trainer(replace(config, plan=plan), model=model)
        model, trainer.state.iteration = trainer.model, number
        gain = gains(trainer)
        positive, negative = ((sign * gain > 0).sum(0).tolist() for sign in (1, -1))
        told.append({"noise_scale": scales, "positive": positive, "negative": negative})
        scales = moved(scales, positive, negative, margin=margin, most=most)
    return {"noise_scale": scales, "rounds": told}


def main() -> int:
    """Calibrate, write the scales, and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", help="as for flowrl train; its plan is comb with baseline: true")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, as for flowrl train")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--margin", type=int, default=MARGIN)
    parser.add_argument("--plugin", action="append", default=[], help="as for flowrl train")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that is written")
    given = parser.parse_args()
    try:
        config = load_config(given.config, given.overrides, given.plugin)
        found = calibrate(config, rounds=given.rounds, margin=given.margin)
        write_json(given.out, found)
    except FlowRLError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"plan.noise_scale={found['noise_scale']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
