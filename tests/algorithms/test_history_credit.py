"""Credits that remember a prompt's earlier images: the reference's numbers, what a run keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import toy

from flowrl.algorithms.credit.baselines import history_norm
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.types import Tree
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
