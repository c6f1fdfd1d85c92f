"""What the dry run says of shipped configs of real models."""

from __future__ import annotations

from flowrl.config.load import load_config
from flowrl.cost.dry_run import absent_files
from flowrl.training.rehearsal import cost_of


def test_everything_that_is_missing_is_named() -> None:
    """The model that a reward takes by itself, weights beside a folder, and teachers."""
    for name, absent in (
        ("flux/awm", ["rewards    clip: openai/clip-vit-large-patch14"]),
        ("sdxl/spo", ["sdxl_step-aware_preference_model.bin"]),
        ("sd3/flow_opd", ["teacher    runs/sd3-geneval", "teacher    runs/sd3-ocr"]),
    ):
        said = "\n".join(each.line for each in absent_files(load_config(name)))
        assert [text for text in absent if f"{text} is not " not in said] == []


def test_a_noise_that_a_prompt_s_images_share_counts_once() -> None:
    said = "\n".join(cost_of(load_config("flux/mix_grpo")).lines())
    assert "384 images from 32 initial noises" in said
