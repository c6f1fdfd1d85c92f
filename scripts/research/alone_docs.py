"""What costs no training, beside what training gained: tables of docs/compare.md, factorial.md.

`python scripts/research/tables.py` writes them. The sources are the comparisons' result files and,
from the same prompts, `<name>-guided.json` and `<name>-best-of-8.json`, which `flowrl eval` made.
All intervals are those of the one error model (`flowrl/evaluation/crossed_errors.py`): of the base
model over prompts, of a method and of its differences over training seeds and prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measured import between, wrapped

from flowrl.core.tables import markdown_table
from flowrl.evaluation.crossed_errors import crossed
from flowrl.runs.compare.records import unpacked

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "assets" / "results", ROOT / "docs" / "compare.md"
FACTORIAL = ROOT / "docs" / "factorial.md"
Result = Mapping[str, Any]


class Group(NamedTuple):
    """Comparisons of one evaluation, and what stands beside them."""

    mark: str  # of its place in the page
    alone: str  # how the names of the files without training begin
    comparisons: tuple[str, ...]  # their files; the first has the base model, else `<alone>-base`
    others: tuple[tuple[str, str], ...] = ()  # further targets of 10 NFE: words, file
    nfe: int = 10  # of an image by the base model's own setting, and by a method
    page: Path = PAGE


TEACHERS = (
    ("teacher of objects alone", "compare-opd-teacher-objects"),
    ("teacher of layout alone", "compare-opd-teacher-layout"),
)
GROUPS = (
    Group("families", "compare-families", ("compare-families",)),
    Group("own rates", "compare-own-rates", ("compare-own-rates",)),
    Group("steps", "compare-steps", ("compare-steps", "compare-gradients", "compare-ram")),
    Group("distillation", "compare-opd", ("compare-opd",), TEACHERS),
    Group("larger", "compare-opd", ("compare-ddpo", "compare-spo")),
    Group("find", "compare-find", ("compare-stepwise", "compare-find")),
    Group("dense", "compare-dense", ("compare-dense", "compare-spo-finished", "compare-draft-lv")),
    Group("spo latent", "compare-spo-latent", ("compare-spo-latent",)),
    Group("spo latent fixed", "compare-spo-latent-fixed", ("compare-spo-latent-fixed",)),
    Group("dance", "compare-dance", ("compare-dance", "compare-direct-align")),
    Group("slas", "compare-slas", ("compare-slas",)),
    Group("uni grpo", "compare-uni-grpo", ("compare-uni-grpo",)),
    Group("stepwise five", "compare-stepwise-five", ("compare-stepwise-five",)),
    Group(
        "larger budgets",
        "compare-stepwise-five",
        ("compare-longer", "compare-gaussian", "compare-dpo-offline"),
    ),
    Group("gardo", "compare-gardo", ("compare-gardo",)),
    Group("dina", "compare-stepwise-five", ("compare-dina", "compare-crd")),
    Group("own noise", "compare-own-noise", ("compare-own-noise",)),
    Group("find own", "compare-find-own", ("compare-find-own",)),
    Group("narrow", "compare-narrow", ("compare-narrow",)),
    Group("imitation", "compare-imitation", ("compare-imitation",)),
    Group("rwr", "compare-rwr", ("compare-rwr",)),
    Group("combinations", "compare-combinations", ("compare-combinations",)),
    Group("factorial", "factorial-80000", (), page=FACTORIAL),
    Group("noisy", "compare-shapes", ()),
)
HEADS = ("", "right images", "95 % interval", "NFE per image", "minus guidance", "minus best of 8")
NOTE = (
    "Rows of methods are at (a). The last two columns are a method's share minus that of guidance, "
    "and of the best of 8, in points, on the same prompts, with 95 % intervals. Methods with "
    "guidance after training were not measured."
)


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return the pages, each with what fills it."""
    return [(page, partial(filled, page=page)) for page in (PAGE, FACTORIAL)]


def filled(text: str, page: Path) -> str:
    """Put the table of each of the page's groups between its marks."""
    for group in (one for one in GROUPS if one.page == page):
        marks = (f"{group.mark}, alone: table", f"{group.mark}, alone: end")
        note = [wrapped(NOTE)] if group.comparisons else []
        text = between(text, *marks, [table(group), *note])
    return text


def table(group: Group) -> str:
    """Show the base model, what it reaches with more sampling, and each method."""
    found = [_read(name) for name in group.comparisons]
    base, tags = _base(group, found)
    beside = {name: _read(f"{group.alone}-{name}") for name in ("guided", "best-of-8")}
    alone = {name: by_prompt(one, tags) for name, one in beside.items()}
    # the base model: seeds are of no matter, so its interval is over prompts
    rows = [list(HEADS), _row("base model", base, tags, group.nfe)]
    for name, one in beside.items():
        words, nfe = said(one["setting"])
        rows.append(_row(words, alone[name], tags, nfe))
    for words, name in group.others:
        rows.append(_row(words, by_prompt(_read(name), tags), tags, 10))
    if not found:
        return markdown_table([row[:4] for row in rows])
    # the methods, and how far they are from both
    for one in found:
        for config in one["configs"]:
            values = seeds_of(config)
            less = [_points(crossed(values - alone[n], tags), len(values)) for n in alone]
            row = _row(label(config["name"]), values, tags, group.nfe)
            # one seed says nothing of others
            row[2] = row[2] if len(values) > 1 else "–"
            rows.append([*row[:4], *less])
    return markdown_table(rows)


def _base(group: Group, found: Sequence[Result]) -> tuple[np.ndarray, list[str]]:
    """Return the base model's share of right images per prompt [1, P], and the prompts' tasks."""
    if found:
        base = found[0]["base"]
        return _shares(base["outcomes"]), list(base["tags"])
    base = _read(f"{group.alone}-base")
    tags = [task for task, some in base["by_prompt"].items() for _ in some]
    return by_prompt(base, tags), tags


def said(setting: Result) -> tuple[str, int]:
    """Say how the base model was sampled, and what an image costs, in NFE."""
    best_of, steps, guidance = setting.get("best_of", 1), setting["steps"], setting["guidance"]
    nfe = steps * best_of * (1 if guidance == 1 else 2)
    how = f"guidance {guidance:g}, {steps} steps" if guidance != 1 else f"{steps} steps"
    if best_of > 1:
        how = f"best of {best_of} by the reward"
    return f"base model, {how}", nfe


def label(name: str) -> str:
    """Say a config as the pages do."""
    method, _, arm = name.rpartition("-")
    if arm in ("published", "tuned"):
        return f"`{method.replace('-', '_')}`, as {arm}"
    return f"`{name.replace('-', '/', 1).replace('-', '_')}`"


def seeds_of(config: Result) -> np.ndarray:
    """Return the share of right images per seed and prompt at (a), [S, P], of whole runs."""
    ends = [seed["at"]["nfe"] for seed in config["seeds"] if seed["at"]["nfe"]]
    return np.concatenate([_shares(end["outcomes"]) for end in ends])


def by_prompt(found: Result, tags: Sequence[str]) -> np.ndarray:
    """Return the share of right images of an evaluation per prompt, in the order of `tags`,
    [1, P]."""
    left = {task: iter(some) for task, some in found["by_prompt"].items()}
    return np.array([[next(left[tag]) for tag in tags]])


def _shares(outcomes: str) -> np.ndarray:
    return np.array([[sum(some) / len(some) for some in unpacked(outcomes)]])


def _row(words: str, values: np.ndarray, tags: Sequence[str], nfe: int) -> list[str]:
    found = crossed(values, tags)
    span = "–"  # where all images are right
    if found["interval"][0] is not None:
        low, high = (100 * min(1.0, max(0.0, end)) for end in found["interval"])
        span = f"{low:.1f} to {high:.1f}"
    return [words, f"{100 * found['mean']:.1f} %", span, str(nfe), "", ""]


def _points(found: Result, seeds: int) -> str:
    said = f"{100 * found['mean']:+.1f}"
    if seeds == 1 or found["interval"][0] is None:
        return said
    low, high = (100 * end for end in found["interval"])
    return f"{said} ({low:+.1f} to {high:+.1f})"


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))
