"""Stage `vae`: an autoencoder by the evidence lower bound with a fixed decoder std.

Latents carry no more than they need.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
import torch
from common import CHANNELS, GRID, Log, set_lr, warm_cosine
from diffusers import AutoencoderKL
from torch import Tensor, nn

from flowrl.evaluation.suites.shapes.prompts import Record, base_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import SIZE, render


def build_vae() -> AutoencoderKL:
    """Make the untrained autoencoder: 64 x 64 pixels -> 16 channels of 8 x 8 cells."""
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 16, 32, 64],
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        sample_size=SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def train_vae(args: argparse.Namespace) -> None:
    """Fit the autoencoder for `--steps` batches of fresh scenes; fix latent shift and scale."""
    torch.manual_seed(args.seed)
    vae = build_vae().to(args.device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=args.lr, weight_decay=0.0, betas=(0.9, 0.99))
    log, records, began = Log(args.out / "vae_log.jsonl"), base_records(), time.time()
    for step in range(args.steps):
        # one batch
        set_lr(optimizer, args.lr * warm_cosine(step, args.steps, 100))
        rng = np.random.default_rng((args.seed, 1, step))
        images = _images(records, args.batch, rng).to(args.device)
        mse, kl = _errors(vae, images, step)
        # the bound, in units of mean squared error
        loss = mse + kl * (2 * args.decoder_std**2) / images[0].numel()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(vae.parameters(), args.clip)
        optimizer.step()
        if step % 50 == 0 or step == args.steps - 1:
            row = {"loss": loss.item(), "psnr": -10 * math.log10(mse.item()), "kl": kl.item()}
            log(step=step, **row, norm=norm.item(), seconds=time.time() - began)
    _finish(vae, records, args)


def _images(records: list[Record], number: int, rng: np.random.Generator) -> Tensor:
    """Draw scenes that are true to prompts drawn at random -> [number, 3, 64, 64] in [-1, 1]."""
    chosen = [records[i] for i in rng.integers(0, len(records), number)]
    return render(scenes_for(chosen, rng)) * 2 - 1


def _errors(vae: AutoencoderKL, images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Encode and decode [N, 3, 64, 64] -> squared error per value in [0, 1], KL per image."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(images), CHANNELS, GRID, GRID, generator=generator).to(images.device)
    with torch.autocast(images.device.type, torch.bfloat16):
        mean, log_var = vae.encode(images).latent_dist.parameters.float().chunk(2, dim=1)
        log_var = log_var.clamp(-30.0, 20.0)
        decoded = vae.decode(mean + (0.5 * log_var).exp() * noise).sample
    mse = ((decoded.float() - images) / 2).square().mean()
    kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum((1, 2, 3)).mean()
    return mse, kl


@torch.no_grad()
def _finish(vae: AutoencoderKL, records: list[Record], args: argparse.Namespace) -> None:
    """Fix shift and scale so that latents of fresh scenes have mean 0 and std 1; write the VAE."""
    vae.eval()
    images = _images(records, 1024, np.random.default_rng((args.seed, 2)))
    parts = [vae.encode(some.to(args.device)).latent_dist.mean for some in images.split(128)]
    mean = torch.cat(parts)
    shift, scale = mean.mean().item(), 1.0 / mean.std().item()
    vae.register_to_config(scaling_factor=scale, shift_factor=shift)
    vae.save_pretrained(args.out / "vae")
    channels = [round(std, 2) for std in mean.std((0, 2, 3)).tolist()]
    print("latent std per channel", channels, "shift", shift, "scale", scale)
