"""The training loop for programs that do the rest themselves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Unpack

from flowrl.api.arguments import ConfigLike, Given, config_of, parts_given, takes_given
from flowrl.core.part import Part
from flowrl.runs.trackers import Tracker, open_trackers, trackers_given
from flowrl.training.trainer import Trainer as _Trainer


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
