"""Experiment trackers that a run also tells its metrics: wandb, trackio, swanlab.

What they hold is in the run folder, too. So one that fails is left out with a message, and the run
goes on. Whether they talk to a server is for them to say: ``WANDB_MODE=offline``,
``SWANLAB_MODE=offline``; trackio stays on this machine unless it is given a Space.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from flowrl.core.errors import ConfigError, unknown
from flowrl.core.installation import install
from flowrl.core.pixels import to_bytes
from flowrl.runs.folder import read_object

PROJECT = "flowrl"


class Open(NamedTuple):
    """A tracker that has begun."""

    log: Callable[[Mapping[str, Any], int], object]  # values, iteration
    image: Callable[[Any], Any]  # uint8 [H, W, 3] -> what `log` takes
    close: Callable[[], object]


class Tracker:
    """One tracker of a run; its first fault ends it and not the run."""

    def __init__(self, name: str, run: Open, say: Callable[[str], object]) -> None:
        self.name, self._run, self._say = name, run, say
        self._ended = False

    def log(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Tell the numbers of an iteration."""
        known = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self._try(lambda: self._run.log(known, iteration))

    def image(self, name: str, one: Tensor, iteration: int) -> None:
        """Show an image [3, H, W] in [0, 1]."""
        levels = to_bytes(one.detach().cpu()).permute(1, 2, 0).numpy()
        self._try(lambda: self._run.log({name: self._run.image(levels)}, iteration))

    def close(self) -> None:
        """Let the tracker write what it still has; can be called twice."""
        self._try(self._run.close)
        self._ended = True

    def _try(self, work: Callable[[], object]) -> None:
        if self._ended:
            return
        try:
            work()
        except Exception as error:  # whatever a foreign package raises
            self._ended = True
            self._say(_fault(self.name, error))


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not known or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"track: {unknown(name, TRACKERS, 'tracker')}")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name is no package
            raise ConfigError(f"track: {name} is not installed: {install(name)}")


def open_trackers(
    names: Sequence[str], run: Path, config: Mapping[str, Any], say: Callable[[str], object]
) -> list[Tracker]:
    """Begin trackers for a run; one that cannot begin is left out with a message."""
    found = []
    for name in names:
        try:
            found.append(Tracker(name, TRACKERS[name](run, config), say))
        except Exception as error:
            say(_fault(name, error))
    return found


def _fault(name: str, error: Exception) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{name}: {text}; the run goes on without it"


def _id(run: Path) -> str:
    """Return the name under which a run goes on when it is resumed."""
    found = read_object(run, "environment.json")
    begun = f"{run.resolve()} {sorted(found.items())}"
    return hashlib.blake2b(begun.encode(), digest_size=10).hexdigest()


def _wandb(run: Path, config: Mapping[str, Any]) -> Open:
    import wandb

    begun = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=run.resolve().name,
        id=_id(run),
        resume="allow",
        dir=str(run),
        config=dict(config),
    )
    return Open(lambda values, at: begun.log(dict(values), step=at), wandb.Image, begun.finish)


def _trackio(run: Path, config: Mapping[str, Any]) -> Open:
    import trackio

    name = f"{run.resolve().name}-{_id(run)[:6]}"
    begun = trackio.init(project=PROJECT, name=name, config=dict(config), resume="allow")
    return Open(lambda values, at: begun.log(dict(values), step=at), trackio.Image, trackio.finish)


def _swanlab(run: Path, config: Mapping[str, Any]) -> Open:
    import swanlab

    begun = swanlab.init(
        project=PROJECT,
        experiment_name=run.resolve().name,
        config=dict(config),
        logdir=str(run / "swanlab"),
    )
    return Open(lambda values, at: begun.log(dict(values), step=at), swanlab.Image, swanlab.finish)


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Open]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "swanlab": _swanlab,
}
"""Name of a tracker, its package and its extra -> what begins it."""
