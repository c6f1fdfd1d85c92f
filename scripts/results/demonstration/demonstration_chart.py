"""The chart: accuracy on held-out prompts over the training, mean and range of its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from demonstration_measure import Bench
from matplotlib.figure import Figure

from flowrl.core.files import write_json
from flowrl.runs.evaluate import evaluate
from flowrl.runs.folder import CONFIG, EVALS, read_object, read_rows
from flowrl.runs.open_run import open_target, saved_config
from flowrl.runs.report.style import INK, PALETTE, grid_along, save_figure, styled

CEILING = 0.9974  # the share of true scenes that the checker accepts after the VAE


def curves(
    bench: Bench, runs: Sequence[Path], base: str, best: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the runs reached at each of their evaluations, and what the base model reaches
    with its best guidance and steps in the same evaluation, from the same noise."""
    config = saved_config(runs[0])
    return {
        "prompts": str(config.prompts.test),
        "threads": config.train.threads,
        "base_best_guidance": _guided(bench, runs[0], base, best),
        "ceiling": CEILING,
        "runs": [{"seed": saved_config(run).seed, **curve(run)} for run in runs],
    }


def curve(run: Path) -> dict[str, list[float]]:
    """Return iteration and score of a run's evaluations."""
    rows = read_rows(run, EVALS)
    return {
        "iterations": [row["iteration"] for row in rows],
        "scores": [row[row["score"]] for row in rows],
    }


def _guided(bench: Bench, run: Path, base: str, best: Mapping[str, Any]) -> float:
    """Judge the base model as a run judges itself, but with guidance; kept in the work folder."""
    config = saved_config(run)
    name, same = "curve-base.json", [str(config.prompts.test), config.eval.seed, config.eval.images]
    setting = [base, best["guidance"], best["steps"], *same]
    if not (bench.work / name).exists() or read_object(bench.work, name)["setting"] != setting:
        changes = [f"model.guidance={best['guidance']:g}", f"eval.steps={best['steps']}"]
        target = open_target(base, settings=str(run / CONFIG), overrides=changes)
        found = evaluate(target.model, target.config)
        write_json(bench.work / name, {"setting": setting, "score": found[found["score"]]})
    return float(read_object(bench.work, name)["score"])


@styled
def draw_chart(found: Mapping[str, Any], file: Path) -> None:
    """Draw the mean over seeds with their range, and as dashed lines what the base model reaches
    with guidance, and the autoencoder's ceiling."""
    runs = found["runs"]
    least = min(len(run["iterations"]) for run in runs)
    iterations = runs[0]["iterations"][:least]
    scores = 100 * np.array([run["scores"][:least] for run in runs])
    # the runs
    figure = Figure(figsize=(7.2, 4.2))
    axes = figure.add_subplot()
    grid_along(axes)
    axes.fill_between(iterations, scores.min(0), scores.max(0), color=PALETTE[0], alpha=0.2, lw=0)
    label = f"after training, mean and range of {len(runs)} seeds"
    axes.plot(iterations, scores.mean(0), color=PALETTE[0], marker="o", ms=3.5, label=label)
    # what the base model reaches on the same prompts from the same noise, and what can be reached
    levels = {
        "ceiling of the autoencoder": (found["ceiling"], INK),
        "base model, its best guidance and steps": (found["base_best_guidance"], PALETTE[1]),
    }
    for name, (level, color) in levels.items():
        if level is not None:
            axes.axhline(100 * level, color=color, ls="--", lw=1.2, label=name)
    axes.set_xlabel("iterations")
    axes.set_ylabel(f"right images of {Path(found['prompts']).stem} prompts, %")
    axes.set_ylim(0, 104)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    save_figure(figure, file, dpi=130)
