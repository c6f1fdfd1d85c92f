"""`flowrl estimate`: published numbers, sums by phase, copies of the weights, evaluations, real
images, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from estimatekit import MODELS, made, model_config, phases, sizes
from tiny import tiny_sd3
from tinypipelines import save
from torch import nn
from toykit import toy

from flowrl.cli.main import main
from flowrl.config.load import Config, check_eval_count, load_config
from flowrl.core.errors import ConfigError, ModelError
from flowrl.cost import meta_run as traced
from flowrl.cost.architecture import (
    Architecture,
    build,
    released_parts,
    source_shape,
)
from flowrl.cost.estimate import Estimate, estimate, judged, phase
from flowrl.cost.fit_card import change, verdict, what_helps
from flowrl.cost.memory import QUANTISED, kept_memory
from flowrl.cost.meta_run import _inputs, meta_run, workload_of
from flowrl.cost.report import calls, dry_run, estimate_text, memory, prompt_lines
from flowrl.models.pipeline import pipeline
from flowrl.runs.composed import composed
from flowrl.training.rehearsal import check_plan
from flowrl.training.run import OverlapWarning
from flowrl.training.trainer import Trainer

# Parameters in billions, as announced: model cards of SD3.5, FLUX.1 and SDXL ("2.6 B UNet"),
# 2403.03206 (SD3's 2 B and 8 B), 2112.10752's U-Net as in Stable Diffusion 1; T5-XXL's encoder,
# CLIP ViT-L's and bigG's text towers, the VAEs.
MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
LARGE = "stabilityai/stable-diffusion-3.5-large"
DEV = "black-forest-labs/FLUX.1-dev"
XL = "stabilityai/stable-diffusion-xl-base-1.0"
PUBLISHED = {
    MEDIUM: {"transformer": 2.24, "text_encoder_3": 4.76},
    LARGE: {"transformer": 8.06, "text_encoder": 0.124, "text_encoder_2": 0.695},
    "stabilityai/stable-diffusion-3-medium-diffusers": {"transformer": 2.03, "vae": 0.0838},
    DEV: {"transformer": 11.9, "text_encoder": 0.123},
    "black-forest-labs/FLUX.1-schnell": {"transformer": 11.9, "text_encoder_2": 4.76},
    "stable-diffusion-v1-5/stable-diffusion-v1-5": {"unet": 0.86, "text_encoder": 0.123},
    XL: {"unet": 2.57, "vae": 0.0837, "text_encoder_2": 0.695},
    # "20B", "6B", "32B", "4B" and "9B"; Qwen2.5-VL-7B's and Mistral Small's cards: 8.29 and 24.0 B
    "Qwen/Qwen-Image": {"transformer": 20.4, "text_encoder": 8.29},
    "Tongyi-MAI/Z-Image": {"transformer": 6.15, "text_encoder": 4.02},
    "black-forest-labs/FLUX.2-dev": {"transformer": 32.2, "text_encoder": 24.0},
    "black-forest-labs/FLUX.2-klein-4B": {"transformer": 3.88},
    "black-forest-labs/FLUX.2-klein-9B": {"transformer": 9.08, "text_encoder": 8.19},
    # Wan 2.1's float32 files, 5.68 and 57.2 GB; UMT5-XXL's encoder and VAE, 11.36 and 0.508
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {"transformer": 1.419, "vae": 0.1269},
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": {"transformer_2": 14.29, "text_encoder": 5.68},
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {"transformer": 5.0, "vae": 0.705},  # "5B"; 2.82 GB
    # by their own call: "2.6B" with Gemma 2's 2.61, "8.9B", "1.6B" in 3.21 GB with a VAE of 1.25
    "Alpha-VLLM/Lumina-Image-2.0": {"transformer": 2.61, "text_encoder": 2.614},
    "lodestones/Chroma1-HD": {"transformer": 8.9, "text_encoder": 4.762},
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": {"transformer": 1.605, "vae": 0.3125},
}
# GB of the published bfloat16 weight files: with the table of positions, which is no parameter
FILES = {MEDIUM: 4.94, DEV: 23.8}
KL = "kl={fn: transition_kl, beta: 0.1}"


@pytest.mark.parametrize("model", list(PUBLISHED))
def test_released_models_have_the_published_number_of_parameters(model: str) -> None:
    plan = Architecture(model, released_parts(model), known=True)
    for name, billions in PUBLISHED[model].items():
        network = build(plan, name)
        found = sum(p.numel() for p in network.parameters())
        assert found == pytest.approx(billions * 1e9, rel=0.005), name
        if name == plan.network and model in FILES:
            stored = sum(t.numel() for t in network.state_dict().values())
            assert 2 * stored == pytest.approx(FILES[model] * 1e9, rel=0.005)


def test_a_shipped_config_is_counted_without_its_weights() -> None:
    """LoRA on SD3.5 Medium: rank 32 on 24 joint attentions, width 1536; the last has no projection
    of the text out.

    8 linear layers of 1536 x 1536 in each of 23 blocks, 7 in the last.
    """
    config = load_config("sd3/flow_grpo")
    found, without = sizes(config), sizes(change(config, "model.t5", False))
    others = "VAE, text encoders"
    assert found["trained weights"] == 4 * 32 * 2 * 1536 * (8 * 23 + 7)
    assert found["frozen weights"] == pytest.approx(2 * 2.24e9, rel=0.005)
    assert found[others] == pytest.approx(2 * (4.76 + 0.695 + 0.124 + 0.084) * 1e9, rel=0.005)
    assert found[others] - without[others] == pytest.approx(2 * 4.76e9, rel=0.005)


@pytest.mark.parametrize(
    ("fn", "path", "words"),
    [
        ("sd3", XL, "expected a part named 'transformer', got unet"),
        ("flux", LARGE, "expected transformer to be FluxTransformer2DModel, got SD3Transformer2D"),
    ],
)
def test_a_released_model_of_another_kind(tmp_path: Path, fn: str, path: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        estimate(toy(tmp_path, f"model={{fn: {fn}, path: {path}}}"))


def test_what_is_kept_under_other_options(tmp_path: Path) -> None:
    """8-bit moments: 2 bytes per number. int8 and nf4 weights: 1 and 0.5625 bytes of linear layers'
    numbers. Offload: text encoders and VAE are in no phase's sum."""
    folder = tiny_sd3(tmp_path / "m")
    config = model_config(tmp_path, f"{{fn: sd3, path: {folder}}}")
    plain, short = sizes(config), sizes(change(config, "optimizer.fn", "adamw8bit"))
    trained = plain["trained weights"] // 4
    name = "AdamW's moments"
    assert (plain[name], short[name]) == (8 * trained, 2 * trained)
    linear = 0
    for name, layer in config.call("model")().transformer.named_modules():
        if type(layer) is nn.Linear and "lora_" not in name:
            linear += layer.weight.numel()
    for name, width in QUANTISED.items():
        changed = sizes(change(config, "model.runtime.quantize", name))
        saved = plain["frozen weights"] - changed["frozen weights"]
        assert saved == pytest.approx(linear * (4 - width), abs=1)
    offload = change(config, "model.runtime.offload", True)
    (away,) = (p for p in kept_memory(offload, check_plan(config))[0] if p.name.startswith("VAE"))
    assert away.phases == ()


def test_work_of_an_iteration(tmp_path: Path) -> None:
    """32 NFE, 24 states and 8 images; a KL adds a forward pass to each state."""
    name = "sd3, LoRA, guidance"
    config = made(tmp_path, name)
    found, workload = estimate(config), meta_run(workload_of(config))
    assert found.flops["sampling"] == 32 * workload.velocity(1).flops
    assert found.flops["training"] == 24 * workload.training(1).flops
    assert found.flops["decode"] == 8 * workload.decoding(1, batch=1, height=64, width=48).flops
    kl = estimate(model_config(tmp_path, f"{{{MODELS[name][1]}, path: {tmp_path}/weights}}", KL))
    assert kl.flops["training"] == found.flops["training"] + 24 * workload.velocity(1).flops
    assert phases(kl)["training"].bytes > phases(found)["training"].bytes


def test_peaks_are_what_is_kept_and_what_comes_and_goes(tmp_path: Path) -> None:
    """Gradients in training only, images on the host, latents of leaves until they are decoded,
    the others not in an evaluation; the optimizer's intermediate results are as large as the
    trained weights (foreach AdamW)."""
    found = estimate(made(tmp_path, "sd3, full"))
    parts, at = {part.name: part.bytes for part in found.parts}, phases(found)
    total, leaves = sum(parts.values()) - parts["images on the host"], parts["latents of leaves"]
    assert at["training"].kept == at["optimizer step"].kept == total - leaves
    assert at["sampling"].kept == at["decode"].kept == total - parts["gradients"]
    stored = parts["latents"] + leaves + parts["prompt conditioning"]
    assert at["evaluation"].kept == total - stored - parts["gradients"]
    assert at["optimizer step"].extra == pytest.approx(parts["trained weights"], rel=0.01)
    assert at["training"].size == 8
    assert found.largest == max(found.phases, key=lambda phase: phase.bytes)


def test_offloaded_parts_come_and_go(tmp_path: Path) -> None:
    """The decode holds the VAE, the sampling at most the text encoders without the network, whose
    numbers PyTorch counts here on the network itself."""
    config = made(tmp_path, "sd3, full")
    away = change(config, "model.runtime.offload", True)
    found = estimate(config)
    here, gone = phases(found), phases(estimate(away))
    assert found.weights is not None
    counted = found.weights.others
    everything, texts = sum(counted.values()) * 4, (sum(counted.values()) - counted["vae"]) * 4
    assert here["training"].bytes - gone["training"].bytes == everything
    assert here["decode"].bytes - gone["decode"].bytes == texts
    few = []
    for one in (config, away):
        small = change(one, "train.rollout_batch", 1)
        few.append(phase(small, "sampling", found.forecast))
    network = config.call("model")().network
    own = sum(part.nbytes for part in [*network.parameters(), *network.buffers()])
    assert few[1].extra >= texts - own and few[0].kept - few[1].kept == everything
    # a text encoder of many more words sets the peak
    file = tmp_path / "weights" / "text_encoder" / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    more = 50_000 * settings["hidden_size"] * 4
    settings["vocab_size"] += 50_000
    file.write_text(json.dumps(settings), encoding="utf-8")
    assert phase(small, "sampling", found.forecast).extra == texts + more - own


def test_compiled_networks_keep_their_activations_while_sampling(tmp_path: Path) -> None:
    """The runtime asks for a gradient there, so that sampling and training share one graph."""
    config = made(tmp_path, "sd3, full")
    plain = meta_run(workload_of(config))
    compiled = meta_run(workload_of(change(config, "model.runtime.compile", True)))
    assert compiled.velocity(4).peak > compiled.training(4).saved > plain.velocity(4).peak


def test_models_that_cannot_be_counted(tmp_path: Path) -> None:
    for config in (toy(tmp_path), toy(tmp_path, "model={fn: sd3, path: nobody/no-such-model}")):
        found = estimate(config)
        assert found.phases == [] and found.largest is None and found.note
        assert found.note in estimate_text(found, gigabytes=24)
        assert verdict(found, gigabytes=24) == f"fits a 24 GB card: unknown, {found.note}"
        assert what_helps(found, gigabytes=24) == ([], None)


# ------------------------------------------------------------------------------------------ command


def test_the_command_and_the_dry_run_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made(tmp_path, "sd3, LoRA, guidance")
    file = tmp_path / "estimate.json"
    (tmp_path / "it.yaml").write_text(config.dump())
    options = ["--card", "8", "--json", str(file), "--plugin", "toykit"]
    assert main(["estimate", f"{tmp_path}/it.yaml", "train.group=6", *options]) == 0
    out = capsys.readouterr().out
    changed = change(config, "train.group", 6)
    found = estimate(changed)
    assert "\n".join(memory(found)) in out and "\n".join(memory(found)) in dry_run(changed)
    assert "fits a 8 GB card: yes, " in out
    figures = json.loads(file.read_text())
    assert figures["peak"] == {phase.name: phase.bytes for phase in found.phases}
    trained = config.call("model")().trainable().values()
    assert figures["parameters"]["trained"] == sum(p.numel() for p in trained)
    assert figures["flops"] == found.flops and figures["activations"] == found.saved


def test_a_card_of_no_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "shapes/flow_grpo", "--card", "0"]) == 2
    assert "--card: expected more than 0 GB, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("count", [0, 1, 3])
def test_references_of_flux2_are_tokens_of_their_own(tmp_path: Path, count: int) -> None:
    """By hand: at 384 pixels an image has 24 x 24 tokens, and so has each reference."""
    record = {"prompt": "p"} | ({"source": ["a.png"] * count} if count else {})
    list_ = tmp_path / "list.jsonl"
    list_.write_text(json.dumps(record))
    config = load_config("flux2_klein/flow_grpo_fast_edit", [f"prompts.train={list_}"])
    work = workload_of(config)
    assert work.source == ((24 * count, 24) if count else None)
    given = _inputs(work._replace(guided=False), 2)
    assert given["hidden_states"].shape == (2, 576 * (1 + count), 128)
    assert given["img_ids"].shape == (576 * (1 + count), 4)
    gone = load_config("flux2_klein/flow_grpo_fast_edit", [f"prompts.train={tmp_path}/no.jsonl"])
    assert source_shape(gone, work.latent) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [("model.frames=6", "got 6; take 5 or 9"), ("image={height: 240, width: 240}", "multiple")],
)
def test_what_the_adapter_of_ti2v_refuses_an_estimate_refuses(change: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        workload_of(load_config(composed("flow_grpo_fast", "wan_ti2v"), [change]))


def test_tokens_of_ti2v_have_times_of_their_own() -> None:
    """By hand: 256 pixels are 16 x 16 latents, 8 x 8 tokens, at two moments; 2.1 has one time."""
    work = workload_of(load_config(composed("flow_grpo_fast", "wan_ti2v")))
    given = _inputs(work._replace(guided=False), 2)
    assert given["hidden_states"].shape == (2, 48, 2, 16, 16)
    assert given["timestep"].shape == (2, 128)
    work = workload_of(load_config("wan/flow_grpo_fast_i2v"))
    given = _inputs(work._replace(guided=False), 2)
    assert given["hidden_states"].shape == (2, 36, 2, 30, 30)
    assert given["timestep"].shape == (2,)
    assert given["encoder_hidden_states_image"].shape == (2, 257, 1280)


def test_lists_of_the_hub_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run names them; nothing asks the hub."""

    def asked(*_: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("flowrl.core.prompt_files.read_hub", asked)
    config = load_config("flux/awm")
    assert prompt_lines(config) == [
        f"prompts    pickscore/{name} is read from the hub when the run starts"
        for name in ("train", "test")
    ]


def extra(config: Config) -> int:
    return phase(config, "evaluation", check_plan(config)).extra


def test_best_of_and_the_size_that_is_judged_are_counted() -> None:
    """All that is drawn of a prompt is decoded together; four times the pixels take four times as
    much."""
    one, many = (load_config("shapes/awm", ["eval.batch=1", f"eval.best_of={n}"]) for n in (1, 100))
    assert extra(many) > 10 * extra(one)
    sizes = ["eval.height=128", "eval.width=128", "eval.images=1024"]
    large, small = load_config("shapes/awm", sizes), load_config("shapes/awm", sizes[2:])
    assert extra(large) == pytest.approx(4 * extra(small), rel=0.05)


def test_a_size_that_the_model_cannot_make() -> None:
    with pytest.raises(
        ConfigError, match=r"eval\.height, eval\.width: sd3 cannot make images of 1"
    ):
        judged(load_config("shapes/awm", ["eval.height=100000"]))
    with pytest.raises(
        ConfigError, match=r"decode_batch: expected a whole number >= 1 and < 2\*\*31"
    ):
        load_config("shapes/awm", [f"model.decode_batch={10**20}"])


def test_more_images_than_an_evaluation_draws() -> None:
    config = load_config("shapes/awm", ["eval.images=10000", "eval.best_of=10"])
    with pytest.raises(ConfigError, match="best of 10, of each of 2,000 prompts are 200,000,000"):
        check_eval_count(config, 2000)
    check_eval_count(config, 1000)


def test_many_calls_of_the_vae_are_reckoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is that of tracing each of them."""
    run = meta_run(workload_of(made(tmp_path, "sd3, full")))
    whole = run.decoding(101, batch=2, height=64, width=64)
    monkeypatch.setattr(traced, "MANY", 8)
    assert run.decoding(101, batch=2, height=64, width=64) == whole


def estimated(*changes: str) -> Estimate:
    """Estimate shapes/ddrl; its list of images need not be there."""
    return estimate(load_config("shapes/ddrl", ["model.dtype=float32", *changes]))


def trained(found: Estimate) -> int:
    """Return the bytes that come and go in training."""
    return next(phase.extra for phase in found.phases if phase.name == "training")


def test_the_second_row_of_a_state_is_counted() -> None:
    """Of 64 states, siblings of a fork: 3 calls more each, twice the FLOPs of training, and as many
    activations as twice the micro-batch without images, since both wait for the backward pass."""
    plain, real = estimated("kl.beta=0"), estimated()
    assert real.forecast.states == plain.forecast.states == 64
    assert real.forecast.calls - plain.forecast.calls == 3 * 64
    assert real.flops["training"] == pytest.approx(2 * plain.flops["training"], rel=1e-3)
    assert real.flops["sampling"] == plain.flops["sampling"]
    half = estimated("train.micro_batch=32")
    assert half.saved == plain.saved
    assert trained(half) == trained(plain) > 0
    assert "3 per state, and 3 on a real image" in calls(real)[0]
    assert "real image" not in calls(plain)[0]


def test_lists_that_a_run_would_warn_of(tmp_path: Path) -> None:
    """The same list twice, as the trainer says it; and three prompts where five are taken."""
    (tmp_path / "some.txt").write_text("a red dot\na blue dot\na green dot\n")
    changes = [f"prompts.{key}={tmp_path}/some.txt" for key in ("train", "test")]
    config = toy(tmp_path, *changes, "train.prompts=5")
    counted, _, short, same = prompt_lines(config)
    assert "3 to train on" in counted
    assert "train.prompts=5 of 3: an iteration takes some of them more than once" in short
    with pytest.warns(OverlapWarning) as warned:
        Trainer(config)
    assert same.removeprefix("prompts    ") == str(warned[0].message)
    # other prompts, and as many as are taken
    (tmp_path / "others.txt").write_text("a large square\n")
    other = toy(tmp_path, *changes[:1], f"prompts.test={tmp_path}/others.txt", "train.prompts=3")
    assert len(prompt_lines(other)) == 2


def test_weights_of_a_pipeline_without_adapter(tmp_path: Path) -> None:
    """By its own JSON files: the numbers of the loaded model's LoRA and network."""
    folder = save("Lumina2Pipeline", tmp_path / "model")
    options = f"{{fn: pipeline, path: {folder}, lora: {{rank: 2}}, device: cpu}}"
    found = estimate(load_config("shapes/flow_grpo", [f"model={options}"]))
    sizes = {part.name: part.bytes for part in found.parts}
    made: Any = pipeline(path=str(folder), lora={"rank": 2}, device="cpu")
    trained = sum(p.numel() for p in made.trainable().values())
    every = sum(p.numel() for p in made.network.parameters())
    assert sizes["trained weights"] == 4 * trained > 0
    assert sizes["frozen weights"] == 4 * (every - trained)
    assert "activations of pipeline are not counted" in found.note
