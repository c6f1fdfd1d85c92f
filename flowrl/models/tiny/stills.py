"""Build folders of real pipeline classes with random weights, for one CPU core and without a
network."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WIDTH = 16  # hidden size of every text encoder
LETTERS = string.ascii_lowercase + string.digits
# the noise of Stable Diffusion's training, and what else its schedulers' files set
EULER: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
NOISE = EULER | {"set_alpha_to_one": False}


def tiny_sd3(
    folder: Path,
    *,
    t5: bool = False,
    seed: int = 0,
    dynamic_shift: bool = False,
    layers: int = 2,
    dual: bool = False,
    sample_size: int = 8,
) -> Path:
    """Save a tiny real SD3 pipeline (16 latent channels, VAE factor 8, patch 2, shift 3) and return
    its folder.

    ``dual`` adds SD3.5's second attention to the first block and its query/key norm; images are
    ``8 * sample_size`` pixels by default and at most twice that.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer(layers, dual, sample_size),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0, use_dynamic_shifting=dynamic_shift
            ),
            vae=vae(),
            text_encoder=clip_encoder(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=clip_encoder(),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=t5_encoder() if t5 else None,
            tokenizer_3=t5_tokenizer() if t5 else None,
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_flux(
    folder: Path,
    *,
    guidance_embeds: bool = True,
    seed: int = 0,
    kontext: bool = False,
    **scheduler: Any,
) -> Path:
    """Save a tiny real FLUX pipeline (16 latent channels, VAE factor 8) and return its folder.

    ``guidance_embeds`` with dynamic shift is dev, without both is schnell; ``kontext`` edits
    images; ``scheduler`` overrides the scheduler's settings.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = (FluxKontextPipeline if kontext else FluxPipeline)(
            transformer=_flux_transformer(guidance_embeds),
            scheduler=FlowMatchEulerDiscreteScheduler(
                **({"use_dynamic_shifting": guidance_embeds} | scheduler)
            ),
            vae=vae(),
            text_encoder=CLIPTextModel(clip_config()).eval(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=t5_encoder(),
            tokenizer_2=t5_tokenizer(),
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_sd15(folder: Path, *, seed: int = 0, scheduler: Any = None) -> Path:
    """Save a tiny real Stable Diffusion 1.5 pipeline (4 latent channels, VAE factor 8) and return
    its folder.

    The scheduler is SD1.5's own PNDM unless another is given. The index names a safety checker that
    is not there, under the library name that SD1.5's index has.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusionPipeline(
            unet=unet(cross_attention_dim=WIDTH),
            scheduler=scheduler or PNDMScheduler(**NOISE, skip_prk_steps=True),
            vae=vae(4, shift=None, quant=True),
            text_encoder=CLIPTextModel(clip_config()).eval(),
            tokenizer=clip_tokenizer(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    index = folder / "model_index.json"
    checker = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
    index.write_text(json.dumps(json.loads(index.read_text()) | checker))
    return folder


def tiny_sdxl(
    folder: Path, *, seed: int = 0, scheduler: Any = None, force_zeros: bool = True
) -> Path:
    """Save a tiny real SDXL pipeline (4 latent channels, VAE factor 8) and return its folder.

    The scheduler is SDXL's own Euler, with ``set_alpha_to_one`` in its file as there, unless
    another is given.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusionXLPipeline(
            unet=unet(
                cross_attention_dim=2 * WIDTH,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=6 * 8 + WIDTH,
            ),
            scheduler=scheduler or EulerDiscreteScheduler(**EULER, timestep_spacing="leading"),
            vae=vae(4, shift=None, quant=True),
            text_encoder=CLIPTextModel(clip_config()).eval(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=clip_encoder(),
            tokenizer_2=clip_tokenizer(),
            force_zeros_for_empty_prompt=force_zeros,
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    if scheduler is None:
        config = folder / "scheduler/scheduler_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"set_alpha_to_one": False}))
    return folder


def unet(*, in_channels: int = 4, **options: Any) -> UNet2DConditionModel:
    """Make the network of a Stable Diffusion."""
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=in_channels,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2,
        norm_num_groups=4,
        **options,
    )


def _flux_transformer(guidance_embeds: bool) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )


def _transformer(layers: int, dual: bool, sample_size: int) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=sample_size,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=16,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=sample_size,  # in patches of 2 latents
        dual_attention_layers=(0,) if dual else (),
        qk_norm="rms_norm" if dual else None,
    )


def vae(
    channels: int = 16, *, shift: float | None = 0.0609, quant: bool = False, **settings: Any
) -> AutoencoderKL:
    """Make the VAE of a tiny pipeline: factor 8."""
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=channels,
        sample_size=64,
        scaling_factor=1.5305,
        shift_factor=shift,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        **settings,
    )


def clip_vocabulary() -> dict[str, int]:
    pieces = [
        *LETTERS,
        *(letter + "</w>" for letter in LETTERS),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    return {piece: index for index, piece in enumerate(pieces)}


def clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=clip_vocabulary(), merges=[], model_max_length=77)


def clip_encoder() -> CLIPTextModelWithProjection:
    """Make a text encoder of CLIP's kind."""
    return CLIPTextModelWithProjection(clip_config()).eval()


def clip_config() -> CLIPTextConfig:
    """Return the settings of a text encoder of CLIP's kind that reads letters."""
    vocabulary = clip_vocabulary()
    return CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        # The pooled state is read at the first end token; the default ids belong to the full
        # vocabulary.
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
    )


def t5_tokenizer() -> T5TokenizerFast:
    """Make a tokenizer of letters and digits."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *LETTERS]
    return T5TokenizerFast(
        vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0
    )


def t5_settings() -> dict[str, Any]:
    """Return the settings of a text encoder of T5's kind that reads letters."""
    return {
        "vocab_size": 4 + len(LETTERS),
        "d_model": 2 * WIDTH,
        "d_kv": 8,
        "d_ff": 2 * WIDTH,
        "num_layers": 1,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }


def t5_encoder(**settings: Any) -> T5EncoderModel:
    """Make a text encoder of T5's kind."""
    return T5EncoderModel(T5Config(**(t5_settings() | settings))).eval()
