"""Adv-GRPO's reward: a small head on frozen DINO features, trained along to tell references from
generated images."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.seeds import generator
from flowrl.core.types import RewardBatch

from ._backbones.dino import Backbone, FeatureCache, Features
from ._common.learned import adam, hinge, make_head, pack, unpack
from ._common.references import References
from ._common.scorer import to_pil

WHO = "rewards.adversarial"


class adversarial:
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
        # the arguments
        _at_least_one(
            {"patches": patches, "hidden": hidden, "d_steps": d_steps, "policy_every": policy_every}
        )
        if not 0 <= cls_weight <= 1 or patch_loss < 0 or lr <= 0:
            raise ConfigError(
                f"{WHO}: expected cls_weight in [0, 1], patch_loss >= 0, lr > 0; got {cls_weight}, "
                f"{patch_loss}, {lr}"
            )
        self.places, self.cls_weight, self.patch_loss = patches, cls_weight, patch_loss
        self.d_steps, self.policy_every = d_steps, policy_every
        self.normalize_training = normalize_training
        self.seed, self.rounds = seed, 0
        # the frozen network, and the head that learns
        self.references = References(references, column=column, root=root, who=WHO)
        self.backbone = Backbone(path, size=size, device=device, dtype=dtype, batch=batch, who=WHO)
        self.library = FeatureCache(self.backbone, megabytes=cache_mb, patches=True, who=WHO)
        self.head = make_head(self.backbone.width, hidden, seed).to(self.backbone.device)
        self.optimizer = adam(self._params(), lr, (0.5, 0.999))

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record whose references are missing, before the first image is made."""
        self.references.check(record, where)

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

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy is trained in this iteration, counted from 0."""
        return (iteration + 1) % self.policy_every == 0

    def update(self, batch: RewardBatch) -> dict[str, float]:
        """Train the head on the iteration's images and as many references -> metrics; {} if the
        policy has its turn.

        Metrics, means over the steps: `loss`, `loss_cls`, `loss_patch`; `accuracy`, the mean of the
        shares of references with a CLS logit above 0 and of images with one below; `real` and
        `fake`, the mean CLS logits. Raises RunError if the loss is not finite.
        """
        # whose turn it is
        turn = self.rounds
        if self.policy_every > 1 and self.trains_policy(turn):
            self.rounds += 1
            return {}
        if not len(batch.images) or len(batch.meta) != len(batch.images):
            raise DataError(
                f"{WHO}: expected images with one prompt record each, got {len(batch.images)} "
                f"images and {len(batch.meta)} records"
            )
        # features of the images once, of other references for each step
        count = len(batch.images)
        places = self._draw((count, self.d_steps * self.places), "fake", turn)
        fake = _take(self.backbone(to_pil(batch.images)), places)
        rows: list[dict[str, float]] = []
        for step, patches in enumerate(fake.patches.split(self.places, dim=1)):
            files = self.references.draw(batch.meta, self.seed, "reference", turn, step)
            real = _take(self.library(files), self._draw((count, self.places), "real", turn, step))
            rows.append(self._step(real, Features(fake.cls, patches)))
        self.rounds += 1
        means: dict[str, float] = {}
        for name in rows[0]:
            means[name] = sum(row[name] for row in rows) / len(rows)
        return means

    def _draw(self, shape: tuple[int, ...], *keys: int | str) -> Tensor:
        return torch.randint(self.backbone.patches, shape, generator=generator(self.seed, *keys))

    @torch.enable_grad()
    def _step(self, real: Features, fake: Features) -> dict[str, float]:
        """Make one step of Adam on features of real and generated images."""
        # the loss, on features of length 1 unless the code's way is asked for
        if self.normalize_training:
            real, fake = _of_length_one(real), _of_length_one(fake)
        real_cls, fake_cls = self.head(real.cls), self.head(fake.cls)
        loss_cls = hinge(real_cls, fake_cls)
        loss_patch = hinge(self.head(real.patches), self.head(fake.patches))
        loss = loss_cls + self.patch_loss * loss_patch
        if not math.isfinite(loss.item()):
            raise RunError(
                f"{WHO}: update {self.rounds + 1}: the head's loss is {loss.item()}; lower its lr, "
                "and resume"
            )
        # the step
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # figures
        right = ((real_cls > 0).float().mean() + (fake_cls < 0).float().mean()) / 2
        metrics = {"loss": loss, "loss_cls": loss_cls, "loss_patch": loss_patch, "accuracy": right}
        metrics |= {"real": real_cls.mean(), "fake": fake_cls.mean()}
        return {name: value.item() for name, value in metrics.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the head, Adam's moments and the number of updates as flat tensors, copied."""
        return pack(self._params(), self.optimizer, {"rounds": self.rounds})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state, bit for bit. Raises CheckpointError if it is another head's."""
        self.rounds = unpack(state, self._params(), self.optimizer, {"rounds": 0}, WHO)["rounds"]

    def _params(self) -> dict[str, nn.Parameter]:
        return dict(self.head.named_parameters())


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


def _at_least_one(counts: dict[str, int]) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{WHO}: {name}: expected at least 1, got {value}")
