"""Arguments that make no sense are refused when a reward is made, by a message that names them."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from flowrl.core.errors import ConfigError

URL = "expected one like http"
LOCAL = ["http://localhost:1"]
ACS = {"template": "acs", "alignment": 0.0, "coherence": 0.0}
# reward -> rows of (arguments, what the message says)
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "remote": [
        ({"urls": []}, "urls: expected one address or more"),
        ({"urls": ["http://a", "http://a/"]}, "each once"),
        ({"urls": ["10.0.0.5:8321"]}, "urls: expected addresses like"),
        ({"urls": ["ftp://a"]}, "urls"),
        ({"urls": ["http://a:x"]}, "urls"),
        ({"urls": ["http://a/score?x=1"]}, "urls"),
        ({"urls": ["http://me:secret@a"]}, "token_env"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
        ({"retries": -1}, "retries"),
        ({"backoff": -0.1}, "backoff"),
        ({"workers": 0}, "workers"),
        ({"chunk": 0}, "chunk"),
        ({"wait_s": -1.0}, "wait_s"),
        ({"on_failure": "zero"}, "on_failure: expected one of wait, drop_group, stop"),
    ],
    "vlm": [
        ({"url": "localhost:8080"}, URL),
        ({"url": "ftp://me:secret@a"}, URL),
        ({"url": "http://[::1"}, URL),
        ({"url": "http://a:99999"}, URL),
        ({"url": "http://a/v1?key=1"}, URL),
        ({"template": "essay"}, "template: expected one of pair_rank, point"),
        ({"timeout": 0.0}, "timeout: expected seconds > 0, got 0.0"),
        ({"timeout": math.nan}, "timeout"),
        ({"retries": -1}, "retries: expected 0 or more"),
        ({"backoff": -1.0}, "backoff"),
        ({"workers": 0}, "workers: expected 1 or more"),
        ({"max_failed": 1.5}, "max_failed: expected a share"),
        ({"max_tokens": 0}, "max_tokens"),
        ({**ACS, "style": 0.0}, "not all 0"),
        ({"template": "acs", "style": -1.0}, "weights >= 0"),
        ({"template": "flex", "w_overall": 0.0, "w_dims": 0.0}, "not both 0"),
        ({"template": "rating", "low": 5.0}, "expected low < high"),
        ({"template": "rating", "pattern": "("}, "pattern: expected a regular expression"),
        ({"template": "rating", "pattern": "score"}, "expected one group in 'score'"),
        ({"template": "point", "w_dims": 2.0}, "the template point makes no use of w_dims"),
        ({"template": "point", "style": 2.0}, "makes no use of alignment, coherence, style"),
        ({"template": "acs", "variants": True}, "makes no use of variants"),
        ({"extra": {"temperature": 1}}, "temperature cannot be given here"),
        ({"template_sha256": "9f"}, "needs a template_file"),
        ({"template_file": "/nowhere.txt"}, "cannot read it"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    needed: dict[str, dict[str, Any]] = {"remote": {"urls": LOCAL}}
    reward = getattr(importlib.import_module(f"rewards.{name}"), name)
    for arguments, message in WRONG[name]:
        with pytest.raises(ConfigError) as error:
            reward(**{**needed.get(name, {}), **arguments})
        assert message in str(error.value), arguments
        assert "secret" not in str(error.value)
