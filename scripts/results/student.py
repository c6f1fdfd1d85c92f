"""How a few-step student gets what its base model learnt, and write the table of docs/student.md.

    python scripts/results/student.py                   # until all is there; Ctrl-C, go on
    python scripts/results/student.py --only direct     # beside another that makes other rows

The trained base model is that of DiffusionNFT in `methods.py`, trained again with the same rate and
seeds for its weights; its outcomes are those of assets/results/methods.json. It is distilled to
four steps, before its training and anew after it (scripts/assets/distil_shapes.py). Beside it the
student of the base model is trained itself, as a LoRA, in its own four steps, for as many network
evaluations; its rate is chosen on validation prompts after runs as long as those that count. Since
training images of that rate's seeds got worse in the end, half of it is trained, too. All
rows are judged once, on the test prompts of `methods.py`. What is known is kept in
`assets/results/student.json`; runs and students, which the rows need from one another, in
`runs/student`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from figures import between, percent, points, wrapped
from methods import NFE, ROOT, SEARCH, SEEDS, SETTINGS, judged, read
from methods_table import cell, gains, interval_text, looks, share_of, untrained
from transfer import BESIDE, run_kept

from flowrl.api.calls import compare
from flowrl.config.load import Config, load_config
from flowrl.core.files import write_json
from flowrl.core.tables import markdown_table
from flowrl.runs.export.export import export

FILE = ROOT / "assets" / "results" / "student.json"
PAGE = ROOT / "docs" / "student.md"
RUNS = ROOT / "runs" / "student"
STUDENT = RUNS / "student.safetensors"
TRAINED = "shapes/diffusion_nft"
DISTIL = ("--steps", "1200", "--trajectories", "4096")

TARGETS = "to_q, to_k, to_v, to_out.0, add_q_proj, add_k_proj, add_v_proj, to_add_out"
LORA = (
    *SETTINGS,
    "model.layers=null",
    "model.tune=lora",
    f"model.lora={{rank: 16, alpha: 16.0, targets: [{TARGETS}, net.0.proj, net.2]}}",
    "optimizer.lr=2.0e-3",  # of LoRA; the search tries others
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
    "moved": Row("student with what the base model learnt added", 4),
    "anew": Row("student distilled anew from the trained base model", 4),
    "direct": Row("student that is trained itself", 4),
    "slower": Row("the same, at half of the rate that was chosen", 4),
}
"""Every row, in the order of the table."""

DIRECT = ("direct", "slower")  # trained in four steps

Result = dict[str, Any]


# ----------------------------------------------------------------------------------------- training


def train(only: Sequence[str] = ()) -> None:
    """Train, distil and judge what the file has not, of some rows or of all."""
    if not STUDENT.exists():
        _distil(STUDENT)
    for name in only or ROWS:
        for seed in SEEDS if ROWS[name].seeds else (None,):
            if seed not in [run["seed"] for run in kept().get("rows", {}).get(name, ())]:
                print(f"== {name}, seed {seed}", flush=True)
                if name == "trained":
                    _taken_over()
                elif name in DIRECT:
                    _compare(name)  # all seeds at once
                else:
                    _judge(name, seed)


def kept() -> Result:
    """Read the file; nothing where nothing was judged yet."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def config_of(name: str, changes: Sequence[str] = ()) -> Config:
    """Return the config of a row."""
    own: Sequence[str] = ()
    if name in ("student", *DIRECT):
        own = (*FOUR, f"train.start={STUDENT}")
    elif ROWS[name].steps == 4:
        own = FOUR
    return load_config(TRAINED, [*LORA, *own, *changes, f"name=student-{name}"])


def _taken_over() -> None:
    """Take the outcomes of the table's own runs."""
    (entry,) = [one for one in read()["configs"] if one["file"] == TRAINED]
    _keep("trained", [run_kept(run) for run in entry["seeds"]])


def _made(name: str, seed: int | None) -> Sequence[str]:
    """Make what a row needs of a trained base model -> the settings that take it."""
    if name not in ("trained_four", "moved", "anew"):
        return ()
    merged, anew = RUNS / f"merged{seed}", RUNS / f"anew{seed}.safetensors"
    if not merged.exists():
        _train_base()
        run = RUNS / "trained" / "student-trained" / f"seed{seed}"
        export(run, merged, formats=["merged"], dtype="float32", iteration="last")
    changes = [f"model.path={merged}"]
    if name == "moved":
        changes.append(f"train.start={STUDENT}")
    elif name == "anew":
        if not anew.exists():
            _distil(anew, "--model", str(merged))
        changes.append(f"train.start={anew}")
    return changes


def _train_base() -> None:
    """Train the table's runs again, for their weights; the test prompts are not looked at."""
    (rate,) = [one["lr"] for one in read()["configs"] if one["file"] == TRAINED]
    unseen = "prompts.test=assets/shapes/validation.jsonl"
    config = load_config(
        TRAINED, [*SETTINGS, unseen, f"optimizer.lr={rate}", "name=student-trained"]
    )
    folder = RUNS / "trained"
    out = folder / "result.json"
    compare([config], seeds=SEEDS, nfe=NFE, seconds=0, points=1, runs=folder, out=out)


def _distil(out: Path, *more: str) -> None:
    """Distil a student into a file, in a process of its own."""
    script = ROOT / "scripts" / "assets" / "distil_shapes.py"
    asked = [*DISTIL, "--out", str(out), *more]
    print(f"== distil {out.name}", flush=True)
    subprocess.run([sys.executable, str(script), *asked], check=True)


def _judge(name: str, seed: int | None) -> None:
    """Judge a model on the test prompts."""
    outcomes = judged(config_of(name, _made(name, seed)))
    at = {"iteration": 0, "nfe": 0, "outcomes": outcomes}
    _keep(name, [{"seed": seed, "failed": None, "at": {"nfe": at}}])


def _compare(name: str) -> None:
    """Search a rate, or halve the one that was chosen, train three seeds with it and judge them."""
    folder = RUNS / name  # of a comparison, since rows differ in the steps of their evaluations
    changes: Sequence[str] = ()
    more: dict[str, Any] = {**SEARCH, "search_share": 1}
    if name == "slower":
        changes, more = [f"optimizer.lr={kept()['rates']['direct'] / 2}"], {}
    more |= {"runs": folder, "out": folder / "result.json"}
    config = config_of(name, changes)
    result = compare([config], seeds=SEEDS, nfe=NFE, seconds=0, points=1, **more)
    (entry,) = result["configs"]
    _keep(
        name,
        [run_kept(run) for run in entry["seeds"]],
        rates={name: entry["lr"]},
        environments={name: result["environments"]},
        prompts={key: result["base"][key] for key in ("tags", "scenes")},
    )


def _keep(name: str, runs: Sequence[Mapping[str, Any]], **about: Mapping[str, Any]) -> None:
    """Put runs of a row into the file, and what is known beside them."""
    found = kept()
    found.setdefault("rows", {}).setdefault(name, []).extend(runs)
    for key, values in about.items():
        found.setdefault(key, {}).update(values)
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
        made[-1]["looks"] = looks(found, name)
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
        title += f" ({row['looks']} looks)" if row["looks"] > 1 else ""
        right = percent(row["right"])
        if not seeds:
            right += f" ({interval_text(row['interval'])})"
        lines.append([title, str(steps), right, cell(row) if seeds else ""])
        if row["name"] == "base":
            lines += beside()
    return markdown_table(lines)


def beside() -> list[list[str]]:
    """Return the lines of what the base model does without training, from the table of methods."""
    lines = []
    for one in untrained(read()):
        if one["title"] in BESIDE:
            text = f"{percent(one['right'])} ({interval_text(one['interval'])})"
            lines.append([f"base model, {one['title']}", str(one["nfe_per_image"]), text, ""])
    return lines


INTRODUCTION = """## Measured on shapes

The base model is trained by DiffusionNFT, as in [the table of all methods](results.md), on whose
test prompts all are judged; its student takes four Euler steps, and is trained itself for as many
network evaluations. *Over its student* is the gain in points over the student of the untrained base
model, with a 95 % interval over seeds and scenes; a star: above 0 after Holm's correction over the
rows. *2 looks*: judged on the test prompts once before, with a student distilled likewise."""


def kept_gain(some: Sequence[Mapping[str, Any]]) -> str:
    """Say how much of the base model's gain the student keeps."""
    by_name = {row["name"]: row for row in some}
    own = by_name["trained"]["right"] - by_name["base"]["right"]
    added, anew = points(by_name["moved"]["gain"], ""), points(by_name["anew"]["gain"], "")
    return (
        f"In ten steps the base model gained {points(own, '')} points. In four its student gains"
        f" {added} when what was learnt is added to it, and {anew} when it is distilled anew."
    )


def page(text: str) -> str:
    """Write the section of docs/student.md; nothing where a row is missing."""
    found = kept()
    parts = []
    if complete(found):
        made = rows(found)
        parts = [INTRODUCTION, table(made), wrapped(kept_gain(made))]
    return between(text, "student: table", "student: end", parts)


def targets() -> list[tuple[Path, Any]]:
    """Return the page that this file fills."""
    return [(PAGE, page)]


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", choices=ROWS)
    train(parser.parse_args().only)


if __name__ == "__main__":
    main()
