"""Arguments that make no sense are refused when a reward is made, by a message that names them."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
from weightkit import Weights

from flowrl.core.errors import ConfigError
from rewards._common.http_client import read_secret

URL = "expected one like http"
LOCAL = ["http://localhost:1"]
ACS = {"template": "acs", "alignment": 0.0, "coherence": 0.0}
GEL = {"backend": "open_clip", "architecture": "ViT-L-14-quickgel"}
# reward -> rows of (arguments, what the message says)
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "clip": [
        ({"backend": "jax"}, "transformers, open_clip"),
        ({"architecture": "ViT-L-14"}, "belong to backend 'open_clip'"),
        ({"resize": "squash"}, "belong to backend 'open_clip'"),
        ({"backend": "open_clip", "resize": "longest"}, "shortest, squash"),
        (GEL, "did you mean 'ViT-L-14-quickgelu'"),
        ({"backend": "open_clip", "architecture": "ViT-B-16-SigLIP"}, "no plain CLIP"),
        ({"backend": "open_clip", "architecture": "RN50"}, "no plain CLIP"),
        ({"scale": 0.0}, "scale: expected a finite number above 0"),
        ({"divide": math.inf}, "divide"),
    ],
    "pickscore": [({"divide": 0.0}, "divide"), ({"scale": -1.0}, "scale")],
    "hpsv2": [({"version": "v3"}, "version"), ({"architecture": "ViT-H-15"}, "architecture")],
    "jpeg": [
        ({"goal": "small"}, "goal"),
        ({"quality": 0}, "quality"),
        ({"quality": 101}, "quality"),
        ({"scale": 0.0}, "scale"),
        ({"scale": -500.0}, "scale"),
        ({"scale": math.inf}, "scale"),
        ({"scale": math.nan}, "scale"),
    ],
    "ocr": [
        ({"confidence": -0.1}, "confidence"),
        ({"confidence": 1.0}, "confidence"),
        ({"threads": -1}, "threads"),
    ],
    "shapes": [({"mode": "lenient"}, "lenient")],
    "dino": [
        ({"size": 519}, "patch size 14, got 519"),
        ({"mode": "mean"}, "mean"),
        ({"cache_mb": -1}, "cache_mb"),
    ],
    "adversarial": [
        ({"patches": 0}, "patches"),
        ({"d_steps": 0}, "d_steps"),
        ({"policy_every": 0}, "policy_every"),
        ({"hidden": 0}, "hidden"),
        ({"cls_weight": 1.5}, "cls_weight"),
        ({"lr": 0.0}, "lr"),
    ],
    "adversarial_layers": [
        ({"layers": []}, "layers"),
        ({"layers": [2]}, "layers"),
        ({"top": 0.0}, "top"),
        ({"temperature": 0.0}, "temperature"),
        ({"d_steps": 0}, "d_steps"),
    ],
    "adversarial_pickscore": [
        ({"tune_layers": 0}, "tune_layers"),
        ({"tune_layers": 3}, "tune_layers"),
        ({"lr": 0.0}, "lr"),
        ({"divide": -1.0}, "divide"),
        ({"dtype": "float16"}, "dtype"),
    ],
    "win_rate": [({"judge": {"fn": "jpeg"}, "max_pairs": 0}, "max_pairs")],
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
def test_wrong_arguments_are_named(name: str, weights: Weights) -> None:
    needed: dict[str, dict[str, Any]] = {"remote": {"urls": LOCAL}}
    if name in ("dino", "adversarial", "adversarial_layers"):
        needed[name] = {"path": weights.dino}
    if name == "adversarial_pickscore":
        needed[name] = weights.clip.parts
    reward = getattr(importlib.import_module(f"rewards.{name}"), name)
    for arguments, message in WRONG[name]:
        with pytest.raises(ConfigError) as error:
            reward(**{**needed.get(name, {}), **arguments})
        assert message in str(error.value), arguments
        assert "secret" not in str(error.value)


def test_a_config_cannot_send_any_secret_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that are not meant for rewards are refused, and are not shown, unless whoever
    starts the run lists them."""
    monkeypatch.setenv("CLOUD_SECRET_KEY", "not-for-judges")
    with pytest.raises(ConfigError, match="begins with FLOWRL_, REWARD_, JUDGE_") as error:
        read_secret("CLOUD_SECRET_KEY", "rewards.vlm: api_key_env")
    assert "not-for-judges" not in str(error.value)
    monkeypatch.setenv("FLOWRL_SECRETS", "OTHER, CLOUD_SECRET_KEY")
    assert read_secret("CLOUD_SECRET_KEY", "rewards.vlm: api_key_env") == "not-for-judges"
