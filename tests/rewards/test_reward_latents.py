"""A judge of latents: its loss, its features, what a run shows it, and the pairs it learns from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scriptkit import script_module
from toykit import axes, toy

from flowrl.core.abilities import sees_sigma
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.noise_path import x0_from
from flowrl.core.shipped_files import resource
from flowrl.core.types import Latents, RewardBatch
from flowrl.runs.evaluate import evaluate
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer
from rewards.latent_preference import (
    SHAPE,
    WEIGHTS,
    LatentJudge,
    fidelity,
    latent_preference,
    load_transformer,
)

MODEL, TAPS = "assets/shapes-sd3", {"taps": [1, 3], "width": 32, "queries": 2}


def test_the_loss_is_the_references() -> None:
    """Executed in float32: a gap of 1 at four noise levels."""
    found = fidelity(torch.ones(4), torch.tensor([0.0, 0.1, 0.5, 1.0]))
    wanted = torch.tensor([0.00039095, 0.00188291, 0.08905375, 0.16975898])
    torch.testing.assert_close(found, wanted, atol=2e-7, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("judge")
    judge = LatentJudge(load_transformer(MODEL), **TAPS)  # type: ignore[arg-type]
    save_file(
        {name: value.contiguous() for name, value in judge.state_dict().items()}, place / WEIGHTS
    )
    (place / SHAPE).write_text(json.dumps(TAPS))
    return place


def words(count: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "embeds": torch.randn(count, 5, 128, generator=draw),
        "pooled": torch.randn(count, 128, generator=draw),
    }


def batch_of(x0: torch.Tensor, cond: dict[str, torch.Tensor]) -> RewardBatch:
    count = len(x0)
    images, zero = torch.zeros(count, 3, 8, 8), torch.zeros(count)
    names = [""] * count
    return RewardBatch(images, names, zero.long(), [{}] * count, zero, [], Latents(x0, cond))


def test_features_are_the_whole_networks_and_a_head_learns(folder: Path) -> None:
    """The tokens after layers 1 and 3 are those that hooks on the whole network see. Twelve pairs
    of random latents, better ones brighter by 0.3, are told apart after a few steps, at a noise
    level that is drawn anew; before it is chance."""
    draw = torch.Generator().manual_seed(2)
    x, sigma = torch.randn(3, 16, 8, 8, generator=draw), torch.tensor([0.1, 0.5, 0.9])
    judge = LatentJudge(load_transformer(MODEL), **TAPS)  # type: ignore[arg-type]
    cond = words(3)
    whole, seen = load_transformer(MODEL), []
    for k in (0, 2):
        whole.transformer_blocks[k].register_forward_hook(lambda m, i, out: seen.append(out))
    with torch.no_grad():
        whole(
            hidden_states=x,
            timestep=1000 * sigma,
            encoder_hidden_states=cond["embeds"],
            pooled_projections=cond["pooled"],
        )
    for (image, text), out in zip(judge.features(x, sigma, **cond), seen, strict=True):
        # the same products, which processors round by where their factors lie in memory; tokens
        # of another layer are apart by more than 1
        torch.testing.assert_close((text, image), tuple(out), atol=1e-4, rtol=1e-4)
    # learning
    good, cond = torch.randn(12, 16, 8, 8, generator=draw), words(12)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3)
    for _ in range(25):
        level = 0.5 * torch.rand(12, generator=draw)
        noise = torch.randn(good.shape, generator=draw)
        mixed = [
            (1 - level.view(-1, 1, 1, 1)) * one + level.view(-1, 1, 1, 1) * noise
            for one in (good + 0.3, good)
        ]
        gap = judge(mixed[0], level, **cond) - judge(mixed[1], level, **cond)
        optimizer.zero_grad()
        fidelity(gap, level).mean().backward()
        optimizer.step()
    assert (gap > 0).float().mean() > 0.9
    assert all(p.grad is None for p in judge.transformer[0].parameters())


def test_scores_belong_to_their_latents(folder: Path) -> None:
    """In another order and in other batches; the same twice. Images alone are refused."""
    reward = latent_preference(
        path=str(folder), transformer=MODEL, sigma=0.4, draws=2, device="cpu"
    )
    x0 = torch.randn(5, 16, 8, 8, generator=torch.Generator().manual_seed(3))
    batch = batch_of(x0, words(5))
    found = reward(batch)
    assert found.shape == (5,) and found.unique().numel() == 5
    order = [3, 0, 4, 1, 2]
    reward.batch = 2
    swapped = batch_of(x0[order], {name: value[order] for name, value in words(5).items()})
    torch.testing.assert_close(reward(swapped), found[order], atol=1e-5, rtol=0)
    with pytest.raises(DataError, match="expected latents, which training alone has"):
        reward(batch._replace(latents=None))
    with pytest.raises(DataError, match="latents of 16 channels"):
        reward(batch_of(x0[:, :4], words(5)))
    with pytest.raises(ConfigError, match="sigma in"):
        latent_preference(path=str(folder), transformer=MODEL, sigma=1.5)
    with pytest.raises(ConfigError, match="rising layers from 1 to 5"):
        LatentJudge(load_transformer(MODEL), taps=[2, 6])


def test_a_transformer_is_read_whole(tmp_path: Path) -> None:
    """A missing tensor would be random; numbers of 8 bits would be taken as they stand."""
    whole = shutil.copytree(resource(MODEL), tmp_path / "model")
    (file,) = (whole / "transformer").glob("*.safetensors")
    stored = load_file(file)
    name = "proj_out.weight"
    for changed, said in (
        ({key: value for key, value in stored.items() if key != name}, "1 missing .*proj_out"),
        (stored | {name: stored[name].char()}, "proj_out.weight holds numbers of kind I8"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=said):
            load_transformer(str(whole))


def test_it_judges_states_at_their_own_noise_level(folder: Path) -> None:
    """The judge's own numbers of four states at four levels, not those of their x0 estimates; in
    batches of three. Without states it reads what it is given. Not with estimates as well."""
    reward = latent_preference(
        path=str(folder), transformer=MODEL, states=True, device="cpu", batch=3
    )
    assert sees_sigma(reward)
    draw = torch.Generator().manual_seed(4)
    x0, states = torch.randn(2, 4, 16, 8, 8, generator=draw)
    sigma, cond = torch.tensor([0.9, 0.5, 0.2, 0.0]), words(4)
    batch = batch_of(x0, cond)._replace(sigma=sigma, latents=Latents(x0, cond, states))
    with torch.no_grad():
        known = reward.judge(states, sigma, **cond)
    torch.testing.assert_close(reward(batch), known, atol=1e-5, rtol=0)
    bare = reward(batch._replace(latents=Latents(x0, cond)))
    assert not torch.allclose(bare, known)
    # a plan that compares estimates takes it where it is asked to judge them, and not without
    for asked in (False, True):
        given: dict[str, Any] = {"path": str(folder), "transformer": MODEL, "device": "cpu"}
        assert sees_sigma(latent_preference(**given, estimates=asked)) is asked
    with pytest.raises(ConfigError, match="set one of them"):
        latent_preference(path=str(folder), transformer=MODEL, estimates=True, states=True)


class Witness:
    """Remembers the latents that it was shown."""

    sees_latents = judges_singly = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, batch: RewardBatch) -> torch.Tensor:
        assert batch.latents is not None
        self.seen.append((batch.images, batch.latents))
        return batch.latents.x0.flatten(1).mean(1).cpu()


def test_a_run_shows_the_states_of_its_estimates(tmp_path: Path) -> None:
    """One step to sigma 0 from the state beside it is the estimate; a finished image is its own
    state."""
    trainer = Trainer(toy(tmp_path, *axes("shapes/spo"), "credit.least=0.01", "train.group=17"))
    seen = list[RewardBatch]()

    def witness(batch: RewardBatch) -> torch.Tensor:
        seen.append(batch)
        return batch.images.flatten(1).mean(1)

    witness.sees_latents = witness.judges_singly = True  # type: ignore[attr-defined]
    trainer.rewards["red"] = witness
    collect(trainer, trainer.rows())
    (batch,) = seen
    latents, noisy = batch.latents, batch.sigma > 0
    assert latents is not None and latents.states is not None
    assert int(noisy.sum()) * 17 == 16 * len(noisy)
    cond = {name: value[noisy] for name, value in latents.cond.items()}
    state, level = latents.states[noisy], batch.sigma[noisy]
    with torch.no_grad():
        estimate = x0_from(state, trainer.model.velocity(state, level, cond), level)
    torch.testing.assert_close(latents.x0[noisy], estimate, atol=1e-5, rtol=1e-5)
    assert torch.equal(latents.states[~noisy], latents.x0[~noisy])


def test_a_run_shows_the_latents_of_its_leaves(tmp_path: Path) -> None:
    """Decoded, they are the images beside them, in two turns and where all images of a prompt begin
    alike. Evaluations leave the reward out; it cannot be their score."""
    trainer = Trainer(toy(tmp_path, "train.parts=2", "train.same_noise=true"))
    witness = Witness()
    trainer.rewards["red"] = witness
    got = collect(trainer, trainer.rows())
    assert len(witness.seen) == 2
    for images, latents in witness.seen:
        assert len(images) == len(latents.x0) and latents.cond.keys() == got.rollout.cond.keys()
        again = trainer.model.decode(latents.x0).clamp(0, 1)
        torch.testing.assert_close(again, images.float(), atol=0.003, rtol=0)
    config = toy(tmp_path, "eval.score=strict")
    trainer = Trainer(config)
    trainer.rewards["red"] = Witness()
    assert "red" not in evaluate(trainer.model, config, trainer=trainer)["rewards"]
    with pytest.raises(ConfigError, match="eval.score: red judges latents"):
        Trainer(toy(tmp_path, "rewards.red.fn=toykit.of_latents"))


# ------------------------------------------------------------- the script that trains one on shapes


SCRIPT: Any = script_module("assets/shapes_latent_preference")


class FewPrompts(SCRIPT.Pool):  # type: ignore[misc]
    """A pool whose verdicts are made up: an image is right for prompts of its own parity."""

    def __init__(self) -> None:
        self.own = torch.arange(6).repeat_interleave(4)
        self.tasks = [[0, 1, 2], [3, 4, 5]]

    def right(self, prompts: torch.Tensor) -> torch.Tensor:
        """Say so of image k, which is even or odd."""
        return (torch.arange(len(self.own)) - prompts) % 2 == 0


def test_pairs_are_a_right_and_a_wrong_image_of_one_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SCRIPT, "OTHERS", 5)
    pool = FewPrompts()
    pairs = SCRIPT.Pairs(pool, torch.Generator().manual_seed(0))
    better, worse, prompts = pairs.batch(400)
    assert bool(((better - prompts) % 2 == 0).all()) and bool(((worse - prompts) % 2 == 1).all())
    # other prompts are of the task of the image
    assert torch.equal(pool.own[better] // 3, prompts // 3)
    assert torch.equal(pool.own[worse] // 3, prompts // 3)
    # every second pair is of a prompt's own images; of the others every second wrong image is
    own = pool.own[better] == prompts
    assert bool(own[1::2].all()) and not bool(own[::2].all())
    wrong = pool.own[worse] == prompts
    assert bool(wrong[1::2].all()) and bool(wrong[::4].all()) and not bool(wrong[2::4].all())
    again = SCRIPT.Pairs(pool, torch.Generator().manual_seed(0)).batch(400)
    assert torch.equal(again[0], better) and torch.equal(again[1], worse)


@pytest.mark.integration
def test_verdicts_are_the_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the reward `shapes` on the decoded latents, prompt by prompt."""
    monkeypatch.setattr(SCRIPT, "groups_of", lambda *_: [])
    monkeypatch.setattr(SCRIPT, "IMAGES", 2)
    pool = SCRIPT.Pool("validation", seed=3)
    assert pool.own.tolist() == torch.arange(66).repeat_interleave(2).tolist()
    config = SCRIPT.load_config("shapes/best_of_n", [])
    strict = SCRIPT.Trainer(config).rewards["strict"]
    with torch.no_grad():
        images = SCRIPT.Trainer(config).model.decode(pool.x0).float()
    for shift in (0, 1):
        asked = (pool.own + shift) % 66
        records = [pool.records[k] for k in asked.tolist()]
        texts = [pool.texts[k] for k in asked.tolist()]
        score = strict(RewardBatch(images, texts, asked, records, torch.zeros(132)))
        assert torch.equal(pool.right(asked), score > 0.5)
    assert 0.4 < float(pool.right(pool.own).float().mean()) < 0.9  # the base model has 0.65
