"""What a score depends on, in a line that is printed beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHOWN = (
    *("guidance", "true_cfg_scale", "steps", "height", "width", "seed", "images", "tuned"),
    *("best_of", "best_by", "lora_scale", "prompts"),
)


def setting_line(setting: Mapping[str, Any]) -> str:
    """Say in a line what a score depends on; settings of earlier versions know no hash."""
    shown = ", ".join(f"{key} {setting[key]}" for key in _SHOWN if key in setting)
    known = "prompts_hash" in setting
    which = f" ({setting['count']}, hash {setting['prompts_hash']})" if known else ""
    return f"setting: {shown}{which}"
