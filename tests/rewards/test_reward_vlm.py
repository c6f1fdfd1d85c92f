"""The judge over HTTP: what it is sent, which answers belong to which images, and what is kept."""

from __future__ import annotations

import asyncio
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_server import (
    LEVELS,
    Act,
    Seen,
    batch_of,
    brightness,
    close,
    expected_points,
    grey,
    judge,
    prefers_bright,
    rates_brightness,
    says,
    serving,
)
from torch import Tensor

from flowrl.core.errors import DataError, RunError
from flowrl.core.types import Reward
from rewards._judge.cache import recall
from rewards.vlm import vlm
from rewards.win_rate import win_rate

pytestmark = pytest.mark.integration


def test_a_request_in_the_public_format() -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    with serving(rates_brightness) as server:
        reward = judge(server, extra=extra)
        assert isinstance(reward, Reward)
        close(reward(batch_of(grey([200]), ["a cat, {prompt} or {}"])), expected_points([200]))
        (seen,) = server.seen
    body = dict(seen.body)
    (message,) = body.pop("messages")
    public = {"model": "UnifiedReward", "temperature": 0, "max_tokens": 4096}
    assert body == public | extra
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert seen.text.endswith("Text Caption: [a cat, {prompt} or {}]")
    assert seen.text.count("Final Score:") == 1
    assert seen.images[0].shape == (16, 16, 3) and seen.authorization is None


def test_png_is_sent_without_loss() -> None:
    images = torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    with serving(rates_brightness) as server:
        judge(server, encoding="png")(batch_of(images))
        sent = {seen.images[0].tobytes() for seen in server.seen}
    levels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    assert sent == {image.tobytes() for image in levels}


def test_answers_find_their_images_in_any_order() -> None:
    """The later an image was sent the sooner it is answered; also inside a running event loop."""

    def slow_first(seen: Seen) -> Act:
        return rates_brightness(seen)._replace(delay=0.05 * max(0, 5 - seen.number))

    async def notebook(reward: vlm) -> Tensor:
        return reward(batch_of(grey(LEVELS)))

    with serving(slow_first) as server:
        close(judge(server)(batch_of(grey(LEVELS))), expected_points(LEVELS))
        close(asyncio.run(notebook(judge(server))), expected_points(LEVELS))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(judge(server, workers=1)(batch_of(grey(LEVELS))), expected_points(LEVELS))
        assert server.busiest > 1


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_than_so_many_at_once(workers: int) -> None:
    with serving(lambda seen: says("Final Score: 5", delay=0.03 * workers)) as server:
        judge(server, workers=workers)(batch_of(grey(list(range(0, 240, 20)))))
        assert len(server.seen) == 12 and server.busiest == workers


def test_an_image_with_nan_is_refused_and_no_images_are_fine() -> None:
    with serving(rates_brightness) as server:
        with pytest.raises(DataError, match="NaN"):
            judge(server)(batch_of(grey([1]) * math.nan))
        assert judge(server)(batch_of(grey([]), [])).shape == (0,) and not server.seen


# -------------------------------------------------------------------------------------------- pairs


def test_pairs_are_shown_in_order_and_keyed_by_place() -> None:
    first, second = [0, 3, 4, 1], [1, 2, 0, 3]
    asked = [(LEVELS[i], LEVELS[j]) for i, j in zip(first, second, strict=True)]
    images = grey(LEVELS)
    words: tuple[list[str], list[Any]] = (["a"] * 4, [{}] * 4)
    with serving(prefers_bright) as server:
        reward = judge(server, template="pair_rank")
        pairs = reward.compare_pairs(images, torch.tensor(first), torch.tensor(second), *words)
        assert pairs.tolist() == [float(a > b) for a, b in asked]
        plain = reward.compare(images[first], images[second], *words)
        assert plain.dtype == torch.float32 and torch.equal(plain, pairs)
        shown = set()
        for seen in server.seen:
            a, b = map(brightness, seen.images)
            shown.add((round(a / 40) * 40, round(b / 40) * 40))
    assert shown == set(asked)


def test_win_rates_by_a_judge_over_http() -> None:
    """By points each image is asked about once, by pairs each pair in both orders."""
    with serving(rates_brightness) as server:
        options = {"fn": "vlm", "url": server.url, "template": "point"}
        rate = win_rate(judge=options)(batch_of(grey(LEVELS)))
        assert len(server.seen) == 5
    assert rate.tolist() == [1, 0, 0.5, 0.25, 0.75]  # the rank by brightness, of 5
    # their scores are 0.83, 0.33, 0.58, 0.45, 0.70: neighbours are 0.13 apart, which is a tie,
    # others 0.25 and more; so 3, 0, 1, 0 and 2 wins, half a win for each neighbour, of 4 pairs
    for schedule in ("all", "tournament"):
        with serving(rates_brightness) as server:
            options = {"fn": "vlm", "url": server.url, "template": "point"}
            rate = win_rate(judge=options, tie=0.15, schedule=schedule)(batch_of(grey(LEVELS)))
            assert len(server.seen) == 5
        if schedule == "all":
            assert rate.tolist() == [0.875, 0.125, 0.5, 0.25, 0.75]
    with serving(prefers_bright) as server:
        batch = batch_of(grey(LEVELS + LEVELS[:2]), group=[0] * 5 + [9] * 2)
        rate = win_rate(judge={"fn": "vlm", "url": server.url})(batch)
        assert len(server.seen) == 2 * 10  # the pair of group 9 is one of group 0 too
    assert rate.tolist() == [1, 0, 0.5, 0.25, 0.75, 1, 0]


def test_a_missing_pair_is_left_out_of_the_win_rate() -> None:
    """Images 0 and 1 are never compared: 0 beats the other three, 1 loses to them."""

    def act(seen: Seen) -> Act:
        hidden = {brightness(image) // 40 for image in seen.images} == {5, 1}
        return says("I cannot say.") if hidden else prefers_bright(seen)

    with serving(act) as server:
        options = {"fn": "vlm", "url": server.url, "max_failed": 0.1}
        with pytest.warns(UserWarning, match="2 of 20 questions failed"):
            rate = win_rate(judge=options)(batch_of(grey([204, 44, 124, 84, 164])))
    assert rate.tolist() == [1, 0, 0.5, 0.25, 0.75]


def test_consistency_averages_all_pairs_of_cells() -> None:
    """Cells alike -> Yes with p = .9, else .2; of the 6 pairs of this 2x2 grid one is alike."""

    def alike(seen: Seen) -> Act:
        p = 0.9 if abs(brightness(seen.images[0]) - brightness(seen.images[1])) < 5 else 0.2
        return says("?", {"Yes": math.log(p), "No": math.log(1 - p)})

    rows = [torch.cat([grey([a]), grey([b])], 3) for a, b in ((40, 200), (120, 40))]
    grid = torch.cat(rows, 2)
    flat = grey([99], size=33)  # 3 columns of 11; rows of 16, one pixel is left over
    with serving(alike) as server:
        reward = judge(server, template="consistency")
        score = float(reward(batch_of(grid, ["cats in a 2x2 grid"])))
        assert score == pytest.approx((0.9 + 5 * 0.2) / 6)
        for seen in server.seen:
            assert seen.images[0].shape == seen.images[1].shape == (16, 16, 3)
        assert float(reward(batch_of(flat, ["2 × 3 cats"]))) == pytest.approx(0.9)
        assert server.seen[-1].images[0].shape == (16, 11, 3)
        reward.check_record({"prompt": "a 3x1 strip"}, "line 1")
        for prompt in ("two cats", "cats at 512x512", "a 1x1 grid"):
            with pytest.raises(DataError, match=r"line 1: .* grid of 2 to 16 cells"):
                reward.check_record({"prompt": prompt}, "line 1")


# ---------------------------------------------------------------------------------------- the cache


def test_the_same_question_is_asked_once(tmp_path: Path) -> None:
    folder = str(tmp_path / "answers")
    with serving(rates_brightness) as server:
        twice = judge(server)(batch_of(grey([200, 40, 200])))
        assert len(server.seen) == 2 and twice[0] == twice[2]
        cached = judge(server, cache=folder)
        first = cached(batch_of(grey(LEVELS)))
        assert len(server.seen) == 7 and cached.counts == {"asked": 5, "cached": 0, "failed": 0}
        again = judge(server, cache=folder)
        assert torch.equal(again(batch_of(grey(LEVELS[::-1]))), first.flip(0))
        assert len(server.seen) == 7 and again.counts == {"asked": 0, "cached": 5, "failed": 0}
    files = [file for file in (tmp_path / "answers").rglob("*") if file.is_file()]
    assert [file.suffix for file in files] == [".json"] * 5
    offline = vlm(url="http://127.0.0.1:9", template="point", cache=folder)
    assert torch.equal(offline(batch_of(grey(LEVELS))), first)


def test_log_probs_are_asked_for_and_kept(tmp_path: Path) -> None:
    with serving(lambda seen: says("Yes", {"Yes": -0.3, "No": -1.4})) as server:
        for _ in range(2):
            score = judge(server, template="yes_no", cache=str(tmp_path))(batch_of(grey([1])))
            assert float(score) == pytest.approx(0.7502601, abs=1e-7)  # sigmoid(1.1)
        (seen,) = server.seen
    asked = {"logprobs": True, "top_logprobs": 20, "max_tokens": 1, "temperature": 0}
    assert {name: seen.body[name] for name in asked} == asked


def test_another_question_is_asked_anew(tmp_path: Path) -> None:
    wording, folder = tmp_path / "wording.txt", str(tmp_path / "c")
    wording.write_text("Rate [{prompt}]. Final Score: ?")
    others: list[dict[str, Any]] = [
        {"model": "other"},
        {"template": "rating", "pattern": r"Score: ([\d.]+)"},
        {"template_file": str(wording)},
        {"encoding": "png"},
        {"max_tokens": 100},
        {"extra": {"seed": 1}},
    ]
    with serving(rates_brightness) as server:
        for count, options in enumerate([{}, *others], start=1):
            judge(server, cache=folder, **options)(batch_of(grey([9])))
            assert len(server.seen) == count
        judge(server, cache=folder)(batch_of(grey([9]), ["a dog"]))
        judge(server, cache=folder)(batch_of(grey([10])))
        assert len(server.seen) == 9
        judge(server, cache=folder, workers=1, retries=0)(batch_of(grey([9, 10])))
        assert len(server.seen) == 9
    with serving(prefers_bright) as server:
        for first, second in [(1, 99), (99, 1)]:  # the order of a pair is part of the question
            pair = judge(server, template="pair_rank", cache=folder)
            won = pair.compare(grey([first]), grey([second]), ["a"], [{}])
            assert won.tolist() == [float(first > second)]
        assert len(server.seen) == 2


def test_failures_are_not_kept_and_torn_files_are_asked_again(tmp_path: Path) -> None:
    answers = [says("?"), *[says("Final Score: 5")] * 9]
    with serving(lambda seen: answers[seen.number]) as server:
        reward = judge(server, cache=str(tmp_path), max_failed=1.0)
        with pytest.warns(UserWarning, match="1 of 1"):
            assert bool(reward(batch_of(grey([9]))).isnan())
        assert not [file for file in tmp_path.rglob("*") if file.is_file()]
        assert float(reward(batch_of(grey([9])))) == 1
        (file,) = (file for file in tmp_path.rglob("*") if file.is_file())
        whole = file.read_bytes()
        other = whole.replace(b"Score: 5", b"Score: 9")
        for torn in (b"", whole[:-5], b"[]", b'{"text": 1}', other, b"\xff"):
            asked = len(server.seen)
            file.write_bytes(torn)
            assert float(reward(batch_of(grey([9])))) == 1
            assert len(server.seen) == asked + 1 and file.read_bytes() == whole


def test_half_of_a_surrogate_pair_is_kept_as_it_came(tmp_path: Path) -> None:
    """JSON can write it and UTF-8 cannot; what is not ASCII comes back, too."""
    answer = "half \ud800, größe\u2028\U0001f600. Final Score: 5"
    with serving(lambda seen: says(answer)) as server:
        for _ in range(2):
            assert float(judge(server, cache=str(tmp_path))(batch_of(grey([9])))) == 1
        assert len(server.seen) == 1
    (file,) = tmp_path.rglob("*.json")
    kept = recall(tmp_path, file.stem)
    assert kept is not None and kept.text == answer


def test_a_cache_that_cannot_be_written_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("")
    with serving(rates_brightness) as server:
        with pytest.raises(RunError, match="^rewards.vlm: cache: cannot write .*: Not a dir"):
            judge(server, cache=str(file))(batch_of(grey([9])))
        monkeypatch.setattr("flowrl.core.files.os.replace", full)
        with pytest.raises(RunError, match="cannot write .*: No space left on device"):
            judge(server, cache=str(folder))(batch_of(grey([9])))
    assert not [left for left in folder.rglob("*") if left.is_file()]
