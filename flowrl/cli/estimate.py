"""``flowrl estimate`` and ``flowrl bench``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import count_up, print_text, show_or_write, working
from flowrl.core.errors import ConfigError
from flowrl.core.tables import terminal_width

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
    """Time the parts of an iteration against the calls of network and VAE alone."""
    from flowrl.cost.overhead import measure_overhead as timed
    from flowrl.cost.overhead import overhead_table

    options.quiet_libraries()
    chosen = options.load_fitted(config, [*overrides, *changes], plugin, profile)
    counted = partial(count_up, of="iterations")
    result = timed(chosen, iterations=iterations, progress=counted)
    show_or_write(lambda width: overhead_table(result, width=width), result, json)
