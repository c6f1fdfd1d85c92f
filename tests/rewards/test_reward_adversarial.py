"""Adv-GRPO's head: its loss, its reward and its training, on a tiny random DINOv2."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clipkit import pil
from dinokit import save_dinov2, tokens_of, with_references
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Dinov2Model, SiglipConfig, SiglipModel
from weightkit import Weights

from flowrl.core.errors import RunError
from rewards._backbones.dino import Features
from rewards._common.heads import hinge
from rewards.adversarial import adversarial
from rewards.adversarial_layers import adversarial_layers

WIDTH, PATCH = 24, 14


@pytest.fixture(scope="module")
def path(weights: Weights) -> str:
    return weights.dino


def _images(count: int, seed: int = 0, light: float = 0.0) -> Tensor:
    """Smooth random images [count, 3, 42, 42] in exact 8-bit steps, brighter by `light`."""
    rough = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) * 0.6 + light
    return (F.interpolate(rough, (42, 42), mode="bilinear") * 255).round() / 255


BRIGHT = _images(8, seed=1, light=0.4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Eight bright reference images."""
    folder = tmp_path_factory.mktemp("references")
    for index, image in enumerate(BRIGHT):
        pil(image).save(folder / f"{index}.png")
    return [str(folder / f"{index}.png") for index in range(8)]


def tokens_at(path: str, images: Tensor, side: int) -> Tensor:
    """Compute all tokens [L, 1 + N, D] by the library's own model."""
    network = Dinov2Model.from_pretrained(path).eval()
    return torch.from_numpy(tokens_of(network, images, side)).float()


def _head(state: dict[str, Tensor], x: Tensor) -> np.ndarray:
    """Linear-GELU-Linear in numpy, with the exact GELU x Phi(x)."""
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    first, shift, last, offset = (state[f"weight.{name}"].double().numpy() for name in names)
    inner = x.double().numpy() @ first.T + shift
    inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    result: np.ndarray = (inner @ last.T + offset)[..., 0]
    return result


def _unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def _alone(images: Tensor) -> Any:
    return with_references(images, [None] * len(images))


def _hinge(head: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """torch's hinge embedding loss with label -1 is mean relu(margin - x)."""
    minus = -torch.ones(len(real), 1)
    real_part = F.hinge_embedding_loss(head(real), minus)
    return 0.5 * (real_part + F.hinge_embedding_loss(-head(fake), minus))


def test_hinge() -> None:
    # the reference's fixture, by hand: 0.5 (mean(0, .8) + mean(0, 1.5)) = 0.5 (.4 + .75) = .575
    real, fake = torch.tensor([1.4, 0.2]), torch.tensor([-1.3, 0.5])
    assert hinge(real, fake).item() == pytest.approx(0.575)
    a, b = torch.randn(2, 40, 1, generator=torch.Generator().manual_seed(0)) * 2
    torch.testing.assert_close(hinge(a, b), _hinge(nn.Identity(), a, b))


def test_reward_equals_numpy(path: str) -> None:
    """One patch only leaves nothing to the draws: 0.7 H(CLS) + 0.3 H(patch), in numpy."""
    images = _images(5)
    reward = adversarial(path=path, size=PATCH, patches=3, device="cpu")
    state, tokens = reward.state_dict(), _unit(tokens_at(path, images, PATCH))
    assert tokens.shape == (5, 2, WIDTH) and state["weight.0.weight"].shape == (512, WIDTH)
    expected = 0.7 * _head(state, tokens[:, 0]) + 0.3 * _head(state, tokens[:, 1])
    np.testing.assert_allclose(reward(_alone(images)).numpy(), expected, atol=1e-6)


def test_all_images_are_read_at_the_same_drawn_places(path: str) -> None:
    """With one patch and no CLS the reward is H of one of nine; which one follows from the round.

    A place is missed in 90 draws with probability below 9 (8/9)^90 = 0.02 %.
    """
    batch = _alone(_images(4))
    reward = adversarial(path=path, patches=1, cls_weight=0.0, device="cpu")
    each = _head(reward.state_dict(), _unit(tokens_at(path, batch.images, 42))[:, 1:])
    assert each.shape == (4, 9)
    chosen = []
    for reward.rounds in range(90):
        scores = reward(batch).numpy()
        (place,) = np.flatnonzero((np.abs(each - scores[:, None]) < 1e-6).all(0))
        chosen.append(int(place))
    assert set(chosen) == set(range(9))
    other = adversarial(path=path, patches=1, cls_weight=0.0, device="cpu", seed=1)
    assert not torch.equal(other(batch), torch.from_numpy(scores))


def test_reward_does_not_depend_on_the_length_of_features(path: str, tmp_path: Path) -> None:
    longer, images = save_dinov2(tmp_path, scale=7.0), _images(4)
    seven = 7 * tokens_at(path, images, 42)
    torch.testing.assert_close(tokens_at(longer, images, 42), seven, rtol=1e-4, atol=1e-4)
    first, second = (adversarial(path=p, device="cpu")(_alone(images)) for p in (path, longer))
    torch.testing.assert_close(first, second, atol=2e-6, rtol=0)


@pytest.mark.parametrize("normal", [True, False])
def test_updates_equal_torchs_losses_and_adam(path: str, files: list[str], normal: bool) -> None:
    """One patch and one reference per image; expected: torch's hinge loss, Adam and modules."""
    images, rows = _images(4), [3, 0, 5, 1]
    options: dict[str, Any] = {"size": PATCH, "patches": 2, "hidden": 16, "lr": 3e-3, "batch": 3}
    options |= {"patch_loss": 0.4, "d_steps": 2, "normalize_training": normal, "device": "cpu"}
    reward = adversarial(path=path, **options)
    head = copy.deepcopy(reward.head)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3, betas=(0.5, 0.999))
    real, fake = tokens_at(path, BRIGHT[rows], PATCH), tokens_at(path, images, PATCH)
    if normal:
        real, fake = _unit(real), _unit(fake)
    batch = with_references(images, [files[i] for i in rows])
    for _ in range(3):
        losses = []
        for _ in range(2):
            loss = _hinge(head, real[:, 0], fake[:, 0])
            loss = loss + 0.4 * _hinge(head, real[:, 1], fake[:, 1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert reward.update(batch)["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    state = reward.state_dict()
    for name, p in head.named_parameters():
        torch.testing.assert_close(state[f"weight.{name}"], p.detach(), atol=2e-5, rtol=1e-4)
    assert state["adam.0.weight.step"] == 6 and state["counter.rounds"] == 3


def test_the_head_learns_to_tell_references(path: str, files: list[str]) -> None:
    reward = adversarial(path=path, references=str(Path(files[0]).parent), lr=1e-3, device="cpu")
    first = reward.update(_alone(_images(8)))
    for _ in range(40):
        last = reward.update(_alone(_images(8)))
    assert last["loss"] < 0.5 * first["loss"] and last["accuracy"] == 1
    assert last["real"] > 0 > last["fake"]
    # images it never saw
    bright, dark = _alone(_images(8, seed=2, light=0.4)), _alone(_images(8, seed=3))
    assert reward(bright).min() > reward(dark).max()


def test_no_gradient_reaches_the_network(path: str, files: list[str]) -> None:
    reward = adversarial(path=path, lr=0.1, device="cpu")
    network, head = reward.backbone.network, reward.state_dict()["weight.0.weight"]
    assert not any(p.requires_grad for p in network.parameters())
    before = copy.deepcopy(network.state_dict())
    network.requires_grad_(True)  # even then
    with torch.no_grad():  # as in a loop that scores without gradients
        reward.update(with_references(_images(3), [files] * 3))
    assert all(p.grad is None for p in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not torch.equal(reward.state_dict()["weight.0.weight"], head)


@pytest.mark.parametrize(("every", "trained"), [(1, 20), (2, 10), (10, 18)])
def test_schedule(path: str, files: list[str], every: int, trained: int) -> None:
    """The paper's code: policy_every 10 is nine iterations for the head, one for the policy."""
    reward = adversarial(path=path, policy_every=every, patches=1, hidden=4, device="cpu")
    batch = with_references(_images(1), [files[0]])
    head = [bool(reward.update(batch)) for _ in range(20)]
    policy = [reward.trains_policy(iteration) for iteration in range(20)]
    assert sum(head) == trained == reward.state_dict()["adam.2.bias.step"]
    assert sum(policy) == 20 // every
    if every > 1:
        assert head == [not turn for turn in policy] and policy[every - 1] and not policy[0]


def test_references_are_drawn_from_the_images_own_prompt(path: str, files: list[str]) -> None:
    """One draw per step; one of three is missed in 24 with probability 3 (2/3)^24 = 0.02 %."""
    columns = [files[:2], files[2], files[3:6], files[6:]]
    reward = adversarial(path=path, patches=1, d_steps=2, device="cpu")
    library, asked = reward.library, []

    def recording(paths: Sequence[Path]) -> Iterator[Features]:
        asked.append([str(p) for p in paths])
        return library(paths)

    reward.library = recording  # type: ignore[assignment]
    for _ in range(12):
        reward.update(with_references(_images(4), columns))
    assert len(asked) == 24
    for place, own in enumerate(columns):
        drawn = {row[place] for row in asked}
        assert drawn == ({own} if isinstance(own, str) else set(own))


def test_a_loss_that_is_not_finite_changes_nothing(path: str, files: list[str]) -> None:
    reward = adversarial(path=path, device="cpu")
    nn.init.constant_(reward.head[2].bias, torch.nan)  # type: ignore[arg-type]
    before = reward.state_dict()["weight.0.weight"]
    with pytest.raises(RunError, match="nan"):
        reward.update(with_references(_images(2), [files] * 2))
    assert torch.equal(reward.state_dict()["weight.0.weight"], before)


def test_heads_on_layers_equal_numpy(path: str, files: list[str]) -> None:
    """On the library's own hidden states: of each layer's nine patches the highest 2 (int(9 x
    0.3)), their mean over both layers, sigmoid at temperature 0.5. An update moves the heads
    towards telling bright references from dark images, and nothing else."""
    images, layers = _images(4), [1, 0]
    given: dict[str, Any] = {"layers": layers, "top": 0.3, "temperature": 0.5, "lr": 1e-2}
    reward = adversarial_layers(path=path, d_steps=8, device="cpu", batch=3, **given)
    network = Dinov2Model.from_pretrained(path).eval()
    pixels = reward.backbone.pixels([pil(i) for i in images])
    with torch.no_grad():
        states = network(pixels, output_hidden_states=True).hidden_states
    pooled = []
    for t, layer in enumerate(layers):
        head = {n.replace(f"weight.{t}.", "weight."): v for n, v in reward.state_dict().items()}
        logits = _head(head, states[layer + 1][:, 1:])
        pooled.append(np.sort(logits, axis=1)[:, -2:].mean(1))
    expected = 1 / (1 + np.exp(-np.mean(pooled, axis=0) / 0.5))
    np.testing.assert_allclose(reward(_alone(images)).numpy(), expected, atol=1e-6)
    batch = with_references(images, [files[i] for i in range(4)])
    frozen = {n: p.clone() for n, p in reward.backbone.network.named_parameters()}
    first, last = reward.update(batch), reward.update(batch)
    assert last["loss"] < first["loss"] and last["accuracy"] >= first["accuracy"]
    assert all(torch.equal(p, frozen[n]) for n, p in reward.backbone.network.named_parameters())


def test_a_head_on_siglip(tmp_path: Path) -> None:
    """H of the pooled features of the library's own SigLIP, pixels normalised by 0.5."""
    tiny: Any = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny["intermediate_size"] = 32
    torch.manual_seed(5)
    vision = {**tiny, "image_size": 42, "patch_size": 14}
    network = SiglipModel(SiglipConfig(text_config=tiny, vision_config=vision)).eval()
    network.save_pretrained(tmp_path, safe_serialization=True)
    images = _images(3)
    reward = adversarial(path=str(tmp_path), cls_weight=1.0, device="cpu")
    with torch.no_grad():
        pooled = network.vision_model(2 * images - 1).pooler_output
    expected = _head(reward.state_dict(), _unit(pooled))
    np.testing.assert_allclose(reward(_alone(images)).numpy(), expected, atol=1e-5)
