"""Adv-GRPO's reward: a small head on frozen DINO features, trained along to tell references from
generated images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.core.errors import ConfigError
from flowrl.core.seeds import generator
from flowrl.core.types import RewardBatch

from ._backbones.dino import Backbone, FeatureCache, Features
from ._common.learned import Discriminator, hinge, make_head, told_apart
from ._common.references import References
from ._common.scorer import to_pil

WHO = "rewards.adversarial"


class adversarial(Discriminator):
    """Score images [L, 3, H, W] by a head H on frozen DINO features -> [L], unbounded, about [-1,
    1] in practice.

    r = cls_weight H(CLS/|CLS|) + (1 - cls_weight) mean H(p/|p|) over `patches` patch tokens p,
    drawn with replacement; H = Linear(D, hidden)-GELU-Linear(hidden, 1), one for CLS and patches.
    `update` makes `d_steps` steps of Adam(`lr`, .5, .999) on hinge(CLS) + patch_loss
    hinge(patches). Real are references, one drawn per image, of its own prompt (rewards/dino.py
    says what `references`, `column`, `root` and `size` are). Fake are the iteration's images. No
    gradient reaches the network. Of every `policy_every` iterations the last trains the policy and
    the others train the head; with 1 each trains both. `update` has to be called once per
    iteration. All draws follow from (seed, number of updates), so scoring never changes the state.

    Adv-GRPO (2511.20256; showlab/Adv-GRPO 8287f90, scripts/train_sd3_fast_dino_patch.py:
    policy_every 10, one head step per iteration). **Differs:** the code draws other patches for
    each image when it scores; here all images of a call are read at the same places, so that
    the score depends on nothing but the image. The code trains the head on features that are
    *not* normalised, although it scores normalised ones: `normalize_training: false` does the same.
    It resizes with a plain filter when it scores and an anti-aliased one when it trains, here both
    are the latter. It shows the head the references of a prompt in order, each once. Its head is
    bfloat16, here float32.
    """

    def __init__(
        self,
        *,
        path: str = "facebook/dinov2-base",
        references: str = "",
        column: str = "references",
        root: str = ".",
        size: int | None = None,
        patches: int = 64,
        cls_weight: float = 0.7,
        patch_loss: float = 0.3,
        hidden: int = 512,
        lr: float = 1e-4,
        d_steps: int = 1,
        policy_every: int = 1,
        normalize_training: bool = True,
        seed: int = 0,
        cache_mb: int = 1024,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        for name, value in {"patches": patches, "hidden": hidden}.items():
            if value < 1:
                raise ConfigError(f"{WHO}: {name}: expected at least 1, got {value}")
        if not 0 <= cls_weight <= 1 or patch_loss < 0 or lr <= 0:
            raise ConfigError(
                f"{WHO}: expected cls_weight in [0, 1], patch_loss >= 0, lr > 0; got {cls_weight}, "
                f"{patch_loss}, {lr}"
            )
        real = References(references, column=column, root=root, who=WHO)
        super().__init__(WHO, real, d_steps=d_steps, policy_every=policy_every, seed=seed)
        self.places, self.cls_weight, self.patch_loss = patches, cls_weight, patch_loss
        self.normalize_training = normalize_training
        # the frozen network, and the head that learns
        self.backbone = Backbone(path, size=size, device=device, dtype=dtype, batch=batch, who=WHO)
        self.library = FeatureCache(self.backbone, megabytes=cache_mb, patches=True, who=WHO)
        self.head = make_head(self.backbone.width, hidden, seed).to(self.backbone.device)
        self.learn(self.head, lr)

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image with the head as it is. Raises DataError for an image with NaN."""
        chosen = self._draw((self.places,), "score", self.rounds).to(self.backbone.device)
        parts = [torch.zeros(0, device=self.backbone.device)]
        for seen in self.backbone(to_pil(batch.images)):
            parts.append(self.score(seen.cls, seen.patches[:, chosen]))
        return torch.cat(parts).to(batch.images.device)

    def score(self, cls: Tensor, patches: Tensor) -> Tensor:
        """Return the reward [B] of CLS features [B, D] and patch features [B, P, D], whatever their
        lengths."""
        image = self.head(normalize(cls, dim=-1)).squeeze(-1)
        local = self.head(normalize(patches, dim=-1)).squeeze(-1).mean(-1)
        return self.cls_weight * image + (1 - self.cls_weight) * local

    def pairs(self, batch: RewardBatch, turn: int) -> Iterator[tuple[Features, Features]]:
        """Yield features of references, drawn anew, and of the images at other places, for each
        step."""
        count = len(batch.images)
        places = self._draw((count, self.d_steps * self.places), "fake", turn)
        fake = _take(self.backbone(to_pil(batch.images)), places)
        for step, patches in enumerate(fake.patches.split(self.places, dim=1)):
            files = self.references.draw(batch.meta, self.seed, "reference", turn, step)
            real = _take(self.library(files), self._draw((count, self.places), "real", turn, step))
            yield real, Features(fake.cls, patches)

    def loss(self, real: Features, fake: Features) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [], on features of length 1 unless the code's way is asked for, and
        metrics: `loss_cls`, `loss_patch`, and how the CLS logits tell the two apart."""
        if self.normalize_training:
            real, fake = _of_length_one(real), _of_length_one(fake)
        real_cls, fake_cls = self.head(real.cls), self.head(fake.cls)
        loss_cls = hinge(real_cls, fake_cls)
        loss_patch = hinge(self.head(real.patches), self.head(fake.patches))
        parts = {"loss_cls": loss_cls, "loss_patch": loss_patch}
        return loss_cls + self.patch_loss * loss_patch, parts | told_apart(real_cls, fake_cls)

    def _draw(self, shape: tuple[int, ...], *keys: int | str) -> Tensor:
        return torch.randint(self.backbone.patches, shape, generator=generator(self.seed, *keys))


def _take(parts: Iterable[Features], places: Tensor) -> Features:
    """Join parts of B images, keeping of each image the patches at its `places` [B, P] only."""
    cls, patches, done = [], [], 0
    for part in parts:
        mine = places[done : done + len(part.cls)].to(part.patches.device)
        cls.append(part.cls)
        patches.append(part.patches[torch.arange(len(mine), device=mine.device)[:, None], mine])
        done += len(mine)
    return Features(torch.cat(cls), torch.cat(patches))


def _of_length_one(features: Features) -> Features:
    return Features(normalize(features.cls, dim=-1), normalize(features.patches, dim=-1))
