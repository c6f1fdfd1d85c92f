"""Which guidance, steps and LoRA scale serve a model best: a suite under every combination."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flowrl.config.overrides import text_override
from flowrl.core.errors import ConfigError, RunError, near
from flowrl.core.files import only, write_json, write_text
from flowrl.core.prompts import load_prompts, task_of
from flowrl.core.tables import fixed_digits, interval_text, text_table
from flowrl.core.types import FlowModel
from flowrl.evaluation.measures.of_images import Tools, check_measures, measure_images
from flowrl.evaluation.statistics import mmhm, paired_difference
from flowrl.evaluation.suites.catalogue import prompts_of, suite_of
from flowrl.runs.evaluate import grid_prompts
from flowrl.runs.open_run import Target
from flowrl.runs.suite import run_suite, scores_of

RESULT, PROMPTS = "sweep.json", "prompts.jsonl"
LOWER = ("fid", "kid")  # measures of which less is better
Open = Callable[[list[str]], Target]
"""Load the target with overrides."""


class SweepPoint(NamedTuple):
    """One setting; None = as the target has it."""

    guidance: float | None
    steps: int | None
    lora_scale: float

    @property
    def folder(self) -> str:
        """Return the name of its folder."""
        parts = []
        if self.guidance is not None:
            parts.append(f"guidance-{self.guidance:g}")
        if self.steps is not None:
            parts.append(f"steps-{self.steps}")
        if self.lora_scale != 1:
            parts.append(f"lora-{self.lora_scale:g}")
        return "_".join(parts) or "as-it-is"


class SweepRequest(NamedTuple):
    """What is swept, on what, and by which number the setting is chosen."""

    suite: str
    guidance: Sequence[float | None]
    steps: Sequence[int | None]
    lora_scale: Sequence[float] = (1.0,)
    prompts: str = ""  # "" = the suite's validation prompts
    most: int = 0  # of these prompts, the tasks evenly; 0 = all
    by: str = ""  # "" = the headline; "mmhm", a reward, or a measure
    measures: Sequence[str] = ()
    tools: Tools = Tools()


def sweep(
    open_target: Open, asked: SweepRequest, out: Path, *, progress: Any = None
) -> dict[str, Any]:
    """Run a suite under every combination, each in a folder of `out`, and choose one.

    What is there already is kept, so a sweep that was stopped goes on, and values can be added. A
    target is loaded once for each guidance.

    Returns what `sweep.json` holds: a row per setting with its scores, measures and the paired
    difference to the chosen one, MMHM where there are several numbers, and the chosen setting.
    Raises ConfigError, and what suites and measures raise.
    """
    # run every combination; mistakes in the measures are refused before
    points = _points(asked)
    check_measures(asked.measures, asked.tools)
    prompts = choose_prompts(asked, out)
    rows, scores, tags, headline = _run_points(points, open_target, asked, out, prompts, progress)
    # choose by a reward, a measure, or MMHM, the mean over all of these
    by = asked.by or headline
    columns = _columns(rows)
    _add_mmhm(rows, columns, asked)
    chosen = _choose({**columns, headline: [row["score"] for row in rows]}, by)
    # how much less than the chosen setting each has, on the same prompts
    for row, point in zip(rows, points, strict=True):
        gap = paired_difference(scores[point], scores[points[chosen]], tags)
        row["less_than_chosen"] = only(gap, ("difference", "interval"))
    # the whole as a file
    result = {
        "kind": "flowrl sweep",
        "suite": asked.suite,
        "score": headline,
        "by": by,
        "chosen": rows[chosen],
        "rows": rows,
    }
    write_json(out / RESULT, result)
    return result


def _run_points(
    points: list[SweepPoint],
    open_target: Open,
    asked: SweepRequest,
    out: Path,
    prompts: str,
    progress: Any,
) -> tuple[list[dict[str, Any]], dict[SweepPoint, Any], list[str], str]:
    """Run the suite at every point -> rows, scores by point, the prompts' tasks, the headline."""
    rows, scores, tags, headline, last = [], {}, [], "", None
    target: Target | None = None
    # a model is loaded with its guidance, so points of one guidance stand together
    for point in points:
        if target is None or point.guidance != last:
            target = None  # two models would not fit
            changes, last = list[str](), point.guidance
            if last is not None:
                changes.append(f"model.guidance={last}")
            target = open_target([*changes, text_override("prompts.test", prompts)])
        # steps and the scale of a LoRA change without loading
        config, where, more = target.config, out / point.folder, dict[str, float]()
        if point.steps is not None:
            config = replace(config, eval=replace(config.eval, steps=point.steps))
        if point.lora_scale != 1:
            more["lora_scale"] = point.lora_scale
        with lora_scaled(target.model, point.lora_scale):
            report = run_suite(
                target.model,
                config,
                asked.suite,
                where,
                target=target.what,
                base=target.base,
                progress=progress,
                more=more,
                content=target.content,
            )
        # scores by prompt, for the paired differences
        headline = config.headline
        listed = load_prompts(prompts)
        tags = list(map(task_of, listed.records))
        scores[point] = scores_of(config, listed, where)[headline]
        rows.append(_row(point, where, report, asked))
    return rows, scores, tags, headline


def choose_prompts(asked: SweepRequest, out: Path) -> str:
    """Return the prompts to sweep on: a list, or a file in `out` with some of them.

    Raises ConfigError for a count below 0, and for a suite without validation prompts: settings
    that were chosen on the test prompts would flatter the test.
    """
    if asked.most < 0:
        raise ConfigError(f"--count: expected a whole number, 0 for all, got {asked.most}")
    suite = suite_of(asked.suite)
    if not (asked.prompts or suite.validation):
        raise ConfigError(
            f"--suite {asked.suite}: it has no validation prompts; give --prompts FILE with ones "
            "that the test does not use"
        )
    chosen = prompts_of(asked.suite, asked.prompts or suite.validation)
    # a part of them takes each task alike; as a file, since the suite reads one
    if not asked.most:
        return chosen
    records = load_prompts(chosen).records
    places = sorted(grid_prompts(records, min(asked.most, len(records))))
    text = "".join(json.dumps(records[place]) + "\n" for place in places)
    # scores in `out` belong to the prompts of before
    file = out / PROMPTS
    if file.exists() and file.read_bytes() != text.encode():
        raise RunError(f"{file}: holds other prompts; name another folder with --out")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)
    return prompts_of(asked.suite, str(file))


@contextmanager
def lora_scaled(model: FlowModel, scale: float) -> Iterator[None]:
    """Let a model run with its adapters at `scale` times their strength, by their matrices B.

    Raises ConfigError for a model without adapters, unless the scale is 1.
    """
    # LoRA adds B A x, so a scaled B scales all that it adds
    second = [p for name, p in model.trainable().items() if ".lora_B." in name]
    if scale == 1:
        yield
        return
    if not second:
        raise ConfigError(
            f"--lora-scale {scale:g}: expected a model with LoRA (model.tune=lora), got one without"
        )
    # the matrices themselves are put back: dividing by the scale would round
    kept = [p.data for p in second]
    try:
        for p in second:
            p.data = p.data * torch.tensor(scale, dtype=p.dtype, device=p.device)
        yield
    finally:
        for p, data in zip(second, kept, strict=True):
            p.data = data


def _points(asked: SweepRequest) -> list[SweepPoint]:
    """Return all combinations, one guidance after the other. Raises ConfigError for a value that
    stands twice."""
    axes = {"guidance": asked.guidance, "steps": asked.steps, "lora-scale": asked.lora_scale}
    for name, values in axes.items():
        if not values or len(set(values)) != len(values):
            raise ConfigError(f"--{name}: expected values that differ, got {list(values)}")
    every = product(asked.guidance, asked.steps, asked.lora_scale)
    return [SweepPoint(*values) for values in every]


def _row(
    point: SweepPoint, where: Path, report: Mapping[str, Any], asked: SweepRequest
) -> dict[str, Any]:
    """Put a setting's numbers together."""
    setting, name = report["setting"], report["score"]
    row: dict[str, Any] = {
        "folder": str(where),
        "guidance": setting["guidance"],
        "steps": setting["steps"],
        "lora_scale": point.lora_scale,
        "score": report[name],
        "interval": report["interval"],
        "images": report["images"],
        "rewards": report["rewards"],
        "setting": setting,
    }
    if asked.measures:
        found = measure_images(where, asked.measures, asked.tools)
        row["measures"] = only(found, asked.measures)
    return row


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return every number of the settings by its name: means of rewards, and measures."""
    columns = {}
    for name in rows[0]["rewards"]:
        columns[name] = [float(row["rewards"][name]) for row in rows]
    for name in rows[0].get("measures", {}):
        columns[name] = [float(row["measures"][name]["value"]) for row in rows]
    return columns


def _add_mmhm(
    rows: list[dict[str, Any]], columns: dict[str, list[float]], asked: SweepRequest
) -> None:
    """Add MMHM to rows and columns where there are several numbers, unless one is missing that
    nobody asked to choose by. Raises ConfigError, DataError."""
    if len(columns) > 1 and (all(map(_finite, columns.values())) or asked.by == "mmhm"):
        columns["mmhm"] = mmhm(columns, lower=LOWER)
        for row, value in zip(rows, columns["mmhm"], strict=True):
            row["mmhm"] = value


def _finite(column: Sequence[float]) -> bool:
    """Say whether every setting has the number."""
    return all(map(math.isfinite, column))


def _choose(columns: Mapping[str, Sequence[float]], by: str) -> int:
    """Return the place of the best setting by one number. Raises ConfigError."""
    if by not in columns:
        hint = near(by, list(columns))
        if by == "mmhm":
            hint = ": it takes several rewards or measures"
        raise ConfigError(f"--by: expected one of {', '.join(columns)}, got {by!r}{hint}")
    best = max(columns[by])
    if by in LOWER:
        best = min(columns[by])
    return columns[by].index(best)


def sweep_table(result: Mapping[str, Any], *, width: int | None = None) -> str:
    """Return a row per setting, the chosen one marked, and what the columns mean."""
    # columns: the setting, its score and gap to the chosen one, then what was measured besides
    rows = result["rows"]
    others = [name for name in rows[0]["rewards"] if name != result["score"]]
    measures, mixed = list(rows[0].get("measures", {})), list[str]()
    if "mmhm" in rows[0]:
        mixed.append("mmhm")
    head = ["", "guidance", "steps", "lora scale", result["score"], "95 % interval"]
    lines = [[*head, "less the chosen", *others, *measures, *mixed]]
    # "less the chosen" is a paired difference on the same prompts, with its interval
    for row in rows:
        gap = row["less_than_chosen"]
        span = interval_text(gap["interval"], sign=True)
        mark, less = "", f"{gap['difference']:+.3f} ({span})"
        if row["folder"] == result["chosen"]["folder"]:
            mark, less = "*", ""
        guidance = "none" if row["guidance"] is None else f"{row['guidance']:g}"
        cells = [mark, guidance, str(row["steps"]), f"{row['lora_scale']:g}"]
        cells += [fixed_digits(row["score"]), interval_text(row["interval"]), less]
        cells += [fixed_digits(row["rewards"][name]) for name in others]
        cells += [fixed_digits(row["measures"][name]["value"]) for name in measures]
        lines.append(cells + [fixed_digits(row[name]) for name in mixed])
    setting = result["chosen"]["setting"]
    about = (
        f"* chosen by {result['by']} on {setting['prompts']} ({setting['count']} prompts, hash "
        f"{setting['prompts_hash']}), {setting['images']} images each, seed {setting['seed']}"
    )
    return "\n".join([text_table(lines, width=width), about])
