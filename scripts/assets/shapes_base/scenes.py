"""Stage `scenes`: the training set, rendered and encoded once; and batches drawn from it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from common import CAPTIONS, GRID, KINDS, NOTHING, SHARES, TOKENS, WORK
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTokenizer
from twins import twins
from words import vocabulary

from flowrl.core.files import replacing
from flowrl.evaluation.suites.shapes.prompts import base_records
from flowrl.evaluation.suites.shapes.scene import (
    COLORS,
    MAX_OBJECTS,
    Scenes,
    coverage,
    render,
)

BLOCK = 250
"""Twins that are drawn from one random stream."""


def layout_of(scenes: Scenes) -> np.ndarray:
    """Say what stands in each latent cell: -> [N, 64] uint8, class * 6 + colour, or NOTHING.

    A cell shows the object that covers most of it, if that is more than 30 %.
    """
    n = len(scenes.number)
    # share of each cell that each object covers
    share = np.zeros((n, MAX_OBJECTS, GRID * GRID), np.float32)
    for slot in range(MAX_OBJECTS):
        rows = np.flatnonzero(scenes.number > slot)
        if len(rows):
            where = scenes.center[rows, slot], scenes.radius[rows, slot]
            cells = coverage(scenes.shape[rows, slot], *where).reshape(-1, GRID, 8, GRID, 8)
            share[rows, slot] = cells.mean((2, 4)).reshape(len(rows), -1)
    # the largest
    best = share.argmax(1)
    thing = np.take_along_axis(scenes.shape * len(COLORS) + scenes.color, best, 1)
    return np.where(share.max(1) > 0.3, thing, NOTHING).astype(np.uint8)


@torch.no_grad()
def make_scenes(args: argparse.Namespace) -> None:
    """Render and encode `--pairs` twins once: latents, layouts and words of the captions."""
    vae = AutoencoderKL.from_pretrained(args.out / "vae").eval().to(args.device)
    names = ("latents", "captions", "layout", "kind")
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    records, began = base_records(), time.time()
    for k, (kind, share) in enumerate(zip(KINDS, SHARES, strict=True)):
        # all blocks of a kind
        pool = [record for record in records if record["tag"] == kind]
        for block in range(max(1, round(share * args.pairs / BLOCK))):
            rng = np.random.default_rng((args.seed, 3, k, block))
            scenes, captions = twins(kind, pool, BLOCK, rng)
            parts["latents"].append(_encode(vae, scenes))
            parts["captions"].append(_indices(captions).unflatten(0, (BLOCK, 2)))
            layout = torch.from_numpy(layout_of(scenes))
            parts["layout"].append(layout.unflatten(0, (BLOCK, 2)))
            parts["kind"].append(torch.full((BLOCK,), k, dtype=torch.uint8))
        # progress
        made = BLOCK * len(parts["kind"])
        print(f"{kind}: {made:,} twins so far, {time.time() - began:.0f} s", flush=True)
    (args.out / WORK).mkdir(exist_ok=True)
    with replacing(args.out / WORK / "scenes.safetensors") as draft:
        save_file({name: torch.cat(some) for name, some in parts.items()}, draft)


def _encode(vae: AutoencoderKL, scenes: Scenes) -> Tensor:
    """Render and encode 2n scenes -> latents [n, 2, 16, 8, 8], float16."""
    images = (render(scenes) * 2 - 1).to(vae.device)
    mean = torch.cat([vae.encode(some).latent_dist.mean for some in images.split(100)])
    latents = (mean - vae.config.shift_factor) * vae.config.scaling_factor
    return latents.half().cpu().unflatten(0, (BLOCK, 2))


def _indices(captions: list[list[str]]) -> Tensor:
    """Write captions as numbers of words, from 1; 0 = end -> [2n, CAPTIONS, TOKENS - 2] uint8."""
    index = {word: i + 1 for i, word in enumerate(vocabulary())}
    out = torch.zeros(len(captions), CAPTIONS, TOKENS - 2, dtype=torch.uint8)
    for i, row in enumerate(captions):
        for j, caption in enumerate(row):
            numbers = [index[word] for word in caption.split()]
            out[i, j, : len(numbers)] = torch.tensor(numbers, dtype=torch.uint8)
    return out


class Batches:
    """Draw batches of twins with captions from the training set."""

    def __init__(self, folder: Path, tokenizer: CLIPTokenizer) -> None:
        """Read the training set in a model's folder."""
        data = load_file(folder / WORK / "scenes.safetensors")
        # scenes by kind
        self.latents, self.captions = data["latents"], data["captions"]
        self.layout = data["layout"]
        self.rows = [(data["kind"] == k).nonzero()[:, 0] for k in range(len(KINDS))]
        self.shares = torch.tensor(SHARES)
        # token ids of the numbers in `captions`
        words = [tokenizer(word).input_ids[1] for word in vocabulary()]
        self.words = torch.tensor([tokenizer.eos_token_id, *words])
        self.start = torch.tensor([[tokenizer.bos_token_id]])
        self.end = torch.tensor([[tokenizer.eos_token_id]])

    def draw(self, n: int, prompts: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw n twins and their captions' slots -> rows [n], slots [n].

        Slot 0, the prompt, has the chance `prompts`.
        """
        kinds = torch.multinomial(self.shares, n, True, generator=rng).tolist()
        where = torch.rand(n, generator=rng).tolist()
        pairs = [(self.rows[k], u) for k, u in zip(kinds, where, strict=True)]
        rows = torch.stack([some[int(u * len(some))] for some, u in pairs])
        slots = torch.randint(1, CAPTIONS, (n,), generator=rng)
        return rows, slots.masked_fill(torch.rand(n, generator=rng) < prompts, 0)

    def ids(self, rows: Tensor, slots: Tensor, empty: Tensor | None = None) -> Tensor:
        """Return the token ids of both twins' captions [2n, TOKENS].

        Where `empty` [n] is True, both are the empty text.
        """
        words = self.captions[rows, :, slots].flatten(0, 1).long()
        if empty is not None:
            words = words.masked_fill(empty.repeat_interleave(2)[:, None], 0)
        start, end = self.start.expand(len(words), 1), self.end.expand(len(words), 1)
        return torch.cat([start, self.words[words], end], dim=1)
