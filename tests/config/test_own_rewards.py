"""A user's own module `rewards` stays theirs, and flowrl finds its own package all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEFORE = "import rewards; assert rewards.mine"
CODE = """
{before}
import flowrl
overrides = ["rewards.best={{fn: win_rate, judge: {{fn: vlm}}}}"]
config = flowrl.load_config("shapes/flow_grpo", overrides)
reward = config.rewards["shapes"].make()
assert type(reward).__module__ == "{package}.shapes", type(reward).__module__
assert config.rewards["best"].make().judge
{after}
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("file", "before", "after", "package"),
    [
        ("rewards.py", BEFORE, BEFORE, "flowrl_rewards"),
        ("rewards/__init__.py", "", BEFORE, "flowrl_rewards"),
        ("other.py", "", "", "rewards"),
    ],
)
def test_a_module_of_our_name(
    tmp_path: Path, file: str, before: str, after: str, package: str
) -> None:
    """Imported before ours, and found after; of a folder of the user's nothing is in the way."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine = True\n")
    code = CODE.format(before=before, after=after, package=package)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
