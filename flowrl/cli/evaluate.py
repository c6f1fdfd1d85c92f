"""``flowrl eval``."""

from __future__ import annotations

from typing import Annotated

import typer

from flowrl.cli import options, target
from flowrl.cli.output import count_up, show_or_write


def evaluate(
    name: target.Name,
    *,
    prompts: Annotated[
        str | None, typer.Option(help="prompt file; default: the config's held-out one")
    ] = None,
    images: Annotated[int | None, typer.Option(help="images per prompt")] = None,
    config: target.Settings = options.DEFAULT,
    weights: target.Weights = None,
    iteration: target.Iteration = None,
    steps: target.Steps = None,
    seed: target.Seed = None,
    changes: options.Set,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Score a model, a run or a checkpoint on held-out prompts, with intervals."""
    from flowrl.cost.out_of_memory import explained
    from flowrl.evaluation.held_out import evaluation_table
    from flowrl.runs.evaluate import evaluate as evaluated

    own = {
        "eval.steps": steps,
        "eval.seed": seed,
        "eval.images": images,
        "prompts.test": prompts or None,
    }
    found = target.opened(name, config, weights, iteration, own, changes, plugin)
    with explained(found.config, "eval"):
        result = evaluated(found.model, found.config, base=found.base, progress=count_up)
    show_or_write(
        lambda width: f"{found.what}\n{evaluation_table(result, width=width)}",
        {"target": name, **result},
        json,
    )
