"""Exported runs, read back by the programs that they are for: diffusers, peft, and the card's own
code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from exportkit import KINDS, LORA, Tuned, assert_same_image, draw, plain, tuned
from modelkit import edit, perturb
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import tiny_sd3

from flowrl.core.errors import ModelError
from flowrl.models.sd3 import sd3
from flowrl.runs.export.export import (
    trained_part,
    write_kohya,
    write_lora,
    write_merged,
    write_peft,
)
from flowrl.runs.export.merge import write_pipeline

pytestmark = pytest.mark.integration
# diffusers' reader of kohya files has the widths of FLUX.1's single blocks in its code, so a tiny
# one's are left out
DOUBLE = [
    f"transformer_blocks.{i}.attn.{n}"
    for i in (0, 1)
    for n in ("to_q", "to_k", "to_v", "add_q_proj", "to_out.0")
]


@pytest.fixture(scope="module", params=list(KINDS))
def lora(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """Return each model with its LoRA."""
    name = request.param
    return tuned(name, tmp_path_factory.mktemp(name), KINDS[name].targets)


# --------------------------------------------------------------------------- each format, read back


def test_lora_is_read_by_diffusers(lora: Tuned, tmp_path: Path) -> None:
    """load_lora_weights on the plain base: another image before, the run's own after; rank and
    alpha survive."""
    pipeline = plain(lora)
    assert float((draw(pipeline, lora.kind.call["guidance"]) - lora.image).abs().max()) > 1e-3
    write_lora(lora.trained, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_lora_weights.safetensors"]
    pipeline.load_lora_weights(tmp_path)
    (config,) = getattr(pipeline, lora.kind.network).peft_config.values()
    assert (config.r, config.lora_alpha) == (4, 14.0)
    assert_same_image(lora, pipeline)


def test_peft_is_read_by_peft(lora: Tuned, tmp_path: Path) -> None:
    pipeline = plain(lora)
    write_peft(lora.trained, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    model = PeftModel.from_pretrained(getattr(pipeline, lora.kind.network), tmp_path)
    assert model.peft_config["default"].lora_alpha == 14.0
    assert_same_image(lora, pipeline)


def test_merged_is_a_pipeline(lora: Tuned, tmp_path: Path) -> None:
    """The plain class loads it by its path; what was not trained is there to the bit."""
    write_merged(lora.trained, tmp_path)
    assert_same_image(lora, plain(lora, tmp_path))
    changed = {f"{name}.weight" for name in lora.trained.layers}
    for file in lora.base.rglob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / file.relative_to(lora.base))
        assert before.keys() == after.keys()
        inside = changed if file.parent.name == lora.kind.network else set()
        assert {name for name in before if not torch.equal(before[name], after[name])} == inside
    copied = {file.relative_to(lora.base) for file in lora.base.rglob("*") if file.is_file()}
    assert {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()} == copied


def test_kohya_is_read_by_diffusers(lora: Tuned, tmp_path: Path) -> None:
    """load_lora_weights of the kohya file on the plain base gives the run's own image.

    diffusers reads no such file for SD3; there the names are compared with those that
    tests/runs/test_export_kohya.py proves.
    """
    case = tuned("flux", tmp_path, DOUBLE) if lora.kind is KINDS["flux"] else lora
    write_kohya(case.trained, tmp_path)
    if lora.kind is not KINDS["sd3"]:
        pipeline = plain(case)
        pipeline.load_lora_weights(tmp_path, weight_name="tiny-kohya.safetensors")
        assert_same_image(case, pipeline)
        return
    stems = {key.partition(".")[0] for key in load_file(tmp_path / "tiny-kohya.safetensors")}
    blocks = [f"lora_unet_joint_blocks_{i}" for i in (0, 1)]
    want = {f"{block}_{side}_attn_qkv" for block in blocks for side in ("x_block", "context_block")}
    assert stems == want | {f"{b}_x_block_attn_proj" for b in blocks} | {
        f"{blocks[0]}_context_block_attn_proj"
    }


def test_dtype(tmp_path: Path) -> None:
    """Asked for, it is that of all files; each number is the rounded one of the exact export."""
    case = tuned("sd15", tmp_path, None)
    short = case.trained._replace(dtype=torch.bfloat16)
    for write in (write_lora, write_peft, write_kohya, write_merged):
        for trained, name in ((case.trained, "exact"), (short, "short")):
            folder = tmp_path / name / write.__name__
            folder.mkdir(parents=True)
            write(trained, folder)
    for file in (tmp_path / "exact").rglob("*.safetensors"):
        exact, found = (
            load_file(file),
            load_file(tmp_path / "short" / file.relative_to(tmp_path / "exact")),
        )
        for key, value in exact.items():
            rounded = value.to(torch.bfloat16) if value.is_floating_point() else value
            assert torch.equal(found[key], rounded) and found[key].dtype == rounded.dtype, key
    assert_same_image(case, plain(case, tmp_path / "exact" / "write_merged"))


def test_merging_rounds_nothing_by_itself(tmp_path: Path) -> None:
    """From a base stored in half precision and in several files: trained weights in float32, the
    others as stored.

    Closed form: stored + alpha / rank * B A, in float32. The index of the files tells their true
    size.
    """
    base = tiny_sd3(tmp_path / "base")
    StableDiffusion3Pipeline.from_pretrained(
        base, text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float16
    ).save_pretrained(tmp_path / "half", max_shard_size="20KB")
    (tmp_path / "half" / "LICENSE.md").write_text("terms")
    shutil.copy(
        base / "vae/diffusion_pytorch_model.safetensors",
        tmp_path / "half/vae/model.fp16.safetensors",
    )
    model = sd3(str(tmp_path / "half"), lora=LORA)
    perturb(model)
    out = tmp_path / "out"
    out.mkdir()
    write_merged(trained := trained_part(model), out)
    assert (out / "LICENSE.md").read_text() == "terms" and not list(out.rglob("*.fp16.*"))
    index = json.loads(
        (out / "transformer/diffusion_pytorch_model.safetensors.index.json").read_text()
    )
    files = {*index["weight_map"].values()}
    assert len(files) > 1
    stored, found = (
        {k: v for f in files for k, v in load_file(d / "transformer" / f).items()}
        for d in (tmp_path / "half", out)
    )
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    for name, value in found.items():
        layer = trained.layers.get(name.removesuffix(".weight"))
        want = stored[name] if layer is None else stored[name].float() + 3.5 * layer.up @ layer.down
        assert value.dtype == want.dtype
        torch.testing.assert_close(value, want, rtol=0, atol=1e-6 if layer else 0)


def test_what_the_files_say_of_themselves(lora: Tuned, tmp_path: Path) -> None:
    """In the words of ModelSpec 1.0.0, beside what each reader looks for."""
    kinds = {"sd3": "stable-diffusion-3", "flux": "flux-1-dev", "sd15": "stable-diffusion-v1"}
    name = next(name for name, kind in KINDS.items() if kind is lora.kind)
    for write in (write_lora, write_peft, write_kohya, write_merged):
        (tmp_path / write.__name__).mkdir()
        write(lora.trained, tmp_path / write.__name__)
        part = lora.kind.network if write is write_merged else ""
        (file,) = (tmp_path / write.__name__ / part).glob("*.safetensors")
        with safe_open(file, framework="pt") as stored:
            about = stored.metadata()
        assert about["format"] == "pt" and about["modelspec.sai_model_spec"] == "1.0.0"
        assert about["modelspec.title"] == "tiny"
        kind = about["modelspec.architecture"]
        assert kind.endswith("/lora") == (write is not write_merged)
        assert name not in kinds or kind.removesuffix("/lora") == kinds[name]
        code = "sd-scripts" if write is write_kohya else "diffusers"
        assert about["modelspec.implementation"] == code
        predicts = "epsilon" if name in ("sd15", "sdxl") else None
        assert about.get("modelspec.prediction_type") == predicts


def test_a_part_s_name_leads_nowhere_else(tmp_path: Path) -> None:
    """Neither is read from, nor written to."""
    base = KINDS["sd3"].folder(tmp_path / "in/base")
    shutil.copytree(base / "vae", tmp_path / "in/vae")
    edit("model_index.json", **{"../vae": ["diffusers", "AutoencoderKL"]})(base)
    (tmp_path / "out/new").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"names of letters, digits and _, got '\.\./vae'"):
        write_pipeline(base, tmp_path / "out/new", changes={})
    assert [*(tmp_path / "out").iterdir()] == [tmp_path / "out/new"]
    with pytest.raises(ModelError, match=r"names of letters, digits and _, got '\.\./vae'"):
        KINDS["sd3"].load(str(base))
