"""Train on small images, judge large ones: the size of evaluated images (PaCo-RL, 2512.04784)."""

from __future__ import annotations

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.types import FlowModel


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
