"""Configs that need nothing but the weights: a dry run finds all else."""

from __future__ import annotations

import pytest

from flowrl.config.load import load_config
from flowrl.core.prompts import load_prompts
from flowrl.cost.dry_run import dry_run


@pytest.mark.parametrize("model", ["sd3", "flux"])
@pytest.mark.parametrize("kind", ["geneval", "ocr"])
def test_prompts_are_there_without_a_file(model: str, kind: str) -> None:
    """5,440 and 553 prompts, 9,925 and 1,000: as the lists themselves count."""
    config = load_config(f"{model}/flow_grpo_{kind}")
    train, test = (load_prompts(f"{kind}/{name}") for name in ("train", "test"))
    lines = dry_run(config).splitlines()
    (said,) = [line for line in lines if line.startswith("prompts")]
    assert f"{len(train)} to train on ({kind}/train)" in said
    assert f"{len(test)} held out ({kind}/test), {config.eval.images} images each" in said
    assert len(config.rewards) == (2 if kind == "geneval" else 1)
