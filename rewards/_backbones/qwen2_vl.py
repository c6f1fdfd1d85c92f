"""Qwen2-VL with a head of scores in place of its words: what HPSv3 and VideoAlign share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import DataError, ModelError

from .._common.scorer import first_line, load_strict, source_of

FACTOR = 28  # pixels: sides are multiples of it
TEXTS = Path(__file__).resolve().parents[1] / "_texts"


def text_of(name: str, prompt: str) -> str:
    """Return the words that a public model was trained with, a prompt among them."""
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8").replace("{prompt}", prompt, 1)


def conversation(processor: Any, kind: str, text: str) -> str:
    """Return what a user says about one image or video, in the form of the model's chats."""
    content: list[dict[str, Any]] = [{"type": kind}, {"type": "text", "text": text}]
    said: str = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return said


def check_prompts(prompts: Sequence[str], count: int, processor: Any, who: str) -> None:
    """Refuse another number of prompts than of images, or one that holds a token of the model's
    own, such as `<|im_end|>`. Raises DataError."""
    if len(prompts) != count:
        raise DataError(f"{who}: expected one prompt per image, got {len(prompts)} for {count}")
    for prompt in prompts:
        check_prompt(prompt, processor, who)


def check_prompt(prompt: str, processor: Any, where: str) -> None:
    """Refuse a prompt that holds a token of the model's own, such as `<|im_end|>`. Raises
    DataError."""
    held = [token for token in own_tokens(processor.tokenizer) if token in prompt]
    if held:
        raise DataError(
            f"{where}: the prompt {prompt[:120]!r} holds {held[0]!r}, a token that the model reads "
            "as its own; take it out"
        )


def own_tokens(tokens: Any) -> list[str]:
    """List the tokens that a model reads as its own: those that its tokenizer was saved with, such
    as `<|image_pad|>`, and a reward's marks."""
    # `all_special_tokens` alone forgets the first once the marks are added: they take their place
    added = tokens.added_tokens_decoder.values()
    special = [token.content for token in added if token.special]
    return list(dict.fromkeys([*special, *tokens.all_special_tokens]))


def load_processor(path: str, marks: Sequence[str], who: str) -> tuple[Any, list[int]]:
    """Load tokenizer and image settings of a Qwen2-VL from a folder or hub id, with tokens of the
    reward's own -> the processor, and these tokens' ids. Raises ModelError."""
    from transformers import Qwen2VLProcessor

    try:
        processor = Qwen2VLProcessor.from_pretrained(source_of(path), trust_remote_code=False)
    except Exception as error:  # offline, misspelt, another kind of model
        raise ModelError(
            f"{who}: {path}: expected a folder, or a hub id with HF_HUB_OFFLINE unset, with the "
            f"processor of a Qwen2-VL: {first_line(error)}"
        ) from error
    tokens = processor.tokenizer
    tokens.padding_side = "right"
    tokens.add_special_tokens({"additional_special_tokens": list(marks)})
    return processor, [int(tokens.convert_tokens_to_ids(mark)) for mark in marks]


def load_config(path: str, who: str) -> Any:
    """Load the settings of a Qwen2-VL from a folder or hub id. Raises ModelError."""
    from transformers import Qwen2VLConfig

    try:
        return Qwen2VLConfig.from_pretrained(source_of(path))
    except Exception as error:
        raise ModelError(
            f"{who}: {path}: expected a folder, or a hub id with HF_HUB_OFFLINE unset, with the "
            f"config.json of a Qwen2-VL: {first_line(error)}"
        ) from error


class ScoringQwen(nn.Module):
    """A Qwen2-VL and `rm_head`, made without memory for its weights: `fill` brings these.

    Every token gets its place in the sequence as its position, images and videos included: the
    public classes call the language model past the place where positions of three axes are made.
    """

    def __init__(self, config: Any, head: nn.Module, tokens: int) -> None:
        from accelerate import init_empty_weights
        from transformers import Qwen2VLModel

        super().__init__()
        config.text_config.vocab_size = tokens
        with init_empty_weights(include_buffers=False):
            self.model = Qwen2VLModel(config)
        self.rm_head = head

    def fill(self, state: Mapping[str, Tensor], where: str, dtype: torch.dtype) -> None:
        """Take the weights of a public file, by its own names. The head stays in float32, as do
        the frequencies of positions. Raises ModelError for another layout."""
        named = {own_name(key): value for key, value in state.items() if key != "lm_head.weight"}
        load_strict(self, named, where, assign=True)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.rm_head.float()
        self.eval().requires_grad_(False)

    def forward(self, inputs: Mapping[str, Tensor], marks: Sequence[int]) -> Tensor:
        """Return what the head says at each marked token [B, M, outputs], float32.

        inputs: of the processor, padded on the right; each row has each of M marks once.
        """
        ids = inputs["input_ids"]
        rows, length = ids.shape
        place = torch.arange(length, device=ids.device).expand(3, rows, length)
        seen = {key: value for key, value in inputs.items() if key != "mm_token_type_ids"}
        hidden = self.model(**seen, position_ids=place, use_cache=False).last_hidden_state
        marked = torch.isin(ids, torch.tensor(list(marks), device=ids.device))
        found: Tensor = self.rm_head(hidden[marked].reshape(rows, len(marks), -1).float())
        return found


def own_name(key: str) -> str:
    """Return the name that transformers 5 gives a tensor of a file of transformers 4."""
    if key.startswith("visual."):
        return f"model.{key}"
    if key.startswith("model.") and not key.startswith(("model.visual.", "model.language_model.")):
        return f"model.language_model.{key.removeprefix('model.')}"
    return key


def words_of(state: Mapping[str, Tensor], where: str) -> int:
    """Return how many tokens a file's embedding has. Raises ModelError if it has none."""
    for key, value in state.items():
        if own_name(key) == "model.language_model.embed_tokens.weight":
            return len(value)
    raise ModelError(f"{where}: expected the weights of a Qwen2-VL, found no embed_tokens.weight")


def check_tokens(words: int, processor: Any, where: str) -> None:
    """Refuse weights for another number of tokens than the processor has. Raises ModelError."""
    if words != len(processor.tokenizer):
        raise ModelError(
            f"{where}: its embedding has {words} tokens, the processor with the reward's own "
            f"{len(processor.tokenizer)}; take the processor that the weights belong to"
        )
