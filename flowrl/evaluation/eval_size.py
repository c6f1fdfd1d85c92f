"""Train on small images, judge large ones: the size of evaluated images (PaCo-RL, 2512.04784), and
how many of them there may be."""

from __future__ import annotations

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.types import FlowModel

MOST_IMAGES = 10**8  # of one evaluation: their scores are held in memory


def check_eval_count(config: Config, prompts: int) -> None:
    """Raise ConfigError if an evaluation of so many prompts would draw more images than can be."""
    images, best_of = config.eval.images, config.eval.best_of
    drawn = images * best_of * prompts
    if drawn > MOST_IMAGES:
        of_each = f"{images:,} images" + (f", each the best of {best_of:,}," if best_of > 1 else "")
        raise ConfigError(
            f"eval.images, eval.best_of: {of_each} of each of {prompts:,} prompts are {drawn:,} to "
            f"draw, and an evaluation draws at most {MOST_IMAGES:,}"
        )


def check_eval_size(model: FlowModel, config: Config) -> None:
    """Raise ConfigError if the images that are evaluated have another size than those that are
    trained on, and the model cannot make both."""
    height, width = config.eval_size
    if (height, width) == (config.image.height, config.image.width):
        return
    # learned noise has the shape of the latents that it was learned with
    if hasattr(model, "initial_log_prob"):
        raise ConfigError(
            f"eval.height, eval.width: {height} x {width} is another size than image's, but "
            f"likelihood {config.likelihood.fn} learns noise of one size; leave them out"
        )
    try:
        # the model itself knows its sizes: ask before anything is trained
        model.latent_shape(height, width)
        model.sigmas(config.eval.steps, height, width)
    except FlowRLError as error:
        raise ConfigError(
            f"eval.height, eval.width: {type(model).__name__} cannot make images of {height} x "
            f"{width} pixels: {error}"
        ) from error
