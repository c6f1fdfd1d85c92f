"""What carries over to other models, rewards, students and sizes: tables are worked out from
outcomes."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats
from scriptkit import script_module

TRANSFER = script_module("results/transfer")
STUDENT = script_module("results/student")
SIZES = script_module("results/sizes")
PROMPTS = {"tags": ["even", "even", "odd", "odd"], "scenes": ["a", "b", "c", "d"]}


def runs(*outcomes: str) -> list[dict[str, Any]]:
    """Return runs as the files keep them, one image of each prompt."""
    made = []
    for seed, text in enumerate(outcomes):
        at = {"iteration": 1, "nfe": 60_000.0, "outcomes": text}
        made.append({"seed": seed, "failed": None, "at": {"nfe": at}})
    return made


def in_setting(*seeds: tuple[str, str, str]) -> dict[str, Any]:
    """Return what the file has of a setting: its first configs with these outcomes."""
    configs = []
    for name, three in zip(TRANSFER.CONFIGS, seeds, strict=False):
        configs.append({"name": name, "file": name, "lr": 1.0, "seeds": runs(*three)})
    return {"base": {**PROMPTS, "outcomes": "1 0 0 0"}, "configs": configs}


def test_gains_of_a_setting_are_those_of_its_outcomes() -> None:
    """The base has 1 of 4 right; 3, 2 and 3 of 4 are +41.7 points in the mean, 1, 1 and 0 -8.3."""
    better, worse = ("1 1 1 0", "1 1 0 0", "1 1 1 0"), ("1 0 0 0", "1 0 0 0", "0 0 0 0")
    found = TRANSFER.rows({"soft": in_setting(better, worse)}, "soft")
    first, second = TRANSFER.CONFIGS[:2]
    assert found[first]["gain"] == pytest.approx(5 / 12)
    assert found[second]["gain"] == pytest.approx(-1 / 12)
    assert (found[first]["below"], found[second]["below"]) == (0, 1)


def test_what_takes_no_training_stands_beside_the_gains() -> None:
    """Right before training: 1 of 4; with guidance 3 of 4. Without it a setting is not shown."""
    one = in_setting(*[("1 1 1 0",) * 3] * len(TRANSFER.CONFIGS))
    one["alternatives"] = {TRANSFER.GUIDED: {"nfe_per_image": 40, "outcomes": "1 1 1 0"}}
    said = "25.0 % right before training, 75.0 % with guidance 3.5, 20 steps (40 NFE)"
    assert TRANSFER.before(one) == said
    assert TRANSFER.complete({"soft": one}) == []
    one["alternatives"]["best of 4"] = {"nfe_per_image": 40, "outcomes": "1 1 1 1"}
    assert TRANSFER.complete({"soft": one}) == ["soft"]
    one["configs"].pop()
    assert TRANSFER.complete({"soft": one}) == []


def test_the_rank_correlation_and_its_interval_by_hand() -> None:
    """Ranks 1 to 6 against 2 1 4 3 6 5 differ by 1 six times: 1 - 6 * 6 / 210 = 0.829. In Fisher's
    terms 1.184 +- 1.960 * sqrt(1.343 / 3), so -0.13 to 2.50."""
    first = {str(k): {"gain": float(k)} for k in range(6)}
    second = {str(k): {"gain": float(k ^ 1)} for k in range(6)}
    r, low, high = TRANSFER.order(first, second)
    assert r == pytest.approx(1 - 36 / 210)
    assert (low, high) == (pytest.approx(-0.127, abs=2e-3), pytest.approx(0.987, abs=1e-3))
    # only what both have; the same order has no interval
    assert TRANSFER.order(first, {**second, "7": {"gain": 9.0}}) == (r, low, high)
    assert TRANSFER.order(first, first) == (1.0, 1.0, 1.0)
    assert r == pytest.approx(stats.spearmanr(range(6), [1, 0, 3, 2, 5, 4]).statistic)


@pytest.mark.parametrize("setting", ["sdxl", "weaker", "soft"])
def test_a_setting_changes_what_it_names_alone(setting: str) -> None:
    """Of each config the rate is the table's; model or rewards are the setting's."""
    for name in TRANSFER.CONFIGS:
        table = TRANSFER.load_config(name, TRANSFER.COMMON).to_dict()
        mine = TRANSFER.config_of(setting, name).to_dict()
        changed = {key for key in table if mine[key] != table[key]}
        own = "rewards" if setting == "soft" else "model"
        assert own in changed and changed <= {own, "optimizer"}, (name, changed)
        (lr,) = [row["lr"] for row in TRANSFER.read()["configs"] if row["file"] == name]
        assert mine["optimizer"] == {**table["optimizer"], "lr": lr}
        assert mine["eval"]["score"] == "strict"
        assert mine["prompts"]["test"] == "assets/shapes/final.jsonl"


def test_the_table_of_students_by_hand() -> None:
    """The student has 2 of 4 right; trained, it has 3, 3 and 4 of 4: +33.3 points."""
    single, better = "1 1 0 0", ("1 1 1 0", "1 1 0 1", "1 1 1 1")
    rows: dict[str, Any] = {}
    for name, row in STUDENT.ROWS.items():
        rows[name] = runs(*better) if row.seeds else runs(single)
    rows["base"], rows["moved"] = runs("1 1 1 1"), runs(single, single, "0 1 0 0")
    found = {"prompts": PROMPTS, "rows": rows, "looks": {"student": 2}}
    assert STUDENT.complete(found)
    by_name = {row["name"]: row for row in STUDENT.rows(found)}
    assert list(by_name) == list(STUDENT.ROWS)
    assert by_name["base"]["right"] == 1 and by_name["student"]["right"] == 0.5
    assert by_name["direct"]["gain"] == pytest.approx(1 / 3)
    assert by_name["moved"]["gain"] == pytest.approx(-1 / 12)
    lines = STUDENT.table(STUDENT.rows(found)).splitlines()
    # two lines more, of what the base model does without training; and a second look is said
    assert len(lines) == 2 + len(STUDENT.ROWS) + 2
    assert [line for line in lines if "looks" in line] == [lines[6]]
    assert lines[6].startswith("| its student (2 looks) | 4 |")
    assert lines[4].startswith("| base model, best of 4 | 40 |")
    # the trained model has 10 of 12 images right, its base all; what was moved lost one of twelve
    said = STUDENT.kept_gain(STUDENT.rows(found))
    assert "gained -16.7 points" in said and "gains -8.3 when" in said
    # a star is escaped once
    starred = {**by_name["direct"], "holm": 0.001, "half": 0.01}
    assert r"+33.3\* (32.3" in STUDENT.table([starred])
    assert "+33.3" in lines[-1] and "83.3 %" in lines[-1]
    # a missing seed, and there is no table
    rows["anew"].pop()
    assert not STUDENT.complete(found)


def test_students_are_trained_and_judged_in_four_steps() -> None:
    """The trained base model differs from the table's DiffusionNFT in its LoRA and rate; all that
    has four steps draws in four when it is judged."""
    trained = STUDENT.config_of("trained").to_dict()
    direct = STUDENT.config_of("direct").to_dict()
    assert (trained["eval"]["steps"], direct["eval"]["steps"], direct["plan"]["steps"]) == (
        10,
        4,
        4,
    )
    assert trained["model"]["tune"] == "lora" and trained["model"] == direct["model"]
    changed = {key for key in trained if trained[key] != direct[key]}
    assert changed == {"name", "plan", "eval", "likelihood", "train"}
    assert direct["train"] == {**trained["train"], "start": str(STUDENT.STUDENT)}
    for name, row in STUDENT.ROWS.items():
        assert STUDENT.config_of(name).eval.steps == row.steps, name


def two_sizes() -> dict[str, Any]:
    """Return what the file has of both sizes: 1 of 4 right before, and 3 or 2 of 4 after."""
    configs: list[dict[str, Any]] = []
    for name, text in (("small", "1 1 1 0"), ("large", "1 1 0 0")):
        configs.append({"name": name, "file": name, "seeds": runs(*[text] * 3)})
        for run in configs[-1]["seeds"]:
            run["iterations"] = 10
    return {
        "cost": {"small": 0.01, "large": 0.023},
        "base": {**PROMPTS, "outcomes": "1 0 0 0"},
        "configs": configs,
        "alternatives": {"best of 4": {"nfe_per_image": 40, "outcomes": "1 1 0 0"}},
    }


def test_the_table_of_sizes_by_hand() -> None:
    """Half of the edits more at the small size, a quarter more at the large one, for the same
    processor time. A size, or what stands beside it, is missing: no table."""
    found = two_sizes()
    assert not SIZES.complete(found)
    found["alternatives"]["20 steps"] = {"nfe_per_image": 20, "outcomes": "1 0 0 0"}
    assert SIZES.complete(found)
    lines = SIZES.table(found).splitlines()
    assert len(lines) == 2 + 1 + 2 + 2
    assert "25.0 %" in lines[2] and "50.0 %" in lines[3] and "+50.0" in lines[5]
    # ten iterations of 32 prompts and 12 images
    assert lines[5].endswith(" 3,840 |") and "+25.0" in lines[6]
    text = SIZES.compared(found)
    assert "takes 2.3 times" in text and "+25.0 points" in text
    assert not SIZES.complete({**found, "configs": found["configs"][:1]})


def test_sizes_differ_in_their_training_images_alone() -> None:
    """Both are judged at 96 pixels, on the test edits, in as many steps."""
    small, large = (SIZES.config_of(name).to_dict() for name in ("small", "large"))
    assert small["image"] == {"height": 64, "width": 64}
    assert large["image"] == {"height": 96, "width": 96}
    changed = {key for key in small if small[key] != large[key]}
    assert changed == {"image", "name"}
    assert (small["eval"]["height"], small["eval"]["width"]) == (96, 96)
    assert small["prompts"]["test"] == "assets/shapes-edits/test.jsonl"


@pytest.mark.parametrize("module", [TRANSFER, STUDENT, SIZES])
def test_the_files_keep_their_protocol(module: Any) -> None:
    """Every run spent its budget; every outcome has each prompt of the test list."""
    found = module.kept()
    if not found:
        pytest.skip("nothing was trained yet")
    some: list[tuple[Any, Any, float]] = []  # prompts, seeds, network evaluations
    if module is TRANSFER:
        for one in found.values():
            some += [(one["base"], row["seeds"], TRANSFER.NFE) for row in one["configs"]]
    elif module is SIZES:
        some = [(found["base"], row["seeds"], row["nfe"]) for row in found["configs"]]
    else:
        some = [(found["prompts"], seeds, STUDENT.NFE) for seeds in found["rows"].values()]
    for prompts, seeds, nfe in some:
        for run in seeds:
            end = run["at"]["nfe"]
            assert run["failed"] or len(end["outcomes"].split()) == len(prompts["tags"])
            assert run["failed"] or "nfe" not in run or run["nfe"] >= nfe
