"""Folders whose files and settings say different things, folders with variants alone, and single
files: read whole, or refused with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
import torch
from adapterkit import ADAPTERS, PROMPTS, Folders, adapter_of, load_folder
from diffusers import StableDiffusionXLPipeline
from modelkit import edit, noise
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.config.load import load_config
from flowrl.core.errors import ModelError
from flowrl.cost.architecture import architecture_of, find_folder
from flowrl.models.files.loading import locate
from flowrl.models.files.single import convert
from flowrl.models.files.weights import weight_files
from flowrl.runs.export.merge import merge_lora, write_pipeline

NAMES = ["sd3.5", "flux", "sd15", "sdxl", "wan", "qwen_image", "z_image", "flux2", "flux2_klein"]


def rewritten(folder: Path, part: str, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Change the tensors of a part's file in place."""
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    tensors = change(tensors) or tensors
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def parts_of(folder: Path) -> list[str]:
    return sorted({file.parent.name for file in folder.rglob("*.safetensors")})


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_no_part_takes(folders: Folders, tmp_path: Path, name: str) -> None:
    """In every part of every model."""
    for part in parts_of(folders[name]):
        folder = copytree(folders[name], tmp_path / part)
        file = rewritten(folder, part, lambda t: t.update({"more.weight": torch.ones(2)}))
        said = rf"^{file}: 1 tensors in it are not taken by the network .*more\.weight"
        with pytest.raises(ModelError, match=said):
            load_folder(name, folder).encode(["a cat"])


FEWER: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "norms": ("sd3.5", "transformer", {"qk_norm": None}, "attn.norm_"),
    "blocks": ("flux", "transformer", {"num_single_layers": 1}, "single_transformer_blocks.1."),
    "guidance": ("flux", "transformer", {"guidance_embeds": False}, "guidance_embedder"),
    "layers": ("sd15", "text_encoder", {"num_hidden_layers": 1}, "layers.1."),
}


@pytest.mark.parametrize("label", FEWER)
def test_settings_that_name_less_than_the_file_has(
    folders: Folders, tmp_path: Path, label: str
) -> None:
    name, part, settings, lost = FEWER[label]
    folder = copytree(folders[name], tmp_path / "model")
    edit(f"{part}/config.json", **settings)(folder)
    with pytest.raises(ModelError, match=rf"tensors in it are not taken by the network .*{lost}"):
        load_folder(name, folder).encode(["a cat"])


def scaled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of 8 bits with a scale beside each, as ComfyUI's fp8_scaled files."""
    found = {}
    for name, value in tensors.items():
        found[name] = value
        if value.dim() > 1 and name.endswith("weight"):
            scale = value.abs().max().clamp_min(1e-12) / 448
            found[name] = (value / scale).to(torch.float8_e4m3fn)
            found[name.removesuffix("weight") + "scale_weight"] = scale.reshape(1)
    return found


def cast(kind: torch.dtype) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return what casts all matrices as they stand, without a scale."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.to(kind) if t.dim() > 1 else t for name, t in tensors.items()}

    return change


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as GPTQ and AWQ pack them: eight numbers of 4 bits in one of 32."""
    found = {}
    for name, value in tensors.items():
        stem = name.removesuffix("weight")
        found[name if value.dim() != 2 else f"{stem}qweight"] = value
        if value.dim() == 2:
            found[f"{stem}qweight"] = torch.ones(len(value), -(-value.shape[1] // 8)).int()
            found |= {f"{stem}qzeros": torch.ones(1).int(), f"{stem}scales": torch.ones(1).half()}
    return found


def of_4_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as bitsandbytes packs them, without what it says of them beside."""
    return {n: t.byte().reshape(-1, 1) if t.dim() == 2 else t for n, t in tensors.items()}


QUANTISED: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "fp8 with scales": (scaled, "F8_E4M3"),
    "fp8": (cast(torch.float8_e4m3fn), "F8_E4M3"),
    "fp8 of the other kind": (cast(torch.float8_e5m2), "F8_E5M2"),
    "int8": (cast(torch.int8), "I8"),
    "whole numbers": (cast(torch.int64), "I64"),
    "GPTQ": (packed, "I32"),
    "bitsandbytes": (of_4_bits, "U8"),
}


PLACES = [("transformer", label) for label in QUANTISED]
PLACES += [("text_encoder_2", "fp8"), ("vae", "fp8")]


@pytest.mark.parametrize(("part", "label"), PLACES)
def test_weights_that_were_quantised(
    folders: Folders, tmp_path: Path, part: str, label: str
) -> None:
    """With scales or without: their numbers would be taken for the weights."""
    change, kind = QUANTISED[label]
    folder = copytree(folders["flux"], tmp_path / "model")
    file = rewritten(folder, part, change)
    said = rf"^{file}: .*weight holds numbers of kind {kind}: weights that were quantised"
    with pytest.raises(ModelError, match=said):
        load_folder("flux", folder).encode(["a cat"])
    with pytest.raises(ModelError, match=said):  # a plan says so, too
        architecture_of(load_config("flux/flow_grpo_fast", [f"model.path={folder}"]))


def test_settings_that_say_that_weights_were_quantised(folders: Folders, tmp_path: Path) -> None:
    folder = copytree(folders["flux"], tmp_path / "model")
    edit("transformer/config.json", quantization_config={"quant_method": "gptq"})(folder)
    with pytest.raises(ModelError, match=r"config.json: quantization_config .* quantised \(gptq\)"):
        load_folder("flux", folder)


def test_a_single_file_that_was_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_file({"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"a.safetensors: a.weight holds numbers of kind F8_E4M3"):
        load_folder("flux", tmp_path / "a.safetensors")


def test_what_is_harmless(folders: Folders, tmp_path: Path) -> None:
    """Numbers that the networks of today compute, and embeddings that are tied."""
    folder = copytree(folders["sd3.5"], tmp_path / "model")
    more = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    rewritten(folder, "text_encoder", lambda tensors: tensors.update(more))
    rewritten(
        folder,
        "text_encoder_3",
        lambda t: t.update({"encoder.embed_tokens.weight": t["shared.weight"].clone()}),
    )
    found, expected = load_folder("sd3.5", folder), folders.load("sd3.5")
    mine, theirs = found.encode(PROMPTS[:1]), expected.encode(PROMPTS[:1])
    for key, rows in theirs.items():  # where they lie in memory changes the last bit
        torch.testing.assert_close(mine[key], rows, rtol=0, atol=1e-6)


def halved(folder: Path) -> None:
    """Leave files of a variant only, as many repositories have them; one part in several files."""
    for file in [*folder.rglob("*.safetensors")]:
        tensors = {name: value.half() for name, value in load_file(file).items()}
        file.unlink()
        if file.parent.name != "transformer":
            new = file.with_name(f"{file.stem}.fp16.safetensors")
            save_file(tensors, new, metadata={"format": "pt"})
            continue
        names = sorted(tensors)
        where: dict[str, str] = {}
        for number, some in enumerate((names[::2], names[1::2]), 1):
            shard = f"{file.stem}.fp16-{number:05d}-of-00002.safetensors"
            save_file({k: tensors[k] for k in some}, file.with_name(shard), {"format": "pt"})
            where |= dict.fromkeys(some, shard)
        index = {"metadata": {"total_size": 0}, "weight_map": where}
        file.with_name(f"{file.stem}.safetensors.index.fp16.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["sd3.5", "sdxl", "wan", "flux2"])
def test_a_folder_with_a_variant_alone(folders: Folders, tmp_path: Path, name: str) -> None:
    """It is the model whose weights were rounded to float16, of which a whole pipeline can be
    written."""
    folder = copytree(folders[name], tmp_path / "model")
    halved(folder)
    model, plain = load_folder(name, folder), folders.load(name)
    want = {key: value.half() for key, value in plain.network.state_dict().items()}
    for key, value in model.network.state_dict().items():
        assert torch.equal(value.half(), want[key]), key
    x = noise(plain, 1, 32, 32)
    torch.testing.assert_close(model.decode(x), plain.decode(x), rtol=0, atol=0.02)
    (tmp_path / "new").mkdir()
    write_pipeline(folder, tmp_path / "new", changes={})
    again = load_folder(name, tmp_path / "new")
    assert torch.equal(again.decode(x), model.decode(x))
    part = "unet" if adapter_of(name) in ("sd15", "sdxl") else "transformer"
    assert weight_files(tmp_path / "new" / part).variant is None


def test_a_variant_alone_is_fetched_from_the_hub(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is stood in for: without a variant its answer has no weights."""
    whole = copytree(folders["sdxl"], tmp_path / "whole")
    halved(whole)
    bare = copytree(whole, tmp_path / "bare", ignore=ignore_patterns("*.safetensors"))
    asked: list[str | None] = []

    def download(repo: str, *, use_safetensors: bool, variant: str | None = None) -> str:
        asked.append(variant)
        return str(bare if variant is None else whole)

    monkeypatch.setattr(StableDiffusionXLPipeline, "download", download)
    index = str(bare / "model_index.json")
    monkeypatch.setattr("flowrl.models.files.loading.hf_hub_download", lambda *_: index)
    model = ADAPTERS["sdxl"]("owner/model", device="cpu")
    assert asked == [None, "fp16"]
    assert model.network.conv_in.weight.dtype == torch.float32


def test_which_files_are_read(tmp_path: Path) -> None:
    for name in ("model.bf16.safetensors", "model.fp16.safetensors"):
        (tmp_path / name).touch()
    assert weight_files(tmp_path).variant == "fp16"
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == ([tmp_path / "model.safetensors"], None)


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names of files beside it, got '\.\./secret"):
        weight_files(tmp_path)


def short(text: str) -> str:
    return text[:12]


DAMAGED = ["[" * 100_000, "[]", "3", '{"a": 1, "a": 2}', '{"transformer": []}']


@pytest.mark.parametrize("text", [*DAMAGED, '{"weight_map": {"a": [1]}}'], ids=short)
def test_a_damaged_index_of_shards_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="not an index of weights"):
        weight_files(tmp_path)


@pytest.mark.parametrize("text", DAMAGED, ids=short)
def test_a_damaged_index_of_a_pipeline_is_said(folders: Folders, tmp_path: Path, text: str) -> None:
    """Where a LoRA is merged, a model exported, and a plan made without weights."""
    base = copytree(folders["sd3.5"], tmp_path / "base")
    (base / "model_index.json").write_text(text)
    with pytest.raises(ModelError):
        merge_lora(str(base), str(tmp_path / "no.safetensors"), str(tmp_path / "merged"))
    with pytest.raises(ModelError):
        write_pipeline(base, tmp_path, changes={"transformer": {"proj_out.weight": torch.neg}})
    with pytest.raises(ModelError):
        architecture_of(load_config("sd3/flow_grpo", [f"model.path={base}"]))


def test_a_single_file_is_converted_once(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its content: a copy is not converted again, another file is. diffusers' own reader, which
    needs the hub, is stood in for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[dict[str, Any]] = []

    def read(file: str, **given: Any) -> Any:
        asked.append({"file": file, **given})
        return StableDiffusionXLPipeline.from_pretrained(folders["sdxl"])

    monkeypatch.setattr(StableDiffusionXLPipeline, "from_single_file", read)
    one, two, other = (tmp_path / f"{name}.safetensors" for name in ("one", "two", "other"))
    save_file({"a": torch.ones(2).half()}, one)
    two.write_bytes(one.read_bytes())
    save_file({"a": torch.ones(3)}, other)
    assert find_folder(str(one)) is None  # an estimate takes the released model's sizes
    with pytest.raises(ModelError, match="is converted when the model is first loaded"):
        locate(str(one))
    model, plain = load_folder("sdxl", one), folders.load("sdxl")
    load_folder("sdxl", two)
    assert len(asked) == 1 and locate(str(two)) == locate(str(one)) == find_folder(str(one))
    assert asked[0]["torch_dtype"] == torch.float16
    load_folder("sdxl", other)
    assert len(asked) == 2 and asked[1]["torch_dtype"] == torch.float32
    # two processes of a run at once: the other one has put its folder there meanwhile
    third = tmp_path / "third.safetensors"
    save_file({"a": torch.ones(4)}, third)

    def slow(file: str, **given: Any) -> Any:
        monkeypatch.setattr(StableDiffusionXLPipeline, "from_single_file", read)
        convert(third, StableDiffusionXLPipeline)
        return read(file, **given)

    monkeypatch.setattr(StableDiffusionXLPipeline, "from_single_file", slow)
    assert convert(third, StableDiffusionXLPipeline) == locate(str(third))
    for name, value in plain.network.state_dict().items():
        assert torch.equal(value, model.network.state_dict()[name])


def lora_file(folder: Path) -> Path:
    save_file({"x.lora_A.weight": torch.ones(2, 2)}, folder / "a.safetensors")
    return folder / "a.safetensors"


def model_file(folder: Path) -> Path:
    save_file({"x.weight": torch.ones(2, 2)}, folder / "a.safetensors")
    return folder / "a.safetensors"


def named(name: str) -> Callable[[Path], Path]:
    """Return what makes a file, which is the model or lies in its folder."""

    def make(folder: Path) -> Path:
        (folder / name).touch()
        return folder

    return make


OTHERS: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "gguf": ("flux", lambda f: named("a.gguf")(f) / "a.gguf", "GGUF files are packed"),
    "a folder of gguf": ("flux", named("a.gguf"), "GGUF files are packed"),
    "ckpt": ("sd15", lambda f: named("a.ckpt")(f) / "a.ckpt", "never unpickles weights"),
    "lora": ("sd3", lora_file, "a LoRA and no whole model: give it to train.start"),
    "peft": ("sd3", named("adapter_config.json"), "it holds a LoRA: give that to train.start"),
    "diffusers' lora": ("sd3", named("pytorch_lora_weights.safetensors"), "it holds a LoRA"),
    "accelerate": ("sd3", named("random_states_0.pkl"), "it is a checkpoint of accelerate"),
    "a part": ("sd3", named("config.json"), "one part of a pipeline: name the folder above"),
    "no reader": ("wan", model_file, "diffusers converts no single file to a WanPipeline"),
    "a network alone": ("sd3", model_file, "could not be converted to a StableDiffusion3Pipeline"),
}


@pytest.mark.parametrize("label", OTHERS)
def test_what_to_do_with_other_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a").mkdir()
    name, make, said = OTHERS[label]
    with pytest.raises(ModelError, match=said):
        load_folder(name, make(tmp_path / "a"))
