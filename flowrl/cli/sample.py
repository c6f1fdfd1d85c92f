"""``flowrl sample``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli import options, target_options
from flowrl.cli.output import refuse_both, show_or_write


def sample(
    name: target_options.Name,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="the prompts")],
    *,
    images: Annotated[int, typer.Option(help="images per prompt")] = 4,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="the image that all prompts edit; once or several times"),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(metavar="PNG", help="the images, also .jpg; a film: .gif, .webp, .mp4"),
    ] = Path("samples.png"),
    config: target_options.Settings = options.DEFAULT,
    weights: target_options.Weights = None,
    iteration: target_options.Iteration = None,
    steps: target_options.Steps = None,
    seed: target_options.Seed = None,
    json: options.Json = None,
    changes: options.Set,
    plugin: options.Plugins,
) -> None:
    """Draw images of prompts on one page, or videos into a film."""
    refuse_both(out, json)
    import torch

    from flowrl.core.files import is_stdout
    from flowrl.cost.out_of_memory import explained
    from flowrl.evaluation.films import KINDS, save_film
    from flowrl.evaluation.frame_rewards import frames_of
    from flowrl.evaluation.image_grids import labelled_grid
    from flowrl.evaluation.image_pages import page_format, save_page
    from flowrl.runs.evaluate import given_sources, sample_all

    # where it cannot be written is known before anything loads
    if out.suffix.lower() not in KINDS:
        page_format(out)
    # sample: the images of a prompt stand in one row
    own: dict[str, int | str | None] = {"eval.steps": steps, "eval.seed": seed}
    found = target_options.opened(name, config, weights, iteration, own, changes, plugin)
    chosen = found.config
    if frames_of(chosen, found.model) == 1:
        page_format(out)
    starts = given_sources(found.model, chosen, prompts, source or [])
    with explained(chosen, "sample"):
        more: dict[str, Any] = {"seed": chosen.eval.seed, "images": images, "sources": starts}
        drawn = sample_all(found.model, chosen, prompts, base=found.base, **more)
    rows = drawn.unflatten(0, (len(prompts), images))
    columns = {f"sample {i + 1}": rows[:, i] for i in range(images)}
    sources = torch.stack([torch.stack(start) for start in starts]) if starts else None
    if drawn.ndim == 5 and out.suffix.lower() in KINDS:
        save_film(drawn, out)
    else:
        save_page(labelled_grid(columns, prompts, starts=sources), out)
    facts = {"file": f"{out}", "of": found.what, "prompts": prompts, "images": images}
    facts |= {"seed": chosen.eval.seed, "steps": chosen.eval.steps}
    text = f"{len(drawn)} images of {found.what}: {out}"
    show_or_write(text, facts, json, silent=is_stdout(out))
