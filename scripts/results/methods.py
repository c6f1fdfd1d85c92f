"""Every method on equal terms: train what is missing, and write the table of docs/results.md.

    python scripts/results/methods.py                          # until all is there; Ctrl-C, go on
    python scripts/results/methods.py --minutes 60 --only shapes/awm shapes/diffusion_nft

One protocol for all. A config tries its own learning rate times 0.5, 1 and 2 for a third of the
budget each, and validation prompts choose; then three seeds train for 60,000 network evaluations
(a state that is trained counts three), and each is judged once, at its end, on
`assets/shapes/final.jsonl`, whose scenes no other list has. Beside them stands the base model with
guidance and more steps, and the best of several of its images. All outcomes are kept in
`assets/results/methods.json`, which is all that the next call needs to go on, on whichever machine.

A config that the file has is never looked at again: other settings are refused. `--again CONFIG`
takes its runs out, trains anew, and the table says that it was looked at twice.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import between, percent, points

from flowrl.api.calls import compare
from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.core.shipped_files import list_configs
from flowrl.core.tables import markdown_table
from flowrl.evaluation.crossed_errors import crossed
from flowrl.runs.compare.records import packed, unpacked
from flowrl.runs.compare.summary import error_model, holm
from flowrl.runs.evaluate import evaluate
from flowrl.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "assets" / "results" / "methods.json"
PAGE = ROOT / "docs" / "results.md"
RUNS = ROOT / "runs" / "methods"
NFE, SEEDS, FACTORS = 60_000, (0, 1, 2), (0.5, 1.0, 2.0)
LOOKS = "looks"  # how often a config was judged, where more than once
SETTINGS = (
    "prompts.test=assets/shapes/final.jsonl",
    "eval.images=1",  # of each row: a scene has as many rows as its task needs
    "eval.steps=10",
    "eval.every=0",
    "samples.prompts=4",
    "train.threads=1",
    "model.dtype=bfloat16",  # also where `auto` would take float32
)
SEARCH = {
    "lr_search": FACTORS,
    "search_share": 1 / 3,
    "search_prompts": "assets/shapes/validation.jsonl",
    "search_images": 8,
}

FIRST = (
    "awm",
    "flow_grpo_full",
    "diffusion_nft",
    "mix_grpo",
    "branch_grpo",
    "tempflow_grpo",
    "chunk_grpo",
    "g2rpo",
    "best_of_n",
)
"""Configs that are trained before the others."""

ELSEWHERE = {
    "shapes/ddpo_sdxl": "another base model",
    "shapes/paco_rl": "another base model, which edits",
    "shapes/find_narrow": "learns the noise of a few prompts",
    "shapes/find_own": "learns the noise of a few prompts",
    "shapes/zo_rank_sgd": "learns the noise of a few prompts",
    "shapes/tdm_r1": "trains a student of four steps",
    "shapes/tdm_r1_awm": "trains a student of four steps",
}
"""Configs that are not judged by this table, and why."""

NEEDS = {
    "shapes/spo": "a judge of noisy images",
    "shapes/spo_latent": "a judge of latents",
    "shapes/drm": "a judge of latents",
    "shapes/dina_lrm": "a judge of latents",
    "shapes/ddrl": "real images",
    "shapes/diffusion_dpo_offline": "stored pairs",
    "shapes/flow_opd": "trained teachers",
}
"""Configs that need something made first (docs/methods.md); asked for by name, they are trained."""

ALTERNATIVES = {
    "guidance 3.5": ("model.guidance=3.5",),
    "20 steps": ("eval.steps=20",),
    "guidance 3.5, 20 steps": ("model.guidance=3.5", "eval.steps=20"),
    "guidance 5, 40 steps": ("model.guidance=5", "eval.steps=40"),
    "best of 2": ("eval.best_of=2",),
    "best of 4": ("eval.best_of=4",),
    "best of 8": ("eval.best_of=8",),
}
"""What the base model does without training, at more evaluations per image."""

Result = dict[str, Any]


# ----------------------------------------------------------------------------------------- training


def wanted(only: Sequence[str] = ()) -> list[str]:
    """Return the configs of the table in the order in which they are trained."""
    if only:
        return list(only)
    names = [name for name in list_configs() if name.startswith("shapes/")]
    rest = [name for name in names if name not in {**ELSEWHERE, **NEEDS}]
    first = [f"shapes/{name}" for name in FIRST]
    return [*first, *(name for name in rest if name not in first)]


def train(only: Sequence[str], minutes: float) -> None:
    """Train and judge what the file has not, config by config, until the time is over."""
    end = time.monotonic() + 60 * minutes
    for name in wanted(only):
        if time.monotonic() > end:
            return
        if _missing(name):
            print(f"== {name}", flush=True)
            _compare(name)
        # as soon as the file has the base model: no gain stands without them
        alternatives()


def _missing(name: str) -> bool:
    """Say whether a config has fewer seeds in the file than it should."""
    if not FILE.exists():
        return True
    found = {entry["file"]: entry for entry in _read()["configs"]}
    return name not in found or len(found[name]["seeds"]) < len(SEEDS)


def _compare(name: str) -> None:
    """Add a config to the file."""
    more: dict[str, Any] = {**SEARCH, "overrides": SETTINGS, "runs": RUNS}
    add_to(FILE, [name], seeds=SEEDS, nfe=NFE, points=1, **more)


def add_to(file: Path, configs: Sequence[Any], **options: Any) -> None:
    """Compare configs by calls of the network into a file; what stands there beside stays."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    compare(configs, seconds=0, count="calls", out=file, **options)
    found = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {**found, **{key: kept[key] for key in kept if key not in found}})


def _read() -> Result:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def again(name: str) -> None:
    """Take a config's runs out of the file, and note that it is looked at once more."""
    found = _read()
    if name not in {entry["file"] for entry in found["configs"]}:
        raise SystemExit(f"--again {name}: expected a config of {FILE.name}, which has none such")
    found["configs"] = [entry for entry in found["configs"] if entry["file"] != name]
    looks = found.setdefault(LOOKS, {})
    looks[name] = looks.get(name, 1) + 1
    write_json(FILE, found)


def alternatives() -> None:
    """Judge the base model with guidance, with more steps, and by the best of several images."""
    found = _read()
    there = found.setdefault("alternatives", {})
    for title, changes in ALTERNATIVES.items():
        if title in there:
            continue
        print(f"== base model, {title}", flush=True)
        config = load_config("shapes/awm", [*SETTINGS, *changes])
        trainer = Trainer(config)
        row = evaluate(trainer.model, config, trainer=trainer, outcomes=True)
        calls = config.eval.steps * config.eval.best_of * (2 if "guidance" in title else 1)
        there[title] = {"nfe_per_image": calls, "outcomes": packed(row["outcomes"])}
        write_json(FILE, found)


# ---------------------------------------------------------------------------------------- the table


def rows(result: Result) -> list[Result]:
    """Work out every row from the outcomes: score, gain, interval and Holm's p, best first."""
    entries = {entry["file"]: entry for entry in result["configs"]}
    found = gains(result)
    for row in found:
        entry = entries[row["config"]]
        row |= {"lr": entry["lr"], "factor": entry["lr"] / entry["search"]["own_lr"]}
        row["looks"] = _looks(result, entry["file"])
    return found


def gains(result: Mapping[str, Any]) -> list[Result]:
    """Work out what the configs of a comparison gained over its base model from the outcomes:
    score, gain, half its interval, p and Holm's p, seeds that failed or ended below, best first."""
    model = error_model(result["configs"], result["base"], "nfe")
    base, found = float(model.base @ model.weights(None)), []
    for entry in result["configs"]:
        name, ended = entry["name"], [run for run in entry["seeds"] if run["at"]["nfe"]]
        if name not in model.groups:
            continue
        gain, error = model.gain(name)
        scores = model.groups[name] @ model.weights(None)
        row = {"config": entry["file"], "right": float(scores.mean()), "gain": gain}
        row |= {"half": error.half(), "p": error.p(gain), "seeds": len(ended)}
        row |= {
            "failed": len(entry["seeds"]) - len(ended),
            "below": int((scores < base - 1e-9).sum()),
        }
        row["iterations"] = float(np.mean([run["at"]["nfe"]["iteration"] for run in ended]))
        found.append(row)
    adjusted = holm([row["p"] for row in found])
    for row, p in zip(found, adjusted, strict=True):
        row["holm"] = p
    return sorted(found, key=lambda row: -row["gain"])


def _looks(result: Mapping[str, Any], name: str) -> int:
    return int(result.get(LOOKS, {}).get(name, 1))


def untrained(result: Result) -> list[Result]:
    """Work out the rows of the base model and its alternatives: score, interval, NFE per image."""
    base = result["base"]
    places = list(zip(base["tags"], base["scenes"], strict=True))
    columns = list(dict.fromkeys(places))
    tags = [tag for tag, _ in columns]
    found = []
    every = {"as it is": {"nfe_per_image": 10, "outcomes": base["outcomes"]}}
    for title, one in {**every, **result.get("alternatives", {})}.items():
        scores: dict[tuple[str, str], list[float]] = {}
        for place, some in zip(places, unpacked(one["outcomes"]), strict=True):
            scores.setdefault(place, []).extend(some)
        values = np.array([[np.mean(scores[place]) for place in columns]])
        whole = crossed(values, tags)
        row = {"title": title, "right": whole["mean"], "interval": whole["interval"]}
        found.append({**row, "nfe_per_image": one["nfe_per_image"]})
    return found


def table(found: Iterable[Result]) -> str:
    """Draw the rows of the trained configs."""
    lines = [
        ["config", "gain", "95 % interval", "Holm's p", "right", "rate", "iterations", "below base"]
    ]
    for row in found:
        low, high = row["gain"] - row["half"], row["gain"] + row["half"]
        star = "*" if row["holm"] < 0.05 and row["gain"] > 0 and not row["failed"] else ""
        name = f"`{row['config']}`" + (f" ({row['looks']} looks)" if row["looks"] > 1 else "")
        cells = [name, points(row["gain"]) + star, f"{points(low)} to {points(high)}"]
        cells += ["< 0.001" if row["holm"] < 0.001 else f"{row['holm']:.3f}"]
        cells += [percent(row["right"]), f"{row['factor']:g} x", f"{row['iterations']:.0f}"]
        lines.append([*cells, f"{row['below'] + row['failed']} of {row['seeds'] + row['failed']}"])
    return markdown_table(lines)


def base_table(found: Iterable[Result]) -> str:
    """Draw the rows of the base model."""
    lines = [["base model", "right", "95 % interval", "NFE per image"]]
    for row in found:
        known = None not in row["interval"]
        span = " to ".join(points(end, "") for end in row["interval"]) if known else "–"
        lines.append([row["title"], percent(row["right"]), span, str(row["nfe_per_image"])])
    return markdown_table(lines)


INTRODUCTION = """## All on equal terms

Each config tried its own learning rate times 0.5, 1 and 2 for 20,000 network evaluations each on
validation prompts, then trained three seeds for 60,000 (a trained state counts three), and was
judged once, at its end, on prompts whose scenes no other list has: mostly harder ones than those
that are trained on. `python scripts/results/methods.py` makes the table, and goes on where it
stopped; configs that are not in it follow [below](#measured-one-by-one).

- *gain*: points of right images over the base model, the mean over eight tasks, with a 95 %
  interval over seeds and scenes. A star: above 0 after Holm's correction over all rows.
- *rate*: the factor that validation prompts chose. *below base*: seeds that ended below the base
  model, or broke."""
BASE_HEAD = """What the base model does without training, on the same prompts, in 10 steps unless
the row says otherwise:"""


def page(text: str) -> str:
    """Write the section of docs/results.md; nothing where no config was trained yet."""
    parts = []
    if FILE.exists():
        result = _read()
        parts = [INTRODUCTION, table(rows(result)), BASE_HEAD, base_table(untrained(result))]
        parts.append("## Measured one by one")
    return between(text, "methods: table", "methods: end", parts)


def targets() -> list[tuple[Path, Any]]:
    """Return the page that this file fills."""
    return [(PAGE, page)]


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="CONFIG")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after")
    parser.add_argument("--again", metavar="CONFIG", help="take its runs out, and train it anew")
    args = parser.parse_args()
    if args.again:
        again(args.again)
    train([*args.only, *([args.again] if args.again else [])], args.minutes)


if __name__ == "__main__":
    main()
