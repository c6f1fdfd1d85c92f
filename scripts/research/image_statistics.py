"""Compare images of a run with its reference images: before training, after it, and the
references themselves.

    python scripts/research/image_statistics.py runs/shapes-adv-grpo-seed0 \\
        runs/shapes-adv-grpo-seed1

For runs on the shapes benchmark whose reward `real` is `adversarial` with one folder of references.
Images of the held-out prompts, the same noise before and after, are read by the benchmark's
checker, which the reward never saw: what colours their shapes have, how many there are, on how many
images all are readable, and of the prompts that name no colour the colours by themselves. `right`
is the share of right images, the mean over tasks. The Frechet distance to the references is that of
CLS features of assets/shapes-dino. A run with other rewards, beside one that has them, is a
control: `--controls`. `--base model.guidance=3.5 eval.steps=20` measures the base model so.
`--prompts` names another list than the one that the runs watched. Writes
assets/results/<name>-statistics.json and assets/figures/<name>-statistics.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import scipy.linalg
import torch
from PIL import Image
from torch import Tensor

from flowrl import load_config, open_run
from flowrl.core.files import write_json
from flowrl.core.prompts import load_prompts
from flowrl.core.shipped_files import resource
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.detect import detect
from flowrl.evaluation.suites.shapes.scene import COLORS
from flowrl.runs.evaluate import sample_all
from rewards._backbones.dino import Backbone
from rewards._common.scorer import to_pil

KEYS = ("colours", "open_colours")
BEFORE: dict[str, Tensor] = {}  # images of base models, by how they were drawn
INK = {"before": "#9aa0a6", "after": "#1a73e8", "references": "#34a853"}


def readings(images: Tensor) -> dict[str, Any]:
    """Read images [N, 3, 64, 64] -> shares of colours among shapes, of counts and of readable
    images."""
    found = detect(images)
    used = np.arange(found.shape.shape[1]) < found.number[:, None]
    named = used & (found.color >= 0)
    clean = ((found.shape >= 0) & named | ~used).all(1) & (found.number > 0)
    return {
        "images": len(images),
        "colours": (np.bincount(found.color[named], minlength=len(COLORS)) / used.sum()).tolist(),
        "objects": (np.bincount(found.number.clip(0, 5), minlength=6) / len(images)).tolist(),
        "mean_objects": float(found.number.mean()),
        "all_readable": float(clean.mean()),
    }


def frechet(one: np.ndarray, two: np.ndarray) -> float:
    """Return the Frechet distance of two sets of features [N, D], as Gaussians (Heusel et al. 2017,
    1706.08500)."""
    a, b = np.cov(one, rowvar=False), np.cov(two, rowvar=False)
    root = scipy.linalg.sqrtm(a @ b).real
    return float(np.square(one.mean(0) - two.mean(0)).sum() + np.trace(a + b - 2 * root))


def features(images: Tensor) -> np.ndarray:
    """Return CLS features of images [N, 3, H, W] -> [N, D]."""
    options: dict[str, Any] = {"size": None, "device": "auto", "dtype": "float32", "batch": 128}
    backbone = Backbone("assets/shapes-dino", who="image_statistics", **options)
    return torch.cat([part.cls for part in backbone(to_pil(images))]).double().cpu().numpy()


def one_run(
    run: Path, images: int, seed: int, listed: str = "", references: str = ""
) -> dict[str, dict[str, Any]]:
    """Measure a run -> {"before", "after", "references": readings}.

    listed: the prompts, else those that the run watched; references: their folder, else that of the
    run's reward `real`.
    """
    rows: dict[str, dict[str, Any]] = {}
    sets: dict[str, Tensor] = {}
    for name, weights in (("before", "base"), ("after", None)):
        model, config, _ = open_run(run, weights=weights)
        prompts = load_prompts(listed or config.prompts.test)
        draw = partial(sample_all, model, config, prompts.texts, seed=seed, images=images)
        if weights == "base":
            # runs of one base model begin with the same images
            how = f"{config.model.to_dict()} {config.eval} {prompts.texts}"
            sets[name] = BEFORE[how] = BEFORE[how] if how in BEFORE else draw()
        else:
            sets[name] = draw()
        rows[name] = {**readings(sets[name]), **by_prompt(sets[name], prompts.records, images)}
    folder = references or config.rewards["real"].kwargs["references"]
    files = sorted(resource(folder).glob("*.png"))
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    sets["references"] = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    target = features(sets["references"])
    rows["references"] = readings(sets["references"])
    for name in ("before", "after"):
        rows[name]["frechet"] = frechet(features(sets[name]), target)
    return rows


def guided(run: Path, images: int, seed: int, listed: str, changes: list[str]) -> dict[str, Any]:
    """Measure the base model of a run with other settings of sampling, such as guidance."""
    config = load_config(run / "config.yaml", changes)
    prompts = load_prompts(listed or config.prompts.test)
    model = config.call("model")()
    drawn = sample_all(model, config, prompts.texts, seed=seed, images=images)
    return {**readings(drawn), **by_prompt(drawn, prompts.records, images)}


def by_prompt(images: Tensor, records: Sequence[dict[str, Any]], each: int) -> dict[str, Any]:
    """Judge images [P * each, 3, 64, 64] by their prompts' records: the share that is right, the
    mean over tasks, and the colours where the prompt names none."""
    meta = [record for record in records for _ in range(each)]
    right = check((images * 255).round() / 255, meta).strict.float()
    tasks: dict[str, list[float]] = {}
    for record, one in zip(meta, right.tolist(), strict=True):
        tasks.setdefault(record["tag"], []).append(one)
    asks = [json.dumps(record["include"]) for record in meta]
    free = torch.tensor(['"color"' not in one for one in asks])
    found: dict[str, Any] = {"right": mean(map(mean, tasks.values()))}
    return found | ({"open_colours": readings(images[free])["colours"]} if free.any() else {})


def figure(runs: list[dict[str, dict[str, Any]]], path: Path) -> None:
    """Draw the mean over runs side by side; the lines span the runs."""
    # two panels of shares, one of distances
    page, panels = plt.subplots(
        1, 3, figsize=(12, 3.4), gridspec_kw={"width_ratios": [1.5, 1.5, 0.7]}
    )
    for axes, key, labels in zip(
        panels, ("colours", "objects"), (list(COLORS), "012345"), strict=False
    ):
        for at, (name, ink) in enumerate(INK.items()):
            rows = np.array([run[name][key] for run in runs])
            middle = rows.mean(0)
            # error bars go from the lowest run to the highest
            spread = np.abs(np.stack([rows.min(0), rows.max(0)]) - middle)
            axes.bar(
                np.arange(6) + (at - 1) * 0.27,
                middle,
                0.25,
                color=ink,
                label=name,
                yerr=spread,
                capsize=2,
            )
        axes.set_xticks(range(6), labels)
        axes.set_title({"colours": "colours of shapes", "objects": "shapes on an image"}[key])
        axes.set_ylabel({"colours": "share of shapes", "objects": "share of images"}[key])
    panels[0].legend(frameon=False)
    # the references are what distances are to, so they have no bar
    for at, name in enumerate(("before", "after")):
        values = [run[name]["frechet"] for run in runs]
        low, high = mean(values) - min(values), max(values) - mean(values)
        panels[2].bar(at, mean(values), color=INK[name], yerr=[[low], [high]], capsize=3)
    panels[2].set_xticks([0, 1], ["before", "after"])
    panels[2].set_title("Frechet distance\nto the references")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    page.tight_layout()
    page.savefig(path, dpi=110)


def main() -> None:
    """Measure the runs and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--images", type=int, default=8, help="images per prompt")
    parser.add_argument("--seed", type=int, default=11, help="of the noise")
    parser.add_argument("--prompts", default="", help="a list in place of the one they watched")
    parser.add_argument("--controls", type=Path, nargs="*", default=[], help="runs to set beside")
    parser.add_argument("--base", nargs="*", default=[], help="settings of the base model")
    parser.add_argument("--out", type=Path, default=Path("assets"))
    args = parser.parse_args()
    name = load_config(args.runs[0] / "config.yaml").name
    # figures of every run before and after, and of its references
    runs = [one_run(run, args.images, args.seed, args.prompts) for run in args.runs]
    result = {"name": name, "seed": args.seed, "colours": list(COLORS), "runs": runs}
    if args.prompts:
        result["prompts"] = args.prompts
    if args.base:
        row = guided(args.runs[0], args.images, args.seed, args.prompts, args.base)
        result["base"] = {"set": args.base, **row}
    if args.controls:
        first = load_config(args.runs[0] / "config.yaml")
        folder = first.rewards["real"].kwargs["references"]
        result["controls"] = [
            one_run(run, args.images, args.seed, args.prompts, folder) for run in args.controls
        ]
    write_json(args.out / "results" / f"{name}-statistics.json", result)
    figure(runs, args.out / "figures" / f"{name}-statistics.png")
    # the share of two colours, told on the way
    cool = [list(COLORS).index(colour) for colour in ("blue", "purple")]
    for run in [*runs, *result.get("controls", [])]:
        for part, row in run.items():
            said = {"shapes": row["mean_objects"]}
            for key in [key for key in KEYS if key in row]:
                said[f"{key}: blue or purple"] = sum(row[key][c] for c in cool)
            said |= {key: row[key] for key in ("right", "frechet") if key in row}
            print(part, *(f" {key} {value:.3f}" for key, value in said.items()))


if __name__ == "__main__":
    main()
