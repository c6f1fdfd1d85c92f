"""`flowrl score`: batches, tables, files, and whether the self-test finds what is broken and lets
the rest pass."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import brokenkit
import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from PIL import Image
from torch import Tensor
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, DataError, RewardError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_tests.damage import BLUR, PROBES, blur, noise, strangers
from flowrl.evaluation.reward_tests.sees_damage import percentiles
from flowrl.evaluation.reward_tests.selftest import broken, rendered, selftest
from flowrl.evaluation.reward_tests.selftest import table as checks_table
from flowrl.evaluation.reward_tests.under_test import difference
from flowrl.evaluation.score_images import PromptedImage, RewardScores, batches, score_images
from flowrl.evaluation.scorecard import best_and_worst, ranked, scorecard, summary, table
from flowrl.evaluation.suites.shapes.checker import check
from rewards.shapes import shapes

TESTS = Path(__file__).parents[1]
PLUGIN = ["--plugin", "brokenkit"]


def item(
    number: int, size: tuple[int, int] = (4, 4), group: int | None = None, prompt: str = "a dot"
) -> PromptedImage:
    image = torch.rand(3, *size, generator=torch.Generator().manual_seed(number))
    return PromptedImage(
        lambda: image, size, {"prompt": prompt}, number if group is None else group, f"{number}.png"
    )


def red(batch: RewardBatch) -> Tensor:
    return batch.images[:, 0].mean((1, 2))


# ------------------------------------------------------------------------------------------ scoring


def test_images_of_any_sizes_keep_their_order() -> None:
    """Each score is that of the image alone, computed without any batch."""
    items = [
        item(i, size)
        for i, size in enumerate([(4, 4), (5, 3), (4, 4), (5, 3), (5, 3), (2, 2), (4, 4)])
    ]
    seen: list[tuple[int, ...]] = []

    def watching(batch: RewardBatch) -> Tensor:
        seen.append(tuple(batch.images.shape))
        return red(batch)

    values = score_images({"red": watching}, items, batch=2)["red"].values
    assert values.tolist() == pytest.approx([s.load()[0].mean().item() for s in items])
    assert sorted(seen) == [(1, 3, 2, 2), (1, 3, 4, 4), (1, 3, 5, 3), (2, 3, 4, 4), (2, 3, 5, 3)]


def test_groups_come_together() -> None:
    items = [item(i, group=g) for i, g in enumerate([0, 1, 0, 2, 1, 0])]
    assert list(batches(items, 6, False)) == [([0, 2, 5, 1, 4, 3], False)]
    assert list(batches(items, 3, False)) == [([0, 2, 5], False), ([1, 4, 3], False)]
    assert list(batches(items, 2, False)) == [
        ([0, 2], True),
        ([5], True),
        ([1, 4], False),
        ([3], False),
    ]
    assert [rows for rows, _ in batches(items, 1, True)] == [[0, 2, 5], [1, 4], [3]]


def test_scores_go_back_to_their_places() -> None:
    """Groups that come mixed are shown together, and the answers are sorted back."""
    items = [item(i, group=g) for i, g in enumerate([0, 1, 0, 2, 1, 0])]
    values = score_images({"red": red}, items, batch=6)["red"].values
    assert values.tolist() == pytest.approx([s.load()[0].mean().item() for s in items])


def test_what_a_reward_reads_is_noticed() -> None:
    def reads(function: Any) -> set[str]:
        return score_images({"it": function}, [item(0), item(1)])["it"].reads

    assert reads(red) == set()
    assert reads(lambda b: red(b) + len(b.prompts)) == {"prompts"}
    assert reads(lambda b: red(b._replace(sigma=b.sigma)) + b.group * len(b.meta)) == {
        "group",
        "meta",
    }
    assert (
        reads(lambda b: red(b) * torch.tensor([len(p) for p in b[1]])) == set()
    )  # by place: seen by its effect only


def test_a_reward_that_reads_the_prompt_needs_one() -> None:
    with pytest.raises(ConfigError, match="'deaf' reads the prompt: give --prompt"):
        score_images({"deaf": brokenkit.deaf}, [item(0)], has_prompts=False)
    assert (
        len(score_images({"sharp": brokenkit.sharp}, [item(0)], has_prompts=False)["sharp"].values)
        == 1
    )


def test_a_reward_that_compares_needs_the_whole_group() -> None:
    def mean(batch: RewardBatch) -> Tensor:
        return red(batch) - torch.stack([red(batch)[batch.group == g].mean() for g in batch.group])

    items = [item(i, group=0) for i in range(3)]
    assert score_images({"mean": mean}, items, batch=3)["mean"].values.sum() == pytest.approx(
        0, abs=1e-6
    )
    with pytest.raises(ConfigError, match="larger --batch"):
        score_images({"mean": mean}, items, batch=2)
    with pytest.raises(ConfigError, match="of several sizes"):
        score_images({"mean": mean}, [item(0, group=0), item(1, (5, 5), group=0)], batch=9)
    alone = score_images({"red": lambda b: red(b) + 0 * b.group}, items, batch=2, split=True)[
        "red"
    ].values
    assert torch.equal(alone, score_images({"red": red}, items)["red"].values)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b: torch.tensor(1.0), r"expected 2 numbers, one per image, got shape \[\]"),
        (lambda b: red(b)[:, None], r"got shape \[2, 1\]"),
        (lambda b: red(b) / 0, "gave inf for image [01], prompt .*infinity is never allowed"),
        (lambda b: torch.tensor("x"), "failed with TypeError"),
        (brokenkit.picky, "no images of 'a dot' please"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_images(function: Any, message: str) -> None:
    with pytest.raises(RewardError, match=rf"0\.png to 1\.png: reward 'it'.*{message}"):
        score_images({"it": function}, [item(0), item(1)])


# -------------------------------------------------------------------------------------------- table


def test_figures_are_those_of_the_statistics_module() -> None:
    values = [0.25, 3.0, -1.5, 0.0]
    found = summary(torch.tensor([*values, torch.nan]))
    assert (found["mean"], found["std"]) == pytest.approx(
        (statistics.mean(values), statistics.stdev(values))
    )
    assert (found["min"], found["max"], found["scored"], found["not_scored"]) == (-1.5, 3.0, 4, 1)
    assert (
        summary(torch.tensor([2.0]))["std"] is None
        and summary(torch.tensor([torch.nan]))["mean"] is None
    )


def scored(**columns: list[float]) -> dict[str, RewardScores]:
    return {name: RewardScores(torch.tensor(values)) for name, values in columns.items()}


def test_a_table_is_aligned_and_says_what_was_not_scored() -> None:
    card = scorecard(
        [item(i) for i in range(3)],
        scored(a=[0.5, torch.nan, 2.0], bb=[1234.5, -1.0, 0.0]),
        has_prompts=True,
    )
    assert table(card).splitlines() == [
        "file                 a      bb",
        "------------------------------",
        "0.png           0.5000  1234.5",
        "1.png       not scored    -1.0",
        "2.png           2.0000     0.0",
        "------------------------------",
        "mean            1.2500   411.2",
        "std             1.0607   713.0",  # sqrt(1.125); statistics.stdev([1234.5, -1, 0]) = 713.03
        "min             0.5000    -1.0",
        "max             2.0000  1234.5",
        "not scored           1       0",
    ]


def test_sorting_puts_the_best_first_and_the_unscored_last() -> None:
    said = scored(a=[1.0, torch.nan, 3.0, 1.0])
    assert ranked(said, "a") == [2, 0, 3]
    card = scorecard([item(i) for i in range(4)], said, has_prompts=False, sort="a")
    assert [row["file"] for row in card["images"]] == ["2.png", "0.png", "3.png", "1.png"]
    assert [row["scores"]["a"] for row in card["images"]] == [3.0, 1.0, 1.0, None]
    with pytest.raises(ConfigError, match="--sort: expected one of the rewards a, got 'b'"):
        ranked(said, "b")


def test_the_grid_shows_the_best_left_and_the_worst_below() -> None:
    """Flat images whose grey is their score: their places in the grid are found by their
    colour."""
    levels = [0.2, 0.8, 0.4, 0.6, 0.1, 0.9]
    items = [
        item(i)._replace(load=partial(torch.full, (3, 64, 64), x), size=(64, 64))
        for i, x in enumerate(levels)
    ]
    page = np.array(best_and_worst(items, scored(a=levels), ["a"]).convert("L"))
    order = []
    for level in sorted(levels, reverse=True):
        rows, columns = np.nonzero(
            scipy.ndimage.uniform_filter((page == round(255 * level)).astype(float), 40) > 0.999
        )
        order.append((rows.mean() > page.shape[0] / 2, columns.mean()))
    assert order == sorted(order) and [below for below, _ in order] == [False] * 3 + [True] * 3
    mixed = [*items, item(6, (32, 128))]
    assert best_and_worst(mixed, scored(a=[*levels, 0.5]), ["a"]).width > 3 * 192
    with pytest.raises(DataError, match="at least 2 images scored by 'a', got 1"):
        best_and_worst(items[:2], scored(a=[1.0, torch.nan]), ["a"])


# ------------------------------------------------------------------------------------------- damage


def test_blur_is_scipys() -> None:
    """scipy.ndimage.gaussian_filter with the same std, the same reach and the edge continued."""
    image = torch.rand(3, 50, 70, generator=torch.Generator().manual_seed(0))
    std = BLUR * 50
    expected = [
        scipy.ndimage.gaussian_filter(c, std, mode="nearest", radius=int(np.ceil(3 * std)))
        for c in image.numpy()
    ]
    assert torch.allclose(blur(image), torch.from_numpy(np.stack(expected)), atol=1e-6)
    assert torch.allclose(blur(torch.full((3, 9, 9), 0.3)), torch.full((3, 9, 9), 0.3))


def test_noise_has_its_std_and_stays_in_range() -> None:
    """On mid-grey hardly anything is cut off: a normal of std 0.2 leaves [-0.5, 0.5] in 1.2 % of
    pixels."""
    flat = torch.full((3, 64, 64), 0.5)
    noisy = noise(flat, 1)
    expected = scipy.stats.norm(0, 0.2).rvs(200_000, random_state=0).clip(-0.5, 0.5).std()
    assert (noisy - flat).std().item() == pytest.approx(expected, rel=0.03)
    assert noisy.min() >= 0 and noisy.max() <= 1
    assert torch.equal(noisy, noise(flat, 1)) and not torch.equal(noisy, noise(flat, 2))


def test_wrong_prompts_of_the_rendered_scenes_are_wrong() -> None:
    """Judged by the benchmark's checker: every scene is true to its own record and to none that it
    is given."""
    items = rendered(64)
    images, records = torch.stack([s.load() for s in items]), [s.record for s in items]
    others = strangers([s.record["prompt"] for s in items])
    assert check(images, records).strict.all()
    assert not check(images, [records[j] for j in others if j is not None]).strict.any()
    assert len(set(others)) > 32  # and they are not the same few


def test_strangers() -> None:
    assert strangers(["a", "a"]) == [None, None]
    assert strangers(["a red dot", "a red dot", "a blue dot", "two cats"]) == [3, 3, 0, 1]
    assert strangers(["a", "b", "c"], [(1, 1), (2, 2), (1, 1)]) == [2, None, 0]


@pytest.mark.parametrize("kind", PROBES)
def test_probes_are_images_that_differ(kind: str) -> None:
    one, two = PROBES[kind](40, 30, 0), PROBES[kind](40, 30, 1)
    assert (
        one.shape == (3, 40, 30) and one.min() >= 0 and one.max() <= 1 and not torch.equal(one, two)
    )
    assert torch.equal(one, PROBES[kind](40, 30, 0))


def test_percentiles_are_scipys() -> None:
    real, made = (
        torch.tensor([1.0, 2.0, 2.0, 5.0, torch.nan]),
        torch.tensor([0.0, 2.0, 3.0, 9.0, torch.nan]),
    )
    expected = [scipy.stats.percentileofscore([1, 2, 2, 5], x, kind="mean") for x in (0, 2, 3, 9)]
    assert percentiles(made, real).tolist() == pytest.approx(expected)
    assert len(percentiles(made, torch.tensor([torch.nan]))) == 0


def test_difference() -> None:
    nan = torch.nan
    assert difference(torch.tensor([1.0, nan]), torch.tensor([1.5, nan])) == 0.5
    assert difference(torch.tensor([1.0, nan]), torch.tensor([nan, 1.0])) == torch.inf
    assert difference(torch.tensor([nan]), torch.tensor([nan])) == 0


# ---------------------------------------------------------------------------------------- self-test

SCENES = rendered(16)


def verdicts(reward: Any, **options: Any) -> dict[str, str]:
    """Return {check: verdict} without the probes; what is broken has an exclamation mark."""
    rows = selftest("it", reward, SCENES, **options)
    return {
        r.check: r.verdict + "!" * (r in broken(rows))
        for r in rows
        if not r.check.startswith("probe")
    }


GOOD = {
    "answers": "ok",
    "blur": "ok",
    "noise": "ok",
    "wrong prompt": "ok",
    "repeat": "ok",
    "order": "ok",
    "batch size": "ok",
    "speed": "",
    "NaN image": "ok",
}
SILENT = {**GOOD, "wrong prompt": "skipped"}


@pytest.mark.parametrize("mode", ["graded", "strict"])
def test_the_shapes_reward_passes(mode: Any) -> None:
    """All 64 scenes, as the command does it; and no probe comes near a true scene."""
    rows = selftest("shapes", shapes(mode=mode), rendered(64))
    assert {r.check: r.verdict for r in rows if not r.check.startswith("probe")} == GOOD
    by_name = {r.check: r.figures for r in rows}
    for exact in ("repeat", "order", "batch size"):
        assert by_name[exact]["difference"] == 0
    for damage, least in (("blur", 0.75), ("noise", 1.0), ("wrong prompt", 1.0)):
        assert by_name[damage]["share"] >= least and by_name[damage]["pairs"] == 64
    assert [by_name[f"probe: {kind}"]["highest"] for kind in PROBES] == [0] * len(PROBES)


def test_intervals_are_scipys() -> None:
    (row,) = [r for r in selftest("it", shapes(), SCENES) if r.check == "blur"]
    f = row.figures
    expected = scipy.stats.binomtest(int(f["right"]), int(f["pairs"])).proportion_ci(0.95, "wilson")
    assert (f["low"], f["high"]) == pytest.approx(tuple(expected)) and f["right"] + f["tied"] + f[
        "wrong"
    ] == 16


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sharp", SILENT),
        ("contrast", {**SILENT, "noise": "fails"}),  # of another taste, not broken
        (
            "wins",
            {**GOOD, "blur": "weak"},
        ),  # compares within groups, and is given whole ones; blur: 11 of 16 pairs
        ("centred", {**SILENT, "batch size": "fails!", "NaN image": "fails!"}),
        ("infected", {**SILENT, "NaN image": "fails!"}),
        ("squeezed", {**SILENT, "batch size": "fails!"}),
        ("deaf", {**GOOD, "wrong prompt": "fails!"}),
        ("zero", {**SILENT, "NaN image": "fails!"}),
        ("eight_bits", {**SILENT, "noise": "fails", "NaN image": "fails!"}),
        ("hostile", {**GOOD, "blur": "fails!", "noise": "fails!", "wrong prompt": "fails!"}),
        ("crashing", {**SILENT, "NaN image": "weak"}),
        ("half", {**GOOD, "answers": "weak", "blur": "weak"}),
    ],
)
def test_what_is_broken_is_found_and_nothing_else(name: str, expected: dict[str, str]) -> None:
    assert verdicts(getattr(brokenkit, name)) == expected


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("blind", {"blur", "noise"}),
        ("placed", {"order", "batch size"}),
        ("sorted_", {"order", "batch size", "NaN image"}),
        ("restless", {"repeat", "order", "batch size"}),
        ("mute", {"answers"}),
    ],
)
def test_what_else_is_broken_is_found(name: str, found: set[str]) -> None:
    """These are wrong in a way that also spoils other checks, by chance or not."""
    assert found <= {
        check
        for check, verdict in verdicts(getattr(brokenkit, name)).items()
        if verdict == "fails!"
    }


def test_an_untrained_reward_is_not_broken_by_its_taste() -> None:
    """The same function, once as one that is trained along: only the latter may rank damage
    anyhow."""

    class flat(brokenkit.fresh):
        def __call__(self, batch: RewardBatch) -> Tensor:
            return brokenkit.hostile(batch)

    assert verdicts(flat()) == {**GOOD, "blur": "fails", "noise": "fails", "wrong prompt": "fails"}
    assert verdicts(flat().__call__)["blur"] == "fails!"


def test_a_liking_for_the_first_or_the_last_wins_nothing() -> None:
    """Every second pair is shown the other way round, so a score of the place in the batch is right
    in half of them."""
    for sign in (-1.0, 1.0):
        rows = selftest(
            "it", lambda b, sign=sign: sign * torch.arange(len(b.images)).float(), SCENES
        )
        assert {r.check: r.figures.get("share") for r in rows}["blur"] == 0.5


def test_the_words_of_the_table() -> None:
    """Of `wins`, whose blurred images are 11 of 16 right and 5 tied; Wilson's interval from
    scipy."""
    text = checks_table(selftest("wins", brokenkit.wins, SCENES))
    low, high = scipy.stats.binomtest(11, 16).proportion_ci(0.95, "wilson")
    shares = f"68.8 % of 16 pairs right (95 %: {100 * low:.1f} to {100 * high:.1f}), 5 tied"
    assert f"  blur                weak     {shares}\n" in text and text.endswith("\nnothing fails")
    text = checks_table(selftest("it", brokenkit.contrast, SCENES))
    assert text.endswith(
        "\n\nit: noise: ranked the wrong way round; if that is not meant, look into it"
    )


def test_rounding_is_no_difference_but_more_is() -> None:
    """A batch effect of 1e-3 of the score: found at the tolerance 1e-4, allowed at 1e-2; its size
    is reported."""

    def shifted(batch: RewardBatch) -> Tensor:
        return brokenkit.sharp(batch) + 1e-3 * (len(batch.images) == 1)

    assert verdicts(shifted)["batch size"] == "fails!"
    assert verdicts(shifted, tolerance=1e-2)["batch size"] == "ok"
    figures = {r.check: r.figures for r in selftest("it", shifted, SCENES)}["batch size"]
    assert figures["difference"] == pytest.approx(1e-3, rel=1e-3)


def test_what_is_not_meant_to_be_noticed_is_skipped() -> None:
    assert verdicts(brokenkit.hostile, skip=["blur", "noise", "prompt"])["noise"] == "skipped"
    assert "fails!" not in verdicts(brokenkit.hostile, skip=["blur", "noise", "prompt"]).values()
    with pytest.raises(ConfigError, match="blur, noise, prompt to skip, got .* smoke"):
        selftest("it", brokenkit.sharp, SCENES, skip=["smoke"])


def test_a_reward_that_refuses_the_images_asks_for_others() -> None:
    with pytest.raises(
        DataError, match="no images of .* please\n.*--selftest IMAGES --prompts FILE"
    ):
        selftest("it", brokenkit.picky, SCENES)
    with pytest.raises(DataError, match="GenEval record"):
        selftest("it", shapes(), [item(0, (64, 64)), item(1, (64, 64))])
    with pytest.raises(RewardError, match="infinity"):
        selftest("it", brokenkit.endless, SCENES)
    with pytest.raises(ConfigError, match="at least 2 images"):
        selftest("it", brokenkit.sharp, SCENES[:1])


def test_one_prompt_for_all_leaves_nothing_to_confuse() -> None:
    rows = selftest("it", brokenkit.deaf, [s._replace(record={"prompt": "x"}) for s in SCENES])
    assert {r.check: r.verdict for r in rows}["wrong prompt"] == "skipped" and not broken(rows)


# ------------------------------------------------------------------------------------------ command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with pics/00.png ... 05.png, the odd ones noisy, and prompts.jsonl."""
    home = tmp_path_factory.mktemp("home")
    (home / "pics").mkdir()
    records = []
    for i, scene in enumerate(rendered(6)):
        image = noise(scene.load(), i) if i % 2 else scene.load()
        Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(
            home / "pics" / f"0{i}.png"
        )
        records.append(json.dumps({**scene.record, "file": f"0{i}.png"}))
    (home / "prompts.jsonl").write_text("\n".join(records[::-1]) + "\n")
    return home


def test_the_same_numbers_everywhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward, called directly on what Pillow reads, gives the numbers of table, JSON and
    CSV."""
    out = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "png")}
    argv = [
        "score",
        "--reward",
        "shapes",
        "--reward",
        "brokenkit.scaled",
        "--set",
        "scaled.factor=2e1",
        *PLUGIN,
    ]
    argv += ["--prompts", f"{folder}/prompts.jsonl", "--sort", "shapes", "--json", str(out["json"])]
    argv += ["--csv", str(out["csv"]), "--grid", str(out["png"]), "--batch", "4"]
    assert main([*argv, str(folder / "pics")]) == 0
    files = sorted((folder / "pics").iterdir())
    images = torch.stack(
        [torch.from_numpy(np.array(Image.open(f))).permute(2, 0, 1) / 255 for f in files]
    )
    records = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()][
        ::-1
    ]
    batch = RewardBatch(
        images, [r["prompt"] for r in records], torch.arange(6), records, torch.zeros(6)
    )
    columns = shapes()(batch).tolist(), brokenkit.scaled(factor=20)(batch).tolist()
    right = {f.name: scores for f, scores in zip(files, zip(*columns, strict=True), strict=True)}
    card = json.loads(out["json"].read_text())
    assert {
        p["file"]: (p["scores"]["shapes"], p["scores"]["scaled"]) for p in card["images"]
    } == right
    assert [p["file"] for p in card["images"]][:3] == [
        "00.png",
        "02.png",
        "04.png",
    ]  # the undamaged ones
    assert card["rewards"]["scaled"]["factor"] == 20 and card["summary"]["shapes"]["scored"] == 6
    with out["csv"].open() as file:
        assert {
            r["file"]: (float(r["shapes"]), float(r["scaled"])) for r in csv.DictReader(file)
        } == right
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[2:8]] == [
        p["file"] for p in card["images"]
    ]
    assert f"{right['01.png'][0]:.4f}" in text
    assert Image.open(out["png"]).size > (300, 200)


def test_what_has_no_score_is_not_a_number(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "score",
        f"{folder}/pics",
        "--reward",
        "brokenkit.half",
        "--prompts",
        f"{folder}/prompts.jsonl",
        *PLUGIN,
    ]
    assert main([*argv, "--json", f"{tmp_path}/o.json", "--csv", f"{tmp_path}/o.csv"]) == 0
    text = capsys.readouterr().out
    two = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    missing = sum(len(record["include"]) > 1 for record in two)
    card = json.loads((tmp_path / "o.json").read_text())
    assert (
        text.count("not scored") == missing + 1
        and card["summary"]["half"]["not_scored"] == missing > 0
    )
    assert [p["scores"]["half"] for p in card["images"]].count(None) == missing
    assert "nan" not in (tmp_path / "o.csv").read_text().lower()


def test_all_rewards_of_a_config(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "score",
        f"{folder}/pics",
        "--config",
        str(write_toy(tmp_path)),
        "--plugin",
        "toykit",
        "--prompt",
        "a dot",
    ]
    assert (
        main(
            [*argv, "--set", "rewards.bytes={fn: jpeg, scale: 500}", "--set", "rewards.strict=null"]
        )
        == 0
    )
    assert capsys.readouterr().out.split()[:3] == ["file", "red", "bytes"]


def test_reading_notes_are_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGBA", (8, 8), (255, 0, 0, 128)).save(tmp_path / "a.png")
    assert (
        main(
            [
                "score",
                f"{tmp_path}/a.png",
                f"{folder}/pics/00.png",
                "--reward",
                "brokenkit.contrast",
                *PLUGIN,
            ]
        )
        == 0
    )
    assert f"transparency laid on white: 1 of 2 ({tmp_path}/a.png)" in capsys.readouterr().out


MISTAKES = [
    ("PICS", "expected either --reward NAME"),
    ("PICS --reward shapes --config shapes/flow_grpo", "expected either --reward NAME"),
    ("PICS --reward shape", "did you mean 'shapes'"),
    ("PICS --reward brokenkit.sharp", "allow it with --plugin brokenkit"),
    ("PICS --reward gone_kit.a --plugin gone_kit", "cannot import gone_kit"),
    ("PICS --reward shapes --set mode=lax --prompt x", "'graded', 'strict', got 'lax'"),
    ("PICS --reward shapes --set mod=strict --prompt x", "has no argument 'mod'"),
    ("PICS --reward shapes --reward jpeg --set mode=strict", "with a NAME of shapes, jpeg"),
    ("PICS --reward shapes --reward rewards.shapes.shapes", "names that differ"),
    ("PICS --reward shapes", "00.png, without --prompts: expected a GenEval record"),
    ("PICS --reward shapes --prompts TMP/p.jsonl", "line 6: expected a GenEval record"),
    ("PICS --reward brokenkit.deaf --plugin brokenkit", "'deaf' reads the prompt: give --prompt"),
    ("PICS --reward shapes --sort jpeg", "--sort: expected one of the rewards shapes"),
    ("PICS --reward jpeg --count 3", "belong to --selftest"),
    ("PICS --reward jpeg --batch 0", "batch of at least 1"),
    ("TMP/gone.png --reward jpeg", "gone.png: cannot be read as an image"),
    ("--reward shapes", "expected images or folders"),
    ("--selftest --reward shapes --csv x.csv", "leave out --csv"),
    ("--selftest --reward shapes --prompt x", "leave out --prompt "),
    ("--selftest --reward shapes --skip shape.blur", "expected a reward of shapes"),
    ("--selftest --reward shapes --count 1", "at least 2 images"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[argv for argv, _ in MISTAKES])
def test_mistakes_are_explained(
    argv: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message, exit code 2, nothing on the standard output."""
    _without_include(folder, tmp_path / "p.jsonl")
    given = argv.replace("PICS", f"{folder}/pics").replace("TMP", str(tmp_path)).split()
    assert main(["score", *given]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("\nflowrl: ") and message in error


def _without_include(folder: Path, file: Path) -> None:
    """Write the folder's prompts, the last one without `include`."""
    records = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    records[-1].pop("include")
    file.write_text("\n".join(map(json.dumps, records)))


def test_files_that_cannot_be_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for option in ("--json", "--csv", "--grid"):
        assert (
            main(["score", f"{folder}/pics", "--reward", "jpeg", option, f"{tmp_path}/file/out"])
            == 2
        )
        assert f"cannot write {tmp_path}/file/out" in capsys.readouterr().err


def test_selftest_of_images_of_the_user(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the undamaged three; --count takes every second of the six, and --skip is meant for one
    reward."""
    argv = f"score --selftest {folder}/pics --prompts {folder}/prompts.jsonl --count 3".split()
    argv += f"--reward shapes --reward jpeg --skip jpeg.blur --json {tmp_path}/o.json".split()
    assert main(argv) == 0
    rows = json.loads((tmp_path / "o.json").read_text())["checks"]
    found = {(row["reward"], row["check"]): row for row in rows}
    expected = {"scored": 3, "images": 3, "mean": 1, "std": 0, "min": 1, "max": 1}
    assert found["shapes", "answers"]["figures"] == pytest.approx(expected)
    assert found["jpeg", "blur"]["verdict"] == "skipped" != found["shapes", "blur"]["verdict"]
    assert "\nnothing fails\n" in capsys.readouterr().out


# ------------------------------------------------------------------ rewards from the working folder


MINE = """
def brightness(batch, *, scale: float = 1.0):
    return scale * batch.images.mean((1, 2, 3))


class glow:
    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, batch):
        return brightness(batch, scale=self.scale)
"""


@pytest.mark.integration
def test_a_reward_from_the_folder_that_one_works_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function and a class in a file of the working folder, nothing installed; the pixels' mean
    from numpy."""
    (tmp_path / "my_rewards.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    # the installed command does not look into the working folder
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    rewards = ["--reward", "my_rewards.brightness", "--reward", "my_rewards.glow"]
    options = ["--plugin", "my_rewards", *rewards, "--set", "glow.scale=2", "--json", "o.json"]
    assert main(["score", *options, str(folder / "pics")]) == 0
    for row in json.loads((tmp_path / "o.json").read_text())["images"]:
        mean = (np.array(Image.open(folder / "pics" / row["file"])) / 255).mean()
        assert row["scores"] == pytest.approx({"brightness": mean, "glow": 2 * mean}, rel=1e-5)


@pytest.mark.integration
def test_a_broken_reward_ends_the_selftest_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--selftest", "--count", "16", "--reward", "brokenkit.zero", *PLUGIN]
    assert main(["score", *options]) == 1
    out, error = capsys.readouterr()
    assert out.endswith("zero: NaN image: broken\n") and "Traceback" not in out + error
