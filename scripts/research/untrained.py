"""What costs no training, beside what training gained; and the demonstration, as a paragraph.

Both are text for the method pages, which `measured.py` fills. A comparison `compare-X.json` may
have two files beside it, of the base model on the same prompts from the same noise:
`compare-X-guided.json`, with guidance, and `compare-X-best-of-8.json`, the best of eight images by
the reward. Comparisons that were judged alike share them, so they are found by their setting. Two
comparisons have files of other kinds beside them: the noisy-captions control, and that of edits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import verified
from figures import percent, points

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
DEMONSTRATION = RESULTS / "demonstration.json"
PLACE = "../shapes.md#what-training-gains-beside-what-costs-less"
Result = dict[str, Any]


def beside(result: Result, folder: Path = RESULTS) -> str:
    """Say what the base model reaches without training where a comparison was judged; "" where no
    file of `folder` has it."""
    judged = _judged(result)
    shares = {name: _share(folder, name, judged) for name in ("guided", "best-of-8")}
    if judged is None or None in shares.values():
        return ""
    guided, best = (one for one in shares.values() if one is not None)
    scale = f"{guided['setting']['guidance']:g}"
    return _said(guided["strict"], scale, best["strict"], best["setting"]["best_of"])


def beside_control(folder: Path = RESULTS) -> str:
    """Say what the noisy-captions control reaches without training, by today's checker."""
    base, guided, best = (
        json.loads((folder / f"compare-shapes-{name}.json").read_text(encoding="utf-8"))
        for name in ("base", "guided", "best-of-8")
    )
    scale, count = guided["setting"]["guidance"], best["setting"]["best_of"]
    return (
        " Beside it, without training, by today's checker and from other noise: the control "
        f"{percent(base['strict'])}, with guidance {scale:g} {percent(guided['strict'])}, the "
        f"best of {count} of its images {percent(best['strict'])}."
    )


def beside_edits(folder: Path = RESULTS) -> str:
    """Say what the editing model reaches without training on the test edits; guidance gains
    nothing there."""
    steps, best = (
        json.loads((folder / f"edits-{name}.json").read_text(encoding="utf-8"))
        for name in ("5-steps", "best-of-8")
    )
    return (
        f" Beside it, without training: the base model in {steps['setting']['steps']} steps, its "
        f"best setting on validation edits, {percent(steps['strict'])}, the best of "
        f"{best['setting']['best_of']} of its edits {percent(best['strict'])}."
    )


def demonstrated(file: Path = DEMONSTRATION) -> dict[str, str]:
    """Say of each config that the demonstration measured what it gained -> {name in shapes/: a
    sentence}."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    said = {}
    for config, runs in verified.measured(found, file.name, verified.names()):
        low, high = map(points, found["rl_minus_base"]["interval"])
        gain = f"{points(found['rl_minus_base']['mean'])} points over {len(runs.seeds)} seeds"
        guided, best = found["base_best_guidance"], found["base_best_of_8"]
        said[config.removeprefix("shapes/")] = (
            f"`{config}`, on the test prompts, in the [demonstration]({PLACE}): strict accuracy "
            f"{percent(found['base']['mean'])} → {percent(found['rl']['mean'])}: {gain} (95 % "
            f"{low} to {high})." + _said(guided["mean"], f"{guided['guidance']:g}", best["mean"], 8)
        )
    return said


def _said(guided: float, scale: str, best: float, count: int) -> str:
    return (
        f" Beside it, without training: the base model with guidance {scale} {percent(guided)}, "
        f"the best of {count} of its images {percent(best)}."
    )


def _judged(result: Result) -> tuple[int, str, int] | None:
    """Return how a comparison was judged: the seed of the noise, the list, and how many images."""
    config = result["configs"][0].get("config", {})
    seed, prompts = config.get("eval", {}).get("seed"), config.get("prompts", {}).get("test")
    if seed is None or prompts is None:
        return None
    return seed, Path(prompts).stem, result["base"]["images"]


def _share(folder: Path, name: str, judged: tuple[int, str, int] | None) -> Result | None:
    """Find the result of the base model that was judged so."""
    for file in sorted(folder.glob(f"compare-*-{name}.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        setting = found["setting"]
        if (setting["seed"], setting["prompts"], found["images"]) == judged:
            return dict(found)
    return None
