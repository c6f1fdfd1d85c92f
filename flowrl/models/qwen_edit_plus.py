"""Qwen-Image-Edit-Plus as a FlowModel that edits, over the public diffusers
QwenImageEditPlusPipeline."""

from __future__ import annotations

from typing import Any

from diffusers import QwenImageEditPlusPipeline
from PIL.Image import Image
from pydantic.dataclasses import dataclass

from flowrl.models.options import STRICT, options_of
from flowrl.models.qwen_edit import (
    Pixels,
    QwenEdit,
    QwenEditFacts,
    QwenEditOptions,
    Tokens,
    load_qwen_edit,
)

SEEN = 384 * 384  # pixels that the pipeline shows the language model


class QwenEditPlusFacts(QwenEditFacts):
    """What is known of all models that `qwen_edit_plus` reads."""

    pipeline = "QwenImageEditPlusPipeline"
    typical = "Qwen/Qwen-Image-Edit-2509"
    tiny = {"qwen_edit_plus": {}}
    seen = SEEN


FACTS = QwenEditPlusFacts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class QwenEditPlusOptions(QwenEditOptions):
    """The options of `qwen_edit_plus`."""

    # of each source, for the language model; the pipeline's area by default
    seen_pixels: Pixels | None = SEEN
    max_sequence_length: Tokens = 1024


@options_of(QwenEditPlusOptions, FACTS)
def qwen_edit_plus(options: QwenEditPlusOptions) -> QwenEditPlus:
    """Load a Qwen-Image-Edit-Plus pipeline (Qwen-Image-Edit-2509, -2511) from a folder or a Hugging
    Face id, ready to sample and to train.

    See `QwenEditPlusOptions` for what can be set. Raise ConfigError for a wrong option, ModelError
    for a wrong model; the first Qwen-Image-Edit is `qwen_edit`.
    """
    return QwenEditPlus(load_qwen_edit(QwenImageEditPlusPipeline, options), options)


class QwenEditPlus(QwenEdit):
    """A FlowModel around one QwenImageEditPlusPipeline: `QwenEdit`, whose prompts may have several
    sources. The language model sees them as Picture 1, Picture 2 and so on; their tokens stand
    behind each other. A network with ``zero_cond_t`` is told the time 0 for them."""

    facts = FACTS

    most_sources = 3  # as the model card of Qwen-Image-Edit-2509 says

    def _shown(self, seen: list[Image]) -> Any:
        return seen
