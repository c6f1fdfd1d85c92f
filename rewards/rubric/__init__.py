"""A learnt rubric: rules that a judge checks one by one, and what each is worth."""

from .reward import rubric

__all__ = ["rubric"]
