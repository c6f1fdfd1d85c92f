"""Adv-GRPO's other reward: a PickScore whose last layers learn to prefer references to generated
images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from flowrl.core.errors import ConfigError, RunError
from flowrl.core.types import RewardBatch

from ._backbones.clip import TransformersClip
from ._common.learned import adam, check_meta, pack, unpack
from ._common.references import References, open_image
from ._common.scorer import pick_device, pick_dtype, to_pil

WHO = "rewards.adversarial_pickscore"


class adversarial_pickscore:
    """Score images [L, 3, H, W] by exp(logit_scale) cosine(image, prompt) / divide -> [L],
    about 0.7 to 0.9.

    `update` draws one reference of its own prompt per image (see rewards/dino.py for
    `references`, `column`, `root`). Only if the references' mean score is below the images' it
    makes one step of Adam(`lr`, .5, .999) on the last `tune_layers` layers of the vision tower:
    cross-entropy of reference against image, given the prompt, on scores that are not divided.
    Otherwise it is the policy's turn. Everything else stays frozen.

    Adv-GRPO (2511.20256; showlab/Adv-GRPO 8287f90, scripts/train_sd3_fast_pickscore.py).
    **Differs:** the paper tunes two layers, its code one, as here. The code's weights are bfloat16,
    in which steps of 5e-6 are mostly rounded away; here they are float32, and `dtype` is what the
    towers compute in. The code pairs the images of a prompt with its references in order, here
    they are drawn from (seed, number of updates).
    """

    def __init__(
        self,
        *,
        path: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        references: str = "",
        column: str = "references",
        root: str = ".",
        tune_layers: int = 1,
        lr: float = 5e-6,
        divide: float = 26.0,
        seed: int = 0,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        # the arguments
        if min(batch, tune_layers) < 1 or min(lr, divide) <= 0:
            raise ConfigError(
                f"{WHO}: expected batch and tune_layers of at least 1, lr and divide above 0; got "
                f"{batch}, {tune_layers}, {lr} and {divide}"
            )
        self.batch, self.divide, self.seed = batch, divide, seed
        self.rounds, self.behind = 0, False
        self.references = References(references, column=column, root=root, who=WHO)
        self.kind = pick_dtype(dtype, WHO)
        if self.kind == torch.float16:
            raise ConfigError(
                f"{WHO}: dtype: gradients of float16 run out of range, expected float32 or bfloat16"
            )
        # the towers, of which the last vision layers learn
        self.towers = TransformersClip(
            path, processor, device=pick_device(device, WHO), dtype=torch.float32, who=WHO
        )
        layers = self.towers.model.vision_model.encoder.layers
        if tune_layers > len(layers):
            raise ConfigError(
                f"{WHO}: tune_layers: expected at most {len(layers)}, got {tune_layers}"
            )
        tuned = range(len(layers) - tune_layers, len(layers))
        self.params: dict[str, nn.Parameter] = {}
        for index in tuned:
            for name, parameter in layers[index].named_parameters():
                self.params[f"{index}.{name}"] = parameter.requires_grad_(True)
        self.optimizer = adam(self.params, lr, (0.5, 0.999))

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record whose references are missing, before the first image is made."""
        self.references.check(record, where)

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image against its own prompt with the weights as they are."""
        scores = self._scores(to_pil(batch.images), batch.prompts) / self.divide
        return scores.to(batch.images.device)

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy is trained: unless the last `update` found the references behind,
        and trained.

        As in the code where this is asked after the iteration's `update`; before it, turns come one
        iteration late.
        """
        return not self.behind

    def update(self, batch: RewardBatch) -> dict[str, float]:
        """Train on the iteration's images if references score lower than they do -> metrics.

        `real` and `fake`: mean scores before the step. `accuracy`: share of pairs in which the
        reference scores higher. `loss`: mean cross-entropy, nats. `trained`: 1 or 0. Raises
        RunError if the loss is not finite.
        """
        check_meta(batch, WHO)
        # score references and images
        files = self.references.draw(batch.meta, self.seed, "reference", self.rounds)
        real, fake = [open_image(file, WHO) for file in files], to_pil(batch.images)
        with torch.no_grad():
            first, second = self._scores(real, batch.prompts), self._scores(fake, batch.prompts)
        loss = softplus(second - first).mean().item()
        if not math.isfinite(loss):
            raise RunError(
                f"{WHO}: update {self.rounds + 1}: the loss is {loss}; lower its lr, and resume"
            )
        # train if the references are behind
        behind = bool(first.mean() < second.mean())
        if behind:
            self._step(real, fake, batch.prompts)
        self.rounds, self.behind = self.rounds + 1, behind
        # figures from before the step
        return {
            "real": (first.mean() / self.divide).item(),
            "fake": (second.mean() / self.divide).item(),
            "accuracy": (first > second).float().mean().item(),
            "loss": loss,
            "trained": float(behind),
        }

    @torch.enable_grad()
    def _step(
        self, real: Sequence[Image.Image], fake: Sequence[Image.Image], prompts: Sequence[str]
    ) -> None:
        """Make one step on all pairs; parts of `batch` only save memory."""
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, len(fake), self.batch):
            part = slice(start, start + self.batch)
            first = self._scores(real[part], prompts[part])
            second = self._scores(fake[part], prompts[part])
            (softplus(second - first).sum() / len(fake)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _scores(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> Tensor:
        """Return exp(logit_scale) cosine of each image with its prompt [N], float32 on the
        towers' device."""
        parts = [torch.zeros(0, device=self.towers.device)]
        for start in range(0, len(images), self.batch):
            texts = list(prompts[start : start + self.batch])
            different = list(dict.fromkeys(texts))
            half = self.kind != torch.float32
            with torch.autocast(self.towers.device.type, self.kind, enabled=half):
                seen = self.towers.see(images[start : start + self.batch])
                read = self.towers.read(different)
            rows = normalize(read.float(), dim=-1)[[different.index(text) for text in texts]]
            parts.append(self.towers.scale * (normalize(seen.float(), dim=-1) * rows).sum(-1))
        return torch.cat(parts)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tuned layers, Adam's moments and the counters as flat tensors, copied."""
        counters = {"rounds": self.rounds, "behind": int(self.behind)}
        return pack(self.params, self.optimizer, counters)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state, bit for bit. Raises CheckpointError if it is another network's."""
        counters = unpack(state, self.params, self.optimizer, {"rounds": 0, "behind": 0}, WHO)
        self.rounds, self.behind = counters["rounds"], bool(counters["behind"])
