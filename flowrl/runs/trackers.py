"""Experiment trackers (TensorBoard, wandb, trackio, swanlab): told what a run folder holds, and
what a program without a folder makes.

One that fails is left out with a message, and the run goes on. Whether they talk to a server is for
them to say: ``WANDB_MODE=offline``, ``SWANLAB_MODE=offline``; trackio stays on this machine unless
it is given a Space.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from flowrl.config.values import show
from flowrl.core.errors import ConfigError, install, unknown
from flowrl.core.files import is_finite_number
from flowrl.core.pixels import to_bytes
from flowrl.core.processes import world
from flowrl.runs.folder import ENVIRONMENT, TENSORBOARD, read_object

PROJECT, BOARD = "flowrl", "tensorboard"
Say = Callable[[str], object]


class Open(NamedTuple):
    """A tracker that has begun."""

    log: Callable[[Mapping[str, Any], int], object]  # values, iteration
    image: Callable[[Any], Any]  # uint8 [H, W, 3] -> what `log` takes
    close: Callable[[], object]


class Place(NamedTuple):
    """What a tracker files its values under."""

    name: str
    key: str  # under which a run goes on when it is resumed; "" of what has no folder
    folder: Path
    begun: int | None  # the first iteration that is told again; None of a new run


class Tracker:
    """One tracker; its first fault ends it and not the run."""

    def __init__(self, name: str, run: Open, say: Say) -> None:
        self.name, self._run, self._say = name, run, say
        self._ended = False

    def log(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Tell the numbers of an iteration."""
        known = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self._try(self._run.log, known, iteration)

    def image(self, name: str, one: Tensor, iteration: int) -> None:
        """Show an image [3, H, W] in [0, 1]."""
        levels = to_bytes(one.detach().cpu()).permute(1, 2, 0).numpy()
        self._try(self._show, name, levels, iteration)

    def close(self) -> None:
        """Let the tracker write what it still has; can be called twice."""
        self._try(self._run.close)
        self._ended = True

    def _show(self, name: str, levels: Any, iteration: int) -> None:
        self._run.log({name: self._run.image(levels)}, iteration)

    def _try(self, work: Callable[..., object], *given: Any) -> None:
        if self._ended:
            return
        try:
            work(*given)
        except Exception as error:  # whatever a foreign package raises
            self._ended = True
            self._say(_fault(self.name, error))


def trackers_given(track: Any) -> tuple[str, ...]:
    """Return the names of trackers; one alone is a list of one. Raises ConfigError for what is no
    list of names, and for a tracker that is not known or not installed."""
    if isinstance(track, str):
        track = [track]
    if not isinstance(track, list | tuple):
        raise ConfigError(f"track: expected a list of names, as in ['wandb'], got {show(track)}")
    for name in track:
        if name not in TRACKERS:
            raise ConfigError(f"track: {unknown(name, TRACKERS, 'tracker')}")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name is no package
            raise ConfigError(f"track: {name} is not installed: {install(name)}")
    return tuple(track)


def open_trackers(
    names: Sequence[str],
    run: Path | None,
    config: Mapping[str, Any],
    say: Say | None = None,
    begun: int | None = None,
) -> list[Tracker]:
    """Begin trackers in the first process, for a run folder or for a config without one; one that
    cannot begin is left out with a message, on stderr unless `say` is there. `begun`: the first
    iteration that a run which goes on tells again."""
    if not names or not world().main:
        return []
    tell = say or partial(print, file=sys.stderr)
    place = Place(str(config.get("name", PROJECT)), "", Path(), begun)
    if run is not None:
        place = Place(run.resolve().name, _key(run), run, begun)
    found, known = [], {BOARD: _tensorboard, **TRACKERS}
    for name in names:
        try:
            found.append(Tracker(name, known[name](place, config), tell))
        except Exception as error:
            tell(_fault(name, error))
    return found


def eval_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation (a line of ``eval.jsonl``) for trackers and TensorBoard:
    eval/NAME of each reward, the ends of the headline's interval, eval/task/NAME of each task."""
    low, high = row.get("interval") or (None, None)
    found = {str(row.get("score")): row.get(str(row.get("score"))), "low": low, "high": high}
    found |= row.get("rewards") or {}
    for task, values in (row.get("tasks") or {}).items():
        found[f"task/{task}"] = values.get("mean")
    found["drift"] = row.get("drift")
    return {f"eval/{name}": value for name, value in found.items() if is_finite_number(value)}


def _fault(name: str, error: Exception) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{name}: {text}; the run goes on without it"


def _key(run: Path) -> str:
    found = read_object(run, ENVIRONMENT)
    begun = f"{run.resolve()} {sorted(found.items())}"
    return hashlib.blake2b(begun.encode(), digest_size=10).hexdigest()


def _tensorboard(place: Place, config: Mapping[str, Any]) -> Open:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(place.folder / TENSORBOARD), purge_step=place.begun)

    def log(values: Mapping[str, Any], at: int) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                board.add_scalar(name, value, at)
            else:
                board.add_image(name, value, at, dataformats="HWC")

    return Open(log, _as_it_is, board.close)


def _as_it_is(levels: Any) -> Any:
    return levels


def _wandb(place: Place, config: Mapping[str, Any]) -> Open:
    import wandb

    again = {}
    if place.key:
        again = {"id": place.key, "resume": "allow"}
    begun = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=place.name,
        dir=str(place.folder),
        config=dict(config),
        **again,
    )
    return Open(partial(_log_step, begun), wandb.Image, begun.finish)


def _log_step(run: Any, values: Mapping[str, Any], at: int) -> None:
    run.log(dict(values), step=at)


def _trackio(place: Place, config: Mapping[str, Any]) -> Open:
    import trackio

    # without a folder each time is a run of its own, which trackio names
    again = {}
    if place.key:
        again = {"name": f"{place.name}-{place.key[:6]}", "resume": "allow"}
    begun = trackio.init(project=PROJECT, config=dict(config), **again)
    return Open(partial(_log_step, begun), trackio.Image, trackio.finish)


def _swanlab(place: Place, config: Mapping[str, Any]) -> Open:
    import swanlab

    begun = swanlab.init(
        project=PROJECT,
        experiment_name=place.name,
        config=dict(config),
        logdir=str(place.folder / "swanlab"),
    )
    return Open(partial(_log_step, begun), swanlab.Image, swanlab.finish)


TRACKERS: dict[str, Callable[[Place, Mapping[str, Any]], Open]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "swanlab": _swanlab,
}
"""Name of a tracker, its package and its extra -> what begins it."""
