"""The functions of the Python door, and the training loop for programs that do the rest themselves.
Each takes what `flowrl.api.arguments` describes, and the sections of a config as keywords:
``train={"iterations": 20}``, ``seed=3``. These stand there once, as `Given`; here are the arguments
that a call has alone."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from flowrl.api.arguments import (
    ConfigLike,
    Given,
    config_of,
    parts_given,
    python_objects,
    takes_given,
)
from flowrl.api.given import GivenPipeline
from flowrl.api.trained_run import TrainedRun
from flowrl.config.calls import PYTHON
from flowrl.config.load import Config, folder_of
from flowrl.config.values import show
from flowrl.core.errors import ConfigError
from flowrl.core.part import Part
from flowrl.cost.estimate import Estimate
from flowrl.cost.estimate import estimate as work_out
from flowrl.doctor.examine import examine
from flowrl.doctor.findings import Checkup
from flowrl.runs.compare.budgets import Budgets
from flowrl.runs.compare.compare import Comparison, Search, run_comparison
from flowrl.runs.compare.search_space import read_space
from flowrl.runs.compare.summary import Result
from flowrl.runs.compare.tune import Tuning, run_tuning
from flowrl.runs.evaluate import evaluate as judge
from flowrl.runs.kept_inputs import keep_lists
from flowrl.runs.open_run import untrained
from flowrl.runs.start_run import Resume
from flowrl.runs.trackers import Tracker, eval_numbers, open_trackers, trackers_given
from flowrl.runs.train import train as train_run
from flowrl.training.trainer import Trainer as _Trainer


@takes_given
def train(
    config: ConfigLike,
    run: str | os.PathLike[str] | None = None,
    *,
    resume: Resume = False,
    quiet: bool = False,
    **given: Unpack[Given],
) -> TrainedRun:
    """Train in the folder `run` -> the run, with what became of it.

    Without a folder it is ``runs/NAME-seedSEED``, numbered if that is taken. With `resume` the run
    goes on from its newest whole checkpoint, bit for bit as if never stopped; "auto" starts where
    there is nothing to go on from. `callbacks` are parts that join the training loop
    (`flowrl.Part`), `track` names experiment trackers: wandb, trackio, swanlab. `quiet` prints
    nothing. All else is as in `flowrl.api.arguments`; without `test_prompts` a tenth of the
    prompts is held out.

    Whatever ends the run leaves a checkpoint, and the message says how to go on. Raises
    ConfigError, DataError and ModelError before anything is trained, then what
    `flowrl.runs.train.train` raises.
    """
    # the loop gets the program's own parts, not copies of them
    callbacks, track = parts_given(given.pop("callbacks", ())), given.get("track", ())
    chosen = config_of(config, quiet, **given)
    done = train_run(
        chosen, run, resume=resume, quiet=quiet, track=trackers_given(track), callbacks=callbacks
    )
    return TrainedRun.after(Path(done["run"]), chosen)


@takes_given
def evaluate(
    config: ConfigLike,
    **given: Unpack[Given],
) -> dict[str, Any]:
    """Judge a model that flowrl did not train, with the `eval` section of a config -> the report: a
    line as of ``eval.jsonl``. What a run trained is judged by ``flowrl.open(run).evaluate()``.

    All `prompts` are judged by, or `test_prompts`, or else those of the config. Trackers are told
    the scores. `callbacks` join a training loop, and here is none: they are only checked.
    """
    parts_given(given.pop("callbacks", ()))
    prompts = given.pop("prompts", None)
    if given.get("test_prompts") is None:
        given["test_prompts"] = prompts
    chosen = config_of(config, **given)
    made, base = untrained(chosen)
    report = judge(made, chosen, base=base)
    for tracker in open_trackers(trackers_given(given.get("track", ())), None, chosen.to_dict()):
        tracker.log(0, eval_numbers(report))
        tracker.close()
    return report


@takes_given
def estimate(
    config: ConfigLike,
    **given: Unpack[Given],
) -> Estimate:
    """Work out what a config takes, without a weight or a GPU: parameters, memory, calls.

    Of a model object that has no folder on the disk, memory is not counted (see its `note`).
    """
    chosen = config_of(config, **given)
    return work_out(_with_settings(chosen))


@takes_given
def doctor(
    config: ConfigLike,
    *,
    only: Collection[str] = (),
    known: Sequence[str] = (),
    card: float | None = None,
    progress: Callable[[str], object] = lambda name: None,
    **given: Unpack[Given],
) -> Checkup:
    """Examine a config before hours are spent on it -> what was found (docs/doctor.md).

    `only` names sections of the examination, `known` the findings that are meant so; `card` has the
    gigabytes of a card to fit; `progress` gets the name of each section as it begins.
    """
    chosen = config_of(config, **given)
    return examine(chosen, only=only, known=known, card=card, progress=progress)


@takes_given
def compare(
    configs: Sequence[ConfigLike],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    nfe: float = 60_000,
    seconds: float = 90,
    points: int = 2,
    lr_search: Sequence[float] = (),
    search_seed: int = 100,
    search_share: float = 0.5,
    search_prompts: str = "",
    search_images: int = 0,
    runs: str | Path = "runs/compare",
    out: str | Path = "runs/compare/result.json",
    processes: int = 1,
    quiet: bool = False,
    **given: Unpack[Given],
) -> Result:
    """Train configs x seeds on equal budgets -> the result with its statistics, also in `out`.

    Model, prompts, rewards, overrides and sections hold for all configs; the other arguments are
    those of ``flowrl compare`` (docs/compare.md). `processes` above 1 needs a script whose own work
    stands below ``if __name__ == "__main__"``. The call goes on after a stop, and adds to what is
    there. Raises as `run_comparison` does.
    """
    _check_configs(configs)
    _check_numbers(nfe=nfe, seconds=seconds, points=points, processes=processes)
    own = _whole(seeds, "seeds", "(0, 1, 2)")
    folder = folder_of(runs, "runs")
    chosen = _for_runs(configs, given, folder, processes, quiet=quiet)
    chosen_by = (search_share, search_prompts, search_images)
    search = Search(tuple(lr_search), search_seed, *chosen_by) if lr_search else None
    what = Comparison(
        configs=tuple(chosen),
        seeds=own,
        budgets=Budgets(nfe, seconds, points),
        runs=folder,
        out=Path(out),
        search=search,
        processes=processes,
        given=chosen,
        track=trackers_given(given.get("track", ())),
    )
    return run_comparison(what, quiet=quiet)


@takes_given
def tune(
    config: ConfigLike,
    space: Mapping[str, Any] | Sequence[str],
    *,
    trials: int = 0,
    search: Literal["tpe", "random", "grid"] | None = None,
    search_seed: int = 0,
    pruner: Literal["none", "median", "hyperband"] = "none",
    points: int | None = None,
    seeds: Sequence[int] = (100,),
    nfe: float = 60_000,
    out: str | Path = "runs/tune",
    processes: int = 1,
    quiet: bool = False,
    **given: Unpack[Given],
) -> dict[str, Any]:
    """Search the settings that serve a config best, with Optuna, on equal budgets -> the result,
    also in the folder `out` with the best trial as ``best.yaml``.

    `space` has what each key may be, ``{"optimizer.lr": [1e-5, 1e-4], "loss.beta": "0.1..1 log"}``,
    or texts as of ``flowrl tune --try``. The other arguments are those of `train` and of
    ``flowrl tune``; `search` and its seed are its ``--sampler``, a word that a config has, too.
    """
    _check_numbers(nfe=nfe, trials=trials, processes=processes)
    folder = folder_of(out, "out")
    ((label, chosen),) = _for_runs([config], given, folder, processes, quiet=quiet).items()
    what = Tuning(
        config=label,
        space=read_space(_space(space)),
        seeds=_whole(seeds, "seeds", "(100,)"),
        nfe=nfe,
        out=folder,
        trials=trials,
        sampler=search,
        sampler_seed=search_seed,
        pruner=pruner,
        points=(1 if pruner == "none" else 4) if points is None else points,
        processes=processes,
        given=chosen,
        track=trackers_given(given.get("track", ())),
    )
    return run_tuning(what, quiet=quiet)


def _whole(given: Any, what: str, example: str) -> tuple[int, ...]:
    """Return whole numbers from 0 on. Raises ConfigError for others, and for none."""
    found = tuple(given) if isinstance(given, list | tuple | range) else ()
    if not found or not all(type(one) is int and one >= 0 for one in found):
        raise ConfigError(
            f"{what}: expected whole numbers, as in {what}={example}, got {show(given)}"
        )
    return found


def _check_numbers(**given: Any) -> None:
    """Raise ConfigError for an argument that is no number, or below 0."""
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not value >= 0:
            raise ConfigError(f"{name}: expected a number of 0 or more, got {show(value)}")


def _check_configs(configs: Any) -> None:
    if not isinstance(configs, list | tuple) or not configs:
        raise ConfigError(
            f"configs: expected a list of configs, as in ['shapes/awm', 'my.yaml'], got "
            f"{show(configs)}"
        )


def _space(space: Any) -> list[str]:
    """Return what is tried as texts. Raises ConfigError."""
    if isinstance(space, str):
        return [space]
    if isinstance(space, Mapping):
        texts = []
        for key, values in space.items():
            many = isinstance(values, list | tuple)
            texts.append(f"{key}={','.join(map(str, values)) if many else values}")
        return texts
    if isinstance(space, list | tuple) and all(isinstance(text, str) for text in space):
        return [*space]
    raise ConfigError(
        "space: expected what each key may be, as in {'optimizer.lr': [1e-5, 1e-4]}, got "
        f"{show(space)}"
    )


def _for_runs(
    configs: Sequence[ConfigLike],
    shared: Mapping[str, Any],
    folder: Path,
    processes: int,
    *,
    quiet: bool,
) -> dict[str, Config]:
    """Return configs for the runs in a folder by what they are called, with their lists as files
    there. Raises ConfigError for two of one name, and for objects that other processes do not
    have."""
    # what can be gone through only once is there for every config
    for name in ("prompts", "test_prompts"):
        if isinstance(shared.get(name), Iterator):
            shared = {**shared, name: [*shared[name]]}
    given: dict[str, Config] = {}
    for config in configs:
        chosen = config_of(config, quiet or bool(given), **shared)
        label = os.fspath(config) if isinstance(config, str | os.PathLike) else chosen.name
        if label in given:
            raise ConfigError(
                f"configs: two of them are called {label!r}, and are told apart by their names; "
                "give one another: config.replace(name='mine', ...)"
            )
        objects = python_objects(chosen)
        if processes > 1 and objects:
            raise ConfigError(
                f"processes: {', '.join(objects)} {'are' if len(objects) > 1 else 'is'} an object "
                "of this program, which other processes do not have; leave processes out, or name "
                "what a config can name (plugins)"
            )
        given[label] = keep_lists(chosen, folder)
    return given


def _with_settings(config: Config) -> Config:
    """Return the config with the folder that the settings of a pipeline in memory are in, if there
    is one."""
    made = config.model.function
    if config.model.kwargs.get("path") != PYTHON or not isinstance(made, GivenPipeline):
        return config
    if not made.path:
        return config
    return replace(
        config, model=replace(config.model, kwargs={**config.model.kwargs, "path": made.path})
    )


class Tracked(Part):
    """Tell trackers the metrics of each iteration, after all other parts have added theirs."""

    rank = 1000

    def __init__(self) -> None:
        self.trackers: list[Tracker] = []

    def after_iteration(self, run: Any, it: Any) -> None:
        """Tell them."""
        for tracker in self.trackers:
            tracker.log(run.iteration, it.metrics)


class Trainer(_Trainer):
    """The training loop, an iteration at a time, for programs that do the rest themselves.

    Example::

        trainer = flowrl.Trainer("shapes/flow_grpo", train={"prompts": 4})
        for iteration in range(10):
            metrics = trainer.step()
    """

    @takes_given
    def __init__(
        self,
        config: ConfigLike,
        **given: Unpack[Given],
    ) -> None:
        """Arguments are those of `train`; trackers are told the metrics of each step, and close
        with the trainer or the program. Raises as `train` does before anything is trained."""
        callbacks, track = parts_given(given.pop("callbacks", ())), given.get("track", ())
        chosen = config_of(config, **given)
        names = trackers_given(track)
        told = [Tracked()] if names else []
        super().__init__(chosen, callbacks=[*callbacks, *told])
        # trackers begin once nothing is refused any more
        for part in told:
            part.trackers = open_trackers(names, None, chosen.to_dict())
            weakref.finalize(self, _close, part.trackers)


def _close(trackers: Sequence[Tracker]) -> None:
    """Let trackers write what they still have."""
    for tracker in trackers:
        tracker.close()
