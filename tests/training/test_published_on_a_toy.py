"""One iteration of every published config on a linear model, with its own plan, credit and loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toykit import write_toy

from flowrl.config.load import load_config
from flowrl.core.shipped_files import list_configs
from flowrl.training.trainer import Trainer

# tested elsewhere: they need stored images, earlier images of a prompt, other runs, rewards by name
# or with a gradient, or they train no network
APART = {"sd3/diffusion_dpo_offline", "sd15/diffusion_dpo_offline", "sd15/ddpo", "sd3/gardo"}
APART |= {"sd3/flow_opd", "sd15/spo", "sdxl/spo", "sd15/find", "sd15/zo_rank_sgd"}
APART |= {"sd15/draft", "sd15/align_prop", "flux/srpo"}
PUBLISHED = [name for name in list_configs() if not name.startswith("shapes/")]
Stepped = tuple[dict[str, float], bool]
TRAINED = ["plan", "transition", "credit", "aggregate", "segment", "select", "likelihood", "loss"]
TRAINED += ["kl", "old", "slow", "train"]


@pytest.fixture(scope="module")
def stepped() -> dict[str, Stepped]:
    """What an iteration gave, by the sections that it depends on: configs of one method for several
    models are often one on the toy."""
    return {}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in APART])
def test_one_iteration_of_each_on_a_toy(
    name: str, tmp_path: Path, stepped: dict[str, Stepped]
) -> None:
    """The whole loop with the published plan, credit and loss, on a linear model with one prompt.

    The ratio is 1 before the first update: 1e-5 in float32. The reward is above 0, as VGPO needs
    it.
    """
    write_toy(tmp_path)
    small = [
        "model={fn: toykit.linear}",
        "image={height: 16, width: 16}",
        f"prompts={{train: {tmp_path}/train.jsonl, test: {tmp_path}/test.jsonl}}",
        "train.iterations=1",
        "train.prompts=1",
        "train.updates=2",
        "train.reference_guidance=0",  # the toy has no guidance
        "train.micro_batch=256",
        "train.rollout_batch=256",
        "rewards={red: {fn: toykit.blueness}}",
        "eval.score=red",
    ]
    if name == "wan/flash_grpo":  # one step of one noise: a prompt is one state
        small += ["train.prompts=2"]
    config = load_config(name, small, ("toykit",))
    raw = config.to_dict()
    key = json.dumps([raw.get(section) for section in TRAINED])
    if key not in stepped:
        trainer = Trainer(config)
        before = trainer.model.mix.detach().clone()  # type: ignore[attr-defined]
        metrics = trainer.step()
        stepped[key] = metrics, bool((trainer.model.mix != before).any())  # type: ignore[attr-defined]
    metrics, moved = stepped[key]
    assert metrics.get("on_policy_gap", 0.0) < 1e-5 and metrics["trained"] > 0, metrics
    assert moved
