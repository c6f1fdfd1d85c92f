"""What is done about a finding: stop, go back, hold back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.config.sections import AdaptiveKl
from flowrl.core.errors import CheckpointError
from flowrl.runs.best import Row, score_of
from flowrl.runs.monitors.findings import Alarm, MonitorFinding
from flowrl.training import checkpoint
from flowrl.training.checkpoint_state import MOST_KL
from flowrl.training.run import kl_factor, lr_factor
from flowrl.training.trainer import Trainer


def act(
    trainer: Trainer, run: Path, rows: Sequence[Row], name: str, alarm: Alarm
) -> MonitorFinding:
    """Do what the config says about an alarm -> what was found and done.

    At the end of a run nothing is left to do, and where there is nothing to go back to the run goes
    on: both are a warning.
    """
    # nothing left to act on, or gone back too often: warn or stop instead
    now, memory = trainer.iteration, trainer.memory
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
        memory["lr_factor"] = lr_factor(memory) * options.lower_lr
    if action == "raise_kl":
        memory["kl_factor"] = min(kl_factor(memory) * options.raise_kl, MOST_KL)
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
        now, memory = trainer.iteration, trainer.memory
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
    value, factor = metrics.get("kl"), kl_factor(memory)
    if value is None:
        return
    if value > options.target * options.band:
        memory["kl_factor"] = min(factor * options.step, MOST_KL)
    if value < options.target / options.band:
        memory["kl_factor"] = max(factor / options.step, 1 / MOST_KL)
