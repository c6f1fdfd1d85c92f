"""Make the tiny Wan of the moving shapes: a VAE built by hand, a network trained for minutes.

::

    python scripts/assets/moving_base.py --steps 1200 --anywhere
    python scripts/assets/moving_base.py --steps 700 --batch 24 --lr 1.5e-3 --seed 1 --go-on

writes assets/moving/*.jsonl and assets/moving-wan; the second goes on from the first's weights,
with objects that move through the middle. The share WRONG of the captions names a direction at
random, so that the base often moves objects another way than told: what reinforcement learning is
to mend.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import Tensor, nn
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from flowrl.core.files import write_text
from flowrl.core.noise_path import interpolate
from flowrl.evaluation.suites import moving_shapes
from flowrl.evaluation.suites.moving_shapes import BACKGROUND, COLORS, DIRECTIONS, EVERY, Scene
from flowrl.models.wan import wan

OUT = Path("assets/moving-wan")
LISTS = Path("assets/moving")
WRONG = 0.5  # of the captions: a direction at random, which is the right one in a quarter of them
WIDTH, TEXT, TOKENS, SHIFT = 64, 32, 8, 1.0
HIGH = 40.0  # of the VAE's hidden channels, where SiLU is the identity and the norm constant
SPREAD = 0.5  # of the latents' scale, in pixels of [-1, 1]


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--anywhere", action="store_true", help="objects start anywhere")
    parser.add_argument("--go-on", action="store_true", help="from the weights that are there")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    # the prompt lists, and a pipeline with random weights, unless this goes on
    write_lists()
    if not asked.go_on:
        new_pipeline().save_pretrained(OUT, safe_serialization=True)
    # train through flowrl's own adapter, so that the folder is known to work with it
    model = wan(
        str(OUT), frames=moving_shapes.FRAMES, tune="full", device="cpu", max_sequence_length=TOKENS
    )
    losses = train(model, asked)
    model.network.save_pretrained(OUT / "transformer", safe_serialization=True)
    # how the weights came about: a line for each call
    file = OUT / "training.json"
    before = json.loads(file.read_text(encoding="utf-8")) if asked.go_on else []
    log = [*before, {**vars(asked), "wrong": WRONG, "loss": losses}]
    write_text(file, json.dumps(log, indent=1) + "\n")


def write_lists() -> None:
    """Write the prompt lists."""
    LISTS.mkdir(parents=True, exist_ok=True)
    lists = {
        "train": moving_shapes.TRAIN,
        "validation": moving_shapes.VALIDATION,
        "test": moving_shapes.TEST,
    }
    for name, scenes in lists.items():
        lines = [json.dumps(one.record) + "\n" for one in scenes]
        write_text(LISTS / f"{name}.jsonl", "".join(lines))


def new_pipeline() -> WanPipeline:
    """Make the pipeline, its network and its text encoder with random weights."""
    # every word of the prompts is a token
    words = ["a", "moves", *COLORS, *moving_shapes.CLASSES, *DIRECTIONS]
    pieces = ["<pad>", "</s>", "<unk>", *(f"▁{word}" for word in words)]
    tokenizer = T5TokenizerFast(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0)
    # small enough for a CPU: one layer reads the text, three make the video
    sizes = {"d_model": TEXT, "d_kv": 16, "d_ff": TEXT, "num_layers": 1, "num_heads": 2}
    text = UMT5Config(vocab_size=len(pieces), feed_forward_proj="gated-gelu", **sizes)
    network = WanTransformer3DModel(
        patch_size=(1, 4, 4),
        num_attention_heads=4,
        attention_head_dim=WIDTH // 4,
        in_channels=3,
        out_channels=3,
        text_dim=TEXT,
        freq_dim=32,
        ffn_dim=3 * WIDTH,
        num_layers=3,
        rope_max_seq_len=32,
    )
    # the scheduler of released Wans, at SHIFT 1, since these videos are small
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=SHIFT,
        num_train_timesteps=1000,
    )
    return WanPipeline(
        transformer=network,
        scheduler=scheduler,
        vae=colour_vae(),
        text_encoder=UMT5EncoderModel(text).eval(),
        tokenizer=tokenizer,
    )


def colour_vae() -> AutoencoderKLWan:
    """Build a VAE of Wan's class without down-sampling whose latents are the colours, scaled.

    Hidden channels are HIGH plus and minus each colour. There SiLU is the identity, and the norm
    over channels is the same for all colours to 1 in HIGH squared; residual blocks add nothing.
    """
    vae = AutoencoderKLWan(
        base_dim=6,
        z_dim=3,
        dim_mult=[1],
        num_res_blocks=1,
        temperal_downsample=[],
        latents_mean=[2 * level - 1 for level in BACKGROUND],
        latents_std=[SPREAD] * 3,
        scale_factor_temporal=1,
        scale_factor_spatial=1,
    )
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        both = torch.cat([torch.eye(3), -torch.eye(3)])
        for half in (vae.encoder, vae.decoder):
            _linear(half.conv_in, both, HIGH)
            half.norm_out.gamma.fill_(HIGH)
        _linear(vae.encoder.conv_out, torch.cat([both.T / 2, torch.zeros(3, 6)]), 0.0)
        vae.encoder.conv_out.bias[3:] = -30.0  # log-variance: none
        _linear(vae.decoder.conv_out, both.T / 2, 0.0)
        _linear(vae.quant_conv, torch.eye(6), 0.0)
        _linear(vae.post_quant_conv, torch.eye(3), 0.0)
    return vae


def _linear(conv: nn.Conv3d, weight: Tensor, bias: float) -> None:
    """Make a causal convolution a matrix per pixel: its last frame, the middle of the rest."""
    height, width = (size // 2 for size in conv.weight.shape[3:])
    conv.weight[:, :, -1, height, width] = weight
    assert conv.bias is not None
    conv.bias.fill_(bias)


def train(model: Any, asked: argparse.Namespace) -> list[float]:
    """Train the network by flow matching on painted videos -> the mean loss of each hundred
    steps."""
    steps, batch, lr = asked.steps, asked.batch, asked.lr
    generator = torch.Generator().manual_seed(asked.seed)
    params = list(model.trainable().values())
    optimizer = torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.99), weight_decay=1e-4)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    # few prompts: encode each once
    cond = {one.prompt: model.encode([one.prompt])["embeds"] for one in EVERY}
    mean, std = torch.tensor(BACKGROUND)[:, None, None], SPREAD / 2
    losses, start = [], time.monotonic()
    total = torch.zeros(())
    for step in range(steps):
        videos, texts = batch_of(batch, generator, anywhere=asked.anywhere)
        # painted videos [B, T, 3, H, W] as latents [B, 3, T, H, W], scaled like the VAE's
        x0 = ((videos - mean) / std).transpose(1, 2)
        noise = torch.randn(x0.shape, generator=generator)
        sigma = torch.rand(batch, generator=generator).clamp(1e-3, 1 - 1e-6)
        embeds = torch.cat([cond[text] for text in texts])
        v = model.velocity(interpolate(x0, noise, sigma), sigma, {"embeds": embeds})
        # flow matching: the velocity of the straight path is noise - x0
        loss = (v - (noise - x0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        rate.step()
        # a mean of a hundred losses, and the weights now and then
        total += loss.detach() / 100
        if step % 100 == 99:
            losses.append(round(float(total), 4))
            print(step + 1, losses[-1], f"{time.monotonic() - start:.0f} s", flush=True)
            total = torch.zeros(())
        if step % 500 == 499:
            model.network.save_pretrained(OUT / "transformer", safe_serialization=True)
    return losses


def batch_of(count: int, generator: torch.Generator, *, anywhere: bool) -> tuple[Tensor, list[str]]:
    """Paint scenes -> videos [count, T, 3, H, W], and captions of which some are wrong."""
    videos, texts = [], []
    ways = list(DIRECTIONS)
    for place in torch.randint(len(EVERY), (count,), generator=generator).tolist():
        one = EVERY[place]
        videos.append(moving_shapes.paint_video(one, generator, anywhere=anywhere))
        if torch.rand((), generator=generator) < WRONG:
            way = ways[int(torch.randint(len(ways), (), generator=generator))]
            one = Scene(one.kind, one.color, way)
        texts.append(one.prompt)
    return torch.stack(videos), texts


if __name__ == "__main__":
    main()
