"""Suites: images in a folder, scores that go on where they stopped, differences with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runkit import rows
from toykit import toy
from weightkit import Weights

from flowrl.cli.main import main
from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, DataError, RewardError, RunError
from flowrl.core.prompts import load_prompts
from flowrl.core.shipped_files import resource
from flowrl.core.types import RewardBatch
from flowrl.evaluation import held_out
from flowrl.evaluation.crossed_errors import crossed
from flowrl.evaluation.statistics import paired_difference
from flowrl.runs import suite as suites
from flowrl.runs.evaluate import evaluate
from flowrl.runs.suite import run_suite, scores_of


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The toy, which learns nothing here."""
    return toy(tmp_path / "toy")


def run(config: Config, out: Path, **more: Any) -> dict[str, Any]:
    return run_suite(config.call("model")(), config, "toy", out, target="the toy", **more)


def test_a_suite_scores_as_an_evaluation_does(config: Config, tmp_path: Path) -> None:
    """The same images from the same noise, by way of PNG files, in GenEval's layout."""
    out = tmp_path / "out"
    report, known = run(config, out), evaluate(config.call("model")(), config)
    name = config.headline
    assert report[name] == pytest.approx(known[name], abs=1e-6)
    assert report["interval"] == pytest.approx(known["interval"], abs=1e-6)
    assert report["rewards"] == pytest.approx(known["rewards"], abs=1e-6)
    # no bare mean: the interval over the prompts' means
    told = np.array([row["scores"][name] for row in rows(out / "scores.jsonl")])
    means = told.reshape(-1, 2).mean(1)
    expected = crossed(means[None], ["all"] * len(means))["interval"]
    assert report["intervals"][name] == pytest.approx(expected, abs=1e-6)
    # the files
    prompts = load_prompts(config.prompts.test)
    assert json.loads((out / "summary.json").read_text()) == report
    for place, record in enumerate(prompts.records):
        folder = out / f"{place:05}"
        assert json.loads((folder / "metadata.jsonl").read_text()) == record
        assert sorted(p.name for p in (folder / "samples").iterdir()) == ["0000.png", "0001.png"]
    assert len(rows(out / "scores.jsonl")) == 2 * len(prompts)
    # what the score depends on
    said = report["setting"]
    assert (said["steps"], said["seed"], said["images"], said["height"]) == (4, 1234, 2, 16)
    assert said["rewards"].keys() == config.rewards.keys() and len(said["prompts_hash"]) == 16


def test_a_stopped_suite_goes_on(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while drawing, then while scoring with a line cut off: what is whole is kept, and the
    result is that of an unbroken suite."""
    whole = run(config, tmp_path / "whole")
    out, model, asked = tmp_path / "out", config.call("model")(), []
    drawing = held_out.sampled_images

    def some(*given: Any, places: Any, **more: Any) -> Any:
        asked.append(list(places))
        parts = drawing(*given, places=places, **{**more, "batch": 2})
        yield next(parts)
        if len(asked) == 1:
            raise RunError("stopped")
        yield from parts

    monkeypatch.setattr(suites, "sampled_images", some)
    with pytest.raises(RunError, match="stopped"):
        run_suite(model, config, "toy", out, target="the toy")
    first = out / "00000" / "samples" / "0000.png"
    before = first.stat().st_mtime_ns
    run_suite(model, config, "toy", out, target="the toy")
    # the first prompt was there
    count = len(load_prompts(config.prompts.test))
    assert asked == [[*range(count)], [*range(1, count)]] and first.stat().st_mtime_ns == before
    # now without the last lines of the scores
    file = out / "scores.jsonl"
    text = file.read_text()
    cut = text.rindex("\n", 0, len(text) - 1) + 20
    file.write_text(text[:cut])
    again = run_suite(model, config, "toy", out, target="the toy")
    assert asked[2:] == [] and again == whole
    assert len(rows(file)) == 2 * count + 1  # the last prompt's other image has two lines


def test_a_damaged_image_is_named(config: Config, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(config, out)
    (out / "scores.jsonl").unlink()
    file = out / "00001" / "samples" / "0001.png"
    Image.new("RGB", (4, 4)).save(file)
    with pytest.raises(DataError, match="00001.*one size, got 4 x 4 and 16 x 16"):
        run(config, out)
    file.write_bytes(b"no image")
    with pytest.raises(DataError, match="0001.png"):
        run(config, out)


def test_missing_images_are_drawn_again_and_nothing_is_made_up(
    config: Config, tmp_path: Path
) -> None:
    """An image, and another one's line, are gone: the same command puts back the very same ones. A
    folder to compare with is not mended: it is an error."""
    whole, out = run(config, tmp_path / "out"), tmp_path / "out"
    file, lines = out / "00001" / "samples" / "0001.png", out / "scores.jsonl"
    before = file.read_bytes()
    file.unlink()
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(RunError, match="out.*not finished; run the same command again"):
        run(config, tmp_path / "other", against=out)
    assert run(config, out) == whole and file.read_bytes() == before


def test_another_setting_is_another_folder(config: Config, tmp_path: Path) -> None:
    run(config, tmp_path / "out")
    changed = toy(tmp_path / "toy", "eval.steps=2", "eval.seed=7")
    with pytest.raises(RunError, match="seed: 1234 and 7; steps: 4 and 2"):
        run(changed, tmp_path / "out")
    with pytest.raises(RunError, match="comparable: seed"):
        run(changed, tmp_path / "other", against=tmp_path / "out")
    with pytest.raises(RunError, match="no setting.json"):
        run(config, tmp_path)
    with pytest.raises(RunError, match=r"setting.json"):
        run(config, tmp_path / "third", against=tmp_path / "toy")


def test_the_difference_is_paired(config: Config, tmp_path: Path) -> None:
    """Against the same model with a brighter red: by hand from the scores in both folders."""
    run(config, tmp_path / "base")
    model = config.call("model")()
    decode = model.decode

    def redder(x0: torch.Tensor) -> torch.Tensor:
        images = decode(x0).clone()
        images[:, 0] = (images[:, 0] + 0.1).clamp(0, 1)
        return images

    model.decode = redder  # type: ignore[method-assign]
    report = run_suite(
        model, config, "toy", tmp_path / "new", target="redder", against=tmp_path / "base"
    )
    prompts, name = load_prompts(config.prompts.test), config.headline
    new, old = (scores_of(config, prompts, tmp_path / n)[name] for n in ("new", "base"))
    tags = [str(record.get("tag", "all")) for record in prompts.records]
    expected = paired_difference(new, old, tags)
    found = report["against"]
    assert found["interval"] == expected["interval"] and found["target"] == "the toy"
    assert 0 < found["interval"][0] <= found["difference"] == expected["difference"]
    assert found["difference"] == pytest.approx(0.1, abs=0.03)  # some pixels are red already


def test_nothing_is_averaged_over_images_without_a_score(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(batch: RewardBatch) -> torch.Tensor:
        return torch.where(torch.arange(len(batch.images)) == 0, torch.nan, 1.0)

    def mute(batch: RewardBatch) -> torch.Tensor:
        return torch.full((len(batch.images),), torch.nan)

    monkeypatch.setattr(suites, "rewards_of", lambda calls, _: {n: silent for n in calls})
    with pytest.raises(RewardError, match="1.*of 12 images.*train.max_unscored=0.0"):
        run(config, tmp_path / "out")
    lenient = toy(tmp_path / "toy", "train.max_unscored=0.5")
    report = run(lenient, tmp_path / "lenient")
    assert report["unscored"] == {name: 1 for name in config.rewards}
    assert report[config.headline] == 1.0
    monkeypatch.setattr(suites, "rewards_of", lambda calls, _: {n: mute for n in calls})
    with pytest.raises(RewardError, match="no image has a score by"):
        run(toy(tmp_path / "toy", "train.max_unscored=1.0"), tmp_path / "none")

    # no mean over fewer tasks than the prompts have
    def picky(batch: RewardBatch) -> torch.Tensor:
        known = [record.get("tag") == "b" for record in batch.meta]
        return torch.where(torch.tensor(known), 1.0, torch.nan)

    file = Path(lenient.prompts.test)
    lines = file.read_text().splitlines()
    records = [{**json.loads(line), "tag": "ab"[n > 0]} for n, line in enumerate(lines)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(suites, "rewards_of", lambda calls, _: {n: picky for n in calls})
    with pytest.raises(RunError, match="scored no image of the task 'a'"):
        run(lenient, tmp_path / "tasks")


def test_the_best_of_three(config: Config, tmp_path: Path) -> None:
    """By hand from the scores of every image: the largest of each three neighbours, in a suite and
    in an evaluation, chosen by the headline or by another reward; a base without choice is
    comparable."""
    single = run(config, tmp_path / "one")
    for by in ("", "strict"):
        own = ["eval.best_of=3", *([f"eval.best_by={by}"] if by else [])]
        chosen, out = toy(tmp_path / "toy", *own), tmp_path / f"out{by}"
        more = {} if by else {"against": tmp_path / "one"}
        report = run(chosen, out, **more)
        name, places = by or config.headline, len(load_prompts(config.prompts.test))
        lines = {(r["prompt"], r["image"]): r["scores"] for r in rows(out / "scores.jsonl")}
        best: dict[str, list[float]] = {}
        for prompt, record in enumerate(load_prompts(config.prompts.test).records):
            for first in (0, 3):
                three = [lines[prompt, first + i] for i in range(3)]
                value = max(three, key=lambda scores: scores[name])[config.headline]
                best.setdefault(record["tag"], []).append(value)
        means = [np.mean(values) for values in best.values()]
        assert report[config.headline] == pytest.approx(np.mean(means))
        assert report["images"] == 2 * places and len(lines) == 6 * places
        known = evaluate(config.call("model")(), chosen)
        assert known[config.headline] == pytest.approx(report[config.headline], abs=1e-6)
        said = (known["setting"]["best_of"], report["setting"]["best_by"])
        assert said == (3, name)
        if not by:
            assert report["against"]["difference"] > 0
            assert report[name] > single[name]
    with pytest.raises(ConfigError, match="best_by: the config has no reward"):
        run(toy(tmp_path / "toy", "eval.best_by=gone"), tmp_path / "gone")


def test_leaks_are_said(config: Config, tmp_path: Path) -> None:
    """The toy is tested on prompts that it trains on."""
    (leak,) = run(config, tmp_path / "out")["leaks"]
    assert "are training prompts too" in leak


@pytest.mark.integration
def test_geneval_on_shapes_from_the_command_line(
    tmp_path: Path, weights: Weights, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped model, a random Mask2Former and a random CLIP of the real classes, three
    prompts; then the same folder once more, and against itself."""
    wish = {"class": "vase", "count": 1}
    records = [
        {"tag": "single_object", "include": [wish], "prompt": "a circle"},
        {"tag": "colors", "include": [{**wish, "color": "red"}], "prompt": "a red circle"},
        {"tag": "counting", "include": [wish], "exclude": [{**wish, "count": 2}], "prompt": "two"},
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({**r, "prompt": "a red circle"}) + "\n" for r in records))
    out = tmp_path / "out"
    argv = ["eval", "assets/shapes-sd3", "--suite", "geneval", "--prompts", str(file)]
    argv += ["--out", str(out), "--steps", "2", "--images", "2"]
    for key, value in weights.geneval.items():
        argv += ["--set", f"rewards.geneval.{key}={value}"]
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "95 % interval" in told and "setting: guidance" in told and "steps 2" in told
    lines = rows(out / "geneval.jsonl")
    keys = ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    assert len(lines) == 6 and all([*line] == keys for line in lines)
    assert lines[0]["filename"] == "00000/samples/0000.png"
    summary = json.loads((out / "summary.json").read_text())
    correct = [float(line["correct"]) for line in lines]
    by_task = np.array(correct).reshape(3, 2).mean(1)
    assert summary["geneval"] == pytest.approx(by_task.mean())
    # once more, against itself
    assert main([*argv, "--against", str(out)]) == 0
    said = capsys.readouterr().out
    assert "+0.000, 95 % interval unknown (paired, over prompts)" in said  # of a prompt a task
    assert main(["eval", "assets/shapes-sd3", "--out", str(out)]) == 2
    # the suite of the shapes, on its own first prompts
    own = resource("assets/shapes/test.jsonl").read_text().splitlines(keepends=True)[:2]
    file.write_text("".join(own))
    argv = ["eval", "assets/shapes-sd3", "--suite", "shapes", "--prompts", str(file)]
    assert main([*argv, "--out", str(tmp_path / "shapes"), "--steps", "2", "--images", "1"]) == 0
    told = capsys.readouterr().out
    assert "shapes" in told and "setting: guidance" in told
    assert len(rows(tmp_path / "shapes" / "scores.jsonl")) == 2
