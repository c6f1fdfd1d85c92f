"""Watch a run: ask the monitors, tell what they found, do what the config says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.runs.best import Row
from flowrl.runs.monitors.findings import Finding, append, keep
from flowrl.runs.monitors.plateau import Alarm, plateau
from flowrl.runs.rescue import Log
from flowrl.training.trainer import Trainer


class Watch:
    """The monitors of a run.

    What they remember is `trainer.memory`, which checkpoints keep. An evaluation is looked at after
    the checkpoint of its iteration is saved, and a run that goes on from there looks at it again:
    so a resumed run finds and does what an unbroken one would have.
    """

    def __init__(self, trainer: Trainer, run: Path, log: Log) -> None:
        self.trainer, self.run, self.log = trainer, run, log
        memory = trainer.memory
        for key, start in (("judged", -1), ("findings", 0), ("firing", []), ("told", [])):
            memory.setdefault(key, start)
        # findings from after the checkpoint that the run goes on from are made anew
        world, count = trainer.world, memory["findings"]
        world.together(lambda: keep(run, count) if world.main else None)

    @property
    def stopped(self) -> dict[str, Any] | None:
        """Return what has ended the run: monitor, iteration, why; None while it goes on.

        A run whose monitor does not stop it any more goes on.
        """
        found: dict[str, Any] | None = self.trainer.memory.get("stopped")
        if found is None or self._action(found["monitor"]) != "stop":
            return None
        return found

    def evaluated(self, rows: Sequence[Row]) -> None:
        """Look at the evaluations of a run, if the last one is of now and was not looked at."""
        memory, now = self.trainer.memory, self.trainer.iteration
        if not rows or rows[-1]["iteration"] != now or memory["judged"] >= now:
            return
        memory["judged"] = now
        monitors = self.trainer.config.monitors
        found = {}
        if monitors.plateau is not None:
            found["plateau"] = plateau(monitors.plateau, rows)
        self._settle(found)

    def _settle(self, alarms: dict[str, Alarm | None]) -> None:
        """Tell of each alarm when it begins, and do what is to be done about it."""
        firing, fresh = self.trainer.memory["firing"], []
        for name, alarm in alarms.items():
            if alarm is None and name in firing:
                firing.remove(name)
            if alarm is not None and name not in firing:
                firing.append(name)
                fresh.append(self._act(name, alarm))
        # the file has as many lines as the memory says
        world = self.trainer.world
        world.together(lambda: append(self.run, fresh) if world.main else None)
        self.trainer.memory["findings"] += len(fresh)

    def _act(self, name: str, alarm: Alarm) -> Finding:
        trainer, memory = self.trainer, self.trainer.memory
        now, action = trainer.iteration, self._action(name)
        # at the end there is nothing left to do
        if now >= trainer.config.train.iterations:
            action = "warn"
        found = Finding(now, name, alarm.what, alarm.advice, action)
        if action != "warn" or name not in memory["told"]:
            self.log.say(found.text())
            memory["told"] = [*memory["told"], name]
        if action == "stop":
            memory["stopped"] = {"monitor": name, "iteration": now, "why": alarm.what}
        return found

    def _action(self, name: str) -> str:
        monitor = getattr(self.trainer.config.monitors, name, None)
        return monitor.action if monitor is not None else "warn"
