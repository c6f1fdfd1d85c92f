"""T2I-CompBench as a reward: attributes by questions to BLIP, places by a detector, the rest by
CLIP."""

from .reward import t2i_compbench

__all__ = ["t2i_compbench"]
