"""Credits of techniques that remember prompts: the reference's numbers, what scaling and shifting
does to them, and what a run keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from groupkit import drawn, images, visit
from torch import Tensor
from toykit import toy

from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.reward_mix.aggregate import gdpo
from flowrl.core.errors import CheckpointError, ConfigError, DataError
from flowrl.core.types import Scores
from flowrl.techniques.prompt_histories import (
    risk_bundles,
    risk_value,
    single_stream,
    smooth_norm,
)
from flowrl.training.trainer import Trainer


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
    with pytest.raises(CheckpointError, match="train.jsonl is another list than that which"):
        later.load(tmp_path / "saved")
    assert later.iteration == 0


# ------------------------------------------------------------------- credits that remember prompts

# what each prompt's images got at the first visit, and at the second
BEFORE = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.9, 0.5, 0.8], [0.3, 0.2, 0.1, 0.6]]
NOW = [[0.3, 0.9, 0.4, 0.9], [0.2, 0.3, 0.7, 0.6], [0.5, 0.1, 0.6, 0.9]]


class Memory(NamedTuple):
    """A credit, who visited before, and what a factor and a constant change: on rewards of all
    visits, then on those of now alone. None: advantages are only scaled."""

    make: Callable[..., Any]
    earlier: tuple[int, ...]
    scales: bool | None
    shifts: bool
    now_scales: bool | None
    now_shifts: bool


MEMORIES = {
    # mean and std of all visits, in the units of the rewards: as plain standardising, but only if
    # the earlier rewards are changed as well
    "DCPO": Memory(smooth_norm, (0, 1, 2), True, True, False, False),
    # nothing came before: the group's own statistics
    "DCPO, first": Memory(smooth_norm, (), True, True, True, True),
    # quantiles of the first batch move with the rewards, and sums are divided by their std
    "RiskPO, first": Memory(partial(risk_bundles, size=1), (), True, True, True, True),
    # at a visit quantiles move by .1 (level - share below), which knows no unit; a constant is in
    # the quantiles and in the sums, unless it comes between them
    "RiskPO": Memory(partial(risk_bundles, size=1), (0, 1, 2), False, True, False, False),
    # the worth of prompts that were seen equally often is the same linear function of their
    # rewards, and standardising over the batch takes out what they share
    "single-stream": Memory(partial(single_stream, keep=0.6), (0, 1, 2), True, True, False, True),
    # else the worth of 1/2 that all begin with weighs differently
    "single-stream, uneven": Memory(
        partial(single_stream, keep=0.6), (0,), False, False, False, True
    ),
}


def remembered(
    memory: Memory, factor: float = 1.0, more: float = 0.0, *, always: bool = True
) -> Tensor:
    """Change the rewards of all visits, or of the second one alone -> its advantages [12]."""
    credit, texts = memory.make(), ["a", "b", "c"]
    credit.start(texts)

    def laid(rewards: list[list[float]], rows: tuple[int, ...], change: bool) -> Any:
        reward, *rest = drawn([rewards[row] for row in rows])
        prompts = [texts[row] for row in rows for _ in rewards[row]]
        return (reward * factor + more if change else reward), *rest, prompts

    if memory.earlier:
        *seen, prompts = laid(BEFORE, memory.earlier, always)
        credit.update(*seen, prompts=prompts)
    *seen, prompts = laid(NOW, (0, 1, 2), True)
    return torch.tensor(images(credit, *seen, prompts=prompts))


@pytest.mark.parametrize("name", MEMORIES)
def test_what_scaling_and_shifting_does_to_what_remembers(name: str) -> None:
    """Rewards times 1/2, and plus 1/16; the table above says why."""
    memory = MEMORIES[name]
    before = remembered(memory)
    assert float(before.std()) > 0.1
    for always, scales in ((True, memory.scales), (False, memory.now_scales)):
        half = remembered(memory, factor=0.5, always=always)
        if scales is None:
            torch.testing.assert_close(half, before / 2)
        else:
            assert torch.allclose(half, before, atol=2e-5) == scales, (always, half, before)
    for always, shifts in ((True, memory.shifts), (False, memory.now_shifts)):
        moved = remembered(memory, more=1 / 16, always=always)
        assert torch.allclose(moved, before, atol=2e-5) == shifts, (always, moved, before)


def test_gdpo_sees_no_units_of_any_reward() -> None:
    """Each reward is standardised in its prompt, so factors and constants of its own change
    nothing; and the sum is centred, so that each prompt sums to 0."""
    first, leaf, tree = drawn(NOW)
    second = drawn(BEFORE[::-1])[0]

    def mixed(one: Tensor, two: Tensor) -> Tensor:
        scores = Scores({"one": one, "two": two}, {"one": 1.0, "two": 0.5}, leaf, tree)
        credit = partial(group_norm, leaf=leaf, tree=tree, eps=0.0, ddof=1)
        return gdpo(scores, credit, eps=0.0).advantage[leaf]

    before = mixed(first, second)
    torch.testing.assert_close(mixed(first / 2, 7 * second + 3), before, atol=2e-5, rtol=0)
    torch.testing.assert_close(before.view(3, 4).sum(1), torch.zeros(3), atol=1e-5, rtol=0)
    assert not torch.allclose(mixed(first, second.flip(0)), before, atol=0.1)


@pytest.mark.parametrize(
    ("credit", "moves"), [("group_norm", False), ("virtual_best", True), ("smooth_norm", True)]
)
def test_a_run_on_equal_rewards_moves_only_by_what_lies_outside_of_the_group(
    tmp_path: Path, credit: str, moves: bool
) -> None:
    """Every image gets .3. Its prompt's group says nothing; a virtual best of 1 does, and so do two
    earlier visits of mean .4 and std .3."""
    changes = ("rewards.red.fn=toykit.same", f"credit={{fn: {credit}}}")
    trainer = Trainer(toy(tmp_path, *changes))
    memory: Any = trainer.method.credit
    if credit == "smooth_norm":
        for rows, value in zip(memory.kept.values(), (2, 0.4, 0.3), strict=True):
            rows.fill_(value)
    metrics = trainer.step()
    assert (metrics.get("grad_norm", 0.0) != 0) == moves
    assert metrics["trained"] == (24 if moves else 0)
