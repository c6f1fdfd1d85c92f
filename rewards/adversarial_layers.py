"""Adv-GRPO's reward from several layers: a head on each, trained along to tell references from
generated images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.types import RewardBatch

from ._backbones.dino import Backbone, FeatureCache, Features
from ._common.learned import adam, hinge, make_head, pack, unpack
from ._common.references import References
from ._common.scorer import to_pil

WHO = "rewards.adversarial_layers"


class adversarial_layers:
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
        for name, value in {
            "hidden": hidden,
            "d_steps": d_steps,
            "policy_every": policy_every,
        }.items():
            if value < 1:
                raise ConfigError(f"{WHO}: {name}: expected at least 1, got {value}")
        if not 0 < top <= 1 or not temperature > 0 or not lr > 0:
            raise ConfigError(
                f"{WHO}: expected top in (0, 1], temperature and lr above 0; got {top}, "
                f"{temperature}, {lr}"
            )
        chosen = [8] if layers is None else layers
        if not chosen:
            raise ConfigError(f"{WHO}: layers: expected at least one block, got none")
        self.top, self.temperature = top, temperature
        self.d_steps, self.policy_every, self.seed, self.rounds = d_steps, policy_every, seed, 0
        # frozen network: references' features are computed once, and kept
        self.references = References(references, column=column, root=root, who=WHO)
        options: dict[str, Any] = {"size": size, "device": device, "dtype": dtype, "batch": batch}
        self.backbone = Backbone(path, layers=chosen, who=WHO, **options)
        self.library = FeatureCache(self.backbone, megabytes=cache_mb, patches=True, who=WHO)
        # one head a layer, trained along: betas (0.5, 0.999) as is usual for discriminators
        heads = [make_head(self.backbone.width, hidden, seed + t) for t in range(len(chosen))]
        self.heads = nn.ModuleList(heads).to(self.backbone.device)
        self.optimizer = adam(self._params(), lr, (0.5, 0.999))

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record whose references are missing, before the first image is made."""
        self.references.check(record, where)

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

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy is trained in this iteration, counted from 0."""
        return (iteration + 1) % self.policy_every == 0

    def update(self, batch: RewardBatch) -> dict[str, float]:
        """Train the heads on the iteration's images and as many references -> metrics; {} if the
        policy has its turn.

        Metrics, means over the steps: `loss`; `accuracy`, the mean of the shares of references
        with z above 0 and of images with z below; `real` and `fake`, the mean z. Raises RunError
        if the loss is not finite.
        """
        # turns: either the heads learn in an iteration, or the policy does
        turn = self.rounds
        if self.policy_every > 1 and self.trains_policy(turn):
            self.rounds += 1
            return {}
        if not len(batch.images) or len(batch.meta) != len(batch.images):
            raise DataError(
                f"{WHO}: expected images with one prompt record each, got {len(batch.images)} "
                f"images and {len(batch.meta)} records"
            )
        # features of the policy's images once; each step draws other references
        fake = [*self.backbone(to_pil(batch.images))]
        rows = []
        for step in range(self.d_steps):
            files = self.references.draw(batch.meta, self.seed, "reference", turn, step)
            rows.append(self._step([*self.library(files)], fake))
        self.rounds += 1
        means = {}
        for name in rows[0]:
            means[name] = sum(row[name] for row in rows) / len(rows)
        return means

    @torch.enable_grad()
    def _step(self, real: list[Features], fake: list[Features]) -> dict[str, float]:
        """Make one step of Adam on features of real and generated images."""
        real_z = torch.cat([self.logit(part) for part in real])
        fake_z = torch.cat([self.logit(part) for part in fake])
        loss = hinge(real_z, fake_z)
        if not math.isfinite(loss.item()):
            raise RunError(
                f"{WHO}: update {self.rounds + 1}: the heads' loss is {loss.item()}; lower their "
                "lr, and resume"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        right = ((real_z > 0).float().mean() + (fake_z < 0).float().mean()) / 2
        metrics = {"loss": loss, "accuracy": right, "real": real_z.mean(), "fake": fake_z.mean()}
        return {name: value.item() for name, value in metrics.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the heads, Adam's moments and the number of updates as flat tensors, copied."""
        return pack(self._params(), self.optimizer, {"rounds": self.rounds})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state, bit for bit. Raises CheckpointError if it is other heads'."""
        self.rounds = unpack(state, self._params(), self.optimizer, {"rounds": 0}, WHO)["rounds"]

    def _params(self) -> dict[str, nn.Parameter]:
        return dict(self.heads.named_parameters())
