"""Where the time of 1,000 iterations goes: work against PyTorch's counter on real runs of tiny
models, hours on cards; and what `flowrl estimate` says first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from docskit import ROOT
from estimatekit import OF_THE_CPU, made
from torch.utils.flop_counter import FlopCounterMode

from flowrl.cli.main import main
from flowrl.config.load import Config
from flowrl.core.prompts import load_prompts
from flowrl.cost import time_shares
from flowrl.cost.estimate import estimate
from flowrl.cost.fit_card import change
from flowrl.cost.time_shares import (
    CARDS,
    DISK,
    LEAST,
    MOST,
    Times,
    Work,
    cards_of,
    moments,
    time_lines,
    time_text,
    times_as_json,
    times_of,
)
from flowrl.models.tiny import save_tiny
from flowrl.runs.evaluate import evaluate
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.integration


def taken(config: Config, iterations: int = 1000) -> Times:
    """Return what a config's iterations take."""
    found = times_of(estimate(config), iterations)
    assert found is not None
    return found


def test_the_work_of_a_run_is_what_torch_counts(tmp_path: Path) -> None:
    """One iteration and one evaluation of a tiny SD3 with all three text encoders, each counted
    while it runs."""
    folder = save_tiny("sd3.5", tmp_path / "weights")
    config = made(tmp_path, "sd3, full", "{attention: native}")
    changes = {"path": f"{folder}", "max_sequence_length": 16, "t5": True}
    for key, value in changes.items():
        config = change(config, f"model.{key}", value)
    # no more is seen than one round of everything
    config = change(change(config, "eval.every", 0), "samples.every", 0)
    trainer = Trainer(config)
    trained, held_out = load_prompts(config.prompts.train), load_prompts(config.prompts.test)
    with FlopCounterMode(display=False, custom_mapping=OF_THE_CPU) as encoding:
        trainer.encode_ahead()
    with FlopCounterMode(display=False, custom_mapping=OF_THE_CPU) as iteration:
        trainer.step()
    with FlopCounterMode(display=False, custom_mapping=OF_THE_CPU) as judging:
        evaluate(trainer.model, config, trainer=trainer)
    work = {name: one.operations for name, one in taken(config, 1).work.items()}
    # an iteration
    parts = sum(work[name] for name in ("sampling", "decode", "training"))
    assert parts == pytest.approx(iteration.get_total_flops(), rel=0.01)
    # evaluations: before and after, with their grids
    images = len(held_out) * config.eval.images
    share = images / (images + config.samples.prompts)
    assert work["evaluation"] / 2 * share == pytest.approx(judging.get_total_flops(), rel=0.01)
    # prompts: no more are trained on than an iteration has
    assert len(trained) >= config.train.prompts
    each = encoding.get_total_flops() / (len({*trained.texts, *held_out.texts}))
    counted = min(len(trained), config.train.prompts) + len(held_out) + 1
    assert work["text encoding"] == pytest.approx(counted * each, rel=0.05)


def test_the_work_of_many_iterations(tmp_path: Path) -> None:
    """An iteration's work, 1,000 times. Evaluations come at the start, at the end, and each
    `every`. A reward without a network adds nothing; checkpoints add bytes."""
    config = made(tmp_path, "sd3, full")
    config = change(change(config, "eval.every", 0), "samples.every", 0)
    found = estimate(config)
    times = taken(config)
    for name, count in found.flops.items():
        assert times.work[name].operations == 1000 * count
    assert times.work["rewards"] == Work() and times.work["evaluation"].operations > 0
    # 2 evaluations become 5, the last of which is the one at the end
    often = taken(change(config, "eval.every", 250)).work["evaluation"].operations
    images = len(load_prompts(config.prompts.test)) * config.eval.images
    grids = 2 * config.samples.prompts
    expected = (5 * images + grids) / (2 * images + grids)
    assert often / times.work["evaluation"].operations == pytest.approx(expected)
    assert [moments(every, 1000) for every in (0, 250, 300, 999, 1000, 1)] == [2, 5, 5, 3, 2, 1001]
    # weights and both moments in float32, and the average where there is one
    config = change(change(config, "checkpoint.every", 500), "train.ema", 0.5)
    assert found.weights is not None
    saved = taken(config).work["checkpoints"].written
    assert saved == 3 * 4 * 4 * found.weights.trained


def test_prompts_are_encoded_once_where_the_cache_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each time; a folder keeps them."""
    config = made(tmp_path, "sd3, full")
    trained, held_out = (len(load_prompts(p)) for p in (config.prompts.train, config.prompts.test))
    once = taken(config).work["text encoding"].operations / (trained + held_out + 1)
    monkeypatch.setattr(time_shares, "CACHE_BYTES", 10)
    rounds = moments(config.eval.every, 1000)
    visits = 1000 * config.train.prompts + held_out * rounds + 1
    assert taken(config).work["text encoding"].operations == pytest.approx(visits * once)
    kept = change(config, "model.runtime.cache", f"{tmp_path}/texts")
    assert taken(kept).work["text encoding"].operations < visits * once


def test_seconds_on_a_card() -> None:
    """Each width at its own peak, at both ends of what is reached; bytes at the disk's speed."""
    card = CARDS[0]._replace(short=100.0, wide=10.0)
    work = Work(short=3e14, wide=1e13, written=4e9)
    assert work.seconds(card, slow=False) == pytest.approx(4 / MOST + 4e9 / DISK[0])
    assert work.seconds(card, slow=True) == pytest.approx(4 / LEAST + 4e9 / DISK[1])
    assert time_text((60, 89)) == "60 to 89 s" and time_text((0.02, 0.5)) == "0.02 to 0.5 s"
    assert time_text((80, 300)) == "1.3 to 5.0 min" and time_text((3600, 36000)) == "1.0 to 10 h"


def test_the_ends_of_the_range_are_what_was_measured() -> None:
    """In bfloat16 on an H200, of image models, rounded outwards."""
    file = ROOT / "assets/results/performance-queue.json"
    shares = []
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        result: dict[str, Any] = row.get("result") or {}
        images = row["row"].startswith(("sd3", "flux")) and "float32" not in row["row"]
        if result.get("dtype") == "bfloat16" and result.get("mfu") and images:
            shares += result["mfu"].values()
    assert len(shares) >= 10
    assert LEAST <= min(shares) < LEAST + 0.01 and MOST - 0.01 < max(shares) <= MOST


@pytest.mark.parametrize(
    ("gigabytes", "names"),
    [
        (22.4, ["RTX 3090", "L4", "A10", "RTX 4090"]),
        (24, ["RTX 3090", "L4", "A10", "RTX 4090"]),
        (44.9, ["RTX A6000", "L40S"]),
        (80, ["A100", "H100 PCIe", "H100"]),
        (139.8, ["H200"]),
        (500, ["H200"]),
    ],
)
def test_cards_of_a_size(gigabytes: float, names: list[str]) -> None:
    assert [card.name for card in cards_of(gigabytes)] == names


def test_what_is_said(tmp_path: Path) -> None:
    """All parts, the largest share first, in percent of one whole; a reward that is not counted is
    named, and so is the range."""
    config = made(tmp_path, "sd3, full, bfloat16")
    lines = time_lines(estimate(config), gigabytes=24)
    text, times = "\n".join(lines), taken(config)
    assert lines[0].startswith("time       of 1,000 iterations; shares are those on the RTX 4090")
    shares = [times.share(name, CARDS[3]) for name in times.work]
    assert sum(shares) == pytest.approx(1) and set(times.work) == {
        *("sampling", "decode", "rewards", "training"),
        *("evaluation", "text encoding", "checkpoints"),
    }
    assert all(name in text for name in times.work) and "14% to 36% of its peak" in text
    order = sorted(times.work, key=lambda name: -times.share(name, CARDS[3]))
    places = [text.index(f"           {name} ") for name in order]
    assert places == sorted(places)
    assert f"not counted: the rewards {', '.join(times.unknown)}" in text
    assert times.unknown == [*config.rewards]
    # as data
    told = json.loads(json.dumps(times_as_json(estimate(config))))
    assert told["seconds"]["L40S"] == [*times.seconds(CARDS[5])]
    assert told["work"]["checkpoints"]["bytes"] > 0 == told["work"]["checkpoints"]["operations"]


def test_the_verdict_is_the_first_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And after a no the profile; JSON has both."""
    config, file = made(tmp_path, "sd3, LoRA, guidance"), tmp_path / "found.json"
    (tmp_path / "it.yaml").write_text(config.dump())
    line = ["estimate", f"{tmp_path}/it.yaml", "--plugin", "toykit", "--json", f"{file}"]
    assert main([*line, "--card", "24"]) == 0
    assert capsys.readouterr().out.startswith("fits a 24 GB card: yes, ")
    assert main([*line, "--card", "1.000001"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("fits a 1 GB card: no, ")
    assert second.startswith("--profile 1gb sets ") and "which does not fit into" in second
    card = json.loads(file.read_text())["card"]
    assert (card["profile"], card["profile_fits"], card["verdict"]) == ("1gb", False, first)
