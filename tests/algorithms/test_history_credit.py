"""Credits that remember a prompt's earlier images: the reference's numbers, what a run keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import toy

from flowrl.algorithms.credit.baselines import history_norm
from flowrl.core.errors import CheckpointError, ConfigError, DataError
from flowrl.core.types import Tree
from flowrl.techniques.prompt_histories import risk_bundles, risk_value, single_stream, smooth_norm
from flowrl.training.trainer import Trainer

NAN = float("nan")


def batch(rewards: list[float], prompts: str) -> tuple[Tensor, Tensor, Tree, list[str]]:
    """Lay rewards out as leaves without anything above them; a letter names each prompt."""
    leaf = torch.arange(len(rewards))
    group = torch.tensor([ord(letter) for letter in prompts])
    tree = Tree(torch.full_like(leaf, -1), torch.zeros_like(leaf), torch.zeros(len(leaf)), group)
    return torch.tensor(rewards), leaf, tree, list(prompts)


def visit(credit: Any, rewards: list[float], prompts: str) -> list[float]:
    *rest, texts = batch(rewards, prompts)
    found: list[float] = credit(*rest, prompts=texts).tolist()
    assert credit(*rest, prompts=texts).tolist() == found  # a call changes nothing
    credit.update(*rest, prompts=texts)
    return found


def test_ddpo_has_the_published_numbers() -> None:
    """The reference's fixture, made by the published tracker: buffer 32, min_count 4."""
    credit = history_norm(buffer=32, least=4)
    credit.start(["a", "b", "never"])
    first = visit(credit, [1, 2, 3, 5], "aabb")
    assert first == pytest.approx([-1.1832152, -0.5070922, 0.1690307, 1.5212766], abs=2e-6)
    second = visit(credit, [2, 4, 3, 3], "aabb")
    assert second == pytest.approx([-0.2294155, 1.6059087, -0.5773496, -0.5773496], abs=2e-6)


def test_a_full_buffer_has_mean_zero_and_forgets_the_oldest() -> None:
    """The advantages of all that a prompt remembers: mean 0 and std 1, by their definition."""
    credit = history_norm(buffer=4, least=2)
    credit.start(["a"])
    visit(credit, [100.0, -100.0], "aa")
    found = visit(credit, [1.0, 2.0, 3.0, 6.0], "aaaa")
    assert sum(found) == pytest.approx(0, abs=1e-5)
    assert sum(value**2 for value in found) == pytest.approx(4, abs=1e-4)
    assert credit.kept["rewards"].tolist() == [[1.0, 2.0, 3.0, 6.0]]


def test_what_was_not_scored_is_not_remembered() -> None:
    credit = history_norm(buffer=4, least=1)
    credit.start(["a", "b"])
    assert visit(credit, [NAN, 1.0, NAN], "aab") == [0, 0, 0]
    assert credit.kept["rewards"][:, 0].tolist()[0] == 1.0
    assert bool(credit.kept["rewards"][1].isnan().all())


@pytest.mark.parametrize("options", [{"buffer": 4, "least": 5}, {"least": 0}, {"eps": 0.0}])
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="history_norm"):
        history_norm(**options)


def test_dcpo_has_the_reference_s_numbers() -> None:
    """Its fixture: two visits, mean .4, std .3, then 0, 1, 1, 1. At a first visit the group's own
    statistics; a group of equal images still has what the visits before say."""
    credit = smooth_norm()
    credit.start(["a", "b"])
    credit.kept["visits"][0], credit.kept["mean"][0], credit.kept["std"][0] = 2, 0.4, 0.3
    found = visit(credit, [0, 1, 1, 1, 0, 1], "aaaabb")
    assert found[:4] == pytest.approx([-1.334039, *[0.723448] * 3], abs=2e-6)
    assert found[4:] == pytest.approx([-(0.5**0.5), 0.5**0.5])
    kept = [float(rows[0, 0]) for rows in credit.kept.values()]
    assert kept == pytest.approx([3, 0.516667, 0.412984], abs=1e-6)
    again = visit(credit, [1.0, 1.0], "aa")
    assert again[0] == again[1] > 0


def test_single_stream_has_the_reference_s_numbers() -> None:
    """Its fixture: alpha = beta = 4 and reward 1 make 4.5 and 3.5, worth .5625. The batch is
    standardised (n - 1): of gaps .5 and -.5625 by hand."""
    credit = single_stream(keep=0.875)
    credit.start(["a", "b"])
    visit(credit, [1.0], "a")
    assert [float(rows[0, 0]) for rows in credit.kept.values()] == [4.5, 3.5]
    assert visit(credit, [0.0, 1.0], "ab") == pytest.approx([-(0.5**0.5), 0.5**0.5])
    with pytest.raises(ConfigError, match="the list must not change"):
        visit(credit, [1.0], "c")
    with pytest.raises(ConfigError, match="0 < keep < 1"):
        single_stream(keep=1.0)


def test_single_stream_starts_from_scores_made_beforehand(tmp_path: Path) -> None:
    """The reference's fixture: 3 of 8 right and N = 1 / (1 - .875) = 8 are 3.1111 and 4.8889. A
    prompt that was scored in two records has both; without scores alpha = beta = N / 2."""
    file = tmp_path / "scores.jsonl"
    rows = [("a", [1, 0, 0, 1]), ("b", []), ("a", [0, 1, 0, 0]), ("spare", [0.5])]
    lines = [json.dumps({"prompt": text, "scores": scores}) for text, scores in rows]
    file.write_text("\n".join(lines))
    credit = single_stream(keep=0.875, scores=str(file))
    credit.start(["a", "b"])
    assert credit.kept["alpha"].flatten().tolist() == pytest.approx([3.1111, 4], abs=5e-5)
    assert credit.kept["beta"].flatten().tolist() == pytest.approx([4.8889, 4], abs=5e-5)
    with pytest.raises(ConfigError, match=r"scores\.jsonl has no scores of 'c'"):
        credit.start(["a", "c"])


@pytest.mark.parametrize("scores", ["none", [2.0], [True], [-0.5], ["1"], [float("nan")]])
def test_scores_that_are_none_are_named(tmp_path: Path, scores: Any) -> None:
    """With file and line, and before the model is loaded."""
    file = tmp_path / "scores.jsonl"
    file.write_text(json.dumps({"prompt": "a red dot", "scores": scores}))
    changes = (f"credit={{fn: single_stream, scores: {file}}}", "model={fn: toykit.unloadable}")
    with pytest.raises(DataError, match=r"scores\.jsonl, line 1: expected `scores`"):
        Trainer(toy(tmp_path, *changes))


def test_riskpo_has_the_reference_s_numbers() -> None:
    """Its fixture: sums 0 to 5 with quantiles 1 and 4. In a run sums are of the i-th images of a
    bundle's prompts, and quantiles move by 0.1 (level - share below)."""
    value = risk_value(torch.arange(6.0), 1, 4, 0.2, 0.8)
    assert value.tolist() == pytest.approx([-5, -2, -4 / 3, -2 / 3, 0, 0], abs=3e-5)
    credit = risk_bundles(size=2)
    credit.start([])
    rewards = [0.0, 1.0, 2.0, 0.0, 1.0, 3.0]  # sums 0, 2, 5
    credit.quantiles = torch.tensor([1.0, 4.0], dtype=torch.float64)
    found = visit(credit, rewards, "aaabbb")
    spread = (19 / 3) ** 0.5  # of 0, 2, 5 with n - 1
    assert found == pytest.approx([-5 / spread, -4 / 3 / spread, 0] * 2, abs=1e-5)
    assert credit.quantiles.tolist() == pytest.approx(
        [1 + 0.1 * (0.2 - 1 / 3), 4 + 0.1 * (0.8 - 2 / 3)]
    )
    with pytest.raises(ConfigError, match="multiple of credit.size"):
        visit(credit, [0.0, 1.0, 2.0], "abc")


# ---------------------------------------------------------------------------------------- in a run

HISTORY = ("credit={fn: history_norm, buffer: 8, least: 2}", "train.group=1", "train.prompts=4")


def test_a_run_goes_on_with_what_it_remembers(tmp_path: Path) -> None:
    """2 + 2 iterations against 4, to the bit; one image per prompt is enough."""
    config = toy(tmp_path, *HISTORY)
    whole, first = Trainer(config), Trainer(config)
    metrics = [whole.step() for _ in range(4)]
    again = [first.step() for _ in range(2)]
    first.save(tmp_path / "middle")
    second = Trainer(config)
    second.load(tmp_path / "middle")
    assert again + [second.step() for _ in range(2)] == metrics
    assert metrics[0]["grad_norm"] > 0


def test_another_list_of_prompts_is_refused(tmp_path: Path) -> None:
    """On resume, and in the middle of a run; a reward by itself is no reward of the prompt."""
    config = toy(tmp_path, *HISTORY)
    trainer = Trainer(config)
    trainer.save(tmp_path / "saved")
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[::-1]))
    with pytest.raises(CheckpointError, match="remembered other prompts"):
        Trainer(config).load(tmp_path / "saved")
    *rest, _ = batch([1.0], "a")
    with pytest.raises(ConfigError, match="'new' is none of them"):
        trainer.method.credit(*rest, prompts=["new"])
    both = ("aggregate={fn: gdpo}", "rewards.strict.weight=1")
    with pytest.raises(ConfigError, match="take aggregate weighted_sum"):
        Trainer(toy(tmp_path, *HISTORY, *both))


@pytest.mark.parametrize("change", ["one less", "one more", "another order", "another word"])
def test_single_stream_refuses_a_prompt_set_that_changed(tmp_path: Path, change: str) -> None:
    """On resume, before an iteration is made: what it knows belongs to the prompts it was learnt
    from. The list it began with is taken."""
    config = toy(
        tmp_path,
        "credit={fn: single_stream}",
        "rewards.red.fn=toykit.warmth",
        "train.group=1",
        "train.prompts=4",
    )
    first = Trainer(config)
    assert first.step()["grad_norm"] > 0
    first.save(tmp_path / "saved")
    Trainer(config).load(tmp_path / "saved")
    # the list is another one when the run is resumed
    file = tmp_path / "train.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    changed = {
        "one less": lines[:-1],
        "one more": [*lines, '{"prompt": "a brown dot", "tag": "odd", "held_out": false}\n'],
        "another order": lines[::-1],
        "another word": [lines[0].replace("dot", "spot"), *lines[1:]],
    }
    file.write_text("".join(changed[change]))
    later = Trainer(config)
    with pytest.raises(CheckpointError, match="single_stream has remembered other prompts"):
        later.load(tmp_path / "saved")
    assert later.iteration == 0
