"""Whether a config fits a card, what helps if it does not, and what `--profile` sets: each number
that is printed is the estimate of the changed config."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from estimatekit import made, phases
from toykit import toy

from flowrl.api.arguments import config_of
from flowrl.cli.options import load_fitted
from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_models
from flowrl.core.tables import size
from flowrl.cost import fit_card
from flowrl.cost.estimate import ENCODERS_ALONE, Phase, estimate
from flowrl.cost.fit_card import (
    GIB,
    RESERVE,
    SMALLER,
    fitted,
    limit_of,
    profile_of,
    profile_overrides,
    verdict,
    what_helps,
)
from flowrl.models.tiny import save_tiny
from flowrl.runs.composed import composed


def test_what_helps_a_config_that_does_not_fit(tmp_path: Path) -> None:
    """A network of many blocks, on a card of as much as its profile needs, and of half of that: the
    figures are those of the configs that are named."""
    config = made(tmp_path, "sd3, full, deep")
    found = estimate(config)
    least = fitted(config, "1.000001gb").phase
    assert least is not None and found.largest is not None
    card = round((least.bytes + RESERVE) / GIB + 2e-5, 5)
    head = f"fits a {card:g} GB card: no, {size(found.largest.bytes)} in {found.largest.name}, of "
    assert verdict(found, gigabytes=card).startswith(head)
    helps = what_helps(found, gigabytes=card)
    assert helps.profile is not None and helps.profile.fits
    assert helps.lines == [helps.profile.said]
    changed = load_config(config, helps.profile.overrides)
    assert estimate(changed).largest == helps.profile.phase
    # a card for which no profile is enough: what is there, and what trains otherwise
    helps = what_helps(found, gigabytes=1 + least.bytes / GIB / 2)
    assert helps.profile is not None and not helps.profile.fits
    said, kept, also = helps.lines
    assert said == helps.profile.said and "does not fit into" in said
    largest = phases(found)[found.largest.name]
    assert kept.startswith(f"{largest.name} keeps {size(largest.kept)} as it is: ")
    names = "model.t5=false model.layers=null model.tune=lora train.prompts=1"
    assert also.startswith(f"with {names}, which train otherwise, it fits: ")
    # one that fits needs nothing, and one without options of the runtime has no profile
    assert what_helps(found, gigabytes=80) == ([], None)
    assert verdict(found, gigabytes=80).startswith("fits a 80 GB card: yes, ")


def test_cards_that_are_sold_as_larger_than_they_are(tmp_path: Path) -> None:
    """nvidia-smi shows 23,034 MiB of an L4 and 46,068 of an L40S, 24,564 of an RTX 4090: 22.49,
    44.99 and 23.99 GiB. A yes that holds for the last alone is followed by the others' names."""
    found = estimate(made(tmp_path, "sd3, full"))
    for card, shown, names in ((24, 23_034, "an L4 or A10G"), (48, 46_068, "an L40S or A40")):
        less = SMALLER[card][0]
        assert 0 < shown / 1024 - less < 0.1
        for gib, said in ((less - 1.01, 0), (less - 0.9, 1), (card - 1.01, 1)):
            one = found._replace(phases=[Phase("decode", int(gib * GIB), 0, 0, "")])
            head, rest = verdict(one, gigabytes=card), what_helps(one, gigabytes=card).lines
            assert head.startswith(f"fits a {card} GB card: yes, ") and len(rest) == said
            words = f"(not {names}, sold as {card} GB: there are {less:g} of 2^30 bytes; see "
            assert all(line == f"{words}--card {less:g})" for line in rest)
            assert (" card: no, " in verdict(one, gigabytes=less)) == bool(said)


def test_the_page_names_what_fits_the_larger_card_alone() -> None:
    """From the estimates under profiles that docs/memory.md has as a table."""
    root = Path(__file__).resolve().parents[2]
    rows = json.loads((root / "assets/results/profiles.json").read_text(encoding="utf-8"))["rows"]
    page = " ".join((root / "docs/memory.md").read_text(encoding="utf-8").split())
    sentence = page.split("these do not fit under `24gb` either: ")[1].split(". With 44.9")[0]
    sizes = {"24gb": SMALLER[24][0], "48gb": SMALLER[48][0]}
    tight: dict[str, set[str]] = {name: set() for name in sizes}
    for row in rows:
        limit = limit_of(sizes.get(row["profile"], 80))
        if row["fits"] and row["gib"] * GIB > limit:
            tight[row["profile"]].add(f"`{row['config']}`")
    assert set(sentence.replace(" and ", ", ").split(", ")) == tight["24gb"]
    assert tight["48gb"] == set() and "has, all fit that fit 48." in page


LESS = ["model.runtime.checkpointing=true", "model.runtime.offload=true"]
NF4 = "model.runtime.quantize=nf4"
SMALLER_PROFILES, EIGHT = ["model.lora.rank=16", "model.lora.alpha=32"], "optimizer.fn=adamw8bit"


def fits_with_checkpointing(config: Config) -> Any:
    """Stand in for the estimate: too much is needed without a profile's settings, and a byte with
    them."""
    on = (config.model.kwargs["runtime"] or {}).get("checkpointing")
    size = 1 if on else 100 * GIB
    return SimpleNamespace(largest=SimpleNamespace(name="sampling", bytes=size, what=""))


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
    """What is estimated plays no part here: by the estimate by hand the settings are enough."""
    monkeypatch.setattr(fit_card, "estimate", fits_with_checkpointing)
    given = ["model.runtime.quantize=int8", "train.micro_batch=3"]
    found = load_fitted("flux/flow_grpo_fast", given, [], "24gb")
    runtime = found.model.kwargs["runtime"]
    assert (runtime["quantize"], runtime["offload"]) == ("int8", True)
    assert (found.train.micro_batch, found.train.rollout_batch, found.eval.batch) == (3, 2, 2)
    assert load_fitted("flux/flow_grpo_fast", [], [], None) == load_config("flux/flow_grpo_fast")


def test_offload_is_not_asked_for_beside_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair is refused: a profile may not lead there. By the estimate by hand the settings are
    enough."""
    monkeypatch.setattr(fit_card, "estimate", fits_with_checkpointing)
    given = ["model.runtime.compile=true", "model.runtime.cuda_graphs=true"]
    runtime = load_fitted("flux/flow_grpo_fast", given, [], "24gb").model.kwargs["runtime"]
    assert runtime["checkpointing"] is True and "offload" not in runtime


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
        (64, (18, 8, 2), SMALLER_PROFILES),  # 28; 18 + 2 + .5
        (64, (20, 8, 8), [*SMALLER_PROFILES, EIGHT]),  # 36; 20 + 2 + 2 is 24; 20 + 2 + .5
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
        nothing = sizes == (18, 2, 2)  # 22 of 23 as it is
        sets = "nothing: 22.0 GiB in decode fits" if nothing else f"{LESS[0]} "
        assert said.startswith(f"--profile 24gb sets {sets}")
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


@pytest.mark.parametrize(
    ("profile", "sets", "why"),
    [
        ("80gb", "nothing: 40.0 GiB in training", "fits into the 79.0 GiB that are free"),
        ("24gb", LESS[0], "40.0 GiB in training becomes 20.0 GiB in training, which fits into the"),
        ("20gb", LESS[0], "which does not fit into the 19.0 GiB that are free"),
    ],
)
def test_a_profile_says_what_it_sets_and_why(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    profile: str,
    sets: str,
    why: str,
) -> None:
    """An estimate by hand: 40 GiB as it is, half of it with checkpointing. What fits stays."""

    def by_hand(config: Config) -> Any:
        on = (config.model.kwargs["runtime"] or {}).get("checkpointing")
        phase = Phase("training", (20 if on else 40) * GIB, 0, 0, "")
        return SimpleNamespace(largest=phase)

    monkeypatch.setattr(fit_card, "estimate", by_hand)
    name = "sd3/flow_grpo_fast"
    found = load_fitted(name, [], [], profile)
    said = capsys.readouterr().err
    assert said.startswith(f"--profile {profile} sets {sets}") and why in said
    assert (found == load_config(name)) == (profile == "80gb")


def bright(images: Any) -> Any:
    """Score images [L, 3, H, W] by their brightness -> [L]."""
    return images.flatten(1).mean(1)


def test_python_has_the_same_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of the program stay, and what is given stands; a method on a model has it, too."""
    monkeypatch.setattr(fit_card, "estimate", fits_with_checkpointing)
    name, rewards = "sd3/flow_grpo_fast", {"mine": bright}
    found = config_of(name, profile="24gb", rewards=rewards, train={"micro_batch": 3})
    assert found.model.kwargs["runtime"] == {"checkpointing": True, "offload": True}
    assert (found.train.micro_batch, found.train.rollout_batch) == (3, 2)
    assert found.rewards["mine"].function is not None
    composed = config_of("awm", model="sd3", profile="24gb")
    assert composed.model.kwargs["runtime"]["checkpointing"] is True
    with pytest.raises(ConfigError, match="profile: expected the memory of a card, '24gb', got 24"):
        config_of("sd3/flow_grpo_fast", profile=24)  # type: ignore[arg-type]


def test_cards_of_any_size_have_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are those of the next smaller size that is named; "auto" is this GPU's."""
    sizes = {"24gb": 2, "22.4gb": 2, "47.9gb": 2, "48gb": 4, "79gb": 4, "80gb": 8, "141gb": 8}
    assert {name: profile_of(name).batch for name in sizes} == sizes
    assert profile_of("22.4gb").gigabytes == 22.4
    monkeypatch.setattr(fit_card, "card_size", lambda: 44.4)
    found = fitted(load_config("sd3/flow_grpo_fast"), "auto")
    assert (found.name, found.limit) == ("44.4gb", limit_of(44.4))
    monkeypatch.setattr(fit_card, "card_size", lambda: None)
    with pytest.raises(ConfigError, match="--profile auto: this machine has no GPU"):
        profile_of("auto")


def test_a_rank_that_is_given_keeps_its_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a profile would lower both, neither is changed."""

    def by_hand(config: Config) -> Any:
        size = 2**30 * config.model.kwargs["lora"]["rank"]
        return SimpleNamespace(largest=SimpleNamespace(name="decode", bytes=size, what=""))

    monkeypatch.setattr(fit_card, "estimate", by_hand)
    lora = load_fitted("z_image/flow_grpo_fast", [], [], "24gb").model.kwargs["lora"]
    assert (lora["rank"], lora["alpha"]) == (16, 32)
    given = ["model.lora.rank=64"]
    lora = load_fitted("z_image/flow_grpo_fast", given, [], "24gb").model.kwargs["lora"]
    assert (lora["rank"], lora["alpha"]) == (64, 128)


def test_what_is_refused(tmp_path: Path) -> None:
    for wrong in ("24", "gb", "0gb", "-3gb", "24 gb"):
        with pytest.raises(ConfigError, match=f"24gb, 48gb, 80gb or another .* got '{wrong}'"):
            profile_overrides(load_config("sd3/flow_grpo_fast"), wrong)
    with pytest.raises(ConfigError, match="has no runtime options; leave --profile out"):
        profile_overrides(toy(tmp_path), "24gb")


CALLED = [name for name in list_models() if composed("awm", name)["model"]["fn"] == "pipeline"]


def test_a_profile_of_each_pipeline_without_adapter() -> None:
    """Its settings, and 4 bits where the network is known to take more than half of the card."""
    assert len(CALLED) >= 12
    for name in CALLED:
        over = "model.runtime={checkpointing: false, offload: false}"
        config = config_of("awm", model=name, profile="24gb", overrides=[over])
        runtime = config.model.kwargs["runtime"]
        assert not runtime["checkpointing"], name  # as it was given
        asked = profile_overrides(config, "24gb")
        assert {"model.runtime.checkpointing=true", "model.runtime.offload=true"} <= {*asked}, name
        assert ("model.runtime.quantize=nf4" in asked) == (name == "chroma"), name


def test_a_profile_of_a_pipeline_in_a_folder(tmp_path: Path) -> None:
    folder = save_tiny("Lumina2Pipeline", tmp_path / "lumina2")
    found = fitted(config_of("awm", model=str(folder)), "24gb")
    assert "model.runtime.checkpointing=true" in found.overrides
    assert "what is needed is not counted" in found.said
