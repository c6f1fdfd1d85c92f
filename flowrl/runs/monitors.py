"""What is watched while a run trains: what the monitors look for in an iteration and in the
held-out evaluations, what they found, and what is done about it: stop, go back, hold back."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.sections import (
    AdaptiveKl,
    DiversityMonitor,
    DriftMonitor,
    GradientsMonitor,
    HackingMonitor,
    ImagesMonitor,
    MonitorsConfig,
    PlateauMonitor,
    PromptsMonitor,
    RatioMonitor,
    ZeroStdMonitor,
)
from flowrl.core.errors import CheckpointError
from flowrl.core.files import write_text
from flowrl.evaluation.reward_set import LOOKS
from flowrl.runs.folder import FINDINGS, Rows, read_rows
from flowrl.runs.gain import Row, best_first, score_of, scored_first
from flowrl.runs.log import Log
from flowrl.training import checkpoint
from flowrl.training.checkpoint_state import MOST_KL
from flowrl.training.trainer import Trainer


class Alarm(NamedTuple):
    """What is wrong, with its numbers, and what to change: a sentence each."""

    what: str
    advice: str


@dataclass(frozen=True)
class MonitorFinding:
    """Something that a monitor found."""

    iteration: int  # finished iterations
    monitor: str
    what: str  # one sentence with its numbers
    advice: str  # what to change
    action: str  # what was done about it

    def text(self) -> str:
        """Return the finding as the console shows it."""
        return f"monitor {self.monitor}: {self.what}. {self.advice}"


def append_findings(run: Path, findings: Sequence[MonitorFinding]) -> None:
    """Write findings below those that are there. Raises RunError."""
    if findings:
        _write(run, [*read_rows(run, FINDINGS), *map(asdict, findings)])


def keep_first(run: Path, count: int) -> None:
    """Keep the first `count` findings: the others are of iterations that are done anew. The file is
    there from then on, also without any."""
    _write(run, read_rows(run, FINDINGS)[:count])


def _write(run: Path, rows: Rows) -> None:
    write_text(run / FINDINGS, "".join(json.dumps(row) + "\n" for row in rows))


Metrics = Mapping[str, float]
Memory = dict[str, Any]
FIRST = 3  # iterations that say how a run began


SURE = 2.33  # standard errors; chance alone exceeds them once in a hundred times


def look(monitors: MonitorsConfig, metrics: Metrics, memory: Memory) -> dict[str, Alarm | None]:
    """Ask every monitor that is on about an iteration, and remember what it needs later; one with a
    patience speaks after so many iterations in a row."""
    start, found = _start(metrics, memory), dict[str, Alarm | None]()
    for name, check in CHECKS.items():
        options = getattr(monitors, name)
        if options:
            found[name] = check(options, metrics, start)
            if hasattr(options, "patience"):
                found[name] = _lasting(name, found[name], options.patience, memory)
    return found


def diversity(options: DiversityMonitor, metrics: Metrics, start: Metrics) -> Alarm | None:
    """Say so if the images of a prompt are much more alike than at the start."""
    now, then = metrics.get("diversity"), start.get("diversity", 0.0)
    if now is None or now >= options.floor * then:
        return None
    return Alarm(
        f"the diversity within prompts fell from {then:.3f} to {now:.3f}, below "
        f"{options.floor:g} of what it was",
        "The policy collapses: add a kl section or raise its beta, lower optimizer.lr, or take "
        "noise_scale up",
    )


def image_looks(options: ImagesMonitor, metrics: Metrics, start: Metrics) -> Alarm | None:
    """Say so if the images do not look as they did at the start."""
    said = []
    for name in LOOKS:
        now, then = metrics.get(name), start.get(name, 0.0)
        most = getattr(options, name)
        if now is None or then <= 0:
            continue
        low = then / most
        if name == "grid":  # less of it is no harm
            low = 0.0
        if not low <= now <= then * most:
            said.append(f"{name} from {then:.3f} to {now:.3f}")
    if not said:
        return None
    return Alarm(
        f"the look of the images changed: {', '.join(said)}",
        "Look at the samples: a reward that likes this is being hacked; add what it overlooks, or "
        "a kl section",
    )


def ratio(options: RatioMonitor, metrics: Metrics, start: Metrics) -> Alarm | None:
    """Say so if ratios or clipping are far from healthy at some denoising step."""
    said = []
    # before the first update the ratio has to be 1
    gap = metrics.get("on_policy_gap", 0.0)
    if gap > options.gap:
        said.append(f"on_policy_gap {gap:.3g} is more than {options.gap:g}")
    # the worst denoising step counts, since a mean over steps would hide it
    for prefix, most in (("ratio_std/step", options.spread), ("clip_frac/step", options.clip)):
        steps = {name: value for name, value in metrics.items() if name.startswith(prefix)}
        worst = max(steps, key=steps.__getitem__, default=None)
        if worst is not None and steps[worst] > most:
            said.append(f"{worst} {steps[worst]:.3g} is more than {most:g}")
    if not said:
        return None
    return Alarm(
        "; ".join(said),
        "A gap is a difference between sampling and training: make train.rollout_batch equal to "
        "train.micro_batch, or take float32. Spread and clipping: lower optimizer.lr or "
        "train.updates, and keep noise off the last steps (plan.ode_last)",
    )


def gradients(options: GradientsMonitor, metrics: Metrics, start: Metrics) -> Alarm | None:
    """Say so if an optimizer step had a gradient far larger than those before."""
    count = int(metrics.get("grad_outliers", 0.0))
    if not count:
        return None
    made = "made all the same"
    if options.action == "skip":
        made = "left out"
    return Alarm(
        f"{count} optimizer steps had a gradient norm of more than {options.factor:g} times the "
        f"median before, and were {made}",
        "One is harmless; if they come back, lower optimizer.lr or train.max_grad_norm",
    )


def zero_std(options: ZeroStdMonitor, metrics: Metrics, start: Metrics) -> Alarm | None:
    """Say so if most prompts have images that are all equally good."""
    share = metrics.get("zero_std", 0.0)
    if share <= options.share:
        return None
    return Alarm(
        f"the images of {share:.0%} of the prompts are all equally good",
        "Nothing is learnt from them: take harder or easier prompts, a finer reward, a larger "
        "train.group, or more noise",
    )


def prompts(options: PromptsMonitor, metrics: Metrics, start: Metrics) -> Alarm | None:
    """Say so if few prompts give all of the gradient."""
    entropy = metrics.get("prompt_entropy", 1.0)
    # where nothing is trained there is nothing to share out
    if entropy >= options.entropy or metrics.get("trained", 1.0) == 0:
        return None
    return Alarm(
        f"few prompts teach: the entropy of their shares is {entropy:.2f} of the largest possible",
        "The others have equal rewards, or one prompt has far larger advantages: divide by the std "
        "of each prompt, or take other prompts",
    )


CHECKS: dict[str, Callable[[Any, Metrics, Metrics], Alarm | None]] = {
    "diversity": diversity,
    "images": image_looks,
    "gradients": gradients,
    "ratio": ratio,
    "zero_std": zero_std,
    "prompts": prompts,
}
"""Monitor of iterations -> what it looks for in one, beside how the run began."""


def _start(metrics: Metrics, memory: Memory) -> dict[str, float]:
    """Remember the first iterations -> the mean of each metric in them."""
    first: dict[str, list[float]] = memory.setdefault("start", {})
    for name in ("diversity", *LOOKS):
        value = metrics.get(name)
        if value is not None and math.isfinite(value) and len(first.get(name, ())) < FIRST:
            first.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in first.items()}


def _lasting(name: str, alarm: Alarm | None, patience: int, memory: Memory) -> Alarm | None:
    """Let an alarm through once it has lasted for `patience` iterations."""
    counts: dict[str, int] = memory.setdefault("lasting", {})
    if alarm is None:
        counts[name] = 0
        return None
    counts[name] = counts.get(name, 0) + 1
    if counts[name] < patience:
        return None
    return alarm


def plateau(options: PlateauMonitor, rows: Sequence[Row]) -> Alarm | None:
    """Say so if the last `patience` evaluations have brought no gain."""
    since = since_gain(rows, options.min_gain)
    if since < options.patience:
        return None
    name, last = rows[-1]["score"], score_of(rows[-1])
    best = best_first(rows)[0]
    gain = ""
    if options.min_gain:
        gain = f" of more than {options.min_gain:g}"
    return Alarm(
        f"no gain{gain} of the held-out {name} in {since} evaluations: {last:.3f} after "
        f"{rows[-1]['iteration']} iterations, {score_of(best):.3f} after {best['iteration']}",
        "More iterations of the same will hardly help: take the best checkpoint, lower "
        "optimizer.lr, or give it more prompts or a larger group",
    )


def since_gain(rows: Sequence[Row], min_gain: float) -> int:
    """Count the evaluations since the score last rose by more than `min_gain` above all before.

    Only those of the last one's score count. Small gains add up: the height to beat is that of the
    last gain.
    """
    top, since = -float("inf"), 0
    for row in rows:
        score = score_of(row)
        if score is None or row.get("score") != rows[-1].get("score"):
            continue
        if score > top + min_gain:
            top, since = score, 0
        else:
            since += 1
    return since


def noise_of_change(one: Row, two: Row) -> float:
    """Return the standard error of the change of a held-out score between two evaluations.

    Both are of the same prompts and noises, so it is that of the paired differences per prompt,
    `sqrt(sum over tasks of var / n) / tasks`, with each task's own variance. 0 where the rows do
    not hold the scores of the same prompts.
    """
    first, second = one.get("by_prompt") or {}, two.get("by_prompt") or {}
    variance = 0.0
    for task in first:
        change = []
        for old, new in zip(first[task], second.get(task, ()), strict=False):
            if old is not None and new is not None:
                change.append(new - old)
        if len(change) > 1:
            variance += statistics.variance(change) / len(change)
    return math.sqrt(variance) / max(len(first), 1)


def hacking(
    options: HackingMonitor, rows: Sequence[Row], rewards: Mapping[str, float]
) -> Alarm | None:
    """Say so if the held-out score has fallen while the training reward has risen.

    rewards: {iteration of an evaluation: mean training reward of the iterations before it}; that of
    the evaluation before training is of the first iteration, whose images are the base model's.
    A fall that chance alone brings about once in a hundred times is none: the best of several
    evaluations is also the luckiest.
    """
    name, last = rows[-1]["score"], rows[-1]
    known, of = {}, dict[int, Row]()
    for row in rows:
        same = row.get("score") == name and score_of(row) is not None
        if same and str(row["iteration"]) in rewards:
            known[row["iteration"]], of[row["iteration"]] = score_of(row) or 0.0, row
    if last["iteration"] not in known or len(known) < 2:
        return None
    # the best one before, the earliest of equals
    now = known.pop(last["iteration"])
    best = max(sorted(known), key=known.__getitem__)
    then, after = rewards[str(best)], rewards[str(last["iteration"])]
    fall = known[best] - now
    if fall < options.drop or after <= then or fall < SURE * noise_of_change(of[best], last):
        return None
    return Alarm(
        f"the held-out {name} fell from {known[best]:.3f} after {best} iterations to {now:.3f}, "
        f"while the training reward rose from {then:.3f} to {after:.3f}",
        "The reward is being hacked: look at the samples; add what the reward overlooks, a kl "
        "section or a lower optimizer.lr, or set monitors.hacking.action to rollback",
    )


def drift(options: DriftMonitor, row: Row) -> Alarm | None:
    """Say so if the velocity is too far from the base model's."""
    moved = row.get("drift")
    if not isinstance(moved, float) or moved <= options.limit:
        return None
    return Alarm(
        f"the velocity has moved by {moved:.2f} of its size from the base model's, more than "
        f"{options.limit:g}",
        "Add a kl section or raise its beta, lower optimizer.lr, or stop earlier; "
        "eval.tuned below 1 leaves the last steps to the base model",
    )


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
    before its checkpoint is saved, an evaluation after it, and a run that goes on from there looks
    at it again: so a resumed run finds and does what an unbroken one would have.
    """

    def __init__(self, trainer: Trainer, run: Path, log: Log) -> None:
        self.trainer, self.run, self.log = trainer, run, log
        self.rows: Sequence[Row] = []  # the evaluations up to now
        for key, start in START.items():
            trainer.state.memory.setdefault(key, type(start)(start))
        # findings from after the checkpoint that the run goes on from are made anew
        world, count = trainer.world, trainer.state.memory["findings"]
        world.by_main(partial(keep_first, run, count))

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
        if action not in ("stop", "rollback"):
            return None
        return found

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
            resting = name in CHECKS and now < rest.get(name, 0)
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
        if fresh:
            self.trainer.world.by_main(partial(append_findings, self.run, fresh))
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
        done = f" (back to iteration {at})"
        if at is None:
            action, done = "warn", " (nothing to go back to)"
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
    # from the best one down, until a checkpoint is whole; other rewards have other scales
    for row in scored_first(rows):
        folder = checkpoint.checkpoint_folder(run, row["iteration"])
        try:
            checkpoint.verify(folder)
        except CheckpointError:
            continue
        # load puts these back, too, but iterations and the monitors' memory go on
        now, memory = trainer.iteration, trainer.state.memory
        learned: dict[str, Any] = {**trainer.reward_set.learned_rewards()}
        rounds = {name: r.rounds for name, r in learned.items() if hasattr(r, "rounds")}
        trainer.world.together(partial(trainer.load, folder))
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
