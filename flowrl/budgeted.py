"""Train one config in a folder until a budget of network evaluations and one of seconds are both used up."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowrl import checkpoint
from flowrl.config import Config
from flowrl.curves import EVALS, read_rows
from flowrl.errors import ConfigError, RewardError, RunError
from flowrl.figures import save_strip
from flowrl.ledger import (
    RESULT,
    Account,
    Budgets,
    account_at,
    check,
    claim,
    drop_evaluations,
    result,
    write_evaluations,
)
from flowrl.log import RunLogger
from flowrl.loop import Interrupted, StopSignal, Trainer, write_json
from flowrl.runs import eval_weights, evaluate_config, grid_prompts, sample_all

STRIP, PROMPTS = "samples.png", "prompts.json"
COLUMNS = {"reward": "reward", "acc": "accuracy", "used %": "used", "min left": "minutes_left"}
clock, processor = time.perf_counter, time.process_time
Pace = Callable[[float], float]  # used share of the run -> minutes left of the whole comparison


class _Broken(RunError):
    """The method broke its own run, by a NaN for example. A full disk or a lost reward is not its fault."""


@contextmanager
def _break() -> Iterator[None]:
    try:
        yield
    except RewardError:
        raise
    except RunError as error:
        raise _Broken(str(error)) from error


def spend(
    config: Config, folder: Path, budgets: Budgets, *, stop: StopSignal, quiet: bool = False, pace: Pace | None = None
) -> dict[str, Any]:
    """Train until both budgets are used up -> the result, also in ``result.json``; one that is there is returned.

    Goes on from the folder's newest whole checkpoint. A run that breaks (RunError) is a result too, with its message.
    Raises Interrupted after Ctrl-C and RewardError after a reward failed, in both cases with a way to go on;
    ConfigError if the folder holds a run of another config or of other budgets, or if one iteration exceeds a budget.
    """
    check(folder, config, budgets)
    if (folder / RESULT).exists():
        return dict(json.loads((folder / RESULT).read_text(encoding="utf-8")))
    trainer = Trainer(config)
    start = checkpoint.latest(folder)
    if start is not None:
        trainer.load(start)
    claim(folder, config, budgets)
    with RunLogger(folder, trainer.iteration, tensorboard=False, quiet=quiet, columns=COLUMNS) as log:
        trainer.log = log
        log.say(f"{folder}: {config.name}, seed {config.seed}, lr {config.train.lr:g}")
        failed = None
        try:
            _train(trainer, folder, budgets, log, stop, pace)
        except _Broken as error:
            failed = str(error)
        except RewardError as error:  # not the method's fault: nothing is recorded
            raise RewardError(f"{error}\n{folder} goes on from its newest checkpoint with the same command") from error
    found = result(config, folder, failed)
    write_json(folder / RESULT, found)
    return found


def _train(
    trainer: Trainer, folder: Path, budgets: Budgets, log: RunLogger, stop: StopSignal, pace: Pace | None
) -> None:
    """Run iterations until both budgets are used up."""
    account = account_at(folder, trainer.iteration)
    drop_evaluations(folder, account)
    while budgets.used(account) < 1:
        before = account
        metrics, account = _step(trainer, before, budgets)
        _check_first(trainer.config, folder, account, budgets)
        used = budgets.used(account)
        mine = {"evaluations": account.evaluations, "seconds": account.seconds, "used": 100 * used}
        left = {"minutes_left": round(pace(used), 1)} if pace else {}
        log.log(trainer.iteration - 1, {**metrics, **mine, **left}, images=trainer.budget.images)
        _judge(trainer, folder, budgets, before, account, log)
        _checkpoint(trainer, folder, done=used == 1)
        if stop.asked and used < 1:
            place = _save(trainer, folder)
            raise Interrupted(f"stopped after iteration {trainer.iteration}, saved {place}; the same command goes on")


def _step(trainer: Trainer, before: Account, budgets: Budgets) -> tuple[dict[str, float], Account]:
    """Run one iteration -> its metrics and the account after it."""
    began = _now(budgets)
    with _break():
        metrics = trainer.step()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # its last kernels are part of the step
    seconds = _now(budgets) - began
    metrics["accuracy"] = metrics[f"reward/{trainer.config.headline}"]
    return metrics, Account(trainer.iteration, before.evaluations + metrics["cost"], before.seconds + seconds)


def _now(budgets: Budgets) -> float:
    return clock() if budgets.clock == "wall" else processor() / torch.get_num_threads()


def _judge(trainer: Trainer, folder: Path, budgets: Budgets, before: Account, now: Account, log: RunLogger) -> None:
    """Evaluate on held-out prompts where a mark or the end of a budget was passed, and draw at the end of (a)."""
    marks, ended = budgets.marks(before, now), budgets.ended(before, now)
    if not budgets.points or not (marks or ended):
        return
    with log.phase("eval"):
        found = evaluated(trainer)
        if "evaluations" in ended:
            draw(trainer, folder)
    spent = {"iteration": now.iterations, "evaluations": now.evaluations, "seconds": now.seconds}
    write_evaluations(folder, [*read_rows(folder, EVALS), {**spent, "marks": marks, "budget": ended, **found}])
    name = trainer.config.headline
    log.say(f"held out after {now.evaluations:g} evaluations, {now.seconds:.1f} s: {name} {found[name]:.3f}")


def evaluated(trainer: Trainer) -> dict[str, Any]:
    """Evaluate a trainer's model with the weights that its config's `eval` section asks for."""
    with _break(), eval_weights(trainer):
        return evaluate_config(trainer.model, trainer.config, trainer=trainer)


def draw(trainer: Trainer, folder: Path) -> None:
    """Draw the grid's prompts from the grid's noise into ``samples.png``."""
    c, held_out = trainer.config, trainer.test_set
    texts = [held_out.texts[i] for i in grid_prompts(held_out.records, c.grid.prompts)]
    with _break(), eval_weights(trainer):
        pictures = sample_all(trainer.model, c, texts, seed=c.grid.seed, base=trainer.weights)
    save_strip(pictures, folder / STRIP)
    write_json(folder / PROMPTS, texts)


def _check_first(config: Config, folder: Path, account: Account, budgets: Budgets) -> None:
    """Raise ConfigError, and leave nothing behind, if the first iteration alone exceeds a budget."""
    over = [k for k in ("evaluations", "seconds") if 0 < getattr(budgets, k) < getattr(account, k)]
    if account.iterations == 1 and over:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"{config.name}: one iteration takes {account.evaluations:g} network evaluations and "
            f"{account.seconds:.3g} s, more than a budget of {getattr(budgets, over[0]):g} {over[0]}; raise --{over[0]}"
        )


def _checkpoint(trainer: Trainer, folder: Path, *, done: bool) -> None:
    every = trainer.config.checkpoint.every
    if done or (every and trainer.iteration % every == 0):
        _save(trainer, folder)
        checkpoint.prune(folder, trainer.config.checkpoint.keep)


def _save(trainer: Trainer, folder: Path) -> Path:
    place = checkpoint.checkpoint_folder(folder, trainer.iteration)
    trainer.save(place)
    return place
