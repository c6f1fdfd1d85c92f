"""Train a config in a folder, with checkpoints, held-out evaluations, sample grids and a
summary."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowrl.config.load import Config
from flowrl.core.environment import environment
from flowrl.core.errors import CheckpointError, RewardError, RunError
from flowrl.core.files import write_json, write_text
from flowrl.core.processes import world
from flowrl.core.types import FlowModel
from flowrl.cost.out_of_memory import HARMLESS, explain, explained, is_out_of_memory
from flowrl.evaluation.image_grids import save_png, save_strip
from flowrl.runs.evaluate import eval_weights, evaluate, sample_grid_prompts
from flowrl.runs.folder import (
    CONFIG,
    CURVES,
    ENVIRONMENT,
    EVALS,
    GRID,
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
from flowrl.runs.stop import Interrupted, StopSignal
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer

Log = RunLogger | Silence


def train(
    config: Config,
    run: str | Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    model: FlowModel | None = None,
) -> dict[str, Any]:
    """Train a config in the folder `run` and return its summary (also ``summary.json``).

    With `resume` go on from the newest whole checkpoint, bit for bit as if never stopped. Raises
    Interrupted after Ctrl-C and RewardError after a reward failed, both with a checkpoint written;
    RunError for a NaN, a full disk, no memory left (see out_of_memory.py) or a folder that holds
    another run.
    """
    here = world()
    # a name that was free for one process may be taken for the next: all take the first one's
    run = here.gather(Path(run))[0]
    trainer, resumed_at = _begin(config, run, resume=resume, model=model)
    with _logger(trainer, run, resumed_at, quiet) as log, StopSignal() as stop:
        trainer.log = log
        log.say(f"{config.name}: {describe(trainer)}\nrun folder {run}")
        with _told_where_it_stopped(trainer, run, log):
            _iterate(trainer, run, log, stop)
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


# ------------------------------------------------------------------------------------ the beginning


def _begin(
    config: Config, run: Path, *, resume: bool, model: FlowModel | None
) -> tuple[Trainer, int | None]:
    """Make the trainer, at a checkpoint where `resume` says so -> it, and the iteration resumed
    at."""
    here = world()
    start = here.together(lambda: _find_start(run, resume) if here.main else None)
    start = here.gather(start)[0]
    with explained(config, "load"):
        trainer = here.together(lambda: Trainer(config, model=model))
    if start is not None:
        trainer.load(start)
        return trainer, trainer.iteration
    # only now: a config that does not work must not occupy the folder
    if here.main:
        write_text(run / CONFIG, config.dump())
        write_json(run / ENVIRONMENT, {**environment(), "processes": here.size})
    return trainer, None


def _find_start(run: Path, resume: bool) -> Path | None:
    """Make the folder of a new run, or find the checkpoint to resume from."""
    if resume:
        start = checkpoint.latest(run)
        if start is None:
            raise CheckpointError(
                f"{run}: no whole checkpoint to resume from; start again in another folder"
            )
        return start
    if (run / CONFIG).exists():
        raise RunError(
            f"{run} holds a run already: resume it with --resume, or name another folder with --run"
        )
    try:
        (run / SAMPLES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"cannot write to the run folder {run}: {reason}") from error
    return None


def _logger(trainer: Trainer, run: Path, resumed_at: int | None, quiet: bool) -> Log:
    """Log in the first process; the others are silent."""
    config = trainer.config
    if not trainer.world.main:
        return Silence()
    kl = "kl" if config.kl_beta else "approx_kl"
    labels = {"reward": "reward", "acc": "accuracy", "ratio": "ratio", "±": "ratio_std", "kl": kl}
    return RunLogger(run, resumed_at, quiet=quiet, total=config.train.iterations, columns=labels)


# ----------------------------------------------------------------------------------- the iterations


def _iterate(trainer: Trainer, run: Path, log: Log, stop: StopSignal) -> None:
    """Run the iterations that are left. Raises Interrupted where a stop was asked for."""
    last = trainer.config.train.iterations
    _milestone(trainer, run, log, first=True)
    while trainer.iteration < last:
        metrics = trainer.step()
        metrics["accuracy"] = metrics[f"reward/{trainer.config.headline}"]
        log.log(trainer.iteration - 1, metrics, images=trainer.cost.images)
        _milestone(trainer, run, log)
        if trainer.world.any(stop.asked) and trainer.iteration < last:
            how = _save_and_say(trainer, run)
            raise Interrupted(f"stopped after iteration {trainer.iteration}, {how}")


def _milestone(trainer: Trainer, run: Path, log: Log, *, first: bool = False) -> None:
    """Evaluate, draw and save where the config asks for it at this iteration; each is done once,
    also over a resume."""
    c, now, here = trainer.config, trainer.iteration, trainer.world
    rows = here.gather(read_rows(run, EVALS) if here.main else [])[0]
    fresh = [row for row in rows if row["iteration"] <= now]
    evaluated = any(row["iteration"] == now for row in fresh)
    if _due(c.eval.every, trainer) and not evaluated:
        fresh.append({"iteration": now, **_evaluate(trainer, log)})
    changed = fresh if fresh != rows else None
    here.together(lambda: _keep(trainer, run, log, changed, first=first))


def _due(every: int, trainer: Trainer) -> bool:
    """Say whether something is done at this iteration: before the first, after the last, and every
    so many."""
    now, last = trainer.iteration, trainer.config.train.iterations
    return now in (0, last) or bool(every and now % every == 0)


def _evaluate(trainer: Trainer, log: Log) -> dict[str, Any]:
    """Evaluate on the held-out prompts, and say how it went."""
    c = trainer.config
    log.say(f"judging {len(trainer.test_set) * c.eval.images} held-out images ...")
    with log.phase("eval"), eval_weights(trainer):
        result = evaluate(trainer.model, c, trainer=trainer)
    low, high = result["interval"]
    log.say(
        f"held out after {trainer.iteration} iterations: {c.headline} {result[c.headline]:.3f} "
        f"(95 % {low:.3f} to {high:.3f})"
    )
    return result


def _keep(trainer: Trainer, run: Path, log: Log, evals: Rows | None, *, first: bool) -> None:
    """Write evaluations, grid and checkpoint where they are due; only the first process writes."""
    c, main = trainer.config, trainer.world.main
    if evals is not None and main:
        write_evals(run, evals)
    # sharded weights are put together by all processes
    if _due(c.samples.every, trainer) and (main or trainer.sharded):
        with log.phase("samples"):
            _sample(trainer, run, log)
    if not first and _due(c.checkpoint.every, trainer):
        with log.phase("save"):
            trainer.save(checkpoint.checkpoint_folder(run, trainer.iteration))
            if main:
                checkpoint.prune(run, c.checkpoint.keep)


def _sample(trainer: Trainer, run: Path, log: Log) -> None:
    """Draw the same prompts from the same noise as at every other iteration."""
    texts, images = sample_grid_prompts(trainer)
    if not trainer.world.main:
        return
    size = trainer.config.image
    prompts = {"prompts": texts, "height": size.height, "width": size.width}
    write_json(run / SAMPLES / PROMPTS, prompts)
    save_strip(images, strip_file(run, trainer.iteration))
    log.image("samples", torch.cat(list(images), dim=2), trainer.iteration)
    save_png(run_grid(run), run / GRID)


# --------------------------------------------------------------------------------------- the end


@contextmanager
def _told_where_it_stopped(trainer: Trainer, run: Path, log: Log) -> Iterator[None]:
    """Add to a reward's error, and to one of no memory, what was saved and how to go on."""
    try:
        yield
    except RewardError as error:
        # the policy is as it was before this iteration
        saved = _save_and_say(trainer, run)
        text = f"{error}\nstopped before iteration {trainer.iteration}, {saved}"
        raise RewardError(text) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        advice = explain(error, trainer.config, log.current)
        raise RunError(f"{advice}\n{_after_memory(trainer, run, log)}") from error


def _save_and_say(trainer: Trainer, run: Path) -> str:
    """Write a checkpoint -> where it is and how to go on."""
    folder = checkpoint.checkpoint_folder(run, trainer.iteration)
    trainer.world.together(lambda: trainer.save(folder))
    return f"saved {folder}; go on with: {_resume(trainer, run)}"


def _after_memory(trainer: Trainer, run: Path, log: Log) -> str:
    """Save the policy if running out of memory left it as it was -> where it stopped, and how to go
    on."""
    edit, stopped = f"set it in {run / CONFIG}", f"stopped in iteration {trainer.iteration}"
    # other processes do not know of the error, and would not save along
    if log.current in HARMLESS and trainer.world.size == 1:
        return f"{stopped}; {edit}; {_save_and_say(trainer, run)}"
    newest = checkpoint.latest(run) if trainer.world.main else None
    if newest is None:
        return (
            f"{stopped}, before a checkpoint was written; start again in another folder with the "
            "changed config"
        )
    return f"{stopped}; {edit}; {newest} is whole; go on with: {_resume(trainer, run)}"


def _resume(trainer: Trainer, run: Path) -> str:
    """Return the command that goes on with the run."""
    plugins = "".join(f" --plugin {name}" for name in trainer.config.plugins)
    return f"flowrl train --resume {run}{plugins}"


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
    figures = ", ".join(str(run / name) for name in (GRID, CURVES, REPORT))
    log.say(f"images: {figures}")
    return summary
