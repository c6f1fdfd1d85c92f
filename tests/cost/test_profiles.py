"""`--profile`: what it sets, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toykit import toy

from flowrl.cli.options import load_fitted
from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError
from flowrl.cost import fit_card
from flowrl.cost.estimate import ENCODERS_ALONE
from flowrl.cost.fit_card import profile_overrides, switches

LESS = ["model.runtime.checkpointing=true", "model.runtime.offload=true"]
NF4 = "model.runtime.quantize=nf4"
SMALLER, EIGHT = ["model.lora.rank=16", "model.lora.alpha=32"], "optimizer.fn=adamw8bit"


def fits(config: Config) -> Any:
    """Stand in for the estimate: one byte is needed."""
    return SimpleNamespace(largest=SimpleNamespace(name="sampling", bytes=1, what=""))


def test_what_is_set() -> None:
    """The config's batches are 8 and its decode batch is 4; a GB is 2^30 bytes."""
    batches = [f"train.{name}_batch=2" for name in ("micro", "rollout")]
    found = profile_overrides(load_config("sd3/flow_grpo_fast"), "24gb")
    assert found == [*LESS, "model.decode_batch=1", *batches, "eval.batch=2"]


@pytest.mark.parametrize(
    ("name", "profile", "quantised"),
    [
        ("sd3/flow_grpo_fast", "24gb", False),  # 4.5 GB in bfloat16
        ("flux/flow_grpo_fast", "24gb", True),  # 23.8
        ("flux/flow_grpo_fast", "48gb", False),
        ("flux/mix_grpo", "24gb", False),  # trained in full
        ("qwen_image/flow_grpo_fast", "48gb", True),  # 40.9
        ("qwen_image/flow_grpo_fast", "80gb", False),
        ("flux2/flow_grpo_fast", "80gb", True),  # 64.4
    ],
)
def test_lora_on_a_network_of_more_than_half_of_the_card_is_quantised(
    name: str, profile: str, quantised: bool
) -> None:
    """Expected by the published numbers of parameters, two bytes each."""
    assert (NF4 in profile_overrides(load_config(name), profile)) == quantised


def test_what_is_given_stands_above_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is estimated plays no part here: the estimate by hand says that all fits."""
    monkeypatch.setattr(fit_card, "estimate", fits)
    given = ["model.runtime.quantize=int8", "train.micro_batch=3"]
    found = load_fitted("flux/flow_grpo_fast", given, [], "24gb")
    runtime = found.model.kwargs["runtime"]
    assert (runtime["quantize"], runtime["offload"]) == ("int8", True)
    assert (found.train.micro_batch, found.train.rollout_batch, found.eval.batch) == (3, 2, 2)
    assert load_fitted("flux/flow_grpo_fast", [], [], None) == load_config("flux/flow_grpo_fast")


def test_offload_is_not_asked_for_beside_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair is refused: neither a profile nor what is said to an estimate may lead there. The
    estimate by hand says that all fits."""
    monkeypatch.setattr(fit_card, "estimate", fits)
    given = ["model.runtime.compile=true", "model.runtime.cuda_graphs=true"]
    runtime = load_fitted("flux/flow_grpo_fast", given, [], "24gb").model.kwargs["runtime"]
    assert runtime["checkpointing"] is True and "offload" not in runtime
    graphs = load_config("flux/flow_grpo_fast", given)
    assert switches(graphs, training=True) == ["model.runtime.checkpointing"]
    assert switches(graphs, training=False) == []


@pytest.mark.parametrize(
    ("phase", "base", "each", "changed"),
    [
        ("training", 10, 2, False),  # 14 GiB of 23
        ("training", 18, 3, True),  # 24, and 21 with one state
        ("training", 22, 3, False),  # 28, and 25 with one
        ("sampling", 18, 3, False),
    ],
)
def test_states_are_trained_one_by_one_where_that_makes_them_fit(
    monkeypatch: pytest.MonkeyPatch, phase: str, base: int, each: int, changed: bool
) -> None:
    """An estimate by hand: so many GiB are kept, so many come with each state of a micro-batch."""

    def by_hand(config: Config) -> Any:
        size = (base + each * config.train.micro_batch) * 2**30
        return SimpleNamespace(largest=SimpleNamespace(name=phase, bytes=size, what=""))

    monkeypatch.setattr(fit_card, "estimate", by_hand)
    found = load_fitted("sd3/flow_grpo_fast", [], [], "24gb")
    assert (found.train.micro_batch, found.train.rollout_batch) == (1 if changed else 2, 2)


@pytest.mark.parametrize(
    ("alone", "decode", "changed"),
    [
        (30, 10, ["model.runtime.text_encoders=cpu"]),
        (30, 26, ["model.runtime.text_encoders=cpu"]),  # one of two that are too large
        (20, 26, []),  # not the encoders
        (20, 10, []),
    ],
)
def test_text_encoders_beyond_the_card_work_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, alone: int, decode: int, changed: list[str]
) -> None:
    """An estimate by hand of 23 GiB that are free: encoders that work alone, and a decoder."""

    def by_hand(config: Config) -> Any:
        on_host = config.model.kwargs["runtime"].get("text_encoders") == "cpu"
        sizes = [(decode, "decode", "decoding")]
        sizes += [] if on_host else [(alone, "sampling", ENCODERS_ALONE)]
        size, name, what = max(sizes)
        largest = SimpleNamespace(name=name, bytes=size * 2**30, what=what)
        return SimpleNamespace(largest=largest)

    monkeypatch.setattr(fit_card, "estimate", by_hand)
    config = load_config("flux2/flow_grpo_fast", ["model.runtime={offload: true}"])
    assert fit_card.what_fits(config, "24gb") == changed


@pytest.mark.parametrize(
    ("rank", "sizes", "changed"),
    [
        # GiB that are kept beside what is trained, that a rank of 64 takes, and AdamW's moments
        (64, (18, 8, 2), SMALLER),  # 28; 18 + 2 + .5
        (64, (20, 8, 8), [*SMALLER, EIGHT]),  # 36; 20 + 2 + 2 is 24; 20 + 2 + .5
        (16, (20, 8, 8), [EIGHT]),  # 20 + 2 + 2; 20 + 2 + .5
        (64, (23, 8, 8), []),  # 25.5 at the least: nothing is changed in vain
        (64, (18, 2, 2), []),  # 22
    ],
)
def test_less_is_trained_only_where_it_fits_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    sizes: tuple[float, float, float],
    changed: list[str],
) -> None:
    """An estimate by hand of 23 GiB that are free; alpha / rank stays 2, as the config has it."""
    kept, adapters, moments = sizes

    def by_hand(config: Config) -> Any:
        share = config.model.kwargs["lora"]["rank"] / 64
        bits = 1 if config.optimizer.fn == "adamw" else 1 / 4
        size = int((kept + share * (adapters + bits * moments)) * 2**30)
        return SimpleNamespace(largest=SimpleNamespace(name="decode", bytes=size, what=""))

    monkeypatch.setattr(fit_card, "estimate", by_hand)
    given = [f"model.lora={{rank: {rank}, alpha: {2 * rank}}}"]
    config = load_config("z_image/flow_grpo_fast", given)
    assert fit_card.what_fits(config, "24gb") == changed
    if rank == 64:
        found = load_fitted("z_image/flow_grpo_fast", [], [], "24gb")
        lora = found.model.kwargs["lora"]
        assert lora["alpha"] / lora["rank"] == 2 and lora["rank"] == (16 if changed else 64)
        assert (found.optimizer.fn == "adamw8bit") == (EIGHT in changed)
        said = capsys.readouterr().err
        assert said.startswith("--profile 24gb sets model.runtime.checkpointing=true ")
        assert all(text in said for text in changed)


@pytest.mark.parametrize(
    ("kept", "guest", "changed"),
    [
        (10, 0, []),  # 14 of 23 GiB
        (20, 0, ["rewards.pickscore.offload=true"]),  # 24; 20
        (24, 0, []),  # 28; 24: nothing is changed in vain
        (20, 4, []),  # 24; at rest it comes when it scores
    ],
)
def test_networks_of_rewards_rest_where_they_fit_so(
    monkeypatch: pytest.MonkeyPatch, kept: int, guest: int, changed: list[str]
) -> None:
    """An estimate by hand: so many GiB, and 4 for a network that stays. What is given as a whole
    gets its option all the same, what is given for the option stands."""

    def by_hand(config: Config) -> Any:
        there = guest if config.rewards["pickscore"].offload else 4
        return SimpleNamespace(
            largest=SimpleNamespace(name="decode", bytes=(kept + there) * 2**30, what="")
        )

    monkeypatch.setattr(fit_card, "estimate", by_hand)
    less = "model.tune=full"
    config = load_config("sd3/flow_grpo_fast", [less])
    assert fit_card.what_fits(config, "24gb") == changed
    whole = [less, "rewards={pickscore: {fn: pickscore, dtype: bfloat16}}"]
    reward = load_fitted("sd3/flow_grpo_fast", whole, [], "24gb").rewards["pickscore"]
    assert (reward.kwargs["dtype"], reward.offload) == ("bfloat16", bool(changed))
    given = [less, "rewards.pickscore.offload=false"]
    assert not load_fitted("sd3/flow_grpo_fast", given, [], "24gb").rewards["pickscore"].offload


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of 24gb, 48gb, 80gb, got '12gb'"):
        profile_overrides(load_config("sd3/flow_grpo_fast"), "12gb")
    with pytest.raises(ConfigError, match="has no runtime options; leave --profile out"):
        profile_overrides(toy(tmp_path), "24gb")
