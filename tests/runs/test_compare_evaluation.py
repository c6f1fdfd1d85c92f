"""Comparisons of a toy whose held-out evaluation breaks: a hole in the scores, a kill, a NaN in an
image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparekit import SMALL, before_step, plan, scores, tick

from flowrl.core.errors import RewardError
from flowrl.evaluation import held_out
from flowrl.runs.compare.compare import Comparison
from flowrl.runs.compare.compare import run_comparison as compare
from flowrl.runs.compare.one_run import base_of, evaluated
from flowrl.runs.folder import strip_file
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch)


def toy(folder: Path) -> Comparison:
    """Compare one toy that learns, judged after iterations 2, 3 and 5."""
    return plan(folder, overrides=(*SMALL, "eval.score=red", "optimizer.lr=0.1"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, dict[str, Any]]:
    """Return that comparison, and what it says where nothing happens to it."""
    what = toy(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        tick(patch)
        return what, scores(compare(what, quiet=True))


def after_iteration(
    patch: pytest.MonkeyPatch, iteration: int, name: str, change: Callable[[torch.Tensor], Any]
) -> None:
    """Change what a function of the evaluation returns once `iteration` iterations of seed 0 are
    done."""
    begun: list[int] = []
    before_step(patch, iteration - 1, lambda: begun.append(1))
    whole = getattr(held_out, name)

    def changed(*given: Any) -> Any:
        return change(whole(*given)) if begun else whole(*given)

    patch.setattr(held_out, name, changed)


def with_a_hole(values: torch.Tensor) -> torch.Tensor:
    """Return scores [n], or images [n, ...], of which the first is NaN."""
    return values.index_fill(0, torch.tensor([0]), torch.nan)


def killed(values: torch.Tensor) -> None:
    raise KeyboardInterrupt


HOLE = r"(?s)1 of 12 images.*0 are not finite.*needs every image scored.*mend the reward.*goes on"


@pytest.mark.parametrize(
    ("iteration", "change", "raised", "words"),
    [(3, with_a_hole, RewardError, HOLE), (2, killed, KeyboardInterrupt, "^$")],
)
def test_an_evaluation_that_was_lost_is_made_on_the_way_on(
    whole: tuple[Comparison, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    iteration: int,
    change: Callable[[torch.Tensor], Any],
    raised: type[BaseException],
    words: str,
) -> None:
    """A reward without a score for one of 6 prompts' 2 images, or a kill where a checkpoint was
    due: nothing is recorded or trained again, and the result is that of a run that nothing
    happened to."""
    what = whole[0]._replace(runs=tmp_path / "runs", out=tmp_path / "out" / "result.json")
    with monkeypatch.context() as patch:
        after_iteration(patch, iteration, "ask", change)
        with pytest.raises(raised, match=words):
            compare(what, quiet=True)
    run = what.runs / "toy-a" / "seed0"
    assert not (run / "result.json").exists()
    assert max(folder.name for folder in (run / "checkpoints").iterdir()) == f"{iteration:06d}"
    assert scores(compare(what, quiet=True)) == whole[1]


def test_an_image_that_is_not_finite_is_the_method_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the evaluation after the third iteration, before which a checkpoint was due."""
    after_iteration(monkeypatch, 3, "round_8bit", with_a_hole)
    (run,) = compare(toy(tmp_path), quiet=True)["configs"][0]["seeds"]
    assert "1 are not finite" in run["failed"] and "needs every image scored" in run["failed"]
    assert "raise it" not in run["failed"] and [row["iteration"] for row in run["curve"]] == [2]


def test_the_base_model_starts_from_its_own_noise(tmp_path: Path) -> None:
    """Also where a config learns a noise that begins elsewhere; there the first evaluation of a
    run is another."""
    noise = ("likelihood={fn: prior, own: true, start: noise, spread: 0.3}",)
    what = toy(tmp_path)
    configs = [what.load(what.configs[0], *more) for more in ((), noise)]
    plain, learned = map(Trainer, configs)
    found = []
    for name, trainer in (("plain", plain), ("learned", learned)):
        found.append(base_of(tmp_path / name, trainer.config, trainer))
    assert found[0] == found[1]
    assert evaluated(learned)["outcomes"] != found[0]["outcomes"]
    strips = [strip_file(tmp_path / name / "base", 0).read_bytes() for name in ("plain", "learned")]
    assert strips[0] == strips[1]


def test_the_base_model_has_no_start_of_another_config(tmp_path: Path) -> None:
    """Every config is checked on the first one's model, before that is judged; what another one's
    `train.start` puts into it does not stay."""
    what = plan(tmp_path, "toy-a", "toy-b")
    more = ("train.ema=0", "eval.weights=current", "eval.score=red", "optimizer.lr=0.3")
    what = what._replace(overrides=(*what.overrides, *more))
    trained = Trainer(what.load(what.configs[0]))
    trained.step()
    trained.save(tmp_path / "start")
    other = Path(what.configs[1])
    start = f"train: {{ start: {tmp_path / 'start'},"
    other.write_text(other.read_text().replace("train: {", start))
    base = evaluated(Trainer(what.load(what.configs[0])))
    assert compare(what, quiet=True)["base"]["outcomes"] == base["outcomes"]
    assert evaluated(trained)["outcomes"] != base["outcomes"]
