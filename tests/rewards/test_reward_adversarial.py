"""Rewards that are trained along: Adv-GRPO's head and PickScore against torch's own losses and
Adam, on tiny random networks; what a checkpoint keeps of them, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clipkit import batch_of, clip_tokenizer, pil, random_images
from safetensors.torch import load_file, save_file
from tinyscorers import save_dinov2, tokens_of, with_references
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPImageProcessorPil, CLIPModel, Dinov2Model, SiglipConfig, SiglipModel
from weightkit import Weights

from flowrl.core.abilities import LearnedReward
from flowrl.core.errors import CheckpointError, DataError, RunError
from flowrl.core.types import RewardBatch
from rewards._backbones.dino import Features
from rewards._common.learned import hinge
from rewards.adversarial import adversarial
from rewards.adversarial_layers import adversarial_layers
from rewards.adversarial_pickscore import adversarial_pickscore

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


# ---------------------------------------------------------------------------------------- PickScore


PROMPTS = ["a red circle", "two blue squares", "a cross", "a cross"]
IMAGES = random_images(8, 60, 50)


def logits(model: CLIPModel, images: Tensor) -> Tensor:
    """Return exp(logit_scale) cosine [4] by the library's own forward."""
    pixels = CLIPImageProcessorPil()([pil(image) for image in images], return_tensors="pt")
    words = clip_tokenizer()(PROMPTS, padding="max_length", max_length=77, return_tensors="pt")
    return model(**pixels, **words).logits_per_image.diag()


class Case:
    """Images in the order of their scores: four low ones, then four high ones."""

    def __init__(self, weights: Weights, folder: Path) -> None:
        self.parts = weights.clip.parts
        model = CLIPModel.from_pretrained(self.parts["path"]).eval()
        with torch.no_grad():
            each = [logits(model, image.expand(4, -1, -1, -1)).mean() for image in IMAGES]
        order = torch.stack(each).argsort().tolist()
        self.low, self.high, self.files = order[:4], order[4:], []
        for index, image in enumerate(IMAGES):
            self.files.append(str(folder / f"{index}.png"))
            pil(image).save(self.files[index])

    def make(self, **options: Any) -> adversarial_pickscore:
        return adversarial_pickscore(**self.parts, device="cpu", **options)

    def batch(self, rows: Sequence[int], references: Sequence[int]) -> RewardBatch:
        columns: list[Any] = [self.files[i] for i in references]
        return batch_of(IMAGES[list(rows)], PROMPTS, references=columns)


@pytest.fixture(scope="module")
def case(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(weights, tmp_path_factory.mktemp("references"))


def test_scores_are_divided_by_26(case: Case) -> None:
    batch = case.batch(range(4), range(4))
    scores = case.make()(batch)
    torch.testing.assert_close(case.make(divide=1.0)(batch), 26 * scores, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_equals_torchs_cross_entropy_and_adam(case: Case, layers: int) -> None:
    reward = case.make(tune_layers=layers, lr=1e-4, batch=3)
    before = copy.deepcopy(reward.towers.model.state_dict())
    model = CLIPModel.from_pretrained(case.parts["path"]).eval().requires_grad_(False)
    tuned = list(model.vision_model.encoder.layers[-layers:].requires_grad_(True).parameters())
    optimizer = torch.optim.Adam(tuned, lr=1e-4, betas=(0.5, 0.999))
    for _ in range(2):
        pair = [logits(model, IMAGES[case.low]), logits(model, IMAGES[case.high])]
        both = torch.stack(pair, dim=1)
        assert both[:, 0].mean() < both[:, 1].mean()
        # the reference is class 0
        loss = torch.nn.functional.cross_entropy(both, torch.zeros(4, dtype=torch.long))
        metrics = reward.update(case.batch(case.high, case.low))
        assert metrics["loss"] == pytest.approx(loss.item(), abs=2e-4) and metrics["trained"] == 1
        assert metrics["real"] == pytest.approx(both[:, 0].mean().item() / 26, abs=1e-5)
        assert metrics["fake"] == pytest.approx(both[:, 1].mean().item() / 26, abs=1e-5)
        assert not reward.trains_policy(0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after, expected = reward.towers.model.state_dict(), model.state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    last = tuple(f"vision_model.encoder.layers.{2 - k}." for k in range(1, layers + 1))
    assert moved and all(name.startswith(last) for name in moved)
    for name in moved:
        # softmax does not see k's bias: its gradient is rounding, which Adam scales to lr
        if not name.endswith("k_proj.bias"):
            off = ((after[name] - expected[name]).abs() > 2e-6).float().mean()  # a step is 1e-4
            assert off < 0.01, name  # a few gradients are rounding only, too


def test_references_ahead_leave_the_turn_to_the_policy(case: Case) -> None:
    reward = case.make()
    assert reward.trains_policy(0)
    before = reward.state_dict()
    metrics = reward.update(case.batch(case.low, case.high))
    assert metrics["trained"] == 0 and metrics["real"] > metrics["fake"] and reward.trains_policy(1)
    after = reward.state_dict()
    changed = [name for name in after if not torch.equal(after[name], before[name])]
    assert changed == ["counter.rounds"]
    reward.update(case.batch(case.high, case.low))
    restored = case.make()
    restored.load_state_dict(reward.state_dict())
    assert not reward.trains_policy(2) and not restored.trains_policy(2)


def test_training_brings_the_references_ahead(case: Case) -> None:
    reward, batch = case.make(lr=1e-3), case.batch(case.high, case.low)
    seen = [reward.update(batch)]
    while seen[-1]["trained"] and len(seen) < 40:
        seen.append(reward.update(batch))
    assert seen[0]["trained"] == 1 and seen[-1]["trained"] == 0
    assert seen[-1]["loss"] < seen[0]["loss"]


def test_bfloat16_computes_and_float32_learns(case: Case) -> None:
    half, batch = case.make(dtype="bfloat16", lr=5e-6), case.batch(case.high, case.low)
    before = half.state_dict()
    half.update(batch)
    after = half.state_dict()
    name = next(name for name in after if name.startswith("weight.") and "q_proj.weight" in name)
    assert after[name].dtype == torch.float32 and not torch.equal(after[name], before[name])


# ----------------------------------------------------------------- what a checkpoint keeps, of both


@pytest.fixture(scope="module")
def batch(case: Case) -> RewardBatch:
    """Images that score higher than their references, so that PickScore is trained on them."""
    low = [case.files[i] for i in case.low]
    columns: list[Any] = [low[:2], low[2], low[3], low[1:]]
    return batch_of(IMAGES[case.high], PROMPTS, references=columns)


@pytest.fixture(params=["adversarial", "adversarial_pickscore"])
def make(request: pytest.FixtureRequest, weights: Weights, case: Case) -> Callable[..., Any]:
    """Return how one of the rewards is made, such that every update trains."""
    given: dict[str, Any] = {"patches": 4, "lr": 1e-2, "d_steps": 2, "policy_every": 3}
    if request.param == "adversarial":
        return partial(adversarial, path=weights.dino, device="cpu", batch=3, **given)
    return partial(case.make, lr=1e-5, batch=3)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    equal = [torch.equal(value, second[name]) for name, value in first.items()]
    return first.keys() == second.keys() and all(equal)


def rounds(reward: Any, batch: RewardBatch, count: int) -> list[Any]:
    """Score and update `count` times -> all numbers."""
    out = []
    for _ in range(count):
        out += [reward(batch).tolist(), reward.update(batch), reward.trains_policy(reward.rounds)]
    return out


def test_resume_is_exact(make: Callable[..., Any], batch: RewardBatch, tmp_path: Path) -> None:
    whole, first, second = make(), make(), make()
    assert isinstance(whole, LearnedReward)
    fresh = whole.state_dict()
    expected = rounds(whole, batch, 4)
    rounds(first, batch, 2)
    kept = first.state_dict()
    save_file(kept, tmp_path / "state.safetensors")
    name = next(name for name in kept if name.endswith(".weight") and "weight." in name)
    assert fresh.keys() == kept.keys() and not torch.equal(kept[name], fresh[name])
    rounds(first, batch, 2)  # goes on; what was saved must not change with it
    assert not torch.equal(kept[name], first.state_dict()[name])
    rounds(second, batch._replace(images=batch.images.flip(0)), 1)  # must be gone afterwards
    second.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert same(second.state_dict(), kept)
    assert rounds(second, batch, 2) == expected[6:]
    assert same(second.state_dict(), whole.state_dict())


def test_scoring_changes_nothing(make: Callable[..., Any], batch: RewardBatch) -> None:
    reward = make()
    reward.update(batch)
    before, scores = reward.state_dict(), reward(batch)
    assert torch.equal(reward(batch), scores) and same(before, reward.state_dict())


def test_a_state_or_a_batch_that_does_not_fit_is_refused(
    make: Callable[..., Any], batch: RewardBatch
) -> None:
    reward = make()
    head, before = isinstance(reward, adversarial), reward.state_dict()
    other = (make(hidden=9) if head else make(tune_layers=2)).state_dict()
    lost = {name: value for name, value in before.items() if name != "counter.rounds"}
    wrong = [(other, "9 do not fit, first adam.0.bias" if head else "do not fit")]
    wrong += [(lost, "counter.rounds"), (before | {"x": torch.zeros(1)}, "x")]
    for state, name in wrong:
        with pytest.raises(CheckpointError, match=name):
            reward.load_state_dict(state)
    with pytest.raises(DataError, match="1 records"):
        reward.update(batch._replace(meta=[{}]))
    with pytest.raises(DataError, match="line 3"):
        reward.check_record({"prompt": "a"}, "line 3")
    reward.check_record(batch.meta[0], "line 3")
    assert same(before, reward.state_dict())
