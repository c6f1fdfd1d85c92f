"""What a command line names as its target: a run, a checkpoint, a model folder, or a config."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import config_file, resource
from flowrl.core.types import FlowModel
from flowrl.cost.out_of_memory import explained
from flowrl.runs.best import Which
from flowrl.runs.folder import CONFIG
from flowrl.runs.open import base_weights, load_run
from flowrl.training.checkpoint import MANIFEST
from flowrl.training.run import use_threads
from flowrl.training.weights import Weights


class Target(NamedTuple):
    """A loaded model, and what it is."""

    model: FlowModel
    config: Config
    what: str  # in words: "runs/a at iteration 20, current weights"; averaged ones are not named
    base: Weights  # the weights from before training, where `eval.tuned` needs them


def open_target(
    target: str,
    *,
    settings: str,
    weights: str | None = None,
    iteration: Which = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> Target:
    """Find out what a target is and load it.

    A run or a checkpoint is opened as `load_run` does. A diffusers model folder, also a shipped
    one, takes the config `settings`; a config gives its base model. From then on torch has the CPU
    threads of ``train.threads``. Raises ConfigError for a name that is none of these, ModelError
    for a broken model folder, and CheckpointError as `load_run`.
    """
    # a run or a checkpoint
    path = Path(target)
    if (path / CONFIG).exists() or (path / MANIFEST).exists():
        run = load_run(
            path, weights=weights, iteration=iteration, overrides=overrides, plugins=plugins
        )
        why = f" ({run.what})" if run.what else ""
        own = ", current weights" if run.weights == "current" else ""
        what = f"{path} at iteration {run.iteration}{own}{why}"
        use_threads(run.config)
        return Target(run.model, run.config, what, run.base)
    # a model folder with settings of a config, or a config with its model
    if not path.is_dir() and target.startswith("assets/"):
        path = resource(target)  # a model that is shipped, from any folder
    if path.is_dir():
        config = load_config(settings, [f"model.path={path}", *overrides], plugins)
    else:
        config = _named_config(target, overrides, plugins)
    # the model as it is before training
    use_threads(config)
    with explained(config, "load"):
        model = config.call("model")()
    what = f"the base model {config.model.kwargs.get('path', '')}"
    return Target(model, config, what, base_weights(model, config))


def _named_config(target: str, overrides: Sequence[str], plugins: Sequence[str]) -> Config:
    """Load a config by name or file. Raises ConfigError that says all that a target may be."""
    if not target.endswith((".yaml", ".yml")) and not os.path.isfile(target):
        try:
            config_file(target)
        except ConfigError as error:
            raise ConfigError(
                f"{target}: expected a run folder, a checkpoint, a model folder or a config; there "
                f"is no folder of this name, and {error}"
            ) from error
    return load_config(target, overrides, plugins)


def saved_config(run: Path, plugins: Sequence[str] = ()) -> Config:
    """Load the config of a run folder. Raises ConfigError for a folder that is none."""
    if not (run / CONFIG).exists():
        raise ConfigError(f"{run}: expected a run folder with config.yaml in it")
    return load_config(run / CONFIG, (), plugins)
