"""Arguments that several commands share, and those that name a model: a run, a checkpoint, a model
folder or a config."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from flowrl.config.load import Config
    from flowrl.cost.fit_card import Fitted
    from flowrl.runs.open_run import Target

DEFAULT = "shapes/flow_grpo"


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a file of configs/models."""
    from flowrl.core.shipped_files import list_models

    return [name for name in list_models() if name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """Complete the name of a shipped config, or a YAML file."""
    from flowrl.core.shipped_files import list_configs

    files = sorted(Path().glob(f"{incomplete}*.yaml")) if not incomplete.startswith("/") else []
    return [*list_configs(), *map(str, files)]


def check_overrides(texts: list[str]) -> list[str]:
    """Refuse what is no ``key=value``; a word without ``=`` is most often a mistyped option."""
    strange = [text for text in texts if "=" not in text]
    if strange:
        raise typer.BadParameter(f"expected KEY=VALUE, got {' '.join(strange)}")
    return texts


def check_json(path: Path | None) -> Path | None:
    """Refuse where no JSON can be written, before hours of work are done for it."""
    if path is None:
        return None
    try:
        path.stat()  # a loop of links, no rights: OSError says it
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        why = f"cannot write {path}: a folder above it is a file"
        raise typer.BadParameter(why) from None
    if path.is_dir():
        raise typer.BadParameter(f"expected a file, got the folder {path}")
    return path


def check_folder(path: Path | None) -> Path | None:
    """Refuse standard output where a folder is meant; one called "-" would be made."""
    from flowrl.core.files import is_stdout

    if path is not None and is_stdout(path):
        raise typer.BadParameter("a folder cannot go to standard output; name a folder")
    return path


def check_result(path: Path) -> Path:
    """Refuse standard output for a result that the same command adds to, and a name under which
    table or figure beside it would be written over it."""
    from flowrl.core.files import is_stdout

    if is_stdout(path):
        raise typer.BadParameter(
            "the same command goes on with this file, so it cannot go to standard output; name a "
            "file, and print the result with --json -"
        )
    found = check_json(path) or path
    if path.suffix != ".json":
        raise typer.BadParameter(f"expected a file that ends in .json, got {path}")
    return found


def look_here(plugins: list[str]) -> list[str]:
    """Let plugins be found in the working folder: the installed command does not look there, unlike
    ``python -m``."""
    if plugins and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return plugins


def quiet_libraries() -> None:
    """Switch off the libraries' bars for reading files; downloads still show theirs."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


Overrides = Annotated[
    list[str],
    typer.Argument(
        default_factory=list,
        show_default=False,
        metavar="KEY=VALUE",
        help="overrides of the config, such as train.group=8; they may stand anywhere",
        callback=check_overrides,
    ),
]
ConfigName = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help=f"a YAML file or the name of a shipped config, such as {DEFAULT}",
        autocompletion=complete_config,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="put the method of CONFIG on this model: a name of configs/models, "
        "a hub id, or a folder; CONFIG may then be a method's name, such as awm",
        autocompletion=complete_model,
    ),
]
Plugins = Annotated[
    list[str],
    typer.Option(
        "--plugin",
        default_factory=list,
        show_default=False,
        metavar="PACKAGE",
        help="a package that `fn:` may name; a run remembers it; repeatable",
        callback=look_here,
    ),
]


def allowed(target: str | Path, plugins: list[str]) -> list[str]:
    """Return the plugins that were named, and those that were allowed for this run before. Raise
    ConfigError for one whose files have changed since."""
    from flowrl.runs.kept_inputs import allowed_before, trusted
    from flowrl.runs.open_run import run_of

    run = run_of(Path(target))
    if not (run / "config.yaml").exists():
        return plugins
    look_here([*plugins, *allowed_before(run)])
    return trusted(run, plugins)


Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        default_factory=list,
        show_default=False,
        metavar="KEY=VALUE...",
        help="overrides of the config; KEY=VALUE may also stand alone, anywhere",
        callback=check_overrides,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="CARD",
        help="make it fit a card: 24gb, 48gb, 80gb, another size, or auto, this GPU. A config that "
        "fits stays as it is; else checkpointing, offload, smaller batches, and nf4 under LoRA "
        "where the network takes more than half of the card; where that is not enough rewards that "
        "rest while they do not score, LoRA of rank 16 and 8-bit AdamW; overrides stand above it",
    ),
]
Track = Annotated[
    list[str],
    typer.Option(
        default_factory=list,
        show_default=False,
        metavar="TRACKER",
        help="tell wandb, trackio or swanlab, too; repeatable",
        autocompletion=lambda: ["wandb", "trackio", "swanlab"],
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress")]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="PATH",
        help="write it all as JSON; - prints that alone",
        callback=check_json,
    ),
]


def load_fitted(
    config: str | Mapping[str, Any], given: list[str], plugins: list[str], profile: str | None
) -> Config:
    """Load a config with the settings of a profile under what was given. Raise ConfigError."""
    from flowrl.config.load import load_config

    return load_config(config, fitted(config, given, plugins, profile), plugins)


def fitted(
    config: str | Mapping[str, Any], given: list[str], plugins: list[str], profile: str | None
) -> list[str]:
    """Return the overrides that were given and the settings of a profile, which change none of
    these, and say on stderr what they are, and why. Raise ConfigError."""
    if profile is None:
        return given
    found = _settings(config, given, plugins, profile)
    typer.echo(found.said, err=True)
    return [*given, *found.overrides]


def fitted_alike(
    configs: list[str], given: list[str], plugins: list[str], profile: str | None
) -> list[str]:
    """Return overrides under which each of several configs fits a profile's card; they are the same
    for all, so that these stay on equal terms. Settings of a reward are there if all have them."""
    if profile is None or not configs:
        return given
    every = []
    for config in configs:
        every.append(_settings(config, given, plugins, profile).overrides)
    # the smallest batch is enough for all
    found: dict[str, str] = {}
    for text in sum(every, []):
        key, _, value = text.partition("=")
        if key.startswith("rewards.") and not all(text in settings for settings in every):
            continue
        if key not in found or not value.isdecimal() or int(value) < int(found[key]):
            found[key] = value
    changes = [f"{key}={value}" for key, value in found.items()]
    _say_profile(profile, changes)
    return [*changes, *given]


def _settings(
    config: str | Mapping[str, Any], given: list[str], plugins: list[str], profile: str
) -> Fitted:
    """Return what a profile makes of a config. Raise ConfigError."""
    from flowrl.config.load import load_config
    from flowrl.cost import fit_card

    return fit_card.fitted(load_config(config, given, plugins), profile, given)


def _say_profile(profile: str, changes: list[str]) -> None:
    said = "has nothing to set"
    if changes:
        said = f"sets {' '.join(changes)}"
    typer.echo(f"--profile {profile} {said}", err=True)


SAME_IMAGES = ("model.runtime.offload", "model.decode_batch", "eval.batch")
"""The keys of a profile that change no image of a model that is opened as it is."""


def fitted_target(
    target: str, settings: str, given: list[str], plugins: list[str], profile: str | None
) -> list[str]:
    """Return the overrides that were given with those of a profile under them that leave the images
    of a target as they are: weights that are trained already need no smaller rank."""
    if profile is None:
        return given
    from flowrl.cost.fit_card import profile_overrides
    from flowrl.runs.open_run import target_config

    config = target_config(target, settings=settings, overrides=given, plugins=plugins)
    changes = profile_overrides(config, profile)
    kept = [text for text in changes if text.partition("=")[0] in SAME_IMAGES]
    _say_profile(profile, kept)
    return [*kept, *given]


Name = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="a run, a checkpoint, a diffusers model folder, or a config (its base model)",
        autocompletion=complete_config,
    ),
]
Settings = Annotated[
    str,
    typer.Option(
        "--config",
        help="settings for a bare model folder",
        autocompletion=complete_config,
    ),
]
Weights = Annotated[
    Literal["ema", "current", "base"] | None,
    typer.Option(help="of a run; default: its eval.weights"),
]
Iteration = Annotated[
    str | None,
    typer.Option(
        metavar="N|best|last",
        help="of a run: the checkpoint to take; default: the best by held-out score",
        autocompletion=lambda: ["best", "last"],
    ),
]
Steps = Annotated[int | None, typer.Option(help="denoising steps")]
Seed = Annotated[int | None, typer.Option(help="of the initial noise")]


def opened(
    target: str,
    settings: str,
    weights: str | None,
    iteration: str | None,
    changes: dict[str, int | str | None],
    overrides: list[str],
    plugins: list[str],
    profile: str | None = None,
    *,
    to_judge: bool = False,
) -> Target:
    """Load a target; `changes` are settings that have an option of their own, None = as they are.
    to_judge: all that judging needs is looked for before the model is loaded."""
    from flowrl.config.overrides import text_override
    from flowrl.evaluation.needs import check_needs
    from flowrl.runs.open_run import open_target, pass_all

    quiet_libraries()
    more = []
    for key, value in changes.items():
        if value is not None:
            more.append(text_override(key, value) if isinstance(value, str) else f"{key}={value}")
    plugins = allowed(target, plugins)
    overrides = fitted_target(target, settings, overrides, plugins, profile)
    return open_target(
        target,
        settings=settings,
        weights=weights,
        iteration=iteration,
        overrides=[*overrides, *more],
        plugins=plugins,
        check=check_needs if to_judge else pass_all,
    )
