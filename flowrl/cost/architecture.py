"""A pipeline's parts and their settings, and networks built from these without a weight.

Settings come from the JSON files of the model's folder (or of its copy in the Hugging Face cache),
or from the table of released models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import nn

from flowrl.config.load import Config
from flowrl.core.devices import named_device
from flowrl.core.errors import FlowRLError, ModelError
from flowrl.core.files import read_json
from flowrl.core.prompt_files import ENDINGS
from flowrl.core.prompts import load_prompts
from flowrl.core.shipped_files import find_resource
from flowrl.cost.released_models import RELEASED, TYPICAL, WeightlessPart
from flowrl.evaluation.sources import source_paths
from flowrl.models import flux2, qwen_image, wan, z_image
from flowrl.models.adapter import check_size
from flowrl.models.files.single import converted
from flowrl.models.files.weights import check_plain
from flowrl.models.flow_matching import PATCH
from flowrl.models.loading import locate
from flowrl.models.lora import JOINT_ATTENTION, UNET_ATTENTION
from flowrl.models.options import PipelineOptions, Tuning, checked_options, pick_tuning

FLUX = ("flux", "flux_kontext")  # adapters of FLUX.1's network
QWEN = ("qwen_image", "qwen_edit", "qwen_edit_plus")  # of Qwen-Image's
_UNET = "UNet2DConditionModel"
_FLUX2 = "Flux2Transformer2DModel"
_KIND = {
    "sd3": "SD3Transformer2DModel",
    "flux": "FluxTransformer2DModel",
    "flux_kontext": "FluxTransformer2DModel",
    "sd15": _UNET,
    "sdxl": _UNET,
    **dict.fromkeys(QWEN, "QwenImageTransformer2DModel"),
    "z_image": "ZImageTransformer2DModel",
    "flux2": _FLUX2,
    "flux2_klein": _FLUX2,
    "wan": "WanTransformer3DModel",
    "wan_i2v": "WanTransformer3DModel",
}
# the part of each pipeline that is trained
NETWORK = {fn: "unet" if kind == _UNET else "transformer" for fn, kind in _KIND.items()}
# the layers that get LoRA if a config names none; of other kinds the joint attention
_TARGETS: dict[str, Sequence[str]] = {
    "sd15": UNET_ATTENTION,
    "sdxl": UNET_ATTENTION,
    **dict.fromkeys(QWEN, qwen_image.TARGETS),
    "z_image": z_image.TARGETS,
    "flux2": flux2.TARGETS,
    "flux2_klein": flux2.TARGETS,
    "wan": wan.TARGETS,
    "wan_i2v": wan.TARGETS,
}
SECOND = "transformer_2"  # Wan 2.2's second expert
OTHERS = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder")
# language models read the prompts, or T5 alone
LANGUAGE = (*QWEN, "z_image", "flux2", "flux2_klein", "wan", "wan_i2v")
VIDEO = ("wan", "wan_i2v")  # latents with time; VAE and image encoder stay in float32
WIDE = ("vae", "image_encoder")


class Architecture(NamedTuple):
    """What is known of a pipeline before its weights are read."""

    origin: str  # the folder, or the name of the released model; for messages
    parts: dict[str, WeightlessPart]
    # False: another model of the same kind, whose latents and embeddings have the same sizes
    known: bool

    def part(self, name: str) -> WeightlessPart:
        """Return one part. Raises ModelError that lists what there is."""
        if name not in self.parts:
            where = f"{self.origin}/model_index.json"
            raise ModelError(
                f"{where}: expected a part named {name!r}, got {', '.join(self.parts)}"
            )
        return self.parts[name]


def architecture_of(config: Config) -> Architecture:
    """Return the architecture of a config's model, which must be one of NETWORK's. Raises
    ModelError."""
    path = str(config.model.kwargs["path"])
    folder, known = find_folder(path), True
    if folder is not None:
        origin, parts = str(folder), _read_parts(folder)
    else:
        origin, known = f"the released {path}", path in RELEASED
        parts = RELEASED[path if known else TYPICAL[config.model.fn]]
    if not config.model.kwargs.get("t5", True):
        parts = {name: part for name, part in parts.items() if name != "text_encoder_3"}
    found, name = Architecture(origin, parts, known), NETWORK[config.model.fn]
    got, wanted = found.part(name).kind, _KIND[config.model.fn]
    if got != wanted:
        raise ModelError(f"{origin}/model_index.json: expected {name} to be {wanted}, got {got}")
    return found


def experts_of(architecture: Architecture) -> int:
    """Return how many networks of one shape are trained: Wan 2.2 has two, which are alike."""
    return 2 if SECOND in architecture.parts else 1


def find_folder(path: str) -> Path | None:
    """Return the folder of a pipeline, or of its copy in the Hugging Face cache; None for an id
    that is not there, and for a single file that was not converted yet."""
    single = find_resource(path)
    if single is not None and single.is_file() and converted(single) is None:
        return None
    source = locate(path)
    if isinstance(source, Path):
        return source
    index = try_to_load_from_cache(source, "model_index.json")
    found = Path(index).parent if isinstance(index, str) else None
    whole = False
    for name in NETWORK.values():
        whole |= found is not None and (found / name / "config.json").exists()
    return found if whole else None


def tuning_of(config: Config) -> Tuning:
    """Return a model's checked options of tuning; its device is this machine's. Raises
    ConfigError."""
    kwargs = config.model.kwargs
    names = ("path", "tune", "lora", "layers", "dtype", "seed", "runtime")
    # the run may be meant for another machine
    named_device(str(kwargs.get("device", "auto")), "model")
    options = checked_options(
        PipelineOptions, **{name: kwargs[name] for name in names}, device="auto"
    )
    return pick_tuning(options, _TARGETS.get(config.model.fn, JOINT_ATTENTION))


def latent_shape(config: Config, architecture: Architecture) -> tuple[int, ...]:
    """Return [C, h, w], of videos [C, t, h, w], of one latent, as the adapter will have it. Raises
    ModelError for a size that it will refuse."""
    fn, vae = config.model.fn, architecture.part("vae").settings
    # videos: the VAE keeps the first frame, and joins every `time` frames after it into one
    if fn in VIDEO:
        side, time = vae.get("scale_factor_spatial", 8), vae.get("scale_factor_temporal", 4)
        frames = int(config.model.kwargs["frames"])
        wan.check_frames(frames, time)
        moments = (frames - 1) // time + 1
        for unit in (wan.UNIT, side * PATCH):
            check_size(config.image.height, config.image.width, unit=unit)
        sides = config.image.height // side, config.image.width // side
        return int(vae.get("z_dim", 16)), moments, *sides
    # images: each level of the VAE but one halves the sides; FLUX.2 also packs 2 x 2 latents
    blocks = vae.get("block_out_channels")
    factor = 2 ** (len(vae["temperal_downsample"]) if blocks is None else len(blocks) - 1)
    factor *= PATCH if fn.startswith("flux2") else 1
    # an image has to divide into patches, and SD3's table of positions has an end
    settings = architecture.part(NETWORK[fn]).settings
    size, most = (config.image.height, config.image.width), settings.get("pos_embed_max_size")
    check_size(*size, unit=_unit(fn, factor, settings), most=most if fn == "sd3" else None)
    # FLUX.1 and Qwen-Image pack 2 x 2 latents into channels on the way into the network
    channels = settings["in_channels"]
    channels //= PATCH**2 if fn in (*FLUX, *QWEN) else 1
    return int(channels), size[0] // factor, size[1] // factor


def _unit(fn: str, factor: int, settings: dict[str, Any]) -> int:
    """Return the pixels that a side is a multiple of; `factor` of them are one latent."""
    if NETWORK[fn] == "unet":
        return max(8, factor)  # as the pipelines ask for
    patch = settings.get("patch_size", PATCH) if fn == "sd3" else PATCH
    return factor * (1 if fn.startswith("flux2") else int(patch))


def source_shape(config: Config, latent: tuple[int, ...]) -> tuple[int, int] | None:
    """Return rows and columns of the latents of the one source that a prompt of an editing model is
    taken to have; None for other models. FLUX.2's references, as many as the first prompt has, are
    laid under each other."""
    if config.model.fn == "flux_kontext":
        return latent[1], latent[2]
    if config.model.fn.startswith("flux2"):
        count = references(config.prompts.train)
        return (count * latent[1], latent[2]) if count else None
    if config.model.fn not in QWEN[1:]:
        return None
    # imported here, since it takes seconds
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    area, factor = config.model.kwargs["source_pixels"], config.image.height // latent[1]
    width, height, _ = calculate_dimensions(area, config.image.width / config.image.height)
    return height // factor, width // factor


def references(path: str) -> int:
    """Return how many images the first prompt of a list starts from; 0 where no file is there."""
    if Path(path).suffix not in ENDINGS:
        return 0
    try:
        return len(source_paths(load_prompts(path), 0))
    except FlowRLError:  # whoever trains hears of it
        return 0


class TextShape(NamedTuple):
    """The embeddings of one prompt, as `encode` of the adapter makes them."""

    tokens: int
    width: int
    pooled: int  # numbers besides the tokens; 0 = none


def text_shape(config: Config, architecture: Architecture) -> TextShape:
    """Return the sizes of one prompt's embeddings."""
    settings = architecture.part(NETWORK[config.model.fn]).settings
    read = config.model.kwargs.get("max_sequence_length", 0)
    if config.model.fn in LANGUAGE:
        names = ("joint_attention_dim", "cap_feat_dim", "text_dim")
        return TextShape(read, next(settings[name] for name in names if settings.get(name)), 0)
    tokens = (0 if config.model.fn in FLUX else 77) + read
    if NETWORK[config.model.fn] == "transformer":
        return TextShape(tokens, settings["joint_attention_dim"], settings["pooled_projection_dim"])
    sizes = 6 * (settings.get("addition_time_embed_dim") or 0)  # SDXL: height and width, thrice
    return TextShape(tokens, settings["cross_attention_dim"], _input_width(settings) - sizes)


def build(architecture: Architecture, name: str, device: str = "meta") -> nn.Module:
    """Make one part with random weights, without memory for them on "meta". Raises ModelError."""
    part = architecture.part(name)
    # from the settings alone: both libraries draw random weights
    try:
        with torch.device(device):
            if part.library == "diffusers":
                made: nn.Module = getattr(diffusers, part.kind).from_config(part.settings)
                return made
            kind = getattr(transformers, part.kind)
            encoder: nn.Module = kind(kind.config_class.from_dict(part.settings))
            return encoder
    # the libraries raise every kind of error over a config that is not theirs
    except Exception as error:
        where = f"{architecture.origin}/{name}"
        raise ModelError(
            f"{where}: no {part.kind} can be made of its config.json: {error}"
        ) from error


def count(network: nn.Module) -> int:
    """Return the number of a network's parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def _input_width(settings: dict[str, Any]) -> int:
    return int(settings.get("projection_class_embeddings_input_dim") or 0)


def _read_parts(folder: Path) -> dict[str, WeightlessPart]:
    """Read what a folder's JSON files say of the parts that are run."""
    index = _read(folder / "model_index.json")
    pairs = {name: entry for name, entry in index.items() if isinstance(entry, list)}
    entries = {name: pair for name, pair in pairs.items() if len(pair) == 2 and pair[0]}
    parts = {}
    run = ("transformer", SECOND, "unet", "scheduler", *OTHERS)
    for name in [name for name in run if name in entries]:
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        library, kind = entries[name][:2]
        parts[name] = WeightlessPart(library, kind, _read(folder / name / file))
        check_plain(folder / name, parts[name].settings)
    return parts


def _read(file: Path) -> dict[str, Any]:
    try:
        # -Infinity is what diffusers writes of a scheduler's lambda_min_clipped
        found: dict[str, Any] = read_json(file, dict[str, Any], error=ValueError, constants=True)
        return found
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file}: expected the JSON file of a diffusers pipeline: {error}"
        ) from error
