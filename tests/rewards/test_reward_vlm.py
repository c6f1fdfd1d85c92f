"""The judge over HTTP, against a server that looks at the images, is slow, refuses, lies and
breaks off."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_server import Act, Seen, Server, brightness, says, serving
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.types import Reward, RewardBatch
from rewards.vlm import vlm
from rewards.win_rate import win_rate

LEVELS = [200, 40, 120, 80, 160]  # of grey images; JPEG keeps a flat image to a level or so


def grey(levels: list[int], size: int = 16) -> Tensor:
    return (torch.tensor(levels, dtype=torch.float32) / 255)[:, None, None, None].expand(
        -1, 3, size, size
    )


def batch_of(
    images: Tensor, prompts: list[str] | None = None, group: list[int] | None = None
) -> RewardBatch:
    count = len(images)
    groups = torch.tensor(group if group is not None else [0] * count)
    return RewardBatch(
        images, prompts or ["a cat"] * count, groups, [{}] * count, torch.zeros(count)
    )


def judge(server: Server, **arguments: Any) -> vlm:
    return vlm(
        **{"url": server.url, "backoff": 0.01, "timeout": 20.0, "template": "point", **arguments}
    )


def rates_brightness(seen: Seen) -> Act:
    """Rate an image 1 to 5 by its brightness."""
    return says(f"cat (animal): 1\nFinal Score: {1 + 4 * brightness(seen.images[0]) / 255:.3f}")


def prefers_bright(seen: Seen) -> Act:
    a, b = map(brightness, seen.images)
    return says(f"I see two cats.\nImage {1 if a > b else 2} is better.")


def expected_points(levels: list[int]) -> Tensor:
    return torch.tensor([(1 + 4 * level / 255) / 5 for level in levels])


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=0.005, rtol=0)  # a level of JPEG is .0031


pytestmark = pytest.mark.integration


# ---------------------------------------------------------------- what is sent, and what comes back


def test_a_request_in_the_public_format() -> None:
    with serving(rates_brightness) as server:
        reward = judge(server, extra={"chat_template_kwargs": {"enable_thinking": False}})
        assert isinstance(reward, Reward)
        close(reward(batch_of(grey([200]), ["a cat, {prompt} or {}"])), expected_points([200]))
        (seen,) = server.seen
    assert {k: v for k, v in seen.body.items() if k != "messages"} == {
        "model": "UnifiedReward",
        "temperature": 0,
        "max_tokens": 4096,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    (message,) = seen.body["messages"]
    assert message["role"] == "user" and [part["type"] for part in message["content"]] == [
        "image_url",
        "text",
    ]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert (
        seen.text.endswith("Text Caption: [a cat, {prompt} or {}]")
        and seen.text.count("Final Score:") == 1
    )
    assert seen.images[0].shape == (16, 16, 3) and seen.authorization is None


def test_png_is_sent_without_loss() -> None:
    images = torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    with serving(rates_brightness) as server:
        judge(server, encoding="png")(batch_of(images))
        sent = {seen.images[0].tobytes() for seen in server.seen}
    levels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    assert sent == {image.tobytes() for image in levels}


def test_answers_find_their_images_in_any_order() -> None:
    """The later an image was sent the sooner it is answered."""

    def slow_first(seen: Seen) -> Act:
        return rates_brightness(seen)._replace(delay=0.05 * max(0, 5 - seen.number))

    with serving(slow_first) as server:
        for levels in (LEVELS, LEVELS[::-1]):
            close(judge(server)(batch_of(grey(levels))), expected_points(levels))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            single = judge(server, workers=1)(batch_of(grey(LEVELS)))
        close(single, expected_points(LEVELS))
        assert server.busiest > 1


def test_pairs_are_shown_in_order_and_keyed_by_place() -> None:
    first, second = [0, 3, 4, 1], [1, 2, 0, 3]
    with serving(prefers_bright) as server:
        reward = judge(server, template="pair_rank")
        pairs = reward.compare_pairs(
            grey(LEVELS), torch.tensor(first), torch.tensor(second), ["a"] * 4, [{}] * 4
        )
        assert pairs.tolist() == [
            float(LEVELS[i] > LEVELS[j]) for i, j in zip(first, second, strict=True)
        ]
        plain = reward.compare(grey(LEVELS)[first], grey(LEVELS)[second], ["a"] * 4, [{}] * 4)
        assert plain.dtype == torch.float32 and torch.equal(plain, pairs)
        shown = {
            tuple(round(brightness(image) / 40) * 40 for image in seen.images)
            for seen in server.seen
        }
    assert shown == {(LEVELS[i], LEVELS[j]) for i, j in zip(first, second, strict=True)}


def test_a_point_template_compares_by_scores_and_asks_once_per_image() -> None:
    with serving(rates_brightness) as server:
        reward = win_rate(judge={"fn": "vlm", "url": server.url, "template": "point"})
        rate = reward(batch_of(grey(LEVELS)))
        assert len(server.seen) == 5
    assert rate.tolist() == [1, 0, 0.5, 0.25, 0.75]  # the rank by brightness, of 5


def test_win_rates_by_a_judge_over_http() -> None:
    with serving(prefers_bright) as server:
        batch = batch_of(grey(LEVELS + LEVELS[:2]), group=[0] * 5 + [9] * 2)
        rate = win_rate(judge={"fn": "vlm", "url": server.url})(batch)
        assert (
            len(server.seen) == 2 * (10 + 1) - 2
        )  # the pair of group 9 is one of group 0 too, in both orders
    assert rate.tolist() == [1, 0, 0.5, 0.25, 0.75, 1, 0]


def test_a_judge_of_the_first_place_makes_ties() -> None:
    with serving(lambda seen: says("Image 1 is better.")) as server:
        options = {"fn": "vlm", "url": server.url}
        assert win_rate(judge=options)(batch_of(grey(LEVELS))).tolist() == [0.5] * 5
        assert win_rate(judge=options, swap=False)(batch_of(grey(LEVELS))).tolist() == [
            1,
            0.75,
            0.5,
            0.25,
            0,
        ]


def test_yes_no_by_log_probs() -> None:
    with serving(lambda seen: says("Yes", {"Yes": -0.3, "No": -1.4})) as server:
        score = judge(server, template="yes_no")(batch_of(grey([1])))
        body = server.seen[0].body
    assert float(score) == pytest.approx(0.7502601, abs=1e-7)  # sigmoid(1.1)
    assert (body["logprobs"], body["top_logprobs"], body["max_tokens"], body["temperature"]) == (
        True,
        20,
        1,
        0,
    )


def test_consistency_averages_all_pairs_of_cells() -> None:
    """Cells alike -> Yes with p = .9, else .2; of the 6 pairs of this 2x2 grid one is alike."""

    def alike(seen: Seen) -> Act:
        p = 0.9 if abs(brightness(seen.images[0]) - brightness(seen.images[1])) < 5 else 0.2
        return says("?", {"Yes": math.log(p), "No": math.log(1 - p)})

    grid = torch.cat(
        [torch.cat([grey([40]), grey([200])], 3), torch.cat([grey([120]), grey([40])], 3)], 2
    )
    flat = grey([99], size=33)  # 3 columns of 11; rows of 16, one pixel is left over
    with serving(alike) as server:
        reward = judge(server, template="consistency")
        assert float(reward(batch_of(grid, ["cats in a 2x2 grid"]))) == pytest.approx(
            (0.9 + 5 * 0.2) / 6
        )
        assert all(
            seen.images[0].shape == seen.images[1].shape == (16, 16, 3) for seen in server.seen
        )
        assert float(reward(batch_of(flat, ["2 × 3 cats"]))) == pytest.approx(0.9)
        assert server.seen[-1].images[0].shape == (16, 11, 3)
        reward.check_record({"prompt": "a 3x1 strip"}, "line 1")
        for prompt in ("two cats", "cats at 512x512", "a 1x1 grid"):
            with pytest.raises(DataError, match=r"line 1: .* grid of 2 to 16 cells"):
                reward.check_record({"prompt": prompt}, "line 1")


def test_inside_a_running_event_loop() -> None:
    async def notebook(reward: vlm) -> Tensor:
        return reward(batch_of(grey(LEVELS)))

    with serving(rates_brightness) as server:
        close(asyncio.run(notebook(judge(server))), expected_points(LEVELS))


def test_an_image_with_nan_is_refused_and_no_images_are_fine() -> None:
    with serving(rates_brightness) as server:
        with pytest.raises(DataError, match="NaN"):
            judge(server)(batch_of(grey([1]) * math.nan))
        assert judge(server)(batch_of(grey([]), [])).shape == (0,) and not server.seen


# ------------------------------------------------------------------------------------------- faults

OK = says("Final Score: 5")
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
    "content is a list": says(None)._replace(
        payload=OK.payload.replace(b'"Final Score: 5"', b"[1]")
    ),
}


def patience(fault: str) -> float:
    return 1.0 if fault in ("slow", "drip") else 20.0  # a busy machine is not a fault


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_is_tried_again(fault: str) -> None:
    with serving(lambda seen: FAULTS[fault] if seen.number < 1 else OK) as server:
        reward = judge(server, timeout=patience(fault), retries=1)
        assert float(reward(batch_of(grey([9])))) == 1
        assert len(server.seen) == 2 and reward.counts == {"asked": 1, "cached": 0, "failed": 0}
        assert all(seen.body == server.seen[0].body for seen in server.seen)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lasting_fault_is_missing_and_counted(fault: str) -> None:
    def act(seen: Seen) -> Act:
        return FAULTS[fault] if brightness(seen.images[0]) < 60 else rates_brightness(seen)

    with serving(act) as server:
        reward = judge(server, timeout=patience(fault), retries=1, max_failed=0.2)
        with pytest.warns(
            UserWarning, match=r"1 of 5 questions failed: image 1, prompt 'a cat': .*tried 2 times"
        ):
            score = reward(batch_of(grey(LEVELS)))
        assert len(server.seen) == 6 and reward.counts == {"asked": 5, "cached": 0, "failed": 1}
    assert score.isnan().tolist() == [False, True, False, False, False]
    close(score[[0, 2, 3, 4]], expected_points([200, 120, 80, 160]))


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
    with serving(lambda seen: answer) as server:
        reward = judge(server, template=template, max_failed=1.0)
        with pytest.warns(
            UserWarning, match="2 of 2 questions failed: image [01], prompt 'a cat': (no|a rating)"
        ):
            assert bool(reward(batch_of(grey([1, 99]))).isnan().all())
        assert len(server.seen) == 2


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
        with pytest.raises(
            RunError, match="HTTP 400: 'bad'"
        ):  # not tried again: the request itself is refused
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

    async def sleep(seconds: float, *rest: Any) -> None:
        pauses.append(seconds)
        await true_sleep(0)

    monkeypatch.setattr("rewards.vlm.client.asyncio.sleep", sleep)
    with serving(lambda seen: Act(b"", 503) if seen.number < 7 else OK) as server:
        judge(server, backoff=1.0, retries=7)(batch_of(grey([9])))
    for pause, least in zip(
        pauses, [1, 2, 4, 8, 16, 32, 60], strict=True
    ):  # doubled, at most a minute
        assert least <= pause <= min(60, 1.25 * least)
    pauses.clear()
    asks = Act(b"", 429, headers=(("Retry-After", "30"),))
    with serving(lambda seen: asks if seen.number < 1 else OK) as server:
        judge(server, backoff=1.0)(batch_of(grey([9])))
    assert len(pauses) == 1 and 30 <= pauses[0] <= 37.5


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_than_so_many_at_once(workers: int) -> None:
    with serving(lambda seen: OK._replace(delay=0.1)) as server:
        judge(server, workers=workers)(batch_of(grey(list(range(0, 240, 20)))))
        assert len(server.seen) == 12 and server.busiest == workers


# ---------------------------------------------------------------------------------------- the cache


def test_the_same_question_is_asked_once(tmp_path: Path) -> None:
    with serving(rates_brightness) as server:
        twice = judge(server)(batch_of(grey([200, 40, 200])))
        assert len(server.seen) == 2 and twice[0] == twice[2]
        cached = judge(server, cache=str(tmp_path / "answers"))
        first = cached(batch_of(grey(LEVELS)))
        assert len(server.seen) == 7 and cached.counts == {"asked": 5, "cached": 0, "failed": 0}
        again = judge(server, cache=str(tmp_path / "answers"))
        assert torch.equal(again(batch_of(grey(LEVELS[::-1]))), first.flip(0))
        assert len(server.seen) == 7 and again.counts == {"asked": 0, "cached": 5, "failed": 0}
    files = sorted((tmp_path / "answers").rglob("*"))
    assert [file.suffix for file in files if file.is_file()] == [".json"] * 5
    offline = vlm(url="http://127.0.0.1:9", template="point", cache=str(tmp_path / "answers"))
    assert torch.equal(offline(batch_of(grey(LEVELS))), first)


def test_log_probs_are_kept_too(tmp_path: Path) -> None:
    with serving(lambda seen: says("Yes", {"Yes": -0.3, "No": -1.4})) as server:
        scores = [
            judge(server, template="yes_no", cache=str(tmp_path))(batch_of(grey([9])))
            for _ in range(2)
        ]
        assert len(server.seen) == 1 and scores[0] == scores[1] > 0.75


def test_another_question_is_asked_anew(tmp_path: Path) -> None:
    wording = tmp_path / "wording.txt"
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
            judge(server, cache=str(tmp_path / "c"), **options)(batch_of(grey([9])))
            assert len(server.seen) == count
        judge(server, cache=str(tmp_path / "c"))(batch_of(grey([9]), ["a dog"]))
        judge(server, cache=str(tmp_path / "c"))(batch_of(grey([10])))
        assert len(server.seen) == 9
        judge(server, cache=str(tmp_path / "c"), workers=1, retries=0)(batch_of(grey([9, 10])))
        assert len(server.seen) == 9
    with serving(prefers_bright) as server:
        for first, second in [(1, 99), (99, 1)]:  # the order of a pair is part of the question
            pair = judge(server, template="pair_rank", cache=str(tmp_path / "c"))
            assert pair.compare(grey([first]), grey([second]), ["a"], [{}]).tolist() == [
                float(first > second)
            ]
        assert len(server.seen) == 2


def test_failures_are_not_kept_and_torn_files_are_asked_again(tmp_path: Path) -> None:
    with serving(lambda seen: says("?") if seen.number == 0 else OK) as server:
        reward = judge(server, cache=str(tmp_path), max_failed=1.0)
        with pytest.warns(UserWarning, match="1 of 1"):
            assert bool(reward(batch_of(grey([9]))).isnan())
        assert not [file for file in tmp_path.rglob("*") if file.is_file()]
        assert float(reward(batch_of(grey([9])))) == 1
        (file,) = (file for file in tmp_path.rglob("*") if file.is_file())
        whole = file.read_bytes()
        for torn in (
            b"",
            whole[:-5],
            b"[]",
            b'{"text": 1}',
            whole.replace(b"Score: 5", b"Score: 9"),
            b"\xff",
        ):
            asked = len(server.seen)
            file.write_bytes(torn)
            assert float(reward(batch_of(grey([9])))) == 1
            assert len(server.seen) == asked + 1 and file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_stops(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        serving(lambda seen: OK) as server,
        pytest.raises(RunError, match="cache: cannot write .*: Not a directory"),
    ):
        judge(server, cache=str(tmp_path / "file"))(batch_of(grey([9])))


def test_a_full_disk_stops_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flowrl.core.files.os.replace", full)
    with (
        serving(lambda seen: OK) as server,
        pytest.raises(RunError, match="cannot write .*: No space left on device"),
    ):
        judge(server, cache=str(tmp_path))(batch_of(grey([9])))
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


# ---------------------------------------------------------------------------- the key and the probe

KEY = "sk-very/secret+0123456789"


def reply_with_key(status: int) -> Callable[[Seen], Act]:
    return lambda seen: Act(f"{'x' * 190} wrong key: {seen.authorization}".encode(), status)


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_the_key_is_sent_and_never_told(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY + "\n")
    caplog.set_level(logging.DEBUG)
    with serving(reply_with_key(status)) as server, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        reward = judge(
            server, api_key_env="JUDGE_KEY", cache=str(tmp_path), retries=1, max_failed=0.5
        )
        with pytest.raises(RunError) as error:
            reward(batch_of(grey([9])))
        server.act = lambda seen: (
            OK if brightness(seen.images[0]) > 100 else reply_with_key(400)(seen)
        )
        reward(batch_of(grey([9, 200])))
        server.act = lambda seen: says(
            f"{seen.authorization} is what you sent. Final Score: {seen.number % 9}"
        )
        with pytest.warns(UserWarning, match="'Bearer \\*\\*\\* is what you sent"):
            judge(server, api_key_env="JUDGE_KEY", cache=str(tmp_path), max_failed=1.0)(
                batch_of(grey([2, 3, 4, 5, 6]))
            )
        server.models = Act(f"wrong key: {KEY}".encode(), 401)
        with pytest.raises(RunError, match="401") as refused:
            reward.probe()
        assert {seen.authorization for seen in server.seen} == {f"Bearer {KEY}"}
    text = "".join(traceback.format_exception(error.value)) + "".join(
        traceback.format_exception(refused.value)
    )
    text += caplog.text + "".join(str(w.message) for w in told) + repr(vars(reward))
    text += "".join(file.read_text() for file in tmp_path.rglob("*.json"))
    assert "Final Score" in text and "wrong key: ***" in text
    assert "secret" not in text and "sk-very" not in text


@pytest.mark.parametrize("key", ["", " ", "schlüssel", "two\nlines"])
def test_a_missing_key_is_found_when_it_is_made(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(
        ConfigError, match="api_key_env: expected printable ASCII in the .* JUDGE_KEY; it is"
    ) as error:
        vlm(api_key_env="JUDGE_KEY")
    assert "lines" not in str(error.value) and "schl" not in str(error.value)
    with pytest.raises(
        ConfigError, match="the name of an environment variable, got something else"
    ) as error:
        vlm(api_key_env=KEY)  # the key itself was written where its variable's name belongs
    assert "secret" not in str(error.value)


def test_the_probe() -> None:
    with serving(rates_brightness) as server:
        judge(server).probe()
        with pytest.raises(RunError, match="offers no model 'other', only UnifiedReward"):
            judge(server, model="other").probe()
        for act, message in [
            (Act(b"starting", 503), "HTTP 503: 'starting'"),
            (Act(b"<html>"), "expected a list of models"),
            (Act(b'{"data": 3}'), "expected a list of models"),
            (Act(b'{"data": []}'), "only none"),
            (Act(b"", drop=True), "Is the server up"),
        ]:
            server.models = act
            with pytest.raises(RunError, match=message):
                judge(server).probe()
        url = server.url
    with pytest.raises(RunError, match=rf"no answer from {url}/v1: ConnectError"):
        vlm(url=url).probe()
