"""Train a small preference model on latents of shapes, for shapes/dina_lrm.

    python scripts/assets/shapes_latent_preference.py --out data/shapes_latent

The embedded base model draws images of every training prompt, and the checker says which of them
are right, for their own prompts and for others of the same task. A pair is a right and a wrong
image of one prompt. Half of the pairs are of images that were drawn for it; the others' right image
was drawn for another prompt, so that it is not only its own prompts that the model learns to read.
Both latents of a pair get the same noise at one noise level, and the model has to prefer the right
one: DiNa-LRM (2602.11146) and its loss.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.config.load import load_config
from flowrl.core.noise_path import interpolate
from flowrl.core.prompts import groups_of
from flowrl.core.shipped_files import resource
from flowrl.core.types import Cond
from flowrl.evaluation.suites.shapes.checker import judge_detections
from flowrl.evaluation.suites.shapes.detect import detect
from flowrl.training.rollout import sample_forest
from flowrl.training.trainer import Trainer
from rewards.latent_preference import LatentJudge, fidelity, load_transformer, save_judge

HIGHEST = 0.8  # noise level of training: above it little of an image is left
IMAGES, OTHERS = 8, 16  # of each prompt, and prompts that are put to each image, too
LR = 1e-3
WARM, FALLS = 20, 0.5  # first steps of a rate, and the share of the steps from which it falls


class Pool:
    """Images of the base model for every prompt of a list, and what the checker says of them."""

    def __init__(self, name: str, *, seed: int) -> None:
        other = {"train": "validation", "validation": "train"}[name]
        options = [f"prompts.train=assets/shapes/{name}.jsonl", f"train.group={IMAGES}"]
        options += [f"prompts.test=assets/shapes/{other}.jsonl", f"seed={seed}"]
        run = Trainer(load_config("shapes/best_of_n", options))
        self.records, self.texts = run.train_set.records, run.train_set.texts
        self.tasks = groups_of(run.train_set, "tag")
        x0, own, seen = list[Tensor](), list[int](), list[Tensor]()
        with torch.no_grad():
            self.cond: Cond = run.model.encode(self.texts)
            for first in range(0, len(self.texts), 16):
                rows = list(range(first, min(first + 16, len(self.texts))))
                made = sample_forest(run, rows)
                x0.append(made.x[made.leaf].float())
                own += [rows[group] for group in made.tree.group[made.leaf].tolist()]
                seen.append(run.model.decode(x0[-1]).float())
                run.state.iteration += 1  # other noise
        self.x0, self.own = torch.cat(x0), torch.tensor(own)
        self.found = detect(torch.cat(seen), find_flaws=True)

    def right(self, prompts: Tensor) -> Tensor:
        """Say which image [N] is right for a prompt [N] -> bool [N]."""
        records = [self.records[prompt] for prompt in prompts.tolist()]
        return judge_detections(self.found, records).strict

    def words(self, prompts: Tensor) -> Cond:
        """Return what the transformer reads of prompts [B]."""
        return {name: self.cond[name][prompts].float() for name in ("embeds", "pooled")}


class Images(NamedTuple):
    """Places in a pool of images that are right, and wrong, for each prompt."""

    right: dict[int, list[int]]
    wrong: dict[int, list[int]]

    def both(self) -> list[int]:
        """Return the prompts that have images of both kinds."""
        return sorted(self.right.keys() & self.wrong.keys())


def sorted_images(pool: Pool, prompts: Tensor) -> Images:
    """Sort the images of a pool by whether they are right for prompts [R, N] that were put to
    them."""
    found = Images(defaultdict(list), defaultdict(list))
    for row in prompts:
        for place, (prompt, right) in enumerate(zip(row.tolist(), pool.right(row), strict=True)):
            (found.right if right else found.wrong)[prompt].append(place)
    return found


class Pairs:
    """Pairs of images of a pool, the right one first."""

    def __init__(self, pool: Pool, draw: torch.Generator) -> None:
        self.draw = draw
        self.own = sorted_images(pool, pool.own[None])
        # other prompts of the same task are put to each image
        put = pool.own.repeat(OTHERS, 1)
        for rows in pool.tasks:
            mine = torch.isin(pool.own, torch.tensor(rows))
            count = (OTHERS, int(mine.sum()))
            put[:, mine] = torch.tensor(rows)[torch.randint(len(rows), count, generator=draw)]
        self.others = sorted_images(pool, put)
        self.prompts = self.own.both(), self.others.both()

    def one_of(self, places: list[int]) -> int:
        """Draw one of them."""
        return places[int(torch.randint(len(places), (), generator=self.draw))]

    def batch(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw pairs -> places of the right and of the wrong images [B], prompts [B]."""
        drawn = []
        own, others = self.prompts
        for k in range(count):
            prompt = self.one_of(own if k % 2 else others)
            right = self.own.right if k % 2 else self.others.right
            # images that were drawn for a prompt are wrong in ways that are harder to see
            near = k % 4 != 2 and prompt in self.own.wrong
            wrong = self.own.wrong if near else self.others.wrong
            drawn.append((self.one_of(right[prompt]), self.one_of(wrong[prompt]), prompt))
        better, worse, prompts = torch.tensor(drawn).T
        return better, worse, prompts


def fit(
    judge: LatentJudge, steps: int, lr: float, asked: Callable[[], tuple[Tensor, Tensor]]
) -> None:
    """Train the head, and print the share of each hundred steps' pairs that were judged right;
    `asked` judges pairs and returns the loss, and of each that tells whether it was right."""
    optimizer = torch.optim.AdamW(judge.parameters(), lr=lr, weight_decay=0.01)
    right = seen = 0
    for step in range(steps):
        left = (1 - step / steps) / (1 - FALLS)
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / WARM, left, 1.0)
        optimizer.zero_grad()
        loss, told = asked()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()
        right, seen = right + int(told.sum()), seen + len(told)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"step {step + 1}: {right / seen:.3f} of {seen} pairs right", flush=True)
            right = seen = 0


def train(judge: LatentJudge, pool: Pool, pairs: Pairs, steps: int, batch: int) -> None:
    """Train the head on pairs of a pool."""

    def asked() -> tuple[Tensor, Tensor]:
        better, worse, prompts = pairs.batch(batch)
        # both images of a pair get the same noise at the same level [B]
        sigma = HIGHEST * torch.rand(batch, generator=pairs.draw)
        noise = torch.randn(pool.x0[better].shape, generator=pairs.draw)
        words = pool.words(prompts)
        one, other = (
            judge(interpolate(pool.x0[places], noise, sigma), sigma, **words)
            for places in (better, worse)
        )
        return fidelity(one - other, sigma).mean(), one > other

    fit(judge, steps, LR, asked)


def main() -> None:
    """Train, and write the folder that reward `latent_preference` takes as its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("data/shapes_latent"))
    parser.add_argument("--steps", type=int, default=800, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="pairs of a step")
    given = parser.parse_args()
    torch.manual_seed(0)
    shape: dict[str, Any] = {"taps": [2, 4, 5], "width": 128, "queries": 4}
    judge = LatentJudge(load_transformer(str(resource("assets/shapes-sd3"))), **shape)
    pool = Pool("train", seed=0)
    pairs = Pairs(pool, torch.Generator().manual_seed(0))
    train(judge, pool, pairs, given.steps, given.batch)
    save_judge(judge, shape, given.out)
    print(f"{given.out}; now flowrl train shapes/dina_lrm")


if __name__ == "__main__":
    main()
