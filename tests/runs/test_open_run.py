"""Runs that are opened again: their weights, their evaluation, their grid of images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runkit import rows
from torch import Tensor
from toykit import redness, toy
from trainkit import trainer_for, unchanged, weights_of

import flowrl
from flowrl.core.errors import CheckpointError, ConfigError, ModelError
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.evaluation.image_grids import load_strip
from flowrl.models.toy import LinearFlow
from flowrl.runs.evaluate import (
    eval_weights,
    evaluate,
    grid_prompts,
    sample_all,
    sample_grid_prompts,
)
from flowrl.runs.folder import read_prompts
from flowrl.runs.open_run import load_run, open_target
from flowrl.runs.report.page import html_report
from flowrl.runs.train import train
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.integration


def opened(path: Path, **options: Any) -> tuple[dict[str, Tensor], int]:
    model, _, iteration = load_run(path, plugins=("toykit",), **options)[:3]
    return {name: p.detach() for name, p in model.trainable().items()}, iteration


def test_open_run(home: Path) -> None:
    """Oracle: the tensors in the checkpoint's own files."""
    run = home / "whole"
    for folder, options, at in (
        (run, {}, 4),
        (run, {"iteration": 2}, 2),
        (run / "checkpoints" / "000002", {}, 2),
        (run / "checkpoints" / "000002", {"iteration": 4}, 2),  # a checkpoint names itself
    ):
        files, _ = checkpoint.load(checkpoint.checkpoint_folder(run, at))
        for weights in (None, "ema", "current", "ref"):
            got, iteration = opened(folder, weights=weights, **options)  # type: ignore[arg-type]
            want = files[weights or "ema"]
            assert iteration == at and all(torch.equal(got[name], want[name]) for name in want)
    base, iteration = opened(run, weights="base")
    assert iteration == 0 and all(
        torch.equal(base[k], v) for k, v in LinearFlow(scale=0.3).trainable().items()
    )


def test_an_opened_run_evaluates_as_it_did(home: Path) -> None:
    model, config, _ = load_run(home / "whole", plugins=("toykit",))[:3]
    result = evaluate(model, config)
    row = rows(home / "whole" / "eval.jsonl")[-1]
    assert row["setting"].pop("weights") == config.eval.weights
    assert {"iteration": 4, **result, "drift": row["drift"]} == row
    prompts = load_prompts(config.prompts.test)
    size = {"height": 16, "width": 16, "steps": 4, "images": 2, "seed": 1234}
    alone = evaluate_prompts(model, prompts, {"red": redness}, headline="red", **size)  # type: ignore[arg-type]
    assert alone["red"] == result["red"]
    changed = load_run(home / "whole", overrides=("eval.images=5",), plugins=("toykit",))[1]
    assert changed.eval.images == 5


def test_a_target_takes_the_threads_that_its_settings_name(home: Path) -> None:
    """A run and a config alike, by overrides; 0 leaves them as they are."""
    before = torch.get_num_threads()
    try:
        for target in (home / "whole", home / "toy.yaml"):
            for asked, there in ((2, 2), (0, 2), (1, 1)):
                open_target(
                    str(target),
                    settings="",
                    overrides=[f"train.threads={asked}"],
                    plugins=("toykit",),
                )
                assert torch.get_num_threads() == there
    finally:
        torch.set_num_threads(before)


def test_a_model_from_before_training_has_the_weights_that_this_begins_with(
    home: Path, tmp_path: Path
) -> None:
    """`train.start` of a config or a run: judged is what the run's first evaluation judged, from
    the command line and from Python; kept images belong to the file's content."""
    start = f"train.start={home / 'whole'}"
    config = toy(tmp_path, start, "train.iterations=1")
    train(config, tmp_path / "run", quiet=True)
    first = rows(tmp_path / "run" / "eval.jsonl")[0]["red"]
    options: dict[str, Any] = {"settings": "", "plugins": ("toykit",)}
    found = open_target(str(tmp_path / "toy.yaml"), overrides=[start], **options)
    base = open_target(str(tmp_path / "run"), weights="base", **options)
    plain = open_target(str(tmp_path / "toy.yaml"), **options)
    judged = [evaluate(one.model, one.config)["red"] for one in (found, base, plain)]
    assert judged[:2] == [first, first] and judged[2] != first
    assert flowrl.evaluate(config)["red"] == first
    assert found.what.endswith(f", beginning with {home / 'whole'}")
    for one in (found, base):
        assert one.content is not None and str(home / "whole") in one.content["start"]
    assert plain.content is not None and "start" not in plain.content
    with pytest.raises(ConfigError, match=r"train\.start: cannot find .nowhere"):
        open_target(str(tmp_path / "toy.yaml"), overrides=["train.start=nowhere"], **options)


def test_open_run_that_is_none(home: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a run folder with config.yaml"):
        load_run(tmp_path)
    with pytest.raises(ConfigError, match="--plugin toykit"):
        load_run(home / "whole")
    with pytest.raises(CheckpointError, match="000003: there is no such checkpoint"):
        opened(home / "whole", iteration=3)
    shutil.copy(home / "whole" / "config.yaml", tmp_path)
    with pytest.raises(CheckpointError, match="there is no whole checkpoint yet"):
        opened(tmp_path)


def test_grids_show_the_same_noise(home: Path) -> None:
    """The strip of iteration 4 is the EMA's image of the grid's prompts with the grid's seed."""
    model, config, _ = load_run(home / "whole", plugins=("toykit",))[:3]
    texts = json.loads((home / "whole" / "samples" / "prompts.json").read_text())["prompts"]
    assert len(texts) == 2
    images = sample_all(model, config, texts, seed=config.samples.seed)
    assert torch.equal(load_strip(home / "whole" / "samples" / "000004.png", 2), images)
    assert not torch.equal(load_strip(home / "whole" / "samples" / "000000.png", 2), images)


def test_grid_prompts_take_turns() -> None:
    records = [{"tag": tag} for tag in "aaaaaabbbc"]
    for count in range(1, 13):
        picked = grid_prompts(records, count)
        assert len(picked) == len(set(picked)) == min(count, 10) and set(picked) <= set(range(10))
        assert {records[i]["tag"] for i in picked} == set("abc"[: min(count, 3)])
    assert grid_prompts(records, 3) == [0, 6, 9]
    assert grid_prompts([{}] * 8, 4) == [0, 2, 4, 6]  # without tags: evenly spread


@pytest.mark.parametrize("name", ["ema", "current"])
def test_evaluations_take_the_weights_that_the_config_names(tmp_path: Path, name: str) -> None:
    """And hand the current ones back; how the average moves is tests/training's."""
    trainer = trainer_for(tmp_path, "train.ema=0.5", f"eval.weights={name}", "train.updates=1")
    trainer.step()
    current = weights_of(trainer)
    with trainer.weights.using("ema"):
        averaged = weights_of(trainer)
        assert not unchanged(trainer, current)
    with eval_weights(trainer):
        assert unchanged(trainer, current if name == "current" else averaged)
    assert unchanged(trainer, current)


class Small(LinearFlow):
    """A model that makes small images only."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        if max(height, width) > 16:
            raise ModelError("height and width may be at most 16 pixels here")
        return super().latent_shape(height, width)


LARGE = ["eval.height=32", "eval.width=24"]


def test_images_are_trained_small_and_judged_large(tmp_path: Path) -> None:
    """Evaluations and grids have the size of `eval`, training that of `image`."""
    trainer = trainer_for(tmp_path, *LARGE)
    setting = evaluate(trainer.model, trainer.config, trainer=trainer)["setting"]
    assert (setting["height"], setting["width"]) == (32, 24)
    assert sample_grid_prompts(trainer)[1].shape[-2:] == (32, 24)
    trained = trainer.sample(trainer.rows())
    assert trained.x.shape[1:] == trainer.model.latent_shape(16, 16)
    # and a whole run with its grids and its report
    train(toy(tmp_path, *LARGE, "train.iterations=2"), tmp_path / "run", quiet=True)
    assert read_prompts(tmp_path / "run")[1] == (32, 24)
    assert "samples" in html_report(tmp_path / "run")


def test_a_size_that_the_model_cannot_make_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval.height.*Small cannot make images of 32 x 24"):
        Trainer(toy(tmp_path, *LARGE), model=Small())
    noise = ["likelihood={fn: prior}", "plan={fn: ode, steps: 4}"]
    with pytest.raises(ConfigError, match="learns noise of one size"):
        Trainer(toy(tmp_path, *LARGE, *noise))
