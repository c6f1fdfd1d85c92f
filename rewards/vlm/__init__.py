"""A vision-language model as judge, behind a server of the OpenAI kind."""

from .judge import vlm

__all__ = ["vlm"]
