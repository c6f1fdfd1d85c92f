"""Every method on equal terms: train what is missing.

    python scripts/results/methods.py                          # until all is there; Ctrl-C, go on
    python scripts/results/methods.py --minutes 60 --only shapes/awm shapes/diffusion_nft

One protocol for all. A config tries its own learning rate times 0.5, 1 and 2 for a third of the
budget each, and validation prompts choose; then three seeds train for 60,000 network evaluations
(a state that is trained counts three), and each is judged once, at its end, on
`assets/shapes/final.jsonl`, whose scenes no other list has. Beside them stands the base model with
guidance and more steps, and the best of several of its images. All outcomes are kept in
`assets/results/methods.json`, which is all that the next call needs to go on, on whichever machine,
and all that `methods_table.py`, `methods_figures.py` and `claims.py` show.

A config that the file has is never looked at again: other settings are refused. `--again CONFIG`
takes its runs out, trains anew, and the table says that it was looked at twice.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.api.calls import compare
from flowrl.config.load import Config, load_config
from flowrl.core.files import write_json
from flowrl.core.shipped_files import list_configs
from flowrl.runs.compare.summary import packed
from flowrl.runs.evaluate import evaluate
from flowrl.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "assets" / "results" / "methods.json"
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
    "tp_grpo",
    "dynamic_treerpo",
    "diffusion_dpo",
    "find",
    "ddpo",
    "flow_grpo",
    "spo_finished",
    "dance_grpo",
)
"""Configs that are trained before the others: what the claims of `claims.py` compare comes first.
"""

ELSEWHERE = {
    "shapes/ddpo_sdxl": "another base model",
    "shapes/paco_rl": "another base model, which edits",
    "shapes/edit_r1": "another base model, which edits",
    "shapes/mind_v": "another base model, which makes videos",
    "shapes/find_narrow": "learns the noise of a few prompts",
    "shapes/find_own": "learns the noise of a few prompts",
    "shapes/zo_rank_sgd": "learns the noise of a few prompts",
    "shapes/tdm_r1": "trains a student of four steps",
    "shapes/tdm_r1_awm": "trains a student of four steps",
}
"""Configs that are not judged by this table, and why."""

NEEDS = {
    "shapes/spo": "a judge of noisy images",
    "shapes/auto_rubric": "a judge over HTTP",
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
    found = {entry["file"]: entry for entry in read()["configs"]}
    return name not in found or len(found[name]["seeds"]) < len(SEEDS)


def _compare(name: str) -> None:
    """Add a config to the file."""
    more: dict[str, Any] = {**SEARCH, "overrides": SETTINGS, "runs": RUNS}
    add_to(FILE, [name], seeds=SEEDS, nfe=NFE, points=1, **more)


def add_to(file: Path, configs: Sequence[Any], **options: Any) -> None:
    """Compare configs by calls of the network into a file; what stands there beside stays."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    compare(configs, seconds=0, out=file, **options)
    found = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {**found, **{key: kept[key] for key in kept if key not in found}})


def read() -> Result:
    """Read the file; raises FileNotFoundError where nothing was trained yet."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def again(name: str) -> None:
    """Take a config's runs out of the file, and note that it is looked at once more."""
    found = read()
    if name not in {entry["file"] for entry in found["configs"]}:
        raise SystemExit(f"--again {name}: expected a config of {FILE.name}, which has none such")
    found["configs"] = [entry for entry in found["configs"] if entry["file"] != name]
    looks = found.setdefault(LOOKS, {})
    looks[name] = looks.get(name, 1) + 1
    write_json(FILE, found)


def alternatives() -> None:
    """Judge the base model with guidance, with more steps, and by the best of several images."""
    found = read()
    there = found.setdefault("alternatives", {})
    for title in ALTERNATIVES:
        if title not in there:
            there[title] = alternative(title, "shapes/awm", SETTINGS)
            write_json(FILE, found)


def alternative(title: str, config: str, changes: Sequence[str]) -> Result:
    """Judge the base model of a config as one of the alternatives says."""
    print(f"== base model, {title}", flush=True)
    made = load_config(config, [*changes, *ALTERNATIVES[title]])
    calls = made.eval.steps * made.eval.best_of * (2 if "guidance" in title else 1)
    return {"nfe_per_image": calls, "outcomes": judged(made)}


def judged(config: Config) -> str:
    """Judge the model that a config describes, before any training -> its outcomes."""
    trainer = Trainer(config)
    row = evaluate(trainer.model, config, trainer=trainer, outcomes=True)
    return packed(row["outcomes"])


def command_line(text: str | None, *rows: str) -> argparse.ArgumentParser:
    """Return the command line of a script that trains what is missing; `rows` are all that it has,
    where a name may be wrong."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", choices=rows or None)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after")
    return parser


def main() -> None:
    """Train what is missing."""
    parser = command_line(__doc__)
    parser.add_argument("--again", metavar="CONFIG", help="take its runs out, and train it anew")
    args = parser.parse_args()
    if args.again:
        again(args.again)
    train([*args.only, *([args.again] if args.again else [])], args.minutes)


if __name__ == "__main__":
    main()
