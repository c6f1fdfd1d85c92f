"""GenEval as a reward: objects by a detector, colours by CLIP, verdict or partial credit by its
rules."""

from .reward import geneval

__all__ = ["geneval"]
