"""``flowrl bench``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import count_up, show_or_write


def bench(
    config: options.ConfigName = options.DEFAULT,
    *,
    overrides: options.Overrides,
    changes: options.Set,
    iterations: Annotated[int, typer.Option(help="iterations that are timed")] = 3,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Time the parts of an iteration against the calls of network and VAE alone."""
    from flowrl.config.load import load_config
    from flowrl.cost.overhead import measure_overhead as timed
    from flowrl.cost.overhead import overhead_table

    options.quiet_libraries()
    chosen = load_config(config, [*overrides, *changes], plugin)
    counted = partial(count_up, of="iterations")
    result = timed(chosen, iterations=iterations, progress=counted)
    show_or_write(lambda width: overhead_table(result, width=width), result, json)
