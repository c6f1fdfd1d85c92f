"""Made-up results of comparisons, in the form of the result file."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from flowrl.runs.compare.summary import ErrorModel, error_model, summarize_result

BASE = {
    "score": 0.2,
    "interval": [0.15, 0.25],
    "images": 100,
    "tasks": {"even": 0.1, "odd_one": 0.3},
}


def row(score: float, *, at: float, marks: list[int], budget: list[str]) -> dict[str, Any]:
    tasks = {"even": score - 0.1, "odd_one": score + 0.1}
    spent = {
        "iteration": int(at / 10),
        "nfe": at,
        "seconds": at / 5,
        "marks": marks,
        "budget": budget,
    }
    return {**spent, "score": score, "interval": [score - 0.05, score + 0.05], "tasks": tasks}


def run(seed: int, score: float, failed: str | None = None) -> dict[str, Any]:
    """Make a run that is half way at mark 1, ends (a) at mark 2 with `score` and (b) with 0.1
    more."""
    curve = [row(score - 0.1, at=50 + seed, marks=[1], budget=[])]
    if failed is None:
        curve += [
            row(score, at=104, marks=[2], budget=["nfe"]),
            row(score + 0.1, at=200, marks=[], budget=["seconds"]),
        ]
    at: dict[str, Any] = {}
    for key in ("nfe", "seconds"):
        at[key] = next((r for r in curve if key in r["budget"]), None)
    trace = {
        "iteration": [0, 9],
        "nfe": [10.0, 100.0],
        "seconds": [2.0, 20.0],
        "reward": [0.1, 0.2],
    }
    trace |= {
        "ratio_std": [0.01, None],
        "diversity": [0.3, 0.2],
        "accuracy": [0.1, 0.2],
        "grad_norm": [1.0, 1.0],
    }
    used = {"iterations": 10, "nfe": 100.0, "seconds": 20.0}
    return {
        "seed": seed,
        "lr": 1e-3,
        "failed": failed,
        **used,
        "curve": curve,
        "at": at,
        "trajectory": trace,
    }


def config(name: str, scores: list[float], *failed: str) -> dict[str, Any]:
    seeds = [run(seed, score) for seed, score in enumerate(scores)]
    seeds += [run(len(scores) + i, 0.5, text) for i, text in enumerate(failed)]
    return {"name": name, "lr": 1e-3, "search": None, "seeds": seeds}


def result(*configs: dict[str, Any]) -> dict[str, Any]:
    settings = {"score": "strict", "search": None}
    budgets = {"nfe": 100.0, "seconds": 40.0, "points": 2}
    return summarize_result(
        {"settings": settings, "budgets": budgets, "base": deepcopy(BASE), "configs": list(configs)}
    )


def scored(**scores: list[float]) -> ErrorModel:
    """Make the error model of configs with these scores, one per seed."""
    return error_model([config(name, some) for name, some in scores.items()], BASE, "nfe")
