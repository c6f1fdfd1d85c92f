"""VideoAlign's judgement of videos: visual quality, motion quality, alignment with the text."""

from .reward import videoalign

__all__ = ["videoalign"]
