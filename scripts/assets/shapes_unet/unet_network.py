"""What the small SDXL is made of: a UNet of two resolutions, beside the text encoders and the
autoencoder of `assets/shapes-sd3`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

BASE = "assets/shapes-sd3"
SIZE = 64  # pixels
STEPS = 10  # of the images that are judged
Told = tuple[Tensor, Tensor]  # tokens [B, T, 128] and pooled [B, 64]


class Text(nn.Module):
    """Both CLIP encoders of the base, joined the way an SDXL joins them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = CLIPTokenizer.from_pretrained(f"{BASE}/tokenizer")
        self.one = CLIPTextModel.from_pretrained(f"{BASE}/text_encoder")
        self.two = CLIPTextModelWithProjection.from_pretrained(f"{BASE}/text_encoder_2")
        config = AutoencoderKL.load_config(f"{BASE}/vae")
        self.offset = config["shift_factor"] * config["scaling_factor"]

    def ids(self, texts: list[str]) -> Tensor:
        """Return the words of texts as numbers [B, TOKENS]."""
        length = self.tokenizer.model_max_length
        how: dict[str, Any] = {"padding": "max_length", "return_tensors": "pt"}
        return self.tokenizer(texts, max_length=length, truncation=True, **how).input_ids

    @torch.no_grad()
    def encode(self, ids: Tensor, untold: Tensor) -> Told:
        """Encode words [B, TOKENS]; where `untold` [B] is True all is zero, as in an SDXL without
        a prompt."""
        a = self.one(ids, output_hidden_states=True)
        b = self.two(ids, output_hidden_states=True)
        hidden = torch.cat([a.hidden_states[-2], b.hidden_states[-2]], -1)
        told = (~untold).to(hidden)
        return hidden * told[:, None, None], b.text_embeds * told[:, None]


class Unet(nn.Module):
    """The UNet, told the image's size as an SDXL is."""

    def __init__(self, channels: list[int], layers: list[int]) -> None:
        super().__init__()
        levels = len(channels)
        self.model = UNet2DConditionModel(
            sample_size=SIZE // 8,
            in_channels=16,
            out_channels=16,
            down_block_types=("CrossAttnDownBlock2D",) * levels,
            up_block_types=("CrossAttnUpBlock2D",) * levels,
            block_out_channels=tuple(channels),
            layers_per_block=1,
            transformer_layers_per_block=tuple(layers),
            attention_head_dim=tuple(width // 32 for width in channels),
            cross_attention_dim=128,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=16,
            projection_class_embeddings_input_dim=6 * 16 + 64,
            norm_num_groups=16,
        )

    @staticmethod
    def autoencoder() -> AutoencoderKL:
        """Return the base's autoencoder, without the shift that an SDXL does not know."""
        config = dict(AutoencoderKL.load_config(f"{BASE}/vae")) | {"shift_factor": None}
        vae = AutoencoderKL.from_config(config)
        vae.load_state_dict(AutoencoderKL.from_pretrained(f"{BASE}/vae").state_dict())
        return vae.eval().requires_grad_(False)

    def forward(self, x: Tensor, t: Tensor, hidden: Tensor, pooled: Tensor) -> Tensor:
        """Return the noise in latents x [B, 16, 8, 8] at timesteps t [B]."""
        sizes = torch.tensor([SIZE, SIZE, 0, 0, SIZE, SIZE]).expand(len(x), -1)
        added = {"text_embeds": pooled, "time_ids": sizes}
        return self.model(x, t, hidden, added_cond_kwargs=added, return_dict=False)[0]


def schedule() -> DDIMScheduler:
    """Return Stable Diffusion's noise schedule; sampling begins at its noisiest timestep."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        timestep_spacing="trailing",
    )


def sample(unet: Unet, x: Tensor, told: Told, untold: Told, guidance: float) -> Tensor:
    """Follow DDIM from noise x [B, 16, 8, 8] -> latents."""
    scheduler = schedule()
    scheduler.set_timesteps(STEPS)
    for t in scheduler.timesteps:
        time = t.expand(len(x))
        noise = unet(x, time, *told)
        if guidance != 1:
            free = unet(x, time, *untold)
            noise = free + guidance * (noise - free)
        x = scheduler.step(noise, int(t), x, return_dict=False)[0]
    return x


def write(unet: Unet, vae: AutoencoderKL, out: Path) -> None:
    """Write the pipeline's folder; the UNet in bfloat16, for half of the megabytes."""
    text = Text()
    StableDiffusionXLPipeline(
        vae=copy.deepcopy(vae),
        text_encoder=text.one,
        text_encoder_2=text.two,
        tokenizer=text.tokenizer,
        tokenizer_2=text.tokenizer,
        unet=copy.deepcopy(unet.model).bfloat16(),
        scheduler=schedule(),
        add_watermarker=False,
    ).save_pretrained(out, safe_serialization=True)
