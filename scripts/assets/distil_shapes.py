"""Distil the shapes model to four steps: low-rank adapters that take one Euler step where the model
itself takes several.

::

    python scripts/assets/distil_shapes.py --steps 2400

writes assets/shapes-student/four_steps.safetensors, the student of shapes/tdm_r1, in twenty minutes
of one core. First the teacher samples `--trajectories` of training prompts in ten Euler steps,
whose states at the student's four sigmas are kept. Then the student's velocity at each of them is
fitted to the straight line to the next (progressive distillation, 2202.00512, in one go).

The teacher may be one that was trained further: `--teacher` names its run, or `--model` its whole
pipeline, whose student then stands on that; `--out` is the student's file.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowrl.config.load import Config, load_config
from flowrl.core.prompts import load_prompts, stream
from flowrl.core.types import FlowModel
from flowrl.training.start_weights import start_from
from flowrl.training.weights import Weights

OUT = Path("assets/shapes-student/four_steps.safetensors")
BATCH, LR, SEED = 64, 2e-3, 0
STEPS, KEPT = 4, (0, 3, 6, 9, 10)  # of the student; its sigmas' places among the teacher's ten


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2400, help="of training")
    parser.add_argument("--trajectories", type=int, default=8192, help="of the teacher")
    parser.add_argument("--teacher", default="", help="run of a LoRA of the same layers")
    parser.add_argument("--model", default="assets/shapes-sd3", help="folder of the pipeline")
    parser.add_argument("--out", type=Path, default=OUT, help="file of the student")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config("shapes/tdm_r1", ["train.start=''", f"model.path={asked.model}"])
    model: FlowModel = config.call("model")()
    weights = Weights(model.trainable())
    if asked.teacher:
        start_from(asked.teacher, model.trainable(), "--teacher")
    weights.snapshot("teacher")
    weights.snapshot("student")
    _distil(asked, config, model, weights)


class Taught(NamedTuple):
    """What the teacher drew: states at the student's sigmas, and of which prompts."""

    states: Tensor  # [N, STEPS + 1, *latent] float16
    rows: Tensor  # [N] rows of `cond`
    cond: dict[str, Tensor]  # of all training prompts
    sigmas: Tensor  # [STEPS + 1]


def _distil(asked: argparse.Namespace, config: Config, model: FlowModel, weights: Weights) -> None:
    """Train, and save the averaged weights."""
    with torch.no_grad(), weights.using("teacher"):
        taught = _teach(config, model, asked.trajectories)
    params = model.trainable()
    optimizer = torch.optim.AdamW(list(params.values()), lr=LR, weight_decay=0.0)
    rng = torch.Generator().manual_seed(SEED)
    for step in range(asked.steps):
        # the rate warms up in 20 steps, stays, and falls to zero over the second half
        used = step / asked.steps
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / 20, 2 * (1 - used))
        loss = _loss(model, taught, rng)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        weights.lerp("student", min(0.98, (1 + step) / (10 + step)))
        if step % 50 == 0:
            print(f"{step:5d}  {100 * used:3.0f} %  loss {loss.item():.4f}", flush=True)
    # the averaged student is what is kept
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    kept = weights.state_dict()["student"]
    save_file({name: rows.half().contiguous() for name, rows in kept.items()}, asked.out)


def _teach(config: Config, model: FlowModel, count: int) -> Taught:
    """Let the teacher sample `count` images of training prompts, 128 at a time."""
    prompts = load_prompts(config.prompts.train)
    size = config.image.height, config.image.width
    fine = model.sigmas(KEPT[-1], *size)
    cond = model.encode(prompts.texts)
    states, rows = [], []
    for part in range(-(-count // 128)):
        mine = torch.tensor(stream(prompts, seed=SEED, first=128 * part, count=128))
        rng = torch.Generator().manual_seed(SEED * 1_000_003 + part)
        x = torch.randn(len(mine), *model.latent_shape(*size), generator=rng)
        words = {name: value[mine] for name, value in cond.items()}
        way = [x]
        for high, low in itertools.pairwise(fine.tolist()):
            x = x - (high - low) * model.velocity(x, torch.full((len(mine),), high), words)
            way.append(x)
        states.append(torch.stack([way[k] for k in KEPT], 1).half())
        rows.append(mine)
        print(f"teacher: {128 * (part + 1)} of {count} images", flush=True)
    return Taught(torch.cat(states), torch.cat(rows), cond, fine[list(KEPT)])


def _loss(model: FlowModel, taught: Taught, rng: torch.Generator) -> Tensor:
    """Return the student's distance to the lines between states, of random ones; a step is drawn
    as often as it is long."""
    length = taught.sigmas[:-1] - taught.sigmas[1:]
    k = torch.multinomial(length, BATCH, replacement=True, generator=rng)
    one = torch.randint(len(taught.rows), (BATCH,), generator=rng)
    start, end = (taught.states[one, k + more].float() for more in (0, 1))
    line = (start - end) / length[k].view(-1, *[1] * (start.ndim - 1))
    words = {name: value[taught.rows[one]] for name, value in taught.cond.items()}
    return (model.velocity(start, taught.sigmas[k], words) - line).square().mean()


if __name__ == "__main__":
    main()
