"""Train a small preference model on latents of shapes, for shapes/dina_lrm.

    python scripts/shapes_latent_preference.py --out data/shapes_latent

The embedded base model draws images of prompts, and the reward `shapes` says which of two is
better; equal ones are left out. Both latents get the same noise at one random noise level, and the
model has to prefer the better one: DiNa-LRM (2602.11146) and its loss. Each round's pairs are
judged before they are trained on; what is printed, and written to `accuracy.json`, is of new pairs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shapes_step_aware import Pairs
from torch import Tensor

from flowrl.core.files import write_json
from flowrl.core.noise_path import interpolate
from flowrl.core.shipped_files import resource
from rewards._backbones.latent_judge import LatentJudge, fidelity
from rewards.latent_preference import SHAPE, WEIGHTS, load_transformer

LEVELS = (0.1, 0.4, 0.7)  # at which new pairs are judged


def judged(judge: LatentJudge, pairs: tuple[Tensor, Tensor], cond: dict[str, Tensor]) -> list[int]:
    """Count the pairs that are judged right at each of LEVELS."""
    right = []
    for level in LEVELS:
        sigma = torch.full((len(pairs[0]),), level)
        noise = torch.randn_like(pairs[0])
        with torch.no_grad():
            better, worse = (judge(interpolate(x, noise, sigma), sigma, **cond) for x in pairs)
        right.append(int((better > worse).sum()))
    return right


def main() -> None:
    """Train, and write the folder that reward `latent_preference` takes as its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/shapes_latent"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps on a round's pairs")
    parser.add_argument("--keep", type=int, default=20, help="rounds whose pairs are drawn again")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--images", type=int, default=4)
    given = parser.parse_args()
    torch.manual_seed(0)
    # pairs come from the base model while training: none is read from disk
    source = Pairs(given.prompts, given.images)
    shape: dict[str, Any] = {"taps": [2, 4, 5], "width": 128, "queries": 4}
    judge = LatentJudge(load_transformer(str(resource("assets/shapes-sd3"))), **shape)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=5e-4, weight_decay=0.01)
    memory: list[tuple[tuple[Tensor, Tensor], dict[str, Tensor]]] = []
    rows: list[tuple[int, list[int]]] = []
    for k in range(given.rounds):
        good, bad, texts = source.draw(k)
        if not texts:
            continue
        # new pairs are judged before they are trained on, so the accuracy is of unseen ones
        with torch.no_grad():
            found = source.trainer.model.encode(texts)
        cond = {name: found[name].float() for name in ("embeds", "pooled")}
        rows.append((len(texts), judged(judge, (good, bad), cond)))
        memory = [*memory, ((good, bad), cond)][-given.keep :]
        # one step on the new pairs, the others on kept ones in turn
        for step in range(given.steps):
            (one, other), words = memory[-1 - (step * 7 + k) % len(memory) if step else -1]
            # both images of a pair get the same noise at the same level [B]
            sigma, noise = torch.rand(len(one)), torch.randn_like(one)
            better, worse = (
                judge(interpolate(x, noise, sigma), sigma, **words) for x in (one, other)
            )
            optimizer.zero_grad()
            fidelity(better - worse, sigma).mean().backward()
            optimizer.step()
        if (k + 1) % 10 == 0 or k + 1 == given.rounds:
            print(f"round {k + 1}: {json.dumps(accuracy(rows[-10:]))}", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().contiguous() for name, value in judge.state_dict().items()}
    save_file(state, given.out / WEIGHTS)
    write_json(given.out / SHAPE, shape)
    write_json(given.out / "accuracy.json", accuracy(rows[-10:]))
    print(f"{given.out}; now flowrl train shapes/dina_lrm")


def accuracy(rows: list[tuple[int, list[int]]]) -> dict[str, float]:
    """Return the share of new pairs of some rounds that were judged right, by noise level."""
    pairs = sum(count for count, _ in rows)
    found: dict[str, float] = {"pairs": pairs}
    for place, level in enumerate(LEVELS):
        found[f"{level:g}"] = round(sum(right[place] for _, right in rows) / pairs, 3)
    return found


if __name__ == "__main__":
    main()
