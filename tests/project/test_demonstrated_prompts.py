"""What README and docs/shapes.md say of single test prompts of the demonstration is what its file
holds: of yellow squares, and of the two pairs without colours."""

from __future__ import annotations

import json
from typing import Any

from docskit import PAGES, ROOT

README, SHAPES = (" ".join(PAGES[name].split()) for name in ("README.md", "docs/shapes.md"))
SETTINGS = ("base", "base_best_guidance", "base_best_of_8", "rl", "rl_best_guidance")


def pair(prompt: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Name the coloured shapes that a prompt asks for."""
    return [(entry.get("color"), entry["class"]) for entry in prompt["include"]]


def shares(prompts: list[dict[str, Any]], **wanted: Any) -> dict[str, tuple[int, int]]:
    """Count the right images of some test prompts, and all of theirs, under each setting.

    Wanted are a `tag`, a `prompt`, `classes` (of all objects) or `shape` (one colour and class).
    """
    file = ROOT / "assets/results/demonstration.json"
    found, some = json.loads(file.read_text(encoding="utf-8")), list[int]()
    for place, one in enumerate(prompts):
        seen = {
            "tag": one["tag"],
            "prompt": one["prompt"],
            "classes": {entry["class"] for entry in one["include"]},
        }
        painted = pair(one)
        asked = {key: value for key, value in wanted.items() if key != "shape"}
        same = all(seen[key] == value for key, value in asked.items())
        if same and wanted.get("shape", painted[0]) in painted:
            some.append(place)
    counts = {}
    for key in SETTINGS:
        images = "".join(seed.split()[place] for seed in found[key]["outcomes"] for place in some)
        counts[key] = (images.count("1"), len(images))
    return counts


def rate(count: tuple[int, int]) -> str:
    return f"{100 * count[0] / count[1]:.1f}"


def test_yellow_squares_and_the_two_pairs() -> None:
    text = (ROOT / "assets/shapes/test.jsonl").read_text(encoding="utf-8")
    prompts = [json.loads(line) for line in text.splitlines()]
    yellow = shares(prompts, shape=("yellow", "square"))
    base, guided, best, after, both = (yellow[key] for key in SETTINGS)
    said = f"{rate(base)} % of the images are right in the base model ({base[0]} of {base[1]})"
    assert f"Over the six test prompts with a yellow square {said}, none" in SHAPES
    assert (
        guided[0] == 0 and f"none with its best guidance, {rate(best)} % as the best of" in SHAPES
    )
    said = (
        f"after training {rate(after)} % ({after[0]} of {after[1]}), with guidance {rate(both)} %"
    )
    assert said in SHAPES
    assert sum(("yellow", "square") in pair(one) for one in prompts) == 6
    one = shares(prompts, prompt="a photo of a yellow square and a red triangle")
    assert f"falls from {rate(one['base'])} to {rate(one['rl'])} %" in SHAPES
    right, images = shares(prompts, tag="colors")["rl"]
    alone = shares(prompts, tag="colors", shape=("yellow", "square"))["rl"]
    wrong = f"{alone[1] - alone[0]} of {images - right}"
    assert f"wrong images of `colors` after training, {wrong} are yellow squares" in SHAPES
    # the other three, which training did not see either
    left_out = (("purple", "circle"), ("red", "triangle"), ("green", "cross"))
    others = [shares(prompts, tag="colors", shape=shape) for shape in left_out]
    spans = {}
    for key in ("base", "rl"):
        ends = sorted(float(rate(one[key])) for one in others)
        spans[key] = f"{ends[0]:.0f} to {ends[-1]:.0f} %"
    assert f"left out have {spans['rl']}, where they had {spans['base']}" in SHAPES
    improved = [float(rate(one["rl"])) > float(rate(one["base"])) for one in others]
    assert all(improved) and "three improve; yellow squares become worse" in README
    # the two pairs without colours
    known, new = (
        shares(prompts, tag="two_object", classes={"circle", other})
        for other in ("square", "triangle")
    )
    said = f"right in {rate(known['base'])} % of the images before training and in"
    assert f"{said} {rate(known['rl'])} % after; circle and triangle" in SHAPES
    assert f"left out of training, in {rate(new['base'])} and {rate(new['rl'])} %" in SHAPES
    assert known["rl"][1] + new["rl"][1] == shares(prompts, tag="two_object")["rl"][1]
    assert {one["held_out"] for one in prompts if one["tag"] == "two_object"} == {True, False}
