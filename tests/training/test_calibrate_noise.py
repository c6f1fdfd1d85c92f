"""DenseGRPO's calibrated noise: a scale for each step of a comb, and how it is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scriptkit import script_module
from toykit import toy, write_toy

from flowrl.algorithms.plans.trees import comb
from flowrl.core.errors import ConfigError
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer

SCRIPT = script_module("assets/calibrate_noise")
calibrate, gains, moved = SCRIPT.calibrate, SCRIPT.gains, SCRIPT.moved
COMB = "plan={fn: comb, steps: 4, size: 2, noise_scale: 0.5, baseline: true}"
MORE = (COMB, "train.group=12", "credit={fn: step_gain}")


def test_a_comb_takes_a_scale_for_each_noisy_step() -> None:
    """Steps 1 and 2 of five have noise; one number for both is the same plan as it twice."""
    plan = comb(0, steps=5, size=2, first=1, noise_scale=[0.25, 0.5])
    assert plan.noise.tolist() == [0, 0.25, 0.5, 0, 0]
    one, two = (comb(0, steps=5, size=2, noise_scale=s) for s in (0.3, [0.3, 0.3]))
    assert all(torch.equal(a, b) for a, b in zip(one[:4], two[:4], strict=True))


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ([0.5], "one for each of the size=2 steps"),
        ([0.5, 0.5, 0.5], "one for each of the size=2 steps"),
        ([0.5, 0.0], "noise_scale > 0"),
        ([], "noise_scale > 0"),
        ([0.5, -0.1], "at least 0"),
        ([0.5, float("inf")], "must be a number"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scales: list[float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        comb(0, steps=4, size=2, noise_scale=scales)


def test_a_run_samples_with_its_scales(tmp_path: Path) -> None:
    """`dance_sde`'s std is its scale times the root of the step's length: of the draws' stds over
    that root the first step has .2 and the second .6."""
    run = Trainer(toy(tmp_path, *MORE, "plan.noise_scale=[0.2, 0.6]"))
    ro = collect(run, run.rows()).rollout
    for step, scale in enumerate((0.2, 0.6)):
        mine = (ro.tree.std > 0) & (ro.tree.step == step + 1)
        root = (ro.sigmas[step] - ro.sigmas[step + 1]).sqrt()
        torch.testing.assert_close(ro.tree.std[mine] / root, torch.full((int(mine.sum()),), scale))


def test_scales_move_by_the_paper_s_rule() -> None:
    """Differences 1, 2, 0 and -5 at a margin of 2: up, down, up, down by .01; never below .01 nor
    above the most."""
    assert moved([0.4] * 4, [6, 7, 3, 1], [5, 5, 3, 6]) == [0.41, 0.39, 0.41, 0.39]
    assert moved([0.01, 1.0], [9, 3], [0, 3]) == [0.01, 1.0]
    assert moved([0.4], [9], [4], margin=6) == [0.41]


def test_gains_on_the_toy_are_differences_of_rewards(tmp_path: Path) -> None:
    """The gains of a chain add up to what its finished image has beyond that of the noise."""
    run = Trainer(toy(tmp_path, *MORE))
    gain = gains(run)
    seen = collect(run, run.rows())
    assert gain.shape == (8, 2)  # 2 prompts, 12 images of which 3 are of one initial noise
    above = seen.rollout.tree.std > 0
    assert int(above.sum()) == 16
    reward, leaf = seen.values["red"].double(), seen.rollout.leaf
    # of each noise the baseline is the first leaf without a draw above, the sample the last node
    depth = torch.zeros(len(above), dtype=torch.long)
    root = torch.arange(len(above))
    for node, parent in enumerate(seen.rollout.tree.parent.tolist()):
        if parent >= 0:
            depth[node], root[node] = depth[parent] + above[node], root[parent]
    wanted = []
    for each in root.unique().tolist():
        mine = root[leaf] == each
        start, end = (reward[mine & (depth[leaf] == n)] for n in (0, 2))
        wanted.append(float(end[-1] - start[0]))
    assert sorted(gain.sum(1).tolist()) == pytest.approx(sorted(wanted), abs=1e-6)


def test_a_calibration_is_the_rule_round_by_round(tmp_path: Path) -> None:
    """Each round's scales follow from the counts of the one before, of 8 chains; twice the same."""
    config = toy(tmp_path, *MORE)
    found = calibrate(config, rounds=3)
    assert found["rounds"][0]["noise_scale"] == [0.5, 0.5]
    told = [*found["rounds"], {"noise_scale": found["noise_scale"]}]
    for before, after in zip(told, told[1:], strict=False):
        up, down = before["positive"], before["negative"]
        assert all(0 < a + b <= 8 for a, b in zip(up, down, strict=True))
        assert after["noise_scale"] == moved(before["noise_scale"], up, down)
    assert calibrate(config, rounds=3) == found
    counts = [(one["positive"], one["negative"]) for one in found["rounds"]]
    assert counts[0] != counts[1] or counts[1] != counts[2]  # prompts and noise of its own
    with pytest.raises(ConfigError, match="expected plan comb"):
        calibrate(toy(tmp_path), rounds=1)
    with pytest.raises(ConfigError, match="one image without any noise"):
        calibrate(toy(tmp_path, *MORE, "plan.baseline=false", "credit={fn: group_norm}"), rounds=1)


def test_a_start_above_1_is_not_cut(tmp_path: Path) -> None:
    """`dance_sde` takes any scale: one that starts at 1.4 moves by .01 as the others do, and none
    above 1.4. `cps` takes 1 at most, and a run with more is refused."""
    config = toy(tmp_path, *MORE, "plan.noise_scale=[1.4, 0.5]")
    found = calibrate(config, rounds=1)
    (told,) = found["rounds"]
    want = moved([1.4, 0.5], told["positive"], told["negative"], most=1.4)
    assert found["noise_scale"] == want and want[0] in (1.39, 1.4)
    with pytest.raises(ConfigError, match="cps takes noise scales from 0 to 1, got 1.4"):
        calibrate(toy(tmp_path, *MORE, "plan.noise_scale=1.4", "transition={fn: cps}"), rounds=1)


def test_the_script_writes_what_a_run_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "scales.json"
    words = ["x", str(write_toy(tmp_path)), *MORE, "--rounds", "1", "--plugin", "toykit"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(out)])
    assert SCRIPT.main() == 0
    scales = json.loads(out.read_text())["noise_scale"]
    said = capsys.readouterr().out.strip()
    assert said == f"plan.noise_scale={scales}" and len(scales) == 2
    assert Trainer(toy(tmp_path, *MORE, said)).step()["trained"] > 0
