"""BLIP's answer to a question about an image: how much likelier "yes" is than "no"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError

from .._backbones.clip import load_part
from .._common.pixels import normalise, squash
from .._common.scorer import load_network, source_of

LENGTH = 35  # tokens of a question
_DROPPED = re.compile(r"([.!\"()*#:;~])")


class BlipVqa:
    """A BlipForQuestionAnswering of transformers, asked as T2I-CompBench asks its BLIP
    (BLIPvqa_eval/models/blip_vqa.py, `vqa_prob`).

    Images are squashed to `size` x `size` (480) by PIL's bicubic filter, places of patches
    interpolated. A question is in lower case, without punctuation but its question mark, and begins
    with BLIP's own token [ENC], where transformers' processor leaves [CLS]. **Differs:** the answer
    is not rounded to four digits.
    """

    def __init__(
        self, path: str, *, size: int, device: torch.device, dtype: torch.dtype, who: str
    ) -> None:
        from transformers import AutoTokenizer, BlipForQuestionAnswering

        expected = "a BlipForQuestionAnswering"
        network = load_network(
            BlipForQuestionAnswering, path, who=who, expected=expected, dtype=torch.float32
        )
        self.tokens = load_part(AutoTokenizer, "BLIP's tokenizer", source_of(path), who)
        # answers begin with [DEC], questions with the token behind it
        self.begin = int(network.config.text_config.bos_token_id)
        words = int(network.config.text_config.vocab_size)
        self.answers = self.tokens.convert_tokens_to_ids(["yes", "no"])
        known = {self.tokens.unk_token_id, None}.isdisjoint(self.answers)
        if not known or not max(len(self.tokens) - 1, self.begin + 1) < words:
            raise ModelError(
                f"{who}: {path}: expected a tokenizer that knows yes and no, within {words} "
                f"words with [DEC] and [ENC] at {self.begin} and {self.begin + 1}, got "
                f"{len(self.tokens)} words"
            )
        patch = int(network.config.vision_config.patch_size)
        if size < patch or size % patch:
            raise ConfigError(
                f"{who}: vqa_size: expected a multiple of {patch}, BLIP's patch, got {size}"
            )
        self.size, self.device, self.dtype = size, device, dtype
        self.network: Any = network.to(device, dtype)

    def __call__(
        self, images: Sequence[Image.Image], questions: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """Return P(yes) / (P(yes) + P(no)) of each image's questions."""
        rows = [image for image, asked in enumerate(questions) for _ in asked]
        if not rows:
            return [[] for _ in images]
        texts = [plain(text) for asked in questions for text in asked]
        pixels = normalise(torch.stack([squash(image, self.size) for image in images]))
        ids = self.tokens(texts, truncation=True, max_length=LENGTH)["input_ids"]
        share = torch.zeros(len(texts))
        with torch.inference_mode():
            seen = self.network.vision_model(
                pixel_values=pixels.to(self.device, self.dtype), interpolate_pos_encoding=True
            ).last_hidden_state
            # questions of one length together: without padding, nothing has to be masked
            for length in sorted({len(one) for one in ids}):
                mine = [place for place, one in enumerate(ids) if len(one) == length]
                asked = torch.tensor([ids[place] for place in mine], device=self.device)
                share[mine] = self._ask(seen[[rows[place] for place in mine]], asked).float().cpu()
        answers = iter(share.tolist())
        return [[*itertools.islice(answers, len(asked))] for asked in questions]

    def _ask(self, seen: Tensor, ids: Tensor) -> Tensor:
        """Ask a question [B, T] of each row of image features [B, S, C] -> [B]."""
        ids[:, 0] = self.begin + 1
        states = self.network.text_encoder(input_ids=ids, encoder_hidden_states=seen)[0]
        begin = torch.full((len(ids), 1), self.begin, device=self.device)
        logits = self.network.text_decoder(input_ids=begin, encoder_hidden_states=states).logits
        # among yes and no alone, a softmax of both is their share
        return logits[:, 0, self.answers].float().softmax(-1)[:, 0]


def plain(question: str) -> str:
    """Return a question as BLIP's code cleans it."""
    return _DROPPED.sub("", question.lower()).rstrip(" ")
