"""The measurement at real size, on models small enough for a CPU: what it counts, what it refuses,
what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from estimatekit import model_config
from scriptkit import module_of
from synckit import check_sync
from tiny import tiny_flux, tiny_qwen_image, tiny_sd3, tiny_wan
from torch import Tensor

from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError, ModelError
from flowrl.cost.estimate import estimate
from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

bench, drawn = module_of("bench", "performance"), module_of("bench", "random_model")

TINY: dict[str, tuple[Callable[[Path], Path], str]] = {
    "sd3": (tiny_sd3, "fn: sd3, guidance: 2.0, lora: {rank: 3}"),
    "flux": (tiny_flux, "fn: flux, tune: full, dtype: bfloat16, max_sequence_length: 16"),
    "qwen_image": (
        tiny_qwen_image,
        "fn: qwen_image, guidance: 2.0, lora: {rank: 3}, max_sequence_length: 16",
    ),
    "wan": (tiny_wan, "fn: wan, frames: 5, lora: {rank: 3}, max_sequence_length: 16"),
}


def tiny(folder: Path, name: str, *overrides: str) -> Config:
    """Return a config of a tiny model; its folder has lost its weights."""
    build, options = TINY[name]
    build(folder / "weights")
    for file in (folder / "weights").rglob("*.safetensors"):
        file.unlink()
    return model_config(folder, f"{{{options}, path: {folder}/weights, device: cpu}}", *overrides)


@pytest.mark.parametrize("name", TINY)
def test_what_is_measured(tmp_path: Path, name: str) -> None:
    """Counts and work against the estimate; a CPU gets seconds, and neither an MFU nor a peak."""
    config = tiny(tmp_path, name)
    result = bench.measure_throughput(config, iterations=1)
    found = estimate(config)
    assert result["states"] == found.forecast.states == 24
    assert result["flops"] == {"rollout": found.flops["sampling"], "train": found.flops["training"]}
    assert set(result["seconds"]) == {"rollout", "decode", "reward", "train", "total"}
    assert min(result["seconds"]["rollout"], result["seconds"]["train"], result["images_per_s"]) > 0
    assert result["mfu"] is None and result["peak_flops"] == "unknown"
    assert result["why_no_mfu"] == "no peak of this CPU is in the table"
    assert {row["measured"] for row in result["memory"].values()} == {None}
    assert result["weights"] == "random"
    assert json.loads(json.dumps(result)) == result
    assert "no MFU: no peak of this CPU" in bench.throughput_table(
        result
    ) and "images/s" in bench.throughput_table(result)


def test_the_estimate_beside_is_of_what_is_there(tmp_path: Path) -> None:
    """No text encoders, and the VAE only if it is asked for."""
    config = tiny(tmp_path, "sd3")
    found = estimate(config)
    assert found.weights is not None
    others = found.weights.others
    whole = next(phase.bytes for phase in found.phases if phase.name == "training")
    without, within = (
        bench.measure_throughput(config, iterations=1, vae=vae)["memory"] for vae in (False, True)
    )
    assert whole - without["train"]["estimate"] == 4 * sum(others.values())
    assert whole - within["train"]["estimate"] == 4 * (sum(others.values()) - others["vae"])
    assert without["decode"]["estimate"] is None and within["decode"]["estimate"] > 0


@pytest.mark.parametrize("name", TINY)
def test_a_random_model_has_the_real_one_s_shapes(tmp_path: Path, name: str) -> None:
    """Names, shapes and dtypes of all weights of the network, of conditioning, latents and
    images: the adapter's."""
    build, options = TINY[name]
    build(tmp_path / "weights")
    config = model_config(tmp_path, f"{{{options}, path: {tmp_path}/weights, device: cpu}}")
    real, made = config.call("model")(), drawn.random_model(config, vae=True)
    adapter: Any = made.adapter  # type: ignore[attr-defined]
    networks = []
    for network in (real.transformer, adapter.transformer):
        named = network.named_parameters()
        networks.append({n: (p.shape, p.dtype, p.requires_grad) for n, p in named})
    assert networks[0] == networks[1]
    conditioning = []
    for model in (real, made):
        cond = model.encode(["a red dot", "a blue dot"])
        conditioning.append({name: (v.shape, v.dtype) for name, v in cond.items()})
    assert conditioning[0] == conditioning[1]
    latent = made.latent_shape(64, 48)
    assert latent == real.latent_shape(64, 48)
    assert torch.equal(made.sigmas(5, 64, 48), real.sigmas(5, 64, 48))
    x0 = torch.randn(3, *latent)
    for model in (made, drawn.random_model(config)):  # with and without a VAE
        images = model.decode(x0)
        assert images.shape == (3, *((5,) if name == "wan" else ()), 3, 64, 48)
        assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_weights_are_drawn_from_the_seed(tmp_path: Path) -> None:
    """And leave the caller's random numbers alone."""
    config = tiny(tmp_path, "sd3")
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, other = drawn.random_model(config), drawn.random_model(config)
    assert torch.equal(torch.rand(1), expected)
    weights = [m.adapter.transformer.proj_out.weight for m in (one, other)]  # type: ignore[attr-defined]
    assert torch.equal(*weights) and float(weights[0].std()) > 0


def test_what_is_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path, "sd3")
    with pytest.raises(ConfigError, match="expected at least 1 iteration, got 0"):
        bench.measure_throughput(config, iterations=0)
    with pytest.raises(
        ConfigError, match="random weights are made for flow-matching adapters, got sd15"
    ):
        bench.measure_throughput(load_config("sd15/dance_grpo"))
    unknown = model_config(tmp_path, "{fn: sd3, path: nobody/no-such-model}")
    with pytest.raises(ModelError, match="is not known: it is neither here nor released"):
        bench.measure_throughput(unknown)


@pytest.mark.parametrize(("name", "billions"), [("sd3/flow_grpo", 2.24), ("flux/flow_grpo", 11.9)])
def test_released_models_are_made_at_real_size(
    monkeypatch: pytest.MonkeyPatch, name: str, billions: float
) -> None:
    """From the shipped architecture alone, here on the meta device, where weights take no memory;
    published sizes."""
    monkeypatch.setattr(drawn, "pick_device", lambda _: torch.device("meta"))
    config = bench.stand_in(load_config(name, ["model.lora={rank: 1, alpha: 1}"]))
    adapter: Any = drawn.random_model(config, vae=True).adapter  # type: ignore[attr-defined]
    weights = {n: p for n, p in adapter.transformer.named_parameters() if "lora_" not in n}
    vae = adapter.pipeline().vae.parameters()
    assert {p.dtype for p in weights.values()} == {torch.bfloat16}
    numel = torch.Tensor.numel
    counts = [sum(map(numel, weights.values())), sum(map(numel, vae))]
    assert counts == pytest.approx([billions * 1e9, 83.8e6], rel=0.005)
    assert list(config.rewards) == ["chance"] and check_plan(config).work.images == 48 * 24


def test_share_of_the_peak() -> None:
    """989.4 TFLOP in 2 seconds are half of an H100's peak."""
    name = "NVIDIA H100 80GB HBM3"
    found = bench.utilisation({"train": int(989.4e12)}, {"train": 2.0}, name, torch.bfloat16)
    assert found == {"peak_flops": 989.4e12, "mfu": {"train": pytest.approx(0.5)}}
    assert bench.utilisation({"train": 1}, {"train": 2.0}, name, torch.float32)["mfu"] is None


def test_devices_are_told_apart_by_their_whole_name() -> None:
    """Names as torch.cuda.get_device_name gives them; a laptop's chip of the same number is another
    one."""
    known = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100-PCIE-40GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362.05e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA H100 PCIe MIG 1g.10gb": None,
        "NVIDIA L40": None,
        "Tesla T4": None,
    }
    assert {name: bench.peak_flops(name) for name in known} == known
    assert all(50 < peak < 1000 for peak in bench.PEAKS.values())


class _Spy:
    """Note in which mode each velocity call is made."""

    def __init__(self, model: Any, modes: list[str]) -> None:
        self.model, self.modes = model, modes
        self.seen: list[str] = []

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        self.seen.append(self.modes[-1])
        return self.model.velocity(x, sigma, cond)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_the_check_holds_from_the_first_to_the_last_call(tmp_path: Path) -> None:
    """A first round that only counts, then one under "error", and "default" at the end."""
    config = bench.stand_in(tiny(tmp_path, "sd3", "train.rollout_batch=3"))
    trainer = Trainer(config, model=drawn.random_model(config))
    modes = ["default"]
    spy: Any = _Spy(trainer.model, modes)
    vars(trainer)["model"] = spy
    calls = check_sync(trainer, switch=modes.append)
    assert calls == 4 * 3  # 8 images in threes, 4 steps
    assert spy.seen == ["default"] * calls + ["error"] * calls
    assert modes == ["default", "error", "default", "default"] and trainer.model is spy


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: on a CPU there is nothing to wait for",
)
@pytest.mark.parametrize("name", TINY)
def test_the_sampling_loop_never_waits_for_a_gpu(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """SD3, FLUX and Wan; diffusers 0.42 makes a tensor of a number in each call of Qwen-Image,
    which waits."""
    if name == "qwen_image":
        request.applymarker(pytest.mark.xfail(raises=RuntimeError, strict=True))
    config = bench.stand_in(tiny(tmp_path, name, "model.device=cuda"))
    assert check_sync(Trainer(config, model=drawn.random_model(config))) > 0


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: a CPU's memory is not measured"
)
def test_peaks_on_a_gpu(tmp_path: Path) -> None:
    config = tiny(tmp_path, "sd3", "model.device=cuda")
    memory = bench.measure_throughput(config, iterations=1)["memory"]
    assert all(memory[phase]["measured"] > 0 for phase in ("rollout", "train"))


def test_phases_that_come_twice_add_up() -> None:
    watch = bench.PhaseWatch()
    for _ in range(2):
        with watch.phase("rollout"):
            pass
    assert watch.seconds["rollout"] > 0 == watch.seconds["train"]
    assert (watch.memory == {}) != torch.cuda.is_available()


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes performance-<model>.json; a mistake is one line and code 2."""
    tiny(tmp_path, "sd3")
    text = (tmp_path / "toy" / "toy.yaml").read_text()
    text = text.replace("toykit.redness", "jpeg").replace("toykit.reddish", "jpeg")
    (tmp_path / "it.yaml").write_text(text)
    model = f"model={{fn: sd3, path: {tmp_path}/weights, device: cpu}}"
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    argv = ["performance.py", f"{tmp_path}/it.yaml", model, "image={height: 64, width: 64}"]
    monkeypatch.setattr("sys.argv", [*argv, "--iterations", "1", "--kernels"])
    assert bench.main() == 0
    result = json.loads((tmp_path / "performance-weights.json").read_text())
    assert result["model"] == f"{tmp_path}/weights" and result["iterations"] == 1
    assert {one["name"] for one in result["kernels"]} >= {"aten::addmm"}
    assert all(one["seconds"] > 0 < one["calls"] for one in result["kernels"])
    said = capsys.readouterr().out
    assert f"{tmp_path}/performance-weights.json" in said and "kernel  " in said
    monkeypatch.setattr("sys.argv", [*argv, "--iterations", "0"])
    assert bench.main() == 2
    assert "performance: expected at least 1 iteration" in capsys.readouterr().err
