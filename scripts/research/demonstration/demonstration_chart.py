"""The chart: accuracy on held-out prompts against minutes of training, over the training seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flowrl.config.load import load_config
from flowrl.runs.folder import CONFIG, EVALS, TIMING, read_rows
from flowrl.runs.report.style import INK, PALETTE, QUIET, grid_along, save_figure, styled

CHECKER = Path("assets/results/checker.json")
PHASES = ("rollout", "decode", "reward", "train")


def curve(run: Path, seconds: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return minutes of training, without evaluations, and the score at each of a run's
    evaluations.

    Minutes are those of the run, or `seconds` per iteration, where the run shared its machine.
    """
    ends = [0.0]
    for row in read_rows(run, TIMING):
        ends.append(ends[-1] + sum(row.get(phase, 0.0) for phase in PHASES) / 60)
    rows = read_rows(run, EVALS)
    minutes = np.array([ends[min(row["iteration"], len(ends) - 1)] for row in rows])
    if seconds is not None:
        minutes = np.array([row["iteration"] * seconds / 60 for row in rows])
    return minutes, np.array([row[row["score"]] for row in rows])


def ceiling(file: Path = CHECKER) -> float | None:
    """Return the share of true scenes that the checker accepts after the VAE, mean over tasks."""
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8")).get("vae_round_trip", {})
    own = [task["own_agreement"] for task in found.values() if isinstance(task, dict)]
    return sum(own) / len(own) if own else None


def _levels(result: dict[str, Any], listed: str) -> dict[str, float]:
    """Return the base model's scores on the list of the runs' evaluations, test or validation."""
    base, best = result["base"], result["base_best_guidance"]
    names = ("base", "base + best guidance")
    if listed == base["prompts"]:
        return dict(zip(names, (base["mean"], best["mean"]), strict=True))
    if listed != result["search"]["prompts"]:
        return {}  # another list: nothing that could be set beside it
    rows = {(r["guidance"], r["steps"]): r["validation"] for r in result["search"]["base"]}
    wanted = [(one["guidance"], one["steps"]) for one in (base, best)]
    return {name: rows[key] for name, key in zip(names, wanted, strict=True) if key in rows}


@styled
def draw_chart(
    runs: Sequence[str], result: dict[str, Any], file: Path, seconds: float | None = None
) -> None:
    """Draw the mean over seeds with their range, and the base model's marks, as dashed lines."""
    curves = [curve(Path(run), seconds) for run in runs]
    least = min(len(minutes) for minutes, _ in curves)
    minutes = np.mean([x[:least] for x, _ in curves], 0)
    scores = 100 * np.array([y[:least] for _, y in curves])
    # the runs
    figure = Figure(figsize=(7.2, 4.2))
    axes = figure.add_subplot()
    grid_along(axes)
    axes.fill_between(minutes, scores.min(0), scores.max(0), color=PALETTE[0], alpha=0.2, lw=0)
    label = f"RL, mean and range of {len(runs)} seeds"
    axes.plot(minutes, scores.mean(0), color=PALETTE[0], marker="o", ms=3.5, label=label)
    # what the base model reaches on the same prompts
    listed = load_config(Path(runs[0]) / CONFIG).prompts.test
    levels = {**_levels(result, listed), "ceiling of the autoencoder": ceiling()}
    shades = (INK, PALETTE[1], QUIET)
    for (name, level), color in zip(reversed(levels.items()), shades, strict=False):
        if level is not None:
            axes.axhline(100 * level, color=color, ls="--", lw=1.2, label=name)
    axes.set_xlabel("minutes of training")
    axes.set_ylabel(f"right images of {Path(listed).stem} prompts, %")
    axes.set_ylim(0, 104)
    axes.set_xlim(left=0)
    axes.legend(loc="best", fontsize=8)
    figure.tight_layout()
    save_figure(figure, file, dpi=130)
