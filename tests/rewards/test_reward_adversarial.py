"""Adv-GRPO's head: its loss, its reward, its training and its state, on a tiny random DINOv2."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dinokit import save_dinov2, tokens_of, with_references
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Dinov2Model

from flowrl.core.errors import CheckpointError, ConfigError, DataError, RunError
from flowrl.core.types import LearnedReward
from rewards._backbones.dino import Features
from rewards.adversarial import adversarial, hinge

WIDTH, PATCH = 24, 14


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_dinov2(tmp_path_factory.mktemp("dino"))


def _images(count: int, seed: int = 0, light: float = 0.0) -> Tensor:
    """Smooth random images [count, 3, 42, 42] in exact 8-bit steps, brighter by `light`."""
    rough = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) * 0.6 + light
    return (F.interpolate(rough, (42, 42), mode="bilinear") * 255).round() / 255


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Eight bright reference images."""
    folder = tmp_path_factory.mktemp("references")
    for index, image in enumerate(_images(8, seed=1, light=0.4)):
        Image.fromarray((image * 255).byte().permute(1, 2, 0).contiguous().numpy()).save(
            folder / f"{index}.png"
        )
    return [str(folder / f"{index}.png") for index in range(8)]


def tokens_at(path: str, images: Tensor, side: int) -> Tensor:
    """Compute all tokens [L, 1 + N, D] by the library's own model."""
    network = Dinov2Model.from_pretrained(path).eval()
    return torch.from_numpy(tokens_of(network, images, side)).float()


def _read(files: Sequence[str]) -> Tensor:
    return torch.stack(
        [torch.from_numpy(np.array(Image.open(f))).permute(2, 0, 1) / 255 for f in files]
    )


def _head(state: dict[str, Tensor], x: Tensor) -> np.ndarray:
    """Linear-GELU-Linear in numpy, with the exact GELU x Phi(x)."""
    weight = {
        name: state[f"weight.{name}"].double().numpy()
        for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    }
    inner = x.double().numpy() @ weight["0.weight"].T + weight["0.bias"]
    inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    result: np.ndarray = (inner @ weight["2.weight"].T + weight["2.bias"])[..., 0]
    return result


def _unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def test_hinge() -> None:
    # the reference's fixture, by hand: 0.5 (mean(0, .8) + mean(0, 1.5)) = 0.5 (.4 + .75) = .575
    real, fake = torch.tensor([1.4, 0.2]), torch.tensor([-1.3, 0.5])
    assert hinge(real, fake).item() == pytest.approx(0.575)
    a, b = torch.randn(2, 40, 1, generator=torch.Generator().manual_seed(0)) * 2
    # torch's hinge embedding loss with label -1 is mean relu(margin - x)
    minus = -torch.ones_like(a)
    expected = 0.5 * (F.hinge_embedding_loss(a, minus) + F.hinge_embedding_loss(-b, minus))
    torch.testing.assert_close(hinge(a, b), expected)


def test_reward_equals_numpy(path: str) -> None:
    # one patch only (14 pixels, patches of 14), so that every draw is the same: 0.7 H(CLS) + 0.3
    # H(patch), in numpy
    images = _images(5)
    reward = adversarial(path=path, size=PATCH, patches=3, device="cpu")
    state, tokens = reward.state_dict(), _unit(tokens_at(path, images, PATCH))
    assert tokens.shape == (5, 2, WIDTH) and state["weight.0.weight"].shape == (512, WIDTH)
    expected = 0.7 * _head(state, tokens[:, 0]) + 0.3 * _head(state, tokens[:, 1])
    scores = reward(with_references(images, [None] * 5))
    assert scores.dtype == torch.float32 and isinstance(reward, LearnedReward)
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-6)


def test_all_images_are_read_at_the_same_drawn_places(path: str) -> None:
    # with one patch per call and no CLS the reward is H of one of nine patches; which one follows
    # from the round
    images = _images(4)
    reward = adversarial(path=path, patches=1, cls_weight=0.0, device="cpu")
    each = _head(reward.state_dict(), _unit(tokens_at(path, images, 42))[:, 1:])
    assert each.shape == (4, 9)
    chosen = []
    for reward.rounds in range(60):
        scores = reward(with_references(images, [None] * 4)).numpy()
        (place,) = np.flatnonzero((np.abs(each - scores[:, None]) < 1e-6).all(0))
        chosen.append(int(place))
    assert set(chosen) == set(
        range(9)
    )  # a place is missed in 60 draws with probability below 9 (8/9)^60 = 0.8 %
    other = adversarial(path=path, patches=1, cls_weight=0.0, device="cpu", seed=1)
    assert not torch.equal(other(with_references(images, [None] * 4)), torch.from_numpy(scores))


def test_reward_does_not_depend_on_the_length_of_features(path: str, tmp_path: Path) -> None:
    longer = save_dinov2(tmp_path, scale=7.0)
    images = _images(4)
    torch.testing.assert_close(
        tokens_at(longer, images, 42), 7 * tokens_at(path, images, 42), rtol=1e-4, atol=1e-4
    )
    scores = [
        adversarial(path=p, device="cpu")(with_references(images, [None] * 4))
        for p in (path, longer)
    ]
    torch.testing.assert_close(scores[0], scores[1], atol=2e-6, rtol=0)


@pytest.mark.parametrize("normal", [True, False])
def test_updates_equal_torchs_losses_and_adam(path: str, files: list[str], normal: bool) -> None:
    # one patch and one reference per image leave nothing to the draws; expected: torch's hinge
    # loss, Adam and modules
    images, refs = _images(4), [files[i] for i in (3, 0, 5, 1)]
    options: dict[str, Any] = {
        "size": PATCH,
        "patches": 2,
        "hidden": 16,
        "lr": 3e-3,
        "patch_loss": 0.4,
    }
    options |= {"d_steps": 2, "normalize_training": normal, "device": "cpu", "batch": 3}
    reward = adversarial(path=path, **options)
    head = copy.deepcopy(reward.head)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3, betas=(0.5, 0.999))
    real, fake = tokens_at(path, _read(refs), PATCH), tokens_at(path, images, PATCH)
    if normal:
        real, fake = _unit(real), _unit(fake)
    for _ in range(3):
        losses = []
        for _ in range(2):
            loss = torch.zeros(())
            for token, weight in ((0, 1.0), (1, 0.4)):
                a, b = head(real[:, token]), head(fake[:, token])
                minus = -torch.ones_like(a)
                loss = loss + weight * 0.5 * (
                    F.hinge_embedding_loss(a, minus) + F.hinge_embedding_loss(-b, minus)
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert reward.update(with_references(images, refs))["loss"] == pytest.approx(
            np.mean(losses), abs=1e-5
        )
    state = reward.state_dict()
    for name, p in head.named_parameters():
        torch.testing.assert_close(state[f"weight.{name}"], p.detach(), atol=2e-5, rtol=1e-4)
    assert state["adam.0.weight.step"] == 6 and state["counter.rounds"] == 3


def test_training_on_plain_features_is_another_training(path: str, files: list[str]) -> None:
    rewards = [
        adversarial(path=path, normalize_training=flag, device="cpu") for flag in (True, False)
    ]
    losses = [reward.update(with_references(_images(4), [files] * 4))["loss"] for reward in rewards]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_the_head_learns_to_tell_references(path: str, files: list[str]) -> None:
    reward = adversarial(path=path, references=str(Path(files[0]).parent), lr=1e-3, device="cpu")
    dark, bright = (
        with_references(_images(8), [None] * 8),
        with_references(_images(8, seed=2, light=0.4), [None] * 8),
    )
    first = reward.update(dark)
    for _ in range(40):
        last = reward.update(dark)
    assert (
        last["loss"] < 0.5 * first["loss"]
        and last["accuracy"] == 1
        and last["real"] > 0 > last["fake"]
    )
    assert (
        reward(bright).min() > reward(with_references(_images(8, seed=3), [None] * 8)).max()
    )  # images it never saw


def test_no_gradient_reaches_the_network(path: str, files: list[str]) -> None:
    reward = adversarial(path=path, lr=0.1, device="cpu")
    network = reward.backbone.network
    assert not any(p.requires_grad for p in network.parameters())
    before = copy.deepcopy(network.state_dict())
    network.requires_grad_(True)  # even then
    with torch.no_grad():  # as in a loop that scores without gradients
        reward.update(with_references(_images(3), [files] * 3))
    assert all(p.grad is None for p in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not torch.equal(
        reward.state_dict()["weight.0.weight"],
        adversarial(path=path).state_dict()["weight.0.weight"],
    )


def test_resume_is_exact(path: str, files: list[str], tmp_path: Path) -> None:
    def run(reward: adversarial, rounds: range) -> Iterator[Tensor]:
        for k in rounds:
            batch = with_references(
                _images(5, seed=k), [files[:3], files[3:], files, files[0], files[5:]]
            )
            yield reward(batch)
            metrics = reward.update(batch)
            yield torch.tensor([metrics[name] for name in sorted(metrics)])

    def make() -> adversarial:
        return adversarial(
            path=path, patches=4, lr=1e-2, d_steps=2, policy_every=3, device="cpu", batch=4
        )

    whole = make()
    expected = list(run(whole, range(8)))
    first = make()
    list(run(first, range(4)))
    save_file(first.state_dict(), tmp_path / "state.safetensors")
    list(run(first, range(4, 5)))  # goes on; what was saved must not change with it
    second = make()
    list(run(second, range(20, 22)))  # its own state must be gone
    second.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert all(
        torch.equal(a, b) for a, b in zip(run(second, range(4, 8)), expected[8:], strict=True)
    )
    mine, other = second.state_dict(), whole.state_dict()
    assert mine.keys() == other.keys() and all(
        torch.equal(mine[name], other[name]) for name in mine
    )
    fresh = make().state_dict()
    assert fresh.keys() == mine.keys() and not torch.equal(
        fresh["adam.2.bias.exp_avg"], mine["adam.2.bias.exp_avg"]
    )


def test_a_state_of_another_head_is_refused(path: str, files: list[str]) -> None:
    reward = adversarial(path=path, hidden=8, device="cpu")
    before = reward.state_dict()
    other = adversarial(path=path, hidden=9, device="cpu").state_dict()
    lost = {name: value for name, value in before.items() if name != "counter.rounds"}
    for state, name in (
        (other, r"9 do not fit, first adam\.0\.bias"),
        (lost, "counter.rounds"),
        (before | {"x": torch.zeros(1)}, "x"),
    ):
        with pytest.raises(CheckpointError, match=name):
            reward.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in reward.state_dict().items())


def test_scoring_changes_nothing_and_depends_on_nothing_else(path: str, files: list[str]) -> None:
    images = _images(7)
    reward = adversarial(path=path, device="cpu")
    reward.update(with_references(images, [files] * 7))
    before, scores = reward.state_dict(), reward(with_references(images, [None] * 7))
    assert all(torch.equal(value, before[name]) for name, value in reward.state_dict().items())
    assert torch.equal(reward(with_references(images, [None] * 7)), scores)
    small = adversarial(path=path, device="cpu", batch=2)
    small.load_state_dict(before)
    torch.testing.assert_close(
        small(with_references(images, [None] * 7)), scores, atol=1e-6, rtol=0
    )
    assert scores.unique().numel() == 7


@pytest.mark.parametrize(("every", "trained"), [(1, 20), (2, 10), (10, 18)])
def test_schedule(path: str, files: list[str], every: int, trained: int) -> None:
    # the paper's code: policy_every 10 is nine iterations for the head, then one for the policy
    reward = adversarial(path=path, policy_every=every, patches=1, hidden=4, device="cpu")
    batch = with_references(_images(1), [files[0]])
    head = [bool(reward.update(batch)) for _ in range(20)]
    policy = [reward.trains_policy(iteration) for iteration in range(20)]
    assert (
        sum(head) == trained == reward.state_dict()["adam.2.bias.step"]
        and sum(policy) == 20 // every
    )
    if every > 1:
        assert (
            all(a != b for a, b in zip(head, policy, strict=True))
            and policy[every - 1]
            and not policy[0]
        )


def test_references_are_drawn_from_the_images_own_prompt(path: str, files: list[str]) -> None:
    columns = [files[:2], files[2], files[3:6], files[6:]]
    reward = adversarial(path=path, patches=1, d_steps=2, device="cpu")
    library, asked = reward.library, []

    def recording(paths: Sequence[Path]) -> Iterator[Features]:
        asked.append([str(p) for p in paths])
        return library(paths)

    reward.library = recording  # type: ignore[assignment]
    for _ in range(12):
        reward.update(with_references(_images(4), columns))
    assert len(asked) == 24  # one draw per step
    for place, own in enumerate(columns):
        drawn = {row[place] for row in asked}
        # one of at most three is missed in 24 draws with probability below 3 (2/3)^24 = 0.02 %
        assert drawn == ({own} if isinstance(own, str) else set(own))
    reward.check_record({"prompt": "a", "references": files[0]}, "here")
    with pytest.raises(DataError, match="here"):
        reward.check_record({"prompt": "a"}, "here")


def test_wrong_arguments_and_batches(path: str, files: list[str]) -> None:
    wrong: dict[str, Any]
    for wrong in (
        {"patches": 0},
        {"d_steps": 0},
        {"policy_every": 0},
        {"hidden": 0},
        {"cls_weight": 1.5},
        {"lr": 0.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            adversarial(path=path, **wrong)
    reward, images = adversarial(path=path, device="cpu"), _images(2)
    with pytest.raises(DataError, match="1 records"):
        reward.update(with_references(images, [files])._replace(meta=[{}]))
    nn.init.constant_(reward.head[2].bias, torch.nan)  # type: ignore[arg-type]
    before = reward.state_dict()["weight.0.weight"]
    with pytest.raises(RunError, match="nan"):
        reward.update(with_references(images, [files] * 2))
    assert torch.equal(reward.state_dict()["weight.0.weight"], before)
