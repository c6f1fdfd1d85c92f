"""Any method on any model: the two files that a config is put together from, and its marks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from flowrl.api.arguments import config_of
from flowrl.cli.main import main
from flowrl.config.compose import ASKED, MODEL, OTHER, OURS, PAIR, is_ours, leaves, read_piece
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs, list_models, resource
from flowrl.models.options import adapters, fn_of
from flowrl.runs.composed import SHAPES, composed, is_method


def test_every_adapter_has_a_file() -> None:
    """Each with the sections that a config takes from a model, and of no other config's weights."""
    files = {}
    for name in list_models():
        text = resource(f"configs/models/{name}.yaml").read_text(encoding="utf-8")
        files[name] = read_piece(text, name).raw
    named = {*map(fn_of, adapters()), "pipeline"}
    assert {raw["model"]["fn"] for raw in files.values()} == named
    some = {"unguided", "plan", "instead"}
    assert {key for raw in files.values() for key in raw} - some == set(files["flux"])
    assert list_models() == sorted(files) and not any(
        n.startswith("models") for n in list_configs()
    )


@pytest.mark.parametrize(
    ("note", "key", "ours"),
    [
        ("code", "rank", False),
        ("", "fn", True),
        ("ours: memory", "runtime", True),
        ("steps: code; the rest ours", "steps", False),
        ("steps: Flow-Factory; rest ours", "images", True),
        ("code; last_order ours: the code's 2 overshoots", "last_order", True),
        ("code; last_order ours: the code's 2 overshoots", "order", False),
        ("paper and code; ode_last: ours, the code's 1 would not do", "ode_last", True),
        ("paper and code; ode_last: ours, the code's 1 would not do", "splits", False),
        ("Flow-Factory; on the layers that it adapts, by default", "alpha", False),
    ],
)
def test_what_a_comment_says_of_a_value(note: str, key: str, ours: bool) -> None:
    assert is_ours(note, key) is ours


def test_a_method_on_a_model_of_another_paper() -> None:
    """AWM's own numbers are of SD3.5, and it trains without guidance; the rest is the model's."""
    made = composed("awm", "z_image")
    other = f"{OTHER} (sd3/awm)"
    assert made["model"]["path"] == "Tongyi-MAI/Z-Image"
    assert made["model"]["guidance"] == 0.0 and made.marks["model.guidance"] == other
    assert made.marks["loss.fn"] == made.marks["train.group"] == other
    assert made["image"] == {"height": 512, "width": 512}
    assert made.marks["image.height"] == made.marks["model.lora.rank"] == MODEL
    assert made.marks["train.micro_batch"] == made.marks["transition.fn"] == OURS
    assert made.marks["model.path"] == ASKED


def test_a_pair_that_was_published_is_its_own_config() -> None:
    made = composed("awm", "stabilityai/stable-diffusion-3.5-medium")
    assert load_config(made) == load_config("sd3/awm")
    assert Counter(made.marks.values()).keys() == {PAIR, OURS}
    assert made.marks["loss.clip_low"] == PAIR and made.marks["train.iterations"] == OURS


def test_other_weights_of_a_class_are_no_published_model(tmp_path: Path) -> None:
    """The file of the class is taken, but nothing in it was published for these weights."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    made = composed("awm", tmp_path)
    assert made["model"] == composed("awm", "qwen_image")["model"] | {"path": f"{tmp_path}"}
    assert MODEL not in made.marks.values()
    assert made.marks["image.height"] == f"{OTHER} (models/qwen_image)"


def test_a_class_without_a_file_says_its_own_facts(tmp_path: Path) -> None:
    """The network's latents by the VAE's scale; guidance and steps as the class has them."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "Lumina2Pipeline"}))
    parts = {"transformer": {"sample_size": 64}, "vae": {"block_out_channels": [8, 16, 32, 32]}}
    for name, settings in parts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
    made = composed("dgpo", tmp_path)
    assert made["model"]["fn"] == "pipeline" and made["model"]["path"] == f"{tmp_path}"
    assert made["model"]["call"] == {"guidance_scale": 4.0}
    assert made["image"] == {"height": 512, "width": 512} and made["eval"]["steps"] == 30
    assert made.marks["image.height"] == OURS
    assert load_config(made).model.fn == "pipeline"


def test_python_takes_the_same_names() -> None:
    """A method's name with a model; a config's only with a name of configs/models."""
    for method in ("awm", "sd3/awm"):
        made = config_of(method, model="z_image", train={"group": 12})
        assert made == load_config(composed(method, "z_image"), ["train.group=12"])


def test_a_model_of_timesteps_gets_the_sampler_and_the_times_that_it_knows() -> None:
    """SDXL knows the noise levels of its training timesteps alone, and AWM's solver takes others;
    the rest of the sections stays the method's."""
    made = composed("awm", "sdxl")
    assert made["plan"] == {"steps": 14, "fn": "ode", "order": 2} and made.marks["plan.fn"] == OURS
    assert made.marks["plan.steps"] == made.marks["likelihood.draws"] == f"{OTHER} (sd3/awm)"
    times = composed("diffusion_dpo", "sdxl")["likelihood"]
    assert times == {"fn": "forward", "draws": 4, "shared": True, "times": "any_steps"}


@pytest.mark.parametrize(
    ("method", "model", "home"),
    [
        ("mix_grpo", "qwen_image", "flux/mix_grpo"),
        ("branch_grpo", "wan_i2v", "wan/branch_grpo"),  # videos before images
        ("diffusion_nft", "flux2", "flux/diffusion_nft"),  # guidance is an input of both
        ("diffusion_nft", "qwen_edit", "qwen_edit_plus/diffusion_nft"),  # and of neither
        ("diffusion_nft", "z_image", "sd3/diffusion_nft"),  # images before edits
        ("flow_grpo_fast", "wan_ti2v", "wan/flow_grpo_fast_i2v"),  # its own adapter first
        ("rwr", "sdxl", "shapes/rwr"),
    ],
)
def test_the_home_is_the_nearest_config(method: str, model: str, home: str) -> None:
    assert composed(method, model).source == f"{home} on {model}"


def test_a_rate_for_all_weights_is_none_for_lora() -> None:
    """MixGRPO tunes all of FLUX with 1e-5; on LoRA the model's own rate stands."""
    made = composed("mix_grpo", "qwen_image")
    assert made.marks["plan.size"] == f"{OTHER} (flux/mix_grpo)"
    assert made["optimizer"]["lr"] == 3e-4 and made.marks["optimizer.lr"] == MODEL


def test_a_variant_of_these_very_weights_is_the_pair() -> None:
    """Wan 2.2's config has another name than the method, and is its published one all the same."""
    assert composed("flow_grpo_fast", "wan22").source == "wan/flow_grpo_fast_22 on wan22"
    assert PAIR in composed("flow_grpo_fast", "wan_i2v22").marks.values()


def test_values_of_a_model_that_has_no_config_are_not_of_the_pair() -> None:
    """DanceGRPO's for video are HunyuanVideo's, and the head of the config says so."""
    marks = composed("dance_grpo", "wan").marks
    assert {*marks.values()} == {OURS, f"{OTHER} (HunyuanVideo)"}


def test_numbers_of_the_plan_follow_the_models_grid() -> None:
    """Qwen-Image's last step begins at sigma 0.02, which would leave FLUX's noise in the image; the
    shift that MixGRPO-Flash undoes is SD3's. A plan without such a key gets none, and one whose
    steps are counted by a segment stays."""
    branch, flash = composed("branch_grpo", "qwen_image"), composed("mix_grpo_flash", "sd3")
    assert branch["plan"]["ode_last"] == 2 and branch.marks["plan.ode_last"] == OURS
    assert flash["plan"]["shift"] == 3.0 and "ode_last" not in flash["plan"]
    assert composed("branch_grpo", "flux2")["plan"]["ode_last"] == 1
    assert composed("chunk_grpo", "qwen_image")["plan"]["ode_last"] == 1


def test_what_is_written_loads_to_the_same_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the marks as comments, on each value or on a section that has one."""
    for method, model in (("awm", "z_image"), ("dgpo", "wan_i2v"), ("awm", "sd3")):
        assert main(["configs", method, "--model", model]) == 0
        text = capsys.readouterr().out
        (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
        written = load_config(f"{tmp_path}/mine.yaml", need_rewards=False)
        assert written == load_config(composed(method, model), need_rewards=False)
        assert all(" # " in line or line.endswith(":") for line in text.splitlines())
        assert max(map(len, text.splitlines())) < 400


def test_the_dry_run_marks_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    """What was set on the command line, and what no file says, have marks of their own."""
    more = ["train.group=12", "prompts.train=assets/shapes/train.jsonl"]
    more += ["prompts.test=assets/shapes/validation.jsonl", "rewards={jpeg: {fn: jpeg}}"]
    assert main(["train", "awm", "--model", "z_image", "--dry-run", *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.strip() for line in lines}
    assert "group: 12 # set here" in shown
    assert f"updates: 1 # {OTHER} (sd3/awm)" in shown
    assert "path: Tongyi-MAI/Z-Image # as asked" in shown
    assert any(line.endswith("# flowrl's default") for line in lines)


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="a hub id or a folder, got 'qwen_imag'; did you mean"):
        composed("awm", "qwen_imag")
    with pytest.raises(ConfigError, match="did you mean"):
        composed("awmm", "qwen_image")
    with pytest.raises(ConfigError, match="names the method's own rewards"):
        composed("gardo", "wan")
    with pytest.raises(ConfigError, match="credit compares unfinished images"):
        composed("spo", "wan")
    with pytest.raises(ConfigError, match="loss follows the gradient of the method's own"):
        composed("draft", "wan")
    assert main(["configs", "--model", "flux2"]) == 2
    assert "name a method or a config" in capsys.readouterr().err


def test_names_of_methods() -> None:
    assert is_method("awm") and is_method("AWM") and not is_method("sd3/awm")
    assert not is_method("no_such") and not is_method(None)


@pytest.mark.parametrize("name", [n for n in list_configs() if not n.startswith(SHAPES)])
def test_each_value_of_a_published_config_has_its_comment(name: str) -> None:
    """Most values of a config that was published are published."""
    piece = read_piece(resource(f"configs/{name}.yaml").read_text(encoding="utf-8"), name)
    keys = [key for key, _ in leaves(piece.raw) if key.startswith(("plan.", "loss.", "credit."))]
    told = [key for key in keys if piece.notes.get(key)]
    assert told == keys
