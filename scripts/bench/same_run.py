"""Train a dozen configs that between them use every part of the training loop, and compare two such
recordings bit by bit: every metric of every iteration, every tensor of the last checkpoint.

    python scripts/bench/same_run.py record runs/before     # in one checkout
    python scripts/bench/same_run.py record runs/after      # in another
    python scripts/bench/same_run.py compare runs/before runs/after

Recordings are comparable on one machine only. `--only NAME ...` records some of the configs;
`compare` exits with 1 if anything differs. Tensors are compared by name and content, whatever
their files are called. What depends on the clock is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors import safe_open

ITERATIONS = 20
SMALL = "train.prompts=4 train.rollout_batch=32 train.micro_batch=16 train.threads=1 eval.images=1"
RUNS = {
    "flow_grpo": "shapes/flow_grpo train.updates=2",
    "branch_grpo": "shapes/branch_grpo monitors.gradients.action=skip "
    "monitors.gradients.factor=1.2",
    "awm": "shapes/awm train.empty_prompts=0.2 train.guidance=2.0 monitors.adaptive_kl.target=1e-3",
    "diffusion_nft": "shapes/diffusion_nft scout.images=12 train.parts=2 "
    "train.reference_guidance=2",
    "flow_opd": "shapes/flow_opd",
    "tdm_r1": "shapes/tdm_r1 train.start='' surrogate.alone=4",
    "adv_awm": "shapes/adv_awm train.refill=1",
    "diffusion_dpo_offline": "shapes/diffusion_dpo_offline prompts.train={data}/pairs.jsonl",
    "gardo": "shapes/gardo slow.every=5 slow.above=1e-6",
    "ddrl": "shapes/ddrl prompts.train={data}/images.jsonl",
    "single_stream": "shapes/flow_grpo credit={{fn: single_stream, half: 1e-4}} train.balance=null "
    "sampler={{fn: success_spread}} rewards.shapes.weight=0",
    "draft_lv": "shapes/draft_lv",
    "pepg": "shapes/pepg",
    "nft_refill": "shapes/diffusion_nft train.refill=2 train.refill_spread=0.05",
}
"""Config and overrides; `{data}` is a folder of made images."""
CLOCK = ("seconds", "time", "memory", "images_per", "per_second", "wall")


def record(out: Path, only: list[str]) -> None:
    """Train every config of `RUNS` for a few iterations."""
    out = out.resolve()
    make_data(out / "data")
    for seed in (1, 2):
        train(out / "teachers" / f"{seed}", f"shapes/awm seed={seed}", 2)
    for name, what in RUNS.items():
        if not only or name in only:
            what = what.format(data=out / "data")
            what += f" prompts.test={out / 'data'}/test.jsonl samples.every=0"
            train(out / name, what, ITERATIONS, teachers=out / "teachers")
            print(f"{name}: recorded", flush=True)


def train(run: Path, what: str, iterations: int, teachers: Path | None = None) -> None:
    """Train one config into a folder, by the command line; one that is finished stays."""
    if (run / "done").exists():
        return
    config, *more = _words(what)
    more += [*SMALL.split(), f"train.iterations={iterations}", f"checkpoint.every={iterations}"]
    if config == "shapes/flow_opd":
        tasks = ("single_object", "two_object", "colors", "counting", "position", "color_attr")
        runs = {task: f"{teachers}/{1 + place % 2}" for place, task in enumerate(tasks)}
        more.append(f"loss.teachers={json.dumps(runs)}")
    command = [sys.executable, "-m", "flowrl", "train", config, *more, "--run", str(run)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    (run / "done").touch()


def _words(what: str) -> list[str]:
    """Split at the spaces outside of braces."""
    words, depth = [""], 0
    for letter in what:
        depth += (letter == "{") - (letter == "}")
        if letter == " " and not depth:
            words.append("")
        else:
            words[-1] += letter
    return [word for word in words if word]


def make_data(folder: Path) -> None:
    """Write pairs and real images of the first training prompts: noise, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = Path("assets/shapes/train.jsonl").read_text(encoding="utf-8").splitlines()[:48]
    pairs, images = [], []
    for row, line in enumerate(lines):
        names = []
        for side in (0, 1):
            drawn = np.random.default_rng([row, side])
            levels = drawn.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            names.append(f"{row}-{side}.png")
            Image.fromarray(levels).save(folder / names[-1])
        record = json.loads(line)
        pair = {"image_0": names[0], "image_1": names[1], "label_0": row % 2}
        pairs.append(json.dumps({**record, **pair}))
        images.append(json.dumps({**record, "image": names}))
    test = Path("assets/shapes/validation.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    (folder / "test.jsonl").write_text("\n".join(test) + "\n", encoding="utf-8")
    (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n", encoding="utf-8")
    (folder / "images.jsonl").write_text("\n".join(images) + "\n", encoding="utf-8")


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Return the metrics of every iteration and evaluation, without those of the clock."""
    rows = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.append({key: row[key] for key in row if not _of_clock(key)})
    return rows


def _of_clock(key: str) -> bool:
    """Say whether a metric depends on the clock."""
    return any(word in key for word in CLOCK)


def tensors_of(run: Path) -> Counter[tuple[str, str]]:
    """Return (name, hash of shape and bytes) of every tensor of the last checkpoint."""
    last = max((run / "checkpoints").glob("[0-9]*"), key=lambda folder: int(folder.name))
    found: Counter[tuple[str, str]] = Counter()
    for file in sorted(last.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                value = tensors.get_tensor(name).contiguous()
                # numpy has no bfloat16: its numbers are float32 exactly
                wide = value.float() if value.dtype.itemsize == 2 else value
                digest = hashlib.sha256(wide.numpy(force=True).tobytes()).hexdigest()
                found[name, f"{tuple(value.shape)} {value.dtype} {digest}"] += 1
    return found


def compare(one: Path, two: Path, only: list[str]) -> list[str]:
    """Name what differs between two recordings, at most a few of each run."""
    said = []
    for name in only or RUNS:
        if not (one / name / "done").exists() or not (two / name / "done").exists():
            said.append(f"{name}: not recorded in both")
            continue
        first, second = metrics_of(one / name), metrics_of(two / name)
        found = [] if len(first) == len(second) else [f"{len(first)} and {len(second)} rows"]
        for place, (old, new) in enumerate(zip(first, second, strict=False)):
            for key in sorted(old.keys() | new.keys()):
                if old.get(key) != new.get(key):
                    found.append(f"row {place}: {key}: {old.get(key)}, then {new.get(key)}")
        before, after = tensors_of(one / name), tensors_of(two / name)
        found += [f"tensor {key}" for key, _ in (before - after)]
        found += [f"new tensor {key}" for key, _ in (after - before)]
        said += [f"{name}: {line}" for line in found[:12]]
        if not found:
            count = sum(before.values())
            print(f"{name}: equal to the bit: {len(first)} rows of metrics, {count} tensors")
    return said


def main() -> None:
    """Record, or compare."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    if args.verb == "record":
        record(args.folders[0], args.only)
        return
    said = compare(args.folders[0], args.folders[1], args.only)
    print("\n".join(said))
    sys.exit(1 if said else 0)


if __name__ == "__main__":
    main()
