"""Which prompts an iteration gets: the rules by hand, and what a run keeps of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import toy
from trainkit import credited, put

from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.forest import merge, of_prompt
from flowrl.core.abilities import PromptDraw, Visit
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.techniques.chosen_prompts import ChosenPrompts
from flowrl.techniques.prompt_samplers import (
    knapsack,
    shared_out,
    success_spread,
    value,
    variance_weighted,
)
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer

FOUR = ["a", "b", "c", "d"]


def draw(iteration: int = 0, places: int = 4) -> PromptDraw:
    """Draw from a list that is never shuffled."""
    rng = torch.Generator().manual_seed(iteration)
    return PromptDraw(iteration, places, 2, lambda a, n: [*range(a, a + n)], rng)


def seen(*means: float, std: float = 0.0, images: int = 10) -> list[Visit]:
    """Say what the first prompts of the list were worth."""
    return [Visit(row, mean, std, images) for row, mean in enumerate(means)]


def started(sampler: Any, prompts: list[str] = FOUR) -> Any:
    sampler.start(prompts)
    return sampler


# -------------------------------------------------------------------------------------- the rules


def test_mmr1_weighs_by_scaled_variance() -> None:
    """Stds .1 .3 .5: variances .01 .09 .25 scaled to 0, .08/.24, 1; a prompt never drawn has their
    mean, 4/9. Half of a batch is the epochs'; by weight nothing of weight 0 is drawn."""
    sampler = started(variance_weighted())
    visits = [Visit(row, 0.5, std, 4) for row, std in enumerate((0.1, 0.3, 0.5))]
    sampler.update(draw(), visits)
    assert sampler.weights().tolist() == pytest.approx([0, 1 / 3, 1, 4 / 9])
    rows = sampler(draw(3, 4000))
    assert rows[2000:] == [*range(6000, 8000)] and sampler(draw(3, 4000)) == rows
    share = torch.bincount(torch.tensor(rows[:2000]), minlength=4) / 2000
    # 3 standard errors of a share are at most .034
    assert share.tolist() == pytest.approx([0, 3 / 16, 9 / 16, 4 / 16], abs=0.034)
    older = started(variance_weighted(momentum=0.75))
    older.update(draw(), [Visit(0, 0.5, 0.4, 4)])
    older.update(draw(), [Visit(0, 0.5, 0.0, 4), Visit(1, 0.5, 0.3, 1)])
    assert older.column("variance").tolist()[0] == pytest.approx(0.75 * 0.16)
    assert older.column("variance").isnan().tolist() == [False, True, True, True]


def test_a_knapsack_is_filled_best() -> None:
    """The reference's fixture; and against all ways to share out, for random rates."""
    assert shared_out([0.02, 0.3, 0.5, 0.9], 16, 2, 8, 1) == [2, 7, 5, 2]
    worth = [value(n, p) for n, p in zip([2, 7, 5, 2], [0.02, 0.3, 0.5, 0.9], strict=True)]
    assert sum(worth) == pytest.approx(0.254422, abs=1e-6)
    rates = torch.rand(4, generator=torch.Generator().manual_seed(0)).tolist()
    ways = [way for way in itertools.product(range(1, 5), repeat=4) if sum(way) == 9]

    def total(way: Any) -> float:
        return sum(value(3 * n, p) for n, p in zip(way, rates, strict=True))

    assert total(shared_out(rates, 9, 1, 4, 3)) == pytest.approx(max(map(total, ways)))
    sampler = started(knapsack(mean=2, most=3))
    sampler.update(draw(), seen(0.0, 0.5, images=98))
    assert sampler.column("rate").tolist()[:2] == pytest.approx([0.01, 0.5])
    assert sampler(draw(0, 4)) == [0, 1, 1, 1] and sampler(draw(1, 4)) == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: variance_weighted(share=1.5), "share from 0 to 1"),
        (lambda: success_spread(keep=1.0), "0 < keep < 1"),
        (lambda: started(success_spread()).update(draw(), seen(1.5)), "rewards from 0 to 1"),
        (lambda: knapsack(mean=5), "least <= mean <= most"),
    ],
)
def test_options_and_rewards_that_cannot_be(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


# ---------------------------------------------------------------------------------------- in a run

BINARY = ("rewards.red={fn: toykit.reddish}", "train.prompts=4")
SAMPLERS = {
    "variance_weighted": (),
    "success_spread": (),
    "knapsack": (),
    "refill": ("train.refill=2",),
}


def options(name: str) -> list[str]:
    more = [*BINARY, *(o for o in SAMPLERS[name] if not o.startswith("sampler."))]
    if name == "refill":
        return more
    return [*more, f"sampler={{fn: {name}}}"]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_in_two_halves_is_the_run_in_one(tmp_path: Path, name: str) -> None:
    """2 + 2 iterations against 4, to the bit; and the sampler has learnt something by then."""
    config = toy(tmp_path, *options(name))
    whole, first = Trainer(config), Trainer(config)
    metrics = [whole.step() for _ in range(4)]
    again = [first.step() for _ in range(2)]
    first.save(tmp_path / "middle")
    second = Trainer(config)
    second.load(tmp_path / "middle")
    assert second.rows() == first.rows() == second.rows()
    assert again + [second.step() for _ in range(2)] == metrics
    if name != "refill":
        plain = Trainer(toy(tmp_path, *BINARY))
        plain.state.iteration = 4
        assert whole.rows() != plain.rows()
        with pytest.raises(CheckpointError, match=r"parts \['copies', 'sampler'\], this run has"):
            Trainer(toy(tmp_path, *BINARY)).load(tmp_path / "middle")


def test_a_prompt_with_several_places_is_one_group(tmp_path: Path) -> None:
    """Advantages are those of `group_norm` over all of a prompt's images; half of the prompts have
    more images than `train.group`."""
    more = ("train.prompts=6", "train.group=2", "seed=1")  # whose rewards differ
    trainer = Trainer(toy(tmp_path, *options("knapsack"), *more))
    chosen = trainer.parts.get(ChosenPrompts)
    assert chosen is not None
    chosen.sampler.update(draw(), [Visit(trainer.rows()[0], 1.0, 0.0, 8)])
    rows = trainer.rows()
    assert len(set(rows)) == 3 and max(rows.count(row) for row in rows) > 2
    it = credited(trainer, rows)
    ro = it.found.rollout
    prompt = torch.tensor(rows)[ro.tree.group]
    wanted = group_norm(it.found.values["red"], ro.leaf, ro.tree._replace(group=prompt))
    assert (
        it.advantage is not None
        and torch.equal(it.advantage, wanted)
        and float(wanted.abs().max()) > 0.5
    )


def test_prompts_without_a_signal_are_drawn_again(tmp_path: Path) -> None:
    """Two of the six prompts have equal rewards always. They are replaced by such that have a
    signal, the others keep every bit, and each new image is counted."""
    dull = ("rewards.red={fn: toykit.dull}", "train.prompts=4", "train.ema=0")
    base, again = (
        Trainer(toy(tmp_path, *dull, "eval.weights=current", f"train.refill={n}")) for n in (0, 3)
    )
    kept: list[tuple[Tensor, Tensor]] = []
    for trainer in (base, again):
        learn = trainer.method.credit

        def spy(reward: Tensor, leaf: Tensor, tree: Any, learn: Any = learn) -> Tensor:
            kept.append((reward.clone(), tree.group[leaf]))
            found: Tensor = learn(reward, leaf, tree)
            return found

        put(trainer, method=replace(trainer.method, credit=spy))
    texts = [base.train_set.texts[row] for row in base.rows()]
    bad = [n for n, text in enumerate(texts) if text in ("a red dot", "a green dot")]
    plain, other = base.step(), again.step()
    (before, group), (after, same) = kept
    assert bad and torch.equal(group, same)
    for place in range(4):
        mine = group == place
        assert (float(before[mine].std()) == 0) == (place in bad)
        assert float(after[mine].std()) > 0
        assert torch.equal(before[mine], after[mine]) == (place not in bad)
    drawn = other["refilled"]
    assert drawn >= len(bad) and plain["zero_std"] == len(bad) / 4 and other["zero_std"] == 0
    assert other["nfe"] - plain["nfe"] >= drawn * base.cost.nfe / 4
    assert other["scored"] == plain["scored"] * (1 + drawn / 4)


def parts_of(field: Any) -> Any:
    """List the tensors of a field of a rollout."""
    if isinstance(field, dict):
        return field.values()
    return field if isinstance(field, tuple) else [field]


def test_prompts_taken_apart_and_joined_are_the_same(tmp_path: Path) -> None:
    """Every field of a rollout with forks, with and without the latents of its leaves."""
    tree = "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 2], ode_last: 1}"
    for more in ((), ("train.same_noise=true", "train.group=8")):
        trainer = Trainer(toy(tmp_path, tree, "train.prompts=3", *more))
        rows = trainer.rows()
        for ro in (trainer.sample(rows), collect(trainer, rows).rollout):
            parts = [of_prompt(ro, place) for place in range(3)]
            whole = merge(parts)[0]
            for name in ro._fields:
                mine, old = ([*parts_of(getattr(r, name))] for r in (whole, ro))
                for a, b in zip(mine, old, strict=True):
                    assert a is b is None or torch.equal(a, b), name


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["sampler={fn: knapsack}", "train.prompts=3"], "take a multiple of 2"),
        (["sampler={fn: knapsack}", "train.refill=1", "train.prompts=4"], "place by place"),
        (["sampler={fn: variance_weighted}", "train.balance=tag"], "leave one out"),
        (["train.refill=1", "train.group=1"], "train.group=1"),
        (["sampler={fn: knapsak}"], "knapsack"),
        (["sampler={fn: variance_weighted, momentm: 0}"], "momentum"),
    ],
)
def test_configs_that_cannot_be(tmp_path: Path, more: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(toy(tmp_path, *more))
