"""How well the model does on prompts, and whether it reads the order of their words."""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from common import CHANNELS, GRID, TOKENS
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformer import velocity_and_middle
from transformers import CLIPTokenizer

from flowrl.evaluation.suites.shapes.checker import ORDER_TASKS, check, word_order
from flowrl.evaluation.suites.shapes.lists import benchmark_lists
from flowrl.evaluation.suites.shapes.prompts import TASKS, Record, all_records

GUIDANCE = (1.0, 2.5)
STACK = 128
"""Images that are made together."""


def validation_records(task: str, number: int) -> list[Record]:
    """Draw prompts without held-out combinations that are no test prompts.

    Where the task has fewer than `number`, they come again and again.
    """
    tests = {record["prompt"] for record in benchmark_lists().test}
    seen = [record for record in all_records()[task] if not record["held_out"]]
    pool = [record for record in seen if record["prompt"] not in tests]
    return (random.Random(7).sample(pool, min(number, len(pool))) * number)[:number]


@torch.no_grad()
def evaluate(
    network: nn.Module, vae: AutoencoderKL, tokenizer: CLIPTokenizer, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the strict accuracy per task on validation prompts, at each guidance.

    `order` counts, of the images of a task with exactly the two right shapes, those with the asked
    order, with the opposite one, and with neither.
    """
    # prompts and noise, the same each time
    records = []
    for task in TASKS:
        records += validation_records(task, args.eval_images)
    ids = _ids(tokenizer, [record["prompt"] for record in records])
    empty = _ids(tokenizer, [""])
    generator = torch.Generator().manual_seed(99)
    noise = torch.randn(len(records), CHANNELS, GRID, GRID, generator=generator)
    out: dict[str, Any] = {}
    for guidance in GUIDANCE:
        # images
        parts = []
        for some, x in zip(ids.split(STACK), noise.split(STACK), strict=True):
            latents = _sample(network, some, empty, x, guidance, args)
            latents = latents / vae.config.scaling_factor + vae.config.shift_factor
            parts.append((vae.decode(latents).sample / 2 + 0.5).clamp(0, 1).cpu())
        # scores
        scores = _scores(torch.cat(parts), records)
        out |= {f"g{guidance}{name}": score for name, score in scores.items()}
    return out


def _ids(tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    options = {"padding": "max_length", "max_length": TOKENS, "return_tensors": "pt"}
    return tokenizer(texts, **options).input_ids


def _sample(
    network: Any, ids: Tensor, empty: Tensor, x: Tensor, guidance: float, args: argparse.Namespace
) -> Tensor:
    """Follow the velocity from noise [B, 16, 8, 8] in `--eval-steps` steps -> latents."""
    # texts
    device, model, x = args.device, network.model, x.to(args.device)
    with torch.autocast(device.type, torch.bfloat16):
        hidden, pooled = network.text(ids.to(device))
        no_hidden, no_pooled = network.text(empty.to(device).expand(len(x), -1))
    # steps
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(args.eval_steps)
    grid = zip(scheduler.timesteps, scheduler.sigmas, scheduler.sigmas[1:], strict=False)
    for t, now, following in grid:
        time = t.to(device).expand(len(x))
        with torch.autocast(device.type, torch.bfloat16):
            v = velocity_and_middle(model, x, hidden, pooled, time)[0].float()
            if guidance != 1:
                free = velocity_and_middle(model, x, no_hidden, no_pooled, time)[0].float()
                v = free + guidance * (v - free)
        x = x + (following - now) * v
    return x


def _scores(images: Tensor, records: list[Record]) -> dict[str, Any]:
    """Judge images [N, 3, 64, 64] -> the mean over tasks "", and ".<task>", ".<task>_order"."""
    strict = check(images, records).strict.float()
    task = {}
    for name in TASKS:
        rows = [i for i, record in enumerate(records) if record["tag"] == name]
        task[name] = strict[rows].mean().item()
    out: dict[str, Any] = {"": sum(task.values()) / len(task)}
    out |= {f".{name}": round(value, 3) for name, value in task.items()}
    for name in ORDER_TASKS:
        out[f".{name}_order"] = list(word_order(images, records, name))
    return out
