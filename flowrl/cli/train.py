"""``flowrl train``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowrl.cli import options
from flowrl.cli.output import in_terminal, show_or_write, working
from flowrl.core.errors import ConfigError

if TYPE_CHECKING:
    from flowrl.config.compose import Composition
    from flowrl.config.load import Config
    from flowrl.runs.start_run import Resume as How

AUTO = Path("auto")
OptionalConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help=f"a YAML file or the name of a shipped config, such as {options.DEFAULT}",
        autocompletion=options.complete_config,
    ),
]


Run = Annotated[
    Path | None,
    typer.Option(
        help="folder of the run; default: runs/NAME-seedSEED, numbered if taken",
        callback=options.check_folder,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="go on with a run from its newest whole checkpoint, train.iterations=N for longer; "
        "auto: begin CONFIG, or go on with it where it has begun",
    ),
]
Seed = Annotated[int | None, typer.Option(help="the same as seed=N")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="check it all but the weights, print plan and memory"),
]
Rehearse = Annotated[
    bool,
    typer.Option(
        "--rehearse",
        help="one iteration on a tiny random model of the same class, and nothing is kept",
    ),
]


def train(
    config: OptionalConfig = None,
    *,
    overrides: options.Overrides,
    changes: options.Set,
    run: Run = None,
    resume: Resume = None,
    seed: Seed = None,
    model: options.Model = None,
    dry_run: DryRun = False,
    rehearse: Rehearse = False,
    track: options.Track,
    quiet: options.Quiet = False,
    json: options.Json = None,
    profile: options.Profile = None,
    plugin: options.Plugins,
) -> None:
    """Train a config in a run folder."""
    auto = resume == AUTO
    again = resume is not None and not auto
    others = (config, seed is not None, run, dry_run, rehearse, profile, model)
    if again and any(others):
        raise ConfigError(
            "--resume goes on with the run's own config in its own folder: leave out the "
            "config, --seed, --model, --run, --profile, --dry-run and --rehearse. To train longer: "
            f"flowrl train --resume {resume} train.iterations=N"
        )
    if rehearse and (dry_run or run is not None or auto):
        raise ConfigError("--rehearse keeps nothing: leave out --run, --resume and --dry-run")
    if not again and not config:
        raise ConfigError(
            f"expected a config, such as {options.DEFAULT}; `flowrl configs` lists the shipped ones"
        )
    given = [*overrides, *changes]
    if seed is not None:
        given.append(f"seed={seed}")
    source = str(config) if model is None or again else _on_model(str(config), model)
    if dry_run:
        _show_plan(source, given, plugin, profile, json)
        return
    if rehearse:
        _rehearse(source, options.fitted(source, given, plugin, profile), plugin, json)
        return
    from flowrl.runs.train import train as run_training

    options.quiet_libraries()
    # a run is resumed with what it has, so that it ends as an unbroken one
    if resume is not None and not auto:
        chosen, run = _saved(resume, plugin, given), resume
    else:
        chosen = options.load_fitted(source, given, plugin, profile)
    how: How = again
    if auto:
        how = "auto"
    elif again and given:
        how = "changed"
    done = run_training(chosen, run, resume=how, quiet=quiet, track=track)
    _write(done, json)
    _say_next(chosen, done["run"], quiet)


def _saved(run: Path, plugin: list[str], changes: list[str]) -> Config:
    """Return the config of a run that goes on, with changes. Raise ConfigError."""
    from flowrl.config.load import load_config
    from flowrl.runs.open_run import saved_config

    plugin = options.allowed(run, plugin)
    found = saved_config(run, plugin)
    if not changes:
        return found
    return load_config(found, changes, plugin)


def _on_model(config: str, model: str) -> Composition:
    """Return a config's method on another model. Raise ConfigError, ModelError."""
    from flowrl.runs.composed import composed

    return composed(config, model)


def _show_plan(
    config: str | Composition,
    given: list[str],
    plugin: list[str],
    profile: str | None,
    file: Path | None,
) -> None:
    """Print what a config would do; nothing of a plan that cannot be trained. Raises ConfigError,
    after the plan, where something is not here that no run downloads."""
    named = config
    if not isinstance(config, str):
        named = config.source
    with working(f"working out what {named} does"):
        from flowrl.cost.report import MISSING, dry_run

        options.quiet_libraries()
        chosen = options.load_fitted(config, given, plugin, profile)
        plan = dry_run(chosen)
    facts = {"config": chosen.to_dict(), "plan": plan.splitlines()}
    # of a composition each value says where it is from
    if isinstance(config, str):
        shown = chosen.dump()
    else:
        shown, facts["marks"] = config.text(chosen.to_dict()), config.marks
    show_or_write(f"{shown}\n{plan}", facts, file)
    # the plan is worth reading all the same; but a script must not go on as if all were there
    lacking = []
    for line in plan.splitlines():
        if line.startswith(MISSING):
            lacking.append(line.removeprefix(MISSING))
    if lacking:
        raise ConfigError(f"{named} could not be trained here: {'; '.join(lacking)}")


def _rehearse(
    config: str | Composition, given: list[str], plugin: list[str], file: Path | None
) -> None:
    """Train one iteration on a tiny model, and say what was done, and with what."""
    from flowrl.config.overrides import plugin_words
    from flowrl.runs.rehearse import rehearse

    options.quiet_libraries()
    found = rehearse(config, given, plugin)
    model = "the config's own model"
    if found.pipeline:
        model = f"a tiny random {found.pipeline}"
    lines = [f"rehearsed in {found.seconds:.0f} s: one iteration on {model}; nothing is kept"]
    if found.stood_in:
        lines.append(f"stood in for by the images' brightness: {', '.join(found.stood_in)}")
    options_given = shlex.join([*given, *plugin_words(plugin)])
    named = config if isinstance(config, str) else config.command
    lines.append(f"train it: flowrl train {named} {options_given}".rstrip())
    facts = {"pipeline": found.pipeline, "stood_in": found.stood_in, "seconds": found.seconds}
    show_or_write("\n".join(lines), {**facts, "summary": found.summary}, file)


def _say_next(config: Config, run: str, quiet: bool) -> None:
    """Say in a terminal what to try next, in the first process."""
    from flowrl.core.processes import world

    if quiet or not in_terminal() or not world().main:
        return
    print("try next:", file=sys.stderr)
    for words in next_commands(config, run):
        print(f"  {shlex.join(words)}", file=sys.stderr)


def next_commands(config: Config, run: str) -> list[list[str]]:
    """Return the words of three commands that look at a run's model; none lacks an argument."""
    from flowrl.config.overrides import plugin_words
    from flowrl.core.prompts import load_prompts
    from flowrl.evaluation.sources import source_paths

    # a held-out prompt, with the images that it starts from
    prompts = load_prompts(config.prompts.test)
    sample = ["flowrl", "sample", run, prompts.texts[0]]
    for file in source_paths(prompts, 0):
        sample += ["--source", f"{file}"]
    commands = [sample, ["flowrl", "eval", run], ["flowrl", "export", run]]
    return [[*words, *plugin_words(config.plugins)] for words in commands]


def _write(summary: dict[str, Any], file: Path | None) -> None:
    """Write a run's summary where one was asked for; in the first process."""
    from flowrl.core.processes import world

    if world().main:
        show_or_write("", summary, file, silent=True)
