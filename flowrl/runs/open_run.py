"""Find a run and its best checkpoint, and open its model; or open whatever else a command line may
name: a checkpoint, a model folder, a config."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from flowrl.config.load import Config, load_config
from flowrl.config.overrides import text_override
from flowrl.core.abilities import stays
from flowrl.core.errors import CheckpointError, ConfigError, RunError
from flowrl.core.identity import Facts
from flowrl.core.shipped_files import config_file, resource
from flowrl.core.types import FlowModel
from flowrl.cost.out_of_memory import explained
from flowrl.evaluation.contents import drawing_content, start_content
from flowrl.runs.folder import CONFIG, EVALS, read_rows
from flowrl.runs.gain import best_first
from flowrl.training import checkpoint
from flowrl.training.checkpoint import MANIFEST
from flowrl.training.checkpoint_state import check_meaning, checked_iteration, identity_of
from flowrl.training.run import build_model, use_threads
from flowrl.training.start_weights import check_start, names_of, start_from
from flowrl.training.weights import Weights, put_saved

Which = int | str | None
Check = Callable[[Config], object]
"""Looks at a config before its model is loaded, and raises what must be mended first."""
BEST, LAST = "best", "last"


def pass_all(config: Config) -> None:
    """Find nothing to mend."""


def best_checkpoint(run: Path) -> Path | None:
    """Return the whole checkpoint with the best held-out score; None where none was judged.

    An unreadable `eval.jsonl` is a warning: the weights are there all the same.
    """
    try:
        rows = best_first(read_rows(run, EVALS))
    except RunError as error:
        warnings.warn(f"cannot tell the best checkpoint: {error}", stacklevel=2)
        return None
    for row in rows:
        folder = checkpoint.checkpoint_folder(run, row["iteration"])
        try:
            checkpoint.verify(folder)
        except CheckpointError:
            continue  # pruned, or torn
        return folder
    return None


def chosen_checkpoint(run: Path, which: Which = None) -> Path:
    """Return a checkpoint of a run: a number, ``last``, or ``best``; by default the best, and the
    last where none was judged. Raises CheckpointError."""
    text = BEST if which is None else str(which)
    # a number says which one; whether it is whole is found out when it is read
    if text.isdecimal():
        return checkpoint.checkpoint_folder(run, int(text))
    if text not in (BEST, LAST):
        raise CheckpointError(
            f"{run}: expected the number of an iteration, best or last, got {text!r}"
        )
    # the best needs an evaluation; who asked for none in particular gets the last one instead
    found = best_checkpoint(run) if text == BEST else None
    if found is None and which == BEST:
        raise CheckpointError(
            f"{run}: no checkpoint has a held-out score yet; take the last one, or a numbered one"
        )
    found = found or checkpoint.latest(run)
    if found is None:
        raise CheckpointError(f"{run}: there is no whole checkpoint yet")
    return found


def which_of(run: Path, folder: Path) -> str:
    """Say how a checkpoint stands to the run's last one: "best held out, the last is 45"; nothing
    of the last one."""
    every = checkpoint.checkpoint_folders(run)
    if not every or every[-1] == folder:
        return ""
    kind = "best held out, " if best_checkpoint(run) == folder else ""
    return f"{kind}the last is {int(every[-1].name)}"


class OpenedRun(NamedTuple):
    """A model with the weights of a checkpoint."""

    model: FlowModel
    config: Config
    iteration: int
    base: Weights  # snapshot "ref", the weights from before training, where `eval.tuned` needs it
    what: str = ""  # in words, why it is this checkpoint: "best held-out score, the last is 45"
    weights: str = "base"  # ema, current or base
    checkpoint: Facts | None = None  # the files of the weights, and their SHA-256; None of the base


def load_run(
    path: str | Path,
    *,
    weights: str | None = None,
    iteration: Which = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    check: Check = pass_all,
    config: Config | None = None,
) -> OpenedRun:
    """Load the model of a run at a checkpoint.

    `path` is a checkpoint folder or a run. Of a run, `iteration` is a number, ``last`` or ``best``,
    by held-out score; by default it is the best, and the last where none was judged. `weights` is
    ema, current or base (as before training), by default what the run's evaluations take. `config`
    is the run's, with what a program handed over. Raises CheckpointError if there is none or it
    does not fit.
    """
    # the config of the run
    path = Path(path)
    run = run_of(path)
    if not (run / CONFIG).exists():
        raise CheckpointError(
            f"{path}: expected a run folder with {CONFIG}, or a checkpoint inside one"
        )
    if config is None:
        config = load_config(run / CONFIG, overrides, plugins, need_rewards=False)
    check(config)
    # its model, as before training
    with explained(config, "load"):
        model = build_model(config)
    base = base_weights(model, config)
    if weights == "base":
        _begin(model, config)
        return OpenedRun(model, config, 0, base)
    # the weights of the checkpoint
    folder = path if path != run else chosen_checkpoint(run, iteration)
    files, state = checkpoint.open_checkpoint(folder)
    done = checked_iteration(state, folder / checkpoint.STATE)
    check_meaning(state, identity_of(model), folder)
    name = weights or config.eval.weights
    if name not in files:
        there = ", ".join(files.keys() - {"optimizer"})
        raise CheckpointError(f"{folder}: has no {name!r} weights, only {there}")
    put_saved(model.trainable(), files, name)
    what = "" if path != run else which_of(run, folder)
    sealed = checkpoint.sealed(folder, name)
    return OpenedRun(model, config, done, base, what, name, sealed)


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


class Target(NamedTuple):
    """A loaded model, and what it is."""

    model: FlowModel
    config: Config
    what: str  # in words: "runs/a at iteration 20, current weights"; averaged ones are not named
    base: Weights  # the weights from before training, where `eval.tuned` needs them
    content: Facts | None = None  # what these names stand for: files of the model, of a checkpoint


def open_target(
    target: str,
    *,
    settings: str,
    weights: str | None = None,
    iteration: Which = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    check: Check = pass_all,
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
            path,
            weights=weights,
            iteration=iteration,
            overrides=overrides,
            plugins=plugins,
            check=check,
        )
        why = f" ({run.what})" if run.what else ""
        own = ", current weights" if run.weights == "current" else ""
        what = f"{path} at iteration {run.iteration}{own}{why}"
        use_threads(run.config)
        content = drawing_content(run.config)
        if run.checkpoint is not None:
            content["checkpoint"] = run.checkpoint
        else:
            content |= start_content(run.config)
        return Target(run.model, run.config, what, run.base, content)
    # a model folder with settings of a config, or a config with its model, as before training
    config = target_config(target, settings=settings, overrides=overrides, plugins=plugins)
    check(config)
    use_threads(config)
    model, base = untrained(config)
    what = f"the base model {config.model.kwargs.get('path', '')}"
    if config.train.start:
        what += f", beginning with {', '.join(names_of(config.train.start))}"
    content = drawing_content(config) | start_content(config)
    return Target(model, config, what, base, content)


def untrained(config: Config) -> tuple[FlowModel, Weights]:
    """Load the model of a config as before training, also with the weights that this begins with
    -> it, and its own weights as `base_weights` keeps them. Raises as `start_from` does."""
    check_start(config.train.start)
    with explained(config, "load"):
        model: FlowModel = config.call("model")()
    base = base_weights(model, config)
    _begin(model, config)
    return model, base


def _begin(model: FlowModel, config: Config) -> None:
    """Put the weights in that a config's training begins with, if they are not the model's own."""
    if config.train.start:
        start_from(config.train.start, model.trainable(), model=model)


def target_config(
    target: str, *, settings: str, overrides: Sequence[str] = (), plugins: Sequence[str] = ()
) -> Config:
    """Return the config of a target as `open_target` takes it, unloaded. Raises ConfigError
    for a name that is none."""
    path = Path(target)
    if (path / CONFIG).exists() or (path / MANIFEST).exists():
        return load_config(run_of(path) / CONFIG, overrides, plugins, need_rewards=False)
    if not path.is_dir() and target.startswith("assets/"):
        path = resource(target)  # a model that is shipped, from any folder
    if path.is_dir():
        own = text_override("model.path", str(path))
        return load_config(settings, [own, *overrides], plugins)
    return _named_config(target, overrides, plugins)


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
