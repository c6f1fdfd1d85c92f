"""``flowrl sample``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli import options
from flowrl.cli.grammar import PROMPT
from flowrl.cli.output import refuse_both, show_or_write
from flowrl.core.errors import ConfigError

Images = Annotated[int, typer.Option(help="images per prompt")]
Sources = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="the image that all prompts edit; once or several times"),
]
Out = Annotated[
    Path,
    typer.Option(metavar="PNG", help="the images, also .jpg; a film: .gif, .webp, .mp4"),
]
BestOf = Annotated[
    int | None,
    typer.Option(metavar="N", help="draw N for each image, and keep the best by a reward"),
]
BestBy = Annotated[
    str | None,
    typer.Option(metavar="REWARD", help="which one chooses; default: the config's headline"),
]


def sample(
    name: options.Name,
    prompts: Annotated[list[str], typer.Argument(metavar=PROMPT, help="the prompts")],
    *,
    images: Images = 4,
    source: Sources = None,
    out: Out = Path("samples.png"),
    config: options.Settings = options.DEFAULT,
    weights: options.Weights = None,
    iteration: options.Iteration = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    best_of: BestOf = None,
    best_by: BestBy = None,
    json: options.Json = None,
    changes: options.Set,
    profile: options.Profile = None,
    plugin: options.Plugins,
) -> None:
    """Draw images of prompts on one page, or videos into a film."""
    refuse_both(out, json)
    import torch

    from flowrl.core.files import is_stdout
    from flowrl.cost.out_of_memory import explained
    from flowrl.evaluation.image_grids import labelled_grid, page_format, save_page
    from flowrl.evaluation.reward_call import frames_of
    from flowrl.evaluation.video_files import KINDS, save_film
    from flowrl.runs.evaluate import best_by as chooser
    from flowrl.runs.evaluate import given_sources, sample_all

    # where it cannot be written is known before anything loads
    if out.suffix.lower() not in KINDS:
        page_format(out)
    own: dict[str, int | str | None] = {"eval.steps": steps, "eval.seed": seed}
    own |= _best(best_of, best_by, images)
    found = options.opened(name, config, weights, iteration, own, changes, plugin, profile)
    chosen = found.config
    if frames_of(chosen, found.model) == 1:
        page_format(out)
    starts = given_sources(found.model, chosen, prompts, source or [])
    facts = {"file": f"{out}", "of": found.what, "prompts": prompts, "images": images}
    facts |= {"seed": chosen.eval.seed, "steps": chosen.eval.steps}
    each = found.what
    with explained(chosen, "sample"):
        more: dict[str, Any] = {"images": images, "sources": starts, "base": found.base}
        if chosen.eval.best_of > 1:
            more["by"] = chooser(found.model, chosen, prompts, source or [])
            facts |= {"best_of": chosen.eval.best_of, "best_by": more["by"].name}
            each += f", each the best of {chosen.eval.best_of} by {more['by'].name}"
        drawn = sample_all(found.model, chosen, prompts, seed=chosen.eval.seed, **more)
    rows = drawn.unflatten(0, (len(prompts), images))
    columns = {f"sample {i + 1}": rows[:, i] for i in range(images)}
    if drawn.ndim == 5 and out.suffix.lower() in KINDS:
        save_film(drawn, out)
    else:
        sources = torch.stack([torch.stack(start) for start in starts]) if starts else None
        save_page(labelled_grid(columns, prompts, starts=sources), out)
    show_or_write(f"{len(drawn)} images of {each}: {out}", facts, json, silent=is_stdout(out))


def _best(best_of: int | None, best_by: str | None, images: int) -> dict[str, int | str | None]:
    """Return the config's keys of best-of-n. Raises ConfigError for a reward that has nothing to
    choose among."""
    if best_by is not None and (best_of or 1) == 1:
        raise ConfigError(
            f"--best-by {best_by} chooses among the images of --best-of; add --best-of 8"
        )
    # with the images, so that their product is checked
    found: dict[str, int | str | None] = {"eval.best_of": best_of, "eval.best_by": best_by}
    if best_of:
        found["eval.images"] = images
    return found
