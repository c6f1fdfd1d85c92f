"""`train.empty_prompts`: some images are trained on without their prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from guidekit import config_of, texts_encoded_ahead

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.training.rehearsal import check_plan
from flowrl.training.rollout import Collected, collect
from flowrl.training.trainer import Trainer


def collected(run: Trainer) -> Collected:
    return collect(run, run.rows())


def empty_rows(run: Trainer, found: Collected) -> list[bool]:
    """Say of each prompt whether its row is that of an empty text; each row must be one of two."""
    told = [run.train_set.texts[row] for row in run.rows()]
    with_text, without = run.model.encode(told), run.model.encode([""] * len(told))
    seen = []
    for place in range(len(told)):
        kinds = [
            all(torch.equal(found.rollout.cond[key][place], cond[key][place]) for key in cond)
            for cond in (with_text, without)
        ]
        assert kinds.count(True) == 1
        seen.append(kinds[1])
    return seen


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_sampling_and_rewards_keep_the_prompt(tmp_path: Path, share: float) -> None:
    """Images and scores are those of a run that has the prompts; what is trained sees none."""
    plain = collected(Trainer(config_of(tmp_path)))
    run = Trainer(config_of(tmp_path, f"train.empty_prompts={share}"))
    found = collected(run)
    assert torch.equal(found.batch.images, plain.batch.images)
    assert found.batch.prompts == plain.batch.prompts and all(found.batch.prompts)
    for name, scores in plain.values.items():
        assert torch.equal(found.values[name], scores)
    assert empty_rows(run, found) == [share == 1.0] * len(run.rows())


def test_the_share_is_that_of_the_prompts(tmp_path: Path) -> None:
    """Of 40 prompts half: a fair coin gives 9 to 31 but for one case in 5,000, and the draws are
    the same each time. Turns do not matter: a prompt's draw follows from its place."""
    count = 0
    options = ("train.empty_prompts=0.5", "train.prompts=4", "train.group=2", "train.micro_batch=8")
    whole = Trainer(config_of(tmp_path, *options))
    turns = Trainer(config_of(tmp_path, *options, "train.parts=2"))
    for iteration in range(10):
        whole.state.iteration = turns.state.iteration = iteration
        rows = empty_rows(whole, collected(whole))
        assert rows == empty_rows(turns, collected(turns))
        count += sum(rows)
    assert 9 <= count <= 31


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_it_is_encoded_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """No text encoder works in an iteration; without the option nobody asks for an empty text."""
    run = Trainer(config_of(tmp_path, f"train.empty_prompts={share}"))
    assert ("" in texts_encoded_ahead(run, monkeypatch)) == (share > 0)


def test_where_it_plays_no_part(tmp_path: Path) -> None:
    reverse = load_config("shapes/flow_grpo", ["train.empty_prompts=0.2"])
    drawn = r"train.empty_prompts=0.2: likelihood reverse trains what was drawn with the prompt"
    with pytest.raises(ConfigError, match=drawn):
        check_plan(reverse)
    with pytest.raises(ConfigError, match="each row is seen with and without its prompt"):
        check_plan(config_of(tmp_path, "train.empty_prompts=0.2", guidance=3.0))


def test_the_published_share() -> None:
    """Diffusion-DPO's code, `--proportion_empty_prompts`, by default 0.2."""
    assert load_config("sd15/diffusion_dpo_offline").train.empty_prompts == 0.2
