"""SPO's preference model from a file in the published layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from clipkit import random_images
from scorerkit import words
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, layer_norm, silu
from transformers import CLIPModel
from weightkit import Weights

from flowrl.core.errors import ModelError
from flowrl.core.types import RewardBatch
from rewards.step_aware import prepared, step_aware

SIGMAS = torch.tensor([0.0, 0.2, 0.5, 0.9, 0.99, 0.3])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


class Published(nn.Module):
    """The modules of time_conditioned_clip.py (RockeyCoss/SPO at 27a8642), under the names that its
    checkpoints have, and its arithmetic written out over transformers' own layers."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.model, width = clip, clip.config.vision_config.hidden_size
        clip.t_embedder = nn.Module()
        clip.t_embedder.mlp = nn.Sequential(
            nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width)
        )
        for layer in clip.vision_model.encoder.layers:
            layer.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        clip.vision_model.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, pixels: Tensor, ids: Tensor, time: Tensor) -> Tensor:
        """Score prepared images [B, 3, S, S] against tokens [B, T] at times [B] -> [B]."""
        speed = torch.exp(-math.log(10000) * torch.arange(128) / 128)
        waves = torch.cat([(time[:, None] * speed).cos(), (time[:, None] * speed).sin()], -1)
        now, vision = self.model.t_embedder.mlp(waves), self.model.vision_model
        x = vision.pre_layrnorm(vision.embeddings(pixels))
        for layer in vision.encoder.layers:
            move, size, gate, move2, size2, gate2 = layer.adaLN_modulation(now).chunk(6, 1)
            seen = layer.layer_norm1(x) * (1 + size[:, None]) + move[:, None]
            x = x + layer.self_attn(seen, attention_mask=None)[0] * gate[:, None]
            seen = layer.layer_norm2(x) * (1 + size2[:, None]) + move2[:, None]
            x = x + layer.mlp(seen) * gate2[:, None]
        last = vision.post_layernorm
        pooled = layer_norm(x[:, 0], x.shape[2:], last.weight, last.bias, last.eps)
        final = vision.adaLN_modulation[1]
        move, size = nn.functional.linear(silu(now), final.weight, final.bias).chunk(2, 1)
        image = self.model.visual_projection(pooled * (1 + size) + move)
        text = self.model.get_text_features(ids).pooler_output
        found: Tensor = self.model.logit_scale.exp() * cosine_similarity(image, text)
        return found


@pytest.fixture(scope="module")
def published(weights: Weights) -> tuple[Published, Path]:
    """Return a random model, and its file as the code's own training writes it."""
    torch.manual_seed(0)
    model = Published(CLIPModel.from_pretrained(weights.clip.folder)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "adaLN" in name or "t_embedder" in name:
                value.normal_(std=0.2)
    file = weights.root / "sd-v1-5_step-aware_preference_model.bin"
    # older releases of transformers stored the positions, too
    positions = {"model.vision_model.embeddings.position_ids": torch.arange(17)[None]}
    torch.save(model.state_dict() | positions, file)
    return model, file


@torch.no_grad()
def test_the_published_file_scores_as_its_own_code(
    weights: Weights, published: tuple[Published, Path]
) -> None:
    """Oracle: the code's arithmetic on the same weights, over transformers' layers; the images are
    prepared as another test compares with the code's own lines."""
    model, file = published
    reward: Any = step_aware(path=str(weights.clip.folder), weights=str(file), device="cpu")
    images, records = random_images(6), words()
    prompts = [record["prompt"] for record in records]
    batch = RewardBatch(images, prompts, torch.arange(6), records, SIGMAS)
    tokens = reward.tokens(
        prompts, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
    )
    oracle = model(prepared(images, reward.images), tokens["input_ids"], 1000 * SIGMAS)
    torch.testing.assert_close(reward(batch), oracle, atol=2e-5, rtol=1e-5)
    # the time matters in these weights
    still = model(prepared(images, reward.images), tokens["input_ids"], 0 * SIGMAS)
    assert float((still - oracle).abs().max()) > 0.1


def test_a_file_that_is_no_such_model(weights: Weights, tmp_path: Path) -> None:
    """Both names, of the file and of a tensor that is missing; a file that is nowhere."""
    folder = str(weights.clip.folder)
    torch.save({"model.t_embedder.mlp.0.weight": torch.zeros(2, 2)}, tmp_path / "a.bin")
    with pytest.raises(ModelError, match=r"a\.bin: expected \d+ tensors.*missing \['clip\."):
        step_aware(path=folder, weights=str(tmp_path / "a.bin"), device="cpu")
    with pytest.raises(ModelError, match=r"no\.bin"):
        step_aware(path=folder, weights=str(tmp_path / "no.bin"), device="cpu")
    # what to do stands before what the library says of a folder that is none
    with pytest.raises(
        ModelError, match=r"step_aware\.py makes one for shapes\. Reading .*failed: "
    ):
        step_aware(path="data/nowhere", device="cpu")
