"""What an iteration keeps of its images and of their latents, counted tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from estimatekit import made
from torch import Tensor
from toykit import toy

from flowrl.algorithms.forest import leaf_places
from flowrl.core.pixels import from_bytes, round_8bit, to_bytes
from flowrl.core.types import RewardBatch
from flowrl.cost.estimate import phase
from flowrl.cost.fit_card import change
from flowrl.cost.memory import kept_memory
from flowrl.cost.meter import Meter
from flowrl.training import trainer as trainer_file
from flowrl.training.rehearsal import check_plan as _forecast
from flowrl.training.rollout import ImageBuffer, collect
from flowrl.training.trainer import Trainer

MANY = ("train.prompts=8", "image={height: 64, width: 64}")


def test_bytes_are_the_rounded_images_to_the_bit() -> None:
    images = torch.cat(
        [torch.rand(7, 3, 5, 5) * 1.2 - 0.1, torch.arange(75).view(1, 3, 5, 5) / 150]
    )
    assert torch.equal(from_bytes(to_bytes(images)), round_8bit(images))


@pytest.mark.parametrize(
    ("parts", "peak", "scoring"), [(1, 1.6, 1.4), (4, 0.8, 0.7), (8, 0.7, 0.6)]
)
def test_images_are_floats_only_while_they_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, peak: float, scoring: float
) -> None:
    """In units of the iteration's images as float32: the worst moment, when a reward is asked, when
    learning begins. Bytes are 1/4, a part's floats 1 / parts and its bytes 1/4 of that; the copies
    of 2 of 32 images in decoding and the latents, 1/64 of an image each, are the rest."""
    options = (f"train.parts={parts}", "train.overlap=false", "train.rollout_batch=2")
    trainer = Trainer(toy(tmp_path, *MANY, *options))
    unit = 4 * trainer.cost.images * 3 * 64 * 64
    seen: dict[str, float] = {}
    with Meter() as meter:

        def reward(batch: RewardBatch) -> Tensor:
            seen["scoring"] = meter.now / unit
            return batch.images.mean(dim=(1, 2, 3))

        def learn(*args: Any) -> dict[str, float]:
            seen["learning"] = meter.now / unit
            return {}

        monkeypatch.setattr(trainer_file, "learn", learn)
        for name in trainer.rewards:
            monkeypatch.setitem(trainer.rewards, name, reward)
        trainer.step()
    assert trainer.cost.images == 32
    assert 1 / parts < seen["scoring"] < scoring and meter.peak / unit < peak
    assert 0 < seen["learning"] < 0.15


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_buffer_has_the_order_of_the_merged_leaves(tmp_path: Path, parts: int) -> None:
    """Each image is the one that its leaf decodes to, also where every draw has a preview; leaves
    with one latent are decoded once, and scored once by a reward that judges singly."""
    plan = "plan={fn: comb, steps: 4, noise_scale: 0.5, size: 3, baseline: true}"
    options = (plan, "credit.fn=turning_point", "train.prompts=4", "train.group=8")
    config = toy(tmp_path, *options, "train.same_noise=true", f"train.parts={parts}")
    trainer = Trainer(config)
    decoded: list[int] = []
    decode = trainer.model.decode

    def counted(x0: Tensor) -> Tensor:
        decoded.append(len(x0))
        return decode(x0)

    scored: list[int] = []

    class Brightness:
        judges_singly = parts != 2

        def __call__(self, batch: RewardBatch) -> Tensor:
            scored.append(len(batch.images))
            assert len(batch.prompts) == len(batch.meta) == len(batch.group) == scored[-1]
            return batch.images.mean((1, 2, 3)) + batch.group

    trainer.model.decode = counted  # type: ignore[method-assign]
    trainer.reward_set.rewards.clear()
    trainer.reward_set.rewards["bright"] = Brightness()
    found, rows = collect(trainer, [0, 1, 2, 3]), [0, 1, 2, 3]
    assert len(found.rollout.x) == len(found.rollout.tree.parent) - 32  # leaves are gone
    whole = trainer.sample(rows)
    wanted = round_8bit(decode(whole.x[whole.leaf]))
    assert torch.equal(found.rollout.leaf, whole.leaf)
    torch.testing.assert_close(from_bytes(found.batch.images), wanted, atol=1.1 / 255, rtol=0)
    # 2 samples of 4 images a prompt, whose images without noise are one
    assert sum(decoded) == 4 * 7 and sum(scored) == (4 * 8 if parts == 2 else 4 * 7)
    seen = from_bytes(found.batch.images).mean((1, 2, 3)) + found.batch.group
    torch.testing.assert_close(found.values["bright"], seen)
    assert sorted(leaf_places(whole, first=0, prompts=4).tolist()) == list(range(32))


def test_the_estimate_of_the_decode_is_what_is_measured(tmp_path: Path) -> None:
    """Bytes on the device while a batch of images is decoded, against the meter around the real
    code, less the bytes on the host: within 5 %. More parts do not change it."""
    config = change(made(tmp_path, "sd3, full"), "model.decode_batch", 2)
    trainer = Trainer(config)
    rows = trainer.rows()
    ro = trainer.sample(rows)
    buffer = ImageBuffer(len(rows))
    with Meter([*trainer.params.values(), ro.x]) as meter:
        buffer.decode(trainer, ro, rows, first=0)
    assert buffer.levels is not None
    found, forecast = {}, trainer.cost
    for parts in (1, 2):
        changed = change(config, "train.parts", parts)
        found[parts] = phase(changed, "decode", _forecast(changed))
    host = buffer.levels.numel()
    assert found[1].extra == pytest.approx(meter.peak - host, rel=0.05)
    assert found[2].extra == found[1].extra and forecast.images == len(ro.leaf)
    names = [part.name for part in kept_memory(config, _forecast(config))[0]]
    assert "images" not in names
