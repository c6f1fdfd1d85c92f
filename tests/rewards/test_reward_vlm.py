"""The judge over HTTP: what it is sent, which answers belong to which images, what is kept, servers
that are slow, refuse, lie and break off, and a key that nobody reads."""

from __future__ import annotations

import asyncio
import gzip
import logging
import math
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_server import (
    LEVELS,
    OPTIONS,
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

from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.types import Reward
from rewards._common.scorer import to_pil
from rewards._judge.accepting import recall
from rewards._judge.ask import Job, Judge
from rewards.questions import questions
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
    """The message names the reward that has the cache; a file stands where the folder should be."""

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    file, folder, images = tmp_path / "file", tmp_path / "folder", grey([9])
    file.write_text("")
    asked = [{"id": 1, "question": "Is it grey?", "tuple": "x (y)", "parents": []}]
    batch = batch_of(images)._replace(meta=[{"prompt": "p", "questions": asked}])
    with serving(lambda seen: says("Yes." if "grey" in seen.text else "Final Score: 5")) as server:
        given: dict[str, Any] = {"url": server.url, "cache": str(file)}
        own = Judge("rewards.rubric", **given, extra=None, **OPTIONS)
        jobs = [Job("it", (0,), "Is it?")]
        calls: dict[str, Callable[[], Any]] = {
            "vlm": lambda: judge(server, cache=str(file))(batch),
            "questions": lambda: questions(protocol="dpg", **given)(batch),
            "rubric": lambda: own.ask(to_pil(images), jobs, lambda answer: 1.0),
        }
        for name, call in calls.items():
            with pytest.raises(
                RunError, match=f"^rewards.{name}: cache: cannot write .*: Not a dir"
            ):
                call()
        monkeypatch.setattr("flowrl.core.files.os.replace", full)
        with pytest.raises(RunError, match="cannot write .*: No space left on device"):
            judge(server, cache=str(folder))(batch)
    assert not [left for left in folder.rglob("*") if left.is_file()]


# ------------------------------------------------------------------------------------------- faults


OK = says("Final Score: 5")
LIST = OK.payload.replace(b'"Final Score: 5"', b"[1]")
FAULTS = {
    "429": Act(b"slow down", 429),
    "429 with a pause": Act(b"slow down", 429, headers=(("Retry-After", "0.01"),)),
    "500": Act(b"out of memory", 500),
    "503": Act(b"", 503),
    "slow": OK._replace(delay=2.0),
    "drip": OK._replace(drip=0.02),  # never a second without a byte, but 4 s in all
    "drop": Act(b"", drop=True),
    "torn JSON": Act(OK.payload[:-40]),
    "no JSON": Act(b"<html>busy</html>"),
    "no choices": Act(b'{"choices": []}'),
    "not a dict": Act(b"[1]"),
    "too long": Act(b" " * 2**24 + OK.payload),
    "compressed": Act(gzip.compress(OK.payload), headers=(("Content-Encoding", "gzip"),)),
    "content is a list": Act(LIST),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_tried_again_and_then_missing(fault: str) -> None:
    """Image 0 is answered at the second try, image 1 never."""
    asked: dict[int, list[Seen]] = {0: [], 1: [], 2: []}

    def act(seen: Seen) -> Act:
        image = (200, 40, 120).index(round(brightness(seen.images[0]) / 40) * 40)
        asked[image].append(seen)
        fails = image == 1 or (image == 0 and len(asked[0]) == 1)
        return FAULTS[fault] if fails else rates_brightness(seen)

    patience = 1.0 if fault in ("slow", "drip") else 20.0  # a busy machine is not a fault
    with serving(act) as server:
        reward = judge(server, timeout=patience, retries=1, max_failed=0.4)
        said = r"1 of 3 questions failed: image 1, prompt 'a cat': .*tried 2 times"
        with pytest.warns(UserWarning, match=said):
            score = reward(batch_of(grey([200, 40, 120])))
        assert reward.counts == {"asked": 3, "cached": 0, "failed": 1}
    assert [len(rows) for rows in asked.values()] == [2, 2, 1]
    assert all(rows[0].body == rows[-1].body for rows in asked.values())
    assert score.isnan().tolist() == [False, True, False]
    close(score[[0, 2]], expected_points([200, 120]))


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        ("point", says("A fine cat.")),
        ("point", says(None)),
        ("point", says("Final Score: 7")),
        ("yes_no", says("Yes")),  # a server that was not asked for log-probs, or has none
        ("yes_no", says("Yes", {"Yes": -0.1})),
        ("level", says("5", {"5": -0.1, "4": -2.5})),
        ("rating", says('{"rating": 5.5}')),
    ],
)
def test_an_unreadable_answer_is_missing_and_not_asked_again(template: str, answer: Act) -> None:
    said = "2 of 2 questions failed: image [01], prompt 'a cat': (no|a rating)"
    with serving(lambda seen: answer) as server:
        reward = judge(server, template=template, max_failed=1.0)
        with pytest.warns(UserWarning, match=said):
            assert bool(reward(batch_of(grey([1, 99]))).isnan().all())
        assert len(server.seen) == 2


def test_too_many_failures_stop_soon_and_name_the_first() -> None:
    with serving(lambda seen: Act(b"out of memory", 500)) as server:
        reward = judge(server, retries=0, max_failed=0.1, workers=2)
        with pytest.raises(RunError) as error:
            reward(batch_of(grey(list(range(0, 200, 2))), [f"cat {i}" for i in range(100)]))
        assert 11 <= len(server.seen) <= 13  # the eleventh is one too many; two workers
    message = str(error.value)
    assert "at least 90% of 100 questions; 11 failed so far, the first: image " in message
    assert "HTTP 500: 'out of memory' (tried 1 times)" in message


def test_a_dead_server_stops_without_waiting_for_all() -> None:
    """With one failure too many, questions that still wait for their next try are given up."""
    with serving(lambda seen: Act(b"", drop=True) if seen.number else Act(b"bad", 400)) as server:
        reward = judge(server, max_failed=0.0, backoff=1000.0, workers=4)
        # not tried again: the request itself is refused
        with pytest.raises(RunError, match="HTTP 400: 'bad'"):
            reward(batch_of(grey(LEVELS)))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_that_all_would_meet_stops_at_once(status: int) -> None:
    with serving(lambda seen: Act(b"no", status)) as server:
        with pytest.raises(RunError, match=rf"refuses: HTTP {status}: 'no'. Check `url`, `model`"):
            judge(server, max_failed=1.0, workers=1)(batch_of(grey(LEVELS)))
        assert len(server.seen) == 1


def test_pauses_grow_and_follow_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    true_sleep = asyncio.sleep

    async def sleep(seconds: float, *rest: object) -> None:
        pauses.append(seconds)
        await true_sleep(0)

    monkeypatch.setattr("rewards._judge.client.asyncio.sleep", sleep)
    with serving(lambda seen: Act(b"", 503) if seen.number < 7 else OK) as server:
        judge(server, backoff=1.0, retries=7)(batch_of(grey([9])))
    doubled = [1, 2, 4, 8, 16, 32, 60]  # at most a minute
    for pause, least in zip(pauses, doubled, strict=True):
        assert least <= pause <= min(60, 1.25 * least)
    pauses.clear()
    asks = Act(b"", 429, headers=(("Retry-After", "30"),))
    with serving(lambda seen: asks if seen.number < 1 else OK) as server:
        judge(server, backoff=1.0)(batch_of(grey([9])))
    assert len(pauses) == 1 and 30 <= pauses[0] <= 37.5


# ---------------------------------------------------------------------------- the key and the probe


KEY = "sk-very/secret+0123456789"


def reply_with_key(status: int) -> Callable[[Seen], Act]:
    return lambda seen: Act(f"{'x' * 190} wrong key: {seen.authorization}".encode(), status)


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_the_key_is_sent_and_never_told(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def mostly_fine(seen: Seen) -> Act:
        return OK if brightness(seen.images[0]) > 100 else reply_with_key(400)(seen)

    def repeats(seen: Seen) -> Act:
        return says(f"{seen.authorization} is what you sent. Final Score: {seen.number % 9}")

    monkeypatch.setenv("JUDGE_KEY", KEY + "\n")
    caplog.set_level(logging.DEBUG)
    options = {"api_key_env": "JUDGE_KEY", "cache": str(tmp_path)}
    with serving(reply_with_key(status)) as server, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        # in errors and warnings
        reward = judge(server, retries=1, max_failed=0.5, **options)
        with pytest.raises(RunError) as error:
            reward(batch_of(grey([9])))
        server.act = mostly_fine
        reward(batch_of(grey([9, 200])))
        # in answers
        server.act = repeats
        with pytest.warns(UserWarning, match="'Bearer \\*\\*\\* is what you sent"):
            judge(server, max_failed=1.0, **options)(batch_of(grey([2, 3, 4, 5, 6])))
        # in the probe
        server.models = Act(f"wrong key: {KEY}".encode(), 401)
        with pytest.raises(RunError, match="401") as refused:
            reward.probe()
        assert {seen.authorization for seen in server.seen} == {f"Bearer {KEY}"}
    parts = traceback.format_exception(error.value) + traceback.format_exception(refused.value)
    parts += [caplog.text, repr(vars(reward)), *(str(w.message) for w in told)]
    parts += [file.read_text() for file in tmp_path.rglob("*.json")]
    text = "".join(parts)
    assert "Final Score" in text and "wrong key: ***" in text
    assert "secret" not in text and "sk-very" not in text


def test_a_missing_key_is_found_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "api_key_env: expected printable ASCII in the .* JUDGE_KEY; it is"
    for key in ("", " ", "schlüssel", "two\nlines"):
        monkeypatch.setenv("JUDGE_KEY", key)
        with pytest.raises(ConfigError, match=said) as error:
            vlm(api_key_env="JUDGE_KEY")
        assert "lines" not in str(error.value) and "schl" not in str(error.value)
    # the key itself was written where its variable's name belongs
    said = "the name of an environment variable, got something else"
    with pytest.raises(ConfigError, match=said) as error:
        vlm(api_key_env=KEY)
    assert "secret" not in str(error.value)


def test_the_probe() -> None:
    # a model list that would unpack to 64 MiB
    unpacks = Act(gzip.compress(b" " * 2**26, 1), headers=(("Content-Encoding", "gzip"),))
    with serving(rates_brightness) as server:
        judge(server).probe()
        with pytest.raises(RunError, match="offers no model 'other', only UnifiedReward"):
            judge(server, model="other").probe()
        for act, message in (
            (Act(b"starting", 503), "HTTP 503: 'starting'"),
            (Act(b"<html>"), "expected a list of models"),
            (Act(b'{"data": 3}'), "expected a list of models"),
            (Act(b'{"data": []}'), "only none"),
            (Act(b"", drop=True), "Is the server up"),
            (Act(b" " * (2**24 + 1)), "an answer of more than 16777216 bytes"),
            (unpacks, "expected an answer that is not compressed, got 'gzip'"),
        ):
            server.models = act
            with pytest.raises(RunError, match=message):
                judge(server).probe()
        url = server.url
    with pytest.raises(RunError, match=rf"no answer from {url}/v1: ConnectError"):
        vlm(url=url).probe()
