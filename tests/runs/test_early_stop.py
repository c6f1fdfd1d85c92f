"""A run that its monitor of plateaus ends early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runkit import config_for

from flowrl.runs import evaluate, milestones
from flowrl.runs.open import open_run
from flowrl.runs.train import train
from flowrl.training.checkpoint import load, numbered


@pytest.mark.integration
def test_an_early_stop_keeps_the_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best score is that of iteration 1, two evaluations later the run ends. Of the checkpoints
    only the newest is to be kept, and the best stays beside it: it is what the run is opened at."""
    scores = iter([0.2, 0.6, 0.5, 0.4, 0.3])
    real = evaluate.evaluate

    def scripted(*args: Any, **options: Any) -> dict[str, Any]:
        return real(*args, **options) | {"red": next(scores)}

    monkeypatch.setattr(milestones, "evaluate", scripted)
    stop = "monitors.plateau={patience: 2, action: stop}"
    run = tmp_path / "run"
    config = config_for(tmp_path, "eval.every=1", "checkpoint={every: 1, keep: 1}", stop)
    summary = train(config, run, quiet=True)
    assert config.train.iterations == 4 and summary["iterations"] == 3
    assert summary["stopped"]["monitor"] == "plateau"
    best = "checkpoints/000001"
    assert summary["best"] == {"iteration": 1, "score": 0.6, "checkpoint": best}
    assert [folder.name for folder in numbered(run)] == ["000001", "000003"]
    model, _, iteration = open_run(run, plugins=("toykit",), weights="current")
    saved = load(run / best)[0]["current"]
    assert iteration == 1
    assert all(torch.equal(p, saved[name]) for name, p in model.trainable().items())
