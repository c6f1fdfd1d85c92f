"""The demonstration: its figures by hand, and its figure pixel by pixel."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from circlekit import CIRCLE, Painter, circles
from PIL import Image
from scriptkit import module_of

from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.detect import detect
from flowrl.evaluation.suites.shapes.prompts import Record, all_records, entry, make_record

ROOT = Path(__file__).resolve().parents[2]
Modules = tuple[ModuleType, ModuleType]


@pytest.fixture(scope="module")
def modules() -> Modules:
    measure = module_of("results/demonstration", "demonstration_measure")
    return measure, module_of("results/demonstration", "demonstration_figure")


@pytest.fixture(scope="module")
def variety() -> ModuleType:
    return module_of("results/demonstration", "variety")


def test_what_images_of_a_prompt_leave_alike(variety: ModuleType) -> None:
    # by hand: places 12 pixels left and right of the mean; two colours as often: entropy log 2
    images = circles((0, 20, 32), (2, 44, 32), (0, 20, 32), (2, 44, 32))
    found = variety.spread(images)
    assert found["places"] == pytest.approx(12, abs=0.2) and found["colors"] == pytest.approx(2)
    # a grey circle has no colour of the palette, and counts as none
    grey = images[:1].clone()
    grey[:, :, 26:39, 14:27] = grey[:, :, 26:39, 14:27].mean(1, keepdim=True)
    assert detect(grey).color[0, 0] == -1
    assert variety.spread(torch.cat([images, grey])) == found
    assert variety.spread(images[:1]) == {}
    red = make_record("colors", [entry("circle", color="red")], "a red circle", False)
    assert variety.leaves_open(CIRCLE) and not variety.leaves_open(red)
    # the mean over prompts that have a figure
    assert variety.mean_spread([found, {}, {**found, "colors": 4.0}])["colors"] == pytest.approx(3)


def test_which_share_of_the_variety_is_kept(variety: ModuleType) -> None:
    """Two seeds that keep 80 and 90 %: 85 %, and by hand t(.975, 1) = 12.706 times 5 points."""
    base = {"places": 10.0, "colors": 4.0}
    runs = [{"places": 8.0, "colors": 3.2}, {"places": 9.0, "colors": 3.6}]
    for one in variety.kept(runs, base).values():
        assert one["mean"] == pytest.approx(0.85) and one["seeds"] == pytest.approx([0.8, 0.9])
        assert one["interval"] == pytest.approx([0.85 - 0.6353, 0.85 + 0.6353], abs=1e-4)
    assert variety.kept(runs[:1], base)["colors"]["interval"] == [None, None]
    assert variety.kept([{}, *runs], base) == variety.kept(runs, base)
    assert variety.kept([{}], base) == variety.kept(runs, {}) == {}


@pytest.mark.parametrize(("best_of", "guidance", "calls"), [(1, 1.0, 2), (1, 2.0, 4), (3, 1.0, 6)])
def test_a_setting_by_hand(
    modules: Modules,
    tmp_path: Path,
    best_of: int,
    guidance: float,
    calls: int,
) -> None:
    """Of 6 images every third is cut off: 4 of 6 right. Of the best of three all are."""
    (tmp_path / "one.jsonl").write_text(json.dumps(CIRCLE) + "\n")
    prompts = str(tmp_path / "one.jsonl")
    setting = modules[0].Setting("", prompts, guidance, 2, per_task=6, seed=0, best_of=best_of)
    found = modules[0]._measured(Painter(), setting)
    assert found["images"] == 6 and found["network_calls"] == calls
    assert found["diversity"] == {}
    # variety of as many further images, also of the best ones
    more = modules[0]._measured(Painter(), setting._replace(open_prompts=prompts, open_images=6))
    assert more["outcomes"] == found["outcomes"] and more["diversity"]["colors"] >= 1
    assert sum(found["outcomes"][0]) == (4 if best_of == 1 else 6)
    again = {**found, "setting": setting._asdict(), "word_order": {}}
    values = modules[0].rates([again, again]).values
    assert values.tolist() == [[found["outcomes"][0].count(1) / 6]] * 2


def test_wordings_of_a_scene_count_once(modules: Modules, tmp_path: Path) -> None:
    """Two wordings of a scene, 1 and 1/2 right, and one of another, never: 3/4 and 0."""
    red = make_record("colors", [entry("circle", color="red")], "a red circle", False)
    blue = make_record("colors", [entry("circle", color="blue")], "a blue circle", True)
    records = [red, blue, {**red, "prompt": "a circle that is red"}]
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    setting = {"prompts": str(file)}
    found = [{"outcomes": [[1, 1], [0, 0], [1, 0]], "setting": setting}]
    rates = modules[0].rates(found)
    assert rates.values.tolist() == [[0.75, 0]] and rates.held_out == [False, True]
    # two seeds that gain 1/4 and 3/4 in the first scene, nothing in the second
    none = [{"outcomes": [[0, 0]] * 3, "setting": setting}]
    some = [{"outcomes": [[1, 0], [0, 0], [0, 0]], "setting": setting}, found[0]]
    gain = modules[0].gain(some, none)
    assert gain["mean"] == pytest.approx((0.25 + 0.75) / 2 / 2)


def test_frames_say_what_the_checker_says(modules: Modules) -> None:
    figure = modules[1]
    images, record = circles((0, 32, 32), (0, 1, 32), (2, 20, 20), (0, 63, 63)), CIRCLE
    right = check(images, [record] * 4).strict.tolist()
    assert right == [True, False, True, False]
    blocks = {"base": [figure.Block(images, right, 0.5)]}
    page: Image.Image = figure.compose(["a circle"], ["single_object"], blocks)
    for i, good in enumerate(right):
        place = (figure.LABEL + i * (figure.TILE + figure.GAP), figure.HEAD)
        assert page.getpixel(place) == (figure.RIGHT if good else figure.WRONG)
        middle = (place[0] + figure.TILE // 2, place[1] + figure.TILE // 2)
        seen = np.array(page.getpixel(middle)) / 255
        assert np.abs(seen - images[i, :, 32, 32].numpy()).max() < 0.02


def test_every_task_is_in_the_figure(modules: Modules) -> None:
    records: list[Record] = [r for some in all_records().values() for r in some[:3]]
    places = modules[0].by_task(records)
    assert list(places.values()) == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(6)]
