"""A sweep: every combination once, resumed, the best chosen, on validation prompts."""

from __future__ import annotations

import json
import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from runkit import rows
from toykit import toy

from flowrl.cli.main import main
from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.statistics import mmhm
from flowrl.runs import sweep as module
from flowrl.runs.open_run import Target
from flowrl.runs.suite import run_suite
from flowrl.runs.sweep import (
    SweepRequest,
    choose_prompts,
    lora_scaled,
    sweep,
    sweep_table,
)
from flowrl.training.weights import Weights


class Guided:
    """The toy with a guidance that it adds to the images' red: the more, the better."""

    def __init__(self, config: Config, guidance: float) -> None:
        self.model, self.guidance = config.call("model")(), guidance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def decode(self, x0: torch.Tensor) -> torch.Tensor:
        images = self.model.decode(x0).clone()
        images[:, 0] = (images[:, 0] + self.guidance / 10).clamp(0, 1)
        return images


def test_every_combination_and_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two guidances by two steps, by hand: each row is a suite of its own setting; the chosen one
    is the largest; a second sweep with a third guidance draws only that."""
    config = toy(tmp_path / "toy")
    opened: list[list[str]] = []

    def open_target(more: list[str]) -> Target:
        opened.append(more)
        mine = toy(tmp_path / "toy", more[-1])  # the toy's model takes no guidance
        guidance = float(more[0].partition("=")[2])
        model = Guided(mine, guidance)
        return Target(model, mine, "the toy", Weights(model.trainable()))

    asked = SweepRequest("shapes", [0.0, 2.0], [2, 4], prompts=config.prompts.test)
    out = tmp_path / "out"
    result = sweep(open_target, asked, out)
    found = {(row["guidance"], row["steps"]): row for row in result["rows"]}
    assert [*found] == [(0.0, 2), (0.0, 4), (2.0, 2), (2.0, 4)] and len(opened) == 2
    for (guidance, steps), row in found.items():
        mine = toy(tmp_path / "toy", f"eval.steps={steps}")
        known = run_suite(
            Guided(mine, guidance), mine, "x", tmp_path / f"x{guidance}{steps}", target=""
        )
        assert row["score"] == known["red"] and row["rewards"] == known["rewards"]
    best = max(found.values(), key=lambda row: row["score"])
    assert result["chosen"] == best and best["guidance"] == 2.0
    assert best["less_than_chosen"]["difference"] == 0
    gap = found[0.0, 4]["less_than_chosen"]
    assert gap["difference"] < gap["interval"][1] < 0
    # both rewards as one number, by the function that has fixtures
    given = [row["rewards"] for row in result["rows"]]
    columns = {name: list(map(itemgetter(name), given)) for name in ("red", "strict")}
    assert [row["mmhm"] for row in result["rows"]] == pytest.approx(mmhm(columns))
    assert json.loads((out / "sweep.json").read_text()) == result
    told = sweep_table(result)
    assert (
        told.count("\n*") == 2
        and "chosen by red" in told
        and best["setting"]["prompts_hash"] in told
    )
    # more of it later: what is there stays
    drawn: list[str] = []
    whole = run_suite

    def watched(*given: Any, **more: Any) -> Any:
        before = len(list(given[3].glob("*/samples/*")))
        report = whole(*given, **more)
        if len(list(given[3].glob("*/samples/*"))) > before:
            drawn.append(given[3].name)
        return report

    monkeypatch.setattr(module, "run_suite", watched)
    more = asked._replace(guidance=[0.0, 2.0, 5.0], steps=[4], by="mmhm")
    again = sweep(open_target, more, out)
    assert drawn == ["guidance-5_steps-4"] and again["by"] == "mmhm"
    with pytest.raises(ConfigError, match="--by: expected one of red, strict, mmhm, got 'rde'"):
        sweep(open_target, more._replace(by="rde"), out)


def test_a_lora_at_half_its_strength() -> None:
    """The matrix B halved halves what the adapter adds; afterwards it is as it was."""

    class Adapted:
        def __init__(self) -> None:
            values = {"x.lora_A.w": torch.eye(2), "x.lora_B.w": torch.full((2, 2), 3.0)}
            self.own = {name: torch.nn.Parameter(value) for name, value in values.items()}

        def trainable(self) -> dict[str, torch.nn.Parameter]:
            return self.own

    model: Any = Adapted()
    with lora_scaled(model, 0.5):
        assert model.own["x.lora_B.w"].tolist() == [[1.5, 1.5], [1.5, 1.5]]
        assert torch.equal(model.own["x.lora_A.w"], torch.eye(2))
    assert bool((model.own["x.lora_B.w"] == 3).all())
    del model.own["x.lora_B.w"]
    with pytest.raises(ConfigError, match="expected a model with LoRA"), lora_scaled(model, 0.5):
        pass


def test_settings_are_chosen_on_validation_prompts(tmp_path: Path) -> None:
    """Not on the test's; some of them are spread over the tasks."""
    shapes = SweepRequest("shapes", [None], [None])
    assert choose_prompts(shapes, tmp_path) == "assets/shapes/validation.jsonl"
    file = choose_prompts(shapes._replace(most=12), tmp_path)
    tags = [record["tag"] for record in rows(Path(file))]
    assert len(tags) == 12 and {tags.count(tag) for tag in tags} == {2}
    known = load_prompts("assets/shapes/validation.jsonl").texts
    assert {record["prompt"] for record in rows(Path(file))} <= {*known}
    with pytest.raises(RunError, match="holds other prompts"):
        choose_prompts(shapes._replace(most=6), tmp_path)
    with pytest.raises(ConfigError, match="no validation prompts"):
        choose_prompts(SweepRequest("drawbench", [None], [None]), tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped model: two guidances, six validation prompts, one image each."""
    out = tmp_path / "out"
    argv = ["sweep", "assets/shapes-sd3", "--suite", "shapes", "--guidance", "1,2.5", "--steps"]
    assert main([*argv, "2", "--count", "6", "--images", "1", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "chosen by shapes on" in told
    result = json.loads((out / "sweep.json").read_text())
    assert [row["guidance"] for row in result["rows"]] == [1.0, 2.5]
    assert main([*argv, "two"]) == 2
    assert "--steps: expected numbers like 1,2.5,4, got 'two'" in capsys.readouterr().err
    assert main(["sweep", "assets/shapes-sd3", "--suite", "shapes", "--guidance", "1,1"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", "nan", "--steps: expected numbers like 1,2.5,4, got 'nan'"),
        ("--steps", "10,inf", "--steps: expected numbers like 1,2.5,4, got '10,inf'"),
        ("--steps", "10.5", "--steps: expected whole numbers >= 1 like 10,20, got '10.5'"),
        ("--steps", "0,10", "--steps: expected whole numbers >= 1 like 10,20, got '0,10'"),
        ("--guidance", "nan", "--guidance: expected numbers like 1,2.5,4, got 'nan'"),
        ("--lora-scale", "inf", "--lora-scale: expected numbers like 1,2.5,4, got 'inf'"),
        ("--count", "-3", "--count: expected a whole number, 0 for all, got -3"),
    ],
)
def test_numbers_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    """Before anything is written, so that the corrected command finds an empty folder."""
    out = tmp_path / "out"
    argv = ["sweep", "assets/shapes-sd3", "--suite", "shapes", "--out", str(out)]
    assert main([*argv, option, value]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_a_number_that_is_missing_leaves_mmhm_out_unless_it_chooses() -> None:
    """FID of too few images is NaN, for one."""
    asked = SweepRequest("shapes", guidance=[1.0, 2.0], steps=[4])
    columns = {"red": [0.1, 0.2], "fid": [1.0, math.nan]}
    rows: list[dict[str, Any]] = [{}, {}]
    module._add_mmhm(rows, dict(columns), asked)
    assert rows == [{}, {}]
    with pytest.raises(DataError, match="fid"):
        module._add_mmhm(rows, dict(columns), asked._replace(by="mmhm"))


def test_the_first_setting_names_the_columns() -> None:
    row: dict[str, Any] = {"guidance": None, "steps": 2, "lora_scale": 1}
    row |= {"score": 0.5, "interval": [0.4, 0.6]}
    row |= {"folder": "a", "less_than_chosen": {"difference": 0.0, "interval": [0.0, 0.0]}}
    row["setting"] = {"prompts": "p", "count": 1, "prompts_hash": "h", "images": 1, "seed": 0}
    one = {**row, "rewards": {"red": 0.5, "blue": 0.125, "green": 0.25}}
    other = {**row, "folder": "b", "rewards": {"green": 0.25, "blue": 0.125, "red": 0.5}}
    told = sweep_table({"rows": [one, other], "chosen": one, "by": "red", "score": "red"})
    head, *lines = [line.split() for line in told.splitlines()]
    assert head[-2:] == ["blue", "green"]
    assert [line[-2:] for line in lines if "none" in line] == [["0.125", "0.250"]] * 2
