"""Open a run again: its model with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flowrl.config.load import Config, load_config
from flowrl.core.abilities import stays
from flowrl.core.errors import CheckpointError
from flowrl.core.types import FlowModel
from flowrl.cost.out_of_memory import explained
from flowrl.runs.best import Which, chosen_checkpoint, which_of
from flowrl.runs.folder import CONFIG
from flowrl.training import checkpoint
from flowrl.training.checkpoint_state import checked_iteration
from flowrl.training.run import build_model
from flowrl.training.weights import Weights, put_saved


class OpenedRun(NamedTuple):
    """A model with the weights of a checkpoint."""

    model: FlowModel
    config: Config
    iteration: int
    base: Weights  # snapshot "ref", the weights from before training, where `eval.tuned` needs it
    what: str = ""  # in words, why it is this checkpoint: "best held-out score, the last is 45"
    weights: str = "base"  # ema, current or base


def open_run(
    path: str | Path,
    *,
    weights: str | None = None,
    iteration: Which = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> tuple[FlowModel, Config, int]:
    """Load the model of a run at a checkpoint, as `load_run` does -> (model, config, iteration)."""
    return load_run(
        path, weights=weights, iteration=iteration, overrides=overrides, plugins=plugins
    )[:3]


def load_run(
    path: str | Path,
    *,
    weights: str | None = None,
    iteration: Which = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> OpenedRun:
    """Load the model of a run at a checkpoint.

    `path` is a checkpoint folder or a run. Of a run, `iteration` is a number, ``last`` or ``best``,
    by held-out score; by default it is the best, and the last where none was judged. `weights` is
    ema, current or base (as before training), by default what the run's evaluations take. Raises
    CheckpointError if there is none or it does not fit.
    """
    # the config of the run
    path = Path(path)
    run = run_of(path)
    if not (run / CONFIG).exists():
        raise CheckpointError(
            f"{path}: expected a run folder with {CONFIG}, or a checkpoint inside one"
        )
    config = load_config(run / CONFIG, overrides, plugins, need_rewards=False)
    # its model, as before training
    with explained(config, "load"):
        model = build_model(config)
    base = base_weights(model, config)
    if weights == "base":
        return OpenedRun(model, config, 0, base)
    # the weights of the checkpoint
    folder = path if path != run else chosen_checkpoint(run, iteration)
    files, state = checkpoint.open_checkpoint(folder)
    done = checked_iteration(state, folder / checkpoint.STATE)
    name = weights or config.eval.weights
    if name not in files:
        there = ", ".join(files.keys() - {"optimizer"})
        raise CheckpointError(f"{folder}: has no {name!r} weights, only {there}")
    put_saved(model.trainable(), files, name)
    what = "" if path != run else which_of(run, folder)
    return OpenedRun(model, config, done, base, what, name)


def run_of(path: Path) -> Path:
    """Return the run that a checkpoint is in, or `path` if it is no checkpoint."""
    return path.parent.parent if (path / checkpoint.MANIFEST).exists() else path


def base_weights(model: FlowModel, config: Config) -> Weights:
    """Keep a model's weights as the snapshot "ref" where `eval.tuned` needs them; to be called
    before training."""
    base = Weights(model.trainable(), stay=stays(model))
    if config.eval.tuned < 1:
        base.snapshot("ref")
    return base
