"""The package's tiny pipelines as functions that tests call: each saves one and returns its
folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.models.tiny import save
from flowrl.models.tiny.parts import qwen_tokenizer

__all__ = ["qwen_tokenizer"]
WIDTH = 16  # hidden size of CLIP's encoders
# the noise of Stable Diffusion's training, and what else its schedulers' files set
EULER: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
NOISE = EULER | {"set_alpha_to_one": False}
UNIPC: dict[str, Any] = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "num_train_timesteps": 1000,
}


def tiny_sd3(
    folder: Path,
    *,
    t5: bool = False,
    seed: int = 0,
    dynamic_shift: bool = False,
    layers: int = 2,
    dual: bool = False,
    sample_size: int = 8,
) -> Path:
    """``dual``: SD3.5's second attention; images are at most ``16 * sample_size`` pixels."""
    network: dict[str, Any] = {"num_layers": layers, "sample_size": sample_size}
    network["pos_embed_max_size"] = sample_size
    if dual:
        network |= {"dual_attention_layers": [0], "qk_norm": "rms_norm"}
    more = {"text_encoder_3": "t5", "tokenizer_3": "t5_tokenizer"} if t5 else {}
    scheduler = {"use_dynamic_shifting": dynamic_shift}
    return save("sd3", folder, seed=seed, transformer=network, scheduler=scheduler, **more)


def tiny_flux(
    folder: Path,
    *,
    guidance_embeds: bool = True,
    seed: int = 0,
    kontext: bool = False,
    **scheduler: Any,
) -> Path:
    """Dev, or without ``guidance_embeds`` schnell; ``kontext`` edits images."""
    name = "flux_kontext" if kontext else "flux" if guidance_embeds else "flux_schnell"
    return save(name, folder, seed=seed, scheduler=scheduler or {"shift": 1.0})


def tiny_sd15(folder: Path, *, seed: int = 0, scheduler: Any = None) -> Path:
    """By default with SD1.5's own PNDM."""
    return save("sd15", folder, seed=seed, **({"scheduler": scheduler} if scheduler else {}))


def tiny_sdxl(
    folder: Path, *, seed: int = 0, scheduler: Any = None, force_zeros: bool = True
) -> Path:
    """By default with SDXL's own Euler."""
    own = {"scheduler": scheduler, "files": {}} if scheduler else {}
    given = {"force_zeros_for_empty_prompt": force_zeros}
    return save("sdxl", folder, seed=seed, **own, **{"with": given})


def tiny_wan(folder: Path, *, seed: int = 0, scheduler: Any = None) -> Path:
    """By default with UniPC."""
    return save("wan", folder, seed=seed, **({"scheduler": scheduler} if scheduler else {}))


def tiny_ti2v(folder: Path, *, seed: int = 5) -> Path:
    """Wan 2.2 TI2V."""
    return save("wan_ti2v", folder, seed=seed)


def tiny_wan22(folder: Path, *, seed: int = 3, boundary: float | None = 0.875) -> Path:
    """Wan 2.2 of two experts."""
    return save("wan2.2", folder, seed=seed, **{"with": {"boundary_ratio": boundary}})


def tiny_i2v(folder: Path, *, experts: bool, clip: Any = None, seed: int = 4) -> Path:
    """Image to video, of 2.2's two experts or with 2.1's image encoder of the class ``clip``."""
    own = {} if clip is None else {"image_encoder": {"like": "wan_clip", "is": clip.__name__}}
    return save("wan2.2_i2v" if experts else "wan_i2v", folder, seed=seed, **own)


def tiny_qwen_image(folder: Path, *, seed: int = 0, **scheduler: Any) -> Path:
    """``scheduler`` overrides the released one's settings."""
    return save("qwen_image", folder, seed=seed, scheduler=scheduler or {"shift": 1.0})


def tiny_qwen_edit(
    folder: Path, *, seed: int = 0, plus: bool = False, zero_cond_t: bool = False
) -> Path:
    """Qwen-Image-Edit, or -Edit-Plus."""
    name = "qwen_edit_plus" if plus else "qwen_edit"
    return save(name, folder, seed=seed, transformer={"zero_cond_t": zero_cond_t})


def tiny_z_image(folder: Path, *, seed: int = 0, shift: float = 6.0) -> Path:
    """Z-Image."""
    return save("z_image", folder, seed=seed, scheduler={"shift": shift})


def tiny_klein(folder: Path, *, seed: int = 0, distilled: bool = False) -> Path:
    """FLUX.2 klein."""
    return save("flux2_klein", folder, seed=seed, **{"with": {"is_distilled": distilled}})


def tiny_flux2(folder: Path, *, seed: int = 0) -> Path:
    """FLUX.2."""
    return save("flux2", folder, seed=seed)
