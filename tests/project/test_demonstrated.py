"""What README and docs/shapes.md say in sentences of the demonstration and of what stands beside it
is what the result files hold. Their tables are held by test_tables.py."""

from __future__ import annotations

import json
import re
from statistics import mean
from typing import Any

import pytest
from docskit import PAGES, ROOT
from scriptkit import script_module

README, SHAPES = (" ".join(PAGES[name].split()) for name in ("README.md", "docs/shapes.md"))
EARLIER = tuple(f"earlier/demonstration-{number}" for number in range(1, 5))


def result(name: str) -> dict[str, Any]:
    """Read a result file."""
    file = ROOT / f"assets/results/{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def points(entry: dict[str, Any]) -> str:
    """Write a gain and its interval in points."""
    low, high = (100 * value for value in entry["interval"])
    return f"{100 * entry['mean']:.1f} points ({low:.1f} to {high:.1f})"


def test_gains_of_the_readme() -> None:
    found = result("demonstration")
    assert f"{points(found['rl_minus_base_best_guidance'])} above the base model with its" in README
    over = 100 * found["rl_best_guidance_minus_base_best_guidance"]["mean"]
    assert f"With its own best guidance and equal NFE it is {over:.1f} above" in README
    assert f"With guidance on both sides, at equal NFE, {over:.1f} points lie between" in SHAPES
    assert found["base_best_of_8"]["mean"] > found["rl_best_guidance"]["mean"]  # "stays ahead"
    nfe = script_module("demonstrated").nfe
    costs = {key: nfe(found[key]) for key in NFE}
    assert costs == NFE  # "an eighth of the NFE", "at equal NFE", "at eight times the NFE"
    # the uses of the test prompts before this one
    below = points(found["rl_minus_base_best_guidance"])
    assert f"The base model with guidance is {below} below, as the tables say" in SHAPES
    for name in EARLIER:
        earlier = result(name)
        trained, guided = (100 * earlier[key]["mean"] for key in ("rl", "base_best_guidance"))
        assert re.search(
            rf"{trained:.1f} %.{{0,40}} base model with guidance {guided:.1f} %", SHAPES
        )
        assert f"assets/results/{name}.json" in SHAPES
    key = "rl_minus_base_best_guidance"
    first, second, third, fourth = map(result, EARLIER)
    for one in (first, second):
        assert f"a gain over guidance of {points(one[key]).removesuffix(')')}" in SHAPES
    assert f"a gain of {points(fourth[key]).removesuffix(')')}" in SHAPES
    # "the same to the last digit"
    for task, one in fourth["rl"]["tasks"].items():
        assert one["mean"] == third["rl"]["tasks"][task]["mean"]
    # "by a hair"
    tried = sorted(row["validation"] for row in found["search"]["base"])
    best, next_best = (f"{100 * value:.1f}" for value in tried[:-3:-1])
    assert f"({best} against {next_best} % of the validation prompts)" in SHAPES
    assert (len(tried), len(found["search"]["rl"])) == (21, 9)
    best, second = sorted(found["search"]["base"], key=lambda row: -row["validation"])[:2]
    assert (best["guidance"], best["steps"]) == (5, 40)
    assert (second["guidance"], second["steps"]) == (3.5, 20)
    said = (
        f"the second best of 21 settings on validation prompts, {100 * second['validation']:.1f} %"
    )
    said += ", at half the NFE of the best, guidance 5 with 40 steps and "
    said += f"{100 * best['validation']:.1f} %"
    assert said in " ".join(PAGES["docs/six-methods.md"].split())
    over = found["rl_minus_base_best_guidance"]["tasks"]
    alone, colors = (over[task] for task in ("single_object", "colors"))
    said = f"objects are {-100 * alone['mean']:.1f} points below the base model with guidance, and"
    assert f"{said} those of a colour {100 * colors['mean']:.1f} above" in SHAPES
    for one in (alone, colors):  # "both may be chance"
        assert one["interval"][0] < 0 < one["interval"][1]
    # "almost a quarter of the counts stays wrong"
    right = {task: one["mean"] for task, one in found["rl"]["tasks"].items()}
    assert 0.75 < right["two_object"] < 0.8 and 0.75 < right["counting"] < 0.8
    said = f"colours ({100 * right['two_object']:.0f} % right), and counts"
    assert f"{said} ({100 * right['counting']:.0f} %)" in SHAPES


NFE = {
    "base": 10,
    "base_best_guidance": 80,
    "base_best_of_8": 80,
    "rl": 10,
    "rl_best_guidance": 80,
}


def test_held_out_combinations_guidance_and_variety() -> None:
    found = result("demonstration")
    card = " ".join((ROOT / "assets/shapes-sd3/README.md").read_text(encoding="utf-8").split())
    relation, colors = (found["word_order"]["base"][task] for task in ("position", "color_attr"))
    assert relation["opposite"] == 0 and f"{relation['asked']} have the asked relation" in card
    swapped = f"{colors['asked']} the asked colours and {colors['opposite']} the swapped ones"
    assert swapped in card
    rates = {key: found[key]["combinations"] for key in ("base", "rl")}
    for task, after in rates["rl"]["held_out"].items():
        assert after > rates["base"]["held_out"][task], task  # "all tasks gain also"
    for task, said in (
        ("counting", "counts {} to {} % there and {} to {} % on trained ones"),
        ("color_attr", "two colours {} to {} % and {} to {} %"),
    ):
        ends = [100 * rates[k][w][task] for w in ("held_out", "trained") for k in ("base", "rl")]
        assert said.format(*(f"{end:.0f}" for end in ends)) in SHAPES
    adds = 100 * (found["rl_best_guidance"]["mean"] - found["rl"]["mean"])
    assert f"it still adds {adds:.0f} points, at eight times the NFE" in SHAPES
    # variety, whose target was 80 %
    kept, base = found["diversity_kept"], found["base"]["diversity"]
    for key, one in kept.items():
        for what, share in one.items():
            ratio = found[key]["diversity"][what] / base[what]
            assert share["mean"] == pytest.approx(ratio) and len(share["seeds"]) in (1, 5)
    low, high = (100 * value for value in kept["rl"]["colors"]["interval"])
    spread = {}
    for key, one in kept.items():
        spread[key] = [f"{100 * share['mean']:.0f}" for share in one.values()]
    places, colors = spread["rl"]
    said = f"Places keep {places} % of their spread, the colours of single shapes {colors} %"
    assert said in SHAPES
    assert f"of their number (95 % interval {low:.0f} to {high:.0f}); the target was 80 %" in SHAPES
    missed = [seed for seed in kept["rl"]["colors"]["seeds"] if seed < 0.8]
    assert (
        f"one of the five seeds misses with {100 * missed[0]:.0f} %" in SHAPES and len(missed) == 1
    )
    assert f"{' and '.join(spread['base_best_guidance'])} % in the base model" in SHAPES
    assert f"{' and '.join(spread['rl_best_guidance'])} % after training" in SHAPES


def test_the_timed_run() -> None:
    found = result("quickstart")
    assert f"Training takes {found['minutes']:.0f} minutes on two cores" in README
    seconds = found["iteration_seconds"]["median"]
    said = f"trained for {found['minutes']:.1f} minutes with evaluations; an iteration alone takes"
    assert f"{said} {seconds:.0f} seconds (median)." in SHAPES
    assert f"The run ended at {100 * found['test']['mean']:.1f} % of the test prompts" in SHAPES
    scores = dict(found["validation"])
    best = max(scores, key=lambda iteration: scores[iteration])
    assert f"in the timed run that of iteration {best} of {max(scores)}" in SHAPES
    curves = result("demonstration")["curves"]
    assert curves["threads"] == 1 and [run["seed"] for run in curves["runs"]] == list(range(5))
    # "in the five runs of the tables 63, but 54 for seed 2"
    for run in curves["runs"]:
        last = max(zip(run["scores"], run["iterations"], strict=True))[1]
        assert last == (54 if run["seed"] == 2 else 63) and run["iterations"][-1] == 63


def test_fine_tuning_s_search_and_interval() -> None:
    found = result("fine-tuning")
    ends = sorted(100 * row["validation"] for row in found["search"])
    assert len(ends) == 4 and "the best of four on validation prompts" in SHAPES
    assert f"{ends[0]:.0f} to {ends[-1]:.0f} % there" in SHAPES
    low, high = found["fine_tuned_minus_base"]["interval"]
    assert f"({-100 * low:.1f} below to {100 * high:.1f} above)" in SHAPES


def test_edits_before_after_and_without_training() -> None:
    found, alone = result("edits"), result("edits-alternatives")
    rates: dict[str, list[list[float]]] = {"strict": [], "edit": []}
    for key, some in rates.items():
        for when in ("before", "after"):
            some.append([100 * row[when][key] for row in found["seeds"]])
    before, after = rates["strict"]
    said = f"from {before[0]:.1f} % to {after[0]:.1f}, {after[1]:.1f} and {after[2]:.1f} %"
    low, high = (100 * value for value in found["strict"]["interval"])
    mean = f"{100 * found['strict']['mean']:.1f} points (95 % over seeds {low:.1f} to {high:.1f})"
    assert f"{said}, by {mean}" in SHAPES
    ends = [f"{value / 100:.2f}" for value in (rates["edit"][0][0], *rates["edit"][1])]
    assert "from {} to {}, {} and {}, by".format(*ends) in SHAPES
    # without training: none of nine is better on validation edits than the plain one
    tried = alone["tried"]
    assert tried[0]["steps"] == 5 and tried[0]["guidance"] == 1 and len(tried) == 9
    assert max(row["strict"] for row in tried) == tried[0]["strict"]
    few, ten, best = (alone[key] for key in ("best_settings", "base", "best_of_8"))
    shares = f"{100 * few['strict']:.1f} % of the test edits (10 steps {100 * ten['strict']:.1f} %"
    assert shares in SHAPES and best["nfe"] == 8 * ten["nfe"]
    low, high = (100 * value for value in best["interval"])
    assert f"has {100 * best['strict']:.1f} % ({low:.1f} to {high:.1f}), at eight" in SHAPES


def test_videos_beside_what_costs_no_training() -> None:
    """The trained model is ahead of guidance, and of the best of eight."""
    found = result("moving-alternatives")
    page = " ".join(PAGES["docs/video.md"].split())
    tried, best = found["tried"], found["best_settings"]
    first = max(tried, key=lambda row: row["moving"])
    assert {row["prompts"] for row in tried} == {"validation"} and len(tried) == 12
    assert (first["guidance"], first["steps"]) == (best["guidance"], best["steps"]) == (1.5, 20)
    base, eight = found["base"], found["best_of_8"]
    assert (best["nfe"], eight["nfe"]) == (4 * base["nfe"], 8 * base["nfe"])
    assert "reward further than guidance or the best of eight do" in page
    after = [row["after"]["moving"] for row in result("moving")["seeds"]]
    assert base["moving"] < best["moving"] < eight["moving"] < min(after)


def test_the_judge_and_the_noisy_control() -> None:
    targets = result("judge")["targets"]
    assert list(targets) == ["assets/shapes-sd3", *(f"runs/shapes-awm-seed{i}" for i in range(5))]
    base, *runs = targets.values()
    assert all(run["agreement"] > base["agreement"] for run in runs)
    for name, one in targets.items():
        label = "base model" if name == "assets/shapes-sd3" else f"seed {name[-1]}"
        label = f"after training, {label}" if name.endswith("seed0") else label
        low, high = (100 * value for value in one["interval"])
        ends = [f"{100 * one[key]:.1f} %" for key in ("judge", "checker")]
        row = f"{100 * one['agreement']:.1f} % | {low:.1f} to {high:.1f} | {' | '.join(ends)} |"
        assert f"| {label} | {row}" in SHAPES
    counted = {}
    for row in result("word-order-noisy")["counted"]:
        counted[row["task"], row["guidance"]] = f"{row['asked']} : {row['opposite']}"
    plain, guided = (counted["position", guidance] for guidance in (1.0, 2.5))
    assert f"{plain} without guidance and {guided} with 2.5" in SHAPES
    plain, guided = (counted["color_attr", guidance] for guidance in (1.0, 2.5))
    assert f"swapped is {plain} and {guided}" in SHAPES
    true, before = result("shapes-base-true-captions"), result("shapes-adv-grpo")["before"]
    assert f"reached {100 * true['strict']:.1f} %" in SHAPES
    assert f"lowered it to {100 * before:.1f} %" in SHAPES


def test_the_judge_s_gain_stands_beside_the_checker_s() -> None:
    """shapes.md: how much right images gain by another judge, and how often both agree."""
    page = " ".join(PAGES["docs/shapes.md"].split())
    targets = dict(result("judge")["targets"])
    base, runs = targets.pop("assets/shapes-sd3"), list(targets.values())
    gain = {}
    for who in ("judge", "checker"):
        gain[who] = 100 * (mean(run[who] for run in runs) - base[who])
    assert f"{gain['judge']:.0f} points where the checker sees {gain['checker']:.0f}" in page
    for one in (base, *runs):
        agreed = one["both_right"] / (one["both_right"] + one["checker_alone"])
        assert 0.975 < agreed < 0.99
    assert "the judge agrees in 98 of 100 cases, before and after" in page
