"""What the dry run says of prompt lists that are short, or the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from toykit import toy

from flowrl.cost.dry_run import prompt_lines
from flowrl.training.run import OverlapWarning
from flowrl.training.trainer import Trainer


def test_lists_that_a_run_would_warn_of(tmp_path: Path) -> None:
    """The same list twice, as the trainer says it; and three prompts where five are taken."""
    (tmp_path / "some.txt").write_text("a red dot\na blue dot\na green dot\n")
    changes = [f"prompts.{key}={tmp_path}/some.txt" for key in ("train", "test")]
    config = toy(tmp_path, *changes, "train.prompts=5")
    counted, short, same = prompt_lines(config)
    assert "3 to train on" in counted
    assert "train.prompts=5 of 3: an iteration takes some of them more than once" in short
    with pytest.warns(OverlapWarning) as warned:
        Trainer(config)
    assert same.removeprefix("prompts    ") == str(warned[0].message)
    # other prompts, and as many as are taken
    (tmp_path / "others.txt").write_text("a large square\n")
    other = toy(tmp_path, *changes[:1], f"prompts.test={tmp_path}/others.txt", "train.prompts=3")
    assert len(prompt_lines(other)) == 1
