"""Start a run, or go on with one: a folder that is its alone, the trainer at its newest checkpoint,
and which of its evaluations can still be compared."""

from __future__ import annotations

import itertools
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrl.config.load import Config, differences, flat, load_config
from flowrl.config.overrides import plugin_words
from flowrl.core.abilities import PassesFence
from flowrl.core.errors import CheckpointError, ConfigError, RunError
from flowrl.core.files import delete_drafts, only, without, write_json, write_text
from flowrl.core.installation import environment
from flowrl.core.part import Part
from flowrl.core.processes import world
from flowrl.core.prompts import PromptSet, load_prompts, prompts_hash
from flowrl.core.types import FlowModel
from flowrl.cost.out_of_memory import explained
from flowrl.evaluation.contents import own_judge
from flowrl.runs.evaluate import eval_weights, evaluate, guidance_of, probe_of
from flowrl.runs.folder import (
    CONFIG,
    EARLIER_EVALS,
    ENVIRONMENT,
    EVALS,
    SAMPLES,
    SUMMARY,
    FolderLock,
    Rows,
    RunPath,
    check_lines,
    left_of,
    lock,
    read_evals,
    read_rows,
    try_lock,
    what_is_there,
    write_evals,
)
from flowrl.runs.gain import score_of
from flowrl.runs.kept_inputs import listed_in, moved_along, trust
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer

Resume = bool | Literal["auto", "changed"]
FREE = ("eval", "samples", "checkpoint", "monitors")  # sections that may change when a run goes on
RATE = "optimizer.lr"  # and a key that may, where that is meant


class Start(NamedTuple):
    """Where a run begins."""

    run: Path
    checkpoint: Path | None  # to go on from; None: from the beginning
    rewrite: bool = False  # the run's config may have changed in what is free to change


def default_folder(config: Config) -> Path:
    """Return where a run belongs that was given no folder: ``runs/NAME-seedSEED``."""
    return Path("runs") / f"{config.name}-seed{config.seed}"


def train_command(option: str, path: Path, config: Config) -> str:
    """Return the command that trains a config or goes on with a run, for a shell."""
    words = ["flowrl", "train"]
    if option:
        words.append(option)
    words.append(str(path))
    return shlex.join([*words, *plugin_words(config.plugins)])


def check_alike(config: Config) -> None:
    """Raise ConfigError in every process where one has another config, seed, prompts or versions:
    they would train as one run and be none. All processes call it first."""
    here = world()
    if here.alone:
        return
    found = here.gather(here.together(partial(_facts, config)))
    for rank, facts in enumerate(found):
        for key in found[0].keys() | facts.keys():
            first, other = found[0].get(key), facts.get(key)
            if first != other:
                raise ConfigError(
                    f"process {rank} of {here.size} has {key} {other!r}, and process 0 has "
                    f"{first!r}: start all processes with the same command, prompt files and "
                    "versions"
                )


def _facts(config: Config) -> dict[str, Any]:
    """Return what all processes of a run must have in common, prompt lists by what they hold."""
    facts = flat(config.to_dict())
    for key in ("train", "test"):
        listed = load_prompts(facts.pop(f"prompts.{key}"))
        facts[f"prompts.{key} with the hash"] = prompts_hash(listed)
    versions = environment()
    return facts | only(versions, ("flowrl", "commit", "torch", "python"))


@contextmanager
def claimed(config: Config, run: Path | None, resume: Resume) -> Iterator[Start]:
    """Claim a folder for a run, before anything is loaded, and hold it as long as the run works.

    The lock is the system's and ends with the process. Without `run` the `default_folder` is taken,
    or the first of NAME-2, NAME-3 and so on that is free. Raises RunError where another process
    works, another run is, or a config is that no run wrote; CheckpointError if there is nothing
    whole to resume from; ConfigError if "auto" finds a run of another config.
    """
    held: list[FolderLock] = []
    try:
        # a name that was free for one process may be taken for the next: all take the first one's
        yield world().by_main(partial(_claim, config, run, resume, held))
    finally:
        for each in held:
            each.leave(SAMPLES)  # a folder in which nothing began goes again


def _claim(config: Config, run: Path | None, resume: Resume, held: list[FolderLock]) -> Start:
    """Lock the folder -> where the run begins."""
    # without a name: a new folder
    if run is None and resume != "auto":
        run, found = _free_folder(config)
        held.append(found)
        return _fresh(run)
    # locked before anything in it is read or deleted
    run = run or default_folder(config)
    if resume in (True, "changed") and not run.exists():
        raise CheckpointError(f"{run}: no whole checkpoint to resume from; there is no such folder")
    held.append(lock(run, mend="wait for it, stop it, or name another folder with --run"))
    if _begun(run) or holds_run(run):  # what a process left that was killed
        for place in (run, run / "checkpoints", run / SAMPLES):
            delete_drafts(place)
    # go on with what is there, or begin where nothing is lost by it
    if resume in (True, "changed") or (resume == "auto" and holds_run(run)):
        return _resumed(config, run, resume)
    if holds_run(run):
        raise RunError(
            f"{run} holds a run already: resume it with --resume (in Python: resume=True), or name "
            "another folder with --run"
        )
    _check_not_overwritten(config, run)
    return _fresh(run)


def _check_not_overwritten(config: Config, run: Path) -> None:
    """Raise RunError where a new run would write over the given config, or over one that no run
    wrote."""
    begun, left = _begun(run), left_of(run)
    # a run without the file that says what it is
    if left and not (run / CONFIG).exists():
        raise RunError(
            f"{run} holds {', '.join(left)} of a run whose {CONFIG} is not there: bring it back "
            "and go on with --resume, or name another folder with --run"
        )
    # the given config lies in the folder: the run would write its own over it
    if _would_overwrite(config, run):
        wrong = (
            f"expected a run folder that does not hold the given config, got {run} for "
            f"{config.source}: a new run would write its own config.yaml over it and delete the "
            "logs beside it. Name another folder with --run"
        )
        if begun:
            again = train_command("--resume", run, config)
            wrong += f", or begin the run of this folder again: {again}"
        raise RunError(wrong)
    # a config that somebody put there
    if (run / CONFIG).exists() and not begun:
        raise RunError(
            f"expected a new folder or one that a run began in, got {run}, which holds a "
            f"{CONFIG} that no run wrote (a run writes {ENVIRONMENT} before it): a new run would "
            "write its own over it. Name another folder with --run, rename that file, or train "
            f"it: {train_command('', run / CONFIG, config)}"
        )


def _begun(run: Path) -> bool:
    """Say whether a run wrote the folder's config: it writes its environment first."""
    return (run / CONFIG).exists() and (run / ENVIRONMENT).exists()


def _would_overwrite(config: Config, run: Path) -> bool:
    """Say whether the config that was given is the file that a new run writes in its folder."""
    given, kept = Path(config.source), run / CONFIG
    return given.is_file() and kept.is_file() and kept.samefile(given)


def holds_run(run: Path) -> bool:
    """Say whether a folder holds what a new run must not take the place of: one that was killed
    before its first checkpoint has written no line of a log."""
    saved = checkpoint.checkpoint_folders(run) or (run / SUMMARY).exists()
    return ((run / CONFIG).exists() and bool(saved)) or (_begun(run) and bool(left_of(run)))


def _free_folder(config: Config) -> tuple[Path, FolderLock]:
    """Lock the default folder, or the first of NAME-2, NAME-3 and so on that holds no run and no
    config of a user's own, and that nobody works in."""
    folder = free = default_folder(config)
    for number in itertools.count(2):
        found = try_lock(free)
        theirs = (free / CONFIG).exists() and not _begun(free)
        mine = (
            not theirs
            and not left_of(free)
            and not holds_run(free)
            and not _would_overwrite(config, free)
        )
        if found is not None and mine:
            return free, found
        if found is not None:
            found.release()
        free = folder.with_name(f"{folder.name}-{number}")
    raise AssertionError


def _fresh(run: Path) -> Start:
    """Make the folder of a new run."""
    try:
        (run / SAMPLES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"cannot write to the run folder {run}: {reason}") from error
    return Start(run, None)


def _resumed(config: Config, run: Path, resume: Resume) -> Start:
    """Find the checkpoint to go on from; a run that was killed before its first one begins anew."""
    if resume is not True:
        _check_same(config, run, meant=resume == "changed")
    newest = checkpoint.latest(run)
    if newest is None and (holds_run(run) or not _begun(run)):
        raise CheckpointError(f"{run}: no whole checkpoint to resume from{what_is_there(run)}")
    if newest is None:
        return _fresh(run)
    return Start(run, newest, rewrite=resume is not True)


def _check_same(config: Config, run: Path, *, meant: bool) -> None:
    """Raise ConfigError unless a run is one of this config, but for how long it trains and when it
    looks at itself; and, where the change is `meant`, for its learning rate."""
    saved = moved_along(load_config(run / CONFIG, (), config.plugins), run)
    wrong = differences(_fixed(saved), _fixed(listed_in(config, run)))
    if meant:
        wrong = [key for key in wrong if key != RATE]
    if not wrong:
        return
    differ = f"{', '.join(wrong[:4])} differ"
    if len(wrong) == 1:
        differ += "s"
    if meant:
        raise ConfigError(
            f"{differ} from the run in {run}: when a run goes on only train.iterations, {RATE}, "
            f"{', '.join(FREE)} may change; begin a new run from its weights with train.start"
        )
    raise ConfigError(
        f"{run} holds a run of another config: {differ}; name another folder with --run, or go on "
        "with its own config: --resume RUN"
    )


def _fixed(config: Config) -> dict[str, Any]:
    """Return what must stay as it is when a run goes on, by dotted key."""
    return without(flat(without(config.to_dict(), *FREE)), "train.iterations")


def begin(
    config: Config,
    start: Start,
    model: FlowModel | None,
    callbacks: Sequence[Part],
    quiet: bool,
) -> tuple[Trainer, int | None, bool]:
    """Make the trainer, at its checkpoint if there is one -> it, the iteration resumed at, and
    whether the evaluations of before are lost."""
    here, run = world(), start.run
    # a log that is damaged is found before the model is loaded
    rows: Rows = []
    if start.checkpoint is not None:
        last = int(start.checkpoint.name)
        rows = here.by_main(partial(_evals, run, last))
    say = None
    if here.main and not quiet:
        say = partial(print, file=sys.stderr, flush=True)
    with explained(config, "load"):
        made = partial(Trainer, config, model=model, callbacks=callbacks, say=say)
        trainer = here.together(made)
        if config.monitors.drift is not None:  # before any weight is loaded
            trainer.state.probe = probe_of(trainer)
    if start.checkpoint is None:
        # only now: a config that does not work must not occupy the folder
        here.by_main(partial(_occupy, config, run, trainer.model))
        return trainer, None, False
    # what was judged in another way counts no longer; the evaluation before training is made anew
    # where it was lost
    known = _judged_alike(trainer, run, rows, quiet)
    if not any(row["iteration"] == 0 for row in known):
        known = [_evaluated_anew(trainer, run, quiet), *known]
    if here.main and known != rows:
        write_evals(run, known)
    trainer.load(start.checkpoint)
    if trainer.iteration > config.train.iterations:
        raise ConfigError(
            f"train.iterations={config.train.iterations}: {run} has done {trainer.iteration} "
            f"already; raise it in {run / CONFIG}, or evaluate an earlier checkpoint"
        )
    if here.main and start.rewrite:
        write_text(run / CONFIG, config.dump())
    return trainer, trainer.iteration, trainer.iteration > 0 and not rows


def _occupy(config: Config, run: Path, model: FlowModel) -> None:
    """Write what a run is, the config last: one without the other is a user's own."""
    about = {**environment(), "processes": world().size}
    if isinstance(model, PassesFence):
        about["fence"] = model.fence_record()
    write_json(run / ENVIRONMENT, about)
    write_text(run / CONFIG, config.dump())
    trust(run, config.plugins)


def _evals(run: Path, iterations: int) -> Rows:
    """Read the evaluations of a run, checked as its metrics of so many iterations are. Raises
    RunError that names file and line."""
    check_lines(run, iterations)
    try:
        read_evals(run)
    except RunError as error:
        raise RunError(
            f"{error}; repair or delete the line, then resume: the evaluation before training is "
            "made anew where it is missing"
        ) from error
    return read_rows(run, EVALS)


def _judged_alike(trainer: Trainer, run: Path, rows: Rows, quiet: bool) -> Rows:
    """Return the evaluations that can be compared with those to come, by iteration; the others go
    to a file of their own."""
    about = (trainer.model, trainer.config, trainer.test_set)
    alike, others = parted(rows, *about)
    if others and trainer.world.main:
        set_aside(run, others)
        if not quiet:
            what = f"evaluations of {run / EVALS} count no longer ({why(others, *about)})"
            print(f"{len(others)} {what}: they are in {EARLIER_EVALS}", file=sys.stderr)
    return alike


def _evaluated_anew(trainer: Trainer, run: Path, quiet: bool) -> dict[str, Any]:
    """Evaluate the weights from before training, which a trainer has before it loads any."""
    if trainer.world.main and not quiet:
        print(f"{run / EVALS} lacks the evaluation before training: judging anew", file=sys.stderr)
    with eval_weights(trainer):
        found = evaluate(trainer.model, trainer.config, trainer=trainer)
    found["setting"]["weights"] = trainer.config.eval.weights
    if trainer.state.probe is not None:
        found["drift"] = 0.0
    return {"iteration": 0, **found}


_SINGLE = {"best_of": 1, "best_by": ""}  # what a setting leaves out where one image is drawn


def parted(rows: Rows, model: FlowModel, c: Config, prompts: PromptSet) -> tuple[Rows, Rows]:
    """Part a run's evaluations into those that are made as a config's `eval` section says now, by
    iteration and each once, and the others. One without a number as its score is of the others."""
    wanted = _wanted(model, c, prompts)
    alike: dict[int, dict[str, Any]] = {}
    others = []
    for row in rows:
        score = score_of(row)
        judged = row.get("score") == c.headline and score is not None and math.isfinite(score)
        if judged and not _changed_settings(row, wanted):
            alike.setdefault(row["iteration"], row)
        elif row not in others:
            others.append(row)
    return [alike[iteration] for iteration in sorted(alike)], others


def _changed_settings(row: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Say what of an evaluation's setting is another one now."""
    had = {**_SINGLE, **row.get("setting", {})}
    found = []
    for key, value in wanted.items():
        if key in had and had[key] != value:
            found.append(f"{key} {had[key]!r} -> {value!r}")
    return found


def why(rows: Rows, model: FlowModel, c: Config, prompts: PromptSet) -> str:
    """Say in a few words what differs between evaluations that were set aside and the config."""
    wanted = _wanted(model, c, prompts)
    said: dict[str, None] = {}
    for row in rows:
        if row.get("score") != c.headline:
            said[f"score {row.get('score')!r} -> {c.headline!r}"] = None
        elif score_of(row) is None:
            said["no score"] = None
        said |= dict.fromkeys(_changed_settings(row, wanted))
    return ", ".join(said)


def set_aside(run: RunPath, rows: Rows) -> None:
    """Add evaluations to the file of those that count no longer. Raises RunError."""
    write_evals(run, [*read_rows(run, EARLIER_EVALS), *rows], EARLIER_EVALS)


def _wanted(model: FlowModel, c: Config, prompts: PromptSet) -> dict[str, Any]:
    """Return what an evaluation's setting would be now; how many images go through the network at
    once is no part of what is judged."""
    (height, width), best_by = c.eval_size, ""
    if c.eval.best_of > 1:
        best_by = c.eval.best_by or c.headline
    return {
        "height": height,
        "width": width,
        "steps": c.eval.steps,
        "images": c.eval.images,
        "seed": c.eval.seed,
        "tuned": c.eval.tuned,
        "weights": c.eval.weights,
        "best_of": c.eval.best_of,
        "best_by": best_by,
        "prompts_hash": prompts_hash(prompts),
        **guidance_of(model, c),
        **own_judge(c),
    }
