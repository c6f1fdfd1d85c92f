"""What a dry run says of files that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from toykit import toy

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.cost.dry_run import absent_files, dry_run

HUB = "nobody/no-such-model"


def test_weights_of_a_reward_that_are_not_here(tmp_path: Path) -> None:
    """A script makes them, or they are on the hub; what is there is not named."""
    reward = "rewards.step={{fn: latent_preference, path: {0}, transformer: {1}, weight: 0}}"
    here = "is not here: make it or put it there first"
    hub = "is not in the cache: the run downloads it from the hub"
    for path, said in (
        ("data/nowhere", f"step: data/nowhere {here}"),
        ("./nobody/nowhere", f"step: ./nobody/nowhere {here}"),
        (HUB, f"step: {HUB} {hub}"),
        (f"{HUB}/a.bin", f"step: {HUB}/a.bin {hub}"),
        # two parts and a file's ending: docs/rewards.md's own examples, no repository's name
        ("weights/dfn5b.bin", f"step: weights/dfn5b.bin {here}"),
        ("weights/mlp.PTH", f"step: weights/mlp.PTH {here}"),
        ("nobody/model-2.5", f"step: nobody/model-2.5 {hub}"),
        (str(tmp_path), ""),
    ):
        text = dry_run(toy(tmp_path, reward.format(path, tmp_path)))
        found = [line for line in text.splitlines() if line.startswith("rewards    step: ")]
        assert found == ([f"rewards    {said}"] if said else [])
        # a run downloads by itself; what it cannot get comes last
        assert text.endswith(f"missing    {said}") == (here in said)
        assert ("missing " in text) == (here in said)


def test_a_path_in_the_home_folder_is_looked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the rewards do, which read `~/x.pth`."""
    reward = "rewards.step={fn: latent_preference, path: ~/x.pth, transformer: a, weight: 0}"
    config = toy(tmp_path, reward)
    monkeypatch.setenv("HOME", str(tmp_path))
    said = "step: ~/x.pth is not here: make it or put it there first"
    assert [each.said for each in absent_files(config)] == [said]
    (tmp_path / "x.pth").touch()
    assert absent_files(config) == []


def test_what_was_downloaded_before_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = f"rewards.step={{fn: latent_preference, path: {HUB}, transformer: a, weight: 0}}"
    config = toy(tmp_path, reward)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert [each.downloaded for each in absent_files(config)] == [True]
    (tmp_path / "cache" / "models--nobody--no-such-model" / "snapshots").mkdir(parents=True)
    assert absent_files(config) == []


@pytest.mark.parametrize("key", ["train.start", "surrogate.begin"])
def test_start_weights_that_are_not_here(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a script or a run writes come last in the plan; others are refused as by a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "begun").mkdir(parents=True)
    for start, mend in (("runs/nowhere", "train"), ("data/nowhere.safetensors", "make")):
        config = load_config("shapes/tdm_r1", [f"{key}={start}"])
        said = f"{key}: {start} is not here: {mend} it first"
        text = dry_run(config)
        assert f"\nstart      {said}\n" in text and f"\nmissing    {said}" in text
    for start, said in (
        ("nowhere.safetensors", "cannot find 'nowhere.safetensors'"),
        ("runs/begun", "there are no weights at runs/begun"),
    ):
        with pytest.raises(ConfigError, match=f"{key}: {said}"):
            dry_run(load_config("shapes/tdm_r1", [f"{key}={start}"]))
