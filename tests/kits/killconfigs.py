"""The configs whose runs `killruns.py` kills: axes of shipped ones on the toy field."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image
from toykit import COLORS, axes, toy

from flowrl.config.load import Config
from flowrl.training.checkpoint import checkpoint_folder
from flowrl.training.trainer import Trainer

# a checkpoint after each iteration, of which the newest two are kept: many are written and deleted
OFTEN = ("checkpoint={every: 1, keep: 2}", "eval.every=2", "samples.every=2", "train.parts=2")
REWARDS = (
    "rewards={red: {fn: toykit.warmth}, strict: {fn: toykit.reddish, weight: 0}}",
    "optimizer.lr=0.01",
)
FAMILIES = {
    "policy gradient": ("flow_grpo", "branch_grpo", "grpo_guard", "tp_grpo"),
    "forward process": ("diffusion_nft", "awm"),
    "regression": ("rwr", "best_of_n"),
    "preference": ("diffusion_dpo",),
    "reward gradient": ("draft",),
    "initial noise": ("find_own", "zo_rank_sgd"),
    "credit that remembers": ("ddpo",),
    "reward trained along": ("learned",),
    "models trained along": ("tdm_r1",),
    "teachers": ("flow_opd",),
    "stored pairs": ("diffusion_dpo_offline",),
    "scout": ("sol_rl",),
    "choice of prompts": ("difficulty_bandit", "prompt_replay", "knapsack"),
}
"""Family -> its configs of configs/shapes, or the toy's own method with what `OWN` says."""
FOUR = ("train.prompts=4",)
OWN: dict[str, tuple[str, ...]] = {
    "learned": ("rewards={red: {fn: toykit.apprentice}, strict: {fn: toykit.reddish, weight: 0}}",),
    # samplers remember what each prompt's images were worth
    **{
        name: (*REWARDS, "train.prompts=4", f"sampler={{fn: {name}}}")
        for name in FAMILIES["choice of prompts"]
    },
}


def config_of(name: str, folder: Path) -> Config:
    """Return the toy config with the axes of a shipped one, and write what it reads."""
    if name in OWN:
        return toy(folder, *OFTEN, *OWN[name])
    own = list(axes(f"shapes/{name}"))
    if name == "flow_opd":
        own += [*FOUR, f"loss.teachers={json.dumps(teachers(folder))}"]
    if name == "diffusion_dpo_offline":
        own += [*FOUR]
    if name == "sol_rl":
        own += ["scout={images: 12, steps: 2}", "train.group=4"]
    config = toy(folder, *OFTEN, *REWARDS, *own)
    if name == "diffusion_dpo_offline":
        write_pairs(folder)
    return config


def teachers(folder: Path) -> dict[str, str]:
    """Save two runs whose weights differ, one for each of the toy's tags -> their folders."""
    found = {}
    for seed, tag in enumerate(("even", "odd"), 11):
        run = folder / f"teacher-{tag}"
        other = toy(folder, f"model.seed={seed}", "train.ema=0", "eval.weights=current")
        Trainer(other).save(checkpoint_folder(run, 0))
        found[tag] = str(run)
    return found


def write_pairs(folder: Path) -> None:
    """Write images of two colours, and in place of the toy's prompts a list in which the red one
    is preferred, first or second in turn."""
    names = {"red.png": (200, 40, 90), "green.png": (40, 200, 90)}
    for file, colour in names.items():
        Image.new("RGB", (16, 16), colour).save(folder / file)
    lines = []
    for number, word in enumerate(COLORS):
        first, second = list(names)[:: 1 if number % 2 else -1]
        label = {"image_0": first, "image_1": second, "label_0": number % 2}
        lines.append(json.dumps({"prompt": f"a {word} dot", **label}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
