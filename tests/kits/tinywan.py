"""The package's tiny pipelines of Wan, by the name that tests import."""

from flowrl.models.tiny.videos import *  # noqa: F403
