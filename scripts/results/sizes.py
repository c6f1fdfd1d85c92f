"""Train small, judge large: does PaCo-RL's cheaper size pay? Write the table of docs/results.md.

    python scripts/results/sizes.py                  # until all is there; Ctrl-C, go on
    python scripts/results/sizes.py --only small     # beside another that trains the other

The editor knows both sizes; `scripts/assets/shapes_editor/train_editor.py --sizes 64 96 --out
data/two-sizes` makes it in 35 minutes of one core. `shapes/paco_rl` trains it at either size for
`SECONDS` of processor time, which are turned into network evaluations by what one costs there,
measured before; its rate is chosen on validation edits. All is judged at the large size, once, on
the test edits. What is known is kept in `assets/results/sizes.json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from figures import between, fixed, percent, points, wrapped
from methods import ROOT, SEARCH, SEEDS, alternative, command_line
from methods_table import cell, gains, interval_text, span, untrained
from transfer import run_kept

from flowrl.api.calls import compare
from flowrl.config.load import Config, load_config
from flowrl.core.files import only, write_json
from flowrl.core.tables import markdown_table
from flowrl.runs.compare.summary import error_model
from flowrl.training.trainer import Trainer

FILE = ROOT / "assets" / "results" / "sizes.json"
PAGE = ROOT / "docs" / "results.md"
RUNS = ROOT / "runs" / "sizes"
IMAGE = "image={{height: {0}, width: {0}}}"
CONFIG, EDITOR, SECONDS = "shapes/paco_rl", "data/two-sizes", 420
ITERATIONS = 4  # of which the first is not timed
SETTINGS = (
    f"model.path={EDITOR}",
    "model.dtype=bfloat16",
    "prompts.test=assets/shapes-edits/test.jsonl",
    "eval.height=96",
    "eval.width=96",
    "eval.every=0",
    "train.threads=1",
    "samples.prompts=4",
)
TRIED = {**SEARCH, "search_prompts": "assets/shapes-edits/validation.jsonl"}
BESIDE = ("20 steps", "best of 4")
"""What the editor does without training, at more evaluations per image."""


class Row(NamedTuple):
    """A way to train: its title, and the pixels of its images."""

    title: str
    size: int


ROWS = {
    "small": Row("trained at 64 pixels", 64),
    "large": Row("trained at 96 pixels", 96),
}

Result = dict[str, Any]


# ----------------------------------------------------------------------------------------- training


def train(some: Sequence[str] = ()) -> None:
    """Measure, train and judge what the file has not."""
    if "cost" not in kept():
        _keep(cost=costs())
    for name in some or ROWS:
        if name not in [entry["name"] for entry in kept().get("configs", ())]:
            print(f"== {name}", flush=True)
            _compare(name)
    there = kept().get("alternatives", {})
    for title in BESIDE:
        if title not in there:
            there[title] = alternative(title, CONFIG, [*SETTINGS, IMAGE.format(ROWS["large"].size)])
            _keep(alternatives=there)


def kept() -> Result:
    """Read the file; nothing where nothing was trained yet."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def _keep(**values: Any) -> None:
    write_json(FILE, {**kept(), **values})


def config_of(name: str, changes: Sequence[str] = ()) -> Config:
    """Return the config of a row."""
    image = IMAGE.format(ROWS[name].size)
    return load_config(CONFIG, [*SETTINGS, image, *changes, f"name=sizes-{name}"])


def costs() -> dict[str, float]:
    """Measure the seconds of processor time of a network evaluation in training, at each size, in
    turns -> the least of them."""
    trainers = {name: Trainer(config_of(name)) for name in ROWS}
    seen: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(ITERATIONS):
        for name, trainer in trainers.items():
            began = time.process_time()
            metrics = trainer.step()
            seen[name].append((time.process_time() - began) / metrics["nfe"])
    return {name: min(some[1:]) for name, some in seen.items()}


def _compare(name: str) -> None:
    """Search a rate, train three seeds with it and judge them."""
    folder = RUNS / name
    nfe = round(SECONDS / kept()["cost"][name])
    more: Result = {**TRIED, "runs": folder, "out": folder / "result.json"}
    result = compare([config_of(name)], seeds=SEEDS, nfe=nfe, seconds=0, points=1, **more)
    (entry,) = result["configs"]
    row = {"name": name, "file": name, "lr": entry["lr"], "nfe": nfe}
    row["seeds"] = [run_kept(run) for run in entry["seeds"]]
    _keep(
        base=only(result["base"], ("tags", "scenes", "outcomes")),
        environments={**kept().get("environments", {}), name: result["environments"]},
        configs=[*kept().get("configs", ()), row],
    )


# ---------------------------------------------------------------------------------------- the table


def complete(found: Mapping[str, Any]) -> bool:
    """Say whether both sizes are trained, and what stands beside them is judged."""
    there = {entry["name"] for entry in found.get("configs", ())}
    return there >= {*ROWS} and {*found.get("alternatives", ())} >= {*BESIDE}


def table(found: Mapping[str, Any]) -> str:
    """Draw the editor, what it does without training, and both sizes."""
    lines = [["editor", "NFE per image", "right edits", "gain in points", "images trained on"]]
    for row in untrained(dict(found)):
        text = f"{percent(row['right'])} ({interval_text(row['interval'])})"
        lines.append([row["title"], str(row["nfe_per_image"]), text, "", ""])
    gained = {row["config"]: row for row in gains(dict(found))}
    for name, (title, _) in ROWS.items():
        row = gained[name]
        lines.append([title, "10", percent(row["right"]), cell(row), f"{images(found, name):,}"])
    return markdown_table(lines)


def images(found: Mapping[str, Any], name: str) -> int:
    """Return how many images a run of a row was trained on."""
    train = config_of(name).train
    (entry,) = [one for one in found["configs"] if one["name"] == name]
    return int(entry["seeds"][0]["iterations"]) * train.prompts * train.group


def compared(found: Mapping[str, Any]) -> str:
    """Say what an evaluation costs at the large size, and how far the two sizes are apart after the
    same processor time."""
    model = error_model(found["configs"], found["base"], "nfe")
    apart, error = model.difference("small", "large")
    half = float(error.half())
    ratio = found["cost"]["large"] / found["cost"]["small"]
    seen = "not told apart from the large"
    if abs(apart) > half:
        seen = "ahead" if apart > 0 else "behind"
    return (
        f"A network evaluation at 96 pixels takes {fixed(ratio)} times the processor time of one at"
        f" 64. After the same time the small size is {seen}: {points(apart)} points"
        f" ({span({'gain': apart, 'half': half})})."
    )


INTRODUCTION = (
    "PaCo-RL trains on small images and is used on large ones. `shapes/paco_rl` does so on an"
    f" editor that knows 64 and 96 pixels: three seeds of {SECONDS // 60} minutes of one core each,"
    " after three rates a third as long; all is judged at 96 pixels on the test edits, with 95 %"
    " intervals over seeds and edits. A star: above 0 after Holm's correction."
    " `python scripts/results/sizes.py` trains what is missing."
)


def page(text: str) -> str:
    """Write the section of docs/results.md; nothing where a row is missing."""
    found = kept()
    parts = []
    if complete(found):
        title = "## Train small, judge large"
        parts = [title, wrapped(INTRODUCTION), table(found), wrapped(compared(found))]
    return between(text, "sizes: table", "sizes: end", parts)


def targets() -> list[tuple[Path, Any]]:
    """Return the page that this file fills."""
    return [(PAGE, page)]


def main() -> None:
    """Train what is missing."""
    train(command_line(__doc__, *ROWS).parse_args().only)


if __name__ == "__main__":
    main()
