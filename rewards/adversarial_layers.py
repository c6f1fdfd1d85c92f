"""Adv-GRPO's reward from several layers: a head on each, trained along to tell references from
generated images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch

from ._backbones.dino import Backbone, FeatureCache, Features
from ._common.learned import Discriminator, hinge, make_head, told_apart
from ._common.references import References
from ._common.scorer import to_pil

WHO = "rewards.adversarial_layers"


class adversarial_layers(Discriminator):
    """Score images [L, 3, H, W] by heads H_t on the patches of frozen layers t -> [L] in [0, 1].

    ``z`` is the mean over layers of the mean of the highest `top` of ``H_t(p)`` over patches p;
    r = sigmoid(z / temperature). A whole image is real where its most real parts are. `update`
    makes `d_steps` steps of Adam(`lr`, .5, .999) on `hinge` of z. References, `d_steps` and
    `policy_every` are as in rewards/adversarial.py; `path` may be DINO or SigLIP, `layers` count
    its blocks from 0.

    Adv-GRPO (2511.20256; showlab/Adv-GRPO 8287f90, adv_grpo/rewards.py: top 0.2, temperature 0.2,
    layer 8, or 2, 5, 8 and 11; its one config with such a head, dino_cotrain_sd3_multi_fast, says
    layer 11 and temperature 2). Reconstruction: of these heads the code has the reward, not the
    training; how it fuses layers is not in it, here by their mean. **Differs:** it normalises
    pixels by 0.5 for DINO too, and interpolates without a filter.
    """

    def __init__(
        self,
        *,
        path: str = "facebook/dinov2-base",
        layers: list[int] | None = None,
        top: float = 0.2,
        temperature: float = 0.2,
        references: str = "",
        column: str = "references",
        root: str = ".",
        size: int | None = None,
        hidden: int = 512,
        lr: float = 1e-4,
        d_steps: int = 1,
        policy_every: int = 1,
        seed: int = 0,
        cache_mb: int = 1024,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        # refuse what cannot be before the network is loaded
        if hidden < 1:
            raise ConfigError(f"{WHO}: hidden: expected at least 1, got {hidden}")
        if not 0 < top <= 1 or not temperature > 0 or not lr > 0:
            raise ConfigError(
                f"{WHO}: expected top in (0, 1], temperature and lr above 0; got {top}, "
                f"{temperature}, {lr}"
            )
        chosen = [8] if layers is None else layers
        if not chosen:
            raise ConfigError(f"{WHO}: layers: expected at least one block, got none")
        real = References(references, column=column, root=root, who=WHO)
        super().__init__(WHO, real, d_steps=d_steps, policy_every=policy_every, seed=seed)
        self.top, self.temperature = top, temperature
        # frozen network: references' features are computed once, and kept
        options: dict[str, Any] = {"size": size, "device": device, "dtype": dtype, "batch": batch}
        self.backbone = Backbone(path, layers=chosen, who=WHO, **options)
        self.library = FeatureCache(self.backbone, megabytes=cache_mb, patches=True, who=WHO)
        # one head a layer, trained along
        heads = [make_head(self.backbone.width, hidden, seed + t) for t in range(len(chosen))]
        self.heads = nn.ModuleList(heads).to(self.backbone.device)
        self.learn(self.heads, lr)

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image with the heads as they are. Raises DataError for an image with NaN."""
        parts = [torch.zeros(0, device=self.backbone.device)]
        parts += [self.logit(seen) for seen in self.backbone(to_pil(batch.images))]
        return (torch.cat(parts) / self.temperature).sigmoid().to(batch.images.device)

    def logit(self, seen: Features) -> Tensor:
        """Return z [B] of the patches of all layers [B, T N, D]."""
        count = seen.patches.shape[1] // len(self.heads)
        pooled = []
        for head, patches in zip(self.heads, seen.patches.split(count, dim=1), strict=True):
            logits = head(patches).squeeze(-1)
            best = logits.topk(max(1, int(count * self.top)), dim=1).values
            pooled.append(best.mean(1))
        return torch.stack(pooled).mean(0)

    def pairs(
        self, batch: RewardBatch, turn: int
    ) -> Iterator[tuple[list[Features], list[Features]]]:
        """Yield features of references, drawn anew, and of the images, for each step."""
        fake = [*self.backbone(to_pil(batch.images))]
        for step in range(self.d_steps):
            files = self.references.draw(batch.meta, self.seed, "reference", turn, step)
            yield [*self.library(files)], fake

    def loss(self, real: list[Features], fake: list[Features]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the hinge loss [] of z, and metrics of how z tells the two apart."""
        real_z = torch.cat([self.logit(part) for part in real])
        fake_z = torch.cat([self.logit(part) for part in fake])
        return hinge(real_z, fake_z), told_apart(real_z, fake_z)
