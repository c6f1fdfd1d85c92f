"""Measure how often the shapes checker agrees with the truth known from the layout, task by task.

Every scene is judged against three records: its own (true), another one of the same task drawn at
random, and its own with one word changed (a class, a count, a colour or a relation). The truth of
each pair comes from the layout by GenEval's rules, written here a second time and plainly. With a
model folder the images also go through its VAE.

Example: ``python scripts/research/check_checker.py --scenes 10000 --model assets/shapes-sd3``
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import TASKS, all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import (
    CLASSES,
    COLORS,
    MAX_OBJECTS,
    RELATIONS,
    Scenes,
    render,
)

Record = dict[str, Any]
KINDS = ("own", "random", "near")


def extent(scenes: Scenes, row: int, slot: int) -> tuple[float, float, float, float]:
    """Bound one shape of a layout: -> (left, top, right, bottom) in pixels."""
    x, y = scenes.center[row, slot]
    r = float(scenes.radius[row, slot])
    side = 0.88 * r if CLASSES[scenes.shape[row, slot]] == "square" else r
    base = 0.85 * r if CLASSES[scenes.shape[row, slot]] == "triangle" else side
    return float(x) - side, float(y) - side, float(x) + side, float(y) + base


def related(a: tuple[float, ...], b: tuple[float, ...], relation: str) -> bool:
    """Say whether box a stands in the relation to box b by GenEval's rule."""
    off = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    dims = [(a[i + 2] - a[i]) + (b[i + 2] - b[i]) for i in (0, 1)]
    shrunk = [
        float(np.sign(o)) * max(abs(o) - 0.1 * d, 0.0) for o, d in zip(off, dims, strict=True)
    ]
    if all(abs(s) < 1e-3 for s in shrunk):
        return False
    dx, dy = (s / math.hypot(*off) for s in shrunk)
    return {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}[
        relation
    ]


def truth(scenes: Scenes, row: int, record: Record) -> bool:
    """Judge the layout of one scene by GenEval's rules."""
    slots = range(int(scenes.number[row]))
    # entry by entry: enough objects of the class, all of the colour, all in the relation
    groups: list[list[int]] = []
    for entry in record["include"]:
        mine = [s for s in slots if CLASSES[scenes.shape[row, s]] == entry["class"]][
            : entry["count"]
        ]
        if len(mine) < entry["count"]:
            return False
        if "color" in entry and any(
            list(COLORS)[scenes.color[row, s]] != entry["color"] for s in mine
        ):
            return False
        # a position names an earlier entry, which every object has to be related to
        if "position" in entry:
            relation, reference = entry["position"]
            pairs = [(a, b) for a in mine for b in groups[reference]]
            if not all(
                related(extent(scenes, row, a), extent(scenes, row, b), relation) for a, b in pairs
            ):
                return False
        groups.append(mine)
    # nothing may be there more often than was asked for
    there = [CLASSES[scenes.shape[row, s]] for s in slots]
    counts = {c: there.count(c) for c in CLASSES}
    return all(counts[e["class"]] < e["count"] for e in record["exclude"])


def near_miss(record: Record, rng: np.random.Generator) -> Record:
    """Change one word of a record, and its exclusions with it; a changed relation may still be true
    of a scene."""
    # what to change: the count only where one kind of object is asked for
    new: Record = copy.deepcopy(record)
    entry = new["include"][int(rng.integers(len(new["include"])))]
    what = str(
        rng.choice(
            [key for key in entry if key != "count"] + ["count"] * (len(new["include"]) == 1)
        )
    )
    if what == "class":
        used = {e["class"] for e in new["include"]}
        entry["class"] = str(rng.choice([c for c in CLASSES if c not in used]))
    elif what == "count":
        entry["count"] = int(
            rng.choice(
                [n for n in (entry["count"] - 1, entry["count"] + 1) if 1 <= n <= MAX_OBJECTS]
            )
        )
    elif what == "color":
        entry["color"] = str(rng.choice([c for c in COLORS if c != entry["color"]]))
    else:
        entry["position"][0] = str(rng.choice([r for r in RELATIONS if r != entry["position"][0]]))
    # the exclusions follow from what is wanted now: one more of any class is wrong
    wanted = dict.fromkeys(CLASSES, 0)
    for one in new["include"]:
        wanted[one["class"]] += one["count"]
    new["exclude"] = [{"class": c, "count": n + 1} for c, n in wanted.items()]
    return new


def round_trip(folder: Path) -> Callable[[Tensor], Tensor]:
    """Load a model folder's VAE: -> a function that encodes (mean) and decodes images in [0,
    1]."""
    from diffusers import AutoencoderKL

    if not (folder / "vae").is_dir():
        raise ModelError(
            f"expected a diffusers VAE in {folder / 'vae'}; found no such folder. Leave --model "
            "out."
        )
    vae = AutoencoderKL.from_pretrained(folder, subfolder="vae").eval()

    @torch.no_grad()
    def through(images: Tensor) -> Tensor:
        latents = vae.encode(images * 2 - 1).latent_dist.mode()
        return (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)

    return through


def measure(
    task: str,
    *,
    scenes: int,
    seed: int,
    batch: int = 250,
    through: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """Judge `scenes` fresh scenes of a task against their own, a random and a near-miss record
    each."""
    rng = np.random.default_rng([seed, TASKS.index(task)])
    pool = all_records()[task]
    tally = {
        kind: np.zeros(4, np.int64) for kind in KINDS
    }  # pairs, agreements, false accepts, false refusals
    errors, seconds, worst = 0.0, 0.0, 1.0
    for start in range(0, scenes, batch):
        own = [pool[i] for i in rng.integers(len(pool), size=min(batch, scenes - start))]
        drawn = scenes_for(own, rng)
        clean = render(drawn)
        images = clean if through is None else through(clean)
        errors += float(((images - clean) ** 2).mean((1, 2, 3)).sum())
        others = [pool[i] for i in rng.integers(len(pool), size=len(own))]
        for kind, records in zip(
            KINDS, (own, others, [near_miss(r, rng) for r in own]), strict=True
        ):
            expected = np.array([truth(drawn, i, r) for i, r in enumerate(records)])
            began = time.process_time()
            verdict = check(images, records)
            seconds += time.process_time() - began
            got = verdict.strict.numpy()
            tally[kind] += [
                len(got),
                (got == expected).sum(),
                (got & ~expected).sum(),
                (~got & expected).sum(),
            ]
            worst = min(worst, float(verdict.graded.numpy()[expected].min(initial=1.0)))
    total = np.sum(list(tally.values()), 0)
    out: dict[str, float] = {"agreement": float(total[1] / total[0])}
    for kind, (pairs, agree, accepts, refusals) in tally.items():
        out |= {f"{kind}_agreement": float(agree / pairs), f"{kind}_false_accepts": int(accepts)}
        out |= {f"{kind}_false_refusals": int(refusals)}
    out |= {"lowest_graded_of_true": worst, "cpu_ms_per_image": 1000 * seconds / (3 * scenes)}
    return out | ({"psnr_db": float(-10 * np.log10(errors / scenes))} if through else {})


def main() -> None:
    """Measure all tasks and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--scenes", type=int, default=10_000, help="scenes per task")
    parser.add_argument(
        "--vae-scenes",
        type=int,
        default=10_000,
        help="scenes per task that also go through the VAE",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model",
        type=Path,
        default=None,
        help="diffusers folder whose VAE the images go through too",
    )
    parser.add_argument("--out", type=Path, default=Path("assets/results/checker.json"))
    args = parser.parse_args()
    # images as rendered, and with a model also as its VAE gives them back
    ways: dict[str, tuple[int, Callable[[Tensor], Tensor] | None]] = {
        "rendered": (args.scenes, None)
    }
    if args.model is not None:
        ways["vae_round_trip"] = (args.vae_scenes, round_trip(args.model))
    # agreement by way and task
    result: dict[str, Any] = {"seed": args.seed}
    for way, (scenes, through) in ways.items():
        result[way] = {"scenes_per_task": scenes}
        for task in TASKS:
            result[way][task] = measure(task, scenes=scenes, seed=args.seed, through=through)
            print(
                f"{way:15} {task:14} "
                + " ".join(f"{k}={v:.4g}" for k, v in result[way][task].items()),
                flush=True,
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
