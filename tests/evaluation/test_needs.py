"""What a suite needs and does not find: all of it at once, with commands, before a model is
loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from flowrl.cli.main import main
from flowrl.config.load import Config, load_config
from flowrl.core.errors import ModelError
from flowrl.evaluation.needs import named_on_hub, reads, unmet, weights_needed
from flowrl.evaluation.suites.catalogue import SUITES, overrides_of
from flowrl.runs import suite as suites

MODEL = "assets/shapes-sd3"


@pytest.fixture(autouse=True)
def _no_weights_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was downloaded and nothing can be; a model that is loaded is a mistake."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def loaded(self: Config, axis: str) -> None:
        raise AssertionError(f"{axis} was loaded")

    monkeypatch.setattr(Config, "call", loaded)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            "--suite geneval",
            [
                "rewards.geneval.path: hf download facebook/mask2former-swin-small-coco-instance",
                "rewards.geneval.clip: hf download openai/clip-vit-large-patch14",
                "or --set rewards.geneval.path=PATH",
            ],
        ),
        (
            "--suite drawbench",
            [
                "prompts: ",
                "--prompts",
                "pickscore.path: hf download yuvalkirstain/PickScore_v1",
                "pickscore.processor: hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
                "hpsv2.path: hf download xswu/HPSv2",
                "image_reward.path: hf download THUDM/ImageReward",
                "image_reward.tokenizer: hf download google-bert/bert-base-uncased",
                "aesthetic.path: hf download camenduru/improved-aesthetic-predictor",
                "aesthetic.clip: hf download timm/vit_large_patch14_clip_224.openai",
                "clip.path: hf download openai/clip-vit-large-patch14",
            ],
        ),
        (
            "--suite dpg --prompts gone.csv --set rewards.dpg.url=http://127.0.0.1:9",
            ["prompts: cannot find 'gone.csv'", "rewards.questions", "127.0.0.1:9"],
        ),
        (
            "--suite geneval --set rewards.geneval.path=weights/mine.safetensors",
            ["path: weights/mine.safetensors is not here", "hf download openai/clip-vit-large"],
        ),
    ],
)
def test_everything_at_once(
    argv: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a sweep, where a suite has validation prompts."""
    for command in ("eval", "sweep") if "geneval" in argv else ("eval",):
        assert main([command, MODEL, *argv.split(), "--out", str(tmp_path / "out")]) == 2
        told = capsys.readouterr().err
        assert [part for part in said if part not in told] == [] and "Traceback" not in told
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SUITES)
def test_a_reward_says_all_that_it_reads(name: str) -> None:
    """Every argument of a suite's rewards that names a repository of the hub, also by default."""
    prompts = None if SUITES[name].prompts else "assets/shapes/test.jsonl"
    for call in load_config("shapes/awm", overrides_of(name, prompts)).rewards.values():
        texts = {key: value for key, value in call.kwargs.items() if isinstance(value, str)}
        named = {value for value in texts.values() if named_on_hub(value)}
        assert named <= set(reads(call).values())
        assert [need.path for need in unmet(call, name)] == [*reads(call).values()]


def test_a_download_that_fails_names_the_others_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a network nothing is refused at first; the first that cannot be fetched tells of all."""
    config = load_config("shapes/awm", overrides_of("geneval", None))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def failing(*_: object) -> None:
        raise ModelError("rewards.geneval: no network")

    monkeypatch.setattr(suites, "rewards_of", failing)
    with pytest.raises(ModelError, match="no network") as caught:
        suites._checked(object(), config)  # type: ignore[arg-type]
    assert all(line in str(caught.value) for line in weights_needed(config))
    assert len(weights_needed(config)) == 2
