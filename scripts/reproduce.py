"""Train one config with several seeds, and write the result file and the figures that the README
shows.

    python scripts/reproduce.py shapes/flow_grpo --seeds 0 1 2

Runs one seed after the other into runs/<name>-seed<N>; seeds that are done are not run again, a
stopped one goes on. Writes assets/results/<name>.json (each seed's summary, held-out curve and
machine, the mean gain and its spread) and, into assets/figures/, the learning curves of all seeds
and images before and after of the first one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

import flowrl
from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.evaluation.image_grids import load_strip, pairs_figure, save_png
from flowrl.runs.report.curves import compare_curves
from flowrl.runs.report.samples import sample_files
from flowrl.training import checkpoint


def train_seed(config: str, overrides: list[str], seed: int, run: Path) -> dict[str, Any]:
    """Train one seed, or take what is there already, if it is of this very config."""
    wanted = load_config(config, [*overrides, f"seed={seed}"])
    if (run / "config.yaml").exists() and load_config(run / "config.yaml").dump() != wanted.dump():
        raise SystemExit(
            f"{run} holds a run of another config; move it away, or name another folder with --runs"
        )
    if not (run / "summary.json").exists():
        resume = run.exists() and checkpoint.latest(run) is not None
        began = time.perf_counter()
        flowrl.train(wanted, run, resume=resume)
        if not resume:  # what a user waits for, from loading the model to the last image
            write_json(run / "wall.json", {"minutes": (time.perf_counter() - began) / 60})
    summary = json.loads((run / "summary.json").read_text())
    wall = (
        json.loads((run / "wall.json").read_text())
        if (run / "wall.json").exists()
        else {"minutes": None}
    )
    made = json.loads((run / "environment.json").read_text())
    rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    curve = {row["iteration"]: row[row["score"]] for row in rows}
    return {**summary, "held_out": curve, "wall_minutes": wall["minutes"], "environment": made}


def collect(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the seeds' summaries together; the interval is Student's, over seeds."""
    # Student's interval of the mean gain: seeds are few, so 1.96 would be too narrow
    gains = [s["gain"] for s in summaries]
    half, n = float("nan"), len(gains)
    if n > 1:
        half = float(student.ppf(0.975, n - 1)) * stdev(gains) / n**0.5
    score = summaries[0]["before"]["score"]
    # where there is one seed, there is no interval
    return {
        "name": summaries[0]["name"],
        "score": score,
        "before": mean(s["before"][score] for s in summaries),
        "after": mean(s["after"][score] for s in summaries),
        "gain": mean(gains),
        "gain_interval_over_seeds": [mean(gains) - half, mean(gains) + half]
        if len(gains) > 1
        else None,
        "gains": gains,
        "minutes": [round(s["wall_minutes"] or s["seconds"] / 60, 2) for s in summaries],
        "seeds": summaries,
    }


def main() -> None:
    """Train with each seed and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="shapes/flow_grpo")
    parser.add_argument("overrides", nargs="*", help="key.subkey=value")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("assets"))
    args = parser.parse_args()
    # a run of each seed; one that is there is not trained again
    name = load_config(args.config, args.overrides).name
    folders = [args.runs / f"{name}-seed{seed}" for seed in args.seeds]
    rows = [
        train_seed(args.config, args.overrides, s, run)
        for s, run in zip(args.seeds, folders, strict=True)
    ]
    # the result file, and the curves of all seeds
    result = collect(rows)
    figures = args.out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    (args.out / "results").mkdir(parents=True, exist_ok=True)
    write_json(args.out / "results" / f"{name}.json", result)
    compare_curves(folders).savefig(figures / f"{name}-curves.png", dpi=110)
    # image grids of the first seed: the same prompts and noise before and after
    strips = sample_files(folders[0])
    prompts = json.loads((folders[0] / "samples" / "prompts.json").read_text())["prompts"]
    before, after = (load_strip(strips[k], len(prompts)) for k in (min(strips), max(strips)))
    save_png(pairs_figure(before, after, prompts, blocks=4), figures / f"{name}-before-after.png")
    low, high = result["gain_interval_over_seeds"] or (float("nan"), float("nan"))
    print(
        f"{result['score']}: {result['before']:.3f} -> {result['after']:.3f}, gain "
        f"{result['gain']:+.3f}"
    )
    print(
        f"95 % interval of the gain over seeds {low:+.3f} to {high:+.3f}, minutes "
        f"{result['minutes']}"
    )


if __name__ == "__main__":
    main()
