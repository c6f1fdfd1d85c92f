"""Measure which layers learn from a rollout: how well the gradients of independent rollouts agree, layer by layer.

    python scripts/gradient_agreement.py shapes/flow_grpo

Rolls out `--batches` iterations without changing a weight, every second one for the same prompts, and prints the mean
cosine between their gradients: for the same prompts, and for other prompts. Each number of a gradient is first divided
by its root mean square over the batches, as AdamW would do, or a few large ones would drown the rest. 0 is noise;
agreement between other prompts is what carries over to prompts that were never trained on. Writes
assets/results/gradient-agreement.json, and a chart to assets/figures/gradient-agreement.png.
"""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flowrl.batches import decision_nodes
from flowrl.config import load_config
from flowrl.evaluate import as_uint8
from flowrl.log import environment
from flowrl.loop import Trainer, write_json
from flowrl.prompts import batch_for


def gradient(trainer: Trainer, rows: list[int]) -> dict[str, Tensor]:
    """Return the gradient of one rollout for the training prompts `rows`, by parameter."""
    ro = trainer.sample(rows)
    with torch.no_grad():
        images = as_uint8(trainer.model.decode(ro.x[ro.leaf].float()))
    weight = trainer.credit(trainer.score(ro, images, rows)[0].to(ro.x.device), ro.leaf, ro.tree)
    nodes = decision_nodes(ro)
    for part in nodes.split(trainer.config.train.micro_batch):
        trainer._backward(ro, weight, part, len(nodes))
    out = {name: p.grad.flatten().clone() for name, p in trainer.params.items() if p.grad is not None}
    trainer.optimizer.zero_grad(set_to_none=True)
    return out


def agreement(gradients: list[Tensor]) -> dict[str, Any]:
    """Average the cosines of all pairs; even batches have the same prompts, and so have odd ones."""
    stack = torch.nn.functional.normalize(torch.stack(gradients).double(), dim=1)
    cosine = stack @ stack.T
    out: dict[str, Any] = {"parameters": len(gradients[0])}
    for name, wanted in (("same_prompts", 0), ("other_prompts", 1)):
        pairs = itertools.combinations(range(len(gradients)), 2)
        values = [float(cosine[i, j]) for i, j in pairs if (i - j) % 2 == wanted]
        # pairs share batches, so this is a rough guide only
        out[name], out[f"{name}_error"] = mean(values), stdev(values) / len(values) ** 0.5
    return out


def kind(name: str) -> str:
    """Name a parameter's layer without the number of its block."""
    return re.sub(r"^transformer_blocks\.\d+\.|\.(weight|bias)$", "", name)


def chart(layers: dict[str, Any], path: Path) -> None:
    """Draw the cosines as bars."""
    figure = Figure(figsize=(8, 0.28 * len(layers) + 1), layout="constrained")
    axes = figure.subplots()
    for shift, name, color in ((-0.2, "same_prompts", "#4477aa"), (0.2, "other_prompts", "#ee6677")):
        place = [i + shift for i in range(len(layers))]
        values = [row[name] for row in layers.values()]
        errors = [row[f"{name}_error"] for row in layers.values()]
        axes.barh(place, values, 0.38, xerr=errors, color=color, label=name.replace("_", " "), error_kw={"lw": 0.8})
    axes.set_yticks(range(len(layers)), list(layers), fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", lw=0.8)
    axes.set_xlabel("cosine between the gradients of independent rollouts")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="shapes/flow_grpo")
    parser.add_argument("overrides", nargs="*", help="key.subkey=value")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("assets"))
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    chosen = config.model.kwargs.get("layers") or []
    config = load_config(args.config, [*args.overrides, "model.layers=null"])
    trainer = Trainer(config)
    found: list[dict[str, Tensor]] = []
    for batch in range(args.batches):
        rows = batch_for(trainer.train_set, seed=config.seed, iteration=batch % 2, count=config.train.prompts)
        trainer.iteration = batch  # other noise
        found.append(gradient(trainer, rows))
        print(f"batch {batch + 1} of {args.batches}", flush=True)
    groups: dict[str, list[str]] = {}
    for name in found[0]:
        groups.setdefault(kind(name), []).append(name)
        ours = any(f".{kind(name)}".endswith(f".{layer}") for layer in chosen)
        groups.setdefault("ALL THAT THE CONFIG TRAINS" if ours else "ALL OTHERS", []).append(name)
    for name in found[0]:
        size = torch.stack([one[name] for one in found]).square().mean(0).sqrt()
        for one in found:
            one[name] /= size.clamp_min(torch.finfo(size.dtype).tiny)
    layers = {g: agreement([torch.cat([one[name] for name in names]) for one in found]) for g, names in groups.items()}
    layers = dict(sorted(layers.items(), key=lambda item: -item[1]["other_prompts"]))
    for name, row in layers.items():
        text = "  ".join(f"{p} {row[p]:+.3f} ± {row[p + '_error']:.3f}" for p in ("same_prompts", "other_prompts"))
        print(f"{name:<45} {row['parameters']:>9,} parameters  {text}")
    work = trainer.budget
    result = {"config": config.name, "batches": args.batches, "images_per_batch": work.images, "layers": layers}
    for folder in ("results", "figures"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    write_json(args.out / "results" / "gradient-agreement.json", {**result, "environment": environment()})
    chart(layers, args.out / "figures" / "gradient-agreement.png")


if __name__ == "__main__":
    main()
