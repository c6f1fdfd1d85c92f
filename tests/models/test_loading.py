"""Folders as the hub has them: tensors under names of other libraries, tied weights stored once,
tensors that are missing, shares of several processes.

Each is a tiny pipeline whose file is rewritten into a released model's layout; what it encodes and
decodes must stay the same to the bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import diffusers
import pytest
import torch
from adapterkit import GUIDED, PROMPTS, Folders, adapter_of, load_folder
from modelkit import edit, noise
from pretendkit import pretend_cuda
from safetensors.torch import load_file, save_file
from tiny import tiny_qwen_image, tiny_sd3, tiny_wan

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ModelError
from flowrl.models.files.loading import fill, hollow_network
from flowrl.models.sd3 import sd3

Change = Callable[[str], str | None]  # of a tensor's name; None: it is not stored


def renamed(*pairs: tuple[str, str]) -> Change:
    """Return what replaces patterns in a name, one after the other."""

    def change(name: str) -> str:
        for old, new in pairs:
            name = re.sub(old, new, name)
        return name

    return change


def without(gone: str) -> Change:
    """Return what leaves a tensor out."""
    return lambda name: None if name == gone else name


# label -> pipeline, part, settings of its config.json, change of names
LAYOUTS: dict[str, tuple[str, str, dict[str, bool], Change]] = {
    # stable-diffusion-v1-5: names of transformers 4
    "clip": ("sd15", "text_encoder", {}, renamed((r"^(?!text_model\.)", "text_model."))),
    # stable-diffusion-v1-5: the VAE's attention before diffusers 0.18
    "old vae": (
        "sd15",
        "vae",
        {},
        renamed(
            (r"(attentions\.0)\.to_q", r"\1.query"),
            (r"(attentions\.0)\.to_k", r"\1.key"),
            (r"(attentions\.0)\.to_v", r"\1.value"),
            (r"(attentions\.0)\.to_out\.0", r"\1.proj_attn"),
        ),
    ),
    # Wan: the settings say that nothing is tied, and the embedding is stored once all the same
    "umt5": (
        "wan",
        "text_encoder",
        {"tie_word_embeddings": False},
        without("encoder.embed_tokens.weight"),
    ),
    # Qwen2.5-VL as later transformers save it; the tiny one is in the names of Qwen-Image
    "new qwen": (
        "qwen_image",
        "text_encoder",
        {},
        renamed(
            (r"^model\.(?!visual|language_model)", "model.language_model."),
            (r"^visual\.", "model.visual."),
        ),
    ),
    # Mistral-3 likewise; the tiny one has the older names
    "new mistral": (
        "flux2",
        "text_encoder",
        {},
        renamed(
            (r"^language_model\.model\.", "model.language_model."),
            (r"^language_model\.lm_head", "lm_head"),
            (r"^(vision_tower|multi_modal)", r"model.\1"),
        ),
    ),
    # FLUX.2 klein: Qwen3-4B ties its output layer to the embedding
    "qwen3": (
        "flux2_klein",
        "text_encoder",
        {"tie_word_embeddings": True},
        without("lm_head.weight"),
    ),
}


@pytest.mark.parametrize("label", LAYOUTS)
def test_a_released_layout_is_read(folders: Folders, tmp_path: Path, label: str) -> None:
    name, part, settings, change = LAYOUTS[label]
    folder = copytree(folders[name], tmp_path / "model")
    edit(f"{part}/config.json", **settings)(folder)
    (file,) = (folder / part).glob("*.safetensors")
    stored = {}
    for old, tensor in load_file(file).items():
        new = change(old)
        if new is not None:
            stored[new] = tensor
    if label == "clip":  # transformers kept it before 4.31
        stored["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(stored, file, metadata={"format": "pt"})

    found, expected = load_folder(name, folder), folders.load(name)
    mine, theirs = found.encode(PROMPTS[:2]), expected.encode(PROMPTS[:2])
    assert all(torch.equal(mine[key], rows) for key, rows in theirs.items())
    x = noise(expected, 1, 32, 32)
    assert torch.equal(found.decode(x), expected.decode(x))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd3(tmp_path_factory.mktemp("models") / "sd3", t5=True)


PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "vae", "transformer")


def without_last(folder: Path, part: str) -> tuple[Path, str]:
    """Take the last tensor in the order of names, which no other is tied to, out of a part's file
    -> the file and the tensor's name."""
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    lost = sorted(name for name in tensors if not name.startswith("shared"))[-1]
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    return file, lost


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_tensor(folder: Path, tmp_path: Path, part: str) -> None:
    broken = copytree(folder, tmp_path / "broken")
    file, lost = without_last(broken, part)
    said = rf"^{file}: 1 tensors are missing .*{re.escape(lost.split('.', 1)[1])}"
    with pytest.raises(ModelError, match=said):
        sd3(path=str(broken), device="cpu")


def test_text_encoders_that_are_loaded_later(folder: Path, tmp_path: Path) -> None:
    """With a cache of texts they are read when a prompt is new."""
    broken = copytree(folder, tmp_path / "broken")
    file, _ = without_last(broken, "text_encoder")
    model = sd3(path=str(broken), device="cpu", runtime={"cache": f"{tmp_path}/texts"})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=f"^{file}: 1 tensors are missing"):
        model.encode(["a circle"])


CPU = torch.device("cpu")


@pytest.mark.parametrize("make", [tiny_sd3, tiny_wan, tiny_qwen_image])
def test_a_filled_network_is_the_one_that_diffusers_loads(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """Names, dtypes and bits in bfloat16, also of what is in no file (Wan's frequencies), of what
    diffusers keeps in float32 (Wan's norms), and from several files."""
    folder = make(tmp_path) / "transformer"
    kind = json.loads((folder / "config.json").read_text())["_class_name"]
    whole = getattr(diffusers, kind).from_pretrained(folder, torch_dtype=torch.bfloat16)
    whole.save_pretrained(folder, max_shard_size="20KB")
    (folder / "diffusion_pytorch_model.safetensors").unlink(missing_ok=True)
    network = hollow_network(folder, kind, torch.bfloat16)
    assert all(parameter.is_meta for parameter in network.parameters())
    fill(network, {"": folder}, (), device=CPU)
    made = [{**dict(n.named_parameters()), **dict(n.named_buffers())} for n in (whole, network)]
    assert [*made[0]] == [*made[1]]
    for name, tensor in made[0].items():
        assert tensor.dtype == made[1][name].dtype and torch.equal(tensor, made[1][name]), name


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = tiny_sd3(tmp_path, layers=1) / "transformer"
    network = hollow_network(folder, "SD3Transformer2DModel", torch.float32)
    network.register_parameter("more", torch.nn.Parameter(torch.empty(2, 3, device="meta")))
    with pytest.raises(ModelError, match=r"transformer.*more of shape \[2, 3\], got none"):
        fill(network, {"": folder}, (), device=CPU)


FAMILIES = ["sd3.5", "flux", "sd15", "sdxl", "wan", "qwen_image", "z_image", "flux2", "flux2_klein"]
# diffusers copies the length of Qwen's texts to the device; Z-Image's network wants texts of their
# own lengths, which the host reads
WAITS = {"qwen_image": 1, "z_image": 1}
SIZE = (32, 32)


TUNED = [(name, "lora") for name in FAMILIES] + [("flux", "full"), ("sd15", "full")]


@pytest.mark.parametrize(("name", "tune"), TUNED)
def test_a_pipeline_works_there(folders: Folders, name: str, tune: str) -> None:
    """In bfloat16, under full tuning as CUDA's autocast. Waits of a network call after the first,
    forward and backward alike: counted."""
    with pretend_cuda() as seen:
        options = {**GUIDED[adapter_of(name)], "device": "cuda", "dtype": "bfloat16"}
        model = load_folder(name, folders[name], tune=tune, **options)
        cond = model.encode(PROMPTS)
        # sampling, whose parts are all on the device
        made = rollout(
            model,
            cond,
            full(0, steps=3, noise_scale=0.5),
            cps,
            sigmas=model.sigmas(3, *SIZE),
            shape=model.latent_shape(*SIZE),
            group_size=1,
            generators=[torch.Generator().manual_seed(seed) for seed in range(3)],
        )
        x, sigma = made.x[made.leaf], torch.full((3,), 0.7, device="cuda")
        # a call without and one with a gradient
        for wanted in (False, True):
            seen.clear()
            with torch.set_grad_enabled(wanted):
                v = model.velocity(x, sigma, cond)
                if wanted:
                    v.square().mean().backward()
            assert seen.waits.total() == WAITS.get(name, 0), seen.waits
        grads = [p.grad for p in model.trainable().values() if p.grad is not None]
        images = model.decode(x)
    assert {t.device.type for t in (v, images, made.log_prob, *cond.values(), *grads)} == {"cuda"}
    assert len(grads) > len(model.trainable()) / 2
