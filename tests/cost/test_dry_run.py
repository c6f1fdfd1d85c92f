"""A dry run against what really happens: weights are counted, not read; latents and conditioning
are as sampled; files that are missing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
from estimatekit import model_config
from huggingface_hub import constants
from PIL import Image
from tiny import tiny_flux, tiny_sd3, tiny_sd15, tiny_sdxl, tiny_wan, tiny_wan22
from torch import nn
from toykit import toy

from flowrl.cli.main import main
from flowrl.config.load import Config, load_config
from flowrl.config.sections import ImageConfig
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.prompts import load_prompts
from flowrl.cost.architecture import architecture_of, latent_shape
from flowrl.cost.memory import MemoryPart, kept_memory
from flowrl.cost.report import absent_files, dry_run, prompt_lines
from flowrl.training.guidance import is_guided
from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer


def check(config: Config) -> None:
    """Look at a config's size, as every estimate does."""
    latent_shape(config, architecture_of(config))


HUB = "nobody/no-such-model"


def parts(config: Config) -> dict[str, MemoryPart]:
    """Return the estimate by name."""
    return {part.name: part for part in kept_memory(config, check_plan(config))[0]}


def numbers(part: MemoryPart) -> int:
    """Read how many numbers a part says it has."""
    return int(part.what.partition(" ")[0].replace(",", ""))


MODELS: dict[str, tuple[Callable[..., Path], str]] = {
    "sd3": (tiny_sd3, "fn: sd3, lora: {rank: 3}"),
    "sd3, T5 and guidance": (
        partial(tiny_sd3, t5=True),
        "fn: sd3, guidance: 2.0, max_sequence_length: 5",
    ),
    "sd3 without its T5": (partial(tiny_sd3, t5=True), "fn: sd3, t5: false, dtype: bfloat16"),
    "sd3, second attention": (partial(tiny_sd3, dual=True), "fn: sd3, tune: full"),
    "flux": (tiny_flux, "fn: flux, dtype: bfloat16, max_sequence_length: 7"),
    "flux, some layers": (
        tiny_flux,
        "fn: flux, tune: full, dtype: bfloat16, layers: [attn.to_q, context_embedder]",
    ),
    "flux, true guidance": (tiny_flux, "fn: flux, true_cfg_scale: 2.0, guidance: 3.5"),
    "sd15": (tiny_sd15, "fn: sd15, guidance: 5.0"),
    "sdxl": (tiny_sdxl, "fn: sdxl, tune: full"),
    "wan": (
        tiny_wan,
        "fn: wan, frames: 5, guidance: 2.0, dtype: bfloat16, max_sequence_length: 7",
    ),
    "wan, two experts": (tiny_wan22, "fn: wan, frames: 9, lora: {rank: 3}, max_sequence_length: 7"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_counted_is_what_the_adapter_makes(tmp_path: Path, name: str) -> None:
    """Oracle: the loaded model. Its parameters by dtype and by whether they are trained, its latent
    shape and its conditioning; the folder has lost its weights when they are counted."""
    build, options = MODELS[name]
    build(tmp_path / "weights")
    config = model_config(tmp_path, f"{{{options}, path: {tmp_path}/weights, device: cpu}}")
    model: Any = config.call("model")()
    for file in (tmp_path / "weights").rglob("*.safetensors"):
        file.unlink()
    found, forecast = parts(config), check_plan(config)
    # weights
    components = model.pipeline().components
    names = [name for name in ("transformer", "transformer_2", "unet") if components.get(name)]
    weights = [p for name in names for p in components.pop(name).parameters()]
    frozen = [p for p in weights if not p.requires_grad]
    others = [part for part in components.values() if isinstance(part, nn.Module)]
    trained = model.trainable().values()
    assert numbers(found["trained weights"]) == sum(p.numel() for p in trained) > 0
    assert found["trained weights"].bytes == sum(p.nbytes for p in trained)
    assert found["frozen weights"].bytes == sum(p.nbytes for p in frozen)
    beside = sum(p.nbytes for part in others for p in part.parameters())
    assert found["VAE, text encoders"].bytes == beside
    # latents and conditioning
    shape = model.latent_shape(config.image.height, config.image.width)
    stored = found["latents"].bytes + found["latents of leaves"].bytes
    assert stored == forecast.nodes * prod(shape) * 4
    cond = model.encode(["a red dot"] * config.train.prompts)
    assert found["prompt conditioning"].bytes == sum(rows.nbytes for rows in cond.values())
    # sizes: what the adapter refuses is refused before, in the same words
    for size in [(41, 32), *([(32, 4096)] if name.startswith("sd3") else [])]:
        image = ImageConfig(height=size[0], width=size[1])
        other = replace(config, image=image)
        with pytest.raises(ModelError) as wanted:
            model.latent_shape(*size)
        with pytest.raises(ModelError, match=re.escape(str(wanted.value))):
            check(other)


def test_what_is_stored_is_what_a_rollout_leaves(tmp_path: Path) -> None:
    """Oracle: the latents, trained draws and cost of a real iteration of the toy model, through
    several plans.

    In a forest that is selected from by chance, prompts differ in how many draws share a state, so
    there the selection takes all.
    """
    for plan, group, share in (
        ("{fn: full, steps: 4, noise_scale: 0.5}", 4, 0.5),
        ("{fn: tree, steps: 5, noise_scale: 0.5, splits: [0, 2], ode_last: 1}", 4, 1.0),
        ("{fn: rake, steps: 4, noise_scale: 0.5, branch: 2, strides: [1, 2]}", 12, 1.0),
        ("{fn: comb, steps: 4, noise_scale: 0.5, size: 3, baseline: true}", 8, 0.7),
    ):
        select = f"select={{fn: fraction, share: {share}}}"
        trainer = Trainer(toy(tmp_path, f"plan={plan}", f"train.group={group}", select))
        forecast, ro = check_plan(trainer.config), trainer.sample([0, 1])
        assert forecast.nodes == len(ro.x), plan
        metrics = trainer.step()
        assert (metrics["trained"], metrics["nfe"]) == (forecast.decisions, forecast.calls), plan


def test_copies_of_the_trained_weights(tmp_path: Path) -> None:
    """Gradient 1, AdamW 2, EMA 1, and the base weights where a KL or a hybrid evaluation needs
    them; old means for the loss that asks."""
    model = f"{{fn: sd3, path: {tiny_sd3(tmp_path / 'm')}}}"
    plain = parts(model_config(tmp_path, model))
    whole = plain["trained weights"].bytes
    copies = {name: part.bytes / whole for name, part in plain.items() if name in COPIES}
    assert copies == {"gradients": 1, "AdamW's moments": 2, "averaged weights (EMA)": 1}
    assert "old means" not in plain
    for change in ("kl={fn: transition_kl, beta: 0.1}", "eval.tuned=0.5"):
        assert parts(model_config(tmp_path, model, change))[BASE].bytes == whole
    bare = parts(model_config(tmp_path, model, "train.ema=0", "eval.weights=current"))
    assert "averaged weights (EMA)" not in bare
    guard = parts(model_config(tmp_path, model, "loss={fn: guard, clip_low: 0.1, clip_high: 0.1}"))
    assert guard["old means"].bytes == guard["latents"].bytes == plain["latents"].bytes


BASE = "base weights (KL, eval.tuned)"
COPIES = ("gradients", "AdamW's moments", "averaged weights (EMA)", BASE)


def test_a_model_and_prompts_that_are_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is printed all the same, and the command fails: a run would. Sizes of the latents
    come from the released models; that nobody knows this one is said."""
    argv = ["train", str(toy(tmp_path).source), "--dry-run", "--plugin", "toykit"]
    argv += [f"model={{fn: flux, path: {HUB}, dtype: bfloat16}}", "prompts.train=no/such.txt"]
    argv += ["image={height: 720, width: 720}"]
    assert main(argv) == 2
    out, error = capsys.readouterr()
    assert "could not be trained here: no/such.txt is not here: put your own file there" in error
    unknown = (
        f"model      {HUB} is not in the cache, and it is none of the models that flux is known"
    )
    assert unknown in out and "black-forest-labs/FLUX.1-dev" in out
    assert f"the weights of {HUB} are not on this machine: parameters not counted" in out
    missing = "no/such.txt is not here: put your own file there, or set prompts.train"
    assert f"prompts    {missing}" in out and out.endswith(f"\nmissing    {missing}\n")
    assert "prompts    6 held out" in out
    assert "2 prompts x 4 images = 8 images from 8 initial noises, 4 steps" in out
    assert "nodes x 16 x 90 x 90 x 4 bytes" in out  # FLUX: 16 channels, an eighth of 720 pixels
    assert "2 rows x (512 x 4096 + 768) x 2 bytes" in out  # T5-XXL's and CLIP-L's widths


@pytest.mark.parametrize("name", ["train", "test"])
@pytest.mark.parametrize(
    ("size", "mode", "said"),
    [
        (None, "", "no such file"),
        ((16, 16), "CMYK", "expected an RGB image, got mode CMYK"),
        # of the size of what is trained on and of what is evaluated, here 16 x 16 and 16 x 32
        ((16, 48), "RGB", "aspect ratio"),
    ],
)
def test_images_that_prompts_start_from_are_looked_at(
    tmp_path: Path, name: str, size: tuple[int, int] | None, mode: str, said: str
) -> None:
    """What a run refuses before it loads the model, the dry run refuses, too; good lists pass."""
    sides, changes = {"train": (16, 16), "test": (32, 16)}, ["image={height: 16, width: 16}"]
    for key, pixels in sides.items():
        Image.new("RGB", pixels).save(tmp_path / f"{key}.png")
        row = f'{{"prompt": "{key} it", "source": "{key}.png"}}\n'
        (tmp_path / f"edit-{key}.jsonl").write_text(row)
        changes.append(f"prompts.{key}={tmp_path}/edit-{key}.jsonl")
    config = toy(tmp_path, *changes, "eval.width=32", "train.prompts=1")
    assert "prompts    1 to train on" in dry_run(config)
    bad = tmp_path / f"{name}.png"
    bad.unlink()
    if size:
        Image.new(mode, size).save(bad, format="JPEG" if mode == "CMYK" else "PNG")
    with pytest.raises(DataError, match=rf"{name}\.jsonl, line 1, source: .*{said}"):
        dry_run(config)


@pytest.mark.parametrize("model", ["sd3", "flux"])
@pytest.mark.parametrize("kind", ["geneval", "ocr"])
def test_prompts_are_there_without_a_file(model: str, kind: str) -> None:
    """Configs that need nothing but the weights: 5,440 and 553 prompts, 9,925 and 1,000, as the
    lists themselves count."""
    config = load_config(f"{model}/flow_grpo_{kind}")
    train, test = (load_prompts(f"{kind}/{name}") for name in ("train", "test"))
    said, decides = prompt_lines(config)
    assert f"{len(test) * config.eval.images:,} images decide a change" in decides
    assert f"{len(train)} to train on ({kind}/train)" in said
    assert f"{len(test)} held out ({kind}/test), {config.eval.images} images each" in said
    assert len(config.rewards) == (2 if kind == "geneval" else 1)


@pytest.mark.parametrize(
    ("fn", "shape", "conditioning"),
    [
        ("sd3", "16 x 64 x 64", "2 rows x (333 x 4096 + 2048)"),  # 77 tokens of CLIP and 256 of T5
        ("flux", "16 x 64 x 64", "2 rows x (512 x 4096 + 768)"),
        ("sd15", "4 x 64 x 64", "2 rows x (77 x 768 + 0)"),
        ("sdxl", "4 x 64 x 64", "2 rows x (77 x 2048 + 1280)"),
    ],
)
def test_released_models(tmp_path: Path, fn: str, shape: str, conditioning: str) -> None:
    """The published shapes at 512 pixels."""
    model = f"model={{fn: {fn}, path: {HUB}}}"
    found = parts(toy(tmp_path, model, "image={height: 512, width: 512}"))
    assert f" x {shape} x 4 bytes" in found["latents"].what and "trained weights" not in found
    assert found["prompt conditioning"].what.startswith(conditioning)


def test_the_calls_line(tmp_path: Path) -> None:
    """8 images in 4 steps = 32 calls; 24 states, 3 calls each, or 4 with a KL."""
    text = dry_run(toy(tmp_path))
    assert "calls      104 of the network per iteration" in text
    assert "32 while sampling, 72 while training" in text
    assert "13.0 per image" in text and "select " not in text
    kl, share = "kl={fn: transition_kl, beta: 0.1}", "select={fn: fraction, share: 0.67}"
    text = dry_run(toy(tmp_path, kl, share))
    # int(3 x 0.67) of each sample's 3
    assert "select     16 of 24 decisions are trained, from 16 states" in text
    assert "96 of the network" in text and "3 per state, and 1 under each of ref" in text


def test_guidance_by_two_branches(tmp_path: Path) -> None:
    """What FLUX's network is told is no second branch, and may be null."""
    cases = {
        "{fn: sd3, path: a/b, guidance: 4.5}": True,
        "{fn: sd3, path: a/b, guidance: 1.0}": False,
        "{fn: flux, path: a/b, guidance: 3.5}": False,
        "{fn: flux, path: a/b}": False,
        "{fn: flux, path: a/b, guidance: 3.5, true_cfg_scale: 2}": True,
    }
    for model, guided in cases.items():
        config = toy(tmp_path, f"model={model}")
        assert is_guided(config) == check_plan(config).work.guided == guided, model


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    """Found in the folder's JSON files and the config alone."""
    folder = tiny_sd3(tmp_path / "m")
    unet = tiny_sd15(tmp_path / "unet")
    (tmp_path / "broken" / "transformer").mkdir(parents=True)
    shutil.copy(folder / "model_index.json", tmp_path / "broken")
    (tmp_path / "broken" / "transformer" / "config.json").write_text("{")
    form = "config.json: expected the JSON file of a diffusers pipeline"
    part = "model_index.json: expected a part named 'transformer'"
    targets, none = f"path: {folder}, lora: {{targets: [attn.to_z]}}", "lora: {rank: 0}"
    for model, kind, words in (
        (f"fn: sd3, {targets}", ModelError, "no linear layer is named 'attn.to_z'"),
        (f"fn: sd3, path: {HUB}, {none}", ConfigError, "lora.rank: expected .*6144, got 0"),
        ("fn: sd3, path: assets/nowhere", ModelError, "no model at"),
        (f"fn: sd3, path: {tmp_path}/broken", ModelError, form),
        (f"fn: flux, path: {unet}", ModelError, part),
    ):
        with pytest.raises(kind, match=words):
            dry_run(model_config(tmp_path, f"{{{model}}}"))


def test_everything_that_is_missing_is_named() -> None:
    """The model that a reward takes by itself, weights beside a folder, and teachers."""
    for name, absent in (
        ("flux/awm", ["rewards    clip: openai/clip-vit-large-patch14"]),
        ("sdxl/spo", ["sdxl_step-aware_preference_model.bin"]),
        ("sd3/flow_opd", ["teacher    runs/sd3-geneval", "teacher    runs/sd3-ocr"]),
    ):
        said = "\n".join(each.line for each in absent_files(load_config(name)))
        assert [text for text in absent if f"{text} is not " not in said] == []


def test_a_noise_that_a_prompt_s_images_share_counts_once() -> None:
    said = "\n".join(check_plan(load_config("flux/mix_grpo")).work.lines())
    assert "384 images from 32 initial noises" in said


def test_weights_of_a_reward_that_are_not_here(tmp_path: Path) -> None:
    """A script makes them, or they are on the hub; what is there is not named."""
    reward = "rewards.step={{fn: latent_preference, path: {0}, transformer: {1}, weight: 0}}"
    here = "is not here: make it or put it there first"
    hub = "is not in the cache: the run downloads it from the hub"
    for path, said in (
        ("data/nowhere", f"step: data/nowhere {here}"),
        ("./nobody/nowhere", f"step: ./nobody/nowhere {here}"),
        (HUB, f"step: {HUB} {hub}"),
        (f"{HUB}/a.bin", f"step: {HUB}/a.bin {hub}"),
        # two parts and a file's ending: docs/rewards.md's own examples, no repository's name
        ("weights/dfn5b.bin", f"step: weights/dfn5b.bin {here}"),
        ("weights/mlp.PTH", f"step: weights/mlp.PTH {here}"),
        ("nobody/model-2.5", f"step: nobody/model-2.5 {hub}"),
        (str(tmp_path), ""),
    ):
        text = dry_run(toy(tmp_path, reward.format(path, tmp_path)))
        found = [line for line in text.splitlines() if line.startswith("rewards    step: ")]
        assert found == ([f"rewards    {said}"] if said else [])
        # a run downloads by itself; what it cannot get comes last
        assert text.endswith(f"missing    {said}") == (here in said)
        assert ("missing " in text) == (here in said)


def test_a_path_in_the_home_folder_is_looked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the rewards do, which read `~/x.pth`."""
    reward = "rewards.step={fn: latent_preference, path: ~/x.pth, transformer: a, weight: 0}"
    config = toy(tmp_path, reward)
    monkeypatch.setenv("HOME", str(tmp_path))
    said = "step: ~/x.pth is not here: make it or put it there first"
    assert [each.said for each in absent_files(config)] == [said]
    (tmp_path / "x.pth").touch()
    assert absent_files(config) == []


def test_what_was_downloaded_before_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = f"rewards.step={{fn: latent_preference, path: {HUB}, transformer: a, weight: 0}}"
    config = toy(tmp_path, reward)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert [each.downloaded for each in absent_files(config)] == [True]
    (tmp_path / "cache" / "models--nobody--no-such-model" / "snapshots").mkdir(parents=True)
    assert absent_files(config) == []


@pytest.mark.parametrize("key", ["train.start", "surrogate.begin"])
def test_start_weights_that_are_not_here(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a script or a run writes come last in the plan; others are refused as by a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "begun").mkdir(parents=True)
    for start, mend in (("runs/nowhere", "train"), ("data/nowhere.safetensors", "make")):
        config = load_config("shapes/tdm_r1", [f"{key}={start}"])
        said = f"{key}: {start} is not here: {mend} it first"
        text = dry_run(config)
        assert f"\nstart      {said}\n" in text and f"\nmissing    {said}" in text
    for start, said in (
        ("nowhere.safetensors", "cannot find 'nowhere.safetensors'"),
        ("runs/begun", "there are no weights at runs/begun"),
    ):
        with pytest.raises(ConfigError, match=f"{key}: {said}"):
            dry_run(load_config("shapes/tdm_r1", [f"{key}={start}"]))
