"""What a suite found: means with intervals, the difference to another folder, leaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.config.load import Config
from flowrl.core.errors import FlowRLError, RewardError, RunError
from flowrl.core.files import write_json, write_text
from flowrl.core.prompts import PromptSet, load_prompts, overlap
from flowrl.evaluation.held_out import best_places, check_tasks, chooser
from flowrl.evaluation.statistics import paired_bootstrap, resampled, summarize_scores
from flowrl.evaluation.suites import image_folder as folder


def scores_of(
    config: Config, prompts: PromptSet, out: Path, n: int | None = None
) -> dict[str, np.ndarray]:
    """Read the scores of a folder -> {reward: [P, S]}, NaN = not scored; with best-of-n (`n`, by
    default the config's) those of the images that were chosen. Raises RunError for an image without
    a line."""
    lines, n = folder.read_lines(out), n or config.eval.best_of
    # a table [P, S n] for each reward; every place has to be there
    found: dict[str, np.ndarray] = {}
    for name in config.rewards:
        values = np.full((len(prompts), config.eval.images * n), np.nan)
        for place in np.ndindex(values.shape):
            if place not in lines or name not in lines[place]["scores"]:
                raise RunError(
                    f"{out}: image {place[1]} of prompt {place[0]} has no score by {name!r}: the "
                    "suite was not finished; run the same command again"
                )
            value = lines[place]["scores"][name]
            values[place] = np.nan if value is None else value
        found[name] = values
    if n == 1:
        return found
    # the reward that chooses decides for all: they judge the same images
    chosen = best_places(found[chooser(config.eval.best_by, config.headline, found)], n)
    return {name: np.take_along_axis(values, chosen, 1) for name, values in found.items()}


def make_report(
    config: Config, prompts: PromptSet, out: Path, setting: Mapping[str, Any]
) -> dict[str, Any]:
    """Average the scores of a folder -> the report that `evaluation_table` shows."""
    name, scores = config.headline, scores_of(config, prompts, out)
    values = torch.from_numpy(scores[name].ravel())
    kept = values.isfinite()
    unscored = {k: int(np.isnan(v).sum()) for k, v in scores.items() if np.isnan(v).any()}
    share = max(unscored.values(), default=0) / len(values)
    if share > config.train.max_unscored:
        raise RewardError(
            f"{out}: {unscored} of {len(values)} images have no score; train.max_unscored="
            f"{config.train.max_unscored} is the share that may be left out"
        )
    # every reward, over images
    means, intervals = {}, {}
    for reward, every in scores.items():
        known = torch.from_numpy(every[np.isfinite(every)])
        if not len(known):
            raise RewardError(f"{out}: no image has a score by {reward!r}")
        found = summarize_scores(known, ["all"] * len(known))
        means[reward], intervals[reward] = found["mean"], found["interval"]
    # the headline, over tasks
    tags = [tag for tag in _tags(prompts) for _ in range(config.eval.images)]
    known_tags = [tag for tag, known in zip(tags, kept.tolist(), strict=True) if known]
    check_tasks(prompts.records, [{"tag": tag} for tag in known_tags], name)
    whole = summarize_scores(values[kept], known_tags)
    report = {"score": name, name: whole.pop("mean"), **whole, "rewards": means}
    report["intervals"] = intervals
    if unscored:
        report["unscored"] = unscored
    return {**report, "setting": dict(setting)}


def compared(
    config: Config, prompts: PromptSet, out: Path, against: Path, other: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare the headline with that of another folder, prompt by prompt."""
    name, tags = config.headline, _tags(prompts)
    ours = scores_of(config, prompts, out)[name]
    theirs = scores_of(config, prompts, against, int(other.get("best_of", 1)))[name]
    return {
        "folder": str(against),
        "target": other["target"],
        **paired_bootstrap(ours, theirs, tags),
    }


def add_tables(
    report: dict[str, Any],
    config: Config,
    prompts: PromptSet,
    out: Path,
    rewards: Mapping[str, Any],
) -> None:
    """Add a benchmark's own numbers, ``tables`` {reward: {name: number}}, of rewards that make such
    of the images that count (the chosen ones, where the best of several are), and their 95 %
    intervals over prompts, ``table_intervals``; null where one prompt alone decides a number."""
    # scores of all images that were drawn, n for each that counts, and which of them count [P, S]
    lines, n = folder.read_lines(out), config.eval.best_of
    every = replace(config.eval, best_of=1, images=n * config.eval.images)
    raw = scores_of(replace(config, eval=every), prompts, out)
    chosen = best_places(raw[chooser(config.eval.best_by, config.headline, raw)], n)
    for name, reward in rewards.items():
        if not hasattr(reward, "tables"):
            continue
        # the reward's rows on the images that count, prompt by prompt; unscored ones are left out
        details: list[list[dict[str, Any]]] = [[] for _ in chosen]
        for place in np.ndindex(chosen.shape):
            row = lines[place[0], int(chosen[place])]["details"][name]
            if row["score"] is not None:
                details[place[0]].append(row)
        # images of a prompt are alike, so intervals draw whole prompts anew
        numbers = reward.tables([row for rows in details for row in rows])
        intervals = resampled(reward.tables, [rows for rows in details if rows])
        report.setdefault("tables", {})[name] = numbers
        report.setdefault("table_intervals", {})[name] = {k: intervals.get(k) for k in numbers}


def _tags(prompts: PromptSet) -> list[str]:
    return [str(record.get("tag", "all")) for record in prompts.records]


def leaks_of(config: Config, prompts: PromptSet) -> list[str]:
    """Say what the suite's prompts share with the training prompts, where these are at hand."""
    try:
        trained = load_prompts(config.prompts.train)
    except FlowRLError:  # not on this machine
        return []
    return overlap(prompts, trained).lines(len(prompts))


def write_suite_report(out: Path, rewards: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Write the summary, and the result file of each reward that explains itself."""
    write_json(out / folder.SUMMARY, dict(report))
    lines = folder.read_lines(out)
    for name, reward in rewards.items():
        if hasattr(reward, "explain"):
            rows = []
            for _, line in sorted(lines.items()):
                row = {k: v for k, v in line["details"][name].items() if k != "score"}
                rows.append(folder.as_line({**row, "filename": line["file"]}))
            write_text(out / f"{name}.jsonl", "".join(rows))
