"""Train a config in a folder, with checkpoints, held-out evaluations, sample grids and a
summary."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flowrl.config.load import Config, with_rewards
from flowrl.core.errors import FlowRLError
from flowrl.core.files import write_json, write_text
from flowrl.core.types import FlowModel
from flowrl.evaluation.held_out import finite_images
from flowrl.evaluation.image_grids import save_png, save_strip
from flowrl.runs.evaluate import eval_weights, evaluate, grey, sample_grid_prompts
from flowrl.runs.folder import (
    CURVES,
    EVALS,
    GRID,
    METRICS,
    PROMPTS,
    REPORT,
    SAMPLES,
    SUMMARY,
    TIMING,
    Rows,
    read_rows,
    strip_file,
    write_evals,
)
from flowrl.runs.log import RunLogger, Silence
from flowrl.runs.report.curves import curves
from flowrl.runs.report.page import before_after_table, html_report
from flowrl.runs.report.run_grid import run_grid
from flowrl.runs.report.style import save_figure
from flowrl.runs.rescue import Checkpoints, Log, rescued
from flowrl.runs.start import Resume, begin, claimed
from flowrl.runs.stop import StopSignal
from flowrl.training.trainer import Trainer

WHY_NOTHING = "every advantage was 0, since the rewards of each prompt's images were equal"


def train(
    config: Config,
    run: str | os.PathLike[str] | None = None,
    *,
    resume: Resume = False,
    quiet: bool = False,
    model: FlowModel | None = None,
    rewards: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a config in the folder `run` and return its summary (also ``summary.json``).

    Without a folder it is ``runs/NAME-seedSEED``, numbered if that is taken. With `resume` the run
    goes on from its newest whole checkpoint, bit for bit as if never stopped; "auto" starts where
    there is nothing to go on from. `model` takes the place of the config's, as before training;
    `rewards` {name: function} that of the config's rewards, as `with_rewards` does.

    Whatever ends the run leaves a checkpoint, and the message says how to go on. Raises Interrupted
    after Ctrl-C and the signals that end a job, RewardError after a reward failed; RunError for a
    NaN, a full disk, no memory left (see out_of_memory.py), a folder that holds another run or in
    which another process works.
    """
    config = config if rewards is None else with_rewards(config, rewards)
    with claimed(config, Path(run) if run is not None else None, resume) as start:
        run = start.run
        trainer, resumed_at = begin(config, start, model=model, quiet=quiet)
        checkpoints = Checkpoints(trainer, run, resumed_at)
        with _logger(trainer, run, resumed_at, quiet) as log, StopSignal() as stop:
            trainer.log = log
            log.say(f"{config.name}: {describe(trainer)}\nrun folder {run}")
            with rescued(checkpoints, log):
                _iterate(checkpoints, log, stop)
            here = trainer.world
            summary = here.together(lambda: _finish(run, config, log) if here.main else {})
        return here.gather(summary)[0]


def describe(trainer: Trainer) -> str:
    """Say in plain English what one iteration does and what is trained."""
    c, here = trainer.config, trainer.world
    numbers = sum(p.numel() for p in trainer.params.values())
    lines = [
        f"{c.train.iterations} iterations, {numbers:,} trained numbers, lr {c.lr:g}, seed {c.seed}"
    ]
    lines += trainer.cost.lines()
    if here.size > 1:
        lines.append(f"processes  {here.size}, each with its share of the prompts")
    lines.append(
        f"prompts    {len(trainer.train_set)} to train on ({trainer.train_set.path}), "
        f"{len(trainer.test_set)} held out, {c.eval.images} images each to judge"
    )
    return "\n".join(lines)


def _logger(trainer: Trainer, run: Path, resumed_at: int | None, quiet: bool) -> Log:
    """Log in the first process; the others are silent."""
    config = trainer.config
    if not trainer.world.main:
        return Silence()
    kl = "kl" if config.kl_beta else "approx_kl"
    labels = {"reward": "reward", "acc": "accuracy", "ratio": "ratio", "±": "ratio_std", "kl": kl}
    return RunLogger(run, resumed_at, quiet=quiet, total=config.train.iterations, columns=labels)


# ----------------------------------------------------------------------------------- the iterations


def _iterate(checkpoints: Checkpoints, log: Log, stop: StopSignal) -> None:
    """Run the iterations that are left. Raises Interrupted where a stop was asked for."""
    trainer = checkpoints.trainer
    last, idle = trainer.config.train.iterations, False
    _milestone(checkpoints, log, stop)
    while trainer.iteration < last:
        metrics = trainer.step()
        metrics["accuracy"] = metrics[f"reward/{trainer.config.headline}"]
        log.log(trainer.iteration - 1, metrics, images=trainer.cost.images)
        if metrics.get("trained") == 0 and not idle:
            idle = True
            log.say(f"iteration {trainer.iteration} trained nothing: {WHY_NOTHING}")
        _milestone(checkpoints, log, stop)


def _milestone(checkpoints: Checkpoints, log: Log, stop: StopSignal) -> None:
    """Save, evaluate and draw where the config asks for it at this iteration; each is done once,
    also over a resume.

    The checkpoint comes first: nothing that goes wrong in an evaluation can lose it. Raises
    Interrupted where a stop was asked for.
    """
    trainer, run = checkpoints.trainer, checkpoints.run
    c, now, here = trainer.config, trainer.iteration, trainer.world
    if _due(c.checkpoint.every, trainer):
        with log.phase("save"):
            here.together(checkpoints.save)
    _stop_if_asked(checkpoints, stop)
    # the evaluation
    rows = here.gather(read_rows(run, EVALS) if here.main else [])[0]
    fresh = [row for row in rows if row["iteration"] <= now]
    evaluated = any(row["iteration"] == now for row in fresh)
    if _due(c.eval.every, trainer) and not evaluated:
        fresh.append({"iteration": now, **_evaluate(checkpoints, log, stop)})
    changed = fresh if fresh != rows else None
    here.together(lambda: _keep(trainer, run, log, changed))
    _stop_if_asked(checkpoints, stop)


def _stop_if_asked(checkpoints: Checkpoints, stop: StopSignal) -> None:
    """Raise Interrupted if a stop was asked for, unless nothing is left to train."""
    trainer = checkpoints.trainer
    if trainer.world.any(stop.asked) and trainer.iteration < trainer.config.train.iterations:
        raise checkpoints.stopped()


def _due(every: int, trainer: Trainer) -> bool:
    """Say whether something is done at this iteration: before the first, after the last, and every
    so many."""
    now, last = trainer.iteration, trainer.config.train.iterations
    return now in (0, last) or bool(every and now % every == 0)


def _evaluate(checkpoints: Checkpoints, log: Log, stop: StopSignal) -> dict[str, Any]:
    """Evaluate on the held-out prompts, and say how it went. Raises Interrupted where a stop is
    asked for meanwhile."""
    trainer = checkpoints.trainer
    c, asked = trainer.config, stop.asked

    def heard(done: int, total: int) -> None:
        # of several processes none may leave alone
        if stop.asked and not asked and done < total and trainer.world.size == 1:
            raise _Heard

    log.say(f"judging {len(trainer.test_set) * c.eval.images} held-out images ...")
    try:
        with log.phase("eval"), eval_weights(trainer):
            result = evaluate(trainer.model, c, trainer=trainer, progress=heard)
    except _Heard:
        raise checkpoints.stopped() from None
    low, high = result["interval"]
    log.say(
        f"held out after {trainer.iteration} iterations: {c.headline} {result[c.headline]:.3f} "
        f"(95 % {low:.3f} to {high:.3f})"
    )
    for name, count in result.get("unscored", {}).items():
        log.say(f"{count} of them have no score by {name}, and count in no mean of it")
    return result


class _Heard(FlowRLError):
    """A stop was asked for in the middle of an evaluation."""


def _keep(trainer: Trainer, run: Path, log: Log, evals: Rows | None) -> None:
    """Write evaluations and grid where they are due; only the first process writes."""
    main = trainer.world.main
    if evals is not None and main:
        write_evals(run, evals)
    # sharded weights are put together by all processes
    if _due(trainer.config.samples.every, trainer) and (main or trainer.sharded):
        with log.phase("samples"):
            _sample(trainer, run, log)


def _sample(trainer: Trainer, run: Path, log: Log) -> None:
    """Draw the same prompts from the same noise as at every other iteration."""
    texts, images = sample_grid_prompts(trainer)
    if not trainer.world.main:
        return
    broken = int((~finite_images(images)).sum())
    if broken:
        log.say(f"{broken} of {len(images)} images of the grid are not finite: drawn grey")
        images = grey(images)
    size = trainer.config.image
    prompts = {"prompts": texts, "height": size.height, "width": size.width}
    write_json(run / SAMPLES / PROMPTS, prompts)
    save_strip(images, strip_file(run, trainer.iteration))
    log.image("samples", torch.cat(list(images), dim=2), trainer.iteration)
    save_png(run_grid(run), run / GRID)


# --------------------------------------------------------------------------------------- the end


def _finish(run: Path, config: Config, log: Log) -> dict[str, Any]:
    """Write the summary and the figures, and print before and after."""
    rows, timing = read_rows(run, EVALS), read_rows(run, TIMING)
    summary = {
        "name": config.name,
        "before": rows[0],
        "after": rows[-1],
        "gain": rows[-1][config.headline] - rows[0][config.headline],
        "iterations": config.train.iterations,
        "seed": config.seed,
        "seconds": round(sum(row["total"] for row in timing), 1),
        "finished": time.strftime("%Y-%m-%d"),
    }
    # as a file, as figures, as a page, and in the terminal
    write_json(run / SUMMARY, summary)
    save_figure(curves(run), run / CURVES, dpi=110)
    write_text(run / REPORT, html_report(run))
    log.say(before_after_table(summary))
    idle = sum(row.get("trained") == 0 for row in read_rows(run, METRICS))
    if idle:
        log.say(f"{idle} of {config.train.iterations} iterations trained nothing: {WHY_NOTHING}")
    figures = ", ".join(str(run / name) for name in (GRID, CURVES, REPORT))
    log.say(f"images: {figures}")
    return summary
