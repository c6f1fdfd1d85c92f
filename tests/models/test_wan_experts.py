"""Wan 2.2's two experts, and image to video, beside the pipelines of diffusers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS
from diffusers import WanPipeline
from modelkit import gradients, noise, perturb
from tinywan import tiny_i2v, tiny_wan, tiny_wan22
from torchvision.transforms.functional import to_pil_image
from wankit import SIZE, STEPS, drawn, ours, theirs

from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.models.wan import wan
from flowrl.models.wan_i2v import wan_i2v
from flowrl.runs.export.export import _choose, trained_part, write_lora, write_merged
from flowrl.runs.export.usage import SECOND_LORA_FILE

SMALL: dict[str, Any] = {"device": "cpu", "frames": 5, "lora": {"rank": 2}}
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
    asked: list[tuple[str, list[int]]] = []
    for name in ("transformer", "transformer_2"):

        def note(_: Any, __: Any, named: dict[str, Any], name: str = name) -> None:
            asked.append((name, named["timestep"].tolist()))

        hook = getattr(two.network, name).register_forward_pre_hook(note, with_kwargs=True)
        two.hooks = [*getattr(two, "hooks", []), hook]
    v = two.velocity(x, sigma, cond)
    for hook in two.hooks:
        hook.remove()
    # u and c of each row are one batch
    assert asked == [("transformer", [950, 990] * 2), ("transformer_2", [300, 874] * 2)]
    with torch.no_grad():
        for i in range(4):
            row = {name: rows[i : i + 1] for name, rows in cond.items()}
            alone = two.velocity(x[i : i + 1], sigma[i : i + 1], row)
            torch.testing.assert_close(v[i : i + 1], alone, rtol=1e-4, atol=1e-4)
    reached = {name.split(".")[0] for name in gradients(two, v.square().mean())}
    assert reached == {"transformer", "transformer_2"}
    assert len(two.trainable()) == 2 * 2 * 20  # an A and a B of each layer of both


def test_both_experts_are_exported(two: Any, tmp_path: Path) -> None:
    """LoRA in two files, each loaded by diffusers into its own expert, and both merged into a whole
    pipeline: the latents are those of the model."""
    trained = trained_part(two)
    assert trained.network == "transformer" and trained.second is not None
    with pytest.raises(ConfigError, match="the format kohya holds one network"):
        _choose(["kohya"], trained)
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
def test_videos_from_an_image_are_the_pipelines(tmp_path: Path, experts: bool) -> None:
    """One source, as the pipeline has it, and for each prompt its own, row by row."""
    folder = tiny_i2v(tmp_path, experts=experts)
    model = wan_i2v(str(folder), guidance=3.0, **SMALL)
    perturb(model, 0.05)
    image = torch.randint(0, 256, (2, 3, *SIZE), generator=torch.Generator().manual_seed(1)) / 255
    x = drawn(model, 2)
    expected = theirs(model, x[:1], PROMPTS[:1], image=to_pil_image(image[0]))
    cond = model.encode_with_sources(PROMPTS[:2], [(image[0],), (image[1],)])
    found = ours(model, {name: rows[:1] for name, rows in cond.items()}, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    turned = model.encode_with_sources(PROMPTS[1::-1], [(image[1],), (image[0],)])
    for name, rows in cond.items():
        assert torch.equal(rows, turned[name].flip(0)), name
    assert not torch.equal(cond["start"][0], cond["start"][1])
    assert ("image" in cond) == (not experts)


def test_what_does_not_fit(tmp_path: Path) -> None:
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
    with pytest.raises(DataError, match=r"one source image for each of 1 prompts, got \[0\]"):
        model.encode_with_sources(PROMPTS[:1], [()])
