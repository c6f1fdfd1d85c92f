"""``flowrl doctor``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import show_or_write


def doctor(
    config: options.ConfigName,
    *,
    overrides: options.Overrides,
    changes: options.Set,
    only: Annotated[
        list[str],
        typer.Option(
            default_factory=list,
            show_default=False,
            metavar="SECTION",
            help="look at this section alone, such as ratio; repeatable",
        ),
    ],
    known: Annotated[
        list[str],
        typer.Option(
            default_factory=list,
            show_default=False,
            metavar="FINDING",
            help="a finding that is meant so, such as std/last; repeatable",
        ),
    ],
    card: Annotated[
        float | None, typer.Option(metavar="GB", help="memory to fit; default: this machine's")
    ] = None,
    profile: options.Profile = None,
    json: options.Json = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="keep it in this run's folder, for its report",
            callback=options.check_folder,
        ),
    ] = None,
    plugin: options.Plugins,
) -> int:
    """Examine a config before it is trained: parity with diffusers, noise, ratio, rewards, credit.

    Loads the model and tries everything out on two prompts. Exit code 1 if there is something to
    change.
    """
    from flowrl.core.files import write_json
    from flowrl.doctor.examine import examine
    from flowrl.doctor.findings import checkup_as_json, checkup_text
    from flowrl.runs.folder import DOCTOR

    options.quiet_libraries()
    chosen = options.load_fitted(config, [*overrides, *changes], plugin, profile)
    checkup = examine(chosen, only=only, known=known, card=card, progress=_say)
    _say("")
    if run is not None:
        write_json(run / DOCTOR, {**checkup_as_json(checkup), "settings": chosen.to_dict()})
    show_or_write(lambda width: checkup_text(checkup, width), checkup_as_json(checkup), json)
    return 1 if checkup.findings else 0


def _say(what: str) -> None:
    """Say in a terminal what is looked at, in one line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)
