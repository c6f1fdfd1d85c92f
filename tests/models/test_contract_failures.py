"""What every adapter refuses, and in which words: options, sizes, folders that do not fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from adapterkit import ADAPTERS, Folders, load_folder
from diffusers import UNet2DConditionModel
from modelkit import edit
from safetensors.torch import load_file, save_file

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, FlowRLError, ModelError
from flowrl.models.files.loading import locate

NOWHERE = "/nowhere/at/all"
EVERY = list(ADAPTERS)
TEXT = ("sd3", "flux", "wan")  # adapters of pipelines that may have T5
UNETS = ("sd15", "sdxl")


# ------------------------------------------------------------------------------------------ options

OF_ALL: list[tuple[dict[str, Any], str]] = [
    ({"guidance": float("nan")}, "guidance: expected a finite number, got nan"),
    ({"guidance": -1.0}, "guidance: expected a number of at least 0, got -1.0"),
    ({"negative_prompt": "a dog"}, "negative_prompt: has no effect"),
    ({"guidence": 1.0}, r"model has no option 'guidence'; did you mean 'guidance'.*\(there is: "),
    ({"tune": "lorra"}, "tune: expected 'lora', 'full' or 'none', got 'lorra'"),
    (
        {"tune": "full", "lora": {"rank": 4}},
        "lora has no effect unless model.tune is lora.* on a command line with model.lora=null",
    ),
    ({"lora": {"rnk": 4}}, "lora has no option 'rnk'; did you mean 'rank'"),
    ({"lora": {"rank": 0}}, "lora.rank: expected a number of at least 1, got 0"),
    ({"lora": {"rank": 6145}}, "lora.rank: expected .*6144, got 6145"),
    ({"lora": {"rank": True}}, "lora.rank: expected a whole number, got True"),
    ({"lora": {"alpha": -1}}, "lora.alpha: expected a number above 0, got -1"),
    ({"lora": {"targets": "attn.to_q"}}, "lora.targets: expected a list, got 'attn.to_q'"),
    ({"lora": {"init": "pissa"}}, "lora.init: expected 'gaussian', got 'pissa'"),
    (
        {"layers": ["proj_out"]},
        "layers has no effect unless model.tune is full, got 'lora': set.*with model.layers=null",
    ),
    ({"tune": "full", "layers": "proj_out"}, "layers: expected a list, got 'proj_out'"),
    ({"tune": "full", "layers": []}, "layers: expected a list of at least 1"),
    ({"dtype": "float8"}, "dtype: expected 'auto', 'float32', .* got 'float8'"),
    ({"dtype": "float16"}, "dtype: float16 cannot train: .* Set it to bfloat16 or float32"),
    ({"dtype": "float16", "tune": "full"}, "dtype: float16 cannot train"),
    ({"decode_batch": 0}, "decode_batch: expected a number of at least 1, got 0"),
    ({"device": "quantum"}, "device: expected 'auto', 'cpu' or"),
    # several mistakes at once: all are named
    ({"tune": "lorra", "lora": {"rnk": 4}}, r"(?s)tune: expected.*lora has no option 'rnk'"),
]
RUNTIME: list[tuple[dict[str, Any], str]] = [
    (
        {"checkpoint": True},
        r"runtime has no option 'checkpoint'; did you mean 'checkpointing'\? \(there is: a",
    ),
    ({"zzz": 1}, r"runtime has no option 'zzz' \(there is"),
    ({"checkpointing": 1}, "runtime.checkpointing: expected true or false, got 1"),
    ({"offload": None}, "runtime.offload: expected true or false, got None"),
    ({"quantize": "int4"}, "runtime.quantize: expected 'none', 'nf4' or 'int8', got 'int4'"),
    ({"cuda_graphs": True}, "runtime: cuda_graphs: .* needs compile: true"),
    (
        {"compile": True, "cuda_graphs": True, "offload": True},
        "runtime: offload: moves the network .* cannot be on with cuda_graphs: true; leave one out",
    ),
    ({"cache": ""}, "runtime.cache: expected a text that is not empty, got ''"),
    ({"attention": "flashh"}, "runtime.attention: unknown back end 'flashh'; did you mean 'flash'"),
    ({"attention": "flash_hub"}, "runtime.attention: 'flash_hub' fetches code .* never does"),
    ({"quantize": "int8", "tune": "none"}, "runtime.quantize: .* needs tune 'lora', got 'none'"),
    ({"quantize": "int8", "tune": "full"}, "runtime.quantize: .* needs tune 'lora', got 'full'"),
]
OF_SOME: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (TEXT, {"max_sequence_length": 513}, "max_sequence_length: expected .* at most 512, got 513"),
    (TEXT, {"max_sequence_length": 0}, "max_sequence_length: expected .* at least 1, got 0"),
    (("flux",), {"true_cfg_scale": 0.5}, "true_cfg_scale: expected a number of at least 1"),
    (("flux",), {"true_cfg_scale": float("inf")}, "true_cfg_scale: expected a finite number"),
    (("z_image",), {"negative_prompt": "a"}, "unless guidance is above 0, got guidance 0.0"),
    (("flux2",), {"negative_prompt": "a"}, "has no effect: the network is told its guidance"),
    (("flux",), {"negative_prompt": "a"}, "unless true_cfg_scale is above 1, got .* 1.0"),
    (UNETS, {"negative_prompt": "a"}, "unless guidance is above 1, got guidance 1.0"),
    (UNETS, {"guidance_rescale": 0.7}, "guidance_rescale: has no effect unless guidance is above"),
    (UNETS, {"guidance": 3.0, "guidance_rescale": 1.5}, "guidance_rescale: .* at most 1, got 1.5"),
    (UNETS, {"spacing": "linspace"}, "spacing: expected 'leading' or 'trailing', got 'linspace'"),
    (("sdxl",), {"original_size": [64]}, r"original_size.1: expected a value, got \[64\]"),
    (("sdxl",), {"target_size": [64, 0]}, "target_size.1: expected a number of at least 1, got 0"),
    (("sdxl",), {"crop": [-1, 0]}, "crop.0: expected a number of at least 0, got -1"),
    (("sdxl",), {"crop": [0.5, 0]}, "crop.0: expected a whole number, got 0.5"),
    (("wan",), {"frames": 0}, "frames: expected a number of at least 1, got 0"),
    (("wan",), {"flow_shift": 0.0}, "flow_shift: expected a number above 0, got 0"),
]


@pytest.mark.parametrize("fn", EVERY)
def test_wrong_options_raise_before_the_model_is_looked_for(fn: str) -> None:
    tried = list(OF_ALL)
    for options, message in RUNTIME:
        runtime = {key: value for key, value in options.items() if key != "tune"}
        tune = {"tune": options["tune"]} if "tune" in options else {}
        tried.append(({"runtime": runtime} | tune, message))
    tried.append(({"runtime": ["compile"]}, r"runtime: expected options by name, got \['compile'"))
    tried += [(options, message) for fns, options, message in OF_SOME if fn in fns]
    for options, message in tried:
        with pytest.raises(ConfigError, match=message):
            ADAPTERS[fn](NOWHERE, **options)


@pytest.mark.parametrize("option", ["skip_guidance_layers", "skip_layer_guidance_scale"])
def test_skip_layer_guidance_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        load_config("shapes/flow_grpo", [f"model={{fn: sd3, path: x, {option}: [7]}}"])


# -------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("fn", EVERY)
def test_impossible_sizes_and_steps(folders: Folders, fn: str) -> None:
    model, unit = folders.load(fn), 8 if fn in UNETS else 16
    for height, width in ((60, 64), (64, 4), (64, 0), (-16, 64)):
        message = f"multiples of {unit} pixels, got {height} x {width}"
        with pytest.raises(ModelError, match=message):
            model.latent_shape(height, width)
        with pytest.raises(ModelError, match=message):
            model.sigmas(4, height, width)
    with pytest.raises(ConfigError, match="steps: expected"):
        model.sigmas(0, 64, 64)


def test_sizes_and_steps_that_one_pipeline_cannot_make(folders: Folders) -> None:
    with pytest.raises(ModelError, match="at most 128 pixels here, got 64 x 144"):
        folders.load("sd3").sigmas(4, 64, 144)
    # one step that starts at 1 and ends at shift_terminal: diffusers divides 0 by 0, we take 1 to 0
    assert folders.load("flux linear").sigmas(1, 64, 64).tolist() == [1.0, 0.0]
    unet = folders.load("sd15")
    with pytest.raises(ConfigError, match="steps: expected 1 to 1000.*got 1001"):
        unet.sigmas(1001, 64, 64)
    with pytest.raises(ConfigError, match=r"steps: with 1000 .*starts at timestep 1000"):
        unet.sigmas(1000, 64, 64)


# ------------------------------------------------------------------------------------------ folders


def test_missing_folder_and_file_instead_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sd3 = ADAPTERS["sd3"]
    with pytest.raises(ModelError, match="no model at"):
        sd3(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="no model at"):
        sd3("assets/no-such-model")  # reads as owner/name, but names a folder of this project
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="got a file"):
        sd3(str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"no model_index.json"):
        sd3(str(tmp_path))
    # a hub id without a network
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert locate("owner/no-such-model") == "owner/no-such-model"
    message = r"'owner/no-such-model' .*could not be fetched.*HF_HUB_OFFLINE"
    with pytest.raises(ModelError, match=message):
        sd3("owner/no-such-model")


Damage = Callable[[Path], Any]
INDEX, SCHEDULER, VAE = "model_index.json", "scheduler/scheduler_config.json", "vae/config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def truncate(folder: Path) -> None:
    file = folder / "transformer" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])


def drop_tensor(folder: Path) -> None:
    file = folder / "transformer" / WEIGHTS
    tensors = load_file(file)
    del tensors["proj_out.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def reshape_tensor(folder: Path) -> None:
    file = folder / "vae" / WEIGHTS
    tensors = load_file(file)
    tensors["decoder.conv_in.bias"] = tensors["decoder.conv_in.bias"].repeat(2)
    save_file(tensors, file, metadata={"format": "pt"})


def pickle_only(folder: Path) -> None:
    file = folder / "vae" / WEIGHTS
    torch.save(load_file(file), folder / "vae/diffusion_pytorch_model.bin")
    file.unlink()


def inpainting(folder: Path) -> None:
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    UNet2DConditionModel.from_config(unet.config, in_channels=9).save_pretrained(folder / "unet")


def without(name: str) -> Damage:
    """Return what deletes a file or a folder."""

    def apply(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


TOKENIZER = r": no tokenizer files"
OTHER_CODE = ["my_code", "AutoencoderKL"]
NO_SNR = r"rescale_betas_zero_snr needs prediction_type 'v_prediction'"
DAMAGED: list[tuple[str, Damage, str]] = [
    ("sd3.5", truncate, rf"{WEIGHTS}: corrupt or truncated"),
    ("sd3.5", drop_tensor, r"1 tensors are missing .*proj_out.weight"),
    ("sd3.5", reshape_tensor, r"could not be loaded"),
    ("sd3.5", pickle_only, r"vae: no \*.safetensors file; flowrl never unpickles"),
    ("sd3.5", without("tokenizer_2/tokenizer.json"), f"tokenizer_2{TOKENIZER}"),
    ("sd3.5", without("tokenizer_3/tokenizer.json"), f"tokenizer_3{TOKENIZER}"),
    (
        "sd3.5",
        lambda folder: (folder / "tokenizer_2/tokenizer.json").write_text('{"model":'),
        r"tokenizer_2/tokenizer\.json: not valid JSON",
    ),
    ("sd3.5", without("text_encoder"), r"text_encoder: missing"),
    ("sd3.5", without(VAE), r"vae: no config.json"),
    ("sd3.5", without(SCHEDULER), r"no scheduler_config.json"),
    ("sd3.5", lambda folder: (folder / INDEX).write_text("{"), rf"{INDEX}: not valid JSON"),
    ("sd3.5", edit(INDEX, vae=[None, None]), r"expected vae to be AutoencoderKL, got None"),
    ("sd3.5", edit(INDEX, vae=["diffusers"]), r"expected vae to be \[library, class\]"),
    ("sd3.5", edit(INDEX, vae=OTHER_CODE), r"vae comes from 'my_code'"),
    ("sd3.5", edit(SCHEDULER, invert_sigmas=True), r"invert_sigmas"),
    ("sd3.5", edit(VAE, shift_factor=None), r"must set scaling_factor and shift_factor"),
    ("flux", edit(INDEX, _class_name="FluxFillPipeline"), r"expected _class_name 'FluxPipeline'"),
    (
        "flux",
        edit(INDEX, transformer=["diffusers", "SD3Transformer2DModel"]),
        r"to be FluxTransformer2DModel",
    ),
    ("flux", edit(INDEX, text_encoder_2=[None, None]), r"to be T5EncoderModel, got None"),
    ("flux", edit("transformer/config.json", patch_size=2), r"patch_size 1|could not be loaded"),
    ("flux", edit(SCHEDULER, invert_sigmas=True), r"invert_sigmas"),
    ("sd15", edit(INDEX, scheduler=["diffusers", "LCMScheduler"]), r"to be DDIMScheduler"),
    ("sd15", edit(SCHEDULER, prediction_type="sample"), r"prediction_type .*got 'sample'"),
    ("sd15", edit(SCHEDULER, prediction_type="flow_prediction"), r"got 'flow_prediction'"),
    ("sd15", edit(SCHEDULER, rescale_betas_zero_snr=True), NO_SNR),
    ("sd15", edit(SCHEDULER, timestep_spacing="linspace"), r"'linspace'.*set spacing to 'leading'"),
    ("sd15", edit(SCHEDULER, thresholding=True), r"clip_sample and thresholding must be false"),
    (
        "sd15",
        edit(SCHEDULER, trained_betas=[0.01] * 5 + [0.0] * 5),
        r"noise must rise with every training timestep",
    ),
    ("sd15", inpainting, r"same number of latent channels, in and out, got 4, 9 and 4; a UNet for"),
    ("sdxl", edit(INDEX, text_encoder=[None, None]), r"to be CLIPTextModel, got None"),
    ("sdxl", edit(SCHEDULER, clip_sample=True), r"clip_sample and thresholding must be false"),
    ("sdxl", edit(VAE, latents_mean=[0.0] * 4), r"latents_mean or latents_std"),
    (
        "sdxl",
        edit("unet/config.json", addition_time_embed_dim=16),
        r"expects 64 numbers .* its config makes 112",
    ),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGED)
def test_damaged_folders(
    folders: Folders, tmp_path: Path, name: str, damage: Damage, message: str
) -> None:
    broken = Path(shutil.copytree(folders[name], tmp_path / "model"))
    damage(broken)
    with pytest.raises(ModelError, match=message) as caught:
        load_folder(name, broken)
    assert isinstance(caught.value, FlowRLError)
    assert name in UNETS or str(broken) in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "other"), [("sd3", "sd15"), ("flux", "sd3"), ("sd15", "sdxl"), ("sdxl", "flux")]
)
def test_another_pipeline_is_refused(folders: Folders, fn: str, other: str) -> None:
    with pytest.raises(ModelError, match=r"expected _class_name '.*', got '.*another adapter"):
        load_folder(fn, folders[other])
