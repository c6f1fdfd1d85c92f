"""Parts of tiny pipelines that settings alone do not make: tokenizers of single letters, what shows
images to language models, and a few networks."""

from __future__ import annotations

import shutil
import string
import struct
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import Tokenizer, decoders, models, processors
from transformers import (
    CLIPTokenizer,
    GlmImageImageProcessor,
    GlmImageProcessor,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    T5GemmaConfig,
    T5TokenizerFast,
)
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

SMALL = [*string.ascii_lowercase, *string.digits]
EVERY = [*string.ascii_letters, *string.digits, *string.punctuation]
# of the templates that the pipelines put around a prompt, one token each: so a template has as
# many tokens here as with the released tokenizer
WORDS = (
    *("system", "user", "assistant", "Describe", "the", "image", "by", "detailing", "color"),
    *("shape", "size", "texture", "quantity", "text", "spatial", "relationships", "of"),
    *("objects", "and", "background"),
)
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
SIGHT = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# as the released tokenizers' of Z-Image and klein for one message of a user
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content[0].text }}{% endif %}<|im_end|>{% endfor %}"
)
INST = (
    "{% for m in messages %}{% set t = m.content[0].text %}"
    "{% if m.role == 'system' %}[SYS]{{ t }}[/SYS]{% else %}[INST]{{ t }}[/INST]{% endif %}"
    "{% endfor %}"
)


# -------------------------------------------------------------------------------------- tokenizers


def clip_tokenizer() -> CLIPTokenizer:
    """Make a tokenizer of small letters and digits, of CLIP's kind."""
    ends = [letter + "</w>" for letter in SMALL]
    pieces = [*SMALL, *ends, "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def t5_tokenizer() -> T5TokenizerFast:
    """Make a tokenizer of small letters and digits, of T5's kind."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *SMALL]
    return T5TokenizerFast(
        vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0
    )


def letters(**named: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer of single letters, with the marks that templates put around prompts;
    ``named``: more of the tokenizer's settings."""
    marks = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]
    known = [*marks, *EVERY, " ", "\n"]
    base = Tokenizer(models.BPE({one: i for i, one in enumerate(known)}, [], unk_token="<unk>"))
    base.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", known.index("<bos>"))]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=512,
        **named,
    )
    made.add_tokens(marks[4:], special_tokens=True)
    made.chat_template = CHAT
    return made


def qwen_tokenizer(*, sees: bool = False, chat: str = THINKING) -> Qwen2Tokenizer:
    """Make a tokenizer of single characters and of the templates' words; ``sees``: it knows the
    marks of images."""
    tokenizer = Qwen2Tokenizer(
        vocab={letter: index for index, letter in enumerate([*EVERY, "Ġ", "Ċ"])},
        merges=[],
        unk_token=MARKS[0],
        eos_token=MARKS[2],
        pad_token=MARKS[0],
    )
    tokenizer.add_tokens(MARKS, special_tokens=True)
    tokenizer.chat_template = chat
    tokenizer.add_tokens([form for word in WORDS for form in (f" {word}", word)])
    if sees:
        tokenizer.add_tokens(SIGHT, special_tokens=True)
    return tokenizer


def seeing_tokenizer() -> Qwen2Tokenizer:
    """Make one that knows the marks of images, for pipelines with a template of their own."""
    return qwen_tokenizer(sees=True, chat=CHAT)


def chatglm_tokenizer() -> Any:
    """Make the tokenizer of Kolors, which a package reads a file of letters for."""
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    folder = tempfile.mkdtemp()
    tokenizer = ChatGLMTokenizer(str(piece_file(Path(folder))))
    weakref.finalize(tokenizer, shutil.rmtree, folder)  # it is saved by copying its file
    return tokenizer


def piece_file(folder: Path) -> Path:
    """Write the vocabulary of single letters as ``tokenizer.model`` into a folder -> the file.

    Source: sentencepiece_model.proto: a ModelProto has pieces (1: text 1, score 2, type 3), and
    the settings of its trainer (2: model_type 3, vocab_size 4) and normaliser (3: name 1).
    """
    # 1: a letter, 2: what is unknown, 3: a mark
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((one, 1) for one in ("▁", *EVERY))]
    made = b""
    for place, (text, kind) in enumerate(pieces):
        score = b"\x15" + struct.pack("<f", -float(place))
        made += _held(1, _held(1, text.encode()) + score + _number(3, kind))
    # 4: the kind of model that splits into single characters
    made += _held(2, _number(3, 4) + _number(4, len(pieces)))
    made += _held(3, _held(1, b"identity"))
    file = folder / "tokenizer.model"
    file.write_bytes(made)
    return file


def _held(field: int, content: bytes) -> bytes:
    """Return a field that holds bytes."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Return a whole number, seven bits a byte, the lowest first."""
    made = []
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


# ------------------------------------------------------------- what shows images to language models


def qwen_edit_processor() -> Qwen2VLProcessor:
    """Make what shows images to the reader of Qwen-Image-Edit."""
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=qwen_tokenizer(sees=True),
        video_processor=Qwen2VLVideoProcessor(),
    )


def qwen_processor() -> Qwen2VLProcessor:
    """Make one whose images become few tokens."""
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=56 * 56),
        tokenizer=seeing_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT,
    )


def qwen3_processor() -> Qwen3VLProcessor:
    """Make the same for a Qwen 3."""
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=16, min_pixels=64 * 64, max_pixels=64 * 64
        ),
        tokenizer=seeing_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=CHAT,
    )


def glm_processor() -> GlmImageProcessor:
    """Make the same for a GLM-Image."""
    marks = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    return GlmImageProcessor(
        image_processor=GlmImageImageProcessor(),
        tokenizer=letters(extra_special_tokens=marks),
        chat_template=CHAT,
    )


def pixtral_processor() -> PixtralProcessor:
    """Make what reads prompts for a FLUX.2."""
    known = [*EVERY, " ", "\n"]
    base = Tokenizer(models.BPE({letter: i for i, letter in enumerate(known)}, []))
    base.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>")
    marks = ["[SYS]", "[/SYS]", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.add_tokens(sorted({f" {word}" for word in SYSTEM_MESSAGE.split()}))
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(), tokenizer=tokenizer, chat_template=INST
    )


# ---------------------------------------------------------------------------------------- networks


def flux2_vae() -> AutoencoderKLFlux2:
    """Make the VAE of FLUX.2 and its kin, with statistics of its own."""
    made = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    made.bn.running_mean.normal_()
    made.bn.running_var.uniform_(0.5, 2.0)
    return made


def prx_reader(**inner: Any) -> T5GemmaEncoder:
    """Make the reader of a PRX."""
    config = T5GemmaConfig(encoder=inner, decoder=inner, is_encoder_decoder=True)
    reader = T5GemmaEncoder(config.encoder)
    # its folders have the settings of encoder and decoder; the encoder looks for its own among them
    for name, value in vars(config.encoder).items():
        if not hasattr(config, name):
            setattr(config, name, value)
    reader.config = config
    return reader


def chatglm(**settings: Any) -> Any:
    """Make the reader of a Kolors, of diffusers' own."""
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    reader = ChatGLMModel(ChatGLMConfig(**settings), empty_init=False)
    for parameter in reader.parameters():
        parameter.data.normal_(0, 0.3)
    return reader


motif_reader = T5Gemma2Encoder  # which transformers has at no other place


class passing(torch.nn.Module):  # noqa: N801 - as settings name it
    """Stands in for Cosmos's guards of texts and videos, which are large."""

    def check_text_safety(self, text: str) -> bool:
        """Pass."""
        return True
