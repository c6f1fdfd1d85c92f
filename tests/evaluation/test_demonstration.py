"""The demonstration: its figures by hand, its figure pixel by pixel, and its trained runs on
further lists beside the base model."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from circlekit import CIRCLE, Painter, circles
from PIL import Image
from scriptkit import module_of

from flowrl.core.errors import ConfigError
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
    more = modules[0]._measured(Painter(), setting._replace(open_images=6))
    assert more["outcomes"] == found["outcomes"] and more["diversity"]["colors"] >= 1
    assert sum(found["outcomes"][0]) == (4 if best_of == 1 else 6)
    again = {**found, "setting": setting._asdict(), "word_order": {}}
    assert modules[0].rates([again, again]).tolist() == [[found["outcomes"][0].count(1) / 6]] * 2


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


# ------------------------------------------------------------------------------ the trained runs


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    return module_of("results/demonstration", "trained_checks")


class _Better(Painter):
    """Red circles, all of them whole."""

    def decode(self, x0: torch.Tensor) -> torch.Tensor:
        return circles(*[(0, 32, 32)] * len(x0))


def test_trained_checks_by_hand(
    checks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base model has 4 of 6 images right, as every third is cut off; one run has all, the other
    has as many as the base: 2/3, and (1 + 2/3) / 2 = 5/6 after training, a gain of 1/6."""
    (tmp_path / "one.jsonl").write_text(json.dumps(CIRCLE) + "\n")
    lists = dict.fromkeys(("hard", "out of distribution"), str(tmp_path / "one.jsonl"))
    runs = [tmp_path / "good", tmp_path / "idle"]
    monkeypatch.setattr(checks, "LISTS", lists)
    seeds = [{"seed": 0}, {"seed": 1}]
    monkeypatch.setattr(checks, "described", lambda *_: {"config": "shapes-awm", "runs": seeds})
    monkeypatch.setattr(checks, "chosen_checkpoint", lambda run: run)
    opened = []

    def model(self: Any, setting: Any) -> Any:
        opened.append((Path(setting.target).name, setting.guidance, setting.steps, setting.seed))
        return _Better() if "good" in setting.target else Painter()

    monkeypatch.setattr(checks.Bench, "model", model)
    words = [*map(str, runs), "--per-task", "6", "--work", str(tmp_path / "work")]
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["trained_checks.py", *words, "--out", str(out)])
    checks.main()
    result = json.loads(out.read_text())
    found = result["lists"]["hard"]
    assert found["base"]["mean"] == pytest.approx(2 / 3) and found["base"]["images"] == 6
    assert found["rl"]["mean"] == pytest.approx(5 / 6) and found["rl"]["images"] == 12
    for run, base in checks.GAINS:
        gain = found[f"{run}_minus_{base}"]
        assert gain["mean"] == gain["tasks"]["single_object"]["mean"] == pytest.approx(1 / 6)
    # one noise for all; guidance and steps as the demonstration found them
    plain, guided = (1.0, 10, 260_023), (2.5, 40, 260_023)
    assert opened[:2] == [("shapes-sd3", *plain), ("shapes-sd3", 5.0, 40, 260_023)]
    assert opened[2:6] == [("good", *plain), ("good", *guided), ("idle", *plain), ("idle", *guided)]
    # what was measured is kept
    opened.clear()
    checks.main()
    assert not opened


def test_settings_are_those_that_the_demonstration_found(checks: ModuleType) -> None:
    found = json.loads((ROOT / "assets/results/demonstration.json").read_text())
    for key, setting in {**checks.OF_BASE, **checks.OF_RUNS}.items():
        assert (found[key]["guidance"], found[key]["steps"]) == setting, key


@pytest.mark.integration
def test_which_runs_are_checked(checks: ModuleType, tmp_path: Path) -> None:
    """The checkpoint that is judged is named; runs of one seed are refused."""
    source = ROOT / "configs/shapes/awm.yaml"
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        (tmp_path / name).mkdir()
        text = source.read_text().replace("seed: 0", f"seed: {seed}")
        (tmp_path / name / "config.yaml").write_text(text)
    places = [tmp_path / "checkpoints/000027"] * 2
    found = checks.described([tmp_path / "a", tmp_path / "b"], places)
    assert found["config"] == "shapes-awm"
    said = [(run["seed"], run["iteration"], run["of"]) for run in found["runs"]]
    assert said == [(0, 27, 63), (1, 27, 63)]
    with pytest.raises(ConfigError, match=r"each of another seed, got .*b \(shapes-awm, seed 1\)"):
        checks.described([tmp_path / "b", tmp_path / "c"], places)
    with pytest.raises(ConfigError, match="expected a run folder with config.yaml"):
        checks.described([tmp_path], places[:1])
