"""What an evaluation is estimated to take: all that is drawn of a prompt, in the size that is
judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from estimatekit import made

from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError
from flowrl.cost import meta_run as traced
from flowrl.cost.estimate import judged, phase
from flowrl.cost.meta_run import meta_run, workload_of
from flowrl.evaluation.eval_size import check_eval_count
from flowrl.training.rehearsal import check_plan


def extra(config: Config) -> int:
    return phase(config, "evaluation", check_plan(config)).extra


def test_best_of_and_the_size_that_is_judged_are_counted() -> None:
    """All that is drawn of a prompt is decoded together; four times the pixels take four times as
    much."""
    one, many = (load_config("shapes/awm", ["eval.batch=1", f"eval.best_of={n}"]) for n in (1, 100))
    assert extra(many) > 10 * extra(one)
    sizes = ["eval.height=128", "eval.width=128", "eval.images=1024"]
    large, small = load_config("shapes/awm", sizes), load_config("shapes/awm", sizes[2:])
    assert extra(large) == pytest.approx(4 * extra(small), rel=0.05)


def test_a_size_that_the_model_cannot_make() -> None:
    with pytest.raises(
        ConfigError, match=r"eval\.height, eval\.width: sd3 cannot make images of 1"
    ):
        judged(load_config("shapes/awm", ["eval.height=100000"]))
    with pytest.raises(
        ConfigError, match=r"decode_batch: expected a whole number >= 1 and < 2\*\*31"
    ):
        load_config("shapes/awm", [f"model.decode_batch={10**20}"])


def test_more_images_than_an_evaluation_draws() -> None:
    config = load_config("shapes/awm", ["eval.images=10000", "eval.best_of=10"])
    with pytest.raises(ConfigError, match="best of 10, of each of 2,000 prompts are 200,000,000"):
        check_eval_count(config, 2000)
    check_eval_count(config, 1000)


def test_many_calls_of_the_vae_are_reckoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is that of tracing each of them."""
    run = meta_run(workload_of(made(tmp_path, "sd3, full")))
    whole = run.decoding(101, batch=2, height=64, width=64)
    monkeypatch.setattr(traced, "MANY", 8)
    assert run.decoding(101, batch=2, height=64, width=64) == whole
