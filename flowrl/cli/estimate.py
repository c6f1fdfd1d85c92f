"""``flowrl doctor``, ``flowrl estimate`` and ``flowrl bench``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import count_up, print_text, show_or_write, working
from flowrl.core.errors import ConfigError
from flowrl.core.tables import terminal_width


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


CARD = 24.0  # GB, where this machine has no GPU


def estimate(
    config: options.ConfigName,
    *,
    overrides: options.Overrides,
    changes: options.Set,
    card: Annotated[
        float | None,
        typer.Option(
            metavar="GB", help=f"memory to fit; default: the profile's, this GPU's, else {CARD:g}"
        ),
    ] = None,
    profile: options.Profile = None,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Work out what a config takes before anything is loaded; whether it fits a card comes first.

    Parameters, memory by part and by phase, network calls and floating-point work of an iteration,
    and whether it fits a card. No weight is read, and no GPU is needed.
    """
    from flowrl.core.files import is_stdout
    from flowrl.cost.estimate import estimate as estimated
    from flowrl.cost.fit_card import card_size, profile_of, verdict, what_helps
    from flowrl.cost.report import estimate_as_json, estimate_text

    options.quiet_libraries()
    chosen = options.load_fitted(config, [*overrides, *changes], plugin, profile)
    named = None if profile is None else profile_of(profile).gigabytes
    gigabytes = card if card is not None else named or card_size() or CARD
    if not gigabytes > 0:
        raise ConfigError(f"--card: expected more than 0 GB, got {gigabytes:g}")
    with working(f"working out what {config} takes"):
        found = estimated(chosen)
        fits = verdict(found, gigabytes=gigabytes)
    # what was asked comes at once; what helps takes longer
    shown = json is None or not is_stdout(json)
    if shown:
        print_text(fits)
    facts = {**estimate_as_json(found), "card": {"gigabytes": gigabytes, "verdict": fits}}
    with working("looking for what makes it fit"):
        helps = what_helps(found, gigabytes=gigabytes)
    if helps.profile is not None:
        facts["card"] |= {"profile": helps.profile.name, "profile_fits": helps.profile.fits}
    if shown and helps.lines:
        print_text("\n".join(helps.lines))
    said = estimate_text(found, gigabytes=gigabytes, width=terminal_width()) if shown else ""
    show_or_write(f"\n{said}", facts, json)


def bench(
    config: options.ConfigName = options.DEFAULT,
    *,
    overrides: options.Overrides,
    changes: options.Set,
    iterations: Annotated[int, typer.Option(help="iterations that are timed")] = 3,
    profile: options.Profile = None,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Time an iteration by phase: sampling, decoding, rewards, training."""
    from flowrl.cost.phases import measure_phases as timed
    from flowrl.cost.phases import phases_table

    options.quiet_libraries()
    chosen = options.load_fitted(config, [*overrides, *changes], plugin, profile)
    counted = partial(count_up, of="iterations")
    result = timed(chosen, iterations=iterations, progress=counted)
    show_or_write(lambda width: phases_table(result, width=width), result, json)
