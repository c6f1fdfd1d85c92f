"""What stops hacking: train on a reward that can be hacked, with and without remedies, and write
the table of docs/hacking.md.

    python scripts/results/hacking.py                       # until all is there; Ctrl-C, go on
    python scripts/results/hacking.py --minutes 40 --only nothing kl

The reward is `verdict_head`, which learnt from 240 verdicts (scripts/assets/shapes_verdicts.py);
the truth is the checker of shapes. Every row trains three seeds for as many network evaluations on
the head; where a remedy needs a second opinion it is another head, which learnt from other images,
and never the checker. Two rows may ask the checker about validation prompts: the monitor's
rollback, and early stop, which takes of the runs without a remedy the checkpoint that the checker
puts first. All are judged once, at their ends, on the test prompts. What is known is kept in
`assets/results/hacking.json`, which is all that the next call needs to go on; for the early stop
also the runs without a remedy, in `runs/hacking`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import between, percent, points, wrapped
from methods import add_to, command_line
from methods_table import gains
from scipy import stats

from flowrl.api.calls import train as train_run
from flowrl.config.load import Config, load_config
from flowrl.core.files import write_json
from flowrl.core.prompts import load_prompts
from flowrl.core.tables import markdown_table
from flowrl.core.types import FlowModel
from flowrl.runs.compare.summary import packed
from flowrl.runs.evaluate import evaluate
from flowrl.runs.folder import EVALS, read_rows
from flowrl.runs.open_run import load_run
from flowrl.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "assets" / "results" / "hacking.json"
PAGE = ROOT / "docs" / "hacking.md"
RUNS = ROOT / "runs" / "hacking"
REFERENCES = "runs/hacking/references"
NFE, SEEDS, POINTS = 40_000, (0, 1, 2), 8
HEAD, SECOND = (
    f"{{fn: verdict_head, path: assets/shapes-verdicts/{name}, dino: assets/shapes-dino}}"
    for name in ("head", "second")
)
WATCHED = HEAD.replace("}", ", weight: 0}")
STRICT = "strict: {fn: shapes, mode: strict, weight: 0}"
SETTINGS = (
    f"rewards={{head: {HEAD}, {STRICT}}}",
    "model.layers=null",  # all of them: those that read the prompt alone hardly move the head
    "train.threads=1",
    "model.dtype=bfloat16",  # also where `auto` would take float32
    "eval.steps=10",
    "eval.images=2",
    "eval.every=0",
    "samples.prompts=4",
    "checkpoint.every=1000",
)
TEST = ("prompts.test=assets/shapes/test.jsonl",)
PLAIN = ("optimizer.lr=4.0e-4",)
"""The rate that validation prompts chose for the base method in assets/results/methods.json."""

BASE = "shapes/flow_grpo_full"


class Row(NamedTuple):
    """A remedy: its title, and what it changes."""

    title: str
    changes: tuple[str, ...] = ()


def _wins(tie: float) -> tuple[str, ...]:
    """Return the rewards of Pref-GRPO with the head as the judge."""
    judge = f"{{fn: win_rate, judge: {HEAD}, tie: {tie}}}"
    return (
        f"rewards={{wins: {judge}, head: {WATCHED}, {STRICT}}}",
        "credit={fn: group_norm, ddof: 1, eps: 1.0e-8}",
    )


NOTHING, EARLY, ROLLBACK = "nothing", "early_stop", "rollback"
ROWS = {
    NOTHING: Row("nothing", ("checkpoint.every=1", "checkpoint.keep=1000")),
    "kl": Row("KL to the base model", ("kl={fn: transition_kl, beta: 0.04, divide_by: g}",)),
    "pref": Row("Pref-GRPO, no ties", _wins(0.0)),
    "pref_ties": Row("Pref-GRPO, ties below 0.1", _wins(0.1)),
    "gardo": Row(
        "GARDO, doubted by the second head",
        (
            f"rewards.second={SECOND.replace('}', ', weight: 0}')}",
            "rewards.novelty={fn: novelty, path: assets/shapes-dino, weight: 0}",
            "aggregate={fn: gardo, novelty: novelty, doubted_by: [second]}",
            "credit={fn: mean_centred}",
            "kl={fn: transition_kl_slow, divide_by: g, beta: 0.04}",
            "slow={fn: reset, every: 15}",
        ),
    ),
    "norm_guard": Row("NormGuard", ("kl={fn: norm_guard, beta: 1.0}",)),
    "mean": Row(
        "mean of two heads",
        ("rewards.head.weight=0.5", f"rewards.second={SECOND.replace('}', ', weight: 0.5}')}"),
    ),
    "adv_gated": Row(
        "Adv-GRPO behind a gate",
        (
            f"rewards.real={{fn: adversarial, path: assets/shapes-dino, references: {REFERENCES}"
            "/images, hidden: 256, lr: 1.0e-3, d_steps: 4, batch: 128}",
            "aggregate={fn: gated, above: {head: 0.8}, softness: 0.05}",
        ),
    ),
    "vgpo": Row(
        "VGPO",
        (
            "plan={fn: comb, steps: 6, size: 3, noise_scale: 0.4, preview: x0}",
            "train.group=24",  # three images share a noise; as in shapes/vgpo
            "transition={fn: cps}",
            "credit={fn: value_anchored, gamma: 0.99, k: 0.1}",
        ),
    ),
    ROLLBACK: Row(
        "monitor `hacking`: rollback",
        ("monitors.hacking={action: rollback}", "checkpoint.every=1", "checkpoint.keep=2"),
    ),
    EARLY: Row("early stop by the checker"),
}
"""Every row, in the order in which it is trained."""

Result = dict[str, Any]


# ----------------------------------------------------------------------------------------- training


def config_of(name: str) -> Config:
    """Return the config of a row."""
    return load_config(BASE, [*SETTINGS, *PLAIN, *ROWS[name].changes, f"name=hacking-{name}"])


def train(only: Sequence[str], minutes: float) -> None:
    """Train and judge what the file has not, row by row and seed by seed, until the time is
    over."""
    end = time.monotonic() + 60 * minutes
    for name in only or ROWS:
        for seed in SEEDS:
            if time.monotonic() > end:
                return
            if str(seed) not in read().get("judged", {}).get(name, {}):
                print(f"== {name}, seed {seed}", flush=True)
                _run(name, seed)


def _run(name: str, seed: int) -> None:
    """Train one run of a row, and judge it."""
    if name == EARLY:
        _early(seed)
    elif name == ROLLBACK:
        _rolled_back(seed)
    else:
        _compared(name, seed)


def read() -> Result:
    """Read the file; nothing where no row was trained yet."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def _compared(name: str, seed: int) -> None:
    """Add a run to the comparison, and judge its end."""
    if name == "adv_gated" and not Path(REFERENCES).exists():
        script = ROOT / "scripts" / "assets" / "shapes_images.py"
        made = ["--out", REFERENCES, "--images", "2"]
        subprocess.run([sys.executable, str(script), *made], check=True)
    config = config_of(name)
    add_to(FILE, [config], seeds=[seed], nfe=NFE, points=POINTS, runs=RUNS)
    run = _curve_of(read(), name, seed)
    if run["at"]["nfe"] is None:
        _keep(name, seed, {"failed": run["failed"]})
        return
    _keep(name, seed, _judged(RUNS / config.name / f"seed{seed}", run["iterations"]))


def _early(seed: int) -> None:
    """Judge the checkpoint of a run without a remedy that the checker puts first; the model from
    before training is one."""
    found = read()
    run = _curve_of(found, NOTHING, seed)
    best = max(run["curve"], key=lambda row: float(row["score"]))
    if best["score"] <= found["base"]["score"]:
        _keep(EARLY, seed, {**_base(), "iteration": 0})
        return
    folder = RUNS / f"hacking-{NOTHING}" / f"seed{seed}"
    _keep(EARLY, seed, _judged(folder, best["iteration"]))


def _rolled_back(seed: int) -> None:
    """Train as long as a run without a remedy, with the monitor that goes back."""
    iterations = _curve_of(read(), NOTHING, seed)["iterations"]
    config = config_of(ROLLBACK).replace(
        seed=seed,
        train={"iterations": iterations},
        eval={"every": max(1, round(iterations / POINTS))},
    )
    folder = RUNS / config.name / f"seed{seed}"
    train_run(config, folder, resume="auto", quiet=True)
    rows = read_rows(folder, EVALS)
    keys = ("iteration", "strict", "rewards")
    more: Result = {"curve": []}
    for row in rows:
        more["curve"].append({key: row[key] for key in keys})
    found = folder / "findings.jsonl"
    acted = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    more["rollbacks"] = [row["iteration"] for row in acted if row["action"] == "rollback"]
    _keep(ROLLBACK, seed, {**_judged(folder, iterations), **more})


def _curve_of(found: Mapping[str, Any], name: str, seed: int) -> Result:
    """Return what the comparison has of a run. Exits where it has nothing."""
    for entry in found.get("configs", ()):
        for run in entry["seeds"] if entry["name"] == f"hacking-{name}" else ():
            if run["seed"] == seed:
                return dict(run)
    raise SystemExit(f"{FILE.name} has no seed {seed} of {name!r}, which has to be trained before")


def _judged(folder: Path, iteration: int) -> Result:
    """Judge a checkpoint on the test prompts."""
    opened = load_run(folder, iteration=iteration, overrides=TEST)
    return {"iteration": iteration, **_scores(opened.model, opened.config)}


def _base() -> Result:
    """Judge the model from before training on the test prompts, once."""
    there = read().get("judged", {}).get("base")
    if there is None:
        config = load_config(config_of(NOTHING), list(TEST))
        there = _scores(Trainer(config).model, config)
        _keep("base", None, there)
    return dict(there)


def _scores(model: FlowModel, config: Config) -> Result:
    row = evaluate(model, config, outcomes=True)
    tasks = {task: values["mean"] for task, values in row["tasks"].items()}
    rewards = {name: row["rewards"][name] for name in ("head", "strict")}
    tags = [str(record["tag"]) for record in load_prompts(config.prompts.test).records]
    return {"rewards": rewards, "tasks": tasks, "outcomes": packed(row["outcomes"]), "tags": tags}


def _keep(name: str, seed: int | None, row: Result) -> None:
    """Put what was judged into the file, beside the comparison."""
    if seed is not None:
        _base()
        row = {key: row[key] for key in row if key != "tags"}
    found = read()
    judged = found.setdefault("judged", {})
    if seed is None:
        judged[name] = row
    else:
        judged.setdefault(name, {})[str(seed)] = row
    write_json(FILE, found)


# ---------------------------------------------------------------------------------------- the table


def complete(result: Mapping[str, Any]) -> list[str]:
    """Return the rows of which every seed was judged."""
    judged = result.get("judged", {})
    return [name for name in ROWS if len(judged.get(name, ())) == len(SEEDS)]


def rows(result: Mapping[str, Any]) -> list[Result]:
    """Work out every row from the outcomes: what the truth gained, with its error over seeds and
    prompts and Holm's p, and what the proxy gained, with Student's interval over seeds."""
    judged = result["judged"]
    entries = []
    for name in complete(result):
        runs = []
        for seed, one in judged[name].items():
            runs.append({"seed": int(seed), "at": {"nfe": one if "outcomes" in one else None}})
        entries.append({"name": name, "file": name, "seeds": runs})
    found = gains({"configs": entries, "base": judged["base"]})
    for row in found:
        ended = [one for one in judged[row["config"]].values() if "outcomes" in one]
        rose = [one["rewards"]["head"] - judged["base"]["rewards"]["head"] for one in ended]
        row["proxy"] = float(np.mean(rose))
        few = len(rose) < 2
        row["proxy_half"] = (
            float("nan") if few else float(stats.t.ppf(0.975, len(rose) - 1) * stats.sem(rose))
        )
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Draw the rows, that of the highest truth first."""
    lines = [["remedy", "proxy", "95 %", "truth", "95 %", "Holm's p", "seeds below base"]]
    for row in found:
        proxy = _span(row["proxy"], row["proxy_half"])
        truth = _span(row["gain"], row["half"])
        holm = "< 0.001" if row["holm"] < 0.001 else f"{row['holm']:.3f}"
        below = f"{row['below'] + row['failed']} of {row['seeds'] + row['failed']}"
        lines.append([ROWS[row["config"]].title, *proxy, *truth, holm, below])
    return markdown_table(lines)


def _span(value: float, half: float) -> tuple[str, str]:
    """Write a gain and its interval in points."""
    if not np.isfinite(half):
        return points(value), "–"
    return points(value), f"{points(value - half)} to {points(value + half)}"


def page(text: str) -> str:
    """Fill the table of docs/hacking.md; nothing where nothing was judged yet."""
    result = read()
    if not complete(result):
        return between(text, "hacking: table", "hacking: end", [])
    found = rows(result)
    parts = [table(found), wrapped(f"{unprotected(result)} {best_blind(found)}")]
    return between(text, "hacking: table", "hacking: end", parts)


def unprotected(result: Mapping[str, Any]) -> str:
    """Say what happened without a remedy, seed by seed."""
    judged = result["judged"]
    base = judged["base"]["rewards"]
    ended = [row["rewards"] for row in judged[NOTHING].values() if "rewards" in row]
    rose = sum(row["head"] > base["head"] for row in ended)
    ends = ", ".join(percent(row["strict"]) for row in ended)
    start = percent(base["strict"])
    return (
        f"Without a remedy the share of right images went from {start} to {ends}, seed by seed; "
        f"the proxy rose in {rose} of {len(ended)}."
    )


def best_blind(found: Sequence[Mapping[str, Any]]) -> str:
    """Name the remedy that kept most of the truth among those that never ask the checker."""
    row = next(row for row in found if row["config"] not in (NOTHING, EARLY, ROLLBACK))
    return (
        f"Of the remedies that never ask the checker {ROWS[row['config']].title} kept most of the "
        f"truth: {points(row['gain'])} points."
    )


def targets() -> list[tuple[Path, Any]]:
    """Return the page that this file fills."""
    return [(PAGE, page)]


def main() -> None:
    """Train what is missing."""
    args = command_line(__doc__, *ROWS).parse_args()
    train(args.only, args.minutes)


if __name__ == "__main__":
    main()
