"""A run in a folder: train with checkpoints, held-out evaluations, grids and a summary; open it again later."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl import checkpoint, report
from flowrl.config import Config, load_config
from flowrl.dist import world
from flowrl.errors import CheckpointError, RewardError, RunError
from flowrl.evaluate import evaluate, sample
from flowrl.log import RunLogger, Silence, environment
from flowrl.loop import Interrupted, StopSignal, Trainer, put_weights, write_json, write_text
from flowrl.oom import HARMLESS, explain, explained, is_out_of_memory
from flowrl.prompts import check_records, load_prompts
from flowrl.types import FlowModel
from flowrl.weights import Weights


def train(
    config: Config, run: str | Path, *, resume: bool = False, quiet: bool = False, model: FlowModel | None = None
) -> dict[str, Any]:
    """Train a config in the folder `run` and return its summary (also ``summary.json``).

    With `resume` go on from the newest whole checkpoint, bit for bit as if never stopped. Raises Interrupted after
    Ctrl-C and RewardError after a reward failed, both with a checkpoint written; RunError for a NaN, a full disk, no
    memory left (see oom.py) or a folder that holds another run.
    """
    here = world()
    run = here.gather(Path(run))[0]  # a name that was free for one process may be taken for the next
    start = here.together(lambda: _find_start(run, resume) if here.main else None)
    start = here.gather(start)[0]
    with explained(config, "load"):
        trainer = here.together(lambda: Trainer(config, model=model))
    if start is not None:
        trainer.load(start)
    elif here.main:  # only now: a config that does not work must not occupy the folder
        write_text(run / "config.yaml", config.dump())
        write_json(run / "environment.json", {**environment(), "processes": here.size})
    began = None if start is None else trainer.iteration
    with _logger(trainer, run, began, quiet) as log, StopSignal() as stop:
        trainer.log = log
        log.say(f"{config.name}: {describe(trainer)}\nrun folder {run}")
        try:
            _milestone(trainer, run, log, first=True)
            while trainer.iteration < config.train.iterations:
                metrics = trainer.step()
                _add_accuracy(metrics, config)
                log.log(trainer.iteration - 1, metrics, images=trainer.budget.images)
                _milestone(trainer, run, log)
                if here.any(stop.asked) and trainer.iteration < config.train.iterations:
                    how = _save_and_say(trainer, run)
                    raise Interrupted(f"stopped after iteration {trainer.iteration}, {how}")
        except RewardError as error:  # the policy is as it was before this iteration
            raise RewardError(
                f"{error}\nstopped before iteration {trainer.iteration}, {_save_and_say(trainer, run)}"
            ) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(f"{explain(error, config, log.current)}\n{_after_memory(trainer, run, log)}") from error
        summary = here.together(lambda: _finish(run, config, log) if here.main else {})
    return here.gather(summary)[0]


def _logger(trainer: Trainer, run: Path, began: int | None, quiet: bool) -> RunLogger | Silence:
    """Log in the first process; the others are silent."""
    config = trainer.config
    if not trainer.world.main:
        return Silence()
    kl = "kl" if config.kl_beta else "approx_kl"
    labels = {"reward": "reward", "acc": "accuracy", "ratio": "ratio", "±": "ratio_std", "kl": kl}
    return RunLogger(run, began, quiet=quiet, total=config.train.iterations, columns=labels)


def _save_and_say(trainer: Trainer, run: Path) -> str:
    """Write a checkpoint -> where it is and how to go on."""
    folder = checkpoint.checkpoint_folder(run, trainer.iteration)
    trainer.world.together(lambda: trainer.save(folder))
    return f"saved {folder}; go on with: {_resume(trainer, run)}"


def _after_memory(trainer: Trainer, run: Path, log: RunLogger | Silence) -> str:
    """Save the policy if running out of memory left it as it was -> where it stopped, and how to go on."""
    edit, stopped = f"set it in {run / 'config.yaml'}", f"stopped in iteration {trainer.iteration}"
    if log.current in HARMLESS and trainer.world.size == 1:  # other processes do not know, and would not save along
        return f"{stopped}; {edit}; {_save_and_say(trainer, run)}"
    newest = checkpoint.latest(run) if trainer.world.main else None
    if newest is None:
        return f"{stopped}, before a checkpoint was written; start again in another folder with the changed config"
    return f"{stopped}; {edit}; {newest} is whole; go on with: {_resume(trainer, run)}"


def _resume(trainer: Trainer, run: Path) -> str:
    plugins = "".join(f" --plugin {name}" for name in trainer.config.plugins)
    return f"flowrl train --resume {run}{plugins}"


def describe(trainer: Trainer) -> str:
    """Say in plain English what one iteration does and what is trained."""
    numbers = sum(p.numel() for p in trainer.params.values())
    c = trainer.config
    lines = [
        f"{c.train.iterations} iterations, {numbers:,} trained numbers, lr {c.train.lr:g}, seed {c.seed}",
        *trainer.budget.lines(),
        *([f"processes  {trainer.world.size}, each with its share of the prompts"] if trainer.world.size > 1 else []),
        f"prompts    {len(trainer.train_set)} to train on ({trainer.train_set.path}), "
        f"{len(trainer.test_set)} held out, {c.eval.images} pictures each to judge",
    ]
    return "\n".join(lines)


def _find_start(run: Path, resume: bool) -> Path | None:
    """Make the folder of a new run, or find the checkpoint to resume from."""
    if not resume:
        if (run / "config.yaml").exists():
            raise RunError(f"{run} holds a run already: resume it with --resume, or name another folder with --run")
        try:
            (run / "samples").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write to the run folder {run}: {error.strerror or error}") from error
        return None
    start = checkpoint.latest(run)
    if start is None:
        raise CheckpointError(f"{run}: no whole checkpoint to resume from; start again in another folder")
    return start


def _add_accuracy(metrics: dict[str, float], config: Config) -> None:
    """Show the headline score of training pictures as `accuracy`."""
    metrics["accuracy"] = metrics[f"reward/{config.headline}"]


def _due(every: int, iteration: int, last: int) -> bool:
    return iteration in (0, last) or bool(every and iteration % every == 0)


def _milestone(trainer: Trainer, run: Path, log: RunLogger | Silence, *, first: bool = False) -> None:
    """Evaluate, draw and save where the config asks for it at this iteration; each is done once, also over a resume."""
    c, now, last, here = trainer.config, trainer.iteration, trainer.config.train.iterations, trainer.world
    rows = here.gather(_eval_rows(run) if here.main else [])[0]
    fresh = [row for row in rows if row["iteration"] <= now]
    if _due(c.eval.every, now, last) and not any(row["iteration"] == now for row in fresh):
        log.say(f"judging {len(trainer.test_set) * c.eval.images} held-out pictures ...")
        with log.phase("eval"), eval_weights(trainer):
            result = evaluate_config(trainer.model, c, trainer=trainer)
        fresh.append({"iteration": now, **result})
        low, high = result["interval"]
        log.say(
            f"held out after {now} iterations: {c.headline} {result[c.headline]:.3f} (95 % {low:.3f} to {high:.3f})"
        )
    here.together(lambda: _keep(trainer, run, log, fresh if fresh != rows else None, first=first))


def _keep(
    trainer: Trainer, run: Path, log: RunLogger | Silence, rows: list[dict[str, Any]] | None, *, first: bool
) -> None:
    """Write evaluations, grid and checkpoint where they are due; only the first process writes."""
    c, now, last, main = trainer.config, trainer.iteration, trainer.config.train.iterations, trainer.world.main
    if rows is not None and main:
        write_text(run / "eval.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if _due(c.grid.every, now, last) and (main or trainer.sharded):
        with log.phase("grid"), eval_weights(trainer):
            _strip(trainer, run, log)
    if not first and _due(c.checkpoint.every, now, last):
        with log.phase("save"):
            trainer.save(checkpoint.checkpoint_folder(run, now))
            if main:
                checkpoint.prune(run, c.checkpoint.keep)


def eval_weights(trainer: Trainer) -> AbstractContextManager[None]:
    """Put the weights that a config evaluates into the model for a while."""
    return trainer.weights.using("ema") if trainer.config.eval.weights == "ema" else nullcontext()


def evaluate_config(
    model: FlowModel, c: Config, *, trainer: Trainer | None = None, base: Weights | None = None, progress: Any = None
) -> dict[str, Any]:
    """Evaluate a model on the held-out prompts as a config's `eval` section says.

    With ``eval.tuned`` below 1 the last steps are taken with the weights from before training: the snapshot "ref" of
    the trainer, or of `base`, which `load_run` gives. Raises ConfigError if it is needed and not there.
    """
    prompts = trainer.test_set if trainer else load_prompts(c.prompts.test)
    rewards = trainer.rewards if trainer else {name: call.make() for name, call in c.rewards.items()}
    check_records(prompts, rewards)
    return evaluate(
        model,
        prompts,
        rewards,
        headline=c.headline,
        height=c.image.height,
        width=c.image.width,
        steps=c.eval.steps,
        images=c.eval.images,
        batch=c.eval.batch,
        seed=c.eval.seed,
        tuned=c.eval.tuned,
        late=_late(c, trainer.weights if trainer else base),
        progress=progress,
        world=trainer.world if trainer else None,
    )


def _late(c: Config, base: Weights | None) -> Callable[[], AbstractContextManager[None]] | None:
    return partial(base.using, "ref") if base is not None and c.eval.tuned < 1 else None


def _strip(trainer: Trainer, run: Path, log: RunLogger | Silence) -> None:
    """Draw the same prompts from the same noise as at every other checkpoint."""
    c = trainer.config
    chosen = grid_prompts(trainer.test_set.records, c.grid.prompts)
    texts = [trainer.test_set.texts[i] for i in chosen]
    pictures = sample_all(trainer.model, c, texts, seed=c.grid.seed, base=trainer.weights)
    if not trainer.world.main:
        return
    folder = run / "samples"
    write_json(folder / "prompts.json", {"prompts": texts, "height": c.image.height, "width": c.image.width})
    report.save_strip(pictures, folder / f"{trainer.iteration:06d}.png")
    log.image("samples", torch.cat(list(pictures), dim=2), trainer.iteration)
    report.save_png(report.run_grid(run), run / "grid.png")


def sample_all(
    model: FlowModel, c: Config, texts: list[str], *, seed: int, images: int = 1, base: Weights | None = None
) -> Tensor:
    """Sample `images` pictures of each prompt with a config's `eval` steps -> [len(texts) * images, 3, H, W], CPU.

    `base` as in `evaluate_config`.
    """
    parts = sample(
        model,
        texts,
        height=c.image.height,
        width=c.image.width,
        steps=c.eval.steps,
        images=images,
        batch=c.eval.batch,
        seed=seed,
        tuned=c.eval.tuned,
        late=_late(c, base),
    )
    return torch.cat([pictures.cpu() for _, pictures in parts])


def grid_prompts(records: list[dict[str, Any]], count: int) -> list[int]:
    """Pick `count` prompts, the tasks in turn, evenly spread over each task's list."""
    by_task: dict[str, list[int]] = {}
    for i, record in enumerate(records):
        by_task.setdefault(str(record.get("tag", "all")), []).append(i)
    turns = [(turn, task) for turn in range(count) for task, rows in by_task.items() if turn < len(rows)][:count]
    share = Counter(task for _, task in turns)
    return [by_task[task][turn * len(by_task[task]) // share[task]] for turn, task in turns]


def _eval_rows(run: Path) -> list[dict[str, Any]]:
    file = run / "eval.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _finish(run: Path, config: Config, log: RunLogger | Silence) -> dict[str, Any]:
    """Write the summary and the pictures, and print before and after."""
    rows = _eval_rows(run)
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
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
    write_json(run / "summary.json", summary)
    try:
        report.curves(run).savefig(run / "curves.png", dpi=110)
    except OSError as error:
        raise RunError(f"cannot write {run / 'curves.png'}: {error.strerror or error}") from error
    write_text(run / "report.html", report.html_report(run))
    log.say(report.before_after_table(summary))
    names = ", ".join(str(run / name) for name in ("grid.png", "curves.png", "report.html"))
    log.say(f"pictures: {names}")
    return summary


class Loaded(NamedTuple):
    """A model with the weights of a checkpoint."""

    model: FlowModel
    config: Config
    iteration: int
    base: Weights  # snapshot "ref", the weights from before training, where `eval.tuned` needs it


def open_run(
    path: str | Path,
    *,
    weights: str | None = None,
    iteration: int | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> tuple[FlowModel, Config, int]:
    """Load the model of a run at a checkpoint, as `load_run` does -> (model, config, iteration)."""
    return load_run(path, weights=weights, iteration=iteration, overrides=overrides, plugins=plugins)[:3]


def load_run(
    path: str | Path,
    *,
    weights: str | None = None,
    iteration: int | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> Loaded:
    """Load the model of a run at a checkpoint.

    `path` is a run folder (its newest whole checkpoint, or the one of `iteration`) or a checkpoint folder; `weights` is
    ema, current or base (as before training), by default what the run's evaluations take. Raises CheckpointError if
    there is none or it does not fit.
    """
    path = Path(path)
    is_checkpoint = (path / checkpoint.MANIFEST).exists()
    run = path.parent.parent if is_checkpoint else path
    if not (run / "config.yaml").exists():
        raise CheckpointError(f"{path}: expected a run folder with config.yaml, or a checkpoint inside one")
    config = load_config(run / "config.yaml", overrides, plugins)
    with explained(config, "load"):
        model = config.call("model")()
    base = base_weights(model, config)
    if weights == "base":
        return Loaded(model, config, 0, base)
    folder = path if is_checkpoint else checkpoint.latest(run)
    if iteration is not None and not is_checkpoint:
        folder = checkpoint.checkpoint_folder(run, iteration)
    if folder is None:
        raise CheckpointError(f"{run}: there is no whole checkpoint yet")
    files, state = checkpoint.load(folder)
    name = weights or config.eval.weights
    if name not in files:
        raise CheckpointError(f"{folder}: has no {name!r} weights, only {', '.join(files.keys() - {'optimizer'})}")
    put_weights(model.trainable(), files[name], folder)
    return Loaded(model, config, int(state["iteration"]), base)


def base_weights(model: FlowModel, config: Config) -> Weights:
    """Keep a model's weights as the snapshot "ref" where `eval.tuned` needs them; to be called before training."""
    base = Weights(model.trainable())
    if config.eval.tuned < 1:
        base.snapshot("ref")
    return base
