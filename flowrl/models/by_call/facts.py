"""What a pipeline without a file in configs/models says of itself: the sections that a config takes
from a model, made of its class's ``__call__`` and of the JSON files in its folder."""

from __future__ import annotations

import inspect
import re
from typing import Any

import yaml

from flowrl.models.by_call.options import GUIDES, frames_name, pipeline_class
from flowrl.models.pipeline import NETWORKS, part_settings, pipeline, read_index

SIDE = 1024  # pixels, where neither the class nor its network says a size
SCALE = 8  # pixels of a latent, of nearly all VAEs
STEPS = 28  # of an evaluation, where the class has no number of its own
FRAMES = 17  # of a video in training; a class's own number is that of whole clips
EDITS = re.compile("Edit|Pix2Pix|I2I|I2V|ImageToVideo")
NOTE = "ours: the pipeline's own"


def facts_of(path: str) -> str:
    """Return the text of a file like those in configs/models for a pipeline's folder or id, which
    is asked by its own ``__call__``. Raise ModelError."""
    index, where = read_index(path)
    kind = pipeline_class(index.get("_class_name"), where)
    call = getattr(kind.__call__, "__wrapped__", kind.__call__)
    takes = inspect.signature(call).parameters
    makes = _kind(kind.__name__, takes)
    sections: list[tuple[str, Any, str]] = [
        ("kind", makes, ""),
        ("model", _model(path, takes, makes), NOTE),
    ]
    if _whole_times(path):
        sections.append(("instead", WHOLE_TIMES, "ours: whole timesteps"))
    sections.append(("image", _size(path, takes), NOTE))
    for name, value in JUDGED[makes].items():
        sections.append((name, value, "ours"))
    sections += [
        ("optimizer", {"lr": 1e-4}, "ours"),
        ("train", {"iterations": 1000, "micro_batch": 1, "rollout_batch": 1}, "ours: memory"),
        ("eval", _evaluation(takes, makes), "ours: steps as the pipeline has them"),
        ("checkpoint", {"every": 20, "keep": 2}, "ours"),
        ("samples", {"every": 20, "prompts": 8}, "ours"),
    ]
    lines = []
    for name, value, note in sections:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**9).strip()
        line = f"{name}: {text.removesuffix('...').strip()}"
        if note:
            line += f" # {note}"
        lines.append(line)
    return "\n".join([*lines, ""])


_PICKSCORE = {"train": "pickscore/train", "test": "pickscore/test"}
_EDITS = {
    "train": "assets/shapes-edits/train.jsonl",
    "test": "assets/shapes-edits/validation.jsonl",
}
_EDITED = {"fn": "shapes_edit", "resize": True}
_LAST = {**_EDITED, "frames": "last"}
JUDGED: dict[str, dict[str, Any]] = {
    "images": {"prompts": _PICKSCORE, "rewards": {"pickscore": {"fn": "pickscore"}}},
    "videos": {
        "prompts": {"train": "motion/train", "test": "motion/test"},
        "rewards": {"pickscore": {"fn": "pickscore", "frames": "mean", "offload": True}},
    },
    "edits": {
        "prompts": _EDITS,
        "rewards": {
            "edit": {**_EDITED, "mode": "graded"},
            "strict": {**_EDITED, "mode": "strict", "weight": 0},
        },
    },
    "moved images": {
        "prompts": _EDITS,
        "rewards": {
            "edit": {**_LAST, "mode": "graded"},
            "strict": {**_LAST, "mode": "strict", "weight": 0},
        },
    },
}
"""Prompts and rewards by what a pipeline makes, none of which needs a file of the user's."""


WHOLE_TIMES: list[dict[str, Any]] = [
    {
        "section": "plan",
        "when": {"fn": "sa_solver"},
        "take": {"fn": "ode", "order": 2},
        "keep": ["steps"],
    },
    *(
        {"section": "likelihood", "when": {"times": times}, "take": {"times": "any_steps"}}
        | {"keep": ["fn", "draws", "shared"]}
        for times in ("logit_normal", "power_law")
    ),
]
"""What methods do instead where noise levels of training timesteps are known alone."""


def _whole_times(path: str) -> bool:
    found: bool = pipeline.ahead(path=path).discrete_levels  # type: ignore[attr-defined]
    return found


def _kind(name: str, takes: Any) -> str:
    """Say what a pipeline makes, by the name of its class where it could do without an image."""
    needed = "image" in takes and takes["image"].default is inspect.Parameter.empty
    from_image = needed or ("image" in takes and EDITS.search(name) is not None)
    if frames_name(takes):
        return "moved images" if from_image else "videos"
    return "edits" if from_image else "images"


def _model(path: str, takes: Any, makes: str) -> dict[str, Any]:
    """Return the section model: LoRA on what `flowrl.models.tuning` finds, guidance as the
    pipeline has it."""
    made: dict[str, Any] = {"fn": "pipeline", "path": path, "dtype": "bfloat16"}
    made |= {"tune": "lora", "lora": {"rank": 32, "alpha": 64}}
    for name in GUIDES:
        scale = _default(takes, name)
        if isinstance(scale, int | float):
            made["call"] = {name: float(scale)}
            break
    if frames_name(takes):
        made["frames"] = FRAMES
    if makes in ("edits", "moved images"):
        made["sources"] = 1
    return made


def _size(path: str, takes: Any) -> dict[str, int]:
    """Return height and width in pixels: the defaults of ``__call__``, else the network's."""
    found = {}
    for name in ("height", "width"):
        value = _default(takes, name)
        if isinstance(value, int) and value > 0:
            found[name] = value
    if len(found) == 2:
        return found
    side = 0
    for network in NETWORKS:
        latents = part_settings(path, network, "config").get("sample_size")
        if not side and isinstance(latents, int):
            side = latents
    channels = part_settings(path, "vae", "config").get("block_out_channels")
    scale = SCALE
    if isinstance(channels, list):
        scale = 2 ** (len(channels) - 1)
    pixels = side * scale or SIDE
    return {"height": pixels, "width": pixels}


def _evaluation(takes: Any, makes: str) -> dict[str, Any]:
    steps = _default(takes, "num_inference_steps")
    if not isinstance(steps, int):
        steps = STEPS
    made: dict[str, Any] = {"steps": steps, "images": 1, "every": 50, "batch": 1}
    if "strict" in JUDGED[makes]["rewards"]:
        made["score"] = "strict"
    return made


def _default(takes: Any, name: str) -> Any:
    """Return the default of an argument; None of one that is not there."""
    if name in takes:
        return takes[name].default
    return None
