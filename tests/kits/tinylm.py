"""The package's tiny pipelines that a language model reads for, by the name that tests import."""

from flowrl.models.tiny.language import *  # noqa: F403
