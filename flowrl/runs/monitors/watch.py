"""Watch a run: ask the monitors, tell what they found, do what the config says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.runs.best import Row
from flowrl.runs.monitors import iterations
from flowrl.runs.monitors.actions import act, follow_kl
from flowrl.runs.monitors.evaluations import drift, hacking, plateau
from flowrl.runs.monitors.findings import Alarm, append_findings, keep_first
from flowrl.runs.save_on_error import Log
from flowrl.training.trainer import Trainer

START: dict[str, Any] = {
    "judged": -1,
    "findings": 0,
    "firing": [],
    "told": [],
    "rewards": {},
    "rest": {},
}
REST = 10  # iterations that a monitor of iterations is silent after it has acted


class Watch:
    """The monitors of a run.

    What they remember is `trainer.memory`, which checkpoints keep. An iteration is looked at before
    its checkpoint is saved, an evaluation after it, and a run that goes on from there looks at it
    again: so a resumed run finds and does what an unbroken one would have.
    """

    def __init__(self, trainer: Trainer, run: Path, log: Log) -> None:
        self.trainer, self.run, self.log = trainer, run, log
        self.rows: Sequence[Row] = []  # the evaluations up to now
        for key, start in START.items():
            trainer.memory.setdefault(key, type(start)(start))
        # findings from after the checkpoint that the run goes on from are made anew
        world, count = trainer.world, trainer.memory["findings"]
        world.together(lambda: keep_first(run, count) if world.main else None)

    @property
    def stopped(self) -> dict[str, Any] | None:
        """Return what has ended the run: monitor, iteration, why; None while it goes on.

        A run whose monitor does not stop it any more goes on.
        """
        found: dict[str, Any] | None = self.trainer.memory.get("stopped")
        if found is None:
            return None
        action = self.trainer.config.monitors.action_of(found["monitor"])
        return found if action in ("stop", "rollback") else None

    def iterated(self, metrics: Mapping[str, float]) -> None:
        """Look at the iteration that was just finished."""
        trainer, memory = self.trainer, self.trainer.memory
        monitors = trainer.config.monitors
        # the training reward since the last evaluation; that of the base model
        reward = metrics.get("reward")
        if reward is not None and reward == reward:
            memory["rewards"].setdefault("0", reward)
            memory.setdefault("stretch", []).append(reward)
        if monitors.adaptive_kl is not None:
            follow_kl(monitors.adaptive_kl, metrics, memory)
        self._settle(iterations.look(monitors, metrics, memory))

    def evaluated(self, rows: Sequence[Row]) -> None:
        """Look at the evaluations of a run, if the last one is of now and was not looked at."""
        # no evaluation of this iteration, or one that was looked at already
        memory, now = self.trainer.memory, self.trainer.iteration
        self.rows = rows
        if not rows or rows[-1]["iteration"] != now or memory["judged"] >= now:
            return
        memory["judged"] = now
        # mean training reward since the last evaluation, which hacking is seen against
        stretch = memory.pop("stretch", [])
        if stretch and now:
            memory["rewards"][str(now)] = sum(stretch) / len(stretch)
        # only the monitors that the config has
        monitors = self.trainer.config.monitors
        found: dict[str, Alarm | None] = {}
        if monitors.hacking is not None:
            found["hacking"] = hacking(monitors.hacking, rows, memory["rewards"])
        if monitors.drift is not None:
            found["drift"] = drift(monitors.drift, rows[-1])
        if monitors.plateau is not None:
            found["plateau"] = plateau(monitors.plateau, rows)
        self._settle(found)

    def _settle(self, alarms: dict[str, Alarm | None]) -> None:
        """Tell of each alarm when it begins, and do what is to be done about it."""
        memory, fresh, now = self.trainer.memory, [], self.trainer.iteration
        for name, alarm in alarms.items():
            firing, rest = memory["firing"], memory["rest"]
            if alarm is None and name in firing:
                firing.remove(name)
            resting = name in iterations.ALARMS and now < rest.get(name, 0)
            if alarm is not None and name not in firing and not resting:
                firing.append(name)
                found = act(self.trainer, self.run, self.rows, name, alarm)
                fresh.append(found)
                # what was changed needs time to show; if it was not enough, the monitor speaks anew
                if found.action in ("lower_lr", "raise_kl", "rollback"):
                    firing.remove(name)
                    rest[name] = now + REST
                # a warning once, what was done always
                if found.action not in ("warn", "skip") or name not in memory["told"]:
                    self.log.say(found.text())
                    memory["told"] = [*dict.fromkeys([*memory["told"], name])]
        # the file has as many lines as the memory says
        world = self.trainer.world
        if fresh:
            world.together(lambda: append_findings(self.run, fresh) if world.main else None)
            memory["findings"] += len(fresh)
