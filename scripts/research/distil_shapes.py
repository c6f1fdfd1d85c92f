"""Distil the shapes model to four steps: low-rank adapters that take one Euler step where the model
itself takes several.

::

    python scripts/research/distil_shapes.py --minutes 30

writes assets/shapes-student/four_steps.safetensors, the student of configs/shapes/tdm_r1.yaml, and
assets/results/shapes-student.json, what it reaches on held-out prompts beside its teacher. The
teacher samples from noise; between two of the student's four sigmas it takes `FINE` Euler steps.
The student's velocity at the first state is fitted to the straight line to the last (progressive
distillation, 2202.00512, in one go).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.config.load import Config, load_config
from flowrl.core.environment import environment
from flowrl.core.files import write_json
from flowrl.core.prompts import batch_for, load_prompts
from flowrl.core.types import FlowModel
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.training.weights import Weights

OUT = Path("assets/shapes-student/four_steps.safetensors")
RESULT = Path("assets/results/shapes-student.json")
STEPS, FINE = 4, 5


def main() -> None:
    """Train and save, unless only asked to measure; then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of one processor")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", action="store_true", help="the student that is there")
    asked = parser.parse_args()
    here = environment()  # as it is now: others may work on the code meanwhile
    config = load_config("shapes/tdm_r1", ["train.start=''"])
    model: FlowModel = config.call("model")()
    weights = Weights(model.trainable())
    weights.snapshot("teacher")
    weights.snapshot("student")
    if not asked.measure:
        _distil(asked, config, model, weights)
    # beside the teacher, from the file
    student = {name: rows.float() for name, rows in load_file(OUT).items()}
    weights.add("student", student)
    found = {"teacher, 10 steps": _measure(config, model, weights, "teacher", 10)}
    found["teacher, 4 steps"] = _measure(config, model, weights, "teacher", STEPS)
    found["student, 4 steps"] = _measure(config, model, weights, "student", STEPS)
    write_json(RESULT, {"strict": found, "environment": here})
    print(found)


def _distil(asked: argparse.Namespace, config: Config, model: FlowModel, weights: Weights) -> None:
    """Train by the processor's clock, and save the averaged weights."""
    params = model.trainable()
    optimizer = torch.optim.AdamW(list(params.values()), lr=asked.lr, weight_decay=0.0)
    # minutes of this process alone: a busy machine gets about the same training
    began, step = time.process_time(), 0
    while (used := (time.process_time() - began) / (60 * asked.minutes)) < 1:
        # the rate warms up in 20 steps, stays, and falls to zero over the second half
        optimizer.param_groups[0]["lr"] = asked.lr * min(1, (step + 1) / 20, 2 * (1 - used))
        loss = _loss(config, model, weights, seed=asked.seed, step=step, batch=asked.batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        weights.lerp("student", min(0.99, (1 + step) / (10 + step)))
        if step % 10 == 0:
            print(f"{step:5d}  {100 * used:3.0f} %  loss {loss.item():.4f}", flush=True)
        step += 1
    # the averaged student is what is kept
    OUT.parent.mkdir(parents=True, exist_ok=True)
    kept = weights.state_dict()["student"]
    save_file({name: rows.half().contiguous() for name, rows in kept.items()}, OUT)


def _loss(
    config: Config, model: FlowModel, weights: Weights, *, seed: int, step: int, batch: int
) -> Tensor:
    """Let the teacher sample, and return the student's distance to its straight lines."""
    prompts = load_prompts(config.prompts.train)
    rows = batch_for(prompts, seed=seed, iteration=step, count=batch, balance=None)
    cond = model.encode([prompts.texts[row] for row in rows])
    size = config.image.height, config.image.width
    sigmas = model.sigmas(STEPS, *size).tolist()
    rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
    x = torch.randn(batch, *model.latent_shape(*size), generator=rng)
    # the teacher's way, of which every FINE-th state is kept
    states = [x]
    with torch.no_grad(), weights.using("teacher"):
        for high, low in zip(sigmas, sigmas[1:], strict=False):
            for k in range(FINE):
                here = torch.full((batch,), high + (low - high) * k / FINE)
                x = x - (high - low) / FINE * model.velocity(x, here, cond)
            states.append(x)
    # the student's velocity where each step begins
    gaps = []
    for k, (high, low) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        line = (states[k] - states[k + 1]) / (high - low)
        v = model.velocity(states[k], torch.full((batch,), high), cond)
        gaps.append((v - line).square().mean())
    return torch.stack(gaps).mean()


def _measure(
    config: Config, model: FlowModel, weights: Weights, name: str, steps: int
) -> dict[str, Any]:
    """Score held-out prompts -> share of right images, and its interval."""
    prompts = load_prompts(config.prompts.test)
    rewards = {"strict": config.rewards["strict"].make()}
    with weights.using(name):
        found = evaluate_prompts(
            model,
            prompts,
            rewards,
            headline="strict",
            height=config.image.height,
            width=config.image.width,
            steps=steps,
            images=1,
            seed=config.eval.seed,
        )
    return {"right": found["strict"], "interval": found["interval"]}


if __name__ == "__main__":
    main()
