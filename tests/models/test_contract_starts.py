"""The contract battery for models whose prompts start from images and for Wan's two experts: what
the other files of the battery hold for all that start from noise alone. Parity under guidance is in
test_flux.py, test_references.py and test_wan.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, parts_of, relative_error
from modelkit import FLASH, Kernels, counted, gradients, noise, perturb
from rolloutkit import ratio_gap
from startkit import (
    STARTS,
    VIDEOS,
    Starts,
    encoded,
    sampled_from,
    size_of,
    sources,
    velocity_of,
)
from torch import nn
from torchvision.transforms.functional import to_pil_image
from trainkit import trainer_for, weights_of

from flowrl.algorithms.transitions import cps, flow_sde
from flowrl.runs.export.export import trained_part, write_merged

# whose networks the other files do not have: two in one, and one that attends to an image
NETWORKS = ("experts", "i2v")
# of the last block of Qwen-Image, whose text goes nowhere; and of its text before attention
IDLE = ("attn.add_q", "attn.norm_added_q", "attn.to_add_out", "txt_mlp", "txt_mod")


# ----------------------------------------------------------------------------------- on policy


@pytest.mark.parametrize("transition", [flow_sde, cps])
@pytest.mark.parametrize("name", [*VIDEOS, "kontext"])
def test_the_ratio_is_1_before_the_first_update(starts: Starts, name: str, transition: Any) -> None:
    """Calls of four, as in the rollout: to the bit. Of another size, or with rows from both sides
    of the boundary: to rounding, here of Kontext's in bfloat16."""
    options = {"guidance": 3.0} if name in VIDEOS else {"dtype": "bfloat16"}
    near = 1e-4 if name in VIDEOS else 0.1
    model = starts.load(name, **options)
    perturb(model, 0.05)
    ro = sampled_from(name, model, transition)
    nodes = (ro.tree.std > 0).nonzero().flatten()
    mixed = nodes[torch.arange(len(nodes)).view(-1, 4).T.flatten()]
    for some, size, limit in ((nodes, 4, 0.0), (nodes, 3, near), (mixed, 4, near)):
        for part in some.split(size):
            gap = ratio_gap(model, ro, part, transition)
            assert gap <= limit, (size, gap)


@pytest.mark.parametrize("name", STARTS)
def test_an_update_moves_all_that_is_trained(starts: Starts, tmp_path: Path, name: str) -> None:
    """Through the whole loop, from a list whose records name files."""
    model, (height, width) = starts.load(name, guidance=3.0), size_of(name)
    perturb(model)
    lists = _lists(tmp_path, name) if STARTS[name].sources else ()
    frames = [f"rewards.{r}.frames=mean" for r in ("red", "strict") if name in VIDEOS]
    small = (f"image={{height: {height}, width: {width}}}", "train.updates=1")
    trainer = trainer_for(tmp_path, *small, *lists, *frames, model=model)
    before = weights_of(trainer)
    metrics = trainer.step()
    assert metrics["on_policy_gap"] < 1e-4 and metrics["grad_norm"] > 0
    after = weights_of(trainer)
    still = {key for key, value in before.items() if torch.equal(value, after[key])}
    for key in still:
        assert any(part in key for part in IDLE), key


def _lists(folder: Path, name: str) -> tuple[str, ...]:
    rows = []
    for i, images in enumerate(sources(name, 2)):
        files = [f"{i}-{j}.png" for j in range(len(images))]
        for file, image in zip(files, images, strict=True):
            to_pil_image(image).save(folder / file)
        rows.append(f'{{"prompt": "{PROMPTS[i]}", "source": {files}}}\n'.replace("'", '"'))
    (folder / "edits.jsonl").write_text("".join(rows))
    return tuple(f"prompts.{use}={folder}/edits.jsonl" for use in ("train", "test"))


# ----------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize("name", STARTS)
def test_gradients_reach_all_that_is_trained_and_nothing_else(
    starts: Starts, name: str, tune: str
) -> None:
    """Full tuning trains every weight of the network and of nothing else, named layers those
    alone, and all of them are float32 under a short dtype."""
    model = starts.load(name, tune=tune, guidance=3.0)
    perturb(model, 0.02)
    params = model.trainable()
    found = gradients(model, velocity_of(name, model).square().mean())
    assert all(bool(grad.isfinite().all()) for grad in found.values())
    still = {key for key, grad in found.items() if not bool(grad.any())}
    for key in still:
        assert any(part in key for part in IDLE), key
    trained = set()
    for part in parts_of(model):
        trained |= {id(p) for p in part.parameters() if p.requires_grad}
    assert trained == set(map(id, params.values()))
    if tune == "full":
        assert set(params) == {key for key, _ in model.network.named_parameters()}
        last = "proj_out" if name == "kontext" else "attn1.to_k"
        last = "img_mlp.net.2" if name.startswith("qwen") else last
        chosen = starts.load(name, tune="full", layers=[last]).trainable()
        assert chosen and all(f".{last}." in f".{key}" for key in chosen)
        assert {key for key in params if f".{last}." in f".{key}"} == set(chosen)


@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_short_base_keeps_trained_weights_in_float32(starts: Starts, name: str, tune: str) -> None:
    """bfloat16 keeps 8 bits: about 1 % per value after a few layers; equal bits would mean that it
    was never used."""
    short, exact = starts.load(name, tune=tune, dtype="bfloat16"), starts.load(name, tune=tune)
    assert {param.dtype for param in short.trainable().values()} == {torch.float32}
    v = velocity_of(name, short)
    assert v.dtype == torch.float32
    assert 1e-5 < relative_error(v, velocity_of(name, exact)) < 0.05
    found = gradients(short, v.square().sum()).values()
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in found)


EXPORTED = [(name, "lora") for name in STARTS] + [("kontext", "full"), ("experts", "full")]


@pytest.mark.parametrize(("name", "tune"), EXPORTED)
def test_what_is_exported_is_what_was_trained(
    starts: Starts, tmp_path: Path, name: str, tune: str
) -> None:
    """A merged pipeline, loaded from its folder, has the trained model's velocity, and not the base
    model's."""
    model = starts.load(name, tune=tune)
    base = velocity_of(name, model).detach()
    perturb(model, 0.05)
    write_merged(trained_part(model, name="tiny"), tmp_path)
    start = STARTS[name]
    again = start.load(str(tmp_path), **{"device": "cpu", "tune": "none", **start.options})
    v, found = velocity_of(name, model).detach(), velocity_of(name, again)
    torch.testing.assert_close(found, v, rtol=0, atol=1e-4 * float(v.abs().max()))
    assert float((v - base).abs().max()) > 1e-2 * float(v.abs().max())


# --------------------------------------------------------------------------- how a network runs


@pytest.mark.parametrize("name", NETWORKS)
def test_checkpointing_computes_blocks_again_and_changes_no_gradient(
    starts: Starts, name: str
) -> None:
    found, calls = [], []
    for on in (False, True):
        model = starts.load(name, runtime={"checkpointing": on})
        perturb(model, 0.05)
        with counted(model, set(STARTS[name].blocks)) as seen:
            found.append(gradients(model, velocity_of(name, model).square().sum()))
        calls.append(set(seen.values()))
    assert calls == [{1}, {2}]
    for key, grad in found[0].items():
        assert torch.equal(grad, found[1][key]), key


@pytest.mark.parametrize("name", NETWORKS)
def test_a_back_end_reaches_every_attention(starts: Starts, name: str) -> None:
    """By torch's names of the kernels."""
    model = starts.load(name, runtime={"attention": "_native_math", "checkpointing": True})
    plain = starts.load(name)
    velocities = []
    for one in (plain, model):
        perturb(one, 0.05)
        encoded(name, one)  # whose encoders attend, too
        cond, x = encoded(name, one), noise(one, 2, *size_of(name))
        sigma = one.sigmas(4, *size_of(name))[1].expand(2)
        with Kernels() as noted:
            v = one.velocity(x, sigma, cond)
            gradients(one, v.square().sum())
        velocities.append(v.detach())
        fused = {kernel for kernel in noted.seen if "flash" in kernel}
        assert fused == ({FLASH, f"{FLASH}_backward"} if one is plain else set())
    torch.testing.assert_close(*velocities, rtol=0, atol=1e-5 * float(velocities[0].abs().max()))


@pytest.mark.parametrize("name", STARTS)
def test_side_parts_are_on_the_device_only_while_they_work(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """cpu:0 is the device and cpu where parts wait; every part that came is away again, the network
    back, and the conditioning is the same."""
    plain, model = starts.load(name), starts.load(name, device="cpu:0", runtime={"offload": True})
    expected = encoded(name, plain)
    parts = {id(part): key for key, part in model.pipeline().components.items()}
    parts[id(model.network)] = "network"
    place, move = dict[str, str](), nn.Module.to

    def to(self: nn.Module, *args: Any, **options: Any) -> nn.Module:
        if id(self) in parts and args:
            place[parts[id(self)]] = str(args[0])
        return move(self, *args, **options)

    monkeypatch.setattr(nn.Module, "to", to)
    found = encoded(name, model)
    x0 = noise(model, 1, *size_of(name))
    torch.testing.assert_close(model.decode(x0), plain.decode(x0), rtol=0, atol=1e-5)
    side = {"text_encoder", "text_encoder_2", "vae", "image_encoder"}
    here = {key for key, part in model.pipeline().components.items() if part is not None}
    assert place == dict.fromkeys(side & here, "cpu") | {"network": "cpu:0"}
    for key, rows in expected.items():
        torch.testing.assert_close(found[key], rows, rtol=0, atol=1e-5)
