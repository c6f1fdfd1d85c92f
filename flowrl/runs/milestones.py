"""What happens between iterations: checkpoints, held-out evaluations, image grids, and a look at
what the monitors say."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import FlowRLError
from flowrl.core.files import write_json
from flowrl.evaluation.held_out import finite_images
from flowrl.evaluation.image_grids import save_png, save_strip
from flowrl.evaluation.velocity_drift import velocity_drift
from flowrl.evaluation.video_files import save_film
from flowrl.runs.best import best_iteration
from flowrl.runs.earlier_samples import begin_samples
from flowrl.runs.evaluate import (
    eval_weights,
    evaluate,
    grey,
    grid_sources,
    sample_grid_prompts,
    verdicts,
)
from flowrl.runs.folder import (
    EVALS,
    GRID,
    SAMPLES,
    SOURCES,
    VERDICTS,
    Rows,
    read_rows,
    read_verdicts,
    strip_file,
    write_evals,
)
from flowrl.runs.monitors.watch import Watch
from flowrl.runs.report.run_grid import run_grid
from flowrl.runs.save_on_error import Checkpoints, Log
from flowrl.runs.stop import StopSignal
from flowrl.training.trainer import Trainer


class Milestones:
    """Save, evaluate and draw where the config asks for it; each is done once, also over a
    resume."""

    def __init__(self, checkpoints: Checkpoints, log: Log, stop: StopSignal, watch: Watch) -> None:
        self.checkpoints, self.log, self.stop, self.watch = checkpoints, log, stop, watch
        self.trainer, self.run = checkpoints.trainer, checkpoints.run

    @property
    def going_on(self) -> bool:
        """Say whether there is something left to train."""
        left = self.trainer.iteration < self.trainer.config.train.iterations
        return left and self.watch.stopped is None

    def end(self) -> None:
        """Make up for what a run that ends early has not had at its last iteration."""
        if self.trainer.iteration < self.trainer.config.train.iterations:
            self.reach(end=True)

    def reach(self, *, end: bool = False) -> None:
        """Do what is due at this iteration; at an early `end`, what is not due otherwise.

        The checkpoint comes first: nothing that goes wrong in an evaluation can lose it. Raises
        Interrupted where a stop was asked for.
        """
        trainer, run, here = self.trainer, self.run, self.trainer.world
        c, now = trainer.config, trainer.iteration
        rows = here.gather(read_rows(run, EVALS) if here.main else [])[0]
        fresh = [row for row in rows if row["iteration"] <= now]
        self.checkpoints.best, self.watch.rows = best_iteration(fresh), fresh
        if _due(c.checkpoint.every, trainer, end=end):
            self._save()
        self._stop_if_asked()
        # the evaluation; the best one's checkpoint is there before its line is
        if _due(c.eval.every, trainer, end=end) and all(row["iteration"] != now for row in fresh):
            fresh.append({"iteration": now, **self._evaluate()})
            self.checkpoints.best = best_iteration(fresh)
            if self.checkpoints.best == now:
                self._save()
        changed = fresh if fresh != rows else None
        here.together(lambda: self._keep(changed, end=end))
        # what the monitors say of it
        self.watch.evaluated(fresh)
        self._stop_if_asked()

    def _save(self) -> None:
        with self.log.phase("save"):
            self.trainer.world.together(self.checkpoints.save)

    def _stop_if_asked(self) -> None:
        """Raise Interrupted if a stop was asked for, unless nothing is left to train."""
        if self.trainer.world.any(self.stop.asked) and self.going_on:
            raise self.checkpoints.stopped()

    def _evaluate(self) -> dict[str, Any]:
        """Evaluate on the held-out prompts, and say how it went. Raises Interrupted where a stop is
        asked for meanwhile."""
        trainer, log, here = self.trainer, self.log, self.trainer.world
        c, asked = trainer.config, here.any(self.stop.asked)

        def leave_if_stopped(done: int, total: int) -> None:
            log.progress(done, total)
            # after a signal to one of several processes all leave, after the same batch
            if here.any(self.stop.asked and not asked and done < total):
                raise _StopAsked

        log.say(f"judging {len(trainer.test_set) * c.eval.images} held-out images ...")
        try:
            with log.phase("eval"), eval_weights(trainer):
                result = evaluate(trainer.model, c, trainer=trainer, progress=leave_if_stopped)
                if trainer.state.probe is not None:
                    result["drift"] = velocity_drift(trainer.model, trainer.state.probe)
        except _StopAsked:
            raise self.checkpoints.stopped() from None
        result["setting"]["weights"] = c.eval.weights
        low, high = result["interval"]
        log.say(
            f"held out after {trainer.iteration} iterations: {c.headline} {result[c.headline]:.3f} "
            f"(95 % {low:.3f} to {high:.3f})"
        )
        for name, count in result.get("unscored", {}).items():
            log.say(f"{count} of them have no score by {name}, and count in no mean of it")
        return result

    def _keep(self, evals: Rows | None, *, end: bool) -> None:
        """Write evaluations and grid where they are due; only the first process writes."""
        trainer, run, log = self.trainer, self.run, self.log
        main = trainer.world.main
        if evals is not None and main:
            write_evals(run, evals)
        # sharded weights are put together by all processes, and some compute a sample together
        all_draw = trainer.sharded or trainer.world.context > 1
        if _due(trainer.config.samples.every, trainer, end=end) and (main or all_draw):
            with log.phase("samples"):
                _sample(trainer, run, log)


class _StopAsked(FlowRLError):
    """A stop was asked for in the middle of an evaluation."""


def _due(every: int, trainer: Trainer, *, end: bool) -> bool:
    """Say whether something is done at this iteration: before the first, after the last, and every
    so many; at an early `end` what is not."""
    now, last = trainer.iteration, trainer.config.train.iterations
    usual = now in (0, last) or bool(every and now % every == 0)
    return usual != end


def _sample(trainer: Trainer, run: Path, log: Log) -> None:
    """Draw the same prompts from the same noise as at every other iteration."""
    texts, images = sample_grid_prompts(trainer)
    if not trainer.world.main:
        return
    broken = int((~finite_images(images)).sum())
    if broken:
        log.say(f"{broken} of {len(images)} images of the grid are not finite: drawn grey")
        images = grey(images)
    (height, width), seed = trainer.config.eval_size, trainer.config.samples.seed
    about = {"prompts": texts, "height": height, "width": width, "seed": seed}
    moved = begin_samples(run, about)
    if moved is not None:
        log.say(f"samples of other prompts, noise or size were set aside: they are in {moved}")
    # sources first: a page that looks at the run while it is written never misses them
    sources = grid_sources(trainer)
    if sources is not None:
        save_strip(sources, run / SAMPLES / SOURCES)
    save_strip(images, strip_file(run, trainer.iteration))
    _judge(trainer, run, log, images)
    if images.ndim == 5:  # videos
        save_film(images, strip_file(run, trainer.iteration).with_suffix(".gif"))
        images = images[:, 0]
    log.image("samples", torch.cat(list(images), dim=2), trainer.iteration)
    try:
        drawn = run_grid(run)
    except FlowRLError as error:  # an older file of the samples is damaged: no reason to end a run
        warnings.warn(f"{GRID} is not drawn: {error}", stacklevel=2)
        return
    save_png(drawn, run / GRID)


def _judge(trainer: Trainer, run: Path, log: Log, images: Tensor) -> None:
    """Keep which samples are right, for the frames of the grid."""
    try:
        found = verdicts(trainer, images)
        known = {**read_verdicts(run), trainer.iteration: found}
    except FlowRLError as error:  # a grid without frames is no reason to end a run
        log.say(f"the samples are not judged: {error}")
        return
    if found:
        write_json(run / SAMPLES / VERDICTS, known)
