"""The aesthetic predictor: its affine map against the layered net, its fingerprint, its scores."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from clipkit import (
    PROMPTS,
    add_architecture,
    batch_of,
    pil,
    random_images,
    save_open_clip,
    tiny_open_clip,
)
from safetensors.torch import save_file
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, ModelError
from rewards.aesthetic import (
    FILE,
    PUBLISHED,
    Fingerprint,
    aesthetic,
    check_published,
    collapse,
    differences,
)

IMAGES = random_images(6, 300, 227)
SHAPES = {
    0: (1024, 768),
    2: (128, 1024),
    4: (64, 128),
    6: (16, 64),
    7: (1, 16),
}  # the reference, section 4.1


def random_mlp(seed: int = 0) -> dict[str, Tensor]:
    """Draw an MLP in the published layout, with weights of about the published size."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for index, (out, into) in SHAPES.items():
        state[f"layers.{index}.weight"] = (
            torch.randn(out, into, generator=generator) * 1.8 / math.sqrt(into)
        )
        state[f"layers.{index}.bias"] = torch.randn(out, generator=generator)
    return state


def run_layers(state: dict[str, Tensor], embedding: Tensor) -> Tensor:
    """Run the net layer by layer in float64: the published module in eval mode, whose dropouts do
    nothing."""
    for index, (out, into) in SHAPES.items():
        layer = nn.Linear(into, out, dtype=torch.float64)
        part = {name: state[f"layers.{index}.{name}"].double() for name in ("weight", "bias")}
        layer.load_state_dict(part)
        embedding = layer(embedding)
    return embedding.detach().squeeze(-1)


def fingerprint_of(state: dict[str, Tensor]) -> Fingerprint:
    """Compute a fingerprint by numpy, from the layers' matrices."""
    layers = [
        (state[f"layers.{n}.weight"].double().numpy(), state[f"layers.{n}.bias"].double().numpy())
        for n in SHAPES
    ]
    matrix, offset = np.eye(768), np.zeros(768)
    for weight, bias in layers:
        matrix, offset = weight @ matrix, weight @ offset + bias
    sums = {name: float(state[name].double().numpy().sum()) for name in PUBLISHED.sums}
    w = matrix[0]
    return Fingerprint(
        "0" * 64,
        sums,
        float(offset[0]),
        float(np.linalg.norm(w)),
        float(w.sum()),
        tuple(w[:6].tolist()),
    )


class Kit:
    """A random MLP in the published container, and a random CLIP with embeddings of 768 numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.architecture = add_architecture(
            folder, "tiny-aesthetic", dimensions=768, quick_gelu=True
        )
        self.model = tiny_open_clip(self.architecture, seed=4)
        self.clip = save_open_clip(self.model, folder / "open_clip_model.safetensors")
        self.state = random_mlp()
        torch.save(self.state, folder / FILE)

    def reward(self, path: Path | None = None, **arguments: Any) -> aesthetic:
        given: dict[str, Any] = {
            "clip": str(self.clip),
            "architecture": self.architecture,
            "verify": False,
        } | arguments
        return aesthetic(path=str(path or self.folder), **given)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("aesthetic"))


def test_the_affine_map_is_the_layered_net() -> None:
    state = random_mlp(1)
    w, b = collapse(state)
    points = torch.randn(200, 768, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(points @ w + b, run_layers(state, points), rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(
        torch.tensor([b]).double(), run_layers(state, torch.zeros(1, 768).double())
    )
    first = torch.eye(768, dtype=torch.float64)[:1]  # w[0] = net(e_0) - net(0)
    torch.testing.assert_close(w[:1] + b, run_layers(state, first), rtol=1e-12, atol=1e-12)


def test_scores_are_those_of_the_public_path(kit: Kit) -> None:
    """Expected: open_clip's transform and embedding, divided by its norm, through the layers in
    float64."""
    transform = open_clip.image_transform(224, is_train=False)
    with torch.no_grad():
        embedding = torch.cat(
            [kit.model.encode_image(transform(pil(i))[None]) for i in IMAGES]
        ).double()
    expected = run_layers(kit.state, embedding / embedding.norm(dim=-1, keepdim=True))
    scores = kit.reward()(batch_of(IMAGES, PROMPTS))
    torch.testing.assert_close(scores.double(), expected, atol=2e-5, rtol=0)
    assert (
        scores.shape == (6,) and scores.dtype == torch.float32 and scores.std() > 0.01
    )  # 500 times the tolerance
    unnormalised = run_layers(kit.state, embedding)  # the common bug
    assert (unnormalised - expected).abs().min() > 0.1


def test_prompts_do_not_matter(kit: Kit) -> None:
    reward = kit.reward()
    assert torch.equal(reward(batch_of(IMAGES, PROMPTS)), reward(batch_of(IMAGES, ["other"] * 6)))


def test_bfloat16_only_touches_the_towers(kit: Kit) -> None:
    whole = kit.reward()(batch_of(IMAGES, PROMPTS))
    half = kit.reward(dtype="bfloat16")
    assert half.w.dtype == torch.float64
    torch.testing.assert_close(half(batch_of(IMAGES, PROMPTS)), whole, atol=0.1, rtol=0)


def test_published_numbers_fit_each_other() -> None:
    """Fixtures of the real file (the reference, section 4.1): scores of four embeddings follow from
    the fingerprint."""
    known = PUBLISHED
    assert known.b + known.first[0] == pytest.approx(4.545052400553648, abs=1e-8)  # e_0
    assert known.b + known.total / math.sqrt(768) == pytest.approx(
        4.883284854377319, abs=1e-12
    )  # ones / sqrt(768)
    assert known.b + known.norm == pytest.approx(23.232270621, abs=1e-8)  # w / |w|
    assert known.b - known.norm == pytest.approx(-12.758978932, abs=1e-8)  # -w / |w|


def test_a_fingerprint_tells_mlps_apart(tmp_path: Path) -> None:
    state = random_mlp(5)
    known = fingerprint_of(state)
    assert differences(state, known) == []
    assert len(differences(random_mlp(6), known)) == len(PUBLISHED.sums) + 3 + 6
    for name in state:  # also in the tensors without a published sum: the affine map sees them
        spoilt = {other: value.clone() for other, value in state.items()}
        spoilt[name].view(-1)[0] += 1e-2
        assert differences(spoilt, known), name
    save_file(state, tmp_path / "a.safetensors")  # another container of the same MLP passes
    check_published(tmp_path / "a.safetensors", state, known)
    other = random_mlp(6)
    save_file(other, tmp_path / "b.safetensors")
    digest = hashlib.sha256((tmp_path / "b.safetensors").read_bytes()).hexdigest()
    with pytest.raises(
        ModelError, match=rf"sha256 {digest[:16]}.*16 numbers differ.*verify: false"
    ):
        check_published(tmp_path / "b.safetensors", other, known)
    check_published(
        tmp_path / "b.safetensors", other, known._replace(sha256=digest)
    )  # the hash alone is enough


def test_another_mlp_is_refused_unless_the_user_says_so(kit: Kit) -> None:
    with pytest.raises(ModelError, match="expected the published predictor"):
        kit.reward(verify=True)
    with pytest.raises(ModelError, match="expected the published predictor"):
        aesthetic(path=str(kit.folder), clip=str(kit.clip), architecture=kit.architecture)
    assert kit.reward(verify=False).b == pytest.approx(fingerprint_of(kit.state).b, abs=1e-9)


def broken(how: str) -> dict[str, Tensor]:
    """Return an MLP in a layout that only looks like the published one."""
    state = random_mlp()
    if how == "prefix":
        return {f"mlp.{name}": value for name, value in state.items()}
    if how == "activations":  # Linear, ReLU, Dropout, ...: the other net of the same repository
        return {name.replace("layers.7", "layers.9"): value for name, value in state.items()}
    if how == "missing":
        del state["layers.4.bias"]
    if how == "shape":
        state["layers.0.weight"] = torch.zeros(1024, 512)
    return state


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("prefix", r"10 missing .*10 unexpected \['mlp.layers.0.bias'"),
        ("activations", r"2 missing \['layers.7.bias'.*2 unexpected \['layers.9.bias'"),
        ("missing", r"1 missing \['layers.4.bias'\]"),
        ("shape", r"layers.0.weight: expected \[1024, 768\], got \[1024, 512\]"),
    ],
)
def test_other_layouts_are_refused(kit: Kit, tmp_path: Path, how: str, message: str) -> None:
    torch.save(broken(how), tmp_path / FILE)
    with pytest.raises(ModelError, match=message):
        kit.reward(tmp_path)


def test_wrong_arguments_are_errors(kit: Kit, tmp_path: Path) -> None:
    name = add_architecture(tmp_path, "tiny-narrow", dimensions=24)
    narrow = save_open_clip(tiny_open_clip(name), tmp_path / "open_clip_model.safetensors")
    with pytest.raises(ConfigError, match="embeddings of 768 numbers, and 'tiny-narrow' makes 24"):
        kit.reward(clip=str(narrow), architecture=name)
    with pytest.raises(ModelError, match="tiny-aesthetic"):
        kit.reward(clip=str(narrow))
    with pytest.raises(ModelError, match="camenduru/improved-aesthetic-predictor"):  # no network
        aesthetic()


@pytest.mark.skipif(
    "FLOWRL_AESTHETIC" not in os.environ, reason="FLOWRL_AESTHETIC names the published file"
)
def test_the_real_file() -> None:
    """Fixtures: the reference, section 4.1 (numpy float64 on the published file)."""
    file = Path(os.environ["FLOWRL_AESTHETIC"])
    state = torch.load(file, map_location="cpu", weights_only=True)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == PUBLISHED.sha256 and not differences(
        state, PUBLISHED
    )
    w, b = collapse(state)
    wave = torch.arange(1, 769, dtype=torch.float64).sin()
    assert (w @ wave / wave.norm() + b).item() == pytest.approx(5.483880132144336, abs=1e-9)
    assert (w.argmax().item(), w.argmin().item()) == (288, 669)
