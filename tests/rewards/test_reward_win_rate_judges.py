"""Who judges pairs: other rewards by name, and what is no judge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import rankdata
from toykit import apprentice, toy
from winkit import Judge, Scorer, batch_of, with_judge

from flowrl.config.calls import Call
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.types import Reward
from flowrl.training.trainer import Trainer
from rewards.jpeg import jpeg
from rewards.win_rate import win_rate


def test_another_reward_as_judge() -> None:
    """The flattest image makes the smallest JPEG; `jpeg` itself is the oracle."""
    noise = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = 0.5 + torch.tensor([0.0, 0.4, 0.1, 0.2])[:, None, None, None] * (noise - 0.5)
    batch = batch_of([0] * 4)._replace(images=images)
    expected = (rankdata(jpeg(goal="incompressibility")(batch).numpy()) - 1) / 3
    for fn in ("jpeg", "rewards.jpeg", "rewards.jpeg.jpeg", "jpeg.jpeg"):
        reward = win_rate(judge={"fn": fn, "goal": "incompressibility", "scale": 2})
        assert isinstance(reward, Reward) and isinstance(reward.judge, jpeg)
        rate = reward(batch).double()
        torch.testing.assert_close(rate, torch.tensor(expected), atol=1e-6, rtol=0)


NO_REWARDS: list[Any] = [None, "", 3, "this", "os", "os.system", "rewards", "rewards..jpeg"]
NO_REWARDS += ["rewards._common.scorer", "_scorer", "_scorer.to_pil", "../jpeg", "jpeg\n"]
NO_REWARDS += ["win_rate", "rewards.win_rate", "rewards.win_rate.win_rate", "rewards.vlm.path"]
NO_REWARDS += ["rewards.jpeg.Image", "rewards.jpeg.io", "rewards.jpeg.jpeg.jpeg"]
NO_REWARDS += ["flowrl.training.trainer"]


def test_nothing_but_a_reward_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for fn in NO_REWARDS:
        with pytest.raises(ConfigError, match="judge"):
            win_rate(judge={"fn": fn})
    assert "this" not in sys.modules
    with pytest.raises(ConfigError, match="there is: .*jpeg.*shapes.*vlm") as error:
        win_rate(judge={"fn": "zzz"})
    assert "_scorer" not in str(error.value) and "win_rate," not in str(error.value)
    # what a file imports is not its own
    monkeypatch.setattr("rewards.jpeg.path", Path, raising=False)
    with pytest.raises(ConfigError, match="rewards/jpeg has no class 'path' of its own"):
        win_rate(judge={"fn": "rewards.jpeg.path"})
    # nor is one that learns
    monkeypatch.setattr("rewards.win_rate._find", lambda fn, where: apprentice)
    with pytest.raises(ConfigError, match="apprentice learns"):
        win_rate(judge={"fn": "learner"})


def test_a_wrong_judge_is_refused() -> None:
    for judge, message in (
        ({"fn": "win_rate", "judge": {"fn": "jpeg"}}, "rewards/ has no judge 'win_rate'"),
        ({"fn": "jpge"}, "did you mean 'jpeg'"),
        ({}, "expected the name of a file"),
        ({"fn": "jpeg", "quallity": 3}, "no argument 'quallity'; did you mean 'quality'"),
        ({"fn": "jpeg", "weight": 1.0}, "no argument 'weight'"),
        ({"fn": "jpeg", "quality": "high"}, "quality: expected int, got 'high'"),
        ({"fn": "jpeg", "quality": True}, "quality: expected int, got True"),
        ({"fn": "jpeg", "scale": "1e-4"}, "scale: expected float, got '1e-4'"),
        ({"fn": "jpeg", "goal": "small"}, "goal: expected Literal"),
        ({"fn": "vlm", "cache": 3}, "cache: expected str | None, got 3"),
    ):
        with pytest.raises(ConfigError) as error:
            win_rate(judge=judge)  # type: ignore[arg-type]
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (Judge(lambda a, b: 1.5), "verdicts in .0, 1. or NaN of the judge, got 1.5"),
        (Judge(lambda a, b: -0.5), "got -0.5"),
        (Scorer([1.0, float("inf")]), "finite scores or NaN of the judge, got inf"),
        (lambda batch: torch.zeros(3), "expected 2 answers"),
    ],
)
def test_a_broken_answer_stops(judge: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        with_judge(judge)(batch_of([0, 0]))


def test_records_and_probes_go_to_the_judge() -> None:
    with pytest.raises(DataError, match="line 3"):
        win_rate(judge={"fn": "shapes"}).check_record({"prompt": "a", "include": 3}, "line 3")
    win_rate(judge={"fn": "jpeg"}).check_record({}, "line 3")
    win_rate(judge={"fn": "jpeg"}).probe()
    pairs = win_rate(judge={"fn": "vlm", "url": "http://127.0.0.1:9", "template": "think"})
    pairs.check_record({"prompt": "a"}, "line 3")  # a pair template alone would be refused here
    with pytest.raises(RunError, match="no answer from http://127.0.0.1:9/v1"):
        pairs.probe()


def test_a_judge_of_pairs_checks_records_too() -> None:
    """PaCo-RL's question needs a grid in the prompt; without one no image is made."""
    grids = win_rate(judge={"fn": "vlm", "template": "consistency"})
    grids.check_record({"prompt": "a 2x2 grid of cats"}, "line 3")
    with pytest.raises(DataError, match="line 3: .* expected a grid of 2 to 16 cells"):
        grids.check_record({"prompt": "a cat"}, "line 3")

    class Own(Judge):
        def check_record(self, record: dict[str, Any], where: str) -> None:
            raise DataError(where)

    with pytest.raises(DataError, match="line 4"):
        with_judge(Own(lambda a, b: 0.5)).check_record({}, "line 4")


def test_a_tie_of_scores_is_refused_where_pairs_are_judged() -> None:
    for template in ("pair_rank", "pair_score", "think", "flex"):
        with pytest.raises(
            ConfigError, match="tie: expected a judge of single images.*got one of pairs: vlm"
        ):
            win_rate(judge={"fn": "vlm", "template": template}, tie=0.1)


@pytest.mark.integration
def test_a_config_binds_it_and_a_trainer_uses_it(tmp_path: Path) -> None:
    """Each prompt's rates have the mean 1/2, so does the batch."""
    judge = {"fn": "vlm", "template": "flex", "w_dims": 0.5}
    raw = {"fn": "win_rate", "weight": 0.4, "judge": judge, "max_pairs": 12}
    call = Call.bind("rewards.wins", raw)
    assert call.mix == 0.4 and call.kwargs["judge"] == judge
    made: Any = call.function(**call.kwargs)
    assert made.judge.how.w_dims == 0.5 and made.max_pairs == 12 and made.swap
    metrics = Trainer(toy(tmp_path, "rewards={wins: {fn: win_rate, judge: {fn: jpeg}}}")).step()
    assert metrics["reward/wins"] == pytest.approx(0.5, abs=1e-6) and metrics["trained"] > 0
