"""Reward latents, not images: DiNa-LRM (2602.11146), a preference model on a diffusion
transformer's own features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.seeds import generator
from flowrl.core.types import Cond, RewardBatch

from ._backbones.latent_judge import LatentJudge
from ._common.scorer import find_file, first_line, load_strict, pick_device, read_weights
from ._common.weights import source_of

WHO = "rewards.latent_preference"
WEIGHTS, SHAPE = "latent_preference.safetensors", "latent_preference.json"


class latent_preference:
    """Score clean latents [L, *] by a preference model that sees them at noise level `sigma`, the
    mean over `draws` noises -> [L], unbounded; only differences count.

    DiNa-LRM (2602.11146; HKUST-C4G/diffusion-rm af485b4): the generator's transformer, VAE and
    prompt embeddings are the judge's too, so it knows its own latents alone. `path`: a folder as
    `scripts/assets/shapes_latent_preference.py` writes it; `transformer`: a pipeline of
    StableDiffusion3Pipeline's layout, or its hub id. The noises follow from `seed` and are the same
    for all images. Finished images have no latents here, so evaluations leave this reward out. With
    `estimates` it also judges x0 estimates of noisy states, as it judges finished latents, where a
    plan compares them (`candidates`). With `states` it judges such states themselves, at their own
    noise level, and noises nothing: LPO's judge (2502.01051; Kwai-Kolors/LPO 9c2e8b8), which reads
    next states as they are. Without either, such a plan refuses it. Raises ConfigError, ModelError,
    DataError.

    **Differs:** `estimates` is ours. The library draws new noise at each call, which moves the
    order of a prompt's images. Its weights have names of their own and were not at hand. LPO's
    judge pools features of a U-Net and compares them with the prompt's as CLIP does.
    """

    judges_singly = True
    sees_latents = True

    def __init__(
        self,
        *,
        path: str,
        transformer: str,
        sigma: float = 0.1,
        draws: int = 1,
        seed: int = 0,
        estimates: bool = False,
        states: bool = False,
        device: str = "auto",
        batch: int = 64,
    ) -> None:
        if not 0 <= sigma <= 1 or draws < 1 or batch < 1:
            raise ConfigError(
                f"{WHO}: expected sigma in [0, 1], draws and batch of at least 1, got {sigma=}, "
                f"{draws=}, {batch=}"
            )
        if estimates and states:
            raise ConfigError(
                f"{WHO}: estimates and states: it judges the x0 estimates of noisy states or these "
                "themselves; set one of them"
            )
        self.sigma, self.draws, self.seed, self.batch = sigma, draws, seed, batch
        self.states, self.sees_sigma = states, estimates or states
        self.device = pick_device(device, WHO)
        weights = find_file(path, WEIGHTS, WHO)
        shape = json.loads(find_file(path, SHAPE, WHO).read_text(encoding="utf-8"))
        self.judge = LatentJudge(load_transformer(transformer), **shape)
        load_strict(self.judge, read_weights(weights, WHO), f"{WHO}: {weights}")
        self.judge = self.judge.to(self.device).eval().requires_grad_(False)
        self.judge.transformer[0].to(self.device)

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each latent with its own prompt's embeddings."""
        if batch.latents is None:
            raise DataError(
                f"{WHO}: expected latents, which training alone has; got images. Judge finished "
                "images by another reward"
            )
        x0, cond, states = batch.latents
        channels = self.judge.transformer[0].config.in_channels
        if x0.shape[1] != channels or not {"embeds", "pooled"} <= cond.keys():
            raise DataError(
                f"{WHO}: expected latents of {channels} channels with `embeds` and `pooled`, as "
                f"the judge's own pipeline has them, got {list(x0.shape[1:])} and {sorted(cond)}"
            )
        if self.states and states is not None:
            x0 = states
        score = self._at_own_level if self.states else self._noised
        some = [slice(k, k + self.batch) for k in range(0, len(x0), self.batch)]
        parts = [score(x0[k], batch.sigma[k], self._words(cond, k)) for k in some]
        return torch.cat([torch.zeros(0), *parts])

    def _words(self, cond: Cond, some: slice) -> Cond:
        return {name: cond[name][some].to(self.device) for name in ("embeds", "pooled")}

    def _at_own_level(self, x: Tensor, sigma: Tensor, words: Cond) -> Tensor:
        """Score states [B, *] at their own noise levels [B]."""
        x, level = x.to(self.device).float(), sigma.to(self.device).float()
        return self.judge(x, level, **words).float().cpu()

    def _noised(self, x0: Tensor, _: Tensor, words: Cond) -> Tensor:
        """Score latents [B, *] at the reward's noise level."""
        clean = x0.to(self.device).float()
        sigma = torch.full((len(clean),), self.sigma, device=self.device)
        total = torch.zeros(len(clean))
        for draw in range(self.draws):
            noise = torch.randn(clean.shape[1:], generator=generator(self.seed, "latent", draw))
            x = (1 - self.sigma) * clean + self.sigma * noise.to(self.device)
            total += self.judge(x, sigma, **words).float().cpu()
        return total / self.draws


def save_judge(judge: LatentJudge, shape: dict[str, Any], folder: Path) -> None:
    """Write a judge that was made as ``LatentJudge(transformer, **shape)`` into the folder that the
    reward takes as `path`."""
    from safetensors.torch import save_file

    from flowrl.core.files import write_json

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().contiguous() for name, value in judge.state_dict().items()}
    save_file(state, folder / WEIGHTS)
    write_json(folder / SHAPE, shape)


def load_transformer(path: str) -> Any:
    """Load a pipeline's transformer, float32."""
    from diffusers import SD3Transformer2DModel

    try:
        return SD3Transformer2DModel.from_pretrained(
            source_of(path),
            subfolder="transformer",
            use_safetensors=True,
            torch_dtype=torch.float32,
        )
    except Exception as error:  # offline, misspelt, another kind of model
        raise ModelError(
            f"{WHO}: {path}: expected a folder or hub id of a Stable Diffusion 3 pipeline: "
            f"{first_line(error)}"
        ) from error
