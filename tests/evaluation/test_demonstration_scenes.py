"""Intervals of the demonstration over scenes in place of wordings."""

from __future__ import annotations

import json

import numpy as np
import pytest
from docskit import PAGES, ROOT
from scriptkit import module_of

from flowrl.core.prompts import load_prompts, scenes_of
from flowrl.evaluation.crossed_errors import crossed

MODULE = module_of("demonstration", "by_scene")


def test_wordings_that_go_together_are_one_value() -> None:
    """Two wordings of each scene with equal shares say no more than one: the interval is that of
    one wording. By wordings it would be narrower."""
    rng = np.random.default_rng(0)
    one, tags = rng.random((3, 8)), ["a"] * 4 + ["b"] * 4
    twice, doubled = one.repeat(2, 1), [tag for tag in tags for _ in range(2)]
    found = MODULE.by_scene(twice, np.arange(8).repeat(2), doubled)
    expected = crossed(one, tags)
    assert found["mean"] == pytest.approx(expected["mean"])
    assert found["interval"] == pytest.approx(expected["interval"])
    assert found["scenes"] == {"a": 4, "b": 4}
    narrow, wide = crossed(twice, doubled)["interval"], found["interval"]
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    with pytest.raises(ValueError, match="b: its scenes have unequally many wordings"):
        MODULE.by_scene(twice[:, :-1], np.arange(8).repeat(2)[:-1], doubled[:-1])


def test_the_test_list_has_so_many_scenes() -> None:
    """Six wordings of two pairs, four of four counts; mirrored relations are one scene."""
    prompts = load_prompts(ROOT / "assets/shapes/test.jsonl")
    scenes = scenes_of(prompts)
    assert len(prompts) == 136 and len({*scenes}) == 52
    first = prompts.texts.index("a square left of a circle")
    places = [i for i, scene in enumerate(scenes) if scene == scenes[first]]
    said = {prompts.texts[i] for i in places}
    assert {"a square left of a circle", "a circle right of a square"} <= said


def test_pages_say_what_the_file_holds() -> None:
    """The means are those of demonstration.json, and the file is what its script makes."""
    found = json.loads(MODULE.RESULT.read_text(encoding="utf-8"))
    whole = json.loads(MODULE.FOUND.read_text(encoding="utf-8"))
    shapes = " ".join(PAGES["docs/shapes.md"].split())
    said, wider = [], []
    for name, pair in MODULE.GAINS.items():
        difference = MODULE.shares(whole[pair[0]]["outcomes"])
        difference = difference - MODULE.shares(whole[pair[1]]["outcomes"])
        prompts = load_prompts(ROOT / found["prompts"])
        tags = [record["tag"] for record in prompts.records]
        anew = MODULE.by_scene(difference, scenes_of(prompts), tags)
        assert anew["interval"] == pytest.approx(found[name]["interval"])
        assert anew["scenes"] == found[name]["scenes"]
        assert found[name]["mean"] == pytest.approx(whole[name]["mean"])
        low, high = found[name]["interval"]
        said.append((f"{100 * found[name]['mean']:.1f}", f"({100 * low:.1f} to {100 * high:.1f})"))
        before = whole[name]["interval"]
        wider.append((high - low) / (before[1] - before[0]))
        assert low > 0
    (all_of_it, first), (over, second), (both, third) = said
    assert f"is {all_of_it} points {first}, over its best guidance {over} {second}, and" in shapes
    assert f"and {both} {third} with guidance on both sides" in shapes
    assert f"prompts are wordings of {found['scenes']} scenes" in shapes
    assert f"up to {max(wider):.1f} times as wide" in " ".join(PAGES["docs/compare.md"].split())
