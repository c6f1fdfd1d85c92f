"""Wan 2.2 TI2V-5B from an image: the source is held as the first moment of the latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, load_folder
from modelkit import gradients, noise, perturb
from tinywan import tiny_i2v, tiny_ti2v, tiny_wan
from torchvision.transforms.functional import to_pil_image
from wankit import drawn, ours, theirs

from flowrl.core.errors import ConfigError, ModelError
from flowrl.models.wan_i2v import WanTI2V, wan_i2v

SIZE = (32, 64)
SMALL: dict[str, Any] = {"device": "cpu", "frames": 5, "lora": {"rank": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load it with weights that training has moved."""
    made = wan_i2v(str(tiny_ti2v(tmp_path_factory.mktemp("ti2v"))), guidance=3.0, **SMALL)
    perturb(made, 0.05)
    return made


def image() -> torch.Tensor:
    levels = torch.randint(0, 256, (2, 3, *SIZE), generator=torch.Generator().manual_seed(1))
    return levels / 255


def test_videos_from_an_image_are_the_pipelines(model: Any) -> None:
    """Latents and videos of WanImageToVideoPipeline with one source; each prompt has its own."""
    assert isinstance(model, WanTI2V) and model.takes_one and model.unlike_pipeline
    assert model.latent_shape(*SIZE) == (12, 2, 2, 4)
    sources, x = image(), drawn(model, 2, SIZE)
    cond = model.encode_with_sources(PROMPTS[:2], [(one,) for one in sources])
    assert cond["start"].shape == (2, 12, 1, 2, 4)
    found = ours(model, cond, 2, SIZE)
    for row in range(2):
        given = {"image": to_pil_image(sources[row]), "size": SIZE}
        expected = theirs(model, x[row : row + 1], PROMPTS[row : row + 1], **given)
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(found[:, :, :1], cond["start"], rtol=0, atol=1e-5)
    assert model.decode(found).shape == (2, 5, 3, *SIZE)


def test_the_first_moment_is_held(model: Any) -> None:
    """Its tokens have the time 0, its noise plays no part, and no weight has one in its way: by
    hand (x - start) / sigma."""
    sources, sigma = image(), torch.tensor([0.75, 0.25])
    cond = model.encode_with_sources(PROMPTS[:2], [(one,) for one in sources])
    x, told = noise(model, 2, *SIZE), list[torch.Tensor]()

    def note(_: Any, __: Any, named: dict[str, Any]) -> None:
        told.append(named["timestep"])

    hook = model.network.register_forward_pre_hook(note, with_kwargs=True)
    v = model.velocity(x, sigma, cond)
    hook.remove()
    # 2 x 4 latents a moment are 1 x 2 tokens
    assert told[0].tolist() == 2 * [[0, 0, 750, 750], [0, 0, 250, 250]]
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
    assert wan_i2v(str(tiny_i2v(tmp_path / "two", experts=True)), **SMALL).takes_one
