"""Train a config in a folder, with checkpoints, held-out evaluations, sample grids and a
summary."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.config.load import Config, check_config, folder_of
from flowrl.config.values import show
from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.files import without, write_json, write_text
from flowrl.core.part import Part
from flowrl.core.processes import launched
from flowrl.core.types import FlowModel
from flowrl.evaluation.statistics import decided_by
from flowrl.runs.folder import (
    CURVES,
    EVALS,
    GRID,
    METRICS,
    REPORT,
    SAMPLES,
    SUMMARY,
    TIMING,
    VERDICTS,
    Rows,
    read_rows,
)
from flowrl.runs.gain import gain_of, score_of, verdict_lines
from flowrl.runs.kept_inputs import lists_kept
from flowrl.runs.log import Log, RunLogger, Silence, headline_label
from flowrl.runs.milestones import Checkpoints, Milestones, rescued
from flowrl.runs.monitors import Watch
from flowrl.runs.open_run import best_checkpoint
from flowrl.runs.report.curves import curves
from flowrl.runs.report.page import before_after_table, best_line, html_report
from flowrl.runs.report.style import save_figure
from flowrl.runs.start_run import Resume, begin, check_alike, claimed
from flowrl.runs.stop import StopSignal
from flowrl.runs.trackers import trackers_given
from flowrl.training.trainer import Trainer

WHY_NOTHING = "every advantage was 0, since the rewards of each prompt's images were equal"


def train(
    config: Config,
    run: str | os.PathLike[str] | None = None,
    *,
    resume: Resume = False,
    quiet: bool = False,
    model: FlowModel | None = None,
    track: Sequence[str] = (),
    callbacks: Sequence[Part] = (),
) -> dict[str, Any]:
    """Train a config in the folder `run` and return its summary (also ``summary.json``) and,
    as `run`, its folder.

    Without a folder it is ``runs/NAME-seedSEED``, numbered if that is taken. With `resume` the run
    goes on from its newest whole checkpoint, bit for bit as if never stopped; "auto" starts where
    there is nothing to go on from, and "changed" goes on with another length, learning rate, or
    looks at itself. `model` takes the place of the config's, as before training. `track` names
    experiment trackers beside TensorBoard: wandb, trackio, swanlab. `callbacks` are parts that join
    the training loop (`flowrl.core.part`); a resume is given the same ones again.

    Whatever ends the run leaves a checkpoint, and the message says how to go on. Raises Interrupted
    after Ctrl-C and the signals that end a job, RewardError after a reward failed; RunError for a
    NaN, a full disk, no memory left (see out_of_memory.py), a folder that holds another run or in
    which another process works.
    """
    # what can fail fails before anything is loaded
    check_config(config)
    if run is not None:
        run = folder_of(run, "run")
    if resume not in (True, False, "auto", "changed"):
        raise ConfigError(f'resume: expected True, False, "auto" or "changed", got {show(resume)}')
    track = trackers_given(track)
    check_alike(config)
    # the folder is locked, so that no other process trains in it
    with claimed(config, run, resume) as start:
        run = start.run
        with lists_kept(config, run, resumed=start.checkpoint is not None) as config:
            trainer, resumed_at, lost = begin(config, start, model, callbacks, quiet)
        checkpoints = Checkpoints(trainer, run, resumed_at, unjudged=lost)
        with _logger(trainer, run, resumed_at, quiet, track) as log, StopSignal() as stop:
            trainer.state.log = checkpoints.log = log
            _leave_in_time(trainer, stop)
            log.say(f"{config.name}: {describe_training(trainer)}\nrun folder {run}")
            if trainer.iteration >= config.train.iterations:
                log.say(
                    f"all {trainer.iteration} iterations were done before, so nothing is trained"
                )
            trainer.encode_ahead(max(0, config.train.iterations - trainer.iteration))
            # Ctrl-C and the signals that end a job are heard between iterations; errors save first
            milestones = Milestones(checkpoints, log, stop, Watch(trainer, run, log))
            with rescued(checkpoints, log):
                _iterate(milestones, log)
            # the first process writes the summary, all return it
            why, longer = milestones.watch.stopped, ""
            if not why:
                longer = checkpoints.how_to_go_on(2 * trainer.iteration)
            summary = trainer.world.by_main(partial(_finish, run, config, log, why, longer))
        return {**summary, "run": str(run)}


def _leave_in_time(trainer: Trainer, stop: StopSignal) -> None:
    """Let a stop end what can be made again, where a launcher kills soon after its signal; under
    FSDP all processes save together, after the iteration."""
    if launched() and not trainer.sharded:
        stop.repeatable = lambda: trainer.state.repeatable
        trainer.state.leave = stop.leave


def describe_training(trainer: Trainer) -> str:
    """Say in plain English what one iteration does and what is trained."""
    c, here = trainer.config, trainer.world
    numbers = sum(p.numel() for p in trainer.params.values())
    lines = [
        f"{c.train.iterations} iterations, {numbers:,} trained numbers, lr {c.lr:g}, seed {c.seed}"
    ]
    lines += trainer.cost.lines()
    if here.size > 1:
        lines.append(f"processes  {here.size}, each with its share of the prompts")
    if here.context > 1:
        lines.append(f"context    {here.context} processes compute each sample together")
    lines.append(
        f"prompts    {len(trainer.train_set)} to train on ({trainer.train_set.path}), "
        f"{len(trainer.test_set)} held out, {c.eval.images} images each to judge"
    )
    lines.append(f"test       {decided_by(len(trainer.test_set) * c.eval.images)}")
    return "\n".join(lines)


def _images_of_phases(trainer: Trainer) -> dict[str, int]:
    """Return how many images each phase is about whose progress is counted in them."""
    made = trainer.cost.images // trainer.world.size
    judged = len(trainer.test_set) * trainer.config.eval.images
    return {"rollout": made, "decode": made, "reward": made, "eval": judged}


def _logger(
    trainer: Trainer, run: Path, resumed_at: int | None, quiet: bool, track: Sequence[str]
) -> Log:
    """Log in the first process; the others are silent."""
    config = trainer.config
    if not trainer.world.main:
        return Silence()
    kl = "approx_kl"
    if config.kl_beta:
        kl = "kl"
    labels = {headline_label(config.headline): "accuracy"}
    labels = {"reward": "reward", **labels, "ratio": "ratio", "±": "ratio_std", kl: kl}
    return RunLogger(
        run,
        resumed_at,
        quiet=quiet,
        total=config.train.iterations,
        columns=labels,
        images=_images_of_phases(trainer),
        every={
            "eval": config.eval.every,
            "samples": config.samples.every,
            "save": config.checkpoint.every,
        },
        track=track,
        config=config.to_dict(),
    )


def _iterate(milestones: Milestones, log: Log) -> None:
    """Run the iterations that are left. Raises Interrupted where a stop was asked for."""
    trainer, idle = milestones.trainer, False
    milestones.reach()
    while milestones.going_on:
        metrics = trainer.step()
        metrics["accuracy"] = metrics[f"reward/{trainer.config.headline}"]
        counted = trainer.state.histograms
        log.log(trainer.iteration - 1, metrics, images=trainer.cost.images, histograms=counted)
        milestones.watch.iterated(metrics)
        if metrics.get("trained") == 0 and not idle:
            idle = True
            log.say(f"iteration {trainer.iteration} trained nothing: {WHY_NOTHING}")
        milestones.reach()
    milestones.end()


# --------------------------------------------------------------------------------------- the end


def _finish(
    run: Path, config: Config, log: Log, stopped: dict[str, Any] | None, longer: str
) -> dict[str, Any]:
    """Write the summary and the figures, and print before and after; `longer` trains on."""
    rows, timing = read_rows(run, EVALS), read_rows(run, TIMING)
    gain, interval, said = gain_of(rows), None, None
    if gain is not None:
        said = gain.sentence
        if gain.interval is not None:
            interval = list(gain.interval)
    # the scores of single prompts stand in eval.jsonl
    summary = {
        "name": config.name,
        "before": without(rows[0], "by_prompt"),
        "after": without(rows[-1], "by_prompt"),
        "gain": rows[-1][config.headline] - rows[0][config.headline],
        "gain_interval": interval,
        "verdict": said,
        "best": _best(run, rows),
        "stopped": stopped,
        "iterations": rows[-1]["iteration"],
        "seed": config.seed,
        "seconds": round(sum(row.get("total") or 0.0 for row in timing), 1),
        "finished": time.strftime("%Y-%m-%d"),
    }
    # as a file, as figures, as a page, and in the terminal
    write_json(run / SUMMARY, summary)
    save_figure(curves(run), run / CURVES, dpi=110)
    _write_page(run)
    log.say(before_after_table(summary))
    for line in best_line(summary):
        log.say(line)
    idle = sum(row.get("trained") == 0 for row in read_rows(run, METRICS))
    if idle:
        log.say(f"{idle} of {summary['iterations']} iterations trained nothing: {WHY_NOTHING}")
    figures = ", ".join(str(run / name) for name in (GRID, CURVES, REPORT))
    log.say(f"images: {figures}")
    if (run / SAMPLES / VERDICTS).exists():
        log.say("in the image grid a green frame marks a right image, a red one a wrong image")
    if longer:
        log.say(f"train on: {longer}")
    # the last words: whether it is better
    for line in verdict_lines(gain, run):
        log.say(line)
    return summary


def _write_page(run: Path) -> None:
    """Write the run as a page; a damaged file of its samples is no reason to lose the rest."""
    try:
        page = html_report(run)
    except FlowRLError as error:
        warnings.warn(f"{REPORT} is not written: {error}", stacklevel=2)
        return
    write_text(run / REPORT, page)


def _best(run: Path, rows: Rows) -> dict[str, Any] | None:
    """Say which checkpoint is the best by held-out score; None where none was judged."""
    found = best_checkpoint(run)
    if found is None:
        return None
    (row,) = (row for row in rows if row["iteration"] == int(found.name))
    where = found.relative_to(run).as_posix()
    return {"iteration": row["iteration"], "score": score_of(row), "checkpoint": where}
