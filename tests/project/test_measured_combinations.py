"""What the pages say of combinations is what their result file holds."""

from __future__ import annotations

import json

from docskit import PAGES, ROOT

NAMES = ("dpo-siblings", "awm-tree", "nft-win-rate", "prior-grpo")


def test_gains_of_four_combinations() -> None:
    file = ROOT / "assets/results/compare-combinations.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    ends = {one["name"]: one["summary"]["nfe"] for one in found["configs"]}
    page = " ".join(PAGES["docs/compare.md"].split())
    said = []
    for name in NAMES:
        mean, low, high = (100 * value for value in ends[f"shapes-{name}"]["gain"])
        said.append(f"{mean:.1f} points ({low:.1f} to {high:.1f})")
    short = [text.replace(" points", "") for text in said]
    assert f"pairs of siblings {said[0]}, AWM on the leaves of a tree {short[1]}" in page
    assert f"DiffusionNFT judged by wins {short[2]}" in page
    assert f"a value network gains {short[3]}, which may be chance" in page
    assert [ends[f"shapes-{name}"]["gain"][1] > 0 for name in NAMES] == [True, True, True, False]
    assert found["pairs"]["nfe"]["significant"] == 0  # "cannot be told apart"
    # more steps alone, on validation prompts
    rows = json.loads((ROOT / "assets/results/few-steps.json").read_text("utf-8"))["rows"]
    steps = {row["steps"]: 100 * row["right"] for row in rows}
    assert f"from {steps[10]:.1f} % in ten to {steps[40]:.1f} % in forty" in page
    assert steps[40] - steps[10] > 100 * max(one["gain"][0] for one in ends.values())
    # what the configs' headers say
    guided = json.loads((ROOT / "assets/results/compare-combinations-guided.json").read_text())
    base, beside = 100 * found["base"]["score"], 100 * guided["strict"]
    for name in NAMES:
        header = (ROOT / f"configs/shapes/{name.replace('-', '_')}.yaml").read_text("utf-8")
        right = 100 * ends[f"shapes-{name}"]["mean"]
        assert f"test prompts {base:.0f} -> {right:.0f} % in 60,000 NFE, three seeds" in header
        assert f"where guidance alone has {beside:.0f} %" in " ".join(header.split())
