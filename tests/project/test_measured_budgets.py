"""What docs/compare.md says in sentences of methods with larger budgets is what their result files
hold."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import pytest
from docskit import PAGES, ROOT

from flowrl.config.load import load_config

RESULTS = ROOT / "assets/results"
COMPARE = " ".join(PAGES["docs/compare.md"].split())
# what a sentence begins with, the file, the config, which look at the test prompts it is
LEARNS = (
    ("Diffusion-DPO learns from stored pairs", "dpo-offline", "diffusion-dpo-offline"),
    ("Flash-GRPO learns", "longer", "flash-grpo-prompts"),
    ("DiverseGRPO learns", "longer", "diverse-grpo"),
    ("DiNa-LRM learns", "dina", "dina-lrm"),
    ("GARDO learns", "gardo", "gardo"),
    ("CRD learns as it is now, too", "crd", "crd"),
)


def entry(file: str, config: str) -> dict[str, Any]:
    """Return a config's part of a comparison."""
    content = json.loads((RESULTS / f"compare-{file}.json").read_text(encoding="utf-8"))
    (found,) = (one for one in content["configs"] if one["name"].endswith(config))
    assert not any(run["failed"] for run in found["seeds"])
    return dict(found)


def said(found: dict[str, Any]) -> str:
    """Write a gain at (a) and its interval in points."""
    gain, low, high = (f"{100 * value:.1f}" for value in found["summary"]["nfe"]["gain"])
    return f"{gain} points ({low} to {high})"


def ends(found: dict[str, Any]) -> str:
    scores = [f"{100 * run['at']['nfe']['score']:.1f}" for run in found["seeds"]]
    return f"{', '.join(scores[:-1])} and {scores[-1]} %"


@pytest.mark.parametrize(("words", "file", "config"), LEARNS)
def test_what_learns(words: str, file: str, config: str) -> None:
    found = entry(file, config)
    after = found["summary"]["nfe"]["iteration"]
    text = f"**{words}**: {said(found)} after {after:.0f} iterations; its seeds end at"
    assert f"{text} {ends(found)}" in COMPARE
    assert found["summary"]["nfe"]["gain"][1] > 0 and len(found["seeds"]) == 3


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("AlignProp gains", "align-prop"),
        ("With a K for each step it gains", "align-prop-each"),
        ("DRaFT-LV gains", "draft-lv"),
    ],
)
def test_the_gaussian_reward(words: str, config: str) -> None:
    found = entry("gaussian", config)
    after = found["summary"]["nfe"]["iteration"]
    assert f"{words} {said(found)} after {after:.0f} iterations" in COMPARE
    assert found["summary"]["nfe"]["gain"][1] > 0 and len(found["seeds"]) == 3
    # what was measured is what the config has
    soft = load_config(found["file"]).to_dict()["rewards"]["soft"]
    assert found["config"]["rewards"]["soft"] == soft and soft["form"] == "gaussian"


def test_gardo_is_not_told_from_zero() -> None:
    found = entry("longer", "gardo")
    after = f"{said(found)} after {found['summary']['nfe']['iteration']:.0f} iterations"
    assert f"**GARDO is not told from zero**: {after}, three seeds that end at" in COMPARE
    assert f"seeds that end at {ends(found)}" in COMPARE
    assert found["summary"]["nfe"]["gain"][1] < 0


def test_the_trials_before() -> None:
    """Shares of right training images in the last ten iterations, and of validation prompts."""
    trials = json.loads((RESULTS / "larger-budgets-trials.json").read_text("utf-8"))["trials"]
    linear, gaussian, late, early, slow, fast = trials
    last = [f"{100 * mean(one['training_strict'][-10:]):.1f}" for one in (gaussian, linear)]
    valid = [f"{100 * one['validation'][-1][1]:.1f}" for one in (gaussian, linear)]
    text = (
        f"had {last[0]} % right images of training prompts in the last ten with it, {last[1]} with"
    )
    assert (
        f"{text} the linear form, and {valid[0]} against {valid[1]} % of the validation" in COMPARE
    )
    scores = [f"{100 * one['validation'][-1][1]:.1f}" for one in (slow, fast)]
    assert f"prompts, {' and '.join(scores)} % after 60 iterations" in COMPARE
    ends_of = [f"{100 * one['validation'][-1][1]:.1f}" for one in (late, early)]
    text = (
        f"{ends_of[0]} % of the validation prompts after a trial of {late['iterations']} iterations"
    )
    assert f"{text}, and with a mean K of .75 in place of .84 {ends_of[1]}" in COMPARE


def test_four_times_the_budget_of_find() -> None:
    found = entry("find-own", "find-own")
    assert f"**Four times the budget does not show it either**: {said(found)} after" in COMPARE
    assert f"its seeds end at {ends(found)}" in COMPARE
    assert found["summary"]["nfe"]["gain"][1] < 0


def test_edits() -> None:
    found, page = entry("paco-rl", "paco-rl"), " ".join(PAGES["docs/methods/paco_rl.md"].split())
    after = f"{said(found)} after {found['summary']['nfe']['iteration']:.0f} iterations"
    assert f"learns**: {after}; its seeds end at {ends(found)}" in COMPARE
    assert found["summary"]["nfe"]["gain"][1] > 0 and len(found["seeds"]) == 3
    sizes = [json.loads((RESULTS / f"edits-{n}-pixels.json").read_text("utf-8")) for n in (48, 64)]
    small, large = (f"{100 * one['strict']:.1f}" for one in sizes)
    assert f"It does {small} % of the validation edits right there, and {large} at 64" in page
    # without training, on the same edits from the same noise
    files = (RESULTS / f"edits-{name}.json" for name in ("best-of-8", "5-steps"))
    best, steps = (json.loads(file.read_text("utf-8")) for file in files)
    low, high = (f"{100 * end:.1f}" for end in best["interval"])
    assert f"eight has {100 * best['strict']:.1f} % ({low} to {high})" in COMPARE
    assert f"and have {100 * steps['strict']:.1f} % here" in COMPARE
    assert best["setting"]["seed"] == steps["setting"]["seed"] == found["config"]["eval"]["seed"]
    # which edits it learns
    tasks = found["summary"]["nfe"]["tasks"]
    gains = {name: task["gain"][0] for name, task in tasks.items()}
    whole = sum(gains.values())
    assert 0.7 < gains["move"] / whole < 0.8 and 0.15 < gains["recolor"] / whole < 0.25
    assert "Three quarters of the gain is in moving an object, most of the rest in" in COMPARE
    assert f"adding one stays at {100 * tasks['add']['mean']:.1f} %" in COMPARE


def test_the_student_of_four_steps() -> None:
    found = json.loads((RESULTS / "shapes-student.json").read_text(encoding="utf-8"))["strict"]
    ten, own, other, student = found.values()
    page = " ".join(PAGES["docs/methods/tdm_r1.md"].split())
    low, high = (f"{100 * end:.1f}" for end in student["interval"])
    right = f"{100 * student['right']:.1f} % of the validation prompts right in its four steps"
    assert f"{right} ({low} to {high}, `assets/results/shapes-student.json`)" in page
    shares = [f"{100 * one['right']:.1f} %" for one in (ten, own, other)]
    assert f"has {shares[0]} in ten, and in four {shares[1]} at the same sigmas" in page
    assert (
        f"but {shares[2]} at 1, 0.85, 0.65, 0.35" in page and list(found)[3] == "student, 4 steps"
    )


@pytest.mark.parametrize(("file", "beside"), [("dina", "stepwise-five"), ("gardo", "gardo")])
def test_guidance_stays_ahead(file: str, beside: str) -> None:
    """Of the two newest gains, by the difference that the page says."""
    (config,) = json.loads((RESULTS / f"compare-{file}.json").read_text("utf-8"))["configs"]
    guided = json.loads((RESULTS / f"compare-{beside}-guided.json").read_text("utf-8"))
    gap = f"{100 * (guided['strict'] - config['summary']['nfe']['mean']):.1f} points"
    assert f"Guidance is ahead by {gap}" in COMPARE or f"guidance stays {gap} ahead" in COMPARE
