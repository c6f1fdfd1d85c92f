"""`flowrl estimate`: published numbers, sums by phase, the verdict, the command and the table."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from estimatekit import MODELS, made, model_config
from scriptkit import script_module
from tiny import tiny_sd3
from torch import nn
from toykit import toy

from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import ModelError
from flowrl.core.shipped_files import list_configs
from flowrl.core.tables import size
from flowrl.cost.architecture import NETWORK, Architecture, build, tuning_of
from flowrl.cost.dry_run import dry_run
from flowrl.cost.estimate import Estimate, estimate, phase
from flowrl.cost.fit_card import GIB, RESERVE, change, remedies, verdict
from flowrl.cost.memory import QUANTISED, count_weights, kept
from flowrl.cost.meta_run import meta_run, workload_of
from flowrl.cost.released_models import RELEASED
from flowrl.cost.report import memory, text
from flowrl.models.tuning import Tuning
from flowrl.training.rehearsal import check_plan

ROOT = Path(__file__).resolve().parents[2]

# Parameters in billions, as announced: model cards of SD3.5, FLUX.1 and SDXL ("2.6 B UNet"),
# 2403.03206 (SD3's 2 B and 8 B), 2112.10752's U-Net as in Stable Diffusion 1; T5-XXL's encoder,
# CLIP ViT-L's and bigG's text towers, the VAEs.
PUBLISHED = {
    "stabilityai/stable-diffusion-3.5-medium": {"transformer": 2.24, "text_encoder_3": 4.76},
    "stabilityai/stable-diffusion-3.5-large": {
        "transformer": 8.06,
        "text_encoder": 0.124,
        "text_encoder_2": 0.695,
    },
    "stabilityai/stable-diffusion-3-medium-diffusers": {"transformer": 2.03, "vae": 0.0838},
    "black-forest-labs/FLUX.1-dev": {"transformer": 11.9, "text_encoder": 0.123},
    "black-forest-labs/FLUX.1-schnell": {"transformer": 11.9, "text_encoder_2": 4.76},
    "stable-diffusion-v1-5/stable-diffusion-v1-5": {"unet": 0.86, "text_encoder": 0.123},
    "stabilityai/stable-diffusion-xl-base-1.0": {
        "unet": 2.57,
        "vae": 0.0837,
        "text_encoder_2": 0.695,
    },
}
# GB of the published bfloat16 weight files: with the table of positions, which is no parameter
FILES = {"stabilityai/stable-diffusion-3.5-medium": 4.94, "black-forest-labs/FLUX.1-dev": 23.8}


@pytest.mark.parametrize("model", list(PUBLISHED))
def test_released_models_have_the_published_number_of_parameters(model: str) -> None:
    plan = Architecture(model, RELEASED[model], known=True)
    for name, billions in PUBLISHED[model].items():
        network = build(plan, name)
        assert sum(p.numel() for p in network.parameters()) == pytest.approx(
            billions * 1e9, rel=0.005
        ), name
        if name in NETWORK.values() and model in FILES:
            stored = sum(t.numel() for t in network.state_dict().values())
            assert 2 * stored == pytest.approx(FILES[model] * 1e9, rel=0.005)


def test_a_shipped_config_is_counted_without_its_weights(tmp_path: Path) -> None:
    """LoRA on SD3.5 Medium: rank 32 on 24 joint attentions, width 1536; the last has no projection
    of the text out.

    8 linear layers of 1536 x 1536 in each of 23 blocks, 7 in the last.
    """
    config = load_config("sd3/flow_grpo")
    found = {part.name: part for part in kept(config, check_plan(config))[0]}
    assert found["trained weights"].bytes == 4 * 32 * 2 * 1536 * (8 * 23 + 7)
    assert found["frozen weights"].bytes == pytest.approx(2 * 2.24e9, rel=0.005)
    assert found["VAE, text encoders"].bytes == pytest.approx(
        2 * (4.76 + 0.695 + 0.124 + 0.084) * 1e9, rel=0.005
    )
    without = change(config, "model.t5", False)
    gone = found["VAE, text encoders"].bytes - kept(without, check_plan(config))[0][6].bytes
    assert gone == pytest.approx(2 * 4.76e9, rel=0.005)


def test_a_released_model_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a part named 'transformer', got unet"):
        estimate(toy(tmp_path, "model={fn: sd3, path: stabilityai/stable-diffusion-xl-base-1.0}"))
    with pytest.raises(
        ModelError,
        match="expected transformer to be FluxTransformer2DModel, got SD3Transformer2DModel",
    ):
        estimate(toy(tmp_path, "model={fn: flux, path: stabilityai/stable-diffusion-3.5-large}"))


def test_what_is_kept_under_other_options(tmp_path: Path) -> None:
    """8-bit moments: 2 bytes per number. int8 and nf4 weights: 1 and 0.5625 bytes of linear layers'
    numbers. Offload: text encoders and VAE are in no phase's sum."""
    folder = tiny_sd3(tmp_path / "m")
    config = model_config(tmp_path, f"{{fn: sd3, path: {folder}}}")
    plain = {part.name: part for part in kept(config, check_plan(config))[0]}
    moments = {
        part.name: part.bytes
        for part in kept(change(config, "optimizer.fn", "adamw8bit"), check_plan(config))[0]
    }
    trained = plain["trained weights"].bytes // 4
    assert (plain["AdamW's moments"].bytes, moments["AdamW's moments"]) == (
        8 * trained,
        2 * trained,
    )
    network = config.call("model")().transformer
    linear = sum(m.weight.numel() for m in network.modules() if type(m) is nn.Linear)
    adapters = sum(
        m.weight.numel()
        for n, m in network.named_modules()
        if type(m) is nn.Linear and "lora_" in n
    )
    for name, width in QUANTISED.items():
        changed = change(config, "model.runtime.quantize", name)
        (part,) = (
            p.bytes for p in kept(changed, check_plan(changed))[0] if p.name == "frozen weights"
        )
        assert plain["frozen weights"].bytes - part == pytest.approx(
            (linear - adapters) * (4 - width), abs=1
        )
    offload = change(config, "model.runtime.offload", True)
    assert [
        part.phases for part in kept(offload, check_plan(config))[0] if part.name.startswith("VAE")
    ] == [()]


def test_work_of_an_iteration(tmp_path: Path) -> None:
    """32 velocity evaluations, 24 states and 8 images; a KL adds a forward pass to each state."""
    name = "sd3, LoRA, guidance"
    config = made(tmp_path, name)
    found, workload = estimate(config), meta_run(workload_of(config))
    assert found.flops["sampling"] == 32 * workload.velocity(1).flops
    assert found.flops["training"] == 24 * workload.training(1).flops
    assert found.flops["decode"] == 8 * workload.decoding(1, batch=1, height=64, width=48).flops
    kl = estimate(model_config(tmp_path, f"{{{MODELS[name][1]}, path: {tmp_path}/weights}}", KL))
    assert kl.flops["training"] == found.flops["training"] + 24 * workload.velocity(1).flops
    assert peak(kl, "training") > peak(found, "training")


KL = "kl={fn: transition_kl, beta: 0.1}"


def peak(found: Estimate, name: str) -> int:
    return next(phase.bytes for phase in found.phases if phase.name == name)


def test_peaks_are_what_is_kept_and_what_comes_and_goes(tmp_path: Path) -> None:
    """Gradients in training only, images from the decoding on, latents not in an evaluation; the
    optimizer's intermediate results are as large as the trained weights (foreach AdamW)."""
    found = estimate(made(tmp_path, "sd3, full"))
    parts = {part.name: part.bytes for part in found.parts}
    phases = {phase.name: phase for phase in found.phases}
    total = sum(parts.values())
    assert phases["training"].kept == phases["optimizer step"].kept == total
    assert (
        phases["sampling"].kept
        == phases["decode"].kept
        == total - parts["gradients"] - parts["images"]
    )
    stored = parts["latents"] + parts["images"] + parts["prompt conditioning"]
    assert phases["evaluation"].kept == total - stored - parts["gradients"]
    assert phases["optimizer step"].extra == pytest.approx(parts["trained weights"], rel=0.01)
    assert phases["training"].size == 8 and found.largest == max(
        found.phases, key=lambda phase: phase.bytes
    )


def test_the_verdict_names_the_largest_batch_that_fits(tmp_path: Path) -> None:
    """On a card between what batches of 3 and of 4 need: each number printed is the estimate of the
    changed config."""
    config = made(tmp_path, "sd3, full, deep")
    forecast = check_plan(config)

    def needs(*changes: tuple[str, Any]) -> int:
        changed = config
        for key, value in changes:
            changed = change(changed, key, value)
        return phase(changed, "training", forecast).bytes

    limit = (needs(("train.micro_batch", 3)) + needs(("train.micro_batch", 4))) // 2
    worst = phase(config, "training", forecast)
    ways = dict(remedies(config, forecast, worst, limit))
    assert ways["lower train.micro_batch to 3"].bytes == needs(("train.micro_batch", 3))
    saving = needs(("model.runtime.checkpointing", True))
    assert saving <= limit and ways["turn on model.runtime.checkpointing"].bytes == saving
    found = estimate(config)
    head, *rest = verdict(found._replace(phases=[worst]), gigabytes=(limit + RESERVE) / GIB)
    assert head.endswith(
        f"GB card: no, the largest phase is training with {size(worst.bytes)}; lower "
        "train.micro_batch to 3 "
        f"({size(needs(('train.micro_batch', 3)))}) or turn on model.runtime.checkpointing "
        f"({size(saving)})"
    )
    assert rest == ["(1.0 GiB of the card are set aside for the CUDA context and libraries)"]
    assert verdict(found, gigabytes=80)[0].startswith(
        "fits a 80 GB card: yes; the largest phase is training with "
    )


def test_the_largest_batch_where_memory_bends(tmp_path: Path) -> None:
    """Decoding one image at a time, the copies of all images decide; many at a time, the VAE:
    the batch found fits, and one image more does not."""
    config = change(made(tmp_path, "sd3, full"), "train.group", 20)
    forecast = check_plan(config)
    needs = [
        phase(change(config, "model.decode_batch", n), "decode", forecast).bytes
        for n in (1, 2, 20, 40)
    ]
    assert needs[0] == needs[1] < needs[2] < needs[3]
    limit = (needs[2] + needs[3]) // 2
    ((words, then),) = remedies(config, forecast, phase(config, "decode", forecast), limit)
    batch = int(words.removeprefix("lower model.decode_batch to ").split()[0])
    assert (
        then.bytes
        <= limit
        < phase(change(config, "model.decode_batch", batch + 1), "decode", forecast).bytes
    )


def test_where_no_batch_is_small_enough(tmp_path: Path) -> None:
    """A phase without a batch, between what it needs with 8-bit moments and without: the bytes of
    the changed config. Below both: what comes nearest, and that it is not enough."""
    config = change(made(tmp_path, "sd3, full"), "model.runtime.offload", True)
    found = estimate(config)
    name = "optimizer step"
    (worst,) = (phase for phase in found.phases if phase.name == name)
    less = phase(change(config, "optimizer.fn", "adamw8bit"), name, found.forecast)
    head = verdict(
        found._replace(phases=[worst]), gigabytes=((worst.bytes + less.bytes) / 2 + RESERVE) / GIB
    )[0]
    assert f"; no batch size is enough: {size(worst.kept)} are kept in any case (" in head
    assert "; what helps: " in head and f"optimizer.fn=adamw8bit ({size(less.bytes)})" in head
    head = verdict(found._replace(phases=[worst]), gigabytes=(1000 + RESERVE) / GIB)[0]
    assert head.endswith("), which is not enough")


def test_offloaded_parts_come_and_go(tmp_path: Path) -> None:
    """The decode holds the VAE, the sampling at most the text encoders."""
    config = made(tmp_path, "sd3, full")
    away = change(config, "model.runtime.offload", True)
    here, gone = estimate(config), estimate(away)
    assert here.weights is not None
    counted = here.weights.others
    everything, texts = sum(counted.values()) * 4, (sum(counted.values()) - counted["vae"]) * 4
    assert peak(here, "training") - peak(gone, "training") == everything
    assert peak(here, "decode") - peak(gone, "decode") == texts
    few = [
        phase(change(c, "train.rollout_batch", 1), "sampling", here.forecast)
        for c in (config, away)
    ]
    assert few[1].extra >= texts and few[0].kept - few[1].kept == everything


def test_compiled_networks_keep_their_activations_while_sampling(tmp_path: Path) -> None:
    """The runtime asks for a gradient there, so that sampling and training share one graph."""
    config = made(tmp_path, "sd3, full")
    compiled = meta_run(workload_of(change(config, "model.runtime.compile", True)))
    assert (
        compiled.velocity(4).peak
        > compiled.training(4).saved
        > meta_run(workload_of(config)).velocity(4).peak
    )


def test_models_that_cannot_be_counted(tmp_path: Path) -> None:
    for config in (toy(tmp_path), toy(tmp_path, "model={fn: sd3, path: nobody/no-such-model}")):
        found = estimate(config)
        assert found.phases == [] and found.largest is None and found.note
        assert text(found, gigabytes=24).endswith(f"fits a 24 GB card: unknown, {found.note}")


def test_the_command_and_the_dry_run_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made(tmp_path, "sd3, LoRA, guidance")
    file = tmp_path / "estimate.json"
    (tmp_path / "it.yaml").write_text(config.dump())
    argv = [
        "estimate",
        f"{tmp_path}/it.yaml",
        "train.group=6",
        "--card",
        "8",
        "--json",
        str(file),
        "--plugin",
        "toykit",
    ]
    assert main(argv) == 0
    out = capsys.readouterr().out
    changed = change(config, "train.group", 6)
    found = estimate(changed)
    assert "\n".join(memory(found)) in out and "\n".join(memory(found)) in dry_run(changed)
    assert "fits a 8 GB card: yes; the largest phase is " in out
    figures = json.loads(file.read_text())
    assert figures["peak"] == {phase.name: phase.bytes for phase in found.phases}
    assert figures["parameters"]["trained"] == sum(
        p.numel() for p in config.call("model")().trainable().values()
    )
    assert figures["flops"] == found.flops and figures["activations"] == found.saved


def test_a_card_of_no_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "shapes/flow_grpo", "--card", "0"]) == 2
    assert "--card: expected more than 0 GB, got 0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("estimates")


def test_the_table_is_the_result_file(script: ModuleType) -> None:
    result = json.loads(script.RESULT.read_text(encoding="utf-8"))
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.page(page, result) == page, (
        "docs/memory.md is stale: run python scripts/research/estimates.py"
    )
    assert list(result["configs"]) == [
        n for n in list_configs() if n.startswith(("sd3/", "flux/", "sd15/"))
    ]
    assert page.count("not measured |") == len(result["configs"])


def test_the_result_file_is_of_these_configs(script: ModuleType) -> None:
    """What is cheap to count again: parameters, and the parts that are kept, of a config of each
    kind."""
    result = json.loads(script.RESULT.read_text(encoding="utf-8"))
    for name in ("sd3/flow_grpo", "flux/grpo_guard", "sd15/dance_grpo"):
        config = load_config(name)
        row = result["configs"][name]
        assert row["kept"] == {
            part.name: part.bytes for part in kept(config, check_plan(config))[0]
        }, name
        tuning: Tuning = tuning_of(config)
        counted = count_weights(workload_of(config).architecture, config.model.fn, tuning)
        assert (row["parameters"]["network"], row["parameters"]["trained"]) == (
            counted.network,
            counted.trained,
        )


def test_a_measured_peak_takes_its_place(script: ModuleType) -> None:
    result = json.loads(script.RESULT.read_text(encoding="utf-8"))
    next(iter(result["configs"].values()))["measured"] = 3 * 2**30
    filled = script.page(script.PAGE.read_text(encoding="utf-8"), result)
    assert filled.count(" 3.0 GiB |") == 1 and script.page(filled, result) == filled
