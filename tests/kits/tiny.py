"""The package's tiny pipelines that make images, by the name that tests import."""

from flowrl.models.tiny.stills import *  # noqa: F403
