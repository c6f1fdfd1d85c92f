"""What docs/methods/adv_grpo.md says of a gated style is what its files hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

from docskit import ROOT


def result(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / f"assets/results/{name}.json").read_text(encoding="utf-8")))


def test_what_the_gate_keeps_and_what_it_does_not_move() -> None:
    """The table of `shapes/adv_grpo_gated` and the sentence below it."""
    page = " ".join((ROOT / "docs/methods/adv_grpo.md").read_text(encoding="utf-8").split())
    found, seen = result("shapes-adv-grpo-gated"), result("shapes-adv-grpo-gated-statistics")
    after = [f"{100 * row['after']['strict']:.1f} %" for row in found["seeds"]]
    assert f"| strict accuracy | {100 * found['before']:.1f} % | {', '.join(after)} | |" in page
    blue, purple = (seen["colours"].index(name) for name in ("blue", "purple"))
    cool, own, looks, far = list[str](), list[str](), list[str](), list[str]()
    for row in [seen["runs"][0]["before"], *(run["after"] for run in seen["runs"])]:
        share = row["colours"]
        cool.append(f"{100 * (share[blue] + share[purple]):.1f} %")
        own.append(f"{100 * share[blue]:.1f} %")
        looks.append(f"{row['mean_objects']:.2f}")
        far.append(f"{row['frechet']:.2f}")
    for label, cells in (
        ("share of shapes that are blue or purple", cool),
        ("share that is blue", own),
        ("shapes on an image", looks),
        ("Frechet distance to the references", far),
    ):
        assert f"| {label} | {cells[0]} | {', '.join(cells[1:])} |" in page
    low, high = (100 * value for value in found["gain_interval_over_seeds"])
    assert low < 0 < high and f"(95 % over seeds {low:.1f} to {high:.1f})" in page
    assert f"its gain, {100 * found['gain']:.1f} points, may be chance" in page


def test_awm_moves_the_style_under_the_gate() -> None:
    """The table of `shapes/adv_awm`, what is said of it, and the trial before it."""
    page = " ".join((ROOT / "docs/methods/adv_grpo.md").read_text(encoding="utf-8").split())
    seen = result("shapes-adv-awm-statistics")
    assert seen["prompts"] == "assets/shapes/test.jsonl" and len(seen["runs"]) == 3
    cool = [seen["colours"].index(name) for name in ("blue", "purple")]
    base, runs = seen["runs"][0]["before"], [run["after"] for run in seen["runs"]]
    (alone,) = (run["after"] for run in seen["controls"])

    def share(row: dict[str, Any]) -> float:
        return 100 * sum(row["open_colours"][place] for place in cool)

    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "strict accuracy": lambda row: f"{100 * row['right']:.1f} %",
        "blue or purple, where the prompt names no colour": lambda row: f"{share(row):.1f} %",
        "Frechet distance to the references": lambda row: f"{row['frechet']:.1f}",
    }
    for label, cell in rows.items():
        cells = f"| {cell(base)} | {', '.join(map(cell, runs))} | {cell(alone)} |"
        assert f"| {label} {cells}" in page
    moved = [share(row) - share(base) for row in runs]
    right = [100 * (row["right"] - base["right"]) for row in runs]
    said = []
    for values in (moved, right):
        half = 4.3027 * stdev(values) / 3**0.5  # Student's t of two degrees of freedom
        said.append((mean(values), mean(values) - half, mean(values) + half))
    (middle, low, high), (more, least, most) = said
    frequent = f"become {middle:.1f} points more frequent"
    assert f"{frequent} (95 % over seeds {low:.1f} to {high:.1f})" in page and low > 0
    assert f"{more:.1f} points more images are right ({least:.1f} to {most:.1f})" in page
    assert least > 0
    assert f"{share(alone) - share(base):.1f} points more of these colours" in page
    guided = seen["base"]
    assert guided["set"] == ["model.guidance=3.5", "eval.steps=20"]
    both = (
        f"has {share(guided):.1f} % in these colours and {100 * guided['right']:.1f} % right images"
    )
    assert f"with guidance 3.5 and 20 steps {both}" in page
    trial = result("adv-awm-trial")
    found = []
    for run in trial["runs"]:
        colours = run["colours"]["18"]
        found.append((100 * (colours["blue"] + colours["purple"]), 100 * run["strict"]["18"]))
    (one, right_one), (three, right_three) = found
    assert f"colours had {one:.1f} % after 18 iterations, with 3 they had {three:.1f}" in page
    assert f"{right_one:.1f} and {right_three:.1f} % of the images were right" in page
