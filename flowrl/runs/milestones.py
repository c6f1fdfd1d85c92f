"""What happens between iterations: checkpoints, held-out evaluations, image grids, and a look at
what the monitors say. Whatever ends a run saves first, and says how to go on."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.calls import PYTHON
from flowrl.core.errors import FlowRLError, RewardError, RunError
from flowrl.core.files import delete, write_json
from flowrl.core.tables import interval_text
from flowrl.cost.out_of_memory import explain, is_out_of_memory
from flowrl.evaluation.held_out import finite_images
from flowrl.evaluation.image_grids import save_png, save_strip
from flowrl.evaluation.velocity_drift import velocity_drift
from flowrl.evaluation.video_files import save_film
from flowrl.runs.evaluate import (
    eval_weights,
    evaluate,
    grey,
    grid_sources,
    sample_grid_prompts,
    verdicts,
)
from flowrl.runs.folder import (
    CONFIG,
    EVALS,
    GRID,
    PROMPTS,
    SAMPLES,
    SOURCES,
    SUMMARY,
    VERDICTS,
    Rows,
    RunPath,
    read_object,
    read_rows,
    read_verdicts,
    strip_file,
    write_evals,
)
from flowrl.runs.gain import best_iteration, gain_of
from flowrl.runs.log import Log
from flowrl.runs.monitors import Watch
from flowrl.runs.report.samples import run_grid, sample_files
from flowrl.runs.start_run import train_command
from flowrl.runs.stop import Interrupted, StopSignal
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer

ASIDE = "samples-earlier"


class Checkpoints:
    """The checkpoints of a run that is being trained."""

    def __init__(
        self, trainer: Trainer, run: Path, resumed_at: int | None, *, unjudged: bool = False
    ) -> None:
        """unjudged: the run's evaluations are lost, so that one of its checkpoints may be the
        best."""
        self.trainer, self.run = trainer, run
        self.log: Log | None = None
        self._saved = resumed_at  # the iteration that is on the disk already
        self.best: int | None = None  # the iteration that is never deleted
        self._unjudged = set[int]()
        if unjudged:
            self._unjudged = {int(folder.name) for folder in checkpoint.checkpoint_folders(run)}

    @property
    def folder(self) -> Path:
        """Return where the checkpoint of the current iteration belongs."""
        return checkpoint.checkpoint_folder(self.run, self.trainer.iteration)

    def save(self) -> Path:
        """Write the checkpoint of the current iteration unless it is there -> its folder.

        That of iteration 0 follows from the config: it goes as soon as there is another one.
        """
        now = self.trainer.iteration
        if self._saved != now:
            if self.log is not None:
                self.log.sync()  # no checkpoint without the lines before it
            self.trainer.save(self.folder)
            self._saved = now
            if self.trainer.world.main and now < self.trainer.config.train.iterations:
                delete(self.run / SUMMARY)  # of an end that is no longer the end
        if self.trainer.world.main and now > 0:
            keep = self.trainer.config.checkpoint.keep
            checkpoint.prune(self.run, keep, besides=self._kept())
            self._forget_the_first()
        return self.folder

    def _kept(self) -> set[int]:
        """Return the iterations that are never deleted: the best, those of which nobody knows
        whether they are, and the first where a run may go back to it."""
        kept = set(self._unjudged)
        if self.trainer.config.monitors.asks_for("rollback"):
            kept.add(0)
        if self.best is not None:
            kept.add(self.best)
        return kept

    def _forget_the_first(self) -> None:
        if 0 in self._kept():
            return
        first = checkpoint.checkpoint_folder(self.run, 0)
        with contextlib.suppress(OSError):
            if first.is_dir():
                checkpoint.discard(first)

    def stopped(self) -> Interrupted:
        """Save, and return the error that ends a run which was asked to stop."""
        folder = self.trainer.world.together(self.save)
        return Interrupted(
            f"stopped after iteration {self.trainer.iteration}, saved {folder}; go on with: "
            f"{self.how_to_go_on()}"
        )

    def how_to_go_on(self, iterations: int = 0) -> str:
        """Return the command that goes on with the run, to so many iterations if they are given;
        or the call where rewards or the model are objects of a program, which a command does not
        have."""
        config, objects = self.trainer.config, []
        functions = [
            f"{name!r}: ..." for name, call in config.rewards.items() if call.path == PYTHON
        ]
        if functions:
            objects.append(f"rewards={{{', '.join(functions)}}}")
        if config.model.path == PYTHON:
            objects.append("model=...")
        if not objects:
            command = train_command("--resume", self.run, config)
            if iterations:
                command += f" train.iterations={iterations}"
            return command
        # the call
        longer = ""
        if iterations:
            longer = f"train={{'iterations': {iterations}}}"
        if config.plugins:
            objects.insert(0, f"plugins={list(config.plugins)}")
        return f"flowrl.open({str(self.run)!r}, {', '.join(objects)}).resume({longer})"

    def after(self, error: BaseException) -> str:
        """Save after an error if what is in memory can be gone on from -> what there is to go on
        from, and how."""
        found = self._rescued(error)
        if found is None and not self.trainer.world.main:
            return "process 0 says what there is to go on from"
        if found is None:
            return (
                "there is no whole checkpoint; start again with the same command, or in another "
                "folder"
            )
        return f"{found}; go on with: {self.how_to_go_on()}"

    def _rescued(self, error: BaseException) -> str | None:
        trainer = self.trainer
        # process 0 writes, sharded weights need all, and only a reward's failure is known to all
        main = trainer.world.main
        alone = (trainer.sharded or not main) and not isinstance(error, RewardError)
        problem = ""
        if not alone and trainer.can_be_saved():
            try:
                return f"saved {self.save()}"
            except FlowRLError as failed:
                problem = f"{failed}; "
        newest = checkpoint.latest(self.run)
        if newest is None:
            return None
        return f"{problem}{newest} is whole"


@contextmanager
def rescued(checkpoints: Checkpoints, log: Log) -> Iterator[None]:
    """Whatever ends the run inside: save what is good, and say in the error how to go on.

    Our own errors and a lack of memory become one message; a fault keeps its traceback, with a
    note. A second Ctrl-C becomes Interrupted.
    """
    trainer = checkpoints.trainer
    # a second Ctrl-C must not wait for a save
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        where = f"stopped at once in iteration {trainer.iteration}"
        raise Interrupted(f"{where}; {checkpoints.after(error)}") from None
    # save first, since the message says what there is to go on from
    except BaseException as error:
        where, config = f"stopped in iteration {trainer.iteration}", checkpoints.run / CONFIG
        how = checkpoints.after(error)
        # our own errors say already what is wrong: add where, and how to go on
        if isinstance(error, FlowRLError):
            text = f"{error}\n{where}; settings are in {config}; {how}"
            raise type(error)(text) from error
        if is_out_of_memory(error):
            advice = explain(error, trainer.config, log.current)
            raise RunError(f"{advice}\n{where}; set it in {config}; {how}") from error
        # anything else is a fault of the program, whose traceback is needed
        error.add_note(f"{where}; {how}")
        raise


class Milestones:
    """Save, evaluate and draw where the config asks for it; each is done once, also over a
    resume."""

    def __init__(self, checkpoints: Checkpoints, log: Log, stop: StopSignal, watch: Watch) -> None:
        self.checkpoints, self.log, self.stop, self.watch = checkpoints, log, stop, watch
        self.trainer, self.run = checkpoints.trainer, checkpoints.run
        self._told = 0  # evaluations whose gain each iteration shows

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
        rows = here.by_main(partial(read_rows, run, EVALS))
        fresh = [row for row in rows if row["iteration"] <= now]
        self.checkpoints.best, self.watch.rows = best_iteration(fresh), fresh
        if _due(c.checkpoint.every, trainer, end=end):
            self._save()
        self._stop_if_asked()
        # the evaluation; the best one's checkpoint is there before its line is
        if _due(c.eval.every, trainer, end=end) and all(row["iteration"] != now for row in fresh):
            fresh.append({"iteration": now, **self._evaluate()})
            self.log.evaluated(fresh[-1])
            self.checkpoints.best = best_iteration(fresh)
            if self.checkpoints.best == now:
                self._save()
        changed = None
        if fresh != rows:
            changed = fresh
        here.together(partial(self._keep, changed, end=end))
        # what is gained so far, and what the monitors say of it
        if here.main and len(fresh) != self._told:
            gain, self._told = gain_of(fresh), len(fresh)
            self.log.gained("" if gain is None else gain.short)
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
            with log.phase("eval"), eval_weights(trainer), trainer.state.repeated():
                result = evaluate(trainer.model, c, trainer=trainer, progress=leave_if_stopped)
                if trainer.state.probe is not None:
                    result["drift"] = velocity_drift(trainer.model, trainer.state.probe)
        except _StopAsked:
            raise self.checkpoints.stopped() from None
        result["setting"]["weights"] = c.eval.weights
        log.say(
            f"held out after {trainer.iteration} iterations: {c.headline} {result[c.headline]:.3f} "
            f"(95 % {interval_text(result['interval'])})"
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
                # the same prompts from the same noise as at every other iteration
                keep_samples(trainer, run, log, *sample_grid_prompts(trainer))


class _StopAsked(FlowRLError):
    """A stop was asked for in the middle of an evaluation."""


def _due(every: int, trainer: Trainer, *, end: bool) -> bool:
    """Say whether something is done at this iteration: before the first, after the last, and every
    so many; at an early `end` what is not."""
    now, last = trainer.iteration, trainer.config.train.iterations
    usual = now in (0, last) or bool(every and now % every == 0)
    return usual != end


def keep_samples(trainer: Trainer, run: Path, log: Log, texts: list[str], images: Tensor) -> None:
    """Write what `sample_grid_prompts` drew into the run's ``samples``; which of them are right,
    where a checker judges, stands beside them."""
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


def begin_samples(run: RunPath, about: Mapping[str, Any]) -> Path | None:
    """Say in the folder of the samples what they are; those that are something else are set aside
    first, and so are those of which no file says what they are -> the folder where they are now,
    None where nothing was moved.

    `about` has the prompts, height and width, and the seed of the noise. What a file does not say
    is not compared.
    """
    folder, moved = Path(run) / SAMPLES, None
    if folder.is_dir() and sample_files(run):
        had = _known(folder)
        if not had or any(key in had and had[key] != value for key, value in about.items()):
            moved = _free(Path(run))
            folder.rename(moved)
            folder.mkdir()
    write_json(folder / PROMPTS, dict(about))
    return moved


def _known(folder: Path) -> dict[str, Any]:
    """Read what the samples of a folder are; {} where that cannot be read."""
    try:
        return read_object(folder, PROMPTS)
    except RunError:
        return {}


def _free(run: Path) -> Path:
    """Return the first of samples-earlier, samples-earlier-2 and so on that is not there."""
    free = run / ASIDE
    for number in itertools.count(2):
        if not free.exists():
            break
        free = run / f"{ASIDE}-{number}"
    return free
