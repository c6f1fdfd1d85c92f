"""Prompts whose images start from others: what a list may name, and who sees it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from editkit import EditFlow
from PIL import Image
from torch import Tensor
from toykit import write_toy

from flowrl.config.load import load_config
from flowrl.core.errors import CheckpointError, ConfigError, DataError, FlowRLError
from flowrl.core.prompts import load_prompts
from flowrl.core.types import RewardBatch
from flowrl.evaluation.image_grids import load_strip
from flowrl.evaluation.reward_call import ask
from flowrl.evaluation.sources import check_sources, prompt_keys, sources_of
from flowrl.models.toy import LinearFlow
from flowrl.runs.evaluate import evaluate
from flowrl.runs.train import train
from flowrl.training.rollout import collect
from flowrl.training.run import OverlapWarning
from flowrl.training.trainer import Trainer
from rewards.remote.messages import pack
from rewards.remote.read_request import RequestLimits, RequestRefused, parse
from rewards.remote.request_queue import join

LEVELS = (51, 102, 153, 204)  # of the sources' red, a fifth of 255 apart


def seen(batch: RewardBatch) -> Tensor:
    """Score by the red of what each image started from."""
    return torch.stack([source[0][0].mean() for source in batch.source])


def paint(file: Path, red: int, size: tuple[int, int] = (16, 16), mode: str = "RGB") -> Path:
    Image.new("RGB", size, (red, 9, 9)).convert(mode).save(file)
    return file


def write_list(file: Path, sources: Sequence[Any]) -> str:
    rows = [{"prompt": f"make it {i}", "source": name} for i, name in enumerate(sources)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Write the toy with lists of edits; one source is twice as large as the images."""
    path = str(write_toy(tmp_path))
    for place, red in enumerate(LEVELS):
        side = 32 if place == 3 else 16
        paint(tmp_path / f"{place}.png", red, (side, side))
    write_list(tmp_path / "train.jsonl", ["0.png", "1.png", ["2.png"], "3.png"])
    write_list(tmp_path / "test.jsonl", ["3.png", "1.png"])
    return path


def loaded(config: str, *changes: str) -> Any:
    return load_config(config, changes, ("toykit", "editkit"))


def test_sources_reach_model_and_rewards(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The red of a source is its level over 255, also of the larger one, scaled to the images."""
    trainer = Trainer(loaded(config), model=EditFlow())
    trainer.rewards["red"] = trainer.reward_set.rewards["red"] = seen
    rows = trainer.rows()
    found = collect(trainer, rows)
    want = torch.tensor([LEVELS[row] / 255 for row in rows for _ in range(4)])
    torch.testing.assert_close(found.values["red"], want, atol=1e-6, rtol=0)
    assert {image.shape for source in found.batch.source for image in source} == {(3, 16, 16)}
    # latents in [-1, 1], a row per prompt
    red = found.rollout.cond["source"][:, 0].mean((1, 2))
    torch.testing.assert_close(red, 2 * want[::4] - 1, atol=1e-6, rtol=0)
    assert torch.isfinite(torch.tensor(list(trainer.step().values()))).all()
    # held out: the mean over both sources of the test list
    report = evaluate(trainer.model, trainer.config, trainer=trainer)
    assert report["rewards"]["red"] == pytest.approx((LEVELS[3] + LEVELS[1]) / 2 / 255)
    # by a function of several arguments
    plain = ask("f", lambda images, prompts, source: [s[0].mean() for s in source], found.batch, "")
    whole = [source[0].mean().item() for source in found.batch.source]
    assert plain.tolist() == pytest.approx(whole)


def test_a_run_draws_its_sources(config: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    c = loaded(config, "train.iterations=1", "model={fn: editkit.edit_flow}")
    train(c, run=run, quiet=True)
    strip = load_strip(run / "samples" / "sources.png", 2)
    assert (strip[:, 0] * 255).mean((1, 2)).tolist() == [LEVELS[3], LEVELS[1]]
    with Image.open(run / "grid.png") as grid:
        colours = {colour for _, colour in grid.convert("RGB").getcolors(2**20) or []}
    assert {(LEVELS[3], 9, 9), (LEVELS[1], 9, 9)} <= colours


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda file: file.unlink(), "no such file"),
    (_cut, "damaged"),
    (lambda file: file.write_text("no image"), "expected a PNG"),
    (lambda file: paint(file, 9, mode="RGBA"), "expected an RGB image, got mode RGBA"),
    (lambda file: paint(file, 9, mode="L"), "expected an RGB image, got mode L"),
    (lambda file: paint(file, 9, (20, 16)), "aspect ratio .* 16 x 16, got 16 x 20; crop it"),
]


@pytest.mark.parametrize(("harm", "said"), BROKEN)
def test_a_bad_source_is_named_with_its_line(
    config: str, tmp_path: Path, harm: Callable[[Path], Any], said: str
) -> None:
    harm(tmp_path / "1.png")
    with pytest.raises(DataError, match=rf"train\.jsonl, line 2, source: .*1\.png: .*{said}"):
        Trainer(loaded(config), model=EditFlow())


class TwoFlow(EditFlow):
    """A model of up to two sources."""

    most_sources = 2


@pytest.mark.parametrize(
    ("model", "sources", "error", "said"),
    [
        (EditFlow(), ["0.png", [1]], DataError, r"line 2: expected the file of an image, or a"),
        (EditFlow(), ["0.png", None], DataError, r"line 2: expected one image as 'source'.*got 0"),
        (EditFlow(), ["0.png", "drawn"], DataError, r"line 2: expected one image as 'source'"),
        (EditFlow(), [["0.png", "1.png"]], DataError, r"line 1: expected one image .*, got 2"),
        (
            TwoFlow(),
            [["0.png"], ["1.png", "2.png"]],
            DataError,
            "line 2: .* has, 1, got 2: prompts",
        ),
        (LinearFlow(), ["0.png"], ConfigError, r"LinearFlow starts from noise alone, but .*line 1"),
    ],
)
def test_lists_and_models_have_to_fit(
    config: str, tmp_path: Path, model: Any, sources: list[Any], error: type, said: str
) -> None:
    write_list(tmp_path / "test.jsonl", sources)
    if isinstance(model, LinearFlow) and not isinstance(model, EditFlow):
        write_list(tmp_path / "train.jsonl", sources)
    with pytest.raises(error, match=said):
        Trainer(loaded(config), model=model)


def test_equal_words_from_other_files_are_other_prompts(config: str, tmp_path: Path) -> None:
    """ "make it 1" starts from 1.png in both lists, then from another file in one of them."""
    with pytest.warns(OverlapWarning):
        Trainer(loaded(config), model=EditFlow())
    write_list(tmp_path / "test.jsonl", ["3.png", "2.png"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        Trainer(loaded(config), model=EditFlow())


EACH = ("train.group=2", "train.prompts=4", "train.iterations=1", "credit={fn: history_norm}")


def test_a_credit_remembers_edits_of_different_images_apart(config: str, tmp_path: Path) -> None:
    """Four edits in the same words, of three files: the two of one file share a row. With buffer 32
    their four rewards are the row's, and two are each other row's."""
    rows = [{"prompt": "make it blue", "source": f"{place}.png"} for place in (0, 1, 2, 1)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = Trainer(loaded(config, *EACH), model=EditFlow())
    credit: Any = trainer.method.credit
    assert len(credit.kept["rewards"]) == 3
    trainer.step()
    assert (~credit.kept["rewards"].isnan()).sum(1).tolist() == [2, 4, 2]
    # a run goes on with what it remembers, but not with the same words about another image
    trainer.save(tmp_path / "saved")
    Trainer(loaded(config, *EACH), model=EditFlow()).load(tmp_path / "saved")
    rows[2]["source"] = "3.png"
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(CheckpointError, match="train.jsonl is another list than that which"):
        Trainer(loaded(config, *EACH), model=EditFlow()).load(tmp_path / "saved")


def test_a_prompt_without_an_image_is_known_by_its_text() -> None:
    """So that what earlier runs remembered of it is found again: ids are of the texts alone."""
    records: list[dict[str, Any]] = [{}, {"source": "parti"}, {"source": 3}, {"source": "a.png"}]
    records.append({"source": ["a.png", "b.png"]})
    keys = prompt_keys(["p"] * 5, records)
    assert keys == ["p", "p", "p", "p (source: a.png)", "p (source: a.png, b.png)"]


def test_a_word_as_source_is_the_users_own(tmp_path: Path) -> None:
    """Where a prompt comes from, say: a model that starts from noise is not asked about it."""
    prompts = load_prompts(write_list(tmp_path / "list.jsonl", ["DrawBench", "parti"]))
    check_sources(prompts)
    assert sources_of(prompts, [0, 1], None) == []


def test_sources_over_the_wire(config: str, tmp_path: Path) -> None:
    """A PNG keeps 256 levels, so that the server's reward sees the same numbers. Each file travels
    once."""
    prompts = load_prompts(tmp_path / "train.jsonl")
    rows = [0, 0, 3, 1]
    sources = sources_of(prompts, rows, None)
    meta = [prompts.records[row] for row in rows]
    texts = [prompts.texts[row] for row in rows]
    batch = RewardBatch(
        torch.zeros(4, 3, 8, 8), texts, torch.tensor(rows), meta, torch.zeros(4), sources
    )
    body = pack(batch, [0, 1, 2, 3], "it")
    assert len(json.loads(body)["sources"]) == 3
    got = join([parse(body, ["it"], RequestLimits())]).source
    assert [len(source) for source in got] == [1] * 4 and got[0] is got[1]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(got, sources, strict=True))
    for change, said in (
        ({"source": [[0], [0], [9], [0]]}, "expected places in sources, 0 to 2"),
        ({"source": None}, "source: expected a list"),
    ):
        wrong = json.dumps({**json.loads(body), **change}).encode()
        with pytest.raises(RequestRefused, match=said):
            parse(wrong, ["it"], RequestLimits())
    with pytest.raises(FlowRLError, match="at most"):  # what is left of 600 pixels for the second
        parse(body, ["it"], RequestLimits()._replace(all_pixels=600))
