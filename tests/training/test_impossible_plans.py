"""Plans that cannot be are refused, with their numbers, by `flowrl train` and its dry run before
the model is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from toykit import toy, write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

WINDOW = "plan={fn: sliding_window, steps: 6, noise_scale: 0.5, "
FLASH = "plan={fn: flash_window, steps: 8, noise_scale: 0.5, size: 2, "
COMB = "plan={fn: comb, steps: 4, noise_scale: 0.5, size: 3}"

# The toy config: 2 prompts, 4 images each, 2 updates, 4 iterations.
CASES = {
    "window past the end": (
        [WINDOW + "size: 4, start: 2}"],
        ["size=4", "start=2", "steps=6", "start <= 0"],
    ),
    "random window past the end": (
        ["plan={fn: random_window, steps: 6, noise_scale: 0.5, size: 3, low: 2, high: 4}"],
        ["size=3", "low=2", "high=4", "steps=6"],
    ),
    "split beyond N": (
        ["plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 9]}"],
        ["splits=[0, 9]", "from 0 to 3", "wrong: [9]"],
    ),
    "group and leaves": (
        ["plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 1, 2]}"],
        ["4 images", "the 8 leaves", "use 8"],
    ),
    "group and leaves of a comb": (
        ["plan={fn: comb, steps: 4, noise_scale: 0.5, size: 3}"],
        ["4 images", "the 3 leaves"],
    ),
    "one tail point": ([FLASH + "ratio: 0.3, spare: 2}"], ["one point", "steps=8", "ratio=0.3"]),
    "more updates than states": (
        ["train.updates=25"],
        ["train.updates=25", "gives 24"],
    ),  # 2 x 4 x 3 noisy steps
    "no noise": (
        ["plan={fn: full, steps: 4, noise_scale: 0}"],
        ["no step has noise", "std is 0", "noise_scale 0.0"],
    ),
    "noise on the last step only": (
        [
            "plan={fn: random_window, steps: 4, noise_scale: 0.5, size: 1, low: 3}",
            "transition={fn: cps}",
        ],
        ["the only noise is on step 3", "the last of 4", "std is 0 (cps)"],
    ),
    "later on the last step only": (
        [WINDOW + "size: 1, stride: 5, every: 1, spare: 0}"],
        ["iteration 1", "the only noise is on step 5"],
    ),
    "a level that makes no std": (
        ["plan={fn: full, steps: 4, noise_scale: 1.0e-7}", "transition={fn: cps}"],
        ["step 0 of 4", "cps makes a std of", "noise scale 1e-07"],
    ),
    "a level beyond all of the noise": (
        ["plan={fn: full, steps: 4, noise_scale: 1.5}", "transition={fn: cps}"],
        ["cps takes noise scales from 0 to 1", "got 1.5", "step 0 of 4"],
    ),
    "a level that grows beyond it": (
        [
            "plan={fn: window_tree, steps: 6, noise_scale: 0.6, size: 2, growth: 1.0}",
            "transition={fn: ddim}",
        ],
        ["ddim takes noise scales from 0 to 1", "got 1.2", "step 1 of 6"],
    ),
    "a fork where nothing is drawn": (
        ["plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 3]}", "transition={fn: cps}"],
        ["step 3 of 4", "forks into 2", "cps has a std of 0", "one image"],
    ),
    "nothing to compare with": (
        ["train.group=1"],
        [
            "group_norm gives every decision the advantage 0",
            "train.group=1",
            "1 images of a prompt",
        ],
    ),
    "rake into the last step": (
        ["plan={fn: rake, steps: 4, noise_scale: 0.5, branch: 2, high: 4}"],
        ["low=0", "high=4", "steps=4"],
    ),
    "comb longer than the steps": (
        ["plan={fn: comb, steps: 4, noise_scale: 0.5, size: 5}"],
        ["size=5", "steps=4"],
    ),
    "turning points without a baseline": (
        [COMB, "train.group=3", "credit={fn: turning_point}"],
        ["turning_point", "no image without noise", "baseline: true"],
    ),
    "chunks that do not fit": (
        ["segment={fn: fixed, sizes: [2, 2]}"],
        ["sizes=[2, 2]", "add up to 4", "3 denoising steps"],
    ),
    "chunks of nothing": (["select={fn: chunks, share: 0.5}"], ["needs a segment section"]),
    "a share of no decision": (
        ["select={fn: fraction, share: 0.2}"],
        ["0.2", "decisions of a sample"],
    ),
    "more best than there are": (
        ["select={fn: best_of_n, top: 3, bottom: 2}"],
        ["top=3", "bottom=2", "leaves of a prompt, 4"],
    ),
    "selections that exclude each other": (
        [
            "select=[{fn: depth_pruning, first: 1, size: 1, stop: 1}, {fn: depth_pruning, first: "
            "2, size: 2, stop: 1}]"
        ],
        ["depth_pruning and depth_pruning left none of the 12 decisions"],  # 4 samples x 3 steps
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dry", [True, False], ids=["dry-run", "train"])
def test_impossible_plans(
    name: str,
    dry: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One message with the numbers, exit code 2, no model made (toykit.unloadable fails if it is),
    no run begun."""
    monkeypatch.chdir(tmp_path)
    overrides, words = CASES[name]
    argv = [
        "train",
        str(write_toy(tmp_path)),
        "model={fn: toykit.unloadable}",
        *overrides,
        "--plugin",
        "toykit",
    ]
    assert main([*argv, *(["--dry-run"] if dry else ["--run", str(tmp_path / "run")])]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("\nflowrl: ") and "Traceback" not in error
    assert [word for word in words if word not in error] == [], error
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_possible_plan_passes(tmp_path: Path) -> None:
    """The same config as it is: the cases above fail for what they change."""
    assert check_plan(toy(tmp_path)).work.images == 8


def test_functions_of_a_plugin_are_not_rehearsed(tmp_path: Path) -> None:
    """They may expect real images; this one is no selection at all, and would fail."""
    forecast = check_plan(toy(tmp_path, "select={fn: toykit.blueness}"))
    assert (
        forecast.decisions == forecast.work.decisions == 24
    )  # 2 prompts x 4 images x 3 noisy steps


def test_the_trainer_refuses_it_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no step has noise"):
        Trainer(
            toy(
                tmp_path,
                "plan={fn: full, steps: 4, noise_scale: 0}",
                "model={fn: toykit.unloadable}",
            )
        )


def test_a_distant_iteration(tmp_path: Path) -> None:
    """A window that reaches the last step, alone, in iteration 5 x 30: found although the first 150
    are fine."""
    late = [WINDOW + "size: 1, stride: 1, every: 30, spare: 0}", "train.iterations=200"]
    with pytest.raises(
        ConfigError,
        match="toy.yaml, iteration 150: plan sliding_window: the only noise is on step 5",
    ):
        check_plan(toy(tmp_path, *late))
    assert check_plan(toy(tmp_path, late[0], "train.iterations=150")).decisions == 8
