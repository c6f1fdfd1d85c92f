"""Plans that cannot be are refused, with their numbers, before the model is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from toykit import toy, write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.training.rehearsal import check_plan


def plan(fn: str, steps: int = 4, **options: object) -> str:
    more = "".join(f", {name}: {value}" for name, value in options.items())
    return f"plan={{fn: {fn}, steps: {steps}{more}, noise_scale: 0.5}}"


def noisy(scale: object) -> str:
    return f"plan={{fn: full, steps: 4, noise_scale: {scale}}}"


CPS = "transition={fn: cps}"
SLIDING = {"size": 1, "spare": 0}
PRUNING = "{{fn: depth_pruning, first: {0}, size: {0}, stop: 1}}"
# The toy config: 2 prompts, 4 images each, 2 updates, 4 iterations. What functions of an axis
# refuse by themselves is in tests/algorithms/; of these one a kind.
CASES = {
    "window past the end": (
        [plan("sliding_window", 6, size=4, start=2)],
        ["size=4", "start=2", "steps=6", "start <= 0"],
    ),
    "group and leaves": (
        [plan("tree", splits=[0, 1, 2])],
        ["4 images", "the 8 leaves", "use 8"],
    ),
    # 2 prompts x 4 images x 3 noisy steps
    "more updates than states": (["train.updates=25"], ["train.updates=25", "gives 24"]),
    "no noise": ([noisy(0)], ["no step has noise", "std is 0", "noise_scale 0.0"]),
    "noise on the last step only": (
        [plan("random_window", size=1, low=3), CPS],
        ["the only noise is on step 3", "the last of 4", "std is 0 (cps)"],
    ),
    "later on the last step only": (
        [plan("sliding_window", 6, stride=5, every=1, **SLIDING)],
        ["iteration 1", "the only noise is on step 5"],
    ),
    "a level that makes no std": (
        [noisy("1.0e-7"), CPS],
        ["step 0 of 4", "cps makes a std of", "noise scale 1e-07"],
    ),
    "a level beyond all of the noise": (
        [noisy(1.5), CPS],
        ["cps takes noise scales from 0 to 1", "got 1.5", "step 0 of 4"],
    ),
    "a level that grows beyond it": (
        [plan("window_tree", 6, size=2, growth=1.4), "transition={fn: ddim}"],
        ["ddim takes noise scales from 0 to 1", "got 1.2", "step 1 of 6"],
    ),
    "a fork where nothing is drawn": (
        [plan("tree", splits=[0, 3]), CPS],
        ["step 3 of 4", "forks into 2", "cps has a std of 0", "one image"],
    ),
    "nothing to compare with": (
        ["train.group=1"],
        ["group_norm gives every decision the advantage 0", "train.group=1", "1 images of a"],
    ),
    "turning points without a baseline": (
        [plan("comb", size=3), "train.group=3", "credit={fn: turning_point}"],
        ["turning_point", "no image without noise", "baseline: true"],
    ),
    "chunks that do not fit": (
        ["segment={fn: fixed, sizes: [2, 2]}"],
        ["sizes=[2, 2]", "add up to 4", "3 denoising steps"],
    ),
    "more best than there are": (
        ["select={fn: best_of_n, top: 3, bottom: 2}"],
        ["top=3", "bottom=2", "leaves of a prompt, 4"],
    ),
    # 4 samples x 3 steps
    "selections that exclude each other": (
        [f"select=[{PRUNING.format(1)}, {PRUNING.format(2)}]"],
        ["depth_pruning and depth_pruning left none of the 12 decisions"],
    ),
}


@pytest.mark.parametrize(("name", "dry"), [(name, False) for name in CASES] + [("no noise", True)])
def test_impossible_plans(
    name: str,
    dry: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One message, exit code 2, no model made (toykit.unloadable fails if it is), no run begun."""
    monkeypatch.chdir(tmp_path)
    overrides, words = CASES[name]
    argv = ["train", str(write_toy(tmp_path)), "model={fn: toykit.unloadable}", *overrides]
    how = ["--dry-run"] if dry else ["--run", str(tmp_path / "run")]
    assert main([*argv, "--plugin", "toykit", *how]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("\nflowrl: ") and "Traceback" not in error
    assert [word for word in words if word not in error] == [], error
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_possible_plan_passes(tmp_path: Path) -> None:
    """The same config as it is; functions of a plugin may expect images, and are not rehearsed."""
    forecast = check_plan(toy(tmp_path, "select={fn: toykit.blueness}"))  # no selection at all
    assert forecast.work.images == 8
    assert forecast.decisions == forecast.work.decisions == 24  # 2 prompts x 4 images x 3 steps


def test_a_distant_iteration(tmp_path: Path) -> None:
    """A window reaches the last step, alone, in iteration 5 x 30: the first 150 are fine."""
    late = plan("sliding_window", 6, stride=1, every=30, **SLIDING)
    message = "iteration 150: plan sliding_window: the only noise is on step 5"
    with pytest.raises(ConfigError, match=f"toy.yaml, {message}"):
        check_plan(toy(tmp_path, late, "train.iterations=200"))
    assert check_plan(toy(tmp_path, late, "train.iterations=150")).decisions == 8
