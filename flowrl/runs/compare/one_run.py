"""Train one config in a folder until its budgets are used up; and judge the model from before
training, once per folder of runs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowrl.config.load import Config
from flowrl.core.abilities import LearnsNoise
from flowrl.core.devices import free_memory
from flowrl.core.errors import ConfigError, RewardError, RunError
from flowrl.core.files import delete, write_json
from flowrl.core.identity import differences
from flowrl.core.prompts import task_of
from flowrl.evaluation.contents import judged_content
from flowrl.runs.compare.budgets import (
    CLAIM,
    Budgets,
    Spent,
    check_begun,
    check_same_run,
    claim,
    drop_evaluations,
    result,
    spent_at,
)
from flowrl.runs.compare.records import (
    AGAIN,
    BaseFile,
    RunFile,
    check_whose,
    different,
    setting,
    stored,
)
from flowrl.runs.compare.summary import packed
from flowrl.runs.evaluate import eval_weights, evaluate, sample_grid_prompts
from flowrl.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    EVALS,
    RESULT,
    check_lines,
    left_of,
    lock,
    read_rows,
    what_is_there,
    write_evals,
)
from flowrl.runs.log import LOGS, RunLogger, Silence, headline_label
from flowrl.runs.milestones import keep_samples
from flowrl.runs.monitors import follow_kl
from flowrl.runs.stop import Interrupted, Stop
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer

BUDGET_COLUMNS = {"used %": "used", "min left": "minutes_left"}
NAMES = {"nfe": "network evaluations", "seconds": "seconds"}  # of the budgets
clock = time.perf_counter
Say = Callable[[str], object]  # tells the user
Judged = Callable[[Mapping[str, Any]], object]  # is told each evaluation, and may raise


class MethodFailed(RunError):
    """The method broke its own run, by a NaN for example. A full disk or a lost reward is not its
    fault."""


def spend(
    config: Config,
    folder: Path,
    budgets: Budgets,
    *,
    stop: Stop,
    quiet: bool = False,
    judged: Judged | None = None,
    track: Sequence[str] = (),
) -> dict[str, Any]:
    """Train until both budgets are used up -> the result, also in ``result.json``; one that is
    there is returned. `judged` is told each row of ``eval.jsonl``, also those that are there, and
    ends the run by what it raises. `track` names experiment trackers.

    Goes on from the folder's newest whole checkpoint. A run that breaks (RunError) is a result too,
    with its message. Raises Interrupted after Ctrl-C and RewardError after a reward failed or left
    a held-out image unscored, in both cases with a way to go on; ConfigError if the folder holds a
    run of another config or of other budgets, or if one iteration exceeds a budget.
    """
    # what is there already
    check_same_run(folder, config, budgets)
    found = stored(folder, RESULT, RunFile, AGAIN)
    if found:
        check_whose(found, config, folder / RESULT)
        return found
    if stop.asked:
        raise Interrupted("stopped between two runs; the same command goes on")
    with lock(folder, mend="wait for it") as held:
        free_memory()  # of the run before
        start = _newest(folder)
        trainer = Trainer(config)
        if start is not None:
            trainer.load(start)
        claim(folder, config, budgets)
        # the rest of the run
        columns = {
            "reward": "reward",
            headline_label(config.headline): "accuracy",
            **BUDGET_COLUMNS,
        }
        options: dict[str, Any] = {"tensorboard": False, "quiet": quiet, "columns": columns}
        options |= {"track": track, "config": config.to_dict()}
        with RunLogger(folder, trainer.iteration, **options) as log:
            trainer.state.log = log
            log.say(f"{folder}: {config.name}, seed {config.seed}, lr {config.lr:g}")
            run = _BudgetedRun(trainer, folder, budgets, log, judged)
            trainer.encode_ahead()
            try:
                failed = run.train(stop)
            except ConfigError:
                held.leave()  # a folder in which nothing is left goes again
                raise
        found = result(config, folder, failed)
        write_json(folder / RESULT, found)
        return found


def _newest(folder: Path) -> Path | None:
    """Return the checkpoint to go on from; None where no run has begun. Raises RunError where one
    has and its checkpoints are away, or lines of its metrics."""
    check_begun(folder)
    start = checkpoint.latest(folder)
    if start is None and left_of(folder):
        raise RunError(f"{folder}: no whole checkpoint to go on from{what_is_there(folder)}")
    if start is not None:
        check_lines(folder, int(start.name))
    return start


def evaluated(trainer: Trainer) -> dict[str, Any]:
    """Evaluate a trainer's model with the weights that its config's `eval` section asks for; the
    outcomes per image are packed."""
    with _blamed_on_the_method(), eval_weights(trainer):
        row = evaluate(trainer.model, trainer.config, trainer=trainer, outcomes=True)
    return {**row, "outcomes": packed(row["outcomes"])}


@contextmanager
def _blamed_on_the_method() -> Iterator[None]:
    """Turn a RunError inside into MethodFailed; a reward that fails is a RewardError still."""
    try:
        yield
    except RewardError:
        raise
    except RunError as error:
        raise MethodFailed(str(error)) from error


class _BudgetedRun:
    """One run, on its way through its budgets."""

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        budgets: Budgets,
        log: RunLogger,
        judged: Judged | None,
    ) -> None:
        self.trainer, self.folder, self.budgets, self.log = trainer, folder, budgets, log
        self.judged = judged

    def train(self, stop: Stop) -> str | None:
        """Run iterations until both budgets are used up -> what broke the run, or None."""
        try:
            self._iterate(stop)
        except MethodFailed as error:
            return str(error)
        except RewardError as error:  # not the method's fault: nothing is recorded
            raise RewardError(
                f"{error}\n{self.folder} goes on from its newest checkpoint with the same command"
            ) from error
        return None

    def _iterate(self, stop: Stop) -> None:
        trainer, budgets = self.trainer, self.budgets
        spent = spent_at(self.folder, trainer.iteration)
        drop_evaluations(self.folder, spent)
        for row in read_rows(self.folder, EVALS):
            self._tell(row)
        self._judge_if_missed(spent)
        if not spent.iterations:
            self._save()  # so that a line of metrics without a checkpoint is one that is away
        while budgets.used(spent) < 1:
            # one iteration
            before = spent
            metrics, spent = self._step(before)
            self._check_first(spent)
            self._log(metrics, spent)
            # what is due after it
            self._checkpoint(done=budgets.used(spent) == 1)
            self._judge(before, spent)
            if stop.asked and budgets.used(spent) < 1:
                raise Interrupted(
                    f"stopped after iteration {trainer.iteration}, saved {self._save()}; the same "
                    "command goes on"
                )

    def _step(self, before: Spent) -> tuple[dict[str, float], Spent]:
        """Run one iteration -> its metrics and what is used up after it."""
        trainer, began = self.trainer, clock()
        with _blamed_on_the_method():
            metrics = trainer.step()
        adaptive = trainer.config.monitors.adaptive_kl
        if adaptive is not None:  # part of the method; the other monitors have no say here
            follow_kl(adaptive, metrics, trainer.state.memory)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # its last kernels are part of the step
        seconds = clock() - began
        metrics["accuracy"] = metrics[f"reward/{trainer.config.headline}"]
        nfe = before.nfe + metrics["nfe"]
        return metrics, Spent(trainer.iteration, nfe, before.seconds + seconds)

    def _log(self, metrics: dict[str, float], spent: Spent) -> None:
        used = self.budgets.used(spent)
        left = spent.seconds / 60 * (1 - used) / used if used else math.nan
        mine = {**spent.metrics(), "used": 100 * used, "minutes_left": round(left, 1)}
        trainer = self.trainer
        self.log.log(trainer.iteration - 1, {**metrics, **mine}, images=trainer.cost.images)

    def _judge_if_missed(self, now: Spent) -> None:
        """Evaluate what was due when the checkpoint to go on from was written, if it was not."""
        judged = {row["iteration"] for row in read_rows(self.folder, EVALS)}
        if now.iterations and now.iterations not in judged:
            self._judge(spent_at(self.folder, now.iterations - 1), now)

    def _judge(self, before: Spent, now: Spent) -> None:
        """Evaluate on held-out prompts where a mark or the end of a budget was passed, and draw at
        the end of (a)."""
        # is an evaluation due at all?
        marks, ended = self.budgets.marks(before, now), self.budgets.ended(before, now)
        if not self.budgets.points or not (marks or ended):
            return
        # a reward that fails here leaves a checkpoint behind
        with self.log.phase("eval"):
            try:
                found = evaluated(self.trainer)
            except RewardError:
                self._save()  # no iteration is trained again
                raise
            if "nfe" in ended:
                with _blamed_on_the_method():
                    drawn = sample_grid_prompts(self.trainer)
                keep_samples(self.trainer, self.folder, self.log, *drawn)
        # a row beside the earlier ones, and a line to read
        spent = {"iteration": now.iterations, "nfe": now.nfe, "seconds": now.seconds}
        row = {**spent, "marks": marks, "budget": ended, **found}
        write_evals(self.folder, [*read_rows(self.folder, EVALS), row])
        self.log.evaluated(row)
        name = self.trainer.config.headline
        self.log.say(
            f"held out after {now.nfe:g} NFE, {now.seconds:.1f} s: {name} {found[name]:.3f}"
        )
        self._tell(row)

    def _tell(self, row: Mapping[str, Any]) -> None:
        """Tell of an evaluation; what is raised ends the run."""
        if self.judged is not None:
            self.judged(row)

    def _check_first(self, spent: Spent) -> None:
        """Raise ConfigError, and leave nothing behind, if the first iteration alone exceeds a
        budget."""
        limits = {"nfe": self.budgets.nfe, "seconds": self.budgets.seconds}
        over = [key for key, limit in limits.items() if 0 < limit < getattr(spent, key)]
        if spent.iterations != 1 or not over:
            return
        for name in (CONFIG, CLAIM, *LOGS, CHECKPOINTS):
            delete(self.folder / name)
        raise ConfigError(
            f"{self.trainer.config.name}: one iteration takes {spent.nfe:g} network evaluations "
            f"and {spent.seconds:.3g} s, more than a budget of {limits[over[0]]:g} "
            f"{NAMES[over[0]]}; raise --{over[0]}"
        )

    def _checkpoint(self, *, done: bool) -> None:
        every = self.trainer.config.checkpoint.every
        if done or (every and self.trainer.iteration % every == 0):
            self._save()
            checkpoint.prune(self.folder, self.trainer.config.checkpoint.keep)

    def _save(self) -> Path:
        place = checkpoint.checkpoint_folder(self.folder, self.trainer.iteration)
        self.log.sync()
        self.trainer.save(place)
        return place


def base_of(runs: Path, config: Config, trainer: Trainer) -> dict[str, Any]:
    """Read how the base model was judged, or judge it and draw its samples -> score, interval,
    tasks and outcomes; `trainer` has the config's model, untrained.

    Raises ConfigError if the folder's base model was judged under other settings, or if model,
    reward or prompts have changed under their names since.
    """
    folder, equal, content = runs / "base", setting(config), judged_content(config)
    # what is there
    mend = f"delete {folder}, and the same command judges the base model again"
    found = stored(folder, RESULT, BaseFile, mend)
    if found:
        wrong = different(found["setting"], equal)
        if wrong:
            raise ConfigError(
                f"{runs} belongs to another comparison: {', '.join(wrong[:3])}; name another --runs"
            )
        wrong = differences(found["content"], content)
        if wrong:
            raise ConfigError(
                f"{runs}: the base model there was judged before something changed under its name, "
                f"there and now: {'; '.join(wrong[:3])}; name another --runs, or delete this "
                "folder: its runs began with what was there before"
            )
        return dict(found["base"])
    # or else the model itself, also where a config learns a noise that begins elsewhere
    model = trainer.model
    with model.plain_noise() if isinstance(model, LearnsNoise) else nullcontext():
        row = evaluated(trainer)
        silence = Silence(partial(print, file=sys.stderr))
        keep_samples(trainer, folder, silence, *sample_grid_prompts(trainer))
    tasks = {task: values["mean"] for task, values in row["tasks"].items()}
    base = {"score": row[row["score"]], "interval": row["interval"], "images": row["images"]}
    records = trainer.test_set.records
    tags = [task_of(record) for record in records]
    # prompts of one scene are no independent draws; without the column each is its own
    scenes = [str(record.get("scene", place)) for place, record in enumerate(records)]
    base |= {"tasks": tasks, "tags": tags, "scenes": scenes, "outcomes": row["outcomes"]}
    write_json(folder / RESULT, {"setting": equal, "content": content, "base": base})
    return base
