"""Tiny pipelines of the real diffusers classes with random weights, to rehearse with on a CPU and
without a network: the same bytes for the same seed, with tokenizers of single letters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, unknown
from flowrl.core.files import replacing

_STILLS, _LANGUAGE, _VIDEOS = "stills", "language", "videos"
TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sd3": (_STILLS, "tiny_sd3", {}),
    "sd3.5": (_STILLS, "tiny_sd3", {"t5": True, "dual": True}),
    "flux": (_STILLS, "tiny_flux", {}),
    "flux_schnell": (_STILLS, "tiny_flux", {"guidance_embeds": False}),
    "flux_kontext": (_STILLS, "tiny_flux", {"kontext": True}),
    "sd15": (_STILLS, "tiny_sd15", {}),
    "sdxl": (_STILLS, "tiny_sdxl", {}),
    "qwen_image": (_LANGUAGE, "tiny_qwen_image", {}),
    "qwen_edit": (_LANGUAGE, "tiny_qwen_edit", {}),
    "qwen_edit_plus": (_LANGUAGE, "tiny_qwen_edit", {"plus": True}),
    "z_image": (_LANGUAGE, "tiny_z_image", {}),
    "flux2": (_LANGUAGE, "tiny_flux2", {}),
    "flux2_klein": (_LANGUAGE, "tiny_klein", {}),
    "flux2_klein_distilled": (_LANGUAGE, "tiny_klein", {"distilled": True}),
    "wan": (_VIDEOS, "tiny_wan", {}),
    "wan2.2": (_VIDEOS, "tiny_wan22", {}),
    "wan_ti2v": (_VIDEOS, "tiny_ti2v", {}),
    "wan_i2v": (_VIDEOS, "tiny_i2v", {"experts": False}),
    "wan2.2_i2v": (_VIDEOS, "tiny_i2v", {"experts": True}),
}
"""Name of a pipeline -> the file here, the function in it and its options. A name is that of the
adapter, or a variant of one."""


def save_tiny(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Save the tiny pipeline of this name, one of `TINY` or of a class of diffusers, in a new or
    empty folder, as diffusers writes it -> the folder. Raises ConfigError for an unknown name and a
    folder that holds something."""
    if name not in TINY and name not in _classes():
        names = [*TINY, *_classes()]
        raise ConfigError(f"tiny: flowrl {unknown(name, names, 'tiny pipeline')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"tiny: expected a new or empty folder, got {folder}")
    with replacing(folder) as draft:
        if name in TINY:
            module, function, options = TINY[name]
            _makers(module)[function](draft, seed=seed, **options)
        else:
            from flowrl.models.tiny.classes import save

            save(name, draft, seed=seed)
    return folder


def _classes() -> dict[str, Any]:
    """Return the classes of diffusers with a tiny pipeline; all of its modules are read."""
    from flowrl.models.tiny.classes import CLASSES

    return CLASSES


def _makers(module: str) -> dict[str, Any]:
    """Return what is in one file here; diffusers is imported for it."""
    if module == _STILLS:
        from flowrl.models.tiny import stills

        return vars(stills)
    if module == _LANGUAGE:
        from flowrl.models.tiny import language

        return vars(language)
    from flowrl.models.tiny import videos

    return vars(videos)


def tiny_name(adapter: str, parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the tiny pipeline that is most like a model -> "" where there is none.

    Args:
        adapter: `fn` of the model. parts: the settings of each part of its pipeline, by name.
    """
    network = parts.get("transformer", {})
    if adapter == "sd3" and network.get("dual_attention_layers"):
        return "sd3.5"
    if adapter == "flux" and network.get("guidance_embeds") is False:
        return "flux_schnell"
    # Wan 2.2 has two experts, or a VAE of its own
    if adapter == "wan" and parts.get("vae", {}).get("is_residual"):
        return "wan_ti2v"
    if adapter in ("wan", "wan_i2v") and "transformer_2" in parts:
        return "wan2.2" if adapter == "wan" else "wan2.2_i2v"
    return adapter if adapter in TINY else ""
