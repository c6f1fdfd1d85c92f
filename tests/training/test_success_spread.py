"""Single-stream's other half: which prompts are drawn, by what was seen of them so far."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flowrl.core.abilities import PromptDraw, Visit
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree
from flowrl.techniques.prompt_histories import single_stream
from flowrl.techniques.prompt_samplers import success_spread

FOUR = ["a", "b", "c", "d"]
DRAW = PromptDraw(0, 4, 1, lambda a, n: [*range(a, a + n)], torch.Generator().manual_seed(0))


def started(sampler: success_spread, prompts: list[str] = FOUR) -> success_spread:
    sampler.start(prompts)
    return sampler


def test_single_stream_draws_by_the_spread_of_a_success(tmp_path: Path) -> None:
    """The reference's tracker by hand. keep .875: 4, 4 before a visit; after a reward of 1 they are
    .875 * 4 + 1 = 4.5 and 3.5, so v = .5625 and the weight sqrt(.5625 * .4375) + .05 = .546078; two
    visits of one row in an iteration forget once: 3.5 + 2, 3.5. With gamma 1 the first is .496078
    / 8 + .05. Scores 3 of 8: 8 * 3.5 / 9 and 8 * 5.5 / 9."""
    sampler = started(success_spread(keep=0.875))
    assert sampler.weights().tolist() == pytest.approx([0.55] * 4)
    worth = [Visit(row, 1.0, 0.0, 1) for row in (0, 1, 1)]
    sampler.update(DRAW, [*worth, Visit(2, 0.0, 0.0, 0)])
    assert sampler.column("alpha").tolist() == pytest.approx([4.5, 5.5, 4, 4])
    assert sampler.column("beta").tolist() == pytest.approx([3.5, 3.5, 4, 4])
    assert float(sampler.weights()[0]) == pytest.approx(0.546078, abs=1e-6)
    sampler.gamma = 1.0
    assert float(sampler.weights()[0]) == pytest.approx(0.05 + 0.496078 / 8, abs=1e-6)
    # the credit's own tracker, by the same rewards
    credit = single_stream(keep=0.875)
    credit.start(FOUR)
    leaf = torch.tensor([0])
    tree = Tree(leaf - 1, leaf, leaf.float(), leaf)
    credit.update(torch.tensor([1.0]), leaf, tree, prompts=["a"])
    assert credit.kept["alpha"][0, 0] == sampler.column("alpha")[0]
    file = tmp_path / "scored.jsonl"
    scores = [{"prompt": text, "scores": [1, 1, 1, 0, 0, 0, 0, 0]} for text in FOUR]
    file.write_text("\n".join(map(json.dumps, scores)))
    begun = started(success_spread(keep=0.875, scores=str(file)))
    assert float(begun.column("alpha")[0]) == pytest.approx(3.1111, abs=1e-4)
    assert float(begun.column("beta")[0]) == pytest.approx(4.8889, abs=1e-4)
    with pytest.raises(ConfigError, match="sampler success_spread: .* has no scores of 'e'"):
        started(success_spread(scores=str(file)), [*FOUR, "e"])


def test_settled_prompts_still_come_at_times() -> None:
    """One prompt at v = 1/2, three settled near v = 1 and 0: weights .55 and about .05, shares .55
    / .70 and .05 / .70 each; 3 standard errors of 4000 draws are at most .02."""
    sampler = started(success_spread())
    sampler.column("alpha")[1:] = torch.tensor([1e6, 1e6, 1e-6])
    sampler.column("beta")[1:] = torch.tensor([1e-6, 1e-6, 1e6])
    rows = sampler(DRAW._replace(places=4000))
    share = torch.bincount(torch.tensor(rows), minlength=4) / 4000
    assert share.tolist() == pytest.approx([0.55 / 0.7, *[0.05 / 0.7] * 3], abs=0.02)
