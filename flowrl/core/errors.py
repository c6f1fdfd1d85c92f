"""The failures a user can mend. The command line prints them as one message without a traceback."""

from __future__ import annotations


class FlowRLError(Exception):
    """Say what was expected, what came, where, and how to mend it."""


class ConfigError(FlowRLError):
    """A config file, an override or a value in them is wrong."""


class DataError(FlowRLError):
    """A prompt file, an image or a record in them is wrong."""


class ModelError(FlowRLError):
    """A model folder, its parts or an adapter on top of it is wrong."""


class CheckpointError(FlowRLError):
    """A checkpoint is torn, missing or belongs to another run."""


class RunError(FlowRLError):
    """A run cannot go on: a NaN, an unwritable folder, a full disk."""


class ProcessLost(RunError):
    """Another of several processes is gone; it, or the system, has said why."""


class RewardError(RunError):
    """A reward gave no usable score. The policy is as before, so the run can be saved and go on
    later."""
