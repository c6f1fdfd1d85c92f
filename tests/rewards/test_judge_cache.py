"""A judge's cache that cannot be written: whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judge_server import grey, says, serving

from flowrl.core.errors import RunError
from flowrl.core.types import RewardBatch
from rewards._common.scorer import to_pil
from rewards._judge.ask import Job, Judge
from rewards.questions import questions

pytestmark = pytest.mark.integration

OPTIONS: dict[str, Any] = {"model": "UnifiedReward", "api_key_env": None, "timeout": 10.0}
OPTIONS |= {"retries": 0, "backoff": 0.01, "workers": 1, "max_failed": 0.0, "encoding": "png"}


def test_the_message_names_the_reward_that_has_the_cache(tmp_path: Path) -> None:
    """Not vlm, which was the first with a cache; a file stands where the folder should be."""
    file = tmp_path / "file"
    file.write_text("")
    images = grey([200])
    asked = [{"id": 1, "question": "Is it grey?", "tuple": "x (y)", "parents": []}]
    record = {"prompt": "p", "questions": asked}
    batch = RewardBatch(images, ["p"], torch.zeros(1), [record], torch.zeros(1))
    with serving(lambda seen: says("Yes.")) as server:
        with pytest.raises(RunError, match="^rewards.questions: cache: cannot write"):
            questions(protocol="dpg", url=server.url, cache=str(file))(batch)
        judge = Judge("rewards.rubric", url=server.url, cache=str(file), extra=None, **OPTIONS)
        with pytest.raises(RunError, match="^rewards.rubric: cache: cannot write"):
            judge.ask(to_pil(images), [Job("it", (0,), "Is it?")], lambda answer: 1.0)
