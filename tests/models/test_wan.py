"""Wan beyond the contract battery: its grid and times, its frames, videos from an image, two
experts, what it refuses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, Folders, load_folder
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
from lorakit import added
from modelkit import edit, gradients, noise, perturb, told
from safetensors.torch import load_file, save_file
from tiny import UNIPC, tiny_i2v, tiny_ti2v, tiny_wan, tiny_wan22
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from transformers import CLIPVisionModel, CLIPVisionModelWithProjection
from wankit import SIZE, STEPS, drawn, ours, theirs

from flowrl.algorithms.transitions import flow_sde
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.models.files.loading import PipelinePart, load_pipeline
from flowrl.models.files.lora_read import SECOND_LORA_FILE
from flowrl.models.wan import PARTS, wan
from flowrl.models.wan_i2v import CLIP_VISION, IMAGE_ENCODER, WanTI2V, wan_i2v
from flowrl.runs.export.export import _choose, trained_part, write_lora, write_merged
from flowrl.training.start_weights import start_from

# shift 3, ten steps: diffusers 0.42.1, as the reference has it to seven digits
SIGMAS = [0.999999, 0.964324, 0.9231657, 0.8751562, 0.8184296]
SIGMAS += [0.7503748, 0.6672218, 0.5633196, 0.4297945, 0.2518722, 0.0]
TIMES = [999, 964, 923, 875, 818, 750, 667, 563, 429, 251]


def test_grid_and_times_are_the_published_ones(folders: Folders) -> None:
    model = folders.load("wan", tune="none")
    sigmas = model.sigmas(10, 32, 32)
    torch.testing.assert_close(sigmas, torch.tensor(SIGMAS), rtol=0, atol=1e-6)
    assert model.time(sigmas[:-1]).tolist() == TIMES


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 7.0])
def test_times_are_the_schedulers_for_any_number_of_steps(folders: Folders, shift: float) -> None:
    """From float32 sigmas. Without a shift, 1000 sigma may be a whole number, up to rounding in
    float64, which the scheduler cuts off by one: once here, for 3 steps."""
    model = folders.load("wan", tune="none", flow_shift=shift)
    scheduler = UniPCMultistepScheduler(**(UNIPC | {"flow_shift": shift}))
    other = 0
    for steps in range(1, 61):
        scheduler.set_timesteps(steps)
        sigmas = model.sigmas(steps, 32, 32)
        assert torch.equal(sigmas, scheduler.sigmas)
        other += int((model.time(sigmas[:-1]) != scheduler.timesteps).sum())
    assert other == 0 or shift == 1.0


def test_noise_at_the_first_sigma_is_that_of_pure_noise(folders: Folders) -> None:
    """sigma .999999 counts as 1; Flow-GRPO's formula gives a std of 170 there at a = 0.9."""
    sigmas = folders.load("wan", tune="none").sigmas(10, 32, 32)
    x = torch.ones(1, 4)
    scale = torch.tensor([0.9])
    step = flow_sde(x, 0.1 * x, sigmas[:1], sigmas[1:2], scale)
    exact = flow_sde(x, 0.1 * x, torch.ones(1), sigmas[1:2], scale)
    torch.testing.assert_close(step.std, exact.std, rtol=1e-4, atol=0)
    torch.testing.assert_close(step.mean, exact.mean, rtol=1e-4, atol=1e-4)
    # g = a sqrt(sigma / (1 - sigma_next)), std = g sqrt(1 - sigma_next)
    assert float(step.std) == pytest.approx(0.9, rel=1e-4)


def test_frames_that_the_vae_cannot_take_are_refused_at_load(folders: Folders) -> None:
    for frames, near in ((2, "1 or 5"), (6, "5 or 9"), (80, "77 or 81")):
        message = f"model.frames: .* multiple of 4 frames, got {frames}; take {near}"
        with pytest.raises(ModelError, match=message):
            wan(str(folders["wan"]), device="cpu", frames=frames)


def test_latents_are_where_decoding_starts(folders: Folders) -> None:
    """The inverse scale and the order of axes: what the VAE itself makes of the pixels."""
    model = folders.load("wan", tune="none", frames=9, decode_batch=1)
    videos = torch.rand(2, 9, 3, 16, 32, generator=torch.Generator().manual_seed(0))
    latents = model.latents(videos)
    assert latents.shape == (2, *model.latent_shape(16, 32))
    vae = model.pipeline().vae
    with torch.no_grad():
        raw = vae.encode(2 * videos.transpose(1, 2) - 1).latent_dist.mode()
        again = vae.decode(raw).sample.transpose(1, 2) / 2 + 0.5
        torch.testing.assert_close(model.decode(latents), again, rtol=0, atol=1e-5)
    image = folders.load("wan", tune="none", frames=1)
    assert image.decode(image.latents(videos[:, 0])).shape == (2, 3, 16, 32)


def test_other_schedulers_and_channels_are_refused(folders: Folders, tmp_path: Path) -> None:
    file = "scheduler/scheduler_config.json"
    for change, message in (
        (edit(file, use_flow_sigmas=False), "expected UniPC with flow_prediction"),
        (edit(file, prediction_type="epsilon"), "got one that predicts epsilon"),
        (edit(file, use_karras_sigmas=True), "got one with use_karras_sigmas"),
    ):
        folder = tmp_path / message.replace(" ", "-")
        shutil.copytree(folders["wan"], folder)
        change(folder)
        with pytest.raises(ModelError, match=message):
            wan(str(folder), device="cpu", frames=5)


WIDE = (32, 64)
SMALL: dict[str, Any] = {"device": "cpu", "frames": 5, "lora": {"rank": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load it with weights that training has moved."""
    made = wan_i2v(str(tiny_ti2v(tmp_path_factory.mktemp("ti2v"))), guidance=3.0, **SMALL)
    perturb(made, 0.05)
    return made


def images(*shape: int) -> Tensor:
    """Draw images in 8-bit steps."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)) / 255


def test_videos_from_an_image_are_the_pipelines(model: Any) -> None:
    """Latents and videos of WanImageToVideoPipeline with one source; each prompt has its own."""
    assert isinstance(model, WanTI2V) and model.unlike_pipeline
    assert model.latent_shape(*WIDE) == (12, 2, 2, 4)
    sources, x = images(2, 3, *WIDE), drawn(model, 2, WIDE)
    cond = model.encode_with_sources(PROMPTS[:2], [(one,) for one in sources])
    assert cond["start"].shape == (2, 12, 1, 2, 4)
    found = ours(model, cond, 2, WIDE)
    for row in range(2):
        given = {"image": to_pil_image(sources[row]), "size": WIDE}
        expected = theirs(model, x[row : row + 1], PROMPTS[row : row + 1], **given)
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(found[:, :, :1], cond["start"], rtol=0, atol=1e-5)
    assert model.decode(found).shape == (2, 5, 3, *WIDE)


def test_the_first_moment_is_held(model: Any) -> None:
    """Its tokens have the time 0, its noise plays no part, and no weight has one in its way: by
    hand (x - start) / sigma."""
    x, sigma = noise(model, 2, *WIDE), torch.tensor([0.75, 0.25])
    cond = model.encode_with_sources(PROMPTS[:2], [(one,) for one in images(2, 3, *WIDE)])
    with told(model.network) as seen:
        v = model.velocity(x, sigma, cond)
    # 2 x 4 latents a moment are 1 x 2 tokens
    assert seen[0]["timestep"].tolist() == 2 * [[0, 0, 750, 750], [0, 0, 250, 250]]
    way = (x[:, :, :1] - cond["start"]) / sigma.view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(v[:, :, :1], way, rtol=1e-5, atol=1e-5)
    other = x.clone()
    other[:, :, 0] += 1
    assert torch.equal(model.velocity(other, sigma, cond)[:, :, 1:], v[:, :, 1:])
    assert gradients(model, v[:, :, 1:].square().mean())
    held = torch.autograd.grad(
        v[:, :, :1].sum(), [*model.trainable().values()], allow_unused=True, retain_graph=True
    )
    assert not any(one is not None and one.any() for one in held)


def test_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.frames: .* holds the source as the first frame"):
        wan_i2v(str(tiny_ti2v(tmp_path / "ti2v")), **(SMALL | {"frames": 1}))
    with pytest.raises(ModelError, match="text to video is fn wan"):
        wan_i2v(str(tiny_wan(tmp_path / "text")), **SMALL)
    text = load_folder("wan ti2v", tmp_path / "ti2v", lora={"rank": 2})
    with pytest.raises(ModelError, match="multiple"):
        text.latent_shape(32, 48)
    assert wan_i2v(str(tiny_i2v(tmp_path / "two", experts=True)), **SMALL).frames == SMALL["frames"]


def renamed(folder: Path, change: Callable[[str], str]) -> Path:
    """Give the image encoder's tensors other names; return their file."""
    (file,) = (folder / IMAGE_ENCODER).glob("*.safetensors")
    stored = {change(name): tensor for name, tensor in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    return file


@pytest.mark.parametrize("kind", [CLIPVisionModelWithProjection, CLIPVisionModel])
@pytest.mark.parametrize("prefixed", [True, False])
def test_what_clip_sees_is_the_pipelines(tmp_path: Path, kind: Any, prefixed: bool) -> None:
    """Expected: what diffusers' own pipeline encodes, loaded before the file is renamed. The
    released indexes name the class with a projection, and their files have transformers 4's names,
    with ``vision_model.`` before them, which transformers 5 gives the plain class no more."""
    folder = tiny_i2v(tmp_path, experts=False, clip=kind)
    pipeline = WanImageToVideoPipeline.from_pretrained(folder)
    assert type(pipeline.image_encoder) is kind
    source = images(3, *SIZE)
    expected = pipeline.encode_image(to_pil_image(source), torch.device("cpu"))
    if prefixed:
        file = renamed(folder, lambda n: re.sub(r"^(?!vision_model\.|visual_)", "vision_model.", n))
        assert any(name.startswith("vision_model.") for name in load_file(file))
    cond = wan_i2v(str(folder), **SMALL).encode_with_sources(PROMPTS[:1], [(source,)])
    assert expected.std() > 0.1 and torch.equal(cond["image"], expected)


@pytest.mark.parametrize("kind", [CLIPVisionModelWithProjection, CLIPVisionModel])
def test_a_tensor_that_the_image_encoder_lacks(tmp_path: Path, kind: Any) -> None:
    """One tensor is under another name: it alone is missing, and the message names it."""
    folder = tiny_i2v(tmp_path, experts=False, clip=kind)
    lost = "encoder.layers.1.mlp.fc2.bias"
    file = renamed(folder, lambda name: name.replace(lost, "gone"))
    with pytest.raises(ModelError, match=rf"^{file}: 1 tensors are missing .*{re.escape(lost)}"):
        wan_i2v(str(folder), **SMALL)


@pytest.mark.parametrize("kind", [CLIPVisionModelWithProjection, CLIPVisionModel])
def test_the_network_alone_is_hollow(tmp_path: Path, kind: Any) -> None:
    """As FSDP loads it: the network has no numbers, the image encoder has those of the file; and
    the text encoders that are read later come alone."""
    folder = tiny_i2v(tmp_path, experts=False, clip=kind)
    loaded = load_pipeline(
        WanImageToVideoPipeline,
        str(folder),
        PARTS | {IMAGE_ENCODER: PipelinePart(CLIP_VISION, optional=True)},
        dtype=torch.float32,
        dtypes={"transformer": torch.float32, IMAGE_ENCODER: torch.float32},
        with_encoders=False,
        hollow=True,
    )
    network, seer = loaded.pipeline.transformer, loaded.pipeline.image_encoder
    assert all(parameter.is_meta for parameter in network.parameters())
    stored = WanImageToVideoPipeline.from_pretrained(folder).image_encoder.state_dict()
    assert all(torch.equal(stored[name], value) for name, value in seer.state_dict().items())
    assert loaded.encoders == ("text_encoder",) and loaded.pipeline.text_encoder is None
    later = loaded.read_encoders()
    assert later.text_encoder is not None
    assert (later.image_encoder, later.vae, later.transformer) == (None, None, None)


def test_another_image_encoder_is_refused(tmp_path: Path) -> None:
    folder = tiny_i2v(tmp_path, experts=False)
    edit("model_index.json", image_encoder=["transformers", "SiglipVisionModel"])(folder)
    with pytest.raises(ModelError, match="expected image_encoder to be CLIPVisionModelWith"):
        wan_i2v(str(folder), **SMALL)


TEXT: dict[str, Any] = SMALL | {"max_sequence_length": 64}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load two experts with weights that training has moved."""
    folder = tiny_wan22(tmp_path_factory.mktemp("wan22"))
    model = wan(str(folder), guidance=4.0, guidance_2=2.0, **TEXT)
    perturb(model)
    return model


def test_two_experts_make_the_pipelines_latents(two: Any) -> None:
    times = two.time(two.sigmas(STEPS, *SIZE)[:-1])
    assert 0 < int((times < 875).sum()) < STEPS  # both are at work
    expected = theirs(two, drawn(two, 2), PROMPTS[:2])
    found = ours(two, two.encode(PROMPTS[:2]), 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_no_call_straddles_the_boundary(two: Any) -> None:
    """Rows of both sides in turn: each by its own expert, as alone; gradients reach both."""
    x, cond = noise(two, 4, *SIZE), two.encode([PROMPTS[i % 2] for i in range(4)])
    sigma = torch.tensor([0.95, 0.3, 0.99, 0.8749])
    with told(two.network.transformer) as high, told(two.network.transformer_2) as low:
        v = two.velocity(x, sigma, cond)
    # u and c of each row are one batch
    assert [call["timestep"].tolist() for call in high] == [[950, 990] * 2]
    assert [call["timestep"].tolist() for call in low] == [[300, 874] * 2]
    with torch.no_grad():
        for i in range(4):
            row = {name: rows[i : i + 1] for name, rows in cond.items()}
            alone = two.velocity(x[i : i + 1], sigma[i : i + 1], row)
            torch.testing.assert_close(v[i : i + 1], alone, rtol=1e-4, atol=1e-4)
    reached = {name.split(".")[0] for name in gradients(two, v.square().mean())}
    assert reached == {"transformer", "transformer_2"}
    assert len(two.trainable()) == 2 * 2 * 20  # an A and a B of each layer of both


def test_both_experts_begin_with_a_folder(two: Any, tmp_path: Path) -> None:
    """What each expert's file adds arrives in that expert; one file for both is refused."""
    (tmp_path / "lora").mkdir()
    write_lora(trained_part(two), tmp_path / "lora")
    folder = str(two.pipeline().name_or_path)
    model = wan(folder, guidance=4.0, guidance_2=2.0, **TEXT)
    start_from(str(tmp_path / "lora"), model.trainable(), model=model)
    found, want = added(model), added(two)
    assert found.keys() == want.keys() and len({name.split(".")[0] for name in want}) == 2
    for name, rows in want.items():
        torch.testing.assert_close(found[name], rows, rtol=1e-5, atol=1e-6)
    with pytest.raises(ModelError, match="two networks, for high and for low noise"):
        file = tmp_path / "lora" / SECOND_LORA_FILE
        start_from(str(file), model.trainable(), model=model)


def test_both_experts_are_exported(two: Any, tmp_path: Path) -> None:
    """LoRA in two files, each loaded by diffusers into its own expert, and both merged into a whole
    pipeline: the latents are those of the model."""
    trained = trained_part(two)
    assert trained.network == "transformer" and trained.second is not None
    with pytest.raises(ConfigError, match="the format peft holds one network"):
        _choose(["peft"], trained)
    (tmp_path / "merged").mkdir()
    (tmp_path / "lora").mkdir()
    write_merged(trained, tmp_path / "merged")
    write_lora(trained, tmp_path / "lora")
    base = WanPipeline.from_pretrained(two.pipeline().name_or_path)
    base.load_lora_weights(tmp_path / "lora", adapter_name="high")
    second = {"weight_name": SECOND_LORA_FILE, "load_into_transformer_2": True}
    base.load_lora_weights(tmp_path / "lora", adapter_name="low", **second)
    sums = WanPipeline.from_pretrained(tmp_path / "merged")
    x, prompts = drawn(two, 2), PROMPTS[:2]
    expected = ours(two, two.encode(prompts), 2)
    for pipe in (base, sums):
        given = SimpleNamespace(pipeline=lambda pipe=pipe: pipe, options=two.options)
        torch.testing.assert_close(theirs(given, x, prompts), expected, rtol=0, atol=1e-5)
    plain = WanPipeline.from_pretrained(two.pipeline().name_or_path)
    given = SimpleNamespace(pipeline=lambda: plain, options=two.options)
    assert float((theirs(given, x, prompts) - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("experts", [False, True])
def test_each_prompt_has_its_own_image(tmp_path: Path, experts: bool) -> None:
    """One source, as the pipeline has it, and for each prompt its own, row by row."""
    folder = tiny_i2v(tmp_path, experts=experts)
    model = wan_i2v(str(folder), guidance=3.0, **SMALL)
    perturb(model, 0.05)
    image, x = images(2, 3, *SIZE), drawn(model, 2)
    expected = theirs(model, x[:1], PROMPTS[:1], image=to_pil_image(image[0]))
    cond = model.encode_with_sources(PROMPTS[:2], [(image[0],), (image[1],)])
    found = ours(model, {name: rows[:1] for name, rows in cond.items()}, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    turned = model.encode_with_sources(PROMPTS[1::-1], [(image[1],), (image[0],)])
    for name, rows in cond.items():
        assert torch.equal(rows, turned[name].flip(0)), name
    assert not torch.equal(cond["start"][0], cond["start"][1])
    assert ("image" in cond) == (not experts)


def test_experts_and_sources_that_do_not_fit(tmp_path: Path) -> None:
    one = tiny_wan(tmp_path / "one")
    with pytest.raises(ConfigError, match="guidance_2: has no effect unless guidance is above 1"):
        wan(str(one), guidance_2=3.0, **TEXT)
    with pytest.raises(ConfigError, match="guidance_2: .* has one network"):
        wan(str(one), guidance=4.0, guidance_2=3.0, **TEXT)
    lone = tiny_wan22(tmp_path / "lone", boundary=None)
    with pytest.raises(ModelError, match="a transformer_2 with boundary_ratio None"):
        wan(str(lone), **TEXT)
    moved = tiny_i2v(tmp_path / "i2v", experts=False)
    with pytest.raises(ConfigError, match="counts on 512 tokens, got 64"):
        wan_i2v(str(moved), **TEXT)
    with pytest.raises(ModelError, match="expected _class_name 'WanPipeline'"):
        wan(str(moved), **TEXT)
    model = wan_i2v(str(moved), **SMALL)
    with pytest.raises(DataError, match="makes videos from an image, but no prompt has a source"):
        model.encode(PROMPTS[:1])
    with pytest.raises(DataError, match=r"one source for each of 1 prompts, got \[0\]"):
        model.encode_with_sources(PROMPTS[:1], [()])
