"""What two sections of a config must agree on, after each was checked by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.core.errors import unknown

MOST_DRAWN = 100_000  # of one prompt: they are decoded together
REPORT_KEYS = {"score", "interval", "images", "tasks", "seen", "held_out", "rewards", "setting"}
REPORT_KEYS |= {"outcomes", "unscored", "by_prompt", "iteration", "drift", "marks"}
REPORT_KEYS |= {"budget", "nfe", "seconds"}
"""Keys of an evaluation's line, which the headline reward cannot be named like."""


def disagreements(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    """Return what is wrong between the sections that are there; a section that is missing, or that
    is wrong by itself, is compared with nothing. at: a key -> where its value came from."""
    return [
        *_names(built, at),
        *_training(built, at),
        *_headline(built, at),
        *_drawn(built, at),
    ]


def _names(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    said, name, rewards = [], built.get("name"), built.get("rewards")
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        said.append(f"{at('name')}: expected letters, digits, '-', '_' and '.', got {name!r}")
    if rewards is not None and not any(call.mix for call in rewards.values()):
        said.append(f"{at('rewards')}: expected at least one reward whose weight is not 0")
    return said


def _training(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    said, optimizer, monitors = [], built.get("optimizer"), built.get("monitors")
    evaluation, train = built.get("eval"), built.get("train")
    # averaged weights are evaluated, but nothing averages
    averaged = evaluation is not None and evaluation.weights == "ema"
    if averaged and train is not None and train.ema == 0:
        mend = "set eval.weights to 'current'"
        both = "eval.weights is 'ema', but train.ema is 0 (off)"
        said.append(f"{at('train.ema')}: {both}; {mend}")
    # the warm-up sets the learning rate of every step
    if optimizer is not None and "lr" not in optimizer.kwargs:
        lacks = f"{optimizer.path} has no argument 'lr', which the warm-up sets"
        said.append(f"{at('optimizer')}: {lacks}")
    # monitors that change the weight of a KL need one
    if monitors is not None and built.get("kl") is None:
        asking = monitors.asks_for("raise_kl")
        asking += ["adaptive_kl"] if monitors.adaptive_kl else []
        for name in asking:
            said.append(f"{at(f'monitors.{name}')}: needs a kl section, whose weight it changes")
    return said


def _drawn(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    evaluation = built.get("eval")
    if evaluation is None or evaluation.images * evaluation.best_of <= MOST_DRAWN:
        return []
    product = f"{evaluation.images:,} x eval.best_of {evaluation.best_of:,}"
    return [
        f"{at('eval.images')}: expected at most {MOST_DRAWN:,} images drawn of a prompt, got "
        f"{product}"
    ]


def _headline(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    said: list[str] = []
    evaluation, rewards = built.get("eval"), built.get("rewards")
    if evaluation is None or rewards is None:
        return said
    score = evaluation.score or next(iter(rewards), "")
    if evaluation.score and evaluation.score not in rewards:
        says = unknown(evaluation.score, rewards, "reward")
        said.append(f"{at('eval.score')}: the config {says}")
    elif score in REPORT_KEYS:
        taken = f"{score!r} is a key of an evaluation's line; name the reward otherwise"
        said.append(f"{at('rewards')}: {taken}, or let eval.score name another")
    if evaluation.best_by and evaluation.best_by not in rewards:
        says = unknown(evaluation.best_by, rewards, "reward")
        said.append(f"{at('eval.best_by')}: the config {says}")
    return said
