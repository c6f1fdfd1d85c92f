"""What pages say of DanceGRPO's gain and of Direct-Align, against result files."""

from __future__ import annotations

import json
from typing import Any

from docskit import PAGES, ROOT

RESULTS = ROOT / "assets" / "results"
COMPARE = " ".join(PAGES["docs/compare.md"].split())
SRPO = PAGES["docs/methods/srpo.md"]


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def told(name: str) -> tuple[dict[str, Any], str, str]:
    """Return what a comparison has at its budget, its gain in words, and the ends of its seeds."""
    (entry,) = read(f"compare-{name}")["configs"]
    end = entry["summary"]["nfe"]
    mean, low, high = (f"{100 * share:.1f}" for share in end["gain"])
    one, two, three = (f"{100 * seed['at']['nfe']['score']:.1f}" for seed in entry["seeds"])
    return end, f"{mean} points ({low} to {high})", f"end at {one}, {two} and {three} %."


def test_dance_grpo_gains() -> None:
    end, gain, ends = told("dance")
    base = read("compare-dance")["base"]
    after = round(end["iteration"])
    assert end["beats_base"] and end["seeds"] == 3 and end["failed"] == 0
    assert f"**DanceGRPO gains** {gain} after {after} iterations" in COMPARE and ends in COMPARE
    rises = {name: end["tasks"][name]["mean"] - base["tasks"][name] for name in base["tasks"]}
    assert max(rises, key=lambda name: rises[name]) == "color_attr"
    pair = (
        f"{100 * base['tasks']['color_attr']:.1f} to {100 * end['tasks']['color_attr']['mean']:.1f}"
    )
    assert f"objects rise most, {pair} %" in COMPARE
    guided, best = (read(f"compare-dance-{kind}")["strict"] for kind in ("guided", "best-of-8"))
    assert f"Guidance alone has {100 * guided:.1f} %, at four times" in COMPARE
    assert f"the best of eight {100 * best:.1f} %" in COMPARE
    header = (ROOT / "configs/shapes/dance_grpo.yaml").read_text(encoding="utf-8")
    both = f"{100 * base['score']:.0f} -> {100 * end['mean']:.0f} %"
    assert f"right images of test prompts {both} in {after} iterations, three seeds" in header
    assert f"alone has {100 * guided:.0f} %" in header


def test_direct_align_shows_no_gain() -> None:
    """Its interval holds 0, and pages, header and table say so."""
    end, gain, ends = told("direct-align")
    assert end["gain"][1] < 0 < end["gain"][0] and not end["beats_base"]
    assert f"**Direct-Align shows no gain**: {gain}" in COMPARE and ends in COMPARE
    rises = {name: task["gain"][0] for name, task in end["tasks"].items()}
    assert min(rises[name] for name in ("colors", "position", "color_attr")) > 0.05
    assert max(rises[name] for name in ("counting", "single_object", "two_object")) <= 0
    base = read("compare-direct-align")["base"]["score"]
    header = (ROOT / "configs/shapes/direct_align.yaml").read_text(encoding="utf-8")
    both = f"{100 * base:.0f} -> {100 * end['mean']:.0f} %"
    assert f"no gain shown: right images of test prompts {both} in {end['iteration']:.0f}" in header
    trials = read("direct-align-trials")["trials"]
    rows = [line for line in SRPO.splitlines() if line.startswith("| 0.")]
    assert len(rows) == len(trials) - 1 == 5
    for row, trial in zip(rows, trials, strict=False):
        last = trial["validation"][-1]
        assert f"| {100 * last['strict']:.1f} %, {last['iteration']}" in row
    first = f"{100 * trials[0]['validation'][0]['strict']:.1f} %"
    assert f"the base model has {first})" in " ".join(SRPO.split())
    assert len(trials[-1]["validation"]) == 1  # the one that was ended before it was judged
