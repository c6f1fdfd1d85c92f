"""Build folders of pipelines whose prompts are read by a language model, with random weights."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flowrl.models.tiny.stills import vae

WIDTH = 32  # hidden size of every language model
VISION: dict[str, Any] = {  # of their image towers, which see nothing
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "out_hidden_size": WIDTH,
}
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
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
INST = (
    "{% for m in messages %}{% set t = m.content[0].text %}"
    "{% if m.role == 'system' %}[SYS]{{ t }}[/SYS]{% else %}[INST]{{ t }}[/INST]{% endif %}"
    "{% endfor %}"
)
# of the released Qwen-Image's scheduler
QWEN_SHIFTS: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}


def tiny_qwen_image(folder: Path, *, seed: int = 0, **scheduler: Any) -> Path:
    """Save a tiny real Qwen-Image pipeline (16 latent channels, VAE factor 8) and return its
    folder; ``scheduler`` overrides the released scheduler's settings."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(
            **_qwen(scheduler), text_encoder=_qwen_vl(), tokenizer=qwen_tokenizer()
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_qwen_edit(
    folder: Path, *, seed: int = 0, plus: bool = False, zero_cond_t: bool = False
) -> Path:
    """Save a tiny real Qwen-Image-Edit pipeline, or -Edit-Plus, whose language model sees, and
    return its folder. The tokenizer spells the template out, so that a prompt has 300 tokens."""
    kind = QwenImageEditPlusPipeline if plus else QwenImageEditPipeline
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(SIGHT, special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(SIGHT)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = kind(
            **_qwen({}, zero_cond_t=zero_cond_t),
            text_encoder=_qwen_vl(**dict(zip(names, ids, strict=True))),
            tokenizer=tokenizer,
            processor=Qwen2VLProcessor(
                image_processor=Qwen2VLImageProcessor(),
                tokenizer=tokenizer,
                video_processor=Qwen2VLVideoProcessor(),
            ),
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _qwen(scheduler: dict[str, Any], **network: Any) -> dict[str, Any]:
    return {
        "transformer": QwenImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
            **network,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(**(QWEN_SHIFTS | scheduler)),
        "vae": AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
    }


def tiny_z_image(folder: Path, *, seed: int = 0, shift: float = 6.0) -> Path:
    """Save a tiny real Z-Image pipeline (16 latent channels, VAE factor 8) and return its
    folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = ZImagePipeline(
            transformer=ZImageTransformer2DModel(
                dim=WIDTH,
                n_layers=2,
                n_refiner_layers=1,
                n_heads=2,
                n_kv_heads=2,
                cap_feat_dim=WIDTH,
                axes_dims=[4, 6, 6],
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            vae=vae(),
            text_encoder=_qwen3(2),
            tokenizer=qwen_tokenizer(),
        )
        # they are made of zeros
        for token in (pipeline.transformer.x_pad_token, pipeline.transformer.cap_pad_token):
            token.data.normal_()
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_klein(folder: Path, *, seed: int = 0, distilled: bool = False) -> Path:
    """Save a tiny real FLUX.2 klein pipeline (128 latent channels, tokens of 16 pixels) and return
    its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = Flux2KleinPipeline(
            **_flux2(guidance=False),
            text_encoder=_qwen3(28),
            tokenizer=qwen_tokenizer(),
            is_distilled=distilled,
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_flux2(folder: Path, *, seed: int = 0) -> Path:
    """Save a tiny real FLUX.2 pipeline (128 latent channels, tokens of 16 pixels) and return its
    folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Mistral3Config(
            text_config=_text(31) | {"model_type": "mistral", "head_dim": 16},
            vision_config=VISION | {"model_type": "pixtral", "image_size": 28, "patch_size": 14},
        )
        pipeline = Flux2Pipeline(
            **_flux2(guidance=True),
            text_encoder=Mistral3ForConditionalGeneration(config).eval(),
            tokenizer=_pixtral(),
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def flux2_vae() -> AutoencoderKLFlux2:
    """Make the VAE of FLUX.2 and its kin."""
    made = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    made.bn.running_mean.normal_()
    made.bn.running_var.uniform_(0.5, 2.0)
    return made.eval()


def _flux2(*, guidance: bool) -> dict[str, Any]:
    decoder = flux2_vae()
    return {
        "transformer": Flux2Transformer2DModel(
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * WIDTH,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": decoder,
    }


def _pixtral() -> PixtralProcessor:
    letters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    base = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    base.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>")
    marks = ["[SYS]", "[/SYS]", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.add_tokens(sorted({f" {word}" for word in SYSTEM_MESSAGE.split()}))
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(), tokenizer=tokenizer, chat_template=INST
    )


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer of single characters and of the templates' words."""
    letters = [*string.ascii_letters, *string.digits, *string.punctuation, "Ġ", "Ċ"]
    tokenizer = Qwen2Tokenizer(
        vocab={letter: index for index, letter in enumerate(letters)},
        merges=[],
        unk_token=MARKS[0],
        eos_token=MARKS[2],
        pad_token=MARKS[0],
    )
    tokenizer.add_tokens(MARKS, special_tokens=True)
    tokenizer.chat_template = CHAT
    tokenizer.add_tokens([form for word in WORDS for form in (f" {word}", word)])
    return tokenizer


def _text(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 256,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,  # so that prompts differ
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _qwen3(layers: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**_text(layers), head_dim=16)).eval()


def _qwen_vl(**ids: int) -> Qwen2_5_VLForConditionalGeneration:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    config = Qwen2_5_VLConfig(
        text_config=_text(2) | {"rope_parameters": rope}, vision_config=VISION, **ids
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()
