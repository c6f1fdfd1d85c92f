"""What a card's code calls a pipeline with, so that it draws as the run's evaluations did."""

from __future__ import annotations

import json
from typing import Any

from flowrl.config.load import Config

VIDEOS = ("wan", "wan_i2v")
# flowrl's arguments of a model -> those of its pipeline's call; values that change nothing are left
# out
CALL = {
    "guidance": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale",
    "negative_prompt": "negative_prompt",
    "guidance_rescale": "guidance_rescale",
    "cfg_normalization": "cfg_normalization",
    "max_sequence_length": "max_sequence_length",
    "original_size": "original_size",
    "crop": "crops_coords_top_left",
    "target_size": "target_size",
}
# the same of one adapter
QWEN_CALL = {"guidance": "true_cfg_scale"}
OWN_CALL = {
    "qwen_image": QWEN_CALL,
    # whose pipelines cut no prompt
    **dict.fromkeys(("qwen_edit", "qwen_edit_plus"), QWEN_CALL | {"max_sequence_length": ""}),
    **dict.fromkeys(VIDEOS, {"frames": "num_frames", "guidance_2": "guidance_scale_2"}),
    "flux2_klein": {"negative_prompt": ""},  # see `negative_lines`
}
NEUTRAL: dict[str, Any] = {
    "true_cfg_scale": 1.0,
    "negative_prompt": "",
    "guidance_rescale": 0.0,
    "cfg_normalization": 0.0,
    "crop": (0, 0),
}
# the same of one adapter: without a negative prompt the pipeline leads away from zeros
OWN_NEUTRAL: dict[str, dict[str, Any]] = {"sdxl": {"negative_prompt": None}}
# whose pipelines guide only if there is a negative prompt, and be it an empty one
TRUE_CFG = ("flux", "flux_kontext", "qwen_image", "qwen_edit", "qwen_edit_plus")
EMBEDS = "negative_prompt_embeds"


def call_arguments(config: Config) -> list[str]:
    """Return what the pipeline is called with beside the prompt and its images, as code."""
    fn, given = config.model.fn, config.model.kwargs
    height, width = config.eval_size
    chosen: dict[str, Any] = {
        "height": height,
        "width": width,
        "num_inference_steps": config.eval.steps,
    }
    if fn == "flux_kontext":  # sizes as they are
        chosen |= {"max_area": height * width, "_auto_resize": False}
    neutral = NEUTRAL | OWN_NEUTRAL.get(fn, {})
    for name, call in (CALL | OWN_CALL.get(fn, {})).items():
        value = given.get(name)
        plain = tuple(value) if isinstance(value, list) else value
        if call and plain is not None and plain != neutral.get(name):
            chosen[call] = plain
    if fn in TRUE_CFG:
        chosen.pop("negative_prompt", None)
        if chosen.get("true_cfg_scale", 1.0) > 1:
            chosen["negative_prompt"] = given["negative_prompt"]
    found = [f"{name}={value!r}" for name, value in chosen.items()]
    return found + [f"{EMBEDS}=negative"] * bool(negative_lines(config))


def negative_lines(config: Config) -> list[str]:
    """Return the lines that encode a negative prompt for FLUX.2 klein, whose pipeline knows the
    empty one only, but takes the embeddings of any; [] where none are needed."""
    given = config.model.kwargs
    if config.model.fn != "flux2_klein" or not given["negative_prompt"]:
        return []
    text = json.dumps(given["negative_prompt"], ensure_ascii=False)
    length = f"max_sequence_length={given['max_sequence_length']}"
    return [
        "with torch.no_grad():",
        f"    negative, _ = pipeline.encode_prompt({text}, {length})",
    ]
