"""Tiny pipelines of diffusers' classes by the name of the class, in memory: with random weights,
local tokenizers and random text encoders."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers

from flowrl.models.pipeline import class_of
from flowrl.models.tiny import class_edits as edits
from flowrl.models.tiny import class_noise as noise
from flowrl.models.tiny import class_stills as stills
from flowrl.models.tiny import class_videos as videos
from flowrl.models.tiny.language import (
    tiny_flux2,
    tiny_klein,
    tiny_qwen_edit,
    tiny_qwen_image,
    tiny_z_image,
)
from flowrl.models.tiny.readers import SIZE
from flowrl.models.tiny.stills import tiny_flux, tiny_sd3, tiny_sd15, tiny_sdxl
from flowrl.models.tiny.videos import tiny_i2v


class TinyPipeline(NamedTuple):
    """How to make one, and what to ask of it."""

    make: Callable[[], Any]
    options: dict[str, Any]  # of `flowrl.models.pipeline.from_pipeline`
    size: tuple[int, int]  # pixels


def tiny(
    make: Callable[[], Any],
    *,
    guide: str = "guidance_scale",
    call: dict[str, Any] | None = None,
    size: int = SIZE,
    **options: Any,
) -> TinyPipeline:
    """Return one that is guided at 3 by the argument ``guide`` of its call, "" by none."""
    guided = {guide: 3.0} if guide else {}
    return TinyPipeline(make, {"call": guided | (call or {}), **options}, (size, size))


def saved(make: Callable[[Path], Path], kind: str = "", **nothing: Any) -> Callable[[], Any]:
    """Return how to load what is written into a folder; as another class of equal parts."""

    def load() -> Any:
        loader = getattr(diffusers, kind or "DiffusionPipeline")
        with tempfile.TemporaryDirectory() as folder:
            made = loader.from_pretrained(make(Path(folder)), **nothing)
        # it is in memory now
        made.register_to_config(_name_or_path="")
        return made

    return load


def of(name: str, make: Callable[[str], Any], **more: Any) -> Callable[[], Any]:
    """Return how to make one of a class whose parts are those of others."""
    return partial(make, name, **more)


NO_BINS: dict[str, Any] = {"use_resolution_binning": False}
NO_ORDER: dict[str, Any] = NO_BINS | {"complex_human_instruction": None}
NO_T5: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
NO_CHECK: dict[str, Any] = {"safety_checker": None, "image_encoder": None}
FULL: dict[str, Any] = {"tune": "full"}  # diffusers puts no LoRA on its network
EDIT: dict[str, Any] = {"sources": 1}
KONTEXT: dict[str, Any] = {"max_area": 4096, "_auto_resize": False}
LONG: dict[str, Any] = {"max_sequence_length": 1024}  # templates in letters are long
JSON = '{"edit_instruction": "{prompt}"}'
CLASSES: dict[str, TinyPipeline] = {
    # images
    "StableDiffusion3Pipeline": tiny(saved(tiny_sd3, **NO_T5)),
    "StableDiffusion3PAGPipeline": tiny(saved(tiny_sd3, "StableDiffusion3PAGPipeline", **NO_T5)),
    "FluxPipeline": tiny(saved(tiny_flux)),
    "Flux2Pipeline": tiny(saved(tiny_flux2)),
    "Flux2KleinPipeline": tiny(saved(tiny_klein)),
    "QwenImagePipeline": tiny(
        saved(tiny_qwen_image), guide="true_cfg_scale", negative_prompt="dull"
    ),
    "ZImagePipeline": tiny(saved(tiny_z_image)),
    "LuminaPipeline": tiny(stills.lumina, **FULL),
    "Lumina2Pipeline": tiny(stills.lumina2),
    "PRXPipeline": tiny(stills.prx, call=NO_BINS, **FULL),
    "ChromaPipeline": tiny(stills.chroma, call={"max_sequence_length": 64}),
    "AuraFlowPipeline": tiny(stills.auraflow),
    "CogView4Pipeline": tiny(stills.cogview4),
    "SanaPipeline": tiny(stills.sana, call=NO_ORDER),
    "SanaPAGPipeline": tiny(stills.sana_pag, call=NO_ORDER),
    "Krea2Pipeline": tiny(stills.krea2),
    "OvisImagePipeline": tiny(stills.ovis),
    "HiDreamImagePipeline": tiny(stills.hidream, call={"max_sequence_length": 64}),
    "BriaPipeline": tiny(stills.bria),
    "BriaFiboPipeline": tiny(edits.bria_fibo),
    "LongCatImagePipeline": tiny(edits.longcat),
    "QwenImage21Pipeline": tiny(edits.qwen_image21, guide="true_cfg_scale", negative_prompt="dull"),
    "Ideogram4Pipeline": tiny(
        edits.ideogram4, call={"max_sequence_length": 128, "guidance_schedule": None}
    ),
    "NucleusMoEImagePipeline": tiny(edits.nucleus_moe, call=LONG, **FULL),
    "ErnieImagePipeline": tiny(edits.ernie),
    "ZImageOmniPipeline": tiny(edits.z_image_omni),
    "Kandinsky5T2IPipeline": tiny(
        of("Kandinsky5T2IPipeline", videos.kandinsky5), call=LONG, size=1024
    ),
    "GlmImagePipeline": tiny(edits.glm_image),
    "OmniGenPipeline": tiny(stills.omnigen, **FULL),
    "PRXPixelPipeline": tiny(stills.prx_pixel, call=NO_BINS, **FULL),
    "HunyuanImagePipeline": tiny(stills.hunyuan_image, guide=""),
    "Cosmos2TextToImagePipeline": tiny(videos.cosmos),
    # images, by noise or v
    "StableDiffusionPipeline": tiny(saved(tiny_sd15, "StableDiffusionPipeline", **NO_CHECK)),
    "StableDiffusionXLPipeline": tiny(saved(tiny_sdxl)),
    "StableDiffusionPAGPipeline": tiny(saved(tiny_sd15, "StableDiffusionPAGPipeline", **NO_CHECK)),
    "StableDiffusionXLPAGPipeline": tiny(saved(tiny_sdxl, "StableDiffusionXLPAGPipeline")),
    "PixArtAlphaPipeline": tiny(
        of("PixArtAlphaPipeline", noise.pixart, use_additional_conditions=False),
        call=NO_BINS,
        **FULL,
    ),
    "PixArtSigmaPipeline": tiny(of("PixArtSigmaPipeline", noise.pixart), call=NO_BINS, **FULL),
    "PixArtSigmaPAGPipeline": tiny(
        of("PixArtSigmaPAGPipeline", noise.pixart), call=NO_BINS, **FULL
    ),
    "HunyuanDiTPipeline": tiny(of("HunyuanDiTPipeline", noise.hunyuan_dit), call=NO_BINS, **FULL),
    "HunyuanDiTPAGPipeline": tiny(
        of("HunyuanDiTPAGPipeline", noise.hunyuan_dit), call=NO_BINS, **FULL
    ),
    "CogView3PlusPipeline": tiny(noise.cogview3, **FULL),
    "Kandinsky3Pipeline": tiny(noise.kandinsky3, **FULL),
    "KolorsPipeline": tiny(of("KolorsPipeline", noise.kolors)),
    # diffusers reads no LoRA into it
    "KolorsPAGPipeline": tiny(of("KolorsPAGPipeline", noise.kolors), **FULL),
    # edits
    "FluxKontextPipeline": tiny(saved(partial(tiny_flux, kontext=True)), call=KONTEXT, **EDIT),
    "QwenImageEditPipeline": tiny(
        saved(tiny_qwen_edit), guide="true_cfg_scale", negative_prompt="dull", **EDIT
    ),
    "QwenImageEditPlusPipeline": tiny(
        saved(partial(tiny_qwen_edit, plus=True)),
        guide="true_cfg_scale",
        negative_prompt="dull",
        **EDIT,
    ),
    "LongCatImageEditPipeline": tiny(
        of("LongCatImageEditPipeline", edits.longcat), size=1024, **EDIT
    ),
    "BriaFiboEditPipeline": tiny(
        of("BriaFiboEditPipeline", edits.bria_fibo),
        call={"_auto_resize": False},
        template=JSON,
        **EDIT,
    ),
    "JoyImageEditPipeline": tiny(edits.joy_edit, **EDIT, **FULL),
    "Kandinsky5I2IPipeline": tiny(
        of("Kandinsky5I2IPipeline", videos.kandinsky5), call=LONG, size=1024, **EDIT
    ),
    "StableDiffusionInstructPix2PixPipeline": tiny(noise.instruct_pix2pix, **EDIT),
    "StableDiffusionXLInstructPix2PixPipeline": tiny(noise.instruct_pix2pix_xl, **EDIT),
    # videos
    "WanPipeline": tiny(videos.wan, frames=5),
    "LTXPipeline": tiny(videos.ltx, frames=9),
    "HunyuanVideoPipeline": tiny(videos.hunyuan_video, frames=5),
    "HunyuanVideo15Pipeline": tiny(videos.hunyuan_video15, guide="", frames=5),
    "MochiPipeline": tiny(videos.mochi, frames=7),
    "SkyReelsV2Pipeline": tiny(videos.skyreels, frames=5),
    "AnyFlowPipeline": tiny(videos.anyflow, frames=5),
    "AllegroPipeline": tiny(videos.allegro, frames=8, tiles=True, **FULL),
    "LattePipeline": tiny(videos.latte, frames=4, **FULL),
    "CogVideoXPipeline": tiny(videos.cogvideox, call={"max_sequence_length": 32}, frames=9),
    "MotifVideoPipeline": tiny(videos.motif_video, guide="", frames=9),
    "Kandinsky5T2VPipeline": tiny(videos.kandinsky5, call=LONG, frames=5),
    "SanaVideoPipeline": tiny(videos.sana_video, call=NO_ORDER, frames=9),
    "EasyAnimatePipeline": tiny(videos.easyanimate, frames=5, negative_prompt="dull", **FULL),
    # videos that start from an image
    "WanImageToVideoPipeline": tiny(saved(partial(tiny_i2v, experts=True)), frames=5, **EDIT),
    "LTXImageToVideoPipeline": tiny(videos.ltx_image, frames=9, **EDIT),
}

# the class of each id in configs/models
RELEASED = {
    "Alpha-VLLM/Lumina-Image-2.0": "Lumina2Pipeline",
    "CalamitousFelicitousness/Ideogram-4-bf16-Diffusers": "Ideogram4Pipeline",
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": "SanaPipeline",
    "HiDream-ai/HiDream-I1-Full": "HiDreamImagePipeline",
    "Kwai-Kolors/Kolors-diffusers": "KolorsPipeline",
    "Qwen/Qwen-Image-2.1": "QwenImage21Pipeline",
    "THUDM/CogView4-6B": "CogView4Pipeline",
    "baidu/ERNIE-Image": "ErnieImagePipeline",
    "fal/AuraFlow-v0.3": "AuraFlowPipeline",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": "HunyuanVideo15Pipeline",
    "krea/Krea-2-Raw": "Krea2Pipeline",
    "lodestones/Chroma1-HD": "ChromaPipeline",
    "meituan-longcat/LongCat-Image-Dev": "LongCatImagePipeline",
}


def tiny_pipeline(name: str, *, seed: int = 0) -> Any:
    """Make one, its weights drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = CLASSES[name].make()
    for part in made.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
            _wake(part)
    return made


def _wake(part: torch.nn.Module) -> None:
    """Draw weights that are made of zeros, so that everything has an effect."""
    stream = torch.Generator().manual_seed(1)
    for parameter in part.parameters():
        if not bool(parameter.any()):
            parameter.data.normal_(0, 0.05, generator=stream)


def save(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Save one -> its folder."""
    tiny_pipeline(name, seed=seed).save_pretrained(folder, safe_serialization=True)
    # diffusers takes a module of transformers for one of its own where their folders' names agree
    file = folder / "model_index.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    for part in index.values():
        if isinstance(part, list) and isinstance(part[1], str) and hasattr(transformers, part[1]):
            part[0] = "transformers"
    file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return folder


def class_at(path: str) -> str:
    """Return the class of a pipeline by its folder or id, "" of one without a tiny pipeline. Raise
    ModelError for one that is not here and not known."""
    name = RELEASED.get(path) or class_of(path)
    return name if name in CLASSES else ""
