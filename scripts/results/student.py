"""How a few-step student gets what its base model learnt, and write the table of docs/student.md.

    python scripts/results/student.py              # until all is there; Ctrl-C, and it goes on

The base model is trained by DiffusionNFT as a LoRA, and distilled to four steps, before its
training and anew after it (scripts/assets/distil_shapes.py). Beside it the student of the base
model is trained itself, in its own four steps, for as many network evaluations. Rates are chosen
on validation prompts as in `methods.py`; all rows are judged once, on its test prompts. What is
known is kept in `assets/results/student.json`; runs and students, which the rows need from one
another, in `runs/student`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from figures import between, percent
from methods import NFE, ROOT, SEARCH, SEEDS, SETTINGS
from methods_table import cell, gains, interval_text, share_of
from transfer import run_kept

from flowrl.api.calls import compare
from flowrl.config.load import Config, load_config
from flowrl.core.files import write_json
from flowrl.core.tables import markdown_table
from flowrl.runs.compare.summary import packed
from flowrl.runs.evaluate import evaluate
from flowrl.runs.export.export import export
from flowrl.training.trainer import Trainer

FILE = ROOT / "assets" / "results" / "student.json"
PAGE = ROOT / "docs" / "student.md"
RUNS = ROOT / "runs" / "student"
STUDENT = RUNS / "student.safetensors"
DISTIL = ("--minutes", "10", "--trajectories", "4096")

TARGETS = "to_q, to_k, to_v, to_out.0, add_q_proj, add_k_proj, add_v_proj, to_add_out"
LORA = (
    *SETTINGS,
    "model.layers=null",
    "model.tune=lora",
    f"model.lora={{rank: 16, alpha: 16.0, targets: [{TARGETS}, net.0.proj, net.2]}}",
    "optimizer.lr=2.0e-3",  # of LoRA, four times that of the weights; the search tries others
)
FOUR = (
    "plan={fn: ode, steps: 4, order: 1}",
    "likelihood={fn: forward, draws: 2, times: grid}",  # two of the four
    "eval.steps=4",
)


class Row(NamedTuple):
    """A row of the table: its title, its steps, and whether it has seeds."""

    title: str
    steps: int
    seeds: bool = True


ROWS = {
    "base": Row("base model", 10, False),
    "base_four": Row("base model", 4, False),
    "student": Row("its student", 4, False),
    "trained": Row("trained base model", 10),
    "trained_four": Row("trained base model", 4),
    "moved": Row("student with the LoRA of the trained base model added", 4),
    "anew": Row("student distilled anew from the trained base model", 4),
    "direct": Row("student that is trained itself", 4),
}
"""Every row, in the order of the table."""

Result = dict[str, Any]


# ----------------------------------------------------------------------------------------- training


def train() -> None:
    """Train, distil and judge what the file has not."""
    _judge_once("base")
    _judge_once("base_four", FOUR)
    if not STUDENT.exists():
        _distil(STUDENT)
    _judge_once("student", (*FOUR, f"train.start={STUDENT}"))
    _compare_once("trained")
    _compare_once("direct", (*FOUR, f"train.start={STUDENT}"))
    for seed in SEEDS:
        run = RUNS / "trained" / "student-trained" / f"seed{seed}"
        _judge_once("trained_four", (*FOUR, f"train.start={run}"), seed)
        merged, anew = RUNS / f"merged{seed}", RUNS / f"anew{seed}.safetensors"
        if not merged.exists():
            export(run, merged, formats=["merged"], dtype="float32", iteration="last")
        _judge_once("moved", (*FOUR, f"model.path={merged}", f"train.start={STUDENT}"), seed)
        if not anew.exists():
            _distil(anew, "--teacher", str(run))
        _judge_once("anew", (*FOUR, f"train.start={anew}"), seed)


def config_of(name: str, changes: Sequence[str] = ()) -> Config:
    """Return the config of a row."""
    return load_config("shapes/diffusion_nft", [*LORA, *changes, f"name=student-{name}"])


def kept() -> Result:
    """Read the file; nothing where nothing was judged yet."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def _distil(out: Path, *more: str) -> None:
    """Distil a student into a file, in a process of its own."""
    script = ROOT / "scripts" / "assets" / "distil_shapes.py"
    asked = [*DISTIL, "--out", str(out), *more]
    print(f"== distil {out.name}", flush=True)
    subprocess.run([sys.executable, str(script), *asked], check=True)


def _judge_once(name: str, changes: Sequence[str] = (), seed: int | None = None) -> None:
    """Judge a model on the test prompts, unless the file has it."""
    runs = kept().get("rows", {}).get(name, [])
    if seed in [run["seed"] for run in runs]:
        return
    config = config_of(name, changes)
    print(f"== {name}, seed {seed}", flush=True)
    trainer = Trainer(config)
    row = evaluate(trainer.model, config, trainer=trainer, outcomes=True)
    at = {"iteration": 0, "nfe": 0, "outcomes": packed(row["outcomes"])}
    _keep(name, [*runs, {"seed": seed, "failed": None, "at": {"nfe": at}}])


def _compare_once(name: str, changes: Sequence[str] = ()) -> None:
    """Search a rate, train three seeds with it and judge them, unless the file has them."""
    if name in kept().get("rows", {}):
        return
    print(f"== {name}", flush=True)
    folder = RUNS / name  # of a comparison, since rows differ in the steps of their evaluations
    more: dict[str, Any] = {**SEARCH, "runs": folder, "out": folder / "result.json"}
    result = compare([config_of(name, changes)], seeds=SEEDS, nfe=NFE, seconds=0, points=1, **more)
    (entry,) = result["configs"]
    _keep(name, [run_kept(run) for run in entry["seeds"]])
    found = kept()
    found.setdefault("rates", {})[name] = entry["lr"]
    found["prompts"] = {key: result["base"][key] for key in ("tags", "scenes")}
    found["environments"] = result["environments"]
    write_json(FILE, found)


def _keep(name: str, runs: Sequence[Mapping[str, Any]]) -> None:
    """Put the runs of a row into the file."""
    found = kept()
    found.setdefault("rows", {})[name] = list(runs)
    write_json(FILE, found)


# ---------------------------------------------------------------------------------------- the table


def complete(found: Mapping[str, Any]) -> bool:
    """Say whether every row has all of its runs."""
    rows = found.get("rows", {})
    return all(len(rows.get(name, ())) == (len(SEEDS) if ROWS[name].seeds else 1) for name in ROWS)


def rows(found: Mapping[str, Any]) -> list[Result]:
    """Work out every row: the share of right images, and for rows with seeds what they gained over
    the student, with errors over seeds and scenes and Holm's correction."""
    base = {**found["prompts"], "outcomes": _outcomes(found, "student")}
    entries = []
    for name in ROWS:
        if ROWS[name].seeds:
            entries.append({"name": name, "file": name, "seeds": found["rows"][name]})
    gained = {row["config"]: row for row in gains({"configs": entries, "base": base})}
    made: list[Result] = []
    for name in ROWS:
        if ROWS[name].seeds:
            made.append({**gained[name], "name": name})
        else:
            right, interval = share_of(base, _outcomes(found, name))
            made.append({"name": name, "right": right, "interval": interval})
    return made


def _outcomes(found: Mapping[str, Any], name: str) -> str:
    """Return the outcomes of a row without seeds."""
    (run,) = found["rows"][name]
    return str(run["at"]["nfe"]["outcomes"])


def table(some: Sequence[Mapping[str, Any]]) -> str:
    """Draw the rows."""
    lines = [["model", "NFE per image", "right", "over its student"]]
    for row in some:
        title, steps, seeds = ROWS[row["name"]]
        right = percent(row["right"])
        if not seeds:
            right += f" ({interval_text(row['interval'])})"
        lines.append([title, str(steps), right, cell(row) if seeds else ""])
    return markdown_table(lines)


def page(text: str) -> str:
    """Fill the table of docs/student.md; nothing where a row is missing."""
    found = kept()
    parts = [table(rows(found))] if complete(found) else []
    return between(text, "student: table", "student: end", parts)


def targets() -> list[tuple[Path, Any]]:
    """Return the page that this file fills."""
    return [(PAGE, page)]


if __name__ == "__main__":
    train()
