"""Whether a config fits a card, and what helps if it does not: each number that is printed is the
estimate of the changed config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from estimatekit import made, model_config, phases
from tiny import tiny_sd3

from flowrl.config.load import Config
from flowrl.core.tables import size
from flowrl.cost.architecture import tuning_of
from flowrl.cost.estimate import Estimate, Phase, estimate, phase
from flowrl.cost.fit_card import GIB, RESERVE, SMALLER, change, limit_of, remedies, verdict
from flowrl.training.rehearsal import check_plan


def needs(config: Config, name: str, key: str, value: Any) -> int:
    """Return the bytes of a phase of a changed config."""
    return phase(change(config, key, value), name, check_plan(config)).bytes


def said(found: Estimate, name: str, limit: float) -> list[str]:
    """Return the verdict on one phase alone, for a card of `limit` bytes beside the reserve."""
    alone = found._replace(phases=[phases(found)[name]])
    return verdict(alone, gigabytes=(limit + RESERVE) / GIB)


def test_the_verdict_names_the_largest_batch_that_fits(tmp_path: Path) -> None:
    """On a card between what batches of 3 and of 4 need."""
    config = made(tmp_path, "sd3, full, deep")
    three, four = (needs(config, "training", "train.micro_batch", n) for n in (3, 4))
    saving = needs(config, "training", "model.runtime.checkpointing", True)
    limit = (three + four) // 2
    assert saving <= limit
    found = estimate(config)
    worst = phases(found)["training"]
    ways = dict(remedies(config, found.forecast, worst, limit))
    assert ways["lower train.micro_batch to 3"].bytes == three
    assert ways["turn on model.runtime.checkpointing"].bytes == saving
    head, *rest = said(found, "training", limit)
    largest = f"GB card: no, the largest phase is training with {size(worst.bytes)}; "
    assert head.endswith(
        f"{largest}lower train.micro_batch to 3 ({size(three)}) or turn on "
        f"model.runtime.checkpointing ({size(saving)})"
    )
    assert rest == ["(1.0 GiB of the card are set aside for the CUDA context and libraries)"]
    fits = "fits a 80 GB card: yes; the largest phase is training with "
    assert verdict(found, gigabytes=80)[0].startswith(fits)


def test_the_largest_batch_where_memory_bends(tmp_path: Path) -> None:
    """Decoding a few images at a time, the latents decide; many at a time, the VAE:
    the batch found fits, and one image more does not."""
    config = change(made(tmp_path, "sd3, full"), "train.group", 20)
    key = "model.decode_batch"
    one, two, twenty, forty = (needs(config, "decode", key, n) for n in (1, 2, 20, 40))
    assert one <= two < twenty < forty
    limit, forecast = (twenty + forty) // 2, check_plan(config)
    ((words, then),) = remedies(config, forecast, phase(config, "decode", forecast), limit)
    batch = int(words.removeprefix(f"lower {key} to ").split()[0])
    assert then.bytes <= limit < needs(config, "decode", key, batch + 1)


def test_the_largest_batch_where_the_latents_decide(tmp_path: Path) -> None:
    """The limit is what decoding one image and two images need: the latents decide. The search
    ends, with the batch from which on the images decide."""
    key, name = "model.decode_batch", "decode"
    config = change(change(made(tmp_path, "sd3, full"), "train.group", 400), key, 512)
    limit, forecast = needs(config, name, key, 1), check_plan(config)
    assert needs(config, name, key, 2) == limit
    ((words, then),) = remedies(config, forecast, phase(config, name, forecast), limit)
    batch = int(words.removeprefix(f"lower {key} to "))
    assert then.bytes == needs(config, name, key, batch) == limit
    assert needs(config, name, key, batch + 1) > limit


def test_where_no_batch_is_small_enough(tmp_path: Path) -> None:
    """A phase without a batch, between what it needs with 8-bit moments and without: the bytes of
    the changed config. Below both: what comes nearest, and that it is not enough."""
    config = change(made(tmp_path, "sd3, full"), "model.runtime.offload", True)
    found, name = estimate(config), "optimizer step"
    worst = phases(found)[name]
    less = needs(config, name, "optimizer.fn", "adamw8bit")
    head = said(found, name, (worst.bytes + less) / 2)[0]
    assert f"; no batch size is enough: {size(worst.kept)} are kept in any case (" in head
    assert "; what helps: " in head and f"optimizer.fn=adamw8bit ({size(less)})" in head
    assert said(found, name, 1000)[0].endswith("), which is not enough")


@pytest.mark.parametrize(
    ("given", "alpha"),
    [("{rank: 64, alpha: 128}", "32"), ("{rank: 64}", "16"), ("{rank: 48, alpha: 20}", "6.66667")],
)
def test_a_smaller_rank_is_proposed_where_adapters_are_large(
    tmp_path: Path, given: str, alpha: str
) -> None:
    """Rank 64 has four times the trained weights of rank 16, and so their moments. What is proposed
    is typed as it stands, and keeps alpha / rank; alpha is 64 by default."""
    model = f"{{fn: sd3, guidance: 2.0, lora: {given}, path: {tmp_path}/weights, device: cpu}}"
    tiny_sd3(tmp_path / "weights")
    config = model_config(tmp_path, model)
    name = "optimizer step"
    less = needs(config, name, "model.lora", {"rank": 16})
    found = estimate(config)
    assert less < phases(found)[name].bytes
    limit = (less + phases(found)[name].bytes) / 2
    head = said(found, name, limit)[0]
    hint = f"model.lora.rank=16 model.lora.alpha={alpha}"
    assert f"{hint} ({size(less)})" in head
    typed = model_config(tmp_path, model, *hint.split())
    before, after = (tuning_of(one).lora for one in (config, typed))
    assert after.rank == 16
    assert after.alpha / after.rank == pytest.approx(before.alpha / before.rank, rel=1e-5)
    assert needs(config, name, "model.lora", typed.model.kwargs["lora"]) == less
    # nothing smaller is proposed then
    assert "model.lora.rank" not in said(estimate(typed), name, 1000)[0]


def test_cards_that_are_sold_as_larger_than_they_are(tmp_path: Path) -> None:
    """nvidia-smi shows 23,034 MiB of an L4 and 46,068 of an L40S, 24,564 of an RTX 4090: 22.49,
    44.99 and 23.99 GiB. A yes that holds for the last alone is followed by the others' names."""
    found = estimate(made(tmp_path, "sd3, full"))
    for card, shown, names in ((24, 23_034, "an L4 or A10G"), (48, 46_068, "an L40S or A40")):
        less = SMALLER[card][0]
        assert 0 < shown / 1024 - less < 0.1
        for gib, said in ((less - 1.01, 0), (less - 0.9, 1), (card - 1.01, 1)):
            one = found._replace(phases=[Phase("decode", int(gib * GIB), 0, 0, "")])
            head, *rest = verdict(one, gigabytes=card)
            assert head.startswith(f"fits a {card} GB card: yes; ") and len(rest) == said
            words = f"(not {names}, sold as {card} GB: there are {less:g} of 2^30 bytes; see "
            assert all(line == f"{words}--card {less:g})" for line in rest)
            assert verdict(one, gigabytes=less)[0].startswith("fits") and (
                " card: no, " in verdict(one, gigabytes=less)[0]
            ) == bool(said)


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
