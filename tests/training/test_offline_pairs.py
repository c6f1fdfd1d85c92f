"""Preference learning from stored pairs: what a list may say, what is learnt of it, and how lists
of other projects become one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from storedkit import GREEN, PAIRS, RED, paint, write_pairs

from flowrl.algorithms.forest import clean_latents
from flowrl.algorithms.likelihoods.forward import _weighted
from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.noise_path import velocity_from_eps
from flowrl.evaluation.preference_pairs import PreferencePair, convert_pairs, load_pairs
from flowrl.models.toy import LinearFlow
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer


def trainer_of(config: str, *overrides: str, model: Any = None) -> Trainer:
    return Trainer(load_config(config, (*PAIRS, *overrides), ("toykit",)), model=model)


@pytest.mark.parametrize("change", [(), ("train.parts=2",), ("plan.judged_by=rewards",)])
def test_a_step_reads_the_images_and_their_labels(tmp_path: Path, change: tuple[str, ...]) -> None:
    """The rewards that are watched are those of the stored images: (200 - 40) / 255 of red, minus
    it of green. No velocity is evaluated for them; at the base weights the loss is ln 2."""
    trainer = trainer_of(write_pairs(tmp_path), *change)
    found = collect(trainer, trainer.rows())
    assert found.values["red"].abs().tolist() == pytest.approx([160 / 255] * 8, abs=1e-6)
    leaves = found.rollout.x[found.rollout.leaf]
    latents = LinearFlow(channels=2).latents(found.batch.images / 255)
    torch.testing.assert_close(leaves, latents)
    metrics = trainer.step()
    assert metrics["reward/red"] == pytest.approx(0, abs=1e-6)
    assert metrics["loss"] == pytest.approx(0.6931472, abs=1e-6) and metrics["trained"] == 16
    assert metrics["nfe"] == 16 * 4  # forward, backward of twice the work, and the base weights


@pytest.mark.learning
def test_what_is_preferred_is_drawn(tmp_path: Path) -> None:
    """Mean red minus mean green of fresh images, before and after 30 iterations; a test of the same
    length without a signal moves by at most 0.06 (the control of test_learning_methods.py)."""
    config = write_pairs(tmp_path)
    trainer = trainer_of(config)
    redness = []
    for _ in range(2):
        online = load_config(config, (*PAIRS[:2], "train.prompts=4"), ("toykit",))
        sampler = Trainer(online, model=trainer.model)
        redness.append(float(collect(sampler, [0, 1, 2, 3]).values["red"].mean()))
        for _ in range(30):
            trainer.step()
    print(f"redness {redness}")
    assert redness[1] - redness[0] > 0.15


def missing(rows: list[dict[str, Any]]) -> None:
    rows[2]["image_1"] = "gone.png"


def equal(rows: list[dict[str, Any]]) -> None:
    rows[1]["image_1"] = rows[1]["image_0"]


def contradicts(rows: list[dict[str, Any]]) -> None:
    swapped = {"image_0": rows[0]["image_1"], "image_1": rows[0]["image_0"]}
    rows.append({**rows[0], **swapped})


def unlabelled(rows: list[dict[str, Any]]) -> None:
    rows[3]["label_0"] = "left"


class EndsAbove(LinearFlow):
    """A field whose own grid ends above level 0, as that of Stable Diffusion 1."""

    def sigmas(self, steps: int, height: int, width: int) -> torch.Tensor:
        return super().sigmas(steps, height, width).clamp_min(0.05)


def test_stored_images_are_clean_whatever_grid_the_model_samples_on(tmp_path: Path) -> None:
    """They are noised as they are; samples that end at .05 are decoded as x / hypot(.95, .05)."""
    trainer = trainer_of(write_pairs(tmp_path), model=EndsAbove(channels=2))
    ro = collect(trainer, trainer.rows()).rollout
    assert ro.sigmas[-2] > 0.05 and ro.sigmas[-1] == 0
    assert torch.equal(clean_latents(ro, ro.leaf), ro.x[ro.leaf])
    own = ro._replace(sigmas=ro.sigmas.clamp_min(0.05))
    expected = ro.x[ro.leaf] / math.hypot(0.95, 0.05)
    torch.testing.assert_close(clean_latents(own, ro.leaf), expected)


def ties(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["label_0"] = 0.5


def without(rows: list[dict[str, Any]]) -> None:
    del rows[0]["image_0"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (missing, r"line 3, image_1: .*gone\.png: cannot be read"),
        (equal, r"line 2: both images are the same \(green|line 2: both images are the same \(red"),
        (contradicts, "line 5: prefers green.png, but .*line 1 prefers the other"),
        (unlabelled, "line 4: expected 'label_0' 1 .* got 'left'"),
        (ties, "every pair is a tie"),
        (without, "line 1: expected the files of two images"),
    ],
)
def test_bad_pairs_are_refused_before_the_model_is_loaded(
    tmp_path: Path, change: Callable[..., None], words: str
) -> None:
    config = write_pairs(tmp_path, change)
    with pytest.raises(DataError, match=words):
        trainer_of(config, "model={fn: toykit.unloadable}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.group=4", "set it to 2"),
        ("likelihood={fn: prior}", "take likelihood forward"),
        ("plan.judged_by=people", "labels"),
    ],
)
def test_what_does_not_go_with_pairs(tmp_path: Path, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer_of(write_pairs(tmp_path), change)


def test_images_of_any_size_are_covered_and_cut(tmp_path: Path) -> None:
    """A flat image stays flat; of a wide one the middle is taken."""
    wide = Image.new("RGB", (30, 10), GREEN)
    wide.paste(Image.new("RGB", (10, 10), RED), (10, 0))
    wide.save(tmp_path / "wide.png")
    pair = PreferencePair((tmp_path / "wide.png", paint(tmp_path / "flat.png", GREEN, 64)), 1.0)
    found = load_pairs([pair], 5, 5)
    assert found.shape == (2, 3, 5, 5) and found.dtype == torch.uint8
    assert found[0, :, 1:-1, 1:-1].flatten(1).unique(dim=1).flatten().tolist() == [*RED]
    assert found[1].flatten(1).unique(dim=1).flatten().tolist() == [*GREEN]


def test_the_error_of_the_noise_is_a_weight_of_the_velocitys() -> None:
    """Against the squared error of the noise itself, by the rescale of models that predict it."""
    generator = torch.Generator().manual_seed(0)
    x0, eps, out = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    sigma = torch.tensor([0.03, 0.2, 0.5, 0.8, 0.93], dtype=torch.float64)
    x = (1 - sigma[:, None]) * x0 + sigma[:, None] * eps
    gap = velocity_from_eps(x, out, sigma) - (eps - x0)
    found = _weighted(gap.square().mean(1), sigma, "epsilon")
    torch.testing.assert_close(found, (out - eps).square().mean(1))


# ------------------------------------------------------------------------------------ other formats


def hpd(folder: Path) -> Path:
    """HPDv2's keys, HPDv3's, and a tie."""
    paint(folder / "a.png", RED)
    paint(folder / "b.png", GREEN)
    both = ["a.png", "b.png"]
    rows = [
        {"prompt": "a dot", "image_path": both, "human_preference": [0, 1]},
        {"prompt": "a spot", "image_path": both, "human_preference": [1, 1]},
        {"prompt": "a blob", "path1": "a.png", "path2": "b.png", "confidence": 0.9},
    ]
    (folder / "hpd.json").write_text(json.dumps(rows))
    return folder / "hpd.json"


def folders(folder: Path) -> Path:
    for name, prompt in (("x", "a dot"), ("y", "a blob")):
        better, worse = (RED, GREEN) if name == "y" else (GREEN, RED)
        paint(folder / "better" / f"{name}.png", better)
        paint(folder / "worse" / f"{name}.png", worse)
        (folder / f"{name}.txt").write_text(prompt + "\n")
    return folder


def pick_a_pic(folder: Path) -> Path:
    """Its columns: bytes of two JPEG files and the label of the first."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    images = [
        paint(folder / f"{name}.jpg", c).read_bytes() for name, c in (("r", RED), ("g", GREEN))
    ]
    table = {
        "caption": ["a dot", "a tie", "a blob"],
        "jpg_0": [images[0]] * 3,
        "jpg_1": [images[1]] * 3,
        "label_0": [0.0, 0.5, 1.0],
    }
    parquet.write_table(pyarrow.table(table), folder / "part-0.parquet")
    return folder


@pytest.mark.parametrize("source", [hpd, folders, pick_a_pic])
def test_formats_of_others(tmp_path: Path, source: Callable[[Path], Path]) -> None:
    """Green is preferred for the first prompt, red for the last; ties are gone; equal images are
    one file."""
    done = convert_pairs(source(tmp_path / "source"), tmp_path / "out")
    assert done.kept == 2 and done.ties == (source is not folders)
    rows = [json.loads(line) for line in done.file.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["a dot", "a blob"]
    for row, colour in zip(rows, (GREEN, RED), strict=True):
        better = row["image_0"] if row["label_0"] == 1 else row["image_1"]
        pixels = np.array(Image.open(done.file.parent / better).convert("RGB"), np.int64)
        assert abs(pixels - np.array(colour)).max() < 5
    assert len(list((tmp_path / "out" / "images").iterdir())) == 2


def test_bad_pairs_stop_a_conversion_or_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hpd(tmp_path)
    rows = json.loads(source.read_text())
    rows += [{**rows[0], "human_preference": [1, 0]}, {**rows[0], "image_path": ["a.png"] * 2}]
    source.write_text(json.dumps(rows))
    with pytest.raises(DataError, match="entry 4: the same pair was labelled the other way round"):
        convert_pairs(source, tmp_path / "out")
    assert main(["pairs", f"{source}", "--out", f"{tmp_path}/out", "--drop", "--json", "-"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["kept"] == 2 and len(done["dropped"]) == 2 and "are the same" in done["dropped"][1]
    with pytest.raises(ConfigError, match=r"expected preference data as \.parquet"):
        convert_pairs(paint(tmp_path / "one.png", RED), tmp_path / "out")
