"""Watch a run: ask the monitors, tell what they found, and do what the config says: stop, go back,
hold back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.config.sections import AdaptiveKl
from flowrl.core.errors import CheckpointError
from flowrl.runs.best import Row, score_of
from flowrl.runs.log import Log
from flowrl.runs.monitors.alarms import (
    ALARMS,
    Alarm,
    MonitorFinding,
    append_findings,
    drift,
    hacking,
    keep_first,
    look,
    plateau,
)
from flowrl.training import checkpoint
from flowrl.training.checkpoint_state import MOST_KL
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

    What they remember is `trainer.state.memory`, which checkpoints keep. An iteration is looked at
    before
    its checkpoint is saved, an evaluation after it, and a run that goes on from there looks at it
    again: so a resumed run finds and does what an unbroken one would have.
    """

    def __init__(self, trainer: Trainer, run: Path, log: Log) -> None:
        self.trainer, self.run, self.log = trainer, run, log
        self.rows: Sequence[Row] = []  # the evaluations up to now
        for key, start in START.items():
            trainer.state.memory.setdefault(key, type(start)(start))
        # findings from after the checkpoint that the run goes on from are made anew
        world, count = trainer.world, trainer.state.memory["findings"]
        world.together(lambda: keep_first(run, count) if world.main else None)

    @property
    def stopped(self) -> dict[str, Any] | None:
        """Return what has ended the run: monitor, iteration, why; None while it goes on.

        A run whose monitor does not stop it any more goes on; so does a resume of one that a
        callback has stopped.
        """
        why = self.trainer.state.stop
        if why:
            return {"monitor": "callback", "iteration": self.trainer.iteration, "why": why}
        found: dict[str, Any] | None = self.trainer.state.memory.get("stopped")
        if found is None:
            return None
        action = self.trainer.config.monitors.action_of(found["monitor"])
        return found if action in ("stop", "rollback") else None

    def iterated(self, metrics: Mapping[str, float]) -> None:
        """Look at the iteration that was just finished."""
        trainer, memory = self.trainer, self.trainer.state.memory
        monitors = trainer.config.monitors
        # the training reward since the last evaluation; that of the base model
        reward = metrics.get("reward")
        if reward is not None and reward == reward:
            memory["rewards"].setdefault("0", reward)
            memory.setdefault("stretch", []).append(reward)
        if monitors.adaptive_kl is not None:
            follow_kl(monitors.adaptive_kl, metrics, memory)
        self._settle(look(monitors, metrics, memory))

    def evaluated(self, rows: Sequence[Row]) -> None:
        """Look at the evaluations of a run, if the last one is of now and was not looked at."""
        # no evaluation of this iteration, or one that was looked at already
        memory, now = self.trainer.state.memory, self.trainer.iteration
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
        memory, fresh, now = self.trainer.state.memory, [], self.trainer.iteration
        for name, alarm in alarms.items():
            firing, rest = memory["firing"], memory["rest"]
            if alarm is None and name in firing:
                firing.remove(name)
            resting = name in ALARMS and now < rest.get(name, 0)
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


def act(
    trainer: Trainer, run: Path, rows: Sequence[Row], name: str, alarm: Alarm
) -> MonitorFinding:
    """Do what the config says about an alarm -> what was found and done.

    At the end of a run nothing is left to do, and where there is nothing to go back to the run goes
    on: both are a warning.
    """
    # nothing left to act on, or gone back too often: warn or stop instead
    now, memory = trainer.iteration, trainer.state.memory
    options = trainer.config.monitors.actions
    action, done = trainer.config.monitors.action_of(name), ""
    if now >= trainer.config.train.iterations and action != "skip":
        action = "warn"
    if action == "rollback" and memory.get("rollbacks", 0) >= options.rollbacks:
        action, done = "stop", f" (after {options.rollbacks} rollbacks)"
    # a rollback repeats its fault unless something changes, so the learning rate falls, too
    if action == "rollback":
        at = go_back(trainer, run, rows)
        action = "warn" if at is None else "rollback"
        done = " (nothing to go back to)" if at is None else f" (back to iteration {at})"
    if action in ("lower_lr", "rollback"):
        trainer.state.lr_factor *= options.lower_lr
    if action == "raise_kl":
        trainer.state.kl_factor = min(trainer.state.kl_factor * options.raise_kl, MOST_KL)
    if action == "stop":
        # kept in checkpoints, so that a resumed run knows that it was stopped
        memory["stopped"] = {"monitor": name, "iteration": now, "why": alarm.what + done}
    return MonitorFinding(now, name, alarm.what + done, alarm.advice, action)


def go_back(trainer: Trainer, run: Path, rows: Sequence[Row]) -> int | None:
    """Put the weights, the optimizer and the rewards of the best checkpoint back -> its iteration;
    None where no checkpoint of an evaluation is there.

    The iterations go on counting, so that the next ones draw other prompts and noise, and with them
    the rounds of rewards that are trained along, which take turns with the policy; what the
    monitors remember stays.
    """
    # evaluations by the headline of now: other rewards have other scales
    known = []
    for row in rows:
        if rows[-1].get("score") == row.get("score") and score_of(row) is not None:
            known.append(row)
    known.sort(key=lambda row: (-(score_of(row) or 0.0), row["iteration"]))
    # from the best one down, until a checkpoint is whole
    for row in known:
        folder = checkpoint.checkpoint_folder(run, row["iteration"])
        try:
            checkpoint.verify(folder)
        except CheckpointError:
            continue
        # load puts these back, too, but iterations and the monitors' memory go on
        now, memory = trainer.iteration, trainer.state.memory
        learned: dict[str, Any] = {**trainer.reward_set.learned_rewards()}
        rounds = {name: r.rounds for name, r in learned.items() if hasattr(r, "rounds")}
        trainer.world.together(lambda there=folder: trainer.load(there))  # type: ignore[misc]
        trainer.state.iteration, trainer.state.memory = now, memory
        trainer.state.intact = True
        for name, count in rounds.items():
            learned[name].rounds = count
        memory["rollbacks"] = memory.get("rollbacks", 0) + 1
        return int(row["iteration"])
    return None


def follow_kl(options: AdaptiveKl, metrics: Mapping[str, float], memory: dict[str, Any]) -> None:
    """Move the weight of the `kl` section where its penalty has left the band around the target.

    The controller of PPO (1707.06347, section 4). *Differs:* steps of `step` per iteration in place
    of 2, since an iteration is a single update here.
    """
    value, factor = metrics.get("kl"), memory.get("kl_factor", 1.0)
    if value is None:
        return
    if value > options.target * options.band:
        memory["kl_factor"] = min(factor * options.step, MOST_KL)
    if value < options.target / options.band:
        memory["kl_factor"] = max(factor / options.step, 1 / MOST_KL)
