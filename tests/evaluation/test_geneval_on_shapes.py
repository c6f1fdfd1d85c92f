"""GenEval's rules beside the shapes checker, which has the same rules in another implementation."""

from __future__ import annotations

import math

import numpy as np

from flowrl.evaluation.suites.geneval.objects import DetectedObject
from flowrl.evaluation.suites.geneval.rules import judge
from flowrl.evaluation.suites.shapes.checker import judge_detections as shapes_judge
from flowrl.evaluation.suites.shapes.checker import shared_classes
from flowrl.evaluation.suites.shapes.detect import detect, objects_of
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render


def color_of(name: str, objects: list[DetectedObject]) -> list[str]:
    """Read the colour that stands on an object."""
    return [one.color or "" for one in objects]


def test_on_shapes_the_rules_agree_with_the_pixel_checker() -> None:
    """Every task's scenes under their own records and under others', so that all branches answer
    both ways. The checker also wants a clean image, which is left out here."""
    records = [record for task in all_records().values() for record in task[::7]]
    records = [record for record in records if not shared_classes(record)]
    rng = np.random.default_rng(0)
    found = detect(render(scenes_for(records, rng)), find_flaws=True)
    objects = objects_of(found)
    seen = []
    for shift in (0, 1, len(records) // 2):
        asked = records[shift:] + records[:shift]
        checked = shapes_judge(found, asked)
        whole = checked.count_ok & checked.color_ok & checked.position_ok & checked.exclude_ok
        mine = [judge(o, r, color_of).correct for o, r in zip(objects, asked, strict=True)]
        assert mine == whole.tolist()
        seen += mine
    assert len(seen) > 200 and 0.3 < sum(seen) / len(seen) < 0.7
    assert math.isclose(sum(seen[: len(records)]), len(records))
