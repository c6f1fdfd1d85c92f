"""Real images of the prompts: what is refused before a weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scriptkit import module_of
from storedkit import DATA, PAIRS, Rows, real_trainer, write_pairs, write_real

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError
from flowrl.models.toy import LinearFlow
from flowrl.training.parts.real_images import RealImages


def nameless(rows: Rows) -> None:
    del rows[1]["image"]


def empty(rows: Rows) -> None:
    rows[2]["image"] = []


def missing(rows: Rows) -> None:
    rows[3]["image"] = "images/gone.png"


def no_image(rows: Rows) -> None:
    rows[4]["image"] = "train.jsonl"


def a_folder(rows: Rows) -> None:
    rows[0]["image"] = "images"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nameless, r"line 2: expected the file of a real image .* as 'image', .* got None"),
        (empty, r"line 3: expected the file of a real image .* got \[\]"),
        (missing, r"line 4, image: .*gone\.png: no such file"),
        (no_image, r"line 5, image: .*train\.jsonl: expected a PNG, JPEG or WebP"),
        (a_folder, r"line 1, image: .*images: no such file"),
    ],
)
def test_lists_that_are_refused(tmp_path: Path, change: Callable[[Rows], None], words: str) -> None:
    config = write_real(tmp_path, change)
    with pytest.raises(DataError, match=words):
        real_trainer(config, DATA, "model={fn: toykit.unloadable}")
    # nobody looks at images that the config does not train on
    assert real_trainer(config).parts.get(RealImages) is None
    assert real_trainer(config, DATA, "kl.beta=0").parts.get(RealImages) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ("likelihood={fn: prior}", "plan={fn: ode, steps: 4}"),
            "kl: real images .* likelihood prior trains roots; take reverse or forward",
        ),
        (
            ("likelihood={fn: draft}", "plan={fn: ode, steps: 4}", "loss={fn: reward_ascent}"),
            "kl: real images .* likelihood draft trains roots",
        ),
        (
            ("likelihood={fn: draft_lv}", "plan={fn: ode, steps: 4}", "loss={fn: reward_ascent}"),
            "data_velocity: the likelihood has no velocity",
        ),
        (
            ("monitors.adaptive_kl={target: 0.1}",),
            "monitors.adaptive_kl: follows a distance to the base model",
        ),
        (
            ("old={fn: reset, every: 2, above: 0.1}",),
            "old.above: follows a distance to the base model",
        ),
        (("kl.weight=two",), "weight"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, changes: tuple[str, ...], words: str) -> None:
    config = write_real(tmp_path)
    with pytest.raises(ConfigError, match=words):
        real_trainer(config, DATA, "model={fn: toykit.unloadable}", *changes)


def test_a_loss_without_its_penalty_is_refused(tmp_path: Path) -> None:
    config = write_real(tmp_path)
    for options in ((), (DATA, "kl.beta=0")):
        with pytest.raises(ConfigError, match="penalty_alone: learns from the section kl alone"):
            real_trainer(config, "loss={fn: penalty_alone}", *options)


def test_stored_pairs_have_no_initial_noise(tmp_path: Path) -> None:
    def named(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["image"] = row["image_0"]

    config = write_pairs(tmp_path, named)
    with pytest.raises(ConfigError, match="kl.fresh=none: plan pairs samples nothing"):
        real_trainer(config, *PAIRS, DATA)
    metrics = real_trainer(config, *PAIRS, DATA, "kl.fresh=noise").step()
    assert metrics["kl"] > 0


def test_stored_pairs_have_no_noise_to_remember(tmp_path: Path) -> None:
    """Neither for Direct-Align, which takes fresh noise."""
    aligned = ["likelihood={fn: direct_align}", "loss={fn: reward_ascent}", "kl=null"]
    config = write_pairs(tmp_path, lambda rows: None)
    with pytest.raises(ConfigError, match="likelihood.noise=initial: plan pairs samples nothing"):
        real_trainer(config, *PAIRS, *aligned)
    metrics = real_trainer(config, *PAIRS, *aligned, "likelihood.noise=fresh").step()
    assert metrics["grad_norm"] > 0


class Blind:
    """A field without a way back from images."""

    def __init__(self) -> None:
        self.field = LinearFlow()

    def __getattr__(self, name: str) -> Any:
        if name == "latents":
            raise AttributeError(name)
        return getattr(self.field, name)


class Steps(LinearFlow):
    """A field that knows the levels of its sampler alone."""

    discrete_levels = True


def test_models_that_cannot(tmp_path: Path) -> None:
    config = write_real(tmp_path)
    with pytest.raises(ConfigError, match="data_velocity.* needs a model that encodes images"):
        real_trainer(config, DATA, model=Blind())
    with pytest.raises(ConfigError, match="kl.fresh=all: draws noise levels"):
        real_trainer(config, DATA, "kl.fresh=all", model=Steps())
    assert real_trainer(config, DATA, model=Steps()).step()["kl"] > 0


def test_bench_has_no_images_of_made_up_prompts(tmp_path: Path) -> None:
    config = load_config(write_real(tmp_path), [DATA], ("toykit",))
    with pytest.raises(ConfigError, match="performance: kl trains on real images"):
        module_of("bench", "throughput").stand_in(config)
